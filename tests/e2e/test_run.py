"""The main job as its user runs it: launch.py, a target worker, a trainer, a ring, all real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from whole_run import LAUNCH, environment, launch, losses, start, write_config

from dflash.spans import read_trace


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One target, one data set and one cache for the whole file."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def undisturbed(home: Path) -> list[tuple[int, float, float]]:
    """The loss curve that every other run must repeat, bit for bit."""
    launch(home, "run", write_config(home, "undisturbed"))
    return losses(home, "undisturbed")


def ring_path(config: Path) -> Path:
    return Path(yaml.safe_load(config.read_text())["ring"]["path"])


def nothing_left(config: Path) -> bool:
    ring = ring_path(config)
    return not [p for p in ring.parent.iterdir() if p.name.startswith(ring.name)]


def children(pid: int) -> list[int]:
    out = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(word) for word in out.stdout.split()]


def child_named(launcher: int, program: str) -> int:
    for pid in children(launcher):
        if program in Path(f"/proc/{pid}/cmdline").read_bytes().decode():
            return pid
    raise AssertionError(f"no {program} under {launcher}")


def wait_for(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def steps_logged(home: Path, name: str) -> int:
    path = home / "runs" / name / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_a_run_trains_and_leaves_nothing_in_shm(home: Path) -> None:
    config = write_config(home, "plain", train={"loss": "kl"})
    output = launch(home, "run", config)
    assert "capture self-test passed" in output
    assert "step 24/24" in output and "tau_anchor" in output
    assert nothing_left(config)
    curve = losses(home, "plain")
    assert [step for step, *_ in curve] == list(range(1, 25))
    assert min(loss for _, loss, _ in curve[-6:]) < curve[0][1]
    again = launch(home, "run", config)
    assert "complete (24 of 24 steps)" in again


def test_three_target_workers_give_the_same_bits(
    home: Path, undisturbed: list[tuple[int, float, float]]
) -> None:
    config = write_config(home, "three", targets=3)
    output = launch(home, "run", config)
    assert "target_2 ready" in output
    assert losses(home, "three") == undisturbed


@pytest.mark.parametrize("victim", ["drafter_trainer.py", "target_worker.py", "launch.py"])
def test_kill_9_of_any_process_resumes_with_the_same_bits(
    home: Path, undisturbed: list[tuple[int, float, float]], victim: str
) -> None:
    name = f"killed-{victim.partition('.')[0]}"
    config = write_config(home, name)
    process = start(home, "run", config)
    wait_for(lambda: steps_logged(home, name) >= 10)
    started = children(process.pid)
    pid = process.pid if victim == "launch.py" else child_named(process.pid, victim)
    os.kill(pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    wait_for(lambda: not any(Path(f"/proc/{child}").exists() for child in started), 10)
    if victim == "launch.py":
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 1
        half = "trainer_0" if victim.startswith("drafter") else "target_0"
        assert half in output and "SIGKILL" in output
        assert nothing_left(config)
    launch(home, "run", config)
    assert losses(home, name) == undisturbed
    assert nothing_left(config)


def test_sigterm_saves_and_the_same_command_resumes(
    home: Path, undisturbed: list[tuple[int, float, float]]
) -> None:
    config = write_config(home, "stopped", run={"trace": True})
    process = start(home, "run", config)
    wait_for(lambda: steps_logged(home, "stopped") >= 3)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 143, output
    assert nothing_left(config)
    checkpoints = sorted((home / "runs/stopped/checkpoints").iterdir())
    step = json.loads((checkpoints[-1] / "meta.json").read_text())["step"]
    assert 3 <= step < 24
    launch(home, "run", config)
    assert losses(home, "stopped") == undisturbed
    traces = home / "runs/stopped/trace"
    before, after = (read_trace(traces / f"attempt_{n}" / "trainer_0.json") for n in (1, 2))
    assert sum(span.name == "step" for span in before) == step
    assert sum(span.name == "step" for span in after) == 24 - step
    assert all((traces / f"attempt_{n}" / "target_0.json").exists() for n in (1, 2))


def test_a_trainer_that_loses_its_ring_keeps_what_it_has_trained(home: Path) -> None:
    config = write_config(home, "robbed", train={"steps": 100_000, "checkpoint_every": 100_000})
    process = start(home, "run", config)
    wait_for(lambda: steps_logged(home, "robbed") >= 3)
    launch(home, "ring", "destroy", "--force", ring_path(config))
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1 and "nothing is saved" not in output, output
    kept = max((home / "runs/robbed/checkpoints").glob("step_*"))
    assert [step for step, *_ in losses(home, "robbed")] == list(range(1, int(kept.name[5:]) + 1))
    assert nothing_left(config)


def test_status_names_the_waiting_side_while_the_trainer_is_stopped(home: Path) -> None:
    config = write_config(home, "paused")
    process = start(home, "run", config)
    wait_for(lambda: steps_logged(home, "paused") >= 2)
    trainer = child_named(process.pid, "drafter_trainer.py")
    os.kill(trainer, signal.SIGSTOP)
    try:

        def ring_is_full() -> bool:
            view = status(home, config)
            states = [slot["state"] for slot in view["ring"]["slots"]]
            return states.count("READY") + states.count("READING") == len(states)

        wait_for(ring_is_full)
        text = subprocess.run(
            [sys.executable, LAUNCH, "status", home / "runs/paused"],
            env=environment(home),
            capture_output=True,
            text=True,
        )
        assert "waits for the trainer" in text.stdout, text.stdout + text.stderr
    finally:
        os.kill(trainer, signal.SIGCONT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output


def status(home: Path, config: Path) -> dict:
    result = subprocess.run(
        [sys.executable, LAUNCH, "status", ring_path(config), "--json"],
        env=environment(home),
        capture_output=True,
        text=True,
    )
    assert result.returncode in (0, 1), result.stderr
    return json.loads(result.stdout)


def test_status_of_nothing_is_one_line_and_code_3(home: Path) -> None:
    output = launch(home, "status", "/dev/shm/hs_ring_test_absent", code=3)
    assert len(output.strip().splitlines()) == 1
