"""Our kernels on a CUDA device against the plain versions."""

from __future__ import annotations

import pytest
import torch
from test_block_attention import CASES, dense_of, out_and_grads, ranges_of, tensors
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dflash.config import ConfigError
from dflash.head import Scaled, by_unit, counts_on_device
from dflash.loss import TargetStates, head_loss, head_loss_full
from dflash.optim import MasterAdamW

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def overlapping(rows: int, tokens: int) -> torch.Tensor:
    """Positions of blocks of 8 rows that start 3 apart, as sorted anchors' do; some are masked."""
    row_R = torch.arange(rows, device="cuda")
    at_R = (row_R // 8 * 3 + row_R % 8).clamp_max(tokens - 1)
    return torch.where(row_R % 11 == 0, 0, at_R)


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("kind", ["ce", "kl"])
@pytest.mark.parametrize("vocab", [50, 20_001])
def test_the_head_equals_autograd_over_all_logits(vocab: int, kind: str, cap: float | None) -> None:
    torch.manual_seed(vocab)
    rows, hidden = 37, 24
    head_VH = torch.randn(vocab, hidden, device="cuda")
    label_R = torch.randint(vocab, (rows,), device="cuda")
    states_TH = torch.randn(20, hidden, device="cuda")
    target = TargetStates(states_TH, overlapping(rows, 20)) if kind == "kl" else None
    leaf = torch.randn(rows, hidden, device="cuda", requires_grad=True)
    label_R[0] = (leaf[0] @ head_VH.T).argmax()
    weight_R = torch.rand(rows, device="cuda")
    found = []
    for function in (head_loss_full, head_loss):
        result = function(leaf, head_VH, label_R, target, cap)
        (grad,) = torch.autograd.grad((result.loss_R * weight_R).sum(), leaf)
        found.append((result.loss_R.detach(), result.nll_R, grad, result.rank_R))
    for full, ours in zip(found[0][:3], found[1][:3], strict=True):
        torch.testing.assert_close(ours, full, rtol=1e-4, atol=1e-4)
    assert found[1][3][0] == 0
    if cap is None:  # capped logits tie where tanh is 1 to the last bit; ours ranks the raw ones
        assert torch.equal(found[0][3], found[1][3])


def test_equal_logits_rank_by_id_as_a_stable_sort_puts_them() -> None:
    torch.manual_seed(0)
    hidden_RH = torch.randint(-1, 2, (60, 16), device="cuda").bfloat16()  # exact in any order
    head_VH = torch.randint(-1, 2, (9001, 16), device="cuda").bfloat16()
    label_R = torch.randint(9001, (60,), device="cuda")
    order_RV = (hidden_RH @ head_VH.T).argsort(dim=-1, descending=True, stable=True)
    expected = [order_RV[r].tolist().index(label) for r, label in enumerate(label_R.tolist())]
    assert head_loss(hidden_RH, head_VH, label_R).rank_R.tolist() == expected


def test_many_chunks_equal_one() -> None:
    torch.manual_seed(0)
    hidden_RH, head_VH = torch.randn(300, 16, device="cuda"), torch.randn(999, 16, device="cuda")
    label_R = torch.randint(999, (300,), device="cuda")
    one, many = (head_loss(hidden_RH, head_VH, label_R, rows=rows) for rows in (300, 128))
    torch.testing.assert_close(one.loss_R, many.loss_R)
    assert torch.equal(one.rank_R, many.rank_R)


@pytest.mark.parametrize("vocab", [512, 4099])
def test_the_targets_logits_of_distinct_positions_are_those_of_all(
    vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16, where a Hopper counts the distinct rows by itself: 1 % of the losses' and the
    gradients' size, since another kernel rounds otherwise."""
    torch.manual_seed(0)
    shapes = ((300, 64), (vocab, 64), (200, 64))
    leaf, head_VH, states_TH = (torch.randn(s, device="cuda").bfloat16() / 2 for s in shapes)
    leaf.requires_grad_()
    label_R, target = (
        torch.randint(vocab, (300,)).cuda(),
        TargetStates(states_TH, overlapping(300, 200)),
    )
    if torch.cuda.get_device_capability()[0] == 9:
        assert counts_on_device(head_VH)
    found = []
    for function in (head_loss, head_loss, head_loss_full):
        torch.cuda.set_sync_debug_mode("error")
        result = function(leaf, head_VH, label_R, target)
        torch.cuda.set_sync_debug_mode("default")
        found.append((result.loss_R, *torch.autograd.grad(result.loss_R.sum(), leaf)))
        monkeypatch.setattr("dflash.head.counts_on_device", lambda head_VH: False)
    for ours in found[:2]:
        for a, b in zip(ours, found[2], strict=True):
            assert (a - b).norm() < 0.01 * b.norm()


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("kind", ["ce", "kl"])
def test_the_float8_head_on_a_gpu_is_the_cpus(kind: str, cap: float | None) -> None:
    """The losses to bfloat16's rounding. The gradients' rows are scaled by a bound on the GPU and
    by their largest entry on the CPU, so both round in their own way: 2.6 % each."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no float8 products")
    torch.manual_seed(0)
    shapes = ((300, 64), (512, 64), (200, 64))
    hidden_RH, head_VH, states_TH = (torch.randn(s).bfloat16() / 2 for s in shapes)
    label_R, at_R = torch.randint(512, (300,)), overlapping(300, 200).cpu()
    found = []
    for device in ("cpu", "cuda"):
        float8 = Scaled(*(x.to(device) for x in by_unit(head_VH)))
        leaf = hidden_RH.to(device).requires_grad_()
        target = TargetStates(states_TH.to(device), at_R.to(device)) if kind == "kl" else None
        arguments = (leaf, head_VH.to(device), label_R.to(device), target, cap)
        torch.cuda.set_sync_debug_mode("error")
        result = head_loss(*arguments, rows=128, float8=float8)
        torch.cuda.set_sync_debug_mode("default")
        (grad,) = torch.autograd.grad(result.loss_R.sum(), leaf)
        found.append((result.loss_R.detach().cpu(), grad.cpu()))
    (loss_R, grad_RH), (ours_R, ours_RH) = found
    assert (ours_R - loss_R).norm() < 0.01 * loss_R.norm()
    assert (ours_RH - grad_RH).norm() < 0.06 * grad_RH.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_adamw_kernel_equals_torchs(dtype: torch.dtype) -> None:
    """Over ten steps, the fourth with a NaN: skipped by both."""
    torch.manual_seed(0)
    modules, optimizers = [], []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        modules.append(nn.Sequential(nn.Linear(60, 90), nn.LayerNorm(90)).to(device, dtype))
        optimizers.append(MasterAdamW(modules[-1], betas=(0.9, 0.95), weight_decay=0.1, clip=0.5))
    for step in range(10):
        grads = torch.randn(optimizers[0].grads.shape).to(dtype)
        if step == 3:
            grads[7] = torch.nan
        for optimizer in optimizers:
            optimizer.lr.fill_(0.01)
            optimizer.grads.copy_(grads)
            _, skipped = optimizer.step()
            assert bool(skipped) == (step == 3)
    cpu, gpu = optimizers
    assert float(cpu.count) == float(gpu.count) == 9
    torch.testing.assert_close(gpu.masters.cpu(), cpu.masters, rtol=1e-5, atol=1e-6)
    assert torch.equal(gpu.weights, gpu.masters.to(dtype))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("window", "causal"), [(None, True), (64, False)])
def test_attention_over_ranges_equals_sdpa(case: tuple, window: int | None, causal: bool) -> None:
    """Forward and all five gradients, in float32; a head of 24 is padded to 32."""
    leaves = [x.detach().cuda().requires_grad_() for x in tensors(case, 24)]
    dense = out_and_grads(leaves, dense_of(case, window, causal).cuda())
    ours, again = (out_and_grads(leaves, ranges_of(case, window, causal, "cuda")) for _ in range(2))
    for a, b, c in zip(ours, dense, again, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        assert torch.equal(a, c), "another run, other bits"


def compare_in_bf16(case: tuple, size: int, window: int | None, limit: float = 1.45) -> None:
    """With strided values, as a drafter has them. SDPA's math backend is float32 inside and rounds
    at the end alone; tiles round what they multiply: 1.2 to 1.4 times its error, in the small ones
    of heads of 256 1.453. Sums of parts that are rounded too reach 1.6."""
    mask, dense = ranges_of(case, window, True, "cuda"), dense_of(case, window, True).cuda()
    wide = [x.detach().cuda().bfloat16().float().requires_grad_() for x in tensors(case, size)]
    narrow = [x.detach().bfloat16().requires_grad_() for x in wide]
    strided = torch.stack((narrow[1].detach(), narrow[2].detach()), dim=1)[:, 1].requires_grad_()
    ours = out_and_grads([*narrow[:2], strided, *narrow[3:]], mask)
    with sdpa_kernel(SDPBackend.MATH):
        exact, theirs = out_and_grads(wide, dense), out_and_grads(narrow, dense)
    for want, a, b in zip(exact, ours, theirs, strict=True):
        assert float((a - want).norm()) <= limit * float((b - want).norm()) + 1e-6


@pytest.mark.parametrize(
    ("heads", "block", "size", "window"),
    [
        (4, 32, 128, 700),
        (4, 32, 128, None),
        (4, 16, 128, None),
        (3, 16, 64, 300),
        (8, 32, 128, 500),
    ],
)
def test_attention_in_bf16_is_nearly_as_near_to_float32_as_sdpas(
    heads: int, block: int, size: int, window: int | None
) -> None:
    """The tiles of training: over many of them."""
    compare_in_bf16((4096, 90, block, heads, (1500, 1000, 1400), 2), size, window)


def test_a_gpu_with_less_shared_memory_takes_the_next_tiling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dflash import attention_backward, attention_kernel  # they import Triton

    case = (1024, 20, 16, 4, (500, 400), 1)
    leaves = [x.detach().cuda().bfloat16().requires_grad_() for x in tensors(case, 64)]
    mask = ranges_of(case, 300, True, "cuda")
    want = out_and_grads(leaves, mask)
    huge = attention_kernel.Tiling(128, 128, 8, 9)
    tables = (attention_kernel.FORWARD, attention_backward.OF_ROWS)
    for table in tables:
        monkeypatch.setitem(table, 128, (huge, *table[128]))
    for got, expected in zip(out_and_grads(leaves, mask), want, strict=True):
        assert torch.equal(got, expected)


def test_wide_heads_train_within_90_kib_of_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 99 (Ampere's and Ada's small ones) keeps tiles less densely: 112 for 96 of a
    Hopper."""
    monkeypatch.setattr("triton.compiler.compiler.max_shared_mem", lambda device: 90 * 1024)
    compare_in_bf16((700, 9, 16, 3, (300, 350), 1), 256, 100, limit=1.5)


def test_heads_that_no_tiling_fits_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.compiler.compiler.max_shared_mem", lambda device: 1024)
    case = (100, 3, 7, 2, (90,), 0)  # no other test's: a kernel that is loaded is not asked again
    leaves = [x.detach().cuda().bfloat16().requires_grad_() for x in tensors(case, 32)]
    with pytest.raises(ConfigError, match=r"drafter.head_dim.* of 32 in bfloat16 .* has 1024"):
        out_and_grads(leaves, ranges_of(case, None, True, "cuda"))


def test_the_attention_keeps_what_torch_library_asks_of_an_operation() -> None:
    case = CASES[5]
    ranges = ranges_of(case, 64, True, "cuda")
    leaves = [x.detach().cuda().requires_grad_() for x in tensors(case, 16)]
    arguments = (*leaves, *ranges[:3], 0.25, ranges.window, ranges.causal)
    torch.library.opcheck(torch.ops.dflash.attend_blocks.default, arguments)
