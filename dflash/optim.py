"""AdamW on float32 masters, in flat buffers: clip, skip and update without asking the device
anything.

All parameters are views of one flat weight buffer and their gradients views of one flat gradient
buffer, matrices first, then norms and biases (no weight decay). So the norm is one reduction,
zeroing one fill, the bf16 copy one kernel, and a captured step has fixed addresses. torch's fused
AdamW takes the clip as `grad_scale` and the skip as `found_inf`, both tensors: a step with a
non-finite gradient leaves weights, moments and step count untouched.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


def learning_rate(step: int, *, total: int, peak: float, warmup: float) -> float:
    """Of optimizer step number `step` (from 0): linear to `peak` over a `warmup` share of `total`,
    then cosine to 0."""
    ramp = max(1, round(warmup * total))
    assert 0 <= step <= total
    if step < ramp:
        return peak * (step + 1) / ramp
    progress = (step + 1 - ramp) / max(1, total + 1 - ramp)
    return peak * 0.5 * (1 + math.cos(math.pi * progress))


class MasterAdamW:
    """Owns the parameters' storage from now on: give it the drafter in its final dtype, on its
    final device."""

    def __init__(
        self,
        drafter: nn.Module,
        *,
        betas: tuple[float, float],
        weight_decay: float,
        clip: float,
        eps: float = 1e-8,
    ) -> None:
        named = sorted(drafter.named_parameters(), key=lambda item: item[1].ndim < 2)
        first = named[0][1]
        self.names = [name for name, _ in named]
        self.shapes = [parameter.shape for _, parameter in named]
        self.clip = clip
        size = sum(parameter.numel() for _, parameter in named)
        self.weights = torch.empty(size, dtype=first.dtype, device=first.device)
        self.grads = torch.zeros_like(self.weights)
        for (_, parameter), weight, grad in zip(
            named, self._views(self.weights), self._views(self.grads), strict=True
        ):
            weight.copy_(parameter.detach())
            parameter.data, parameter.grad = weight, grad
        same = first.dtype == torch.float32
        # A float32 drafter is its own master; else the update needs the gradients widened as well.
        self.masters = self.weights if same else self.weights.float()
        self.wide_grads = self.grads if same else torch.zeros_like(self.masters)
        self.exp_avg = torch.zeros_like(self.masters)
        self.exp_avg_sq = torch.zeros_like(self.masters)
        self.lr = torch.zeros((), dtype=torch.float32, device=first.device)
        self.grad_scale = torch.ones_like(self.lr)
        self.found_inf = torch.zeros_like(self.lr)
        decayed = sum(p.numel() for _, p in named if p.ndim >= 2)
        self._adamw = self._build(decayed, size, betas, weight_decay, eps)

    def _build(
        self, decayed: int, size: int, betas: tuple[float, float], weight_decay: float, eps: float
    ) -> torch.optim.AdamW:
        spans = (slice(0, decayed), slice(decayed, size))
        flats = [nn.Parameter(self.masters[span]) for span in spans]
        groups = [
            {"params": [flat], "weight_decay": decay}
            for flat, decay in zip(flats, (weight_decay, 0.0), strict=True)
        ]
        adamw = torch.optim.AdamW(
            groups, lr=self.lr, betas=betas, eps=eps, fused=True, capturable=self.lr.is_cuda
        )
        for flat, span in zip(flats, spans, strict=True):
            flat.grad = self.wide_grads[span]
            adamw.state[flat] = {
                "step": torch.zeros_like(self.lr),
                "exp_avg": self.exp_avg[span],
                "exp_avg_sq": self.exp_avg_sq[span],
            }
        # Not in its signature: the fused kernels read these two when they are set.
        vars(adamw).update(grad_scale=self.grad_scale, found_inf=self.found_inf)
        return adamw

    @torch.no_grad()
    def step(self, skip: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Clip, update unless the gradient is not finite (or the 0-d bool `skip`), copy back, zero
        the gradients.

        Reads the rate from `self.lr`. Returns 0-d tensors: gradient norm before clipping, and
        whether it skipped.
        """
        norm = torch.linalg.vector_norm(self.grads, dtype=torch.float32)
        skipped = ~torch.isfinite(norm) if skip is None else ~torch.isfinite(norm) | skip
        self.grad_scale.copy_((norm / self.clip).clamp_min(1.0))
        self.found_inf.copy_(skipped)
        if self.wide_grads is not self.grads:
            self.wide_grads.copy_(self.grads)
        self._adamw.step()
        if self.masters is not self.weights:
            self.weights.copy_(self.masters)
        self.grads.zero_()
        return norm, skipped

    @torch.no_grad()
    def reset_masters(self) -> None:
        """After the drafter's weights were set from outside: start from them."""
        self.masters.copy_(self.weights)

    def state_dict(self) -> dict[str, Any]:
        """{"step": 0-d, "masters" | "exp_avg" | "exp_avg_sq": {parameter name: float32 view}}. Not
        copies."""
        state: dict[str, Any] = {"step": self._steps()[0]}
        for key in ("masters", "exp_avg", "exp_avg_sq"):
            state[key] = dict(zip(self.names, self._views(getattr(self, key)), strict=True))
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Exact: the next step gives the same bits as if training had not stopped. Also sets the
        drafter's weights."""
        for key in ("masters", "exp_avg", "exp_avg_sq"):
            assert state[key].keys() == set(self.names), f"{key}: another drafter's parameters"
            for name, view in zip(self.names, self._views(getattr(self, key)), strict=True):
                assert state[key][name].shape == view.shape
                view.copy_(state[key][name])
        for step in self._steps():
            step.copy_(state["step"])
        self.weights.copy_(self.masters)

    def _steps(self) -> list[Tensor]:
        return [state["step"] for state in self._adamw.state.values()]

    def _views(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]
