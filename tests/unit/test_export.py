"""Export: the layout that other programs read, checked before it is anywhere."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import drafter_arch, load_tiny
from tiny_run import TinyRun, make_run

from dflash import export as E
from dflash import zlab
from dflash.arch import DrafterArch
from dflash.checkpoint import load, weights_digest
from dflash.config import ConfigError
from dflash.model import DFlashDrafter
from dflash.model_card import facts


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def arch(run: TinyRun) -> DrafterArch:
    return run.arch


MIXED = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 8}


def test_an_export_reads_back_as_the_same_drafter_rounded_to_bfloat16(
    run: TinyRun, tmp_path: Path
) -> None:
    said = E.export(run.path, tmp_path / "out")
    arch, weights, origin = E.read_export(tmp_path / "out")
    masters = load(run.checkpoint).weights
    assert arch == run.arch
    assert weights.keys() == masters.keys()
    for name, weight in weights.items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, masters[name].to(torch.bfloat16))
    assert origin["step"] == 3 and origin["config"]["run"]["name"] == "tiny"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "README.md",
        "config.json",
        "export.json",
        "model.safetensors",
    ]
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]
    assert "25 tensors" in said[1]


def test_config_json_has_every_key_that_a_reader_looks_for(run: TinyRun, tmp_path: Path) -> None:
    E.export(run.checkpoint, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": 4,
        "bos_token_id": 1,
        "dflash_config": {"mask_token_id": 95, "target_layer_ids": [0, 2], "block_size": 4},
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
        "num_target_layers": 4,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 96,
    }


@pytest.mark.parametrize(
    "changes",
    [
        {},
        MIXED,
        {"layer_types": ("sliding_attention",) * 2, "sliding_window": 8, "is_causal": False},
        {"attention_bias": True, "embed_scale": 5.5, "logit_softcap": 30.0},
        {"bos_token_id": None, "eos_token_ids": (2, 7)},
    ],
)
def test_transformers_reads_the_config_as_it_was_meant(
    changes: dict[str, Any], arch: DrafterArch, tmp_path: Path
) -> None:
    """Qwen3Config, the readers' parser, derives layer types and drops windows if it may."""
    from transformers import AutoConfig

    arch = replace(arch, **changes)
    raw = zlab.to_config(arch)
    zlab.check_config(raw, arch)
    assert zlab.from_config(json.loads(json.dumps(raw))) == arch
    (tmp_path / "config.json").write_text(json.dumps(raw))
    read = AutoConfig.from_pretrained(tmp_path)
    assert type(read).__name__ == "Qwen3Config"
    assert read.layer_types == list(arch.layer_types)
    assert read.sliding_window == arch.sliding_window
    assert read.rope_parameters["rope_theta"] == arch.rope_theta
    assert read.head_dim == arch.head_dim and read.block_size == arch.block_size
    assert read.dflash_config["target_layer_ids"] == list(arch.taps)
    assert getattr(read, "is_causal", None) == arch.is_causal
    if "embed_scale" in changes:
        assert read.dflash_config["input_embedding_scale"] == 5.5
        assert read.dflash_config["final_logit_softcapping"] == 30.0


@pytest.mark.parametrize("changes", [{}, MIXED, {"attention_bias": True, "num_layers": 3}])
def test_the_tensor_table_is_the_models_own_names_and_shapes(
    changes: dict[str, Any], arch: DrafterArch
) -> None:
    if "num_layers" in changes:
        changes = changes | {"layer_types": ("full_attention",) * 3}
    arch = replace(arch, **changes)
    state = DFlashDrafter(arch).state_dict()
    assert {name: tuple(weight.shape) for name, weight in state.items()} == zlab.tensor_table(arch)
    per_layer = 15 if arch.attention_bias else 11
    assert len(state) == 3 + per_layer * arch.num_layers


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", ["Qwen3ForCausalLM"]),
        ("block_size", 8),
        ("dflash_config.block_size", 8),
        ("dflash_config.mask_token_id", 96),
        ("dflash_config.target_layer_ids", [1, 3]),
        ("dflash_config.target_layer_ids", [0, 4]),
        ("layer_types", ["full_attention"]),
        ("layer_types", None),
        ("sliding_window", 8),
        ("use_sliding_window", True),
        ("max_window_layers", 28),
        ("rope_theta", 1e6),
        ("rope_parameters", {"rope_theta": 1e6}),
        ("is_causal", True),
        ("draft_vocab_size", 32000),
        ("head_dim", None),
        ("rms_norm_eps", 1e-5),
    ],
)
def test_one_wrong_key_is_refused_by_name(key: str, value: Any, arch: DrafterArch) -> None:
    raw = zlab.to_config(arch)
    node = raw["dflash_config"] if key.startswith("dflash_config.") else raw
    node[key.split(".")[-1]] = value
    expected = key.split(".")[-1] if key != "rms_norm_eps" else "config"
    with pytest.raises(ConfigError, match=f"export: config.json: .*{expected}"):
        zlab.check_config(raw, arch)


