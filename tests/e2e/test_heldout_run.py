"""eval.every: the run measures itself on held-out text, and trains as if it did not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from whole_run import launch, losses, write_config

NAMES = ("tau_walk", "ddtree_len@16", "ddtree_len@64")


def rows(directory: Path, name: str) -> dict[int, dict[str, Any]]:
    lines = (directory / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row for row in map(json.loads, lines)}


def say_few_tokens(path: Path) -> None:
    """A target, and so a drafter with its head, that only says eight letters (or, rarely, pad): a
    drafter that has learned nothing of it is right now and then."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    letters = AutoTokenizer.from_pretrained(path).convert_tokens_to_ids([*"ABCDEFGH"])
    mute = torch.ones(len(model.lm_head.weight), dtype=torch.bool)
    mute[letters] = False
    with torch.no_grad():
        model.lm_head.weight[mute] = 0
    model.save_pretrained(path)


def test_a_run_reports_what_eval_will_say_and_its_bits_are_the_same(tmp_path: Path) -> None:
    """Two target workers: only one of them makes the texts. 30 steps of 30 are a multiple of 12
    only by being the last."""
    train = {"steps": 30, "log_every": 2, "checkpoint_every": 30, "lr": 1e-2}
    config = write_config(tmp_path, "without", train=train)
    say_few_tokens(tmp_path / "target")
    launch(tmp_path, "run", config)
    wanted = {"prompts": 4, "max_new_tokens": 24, "threads": 1, "every": 12}
    config = write_config(tmp_path, "with", train=train, targets=2, eval=wanted)
    output = launch(tmp_path, "run", config)
    assert losses(tmp_path, "with") == losses(tmp_path, "without")

    found = rows(tmp_path, "with")
    assert [step for step, row in found.items() if "tau_walk" in row] == [12, 24, 30]
    assert output.count("tau_walk") == 3
    assert len([*(tmp_path / "cache/heldout").iterdir()]) == 1

    launch(tmp_path, "eval", tmp_path / "runs/with", "--json", tmp_path / "eval.json")
    measured = json.loads((tmp_path / "eval.json").read_text())
    assert measured["step"] == 30 and measured["walk_equal"] == measured["num_prompts"] == 4
    assert {name: found[30][name] for name in NAMES} == {name: measured[name] for name in NAMES}
    assert measured["tau"] == found[30]["tau_walk"] > 1


def test_without_heldout_prompts_it_is_refused_by_name(tmp_path: Path) -> None:
    config = write_config(tmp_path, "none", data={"heldout": 0}, eval={"every": 4})
    output = launch(tmp_path, "run", config, code=2)
    assert "eval.every 4" in output and "data.heldout" in output
    assert len(output.strip().splitlines()) == 1


@pytest.mark.parametrize(("every", "log_every"), [(5, 2), (3, 10)])
def test_its_figures_need_a_line_to_stand_in(tmp_path: Path, every: int, log_every: int) -> None:
    config = write_config(tmp_path, "odd", train={"log_every": log_every}, eval={"every": every})
    output = launch(tmp_path, "plan", config, code=2)
    assert f"eval.every {every} must be a multiple of train.log_every {log_every}" in output
