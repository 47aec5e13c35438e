"""The speculators layout: what it says, what it refuses, and how other people's files are read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import TinyRun, make_run

from dflash import evaluate, speculators
from dflash import export as E
from dflash.arch import DrafterArch
from dflash.checkpoint import load
from dflash.config import ConfigError
from dflash.speculators import Verifier, normal

VERIFIER = Verifier("someone/target", "Qwen3ForCausalLM")
SLIDING = {"layer_types": ("sliding_attention",) * 2, "sliding_window": 8}
MIXED = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 8}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def arch(run: TinyRun) -> DrafterArch:
    return run.arch


def test_a_speculators_export_reads_back_as_the_same_drafter(run: TinyRun, tmp_path: Path) -> None:
    said = E.export(run.path, tmp_path / "out", "speculators")
    assert "(speculators, bfloat16)" in said[0]
    arch, weights, origin = E.read_export(tmp_path / "out")
    assert arch == run.arch
    masters = load(run.checkpoint).weights
    assert weights.keys() == masters.keys()
    assert all(torch.equal(w, masters[name].to(torch.bfloat16)) for name, w in weights.items())
    assert origin["format"] == "speculators" and origin["step"] == 3


def test_config_json_has_every_key_that_a_reader_looks_for(run: TinyRun, tmp_path: Path) -> None:
    E.export(run.checkpoint, tmp_path / "out", "speculators")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        "architectures": ["DFlashDraftModel"],
        "dtype": "bfloat16",
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "transformer_layer_config": {
            "model_type": "qwen3",
            "dtype": "bfloat16",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "head_dim": 8,
            "hidden_act": "silu",
            "hidden_size": 32,
            "initializer_range": 0.02,
            "intermediate_size": 48,
            "layer_types": ["full_attention", "full_attention"],
            "max_position_embeddings": 512,
            "max_window_layers": 2,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "rope_theta": 10000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": 96,
        },
        "aux_hidden_state_layer_ids": [1, 3],
        "block_size": 4,
        "draft_vocab_size": 96,
        "mask_token_id": 95,
        "num_target_layers": 4,
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,
        "target_hidden_size": None,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 3,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {
                "name_or_path": run.config.target.model,
                "architectures": ["Qwen3ForCausalLM"],
            },
        },
    }


@pytest.mark.parametrize(
    ("changes", "non_causal"),
    [
        ({}, True),
        ({"is_causal": False}, True),
        (SLIDING, False),
        (SLIDING | {"is_causal": True}, False),
        (SLIDING | {"is_causal": False}, True),
        (MIXED | {"is_causal": False}, True),
    ],
)
def test_one_flag_says_for_both_readers_what_each_layer_is(
    changes: dict[str, Any], non_causal: bool, arch: DrafterArch
) -> None:
    """vLLM: causal = not flag, in every layer; speculators: in sliding layers only."""
    arch = replace(arch, **changes)
    raw = speculators.to_config(arch, VERIFIER)
    speculators.check_config(raw, arch)
    assert raw["sliding_window_non_causal"] is non_causal
    for index, kind in enumerate(arch.layer_types):
        vllm = not raw["sliding_window_non_causal"]
        own = kind == "sliding_attention" and not raw["sliding_window_non_causal"]
        assert vllm == own == arch.layer_causal(index)
    read = speculators.from_config(json.loads(json.dumps(raw)))
    assert read == normal(arch)
    for index in range(arch.num_layers):
        assert read.layer_causal(index) == arch.layer_causal(index)
        assert read.layer_window(index) == arch.layer_window(index)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (MIXED, r"sliding layers causal and full ones not \(vLLM would make all causal\)"),
        (MIXED | {"is_causal": True}, "full layers that are causal in the block"),
        ({"is_causal": True}, "full layers that are causal in the block"),
        ({"embed_scale": 5.5}, r"no key for a scaled embedding \(times 5.5\)"),
        ({"logit_softcap": 30.0}, r"no key for soft-capped logits \(at 30.0\)"),
    ],
)
def test_what_the_layout_cannot_say_is_refused_with_the_cure(
    changes: dict[str, Any], what: str, arch: DrafterArch
) -> None:
    with pytest.raises(ConfigError, match=f"--format speculators: .*{what}.*: use --format z-lab"):
        speculators.to_config(replace(arch, **changes), VERIFIER)


def test_the_command_refuses_in_one_line_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path, arch_changes=MIXED)
    capsys.readouterr()
    out = tmp_path / "out"
    assert E.main([str(run.path), "--to", str(out), "--format", "speculators"]) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1 and "use --format z-lab" in shown.err and not shown.out
    assert not out.exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("speculators_model_type", "eagle3"),
        ("aux_hidden_state_layer_ids", [0, 2]),
        ("block_size", 8),
        ("draft_vocab_size", 32000),
        ("mask_token_id", 96),
        ("mask_token_id", None),
        ("sample_from_anchor", True),
        ("sliding_window_non_causal", False),
        ("sliding_window_non_causal", None),
        ("transformer_layer_config.layer_types", ["full_attention"]),
        ("transformer_layer_config.sliding_window", 4096),
        ("transformer_layer_config.use_sliding_window", True),
        ("transformer_layer_config.max_window_layers", 28),
        ("transformer_layer_config.rms_norm_eps", 1e-5),
        ("speculators_config.verifier", {}),
        ("speculators_config.default_proposal_method", "tree"),
        ("speculators_config.proposal_methods", []),
    ],
)
def test_one_wrong_key_is_refused_by_name(key: str, value: Any, arch: DrafterArch) -> None:
    raw = speculators.to_config(arch, VERIFIER)
    *outer, name = key.split(".")
    (raw[outer[0]] if outer else raw)[name] = value
    caught_by = {
        "block_size": "speculative_tokens",
        "proposal_methods": "speculative_tokens",
        "rms_norm_eps": "config",
    }
    named = caught_by.get(name, name)
    with pytest.raises(ConfigError, match=f"export: config.json: .*{named}"):
        speculators.check_config(raw, arch)


@pytest.mark.parametrize("key", speculators.LAYER_KEYS)
def test_a_gap_in_the_layer_config_is_refused_by_name(key: str, arch: DrafterArch) -> None:
    raw = speculators.to_config(arch, VERIFIER)
    del raw["transformer_layer_config"][key]
    with pytest.raises(ConfigError, match=f"export: config.json: .*{key}"):
        speculators.check_config(raw, arch)


@pytest.mark.parametrize("changes", [{}, SLIDING, MIXED | {"is_causal": False}])
def test_a_config_that_leaves_out_qwen3s_defaults_is_read(
    changes: dict[str, Any], arch: DrafterArch
) -> None:
    """As older transformers make speculators write it: the difference from the class."""
    from transformers import Qwen3Config

    arch = replace(arch, head_dim=128, num_key_value_heads=32, num_attention_heads=32, **changes)
    raw = speculators.to_config(arch, VERIFIER)
    default = Qwen3Config().to_dict()
    layer = raw["transformer_layer_config"]
    diff = {key: value for key, value in layer.items() if default.get(key) != value}
    assert "head_dim" not in diff and "num_key_value_heads" not in diff
    read = speculators.from_config(raw | {"transformer_layer_config": diff})
    assert replace(read, bos_token_id=1, eos_token_ids=(2,)) == normal(arch)


def test_the_defaults_are_qwen3_configs_own() -> None:
    from transformers import Qwen3Config

    known = Qwen3Config().to_dict()
    wrong = {k: known[k] for k, v in speculators.QWEN3_DEFAULTS.items() if known[k] != v}
    assert not wrong


def test_other_peoples_files_are_read_or_refused_by_name(arch: DrafterArch) -> None:
    raw = speculators.to_config(arch, VERIFIER)
    for changes, message in (
        ({"speculators_model_type": "eagle3"}, "of kind 'eagle3', not dflash"),
        ({"draft_vocab_size": 32}, "draft_vocab_size: a reduced vocabulary"),
        ({"sample_from_anchor": True}, "sample_from_anchor: not a DFlash drafter"),
        ({"sliding_window_non_causal": None}, "no sliding_window_non_causal"),
        ({"aux_hidden_state_layer_ids": None}, "no aux_hidden_state_layer_ids"),
        ({"mask_token_id": None}, "no mask_token_id"),
    ):
        with pytest.raises(ConfigError, match=message):
            speculators.from_config(raw | changes)
    without = {k: v for k, v in raw.items() if k not in ("num_target_layers", "block_size")}
    read = speculators.from_config(without)
    assert (read.num_target_layers, read.block_size) == (3, 8)


def test_the_card_names_the_server_that_reads_it(run: TinyRun, tmp_path: Path) -> None:
    E.export(run.path, tmp_path / "out", "speculators")
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"\nvllm serve {run.config.target.model} --speculative-config" in card
    assert "SGLang reads z-lab's layout only" in card
    assert "sglang.launch_server" not in card
    assert "`vllm serve DRAFTER`" not in card  # vLLM takes no verifier from a local path


def test_eval_takes_the_directory_and_measures_what_zlabs_layout_measures(
    run: TinyRun, tmp_path: Path
) -> None:
    results = []
    for name in E.FORMATS:
        E.export(run.path, tmp_path / name, name)
        options = ["--prompts", "2", "--max-new-tokens", "8", "--json", str(tmp_path / "out.json")]
        assert evaluate.main([str(tmp_path / name), *options]) == 0
        results.append(json.loads((tmp_path / "out.json").read_text()))
    zlab, other = results
    assert zlab["weights"] == other["weights"] and zlab["tau"] == other["tau"]