def test_wrong_tensors_are_refused_by_name(arch: DrafterArch) -> None:
    right = DFlashDrafter(arch).state_dict()
    zlab.check_tensors(right, arch, "x")
    missing = {name: w for name, w in right.items() if name != "fc.weight"}
    unknown = right | {"model.norm.weight": right["norm.weight"]}
    misshapen = right | {"fc.weight": right["fc.weight"].T}
    broken = right | {"norm.weight": right["norm.weight"] * torch.nan}
    for weights, message in (
        (missing, "x: fc.weight is missing"),
        (unknown, "x: model.norm.weight is unknown"),
        (misshapen, r"x: fc.weight is \[64, 32\], should be \[32, 64\]"),
        (broken, "x: norm.weight is not finite"),
        ({}, "and 22 more"),
    ):
        with pytest.raises(ConfigError, match=message):
            zlab.check_tensors(weights, arch, "x")


OLDER = {  # Qwen3-4B-DFlash-b16
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "head_dim": 128,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
    "eos_token_id": 151645,
}
NEWER = OLDER | {  # block size inside, rope_parameters, sliding layers
    "dflash_config": OLDER["dflash_config"] | {"block_size": 8},  # type: ignore[operator]
    "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "sliding_window": 2048,
    "use_sliding_window": True,
    "is_causal": False,
}


def test_published_configs_of_both_forms_are_read() -> None:
    older = zlab.from_config(OLDER)
    assert (older.block_size, older.rope_theta, older.taps) == (16, 1e6, (1, 9, 17, 25, 33))
    assert round(older.num_parameters / 1e6) == 537
    newer = zlab.from_config({k: v for k, v in NEWER.items() if k != "rope_theta"})
    assert (newer.block_size, newer.rope_theta, newer.is_causal) == (8, 1e7, False)
    assert newer.layer_window(0) == 2048 and newer.layer_window(4) is None
    for key in ("hidden_size", "vocab_size", "block_size"):
        with pytest.raises(ConfigError, match=f"config.json has no {key}"):
            zlab.from_config({k: v for k, v in OLDER.items() if k != key})


@pytest.mark.parametrize("first", [0, 3, 5, 28])
def test_missing_layer_types_are_derived_as_qwen3_config_derives_them(first: int) -> None:
    from transformers import Qwen3Config

    raw = OLDER | {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": first}
    raw = {k: v for k, v in raw.items() if k != "layer_types"}
    assert list(zlab.from_config(raw).layer_types) == Qwen3Config(**raw).layer_types


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "llama3", "factor": 8.0}}, "llama3"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ({"hidden_act": "swigluoai"}, "hidden_act 'swigluoai'"),
        ({"output_multiplier": 0.5}, "output_multiplier"),
        ({"use_sliding_window": True, "sliding_window": 3}, "shorter than the block"),
    ],
)
def test_what_this_drafter_would_compute_otherwise_is_refused(
    changes: dict[str, Any], what: str
) -> None:
    with pytest.raises(ConfigError, match=f"{what}.*not supported in a drafter"):
        zlab.from_config(OLDER | changes)


def test_a_window_that_is_switched_off_is_no_window() -> None:
    raw = OLDER | {"sliding_window": 4096, "use_sliding_window": False}
    assert zlab.from_config(raw).sliding_window is None
    del raw["use_sliding_window"]  # off is what Qwen3Config makes of that
    assert zlab.from_config(raw).sliding_window is None


# --- the directory --------------------------------------------------------------------------------


