"""The frozen head's products: hidden states to logits, and the logits' gradient back to the hidden
states; the latter exact, or in float8 (e4m3), which Hopper multiplies twice as fast.

    head = FrozenHead(head_VH, by_unit(head_VH))   # once: the weights never change
    raw_CV = head.logits(hidden_CH, out)
    head.input_grad(dlogits, out)                  # in float8; exact without the second argument

In float8 every row has a float32 scale that makes its largest entry 448, the largest there is. The
scale must stand outside of the product's sum, which runs over tokens: so a row of the head is a
hidden unit's. A CPU multiplies the dequantised numbers: the same but for the order of the sums.

Logits stay exact, and with them the loss and all that is counted. On SmolLM2-135M the drafter's
gradient is off by 4 to 6 % of its length (bf16: 1 %); with the logits in float8 too it was 19 to
26 %: docs/lab-notebook.md.
"""

from __future__ import annotations

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


def by_unit(head_VH: Tensor) -> Scaled:
    """[H, V], a part at a time: that bounds the float32 copy."""
    parts = [quantise(part_HV.contiguous()) for part_HV in head_VH.T.split(256)]
    return Scaled(*(torch.cat(pieces) for pieces in zip(*parts, strict=True)))


class FrozenHead(NamedTuple):
    weight_VH: Tensor
    float8: Scaled | None = None
    """by_unit(weight_VH)."""

    def logits(self, hidden_CH: Tensor, out: Tensor) -> Tensor:
        return torch.mm(hidden_CH, self.weight_VH.T, out=out)

    def first_logits(self, hidden_CH: Tensor, count_1: Tensor) -> Tensor:
        """Of the first `count` rows, an int32 on the device; the other rows hold anything."""
        if counts_on_device(self.weight_VH):
            return F.grouped_mm(hidden_CH, self.weight_VH.T[None], offs=count_1)
        return torch.mm(hidden_CH, self.weight_VH.T)

    def input_grad(self, dlogits: Tensor | Scaled, out: Tensor) -> Tensor:
        """In float8 if there is such a copy; then `dlogits` may be rounded already."""
        if self.float8 is None:
            assert isinstance(dlogits, Tensor)
            return torch.mm(dlogits, self.weight_VH, out=out)
        a = quantise(dlogits) if isinstance(dlogits, Tensor) else dlogits
        b = self.float8
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
