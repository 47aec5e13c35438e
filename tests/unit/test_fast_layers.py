"""fast_layers.py, with layer_functions.py, against transformers' own layers: every layer, every
family that it knows."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from tiny import HIDDEN, LAYERS, VOCAB, load_tiny, tiny_config
from torch import nn

from dflash import fast_layers as fast
from dflash import layer_functions
from dflash.arch import TargetArch
from dflash.experts import add_mixture, has_grouped
from dflash.target import Target, place

KNOWN = ("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe")


def known_config(family: str) -> Any:
    if family != "qwen2":
        return tiny_config(family)
    sizes = tiny_config("qwen3").to_dict()
    sizes.pop("model_type")
    return transformers.Qwen2Config(**sizes)


@pytest.fixture(params=KNOWN)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    """With norms that are not all one, biases that are not zero, and logits with opinions."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(known_config(request.param))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.rand_like(parameter) * 0.5)
            elif parameter.ndim == 2:
                parameter.mul_(5)
    model.save_pretrained(tmp_path)
    arch = TargetArch.read(tmp_path)
    return Target.load(tmp_path, arch, (0, 2, LAYERS - 1), dtype=torch.float32)


def test_every_layer_is_the_stock_one_s(target: Target) -> None:
    """Two documents of different lengths, packed here and padded there."""
    layers = fast.FastLayers.of(target.backbone, target.arch)
    assert layers is not None
    ids_BL = torch.randint(3, VOCAB, (2, 37))
    valid_BL = torch.arange(37) < torch.tensor([37, 20])[:, None]
    stock: list[torch.Tensor] = []
    for layer in target.layers:
        layer.register_forward_hook(
            lambda m, a, out: stock.append(out[0] if isinstance(out, tuple) else out)
        )
    with torch.inference_mode():
        last = target.backbone(input_ids=ids_BL, use_cache=False).last_hidden_state
        for index, state_NH in layers([ids_BL[0], ids_BL[1, :20]], 37):
            torch.testing.assert_close(state_NH, stock[index][valid_BL], atol=2e-5, rtol=2e-4)
            state_NH = state_NH.clone()
        torch.testing.assert_close(
            layers.final_norm(state_NH), last[valid_BL], atol=2e-5, rtol=2e-4
        )
    assert index == LAYERS - 1


def test_rows_go_both_ways() -> None:
    rows = fast.Rows([2, 4, 1], 4, torch.empty(0))
    x_N = torch.arange(7.0)
    assert rows.padded(x_N).tolist() == [[0, 1, 1, 1], [2, 3, 4, 5], [6, 6, 6, 6]]
    assert torch.equal(rows.packed(rows.padded(x_N)), x_N)
    full = fast.Rows([3, 3], 3, torch.empty(0))
    x_N = torch.arange(6.0)
    assert torch.equal(full.padded(x_N), x_N.view(2, 3))
    assert torch.equal(full.packed(full.padded(x_N)), x_N)
    assert torch.equal(x_N[full.into_BL], x_N.view(2, 3))


def test_neighbours_leave_in_one_copy() -> None:
    out_TH = torch.full((12, 1), -1.0)
    place(torch.arange(9.0)[:, None], [(0, 2), (2, 3), (8, 4)], out_TH)
    assert out_TH.flatten().tolist() == [0, 1, 2, 3, 4, -1, -1, -1, 5, 6, 7, 8]


def test_a_target_that_runs_on_them_captures_the_same(target: Target) -> None:
    docs = [torch.randint(3, VOCAB, (n,)) for n in (60, 33, 5, 18, 1)]

    def capture(vlh: bool) -> list[torch.Tensor]:
        all_TF, vlh_TH = torch.full((120, 3 * HIDDEN), -7.0), torch.full((120, HIDDEN), -7.0)
        target.capture(docs, all_TF, vlh_TH if vlh else None)
        return [all_TF, vlh_TH]

    want = capture(vlh=True)
    target.fast = fast.FastLayers.of(target.backbone, target.arch)
    target.self_test()
    for got, wanted in zip(capture(vlh=True), want, strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-4)
    stopped_TF, untouched_TH = capture(vlh=False)
    torch.testing.assert_close(stopped_TF, want[0], atol=2e-5, rtol=2e-4)
    assert (untouched_TH == -7).all()


