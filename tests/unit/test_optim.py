"""The optimizer against torch's plain AdamW with clip_grad_norm_, and what must stay untouched."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from dflash.optim import MasterAdamW, learning_rate

OPTIONS: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1, "clip": 0.5}


def make_module(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 4, bias=False)).to(dtype)


def loss_of(module: nn.Module, step: int, scale: float = 1.0) -> torch.Tensor:
    dtype = next(module.parameters()).dtype
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step)).to(dtype)
    return module(x).square().sum() * scale


def test_updates_equal_adamw_with_clip_grad_norm() -> None:
    """Over 20 steps, some clipped and some not; norms and biases without weight decay."""
    ours, theirs = make_module(), make_module()
    optimizer = MasterAdamW(ours, **OPTIONS)
    decayed = [p for p in theirs.parameters() if p.ndim >= 2]
    plain = [p for p in theirs.parameters() if p.ndim < 2]
    reference = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        foreach=False,
    )
    clipped = 0
    for step in range(20):
        rate, scale = 0.01 * (step + 1), 10.0 ** -(step % 4)
        optimizer.lr.fill_(rate)
        for group in reference.param_groups:
            group["lr"] = rate
        optimizer.gradients(loss_of(ours, step, scale))
        loss_of(theirs, step, scale).backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        reference.step()
        reference.zero_grad()
        ours_norm, skipped = optimizer.step()
        clipped += int(norm > 0.5)
        torch.testing.assert_close(ours_norm, norm)
        assert not skipped
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert 0 < clipped < 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_gradient_changes_nothing_and_is_reported(
    dtype: torch.dtype, bad: float
) -> None:
    module = make_module(dtype)
    optimizer = MasterAdamW(module, **OPTIONS)
    optimizer.lr.fill_(0.01)
    optimizer.gradients(loss_of(module, 0))
    optimizer.step()
    before = torch.cat((optimizer.masters, optimizer.exp_avg, optimizer.exp_avg_sq))
    weights = optimizer.weights.clone()
    optimizer.gradients(loss_of(module, 1))
    module[0].weight.grad[0, 0] = bad
    _, skipped = optimizer.step()
    assert skipped
    after = torch.cat((optimizer.masters, optimizer.exp_avg, optimizer.exp_avg_sq))
    assert torch.equal(before, after) and torch.equal(weights, optimizer.weights)
    assert float(optimizer.state_dict()["step"]) == 1
    optimizer.gradients(loss_of(module, 2))
    _, skipped = optimizer.step()
    assert not skipped and not torch.equal(weights, optimizer.weights)


def test_the_caller_may_ask_for_a_skip() -> None:
    module = make_module()
    optimizer = MasterAdamW(module, **OPTIONS)
    optimizer.lr.fill_(0.01)
    before = optimizer.weights.clone()
    optimizer.gradients(loss_of(module, 0))
    _, skipped = optimizer.step(skip=torch.tensor(True))
    assert skipped and torch.equal(before, optimizer.weights)


def test_bf16_weights_follow_float32_masters() -> None:
    """Steps far below a bf16 ulp add up in the masters, and the weights are their rounding."""
    module = make_module(torch.bfloat16)
    optimizer = MasterAdamW(module, betas=(0.9, 0.95), weight_decay=0.0, clip=1.0)
    optimizer.lr.fill_(1e-5)
    start = optimizer.masters.clone()
    for step in range(50):
        optimizer.gradients(loss_of(module, step))
        optimizer.step()
        assert torch.equal(optimizer.weights, optimizer.masters.bfloat16())
    moved = (optimizer.masters - start).abs()
    assert optimizer.masters.dtype == torch.float32 and moved.max() > 2e-4
    assert torch.equal(module[0].weight.flatten(), optimizer.weights[: 6 * 9])


def test_gradients_keep_their_place_in_the_flat_buffer() -> None:
    module = make_module()
    optimizer = MasterAdamW(module, **OPTIONS)
    optimizer.gradients(loss_of(module, 0))
    matrices = [p for p in module.parameters() if p.ndim >= 2]
    vectors = [p for p in module.parameters() if p.ndim < 2]
    flat = torch.cat([p.grad.flatten() for p in (*matrices, *vectors)])
    assert torch.equal(optimizer.grads, flat) and flat.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_optimizer_gives_the_same_bits(dtype: torch.dtype) -> None:
    straight = make_module(dtype)
    one = MasterAdamW(straight, **OPTIONS)
    one.lr.fill_(0.01)
    for step in range(3):
        one.gradients(loss_of(straight, step))
        one.step()
    saved = {
        key: value.clone() if key == "step" else {name: x.clone() for name, x in value.items()}
        for key, value in one.state_dict().items()
    }
    assert saved["masters"].keys() == dict(straight.named_parameters()).keys()
    assert saved["masters"]["0.weight"].shape == (9, 6)

    resumed = make_module(dtype)
    two = MasterAdamW(resumed, **OPTIONS)
    two.lr.fill_(0.01)
    two.load_state_dict(saved)
    for step in range(3, 6):
        for module, optimizer in ((straight, one), (resumed, two)):
            optimizer.gradients(loss_of(module, step))
            optimizer.step()
    for p, q in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)
    assert torch.equal(one.masters, two.masters) and torch.equal(one.exp_avg_sq, two.exp_avg_sq)


def test_state_of_another_drafter_is_refused() -> None:
    optimizer = MasterAdamW(make_module(), **OPTIONS)
    state = optimizer.state_dict()
    state["exp_avg"] = {"other.weight": torch.zeros(1)}
    with pytest.raises(AssertionError, match="exp_avg: another drafter"):
        optimizer.load_state_dict(state)


def test_masters_can_start_from_weights_set_later() -> None:
    module = make_module(torch.bfloat16)
    optimizer = MasterAdamW(module, **OPTIONS)
    with torch.no_grad():
        module[0].weight.fill_(0.25)
    optimizer.reset_masters()
    assert (optimizer.state_dict()["masters"]["0.weight"] == 0.25).all()


def test_learning_rate_rises_linearly_then_falls_as_a_cosine_to_zero() -> None:
    rates = [learning_rate(s, total=100, peak=2.0, warmup=0.1) for s in range(101)]
    assert rates[:10] == pytest.approx([0.2 * (s + 1) for s in range(10)])
    assert max(rates) == rates[9] == 2.0
    expected = [1 + math.cos(math.pi * (s - 9) / 91) for s in range(10, 101)]
    assert rates[10:] == pytest.approx(expected, abs=1e-12)
    assert rates[100] == pytest.approx(0, abs=1e-12) and rates[99] > 0


def test_learning_rate_without_warmup_starts_at_the_peak() -> None:
    assert learning_rate(0, total=10, peak=2.0, warmup=0.0) == 2.0
    assert learning_rate(0, total=1, peak=2.0, warmup=0.5) == 2.0