def test_a_directory_with_other_things_is_left_alone(run: TinyRun, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty and not an earlier export"):
        E.export(run.path, tmp_path)
    file = tmp_path / "thesis.txt"
    with pytest.raises(ConfigError, match="not empty and not an earlier export"):
        E.export(run.path, file)
    with pytest.raises(ConfigError, match=r"--to: .*thesis\.txt cannot be written"):
        E.export(run.path, file / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_earlier_export_is_replaced_and_an_empty_directory_filled(
    run: TinyRun, tmp_path: Path
) -> None:
    out = tmp_path / "a" / "out"
    out.mkdir(parents=True)
    E.export(run.path, out)
    (out / "eval.json").write_text("{}")
    (tmp_path / "a" / ".out.tmp-killed").mkdir()
    E.export(run.path, out)
    assert not (out / "eval.json").exists()
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_failed_check_leaves_the_earlier_export(
    run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    E.export(run.path, out)
    before = (out / "model.safetensors").read_bytes()
    read = E.read_export

    def misread(path: Path) -> Any:
        arch, weights, origin = read(path)
        return arch, weights | {"norm.weight": weights["norm.weight"] * 2}, origin

    monkeypatch.setattr(E, "read_export", misread)
    with pytest.raises(ConfigError, match="drafts other logits"):
        E.export(run.path, out)
    assert (out / "model.safetensors").read_bytes() == before
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
def test_other_families_export_with_their_scaling(family: str, tmp_path: Path) -> None:
    run = make_run(tmp_path, family=family, arch_changes=MIXED)
    E.export(run.path, tmp_path / "out")
    assert E.read_export(tmp_path / "out")[0] == run.arch
    inner = json.loads((tmp_path / "out" / "config.json").read_text())["dflash_config"]
    if family == "gemma3":
        assert inner["input_embedding_scale"] == 32**0.5
        assert inner["final_logit_softcapping"] == 3.0
    assert "VLLM_USE_V2_MODEL_RUNNER=1" in (tmp_path / "out" / "README.md").read_text()


# --- the card -------------------------------------------------------------------------------------


def test_the_card_says_how_to_serve_and_shows_only_this_drafters_figures(
    run: TinyRun, tmp_path: Path
) -> None:
    record = run.path / "eval" / "step_3.json"
    measured = {
        "weights": weights_digest(run.checkpoint),
        "data": "held-out",
        "num_prompts": 3,
        "tau": 2.345,
        "speedup": 1.5,
        "lossless": {"identical": 2, "tie": 1, "different": 0},
        "dtype": "bfloat16",
        "max_new_tokens": 12,
        "device": "cpu",
    }
    E.export(run.path, tmp_path / "out")
    assert "Not measured" in (tmp_path / "out" / "README.md").read_text()

    record.parent.mkdir()
    record.write_text(json.dumps(measured))
    E.export(run.path, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| held-out | 3 | 2.35 | 1.50 | 2 identical, 1 explained by ties, 0 not |" in card
    speculative = '{"method": "dflash", "model": "DRAFTER", "num_speculative_tokens": 3}'
    model = run.config.target.model
    assert f"\nvllm serve {model} --speculative-config '{speculative}'" in card
    assert "--speculative-algorithm DFLASH --speculative-draft-model-path DRAFTER" in card
    assert "--speculative-num-draft-tokens 4" in card
    assert load(run.checkpoint).data_fingerprint in card and "chat template" not in card

    record.write_text(json.dumps(measured | {"weights": "of another drafter"}))
    E.export(run.path, tmp_path / "out")
    assert "Not measured" in (tmp_path / "out" / "README.md").read_text()
    record.unlink()
    record.parent.rmdir()


def test_the_command_reports_and_refuses_in_one_line(
    run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert E.main([str(run.path), "--to", str(tmp_path / "out")]) == 0
    assert "exported step 3 of tiny" in capsys.readouterr().out
    for arguments, message in (
        ([str(tmp_path), "--to", str(tmp_path / "x")], "no complete checkpoint here"),
        ([str(run.path), "--to", str(tmp_path / "x"), "--format", "gguf"], "none of z-lab"),
    ):
        assert E.main(arguments) == 2
        shown = capsys.readouterr()
        assert message in shown.err and shown.err.count("\n") == 1 and not shown.out


def test_a_directory_that_is_no_drafter_is_refused(tmp_path: Path) -> None:
    target = load_tiny(tmp_path, "qwen3")
    with pytest.raises(ConfigError, match="not an exported drafter"):
        E.read_export(tmp_path)
    with pytest.raises(ConfigError, match=r"config.json has no .*: not a DFlash drafter"):
        E.read_export(target.directory)
    assert drafter_arch(target).num_target_layers == 4


def test_the_card_says_what_the_chat_template_was_told(run: TinyRun) -> None:
    data = run.config.data.model_copy(update={"template_kwargs": {"enable_thinking": False}})
    told = facts(load(run.checkpoint), run.config.model_copy(update={"data": data}))
    assert told["chat template"] == 'told `{"enable_thinking": false}`: ask with the same'
