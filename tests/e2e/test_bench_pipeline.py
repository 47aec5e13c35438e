"""`launch.py bench pipeline` over a tiny target: real programs, real ring, on a CPU."""

from __future__ import annotations

import json
import os
import signal
import xml.etree.ElementTree as ET
from pathlib import Path

from whole_run import launch, start, write_config

from dflash.config import load_config


def test_bench_pipeline_measures_both_halves_and_each_alone(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    out, svg, trace = tmp_path / "out.json", tmp_path / "timeline.svg", tmp_path / "trace.json"
    text = launch(
        tmp_path,
        *("bench", "pipeline", config, "train.passes_per_slot=3", "train.log_every=3"),
        *("--seconds", "2", "--alone-seconds", "1"),
        *("--json", out, "--timeline", svg, "--trace", trace),
    )
    (row,) = json.loads(out.read_text())
    alone = row["target_alone_tok_per_s"], row["drafter_alone_tok_per_s"]
    both = row["made_tok_per_s"], row["trained_tok_per_s"]
    assert row["tok_per_s"] == min(both) > 0
    assert row["ratio_to_slower_half"] == min(both) / min(alone)
    assert row["passes_per_slot"] == 3 and row["slots"] == 8 and row["loss_value"] > 0
    # Eight slots, of which the trainer's is held and two warm the target up.
    assert row["slots_counted"]["target_alone"] == 4
    assert 0 < row["busy_share"]["trainer_0"]["both"] <= 1
    assert row["busy_share"]["trainer_0"]["target alone"] == 0
    assert row["busy_share"]["target_0"]["drafter alone"] == 0
    assert 0 < row["busy_share"]["target_0"]["both"] <= 1
    assert 0 <= row["wait_share"]["target_0"] <= 1.2 and row["gb_per_s"] > 0
    assert row["gpu"] is None and row["nvidia_smi"] == {"target_0": None, "trainer_0": None}
    assert f"{row['ratio_to_slower_half']:.3f} of its slower half" in text

    labels = {text.text for text in ET.parse(svg).iter() if text.tag.endswith("text")}
    assert {"forward", "steps", "host waits"} <= labels
    names = {event["name"] for event in json.loads(trace.read_text())}
    assert {"forward", "step", "free slot", "READY slots"} <= names
    assert not load_config(config).ring.path.exists()
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_leaves_no_ring_and_no_process(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    process = start(tmp_path, "bench", "pipeline", config, "--seconds", "600")
    assert process.stdout is not None
    lines: list[str] = []
    while not any("for 600 s" in line for line in lines):
        line = process.stdout.readline()
        assert line, "".join(lines)
        lines.append(line)
    ring = load_config(config).ring.path
    assert ring.exists()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) >= 2
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "stopped; nothing is measured" in output
    assert not ring.exists()
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def test_a_user_s_mistake_is_one_line_and_code_2(tmp_path: Path) -> None:
    config = write_config(tmp_path, data={"path": "/nowhere.jsonl"})
    output = launch(tmp_path, "bench", "pipeline", config, code=2)
    assert output == "data.path: /nowhere.jsonl: no such file\n"
