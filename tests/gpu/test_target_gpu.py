"""The target on a GPU: fused layers against the stock ones, and slots that leave while it runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from tiny import tiny_config
from whole_run import launch, losses, write_config

from dflash import fast_layers as fast
from dflash import layer_functions
from dflash.arch import TargetArch
from dflash.experts import add_mixture, has_grouped
from dflash.feed import byte_sum
from dflash.outbox import Leaving, Outbox
from dflash.spans import Spans
from dflash.step import Batch
from dflash.target import Target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TAPS = (0, 2, 3)
LENGTHS = (200, 130, 130, 64, 33, 5)


def save(directory: Path, family: str) -> Path:
    """Large enough for the kernels: heads of 64."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(family)
    config.hidden_size, config.intermediate_size, config.head_dim = 256, 512, 64
    if family.startswith("qwen3_5"):
        config.linear_key_head_dim = config.linear_value_head_dim = 64
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.rand_like(parameter) * 0.5)
            elif parameter.ndim == 2:
                parameter.mul_(3)
    model.save_pretrained(directory)
    return directory


def load(path: Path, dtype: torch.dtype, device: str) -> Target:
    arch = TargetArch.read(path)
    return Target.load(path, arch, TAPS, dtype=dtype, device=device, micro_batch_tokens=512)


def documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 96, (n,), generator=generator) for n in LENGTHS]


