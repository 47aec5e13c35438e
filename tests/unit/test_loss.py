"""Losses and their gradients against autograd on full logits in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dflash.loss import (
    TargetStates,
    decay_weights,
    default_gamma,
    distinct,
    dpace_weights,
    head_loss,
    head_loss_full,
    weighted_mean,
)

BLOCKS, SLOTS, HIDDEN, VOCAB = 5, 6, 7, 40
CPU = torch.device("cpu")


def scene(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, TargetStates, Tensor]:
    """hidden_RH (a leaf), head_VH, label_R, target in float64, and a mask with a hole. Blocks
    overlap, and masked rows read position 0."""
    torch.manual_seed(seed)
    rows = BLOCKS * SLOTS
    hidden_RH = torch.randn(rows, HIDDEN, dtype=torch.float64, requires_grad=True)
    head_VH, states_TH = torch.randn(VOCAB, HIDDEN).double(), torch.randn(25, HIDDEN).double()
    mask_AJ = torch.rand(BLOCKS, SLOTS) < 0.8
    mask_AJ[1] = False
    at_AJ = torch.tensor([2, 4, 11, 12, 19])[:, None] + torch.arange(SLOTS)
    target = TargetStates(states_TH, torch.where(mask_AJ, at_AJ, 0).flatten())
    return hidden_RH, head_VH, torch.randint(0, VOCAB, (rows,)), target, mask_AJ


def autograd_loss(
    hidden_RH: Tensor, head_VH: Tensor, label_R: Tensor, target: TargetStates | None, cap: Any
) -> tuple[Tensor, Tensor]:
    """(row losses, row nll) by torch's own loss functions over all logits."""

    def logits(x_RH: Tensor) -> Tensor:
        raw_RV = x_RH @ head_VH.T
        return raw_RV if cap is None else torch.tanh(raw_RV / cap) * cap

    nll_R = F.cross_entropy(logits(hidden_RH), label_R, reduction="none")
    if target is None:
        return nll_R, nll_R
    p = torch.distributions.Categorical(logits=logits(target.states_TH[target.at_R]))
    q = torch.distributions.Categorical(logits=logits(hidden_RH))
    return torch.distributions.kl_divergence(p, q), nll_R


@pytest.mark.parametrize("rows", [1, 7, 30, 100])
@pytest.mark.parametrize("weighting", ["decay", "dpace"])
@pytest.mark.parametrize("cap", [None, 2.5])
@pytest.mark.parametrize("kind", ["ce", "kl"])
def test_loss_and_gradient_equal_autograd(kind: str, cap: Any, weighting: str, rows: int) -> None:
    hidden_RH, head_VH, label_R, target, mask_AJ = scene()
    target = target if kind == "kl" else None

    def total(loss_R: Tensor, nll_R: Tensor) -> Tensor:
        weight_AJ = decay_weights(SLOTS + 1, None, CPU).double().expand(BLOCKS, SLOTS)
        if weighting == "dpace":
            weight_AJ = dpace_weights(nll_R.view(BLOCKS, SLOTS), mask_AJ, 0.5)
        top, bottom = weighted_mean(loss_R.view(BLOCKS, SLOTS), weight_AJ, mask_AJ)
        return top / bottom

    ours = head_loss(hidden_RH, head_VH, label_R, target, cap, rows=rows)
    theirs, nll_R = autograd_loss(hidden_RH, head_VH, label_R, target, cap)
    torch.testing.assert_close(ours.loss_R, theirs)
    torch.testing.assert_close(ours.nll_R, nll_R)
    (grad,) = torch.autograd.grad(total(ours.loss_R, ours.nll_R), hidden_RH)
    (expected,) = torch.autograd.grad(total(theirs, nll_R), hidden_RH)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-12)

    full = head_loss_full(hidden_RH, head_VH, label_R, target, cap)
    (grad,) = torch.autograd.grad(total(full.loss_R, full.nll_R), hidden_RH)
    torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-12)
    assert torch.equal(full.rank_R, ours.rank_R)


def test_the_weighted_loss_is_the_formula() -> None:
    """sum(m w l) / sum(m w), by hand over two blocks of two slots."""
    loss_AJ = torch.tensor([[1.0, 2.0], [4.0, torch.nan]])
    mask_AJ = torch.tensor([[True, True], [True, False]])
    top, bottom = weighted_mean(loss_AJ, torch.tensor([1.0, 0.5]).expand(2, 2), mask_AJ)
    assert float(top) == 1 + 2 * 0.5 + 4 and float(bottom) == 1 + 0.5 + 1


