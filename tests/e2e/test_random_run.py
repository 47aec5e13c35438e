"""A benchmark's run: random weights in the shapes of a config.json, random documents, no files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from whole_run import launch, losses, write_config, write_conversations


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that is a config.json and nothing else: a small Qwen3.6."""
    home = tmp_path_factory.mktemp("random")
    (home / "target").mkdir()
    shapes = {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text",
        "num_hidden_layers": 4, "full_attention_interval": 4, "hidden_size": 32,
        "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "vocab_size": 120, "tie_word_embeddings": False,
    }  # fmt: skip
    (home / "target" / "config.json").write_text(json.dumps(shapes))
    return home


def config_of(home: Path, name: str) -> Path:
    return write_config(
        home,
        name,
        data={"path": "random:60x40"},
        target={"random_weights": True},
        train={"steps": 6, "loss": "kl"},
    )


def test_a_run_without_weights_or_data_says_what_it_is(home: Path) -> None:
    config = config_of(home, "first")
    output = launch(home, "run", config)
    assert "warning: RANDOM WEIGHTS" in output
    assert "RANDOM WEIGHTS" in next(x for x in output.splitlines() if "target_0 ready" in x)
    assert "nothing to eval or export" in output
    curve = losses(home, "first")
    assert len(curve) == 6

    launch(home, "run", config_of(home, "second"))  # other processes, the same weights and data
    assert losses(home, "second") == curve

    for command in (["eval", home / "runs" / "first"], ["export", home / "runs" / "first"]):
        to = ["--to", home / "out"] if command[0] == "export" else []
        refusal = launch(home, *command, *to, code=2)
        assert "its target had random weights" in refusal and len(refusal.splitlines()) == 1
    assert not (home / "out").exists()


def test_the_plan_of_such_a_run(home: Path) -> None:
    output = launch(home, "plan", config_of(home, "planned"))
    assert "60 conversations" in output and "; 0 held out" in output
    assert "mask token 119" in output
    assert "RANDOM WEIGHTS" in output.split("\nwarnings\n")[1]


def test_real_data_needs_a_tokenizer(home: Path) -> None:
    write_conversations(home / "data.jsonl")
    config = write_config(home, "texts", target={"random_weights": True})
    refusal = launch(home, "run", config, code=2).splitlines()[-1]
    assert "no usable tokenizer" in refusal and "data.path=random:" in refusal
