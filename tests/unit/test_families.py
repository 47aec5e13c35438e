"""Families of targets, each through the whole job: capture, training, export, decoding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import FAMILIES
from tiny_run import make_run

from dflash import evaluate
from dflash.export import export
from dflash.prepare import load_tokenizer

ASKED = "w10 w11 w12"


@pytest.mark.parametrize("family", (*FAMILIES, "qwen3_moe"))
def test_a_family_trains_exports_and_decodes_without_loss(family: str, tmp_path: Path) -> None:
    """The trained document is the target's own answer, so the exported drafter must draft it."""
    prompt_text = f"w4 {ASKED} w5"
    run = make_run(tmp_path, family=family, train_steps=60)
    run.target.self_test()
    export(run.checkpoint, tmp_path / "out")

    prompt = load_tokenizer(run.target.directory)(prompt_text)["input_ids"]
    assert len(prompt) == 5
    question = tmp_path / "asked.jsonl"
    messages = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": "w20"}]
    question.write_text(json.dumps({"messages": messages}) + "\n")
    where = ["--data", str(question), "--target", str(run.target.directory)]
    arguments = [str(tmp_path / "out"), *where, "--max-new-tokens", "40"]
    result = evaluate.run(evaluate.parse_arguments(arguments))
    assert result["lossless"]["different"] == 0
    assert result["tau"] > 1.5, "a drafter that learned this text by heart accepts most of it"