def test_a_masked_row_may_be_nan() -> None:
    """Neither the loss nor any other row's gradient notices."""
    hidden_RH, head_VH, label_R, target, mask_AJ = scene()
    keep_R = mask_AJ.flatten()
    outcomes = []
    for bad in (0.0, torch.nan):
        target.states_TH[0] = bad
        rows = head_loss(hidden_RH, head_VH, label_R, target, rows=8)
        top, _ = weighted_mean(rows.loss_R.view(BLOCKS, SLOTS), torch.ones(BLOCKS, SLOTS), mask_AJ)
        (grad,) = torch.autograd.grad(top, hidden_RH)
        outcomes.append((top, grad[keep_R]))
    assert outcomes[0][0].isfinite() and torch.equal(outcomes[0][0], outcomes[1][0])
    assert torch.equal(outcomes[0][1], outcomes[1][1])


def test_kl_is_zero_where_draft_and_target_agree() -> None:
    hidden_RH, head_VH, label_R, _, _ = scene()
    same = TargetStates(hidden_RH.detach(), torch.arange(len(hidden_RH)))
    rows = head_loss(hidden_RH, head_VH, label_R, same)
    torch.testing.assert_close(rows.loss_R, torch.zeros_like(rows.loss_R))
    (grad,) = torch.autograd.grad(rows.loss_R.sum(), hidden_RH)
    torch.testing.assert_close(grad, torch.zeros_like(grad))


def test_extreme_logits_stay_finite() -> None:
    hidden_RH = (torch.eye(4) * 300).requires_grad_()
    head_VH = torch.eye(4) * torch.tensor([1.0, -1.0, 1.0, -1.0])
    for target in (None, TargetStates(hidden_RH.detach(), torch.tensor([3, 2, 1, 0]))):
        rows = head_loss(hidden_RH, head_VH, torch.arange(4), target)
        (grad,) = torch.autograd.grad(rows.loss_R.sum(), hidden_RH)
        assert rows.loss_R.isfinite().all() and grad.isfinite().all()
    assert head_loss(hidden_RH, head_VH, torch.arange(4)).loss_R[1] > 300


@pytest.mark.parametrize("kind", ["ce", "kl"])
def test_bfloat16_is_near_float32(kind: str) -> None:
    """bf16 logits round to 3 digits; the losses and gradients stay within 2 %."""
    hidden_RH, head_VH, label_R, target, _ = scene()
    hidden_RH = hidden_RH.detach()
    grads, losses = [], []
    for dtype in (torch.float32, torch.bfloat16):
        leaf = hidden_RH.to(dtype).requires_grad_()
        other = TargetStates(target.states_TH.to(dtype), target.at_R) if kind == "kl" else None
        rows = head_loss(leaf, head_VH.to(dtype), label_R, other)
        assert rows.loss_R.dtype == torch.float32
        losses.append(rows.loss_R.detach())
        grads.append(torch.autograd.grad(rows.loss_R.sum(), leaf)[0].float())
    assert (losses[1] - losses[0]).norm() < 0.02 * losses[0].norm()
    assert (grads[1] - grads[0]).norm() < 0.02 * grads[0].norm()