def capture(target: Target, docs: list[torch.Tensor]) -> torch.Tensor:
    """[T, (n_taps + 1) * H] on the CPU, float32."""
    rows, hidden = sum(map(len, docs)), target.arch.hidden_size
    options = {"dtype": target.dtype, "device": target.device}
    all_TF = torch.full((rows, len(TAPS) * hidden), torch.nan, **options)
    vlh_TH = torch.full((rows, hidden), torch.nan, **options)
    target.capture(docs, all_TF, vlh_TH)
    return torch.cat((all_TF, vlh_TH), dim=1).float().cpu()


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5"])
def test_fused_layers_are_as_near_to_float32_as_the_stock_ones(family: str, tmp_path: Path) -> None:
    path, docs = save(tmp_path, family), documents()
    exact = capture(load(path, torch.float32, "cpu"), docs)  # transformers' layers, in plain torch
    target = load(path, torch.bfloat16, "cuda")
    assert target.fast is not None
    target.self_test()
    fused = capture(target, docs)
    alone = torch.cat([capture(target, [doc]) for doc in docs])
    target.fast = None
    stock = capture(target, docs)
    print(f"{family}: fused {distance(fused, exact):.2e}, stock {distance(stock, exact):.2e}")
    assert distance(fused, exact) < 1.25 * distance(stock, exact) < 5e-2
    assert distance(fused, alone) < 5e-2


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5", "qwen3_5_moe"])
def test_the_host_queues_a_slots_forward_without_waiting(family: str, tmp_path: Path) -> None:
    target, docs = load(save(tmp_path, family), torch.bfloat16, "cuda"), documents()
    assert target.fast is not None
    first = capture(target, docs)  # kernels are compiled, and fla's tuned
    states = [torch.empty(sum(LENGTHS), 256 * n, dtype=target.dtype, device="cuda") for n in (3, 1)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    target.capture(docs, *states)
    torch.cuda.set_sync_debug_mode("default")
    assert distance(torch.cat(states, dim=1).float().cpu(), first) < 2e-2


def test_the_recurrence_kernel_equals_the_torch_one(tmp_path: Path) -> None:
    pytest.importorskip("fla")
    target, docs = load(save(tmp_path, "qwen3_5"), torch.bfloat16, "cuda"), documents()
    assert target.fast is not None and target.fast.recurrence is fast.fla_rule
    kernel = capture(target, docs)
    target.fast.recurrence = fast.torch_rule
    assert distance(kernel, capture(target, docs)) < 2e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("eps", [None, 1e-6])
def test_the_short_convolution_s_kernel(dtype: torch.dtype, eps: float | None) -> None:
    """Of a slice of channels, as the layers call it; heads that are no power of two too."""
    from dflash.conv_kernel import short_conv  # there is no Triton where this is only collected

    for lengths, channels, size in (([133, 60], 128, 64), ([5], 96, 48), ([64, 64, 1], 256, 128)):
        rows = fast.Rows(lengths, max(lengths), torch.empty(0, device="cuda"))
        x_NC = torch.randn(sum(lengths), channels + 64, device="cuda", dtype=dtype)[:, 32:-32]
        weight_CW = torch.randn(channels, 4, device="cuda", dtype=dtype)
        got = rows.packed(short_conv(x_NC, rows, weight_CW, size, eps))
        want = rows.packed(layer_functions.short_conv(x_NC, rows, weight_CW, size, eps))
        torch.testing.assert_close(got, want)


def arguments(name: str, rows: fast.Rows, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Of calls at odd sizes, with inputs as a layer has them: parts of wider rows and heads."""
    tokens, places = len(rows.from_N), rows.into_BL.numel()

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=dtype)

    if name == "rms_norm":
        for size, offset in itertools.product((96, 576, 5120, 8256), (0.0, 1.0)):
            yield draw(tokens, size + 16)[:, 8:-8], draw(size), 1e-6, offset
    if name == "silu_times":
        for size in (17, 1000, 4096):
            yield draw(tokens, size), draw(tokens, size)
    for heads, size, turned in ((5, 64, 64), (3, 80, 80), (1, 96, 40), (8, 128, 128), (4, 256, 64)):
        part, other = draw(tokens, heads, 2 * size).split(size, dim=-1)
        weight_E, table = draw(size), draw(places, 1, 2, turned)[: rows.into_BL.shape[1]]
        if name == "norm_rotate":
            turn = part, rows.into_BL, table[:, :, 0], table[:, :, 1]
            yield from (turn, (*turn, weight_E, 1e-5, 0.0), (*turn, weight_E, 1e-6, 1.0))
        x_RGE = draw(places, heads, size + 8)[..., :-8]
        if name == "gated":
            yield x_RGE, rows.from_N, other
        if name == "gated_norm":
            yield x_RGE, rows.from_N, other, weight_E, 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [(133, 60, 1), (64, 64), (5,)], ids=str)
@pytest.mark.parametrize("name", ["rms_norm", "silu_times", "gated", "gated_norm", "norm_rotate"])
def test_each_kernel_is_its_plain_function(
    name: str, lengths: tuple[int, ...], dtype: torch.dtype
) -> None:
    """To the last place of bfloat16, for each rounds once; padding included."""
    from dflash import layer_kernels

    rows = fast.Rows(lengths, max(lengths), torch.empty(0, device="cuda"))
    kernel, plain = getattr(layer_kernels, name), getattr(layer_functions, name)
    rtol = 8e-3 if dtype == torch.bfloat16 else 2e-6
    for call in arguments(name, rows, dtype):
        torch.testing.assert_close(kernel(*call), plain(*call), atol=1e-5, rtol=rtol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_halves_of_one_tensor_and_weighted_rows(dtype: torch.dtype) -> None:
    """What a mixture of experts asks of the kernels, to the last place of bfloat16."""
    from dflash import layer_kernels

    rtol = 8e-3 if dtype == torch.bfloat16 else 2e-6
    for tokens, picks, size in ((70, 2, 24), (33, 8, 1500), (1, 1, 2048)):
        halves = torch.randn(tokens, 2 * size, device="cuda").to(dtype).chunk(2, dim=-1)
        torch.testing.assert_close(
            layer_kernels.silu_times(*halves),
            layer_functions.silu_times(*halves),
            atol=1e-5,
            rtol=rtol,
        )
        rows_SH = torch.randn(tokens * picks, size, device="cuda").to(dtype)
        place_NP = torch.randperm(tokens * picks, device="cuda").view(tokens, picks)
        weight_NP = torch.rand(tokens, picks, device="cuda").to(dtype)
        found = [torch.ones(tokens, size, device="cuda").to(dtype) for _ in "kp"]
        layer_kernels.add_weighted(found[0], rows_SH, place_NP, weight_NP)
        layer_functions.add_weighted(found[1], rows_SH, place_NP, weight_NP)
        torch.testing.assert_close(*found, atol=1e-5, rtol=rtol)


@pytest.mark.parametrize("shared", [False, True])
def test_a_mixture_in_bfloat16_is_as_near_to_float32_as_the_stock_one(shared: bool) -> None:
    """The experts that the router has chosen in bfloat16, one by one in float32. No sync."""
    from dflash import layer_kernels

    torch.manual_seed(0)
    kind = transformers.Qwen3_5MoeTextConfig if shared else transformers.Qwen3MoeConfig
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "vocab_size": 99}
    config = kind(**sizes, num_experts_per_tok=2, num_hidden_layers=4, num_attention_heads=4)
    mlp = transformers.AutoModel.from_config(config).layers[0].mlp.cuda().bfloat16()
    for parameter in mlp.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3
    x_NH = torch.randn(300, 64, device="cuda").bfloat16()
    with torch.inference_mode():
        _, weight_NP, expert_NP = mlp.gate(x_NH)
        stock_NH = mlp(x_NH[None])[0]
        assert has_grouped(mlp, x_NH)
        state_NH = torch.zeros_like(x_NH)
        torch.cuda.set_sync_debug_mode("error")
        add_mixture(state_NH, x_NH, mlp, layer_kernels)
        torch.cuda.set_sync_debug_mode("default")
        mlp.float()
        wide_NH = x_NH.float()
        exact_NH = torch.zeros_like(wide_NH)
        for token, pick in itertools.product(range(300), range(2)):
            expert = expert_NP[token, pick]
            gate, up = (mlp.experts.gate_up_proj[expert] @ wide_NH[token]).chunk(2)
            out_H = mlp.experts.down_proj[expert] @ (F.silu(gate) * up)
            exact_NH[token] += weight_NP[token, pick].float() * out_H
        if shared:
            exact_NH += mlp.shared_expert(wide_NH) * mlp.shared_expert_gate(wide_NH).sigmoid()
    assert (state_NH - exact_NH).norm() < 1.2 * (stock_NH - exact_NH).norm()
    assert (stock_NH - exact_NH).norm() < 0.02 * exact_NH.norm()


def test_slots_leave_whole_and_in_order_while_the_next_is_made() -> None:
    """Five slots through two buffers, each copy later than the next slot's states; pages hold each
    one's rows, sums and finiteness are right."""

    def pages() -> Batch:
        def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype).pin_memory()

        return Batch(
            all_TF=zeros(512, 96),
            vlh_TH=zeros(512, 32),
            ids_T=zeros(512, dtype=torch.int64),
            lm_T=zeros(512, dtype=torch.bool),
            lens_D=zeros(4, dtype=torch.int64),
            pos_T=zeros(512, dtype=torch.int64),
            total_tok=zeros(dtype=torch.int64),
        )

    slots = [pages() for _ in range(5)]
    outbox = Outbox(slots[0], "cuda", Spans(None, "cuda"))
    wanted: list[tuple[torch.Tensor, torch.Tensor]] = []

    def check(sent: Leaving, seq: int) -> None:
        sent.copied.synchronize()
        assert sent.arrived() and sent.finite == (seq != 3)
        assert sent.sums == [int(byte_sum(x)) % 2**64 for x in wanted[seq]]

    sent = None
    for seq, slot in enumerate(slots):
        total_tok = 512 - 37 * seq
        all_TF, vlh_TH = outbox.states()
        assert vlh_TH is not None
        all_TF.copy_(torch.randn(512, 96, device="cuda"))
        vlh_TH.copy_(torch.randn(512, 32, device="cuda"))
        if seq == 3:
            vlh_TH[total_tok - 1, 31] = torch.nan
        wanted.append((all_TF[:total_tok].cpu(), vlh_TH[:total_tok].cpu()))
        if sent is not None:
            check(sent, seq - 1)
        with torch.cuda.stream(outbox._stream):
            torch.cuda._sleep(200_000_000)  # 0.1 s
        sent = outbox.send(slot, total_tok, seq)
    assert sent is not None
    check(sent, 4)
    for slot, (all_TF, vlh_TH) in zip(slots, wanted, strict=True):
        assert torch.equal(slot.all_TF[: len(all_TF)], all_TF)
        assert slot.vlh_TH is not None
        assert torch.equal(slot.vlh_TH[: len(vlh_TH)].view(torch.int16), vlh_TH.view(torch.int16))
        assert not slot.all_TF[len(all_TF) :].any()


def test_a_whole_run_on_the_gpu_is_the_cpus(tmp_path: Path) -> None:
    """Both halves there, float32, with the last hidden state: the curves agree to rounding."""
    curves = []
    for name, device in (("cpu", {}), ("gpu", {"device": "cuda"})):
        config = write_config(
            tmp_path,
            name,
            target=device,
            drafter={"head_dim": 16, **device},
            step={"mode": "graph"} if device else {},
            train={"steps": 12, "loss": "kl"},
        )
        launch(tmp_path, "run", config)
        curves.append(losses(tmp_path, name))
    for (step_a, *a), (step_b, *b) in zip(*curves, strict=True):
        assert step_a == step_b
        assert all(math.isclose(x, y, rel_tol=1e-2) for x, y in zip(a, b, strict=True)), (a, b)
