"""The gradient through the frozen head in float8: what its rounding does, against the exact one."""

from __future__ import annotations

import pytest
import torch
from tiny_step import make_batch, make_state

from dflash.head import FLOAT8, by_unit, dequantise, quantise
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


def test_the_copy_of_the_head_is_near_it() -> None:
    _, head_VH, _, _ = scene()
    copy_VH = dequantise(by_unit(head_VH)).T
    assert 0.01 < (copy_VH - head_VH).norm() / head_VH.norm() < 0.04


@pytest.mark.parametrize("kind", ["ce", "kl"])
def test_the_loss_is_the_exact_one_and_its_gradient_is_near(kind: str) -> None:
    hidden_RH, head_VH, label_R, target = scene()
    hidden_RH.requires_grad_()
    inputs = (hidden_RH, head_VH, label_R, target if kind == "kl" else None)
    ours = head_loss(*inputs, rows=16, float8=by_unit(head_VH))
    exact, full = head_loss(*inputs, rows=16), head_loss_full(*inputs)
    for name in ("loss_R", "nll_R", "rank_R"):
        assert torch.equal(getattr(ours, name), getattr(exact, name)), name
    grads = [torch.autograd.grad(each.loss_R.sum(), hidden_RH)[0] for each in (ours, full)]
    assert 0.005 < (grads[0] - grads[1]).norm() / grads[1].norm() < 0.05


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_a_step_takes_float8_from_the_config(loss: str) -> None:
    """The same loss of the same weights, another gradient."""
    figures = []
    for float8 in (False, True):
        exact = make_state(loss=loss)
        section = exact.config.step.model_copy(update={"head_float8": float8})
        config = exact.config.model_copy(update={"step": section})
        state = TrainState.around(config, exact.drafter, exact.ends)
        train_step(state, make_batch(), seq=0, pass_idx=0)
        figures.append(state.metrics.read())
    assert figures[0]["loss"] == figures[1]["loss"]
    assert figures[0]["grad_norm"] != figures[1]["grad_norm"]
    assert figures[1]["grad_norm"] == pytest.approx(figures[0]["grad_norm"], rel=0.03)