@pytest.fixture
def head_passes(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The result shapes of all matmuls from here on."""
    shapes, mm = [], torch.mm

    def counting(a: torch.Tensor, b: torch.Tensor, **out: Any) -> torch.Tensor:
        shapes.append(torch.Size((a.shape[0], b.shape[1])))
        return mm(a, b, **out)

    monkeypatch.setattr(torch, "mm", counting)
    return shapes


@pytest.mark.parametrize(("kind", "passes"), [("ce", 2), ("kl", 3)])
def test_the_head_is_passed_over_that_often_and_never_again(
    kind: str, passes: int, head_passes: list[torch.Size]
) -> None:
    hidden_RH, head_VH, label_R, target, _ = scene()
    rows = head_loss(hidden_RH, head_VH, label_R, target if kind == "kl" else None)
    rows.loss_R.sum().backward()
    assert len(head_passes) == passes


def test_the_targets_logits_are_made_once_a_position(head_passes: list[torch.Size]) -> None:
    hidden_RH, head_VH, label_R, target, _ = scene()
    head_loss(hidden_RH, head_VH, label_R, target, rows=16)
    positions = [part.unique().numel() for part in target.at_R.split(16)]
    assert sum(positions) < len(label_R)
    assert [shape[0] for shape in head_passes[1::3]] == positions


@pytest.mark.parametrize("size", [1, 7, 40])
def test_distinct_positions_are_uniques(size: int) -> None:
    torch.manual_seed(size)
    for at_C in (torch.randint(size, (30,)), torch.zeros(5).long(), torch.arange(size).flip(0)):
        row_C, at_U, count_1 = distinct(at_C, size)
        unique_U, inverse_C = at_C.unique(return_inverse=True)
        assert torch.equal(row_C, inverse_C)
        assert count_1.dtype == torch.int32 and count_1.tolist() == [len(unique_U)]
        assert torch.equal(at_U[: len(unique_U)], unique_U)
        assert at_U.shape == at_C.shape and not at_U[len(unique_U) :].any()


def test_without_gradient_the_head_is_passed_over_once(head_passes: list[torch.Size]) -> None:
    hidden_RH, head_VH, label_R, _, _ = scene()
    with torch.no_grad():
        head_loss(hidden_RH, head_VH, label_R)
    assert len(head_passes) == 1


# ---- rank of the data token -------------------------------------------------------------------


@pytest.mark.parametrize("cap", [None, 2.5])
def test_rank_is_the_place_in_the_sorted_logits(cap: Any) -> None:
    hidden_RH, head_VH, label_R, _, _ = scene()
    order_RV = (hidden_RH @ head_VH.T).argsort(dim=-1, descending=True)
    expected = [order_RV[r].tolist().index(label) for r, label in enumerate(label_R.tolist())]
    assert head_loss(hidden_RH, head_VH, label_R, cap=cap).rank_R.tolist() == expected
    assert len(set(expected)) > 8


def test_rank_zero_means_that_argmax_is_the_data_token_even_among_ties() -> None:
    """Decoding takes the first of equal logits, so the second of them is not correct."""
    head_VH = torch.tensor([[1.0], [3.0], [3.0], [2.0], [3.0]]).bfloat16()
    hidden_RH = torch.ones(5, 1).bfloat16()
    assert (hidden_RH @ head_VH.T).argmax(dim=-1).tolist() == [1] * 5
    for loss in (head_loss, head_loss_full):
        rank = loss(hidden_RH, head_VH, torch.tensor([0, 1, 2, 3, 4])).rank_R.tolist()
        assert rank == [4, 0, 1, 3, 2]


@pytest.mark.parametrize("loss", [head_loss, head_loss_full])
def test_logits_that_are_nan_are_never_right(loss: Any) -> None:
    hidden_RH, head_VH = torch.ones(2, 4), torch.ones(6, 4)
    hidden_RH[1] = torch.nan
    assert (loss(hidden_RH, head_VH, torch.tensor([0, 0])).rank_R > 0).tolist() == [False, True]


def test_equal_logits_rank_by_id_as_a_stable_sort_puts_them() -> None:
    torch.manual_seed(0)
    hidden_RH = torch.randint(-1, 2, (60, 8)).bfloat16()  # exact in any order
    head_VH = torch.randint(-1, 2, (300, 8)).bfloat16()
    label_R = torch.randint(300, (60,))
    raw_RV = hidden_RH @ head_VH.T
    order_RV = raw_RV.argsort(dim=-1, descending=True, stable=True)
    expected = [order_RV[r].tolist().index(label) for r, label in enumerate(label_R.tolist())]
    tied_R = (raw_RV == raw_RV.gather(1, label_R[:, None])).sum(dim=-1)
    assert (tied_R > 2).sum() > 10
    for loss in (head_loss, head_loss_full):
        assert loss(hidden_RH, head_VH, label_R).rank_R.tolist() == expected


# ---- position weights -------------------------------------------------------------------------


def test_gamma_is_the_papers_at_its_block_sizes_and_between_them() -> None:
    assert [default_gamma(size) for size in (8, 10, 16)] == [4, 5, 7]
    assert default_gamma(9) == 4.5 and default_gamma(13) == 6
    sizes = [default_gamma(size) for size in range(2, 65)]
    assert sizes == sorted(sizes) and sizes[0] == 1


def test_decay_is_exponential_in_the_slot() -> None:
    weight_J = decay_weights(8, None, CPU)
    assert weight_J.tolist() == pytest.approx([math.exp(-k / 4) for k in range(7)])
    assert decay_weights(3, 2.0, CPU).tolist() == pytest.approx([1, math.exp(-0.5)])


def test_dpace_equals_its_double_sum() -> None:
    torch.manual_seed(0)
    nll_AJ = torch.rand(6, 5, dtype=torch.float64, requires_grad=True)
    mask_AJ = torch.rand(6, 5) < 0.7
    weight_AJ = dpace_weights(nll_AJ, mask_AJ, 0.3)
    assert not weight_AJ.requires_grad
    nll = nll_AJ.tolist()
    for a in range(6):
        for k in range(5):
            expected = 0.0
            for m in range(k, 5):
                chain = 1.0
                for i in range(m + 1):
                    if mask_AJ[a, i]:
                        chain *= 0.7 * math.exp(-nll[a][i]) + 0.3
                expected += chain * bool(mask_AJ[a, m])
            assert float(weight_AJ[a, k]) == pytest.approx(expected)
