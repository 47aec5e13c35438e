"""The frozen head in float8: what its rounding does, against the exact head."""

from __future__ import annotations

import pytest
import torch
from tiny_step import make_batch, make_state

from dflash.head import FLOAT8, Float8Head, dequantise, quantise
from dflash.loss import TargetStates, head_loss, head_loss_full
from dflash.step import TrainState, train_step

ROWS, HIDDEN, VOCAB = 40, 96, 300


def scene() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, TargetStates]:
    torch.manual_seed(0)
    head_VH, hidden_RH = torch.randn(VOCAB, HIDDEN) / 4, torch.randn(ROWS, HIDDEN)
    target = TargetStates(torch.randn(30, HIDDEN), torch.arange(ROWS) // 2 + 3)
    return hidden_RH, head_VH, torch.randint(VOCAB, (ROWS,)), target


def test_a_row_is_scaled_to_float8s_largest_number_and_rounded_to_four_bits() -> None:
    x_RK = torch.randn(20, 50) * torch.logspace(-6, 6, 20)[:, None]
    x_RK[3] = 0
    scaled = quantise(x_RK)
    assert scaled.values_RK.dtype == FLOAT8
    largest_R = scaled.values_RK.float().abs().amax(dim=1)
    assert largest_R[3] == 0 and (largest_R[largest_R > 0] == 448).all()
    normal = scaled.values_RK.float().abs() >= 2**-6
    wrong_RK = (dequantise(scaled) - x_RK).abs() / x_RK.abs()
    assert normal.sum() > 900 and wrong_RK[normal].max() <= 2**-4


def test_both_copies_of_the_head_are_near_it() -> None:
    _, head_VH, _, _ = scene()
    head = Float8Head.of(head_VH)
    for copy_VH in (dequantise(head.by_token), dequantise(head.by_unit).T):
        assert 0.01 < (copy_VH - head_VH).norm() / head_VH.norm() < 0.04


@pytest.mark.parametrize("kind", ["ce", "kl"])
def test_the_loss_is_exact_for_the_rounded_numbers_and_its_gradient_is_near(kind: str) -> None:
    hidden_RH, head_VH, label_R, target = scene()
    head = Float8Head.of(head_VH)
    rounded_RH, rounded_TH = (dequantise(quantise(x)) for x in (hidden_RH, target.states_TH))
    rounded_target = TargetStates(rounded_TH, target.at_R)
    if kind == "ce":
        target = rounded_target = None
    hidden_RH.requires_grad_()
    ours = head_loss(hidden_RH, head_VH, label_R, target, rows=16, float8=head)
    rounded = head_loss_full(rounded_RH, dequantise(head.by_token), label_R, rounded_target)
    torch.testing.assert_close(ours.loss_R, rounded.loss_R, rtol=1e-4, atol=1e-5)
    assert torch.equal(ours.rank_R, rounded.rank_R)
    exact = head_loss_full(hidden_RH, head_VH, label_R, target)
    grads = [torch.autograd.grad(each.loss_R.sum(), hidden_RH)[0] for each in (ours, exact)]
    assert 0.005 < (grads[0] - grads[1]).norm() / grads[1].norm() < 0.1


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_a_step_takes_the_float8_head_from_the_config(loss: str) -> None:
    """Not bit-equal to the exact one, and near it."""
    figures = []
    for float8 in (False, True):
        exact = make_state(loss=loss)
        section = exact.config.step.model_copy(update={"head_float8": float8})
        config = exact.config.model_copy(update={"step": section})
        state = TrainState.around(config, exact.drafter, exact.ends)
        train_step(state, make_batch(), seq=0, pass_idx=0)
        figures.append(state.metrics.read())
    assert figures[0]["loss"] != figures[1]["loss"]
    for name in ("loss", "grad_norm"):
        assert figures[1][name] == pytest.approx(figures[0][name], rel=0.03)