def test_layers_above_the_last_tap_do_not_run(tmp_path: Path) -> None:
    target = load_tiny(tmp_path, "qwen3", taps=(0, 1))
    target.fast = fast.FastLayers.of(target.backbone, target.arch)
    for layer in target.layers[2:]:
        layer.mlp.forward = None  # would be a TypeError
    target.capture([torch.arange(3, 20)], torch.empty(17, 2 * HIDDEN))


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe"])
def test_experts_are_grouped_where_a_grouped_matmul_takes_them(family: str) -> None:
    """Others run as they are: in another dtype, as quantised ones, or as a list of modules."""
    torch.manual_seed(0)
    mlp = transformers.AutoModel.from_config(known_config(family)).layers[0].mlp
    for parameter in mlp.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3
    x_NH, state_NH = torch.randn(2, 19, HIDDEN)
    with torch.inference_mode():
        want_NH = state_NH + mlp(x_NH[None])[0]
        add_mixture(state_NH, x_NH, mlp, layer_functions)
    torch.testing.assert_close(state_NH, want_NH, atol=1e-5, rtol=1e-4)
    assert has_grouped(mlp, x_NH) and not has_grouped(mlp, x_NH.bfloat16())
    mlp.experts = nn.ModuleList()
    assert not has_grouped(mlp, x_NH)


@pytest.mark.parametrize("family", ["gemma3", "falcon_h1"])
def test_other_families_keep_their_own_layers(family: str, tmp_path: Path) -> None:
    target = load_tiny(tmp_path, family)
    assert fast.FastLayers.of(target.backbone, target.arch) is None


def test_sliding_windows_keep_their_own_layers(tmp_path: Path) -> None:
    config = tiny_config("qwen3")
    config.layer_types = ["full_attention", "sliding_attention"] * 2
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    arch = TargetArch.read(tmp_path)
    assert fast.FastLayers.of(model.get_decoder(), arch) is None


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_another_activation_keeps_its_own_layers(family: str, tmp_path: Path) -> None:
    config = tiny_config(family)
    config.hidden_act = "gelu"
    model = transformers.AutoModelForCausalLM.from_config(config)
    arch = load_tiny(tmp_path, family).arch
    assert fast.FastLayers.of(model.get_decoder(), arch) is None


def test_projections_that_are_more_than_a_matrix_keep_their_own_layers(tmp_path: Path) -> None:
    """As a quantised model's: a class of its own, with scales beside its weight."""

    class Scaled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    target = load_tiny(tmp_path, "qwen3")
    assert fast.FastLayers.of(target.backbone, target.arch) is not None
    mlp = target.layers[LAYERS - 1].mlp
    mlp.down_proj = Scaled(mlp.down_proj.in_features, HIDDEN, bias=False)
    assert fast.FastLayers.of(target.backbone, target.arch) is None


def test_the_short_convolution_sees_the_last_tokens_of_its_document_only() -> None:
    """By hand: one channel, window 2, weights (10, 1); documents of two tokens and of one."""
    x_NC, rows = torch.tensor([[3.0], [6.0], [-1.0]]), fast.Rows([2, 1], 2, torch.empty(0))
    weight_CW = torch.tensor([[10.0, 1.0]])
    out_BLGE = layer_functions.short_conv(x_NC, rows, weight_CW, 1, None)
    wanted = F.silu(torch.tensor([3.0, 36.0, -1.0]))
    torch.testing.assert_close(rows.packed(out_BLGE).flatten(), wanted)
    unit_BLGE = layer_functions.short_conv(x_NC, rows, weight_CW, 1, 1e-6)
    torch.testing.assert_close(rows.packed(unit_BLGE).flatten(), wanted.sign(), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("version", "good"), [("0.6.0", True), ("1.0", True), ("0.5.9", False), (None, False)]
)
def test_an_fla_that_would_ignore_the_gate_is_not_used(
    monkeypatch: pytest.MonkeyPatch, version: str | None, good: bool
) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    assert fast.has_fla() is good
