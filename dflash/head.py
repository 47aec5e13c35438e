"""The frozen head's products: hidden states to logits, and the logits' gradient back. Exact, or in
float8 (e4m3), which Hopper multiplies twice as fast.

    head = Float8Head.of(head_VH)          # once: the weights never change
    raw_CV = head.logits(hidden_CH, out)   # sums over H
    head.input_grad(dlogits, out)          # sums over V

In float8 every row has a float32 scale that makes its largest entry 448, the largest there is. A
scale must stand outside of the sum, so there are two copies of the head: rows of tokens for the
logits, rows of hidden units for the gradient. A CPU multiplies the dequantised numbers: the same
but for the order of the sums.

What it costs, on SmolLM2-135M: 93 % of the target's own positions keep their top-1 (bf16: 99 %),
and a drafter's gradient is off by 19 to 26 % of its length (bf16: 1 %). All rows see the same
rounded weights, so more rows do not average it out. docs/lab-notebook.md has more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import ConfigError

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0


def refuse_float8(head_VH: Tensor) -> None:
    """ConfigError where the GPU or the head's shape cannot be multiplied in float8."""
    if not head_VH.is_cuda:
        return
    if torch.cuda.get_device_capability(head_VH.device) < (8, 9):
        name = torch.cuda.get_device_name(head_VH.device)
        raise ConfigError(f"step.head_float8: {name} has no float8 products: set it to false")
    if head_VH.dtype != torch.bfloat16 or any(size % 16 for size in head_VH.shape):
        raise ConfigError(
            f"step.head_float8: a head of {tuple(head_VH.shape)} in {head_VH.dtype} cannot be "
            "multiplied in float8 (it must be bfloat16, and both sizes multiples of 16): "
            "set it to false"
        )


class Scaled(NamedTuple):
    """values * scale."""

    values_RK: Tensor
    scale_R1: Tensor


def quantise(x_RK: Tensor) -> Scaled:
    scale_R1 = x_RK.abs().amax(dim=-1, keepdim=True).float().clamp_min(1e-30) / LARGEST
    return Scaled((x_RK / scale_R1).to(FLOAT8), scale_R1)


def dequantise(x: Scaled) -> Tensor:
    return x.values_RK.float() * x.scale_R1


class ExactHead(NamedTuple):
    weight_VH: Tensor

    def logits(self, hidden_CH: Tensor, out: Tensor) -> Tensor:
        return torch.mm(hidden_CH, self.weight_VH.T, out=out)

    def first_logits(self, hidden_CH: Tensor, count_1: Tensor) -> Tensor:
        """Of the first `count` rows, an int32 on the device; the other rows hold anything."""
        if counts_on_device(self.weight_VH):
            return F.grouped_mm(hidden_CH, self.weight_VH.T[None], offs=count_1)
        return torch.mm(hidden_CH, self.weight_VH.T)

    def input_grad(self, dlogits: Tensor | Scaled, out: Tensor) -> Tensor:
        assert isinstance(dlogits, Tensor)
        return torch.mm(dlogits, self.weight_VH, out=out)


class Float8Head(NamedTuple):
    weight_VH: Tensor
    """The exact one."""
    by_token_VH: Tensor
    token_scale_V1: Tensor
    by_unit_HV: Tensor
    unit_scale_H1: Tensor

    @classmethod
    def of(cls, head_VH: Tensor) -> Float8Head:
        parts = [quantise(part_VH) for part_VH in head_VH.split(1 << 14)]  # bounds the float32 copy
        by_token = Scaled(*(torch.cat(pieces) for pieces in zip(*parts, strict=True)))
        parts = [quantise(part_HV.contiguous()) for part_HV in head_VH.T.split(256)]
        by_unit = Scaled(*(torch.cat(pieces) for pieces in zip(*parts, strict=True)))
        return cls(head_VH, *by_token, *by_unit)

    @property
    def by_token(self) -> Scaled:
        return Scaled(self.by_token_VH, self.token_scale_V1)

    @property
    def by_unit(self) -> Scaled:
        return Scaled(self.by_unit_HV, self.unit_scale_H1)

    def logits(self, hidden_CH: Tensor, out: Tensor) -> Tensor:
        return _product(quantise(hidden_CH), self.by_token, out)

    def first_logits(self, hidden_CH: Tensor, count_1: Tensor) -> Tensor:
        """As ExactHead's."""
        hidden = quantise(hidden_CH)
        if not counts_on_device(self.weight_VH):
            out = self.weight_VH.new_empty(len(hidden_CH), len(self.weight_VH))
            return _product(hidden, self.by_token, out)
        return torch._scaled_grouped_mm(
            hidden.values_RK,
            self.by_token_VH.T[None],
            hidden.scale_R1[:, 0],
            self.token_scale_V1.T,
            offs=count_1,
            out_dtype=self.weight_VH.dtype,
        )

    def input_grad(self, dlogits: Tensor | Scaled, out: Tensor) -> Tensor:
        return _product(
            quantise(dlogits) if isinstance(dlogits, Tensor) else dlogits, self.by_unit, out
        )


Head = ExactHead | Float8Head


def head_of(tensors: Sequence[Tensor]) -> Head:
    """From list(head), as a custom op gets it."""
    return ExactHead(*tensors) if len(tensors) == 1 else Float8Head(*tensors)


def _product(a: Scaled, b: Scaled, out: Tensor) -> Tensor:
    """a @ b.T into `out`."""
    if not out.is_cuda:
        return out.copy_(dequantise(a) @ dequantise(b).T)
    return torch._scaled_mm(
        a.values_RK, b.values_RK.T, a.scale_R1, b.scale_R1.T, out_dtype=out.dtype, out=out
    )


def counts_on_device(head_VH: Tensor) -> bool:
    """Whether a grouped product takes its number of rows from the device: elsewhere it makes the
    host wait for it, so that there all rows are multiplied."""
    if not head_VH.is_cuda or head_VH.dtype != torch.bfloat16 or head_VH.shape[1] % 8:
        return False
    return torch.cuda.get_device_capability(head_VH.device)[0] in (9, 10)
