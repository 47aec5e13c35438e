"""The schema: every shipped config loads, every mistake is one line with key, rule and cure."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash.config import Config, ConfigError, dump_config, load_config, parse_config

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
SMALLEST: dict[str, Any] = {
    "run": {"name": "a"},
    "data": {"path": "x.jsonl"},
    "target": {"model": "m"},
    "train": {"steps": 5},
}


RANDOM: dict[str, Any] = {"data": {"path": "random:9x8"}, "target": {"random_weights": True}}


def config(**sections: Any) -> Config:
    raw = copy.deepcopy(SMALLEST)
    for name, value in sections.items():
        raw[name] = raw.get(name, {}) | value if isinstance(value, dict) else value
    return parse_config(raw, "x.yaml")


def refusal(**sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config(**sections)
    return str(caught.value)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_config_loads_and_survives_a_round_trip(path: Path, tmp_path: Path) -> None:
    loaded = load_config(path)
    again = tmp_path / "run.yaml"
    again.write_text(dump_config(loaded))
    assert load_config(again) == loaded


def test_there_are_configs() -> None:
    assert CONFIGS


def test_numbers_that_yaml_reads_as_text_are_numbers(tmp_path: Path) -> None:
    assert yaml.safe_load("lr: 6e-4") == {"lr": "6e-4"}  # the trap
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(SMALLEST).replace("steps: 5", "steps: 5\n  lr: 6e-4"))
    assert load_config(path).train.lr == 6e-4
    assert load_config(path, ["train.lr=1e-3"]).train.lr == 1e-3


def test_overrides_win_and_reach_new_sections(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(SMALLEST))
    loaded = load_config(path, ["ring.slots=16", "target.taps=[1, 2]", "targets=3"])
    assert (loaded.ring.slots, loaded.target.taps, loaded.targets) == (16, (1, 2), 3)


def test_template_kwargs_come_from_overrides_and_survive_a_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(SMALLEST))
    loaded = load_config(path, ["data.template_kwargs.enable_thinking=false"])
    path.write_text(dump_config(loaded))
    assert load_config(path).data.template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"train": {"stpes": 3}}, ["train.stpes", "unknown key", "train.steps"]),
        ({"lr": 3}, ["lr", "train.lr"]),
        ({"ring": {"lr": 3}}, ["ring.lr", "unknown key"]),
        ({"train": {"steps": -3}}, ["train.steps", "-3", "greater than or equal to 1"]),
        ({"ring": {"slots": "seven"}}, ["ring.slots", "'seven'", "integer"]),
        ({"ring": {"slots": 3}}, ["ring.slots 3", "at least 4"]),
        ({"targets": 4}, ["ring.slots 8", "at least 10"]),
        ({"drafter": {"layer_types": ["full"] * 5}}, ["layer_types", "'full'"]),
        ({"drafter": {"layer_types": ["full_attention"]}}, ["1 entries", "num_layers is 5"]),
        ({"drafter": {"sliding_window": 64}}, ["sliding_window has no effect"]),
        ({"drafter": {"sliding_window": 2**31}}, ["drafter.sliding_window", "1073741824"]),
        (
            {"ring": {"max_tokens": 16}, "drafter": {"block_size": 12}},
            ["block_size 12", "ring.max_tokens", "at least 24"],
        ),
        ({"run": {"name": "a/b"}}, ["run.name", "a/b"]),
        ({"train": {"lr": float("inf")}}, ["train.lr", "finite"]),
        ({"train": {"weight_decay": float("inf")}}, ["train.weight_decay", "finite"]),
        ({"supervise": {"stall_s": float("inf")}}, ["supervise.stall_s", "finite"]),
        ({"ring": {"quarantine_s": 4000}}, ["ring.quarantine_s", "3600"]),
        ({"target": {"taps": []}}, ["target.taps", "at least 1"]),
        ({"data": {"path": "random:9x8"}}, ["data.path random:9x8", "target.random_weights=true"]),
        ({"data": {"path": "random:9*8"}}, ["data", "random:COUNTxTOKENS"]),
        ({"data": {"template_kwargs": True}}, ["data.template_kwargs: True", "valid dictionary"]),
        ({"data": {"template_kwargs": {"tools": 1}}}, ["template_kwargs: tools", "not a variable"]),
        (
            {"data": {"path": "random:9x8", "template_kwargs": {"a": 1}}},
            ["template_kwargs mean nothing with random documents"],
        ),
        ({"target": {"random_weights": True, "device": "cuda"}}, ["random_weights", "alike"]),
        (RANDOM | {"eval": {"every": 10}}, ["eval.every", "random:9x8", "leave it out"]),
        (RANDOM | {"drafter": {"mask_token": 3}}, ["drafter.mask_token", "leave it out"]),
        ({"drafter": {"head_dim": 7}}, ["drafter.head_dim", "multiple of 2"]),
        ({"drafter": {"head_dim": 512}}, ["drafter.head_dim", "256"]),
    ],
)
def test_a_mistake_is_one_line_with_key_and_rule(
    sections: dict[str, Any], words: list[str]
) -> None:
    lines = refusal(**sections).splitlines()
    assert lines[0].startswith("x.yaml: ")
    for word in words:
        assert word in lines[0], lines


def test_two_mistakes_are_two_lines() -> None:
    assert len(refusal(train={"steps": 0, "lr": -1.0}).splitlines()) == 2


def test_a_missing_file_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean .*smollm2_cpu\.yaml"):
        load_config(ROOT / "configs/smollm_cpu.yaml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run: {name: 2020-13-45}", "month"),
        ("run: {name: a}\nrun: {name: b}", "'run' is set twice"),
    ],
)
def test_what_yaml_would_let_pass_or_break_at_is_one_line(
    text: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"x.yaml: not YAML: .*{words}") as caught:
        load_config(path)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "override", ["train.lr", "=3", "run.name.x=3", "train.lr=[1", "run.name=2020-13-45"]
)
def test_a_malformed_override_is_refused(override: str) -> None:
    with pytest.raises(ConfigError):
        load_config(CONFIGS[0], [override])


def test_the_last_slot_may_be_used_for_fewer_passes() -> None:
    assert config(train={"steps": 10, "passes_per_slot": 4}).end_seq == 3
    assert config(train={"steps": 12, "passes_per_slot": 4}).end_seq == 3
