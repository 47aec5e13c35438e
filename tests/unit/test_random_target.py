"""A target with random weights: the same in every process, tame, and of no use to anybody."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import FAMILIES, HIDDEN, VOCAB, tiny_config

from dflash.arch import TargetArch, shipped_config
from dflash.config import ConfigError
from dflash.random_target import random_ends, random_model
from dflash.target import Target
from dflash.target_files import load_ends, resolve_config

ROOT = Path(__file__).parents[2]


def directory_of(tmp_path: Path, family: str) -> Path:
    """Nothing but a config.json."""
    tiny_config(family).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    return tmp_path


def digest(model: Any) -> str:
    sha = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.float().numpy().tobytes())
    return sha.hexdigest()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_ends_are_those_of_the_model(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    directory = directory_of(tmp_path, family)
    arch, model = TargetArch.read(directory), random_model(directory, dtype, "cpu")
    ends = load_ends(directory, arch, dtype, "cpu", random_weights=True)
    assert torch.equal(ends.embed_VH, model.get_input_embeddings().weight)
    assert torch.equal(ends.head_VH, model.get_output_embeddings().weight)
    assert torch.equal(ends.norm_H, model.get_decoder().norm.weight)
    ids_T = torch.arange(7)
    states = model(input_ids=ids_T[None], output_hidden_states=True).hidden_states
    assert torch.equal(ends.embed(ids_T), states[0][0])
    assert ends.embed_VH.dtype == dtype and ends.embed_VH.shape == (VOCAB, HIDDEN)


def test_two_processes_draw_the_same_weights(tmp_path: Path) -> None:
    directory = directory_of(tmp_path, "qwen3_5")
    code = (
        "import sys; sys.path[:0] = ['tests/unit']; from test_random_target import *; "
        f"print(digest(random_model({str(directory)!r}, torch.bfloat16, 'cpu')))"
    )
    torch.manual_seed(7)  # whatever was drawn before
    here = digest(random_model(directory, torch.bfloat16, "cpu"))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split()[-1] == here, done.stderr


def test_another_dtype_has_the_same_numbers_rounded(tmp_path: Path) -> None:
    directory = directory_of(tmp_path, "qwen3_5")
    exact = dict(random_model(directory, torch.float32, "cpu").named_parameters())
    for name, parameter in random_model(directory, torch.bfloat16, "cpu").named_parameters():
        if parameter.ndim > 1:
            assert torch.equal(parameter, exact[name].bfloat16()), name


def test_no_two_matrices_are_alike(tmp_path: Path) -> None:
    model = random_model(directory_of(tmp_path, "llama"), torch.float32, "cpu")
    firsts = [p.flatten()[:8] / p.norm() for p in model.parameters() if p.ndim > 1]
    assert len({tuple(first.tolist()) for first in firsts}) == len(firsts) > 20


@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_and_vectors_are_those_of_a_loaded_model(tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    model = random_model(directory_of(tmp_path, family), torch.bfloat16, "cpu")
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    buffers = dict(loaded.named_buffers())
    assert any("inv_freq" in name for name in buffers)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]) and buffer.dtype == buffers[name].dtype, name
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name


def test_states_stay_tame_and_rounding_is_not_amplified(tmp_path: Path) -> None:
    """48 layers in bfloat16 stay within a few bits of float32, and the self-test passes."""
    config = tiny_config("qwen3_5")
    config.num_hidden_layers, config.hidden_size = 48, 64
    config.layer_types = config.layer_types * 12
    config.save_pretrained(tmp_path)
    arch = TargetArch.read(tmp_path)
    ids = torch.arange(60)[None]
    states = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = random_model(tmp_path, dtype, "cpu")
        with torch.inference_mode():
            output = model(input_ids=ids, output_hidden_states=True, use_cache=False)
        states[dtype] = output.hidden_states[-2].float()
        assert 0.5 < states[dtype].pow(2).mean().sqrt() < 2
        assert 0.5 < output.logits.float().std() < 2
    error = states[torch.bfloat16] - states[torch.float32]
    assert error.norm() < 0.1 * states[torch.float32].norm()
    target = Target(model, arch, (1, 24, 45), tmp_path)
    target.ends = lambda: random_ends(arch, torch.bfloat16, "cpu")  # type: ignore[method-assign]
    target.self_test()


def test_a_config_of_no_causal_lm_is_one_line(tmp_path: Path) -> None:
    raw = tiny_config("llama").to_dict() | {"model_type": "vit"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="not a causal LM that transformers knows") as caught:
        random_model(tmp_path, torch.float32, "cpu")
    assert "\n" not in str(caught.value)


# --- the shipped shapes ---------------------------------------------------------------------------

SHIPPED = {
    "Qwen/Qwen3.6-27B": 26_895_998_464,
    "Qwen/Qwen3.6-35B-A3B": 34_660_610_688,
    "Qwen/Qwen3-8B": 8_190_735_360,
}


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_shapes_have_the_published_size(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    directory = resolve_config(name)
    assert directory == shipped_config(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    assert sum(p.numel() for p in model.parameters()) == SHIPPED[name]


def test_a_drafter_for_experts_is_as_wide_as_the_published_one() -> None:
    """z-lab's for this target has 6144; an expert has 512."""
    directory = shipped_config("Qwen/Qwen3.6-35B-A3B")
    assert directory is not None and TargetArch.read(directory).intermediate_size == 6144


def test_a_name_without_shipped_shapes_needs_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="not in the local cache"):
        resolve_config("nobody/no-such-model")


def test_a_cached_model_wins_over_the_shipped_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    found = tmp_path / "config.json"
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args: str(found))
    assert resolve_config("Qwen/Qwen3-8B") == tmp_path
