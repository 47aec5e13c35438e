"""AdamW on float32 masters, in flat buffers: clip, skip and update without asking the device
anything.

All parameters are views of one flat weight buffer and their gradients views of one flat gradient
buffer, matrices first, then norms and biases (no weight decay). So the norm is one reduction,
the update one kernel, and a captured step has fixed addresses. AdamW takes the clip as
`grad_scale` and the skip as `found_inf`, both tensors: a step with a non-finite gradient leaves
weights, moments and step count untouched.
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
        self.parameters = [parameter for _, parameter in named]
        self.shapes = [parameter.shape for parameter in self.parameters]
        self.clip = clip
        size = sum(parameter.numel() for _, parameter in named)
        self.weights = torch.empty(size, dtype=first.dtype, device=first.device)
        self.grads = torch.zeros_like(self.weights)
        for (_, parameter), weight, grad in zip(
            named, self._views(self.weights), self._views(self.grads), strict=True
        ):
            weight.copy_(parameter.detach())
            parameter.data, parameter.grad = weight, grad
        # A float32 drafter is its own master.
        self.masters = self.weights if first.dtype == torch.float32 else self.weights.float()
        self.exp_avg = torch.zeros_like(self.masters)
        self.exp_avg_sq = torch.zeros_like(self.masters)
        self.count = torch.zeros((), dtype=torch.float32, device=first.device)
        """Updates taken."""
        self.lr = torch.zeros_like(self.count)
        self.grad_scale = torch.ones_like(self.count)
        self.found_inf = torch.zeros_like(self.count)
        self.decayed = sum(p.numel() for _, p in named if p.ndim >= 2)
        self.betas, self.weight_decay, self.eps = betas, weight_decay, eps
        self._adamw = None if first.is_cuda else self._build()

    def _build(self) -> torch.optim.AdamW:
        """torch's own, on a CPU; adamw_kernel does the same on a GPU in one pass."""
        spans = (slice(0, self.decayed), slice(self.decayed, None))
        flats = [nn.Parameter(self.masters[span]) for span in spans]
        groups = [
            {"params": [flat], "weight_decay": decay}
            for flat, decay in zip(flats, (self.weight_decay, 0.0), strict=True)
        ]
        adamw = torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=True)
        for flat, span in zip(flats, spans, strict=True):
            flat.grad = torch.zeros_like(flat) if self._widens else self.grads[span]
            adamw.state[flat] = {
                "step": torch.zeros_like(self.count),
                "exp_avg": self.exp_avg[span],
                "exp_avg_sq": self.exp_avg_sq[span],
            }
        # Not in its signature: the fused kernels read these two when they are set.
        vars(adamw).update(grad_scale=self.grad_scale, found_inf=self.found_inf)
        return adamw

    @property
    def _widens(self) -> bool:
        return self.masters is not self.weights

    def gradients(self, loss: Tensor) -> None:
        """d loss / d parameters into the flat buffer.

        Not backward(), which adds to what is there: a pass and a kernel a parameter more.
        """
        torch._foreach_copy_(self._views(self.grads), torch.autograd.grad(loss, self.parameters))

    @torch.no_grad()
    def step(self, skip: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Clip, update unless the gradient is not finite (or the 0-d bool `skip`), copy back.

        Reads the rate from `self.lr`. Returns 0-d tensors: gradient norm before clipping, and
        whether it skipped.
        """
        norm = torch.linalg.vector_norm(self.grads, dtype=torch.float32)
        skipped = ~torch.isfinite(norm) if skip is None else ~torch.isfinite(norm) | skip
        self.grad_scale.copy_((norm / self.clip).clamp_min(1.0))
        self.found_inf.copy_(skipped)
        if self._adamw is None:
            self._step_on_gpu()
        else:
            self._step_on_cpu(self._adamw)
        self.count += ~skipped
        return norm, skipped

    def _step_on_gpu(self) -> None:
        from .adamw_kernel import adamw

        adamw(
            self.weights,
            self.masters,
            self.exp_avg,
            self.exp_avg_sq,
            self.grads,
            count=self.count,
            lr=self.lr,
            grad_scale=self.grad_scale,
            skip=self.found_inf,
            decayed=self.decayed,
            weight_decay=self.weight_decay,
            betas=self.betas,
            eps=self.eps,
        )

    def _step_on_cpu(self, adamw: torch.optim.AdamW) -> None:
        for flat, state in adamw.state.items():
            state["step"].copy_(self.count)
            if self._widens:
                assert flat.grad is not None
                first = state["exp_avg"].storage_offset()
                flat.grad.copy_(self.grads[first : first + flat.numel()])
        adamw.step()
        if self._widens:
            self.weights.copy_(self.masters)

    @torch.no_grad()
    def reset_masters(self) -> None:
        """After the drafter's weights were set from outside: start from them."""
        self.masters.copy_(self.weights)

    def state_dict(self) -> dict[str, Any]:
        """{"step": 0-d, "masters" | "exp_avg" | "exp_avg_sq": {parameter name: float32 view}}. Not
        copies."""
        state: dict[str, Any] = {"step": self.count}
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
        self.count.copy_(state["step"])
        self.weights.copy_(self.masters)

    def _views(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]
