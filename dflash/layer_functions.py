"""What fast_layers.py needs between its matmuls: float32 inside, the input's dtype outside.

A CPU runs these, and there tests compare whole layers with transformers' own. layer_kernels.py has
the same names for a GPU, and is compared with these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from .fast_layers import Rows


def rms_norm(x_NH: Tensor, weight_H: Tensor, eps: float, offset: float) -> Tensor:
    """offset 1 where the family stores weight - 1. Of the last dimension, whatever comes before."""
    wide = x_NH.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * (weight_H.float() + offset)).to(x_NH.dtype)


def silu_times(gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    return (F.silu(gate_NF.float()) * up_NF.float()).to(up_NF.dtype)


def add_weighted(state_NH: Tensor, rows_SH: Tensor, place_NP: Tensor, weight_NP: Tensor) -> None:
    """state_n += sum_p weight_np * rows[place_np], in place; rounded once."""
    added_NH = (rows_SH[place_NP].float() * weight_NP.float()[..., None]).sum(dim=1)
    state_NH.copy_(state_NH.float() + added_NH)


def gated(x_RGE: Tensor, from_N: Tensor, gate_NGE: Tensor) -> Tensor:
    """[N, G, E]: of the rows that are no padding."""
    return (x_RGE[from_N].float() * torch.sigmoid(gate_NGE.float())).to(x_RGE.dtype)


def gated_norm(
    x_RGE: Tensor, from_N: Tensor, gate_NGE: Tensor, weight_E: Tensor, eps: float
) -> Tensor:
    """[N, G, E]: of the rows that are no padding, a head at a time."""
    normed_NGE = rms_norm(x_RGE[from_N].float(), weight_E, eps, 0.0)
    return (normed_NGE * F.silu(gate_NGE.float())).to(x_RGE.dtype)


def norm_rotate(
    x_NGE: Tensor,
    into_BL: Tensor,
    cos_L1R: Tensor,
    sin_L1R: Tensor,
    weight_E: Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
) -> Tensor:
    """[B, L, G, E], padded: each head normed, where there is a weight for it, and the halves (a, b)
    of its first R numbers turned to (a cos - b sin, b cos + a sin)."""
    wide_BLGE = x_NGE[into_BL].float()
    if weight_E is not None:
        wide_BLGE = rms_norm(wide_BLGE, weight_E, eps, offset)
    size = cos_L1R.shape[-1]
    turned, still = wide_BLGE[..., :size], wide_BLGE[..., size:]
    a, b = turned.chunk(2, dim=-1)
    turned = turned * cos_L1R.float() + torch.cat((-b, a), dim=-1) * sin_L1R.float()
    return torch.cat((turned, still), dim=-1).to(x_NGE.dtype)


def short_conv(x_NC: Tensor, rows: Rows, weight_CW: Tensor, size: int, eps: float | None) -> Tensor:
    """[B, L, C/size, size]: causal convolution over the last W tokens of a document, SiLU, heads of
    `size`, each to length one unless eps is None."""
    x_BLC = x_NC[rows.into_BL].float()
    width, length = weight_CW.shape[1], x_BLC.shape[1]
    padded = F.pad(x_BLC, (0, 0, width - 1, 0))
    summed = torch.zeros_like(x_BLC)
    for tap in range(width):
        summed += padded[:, tap : tap + length] * weight_CW[:, tap]
    heads_BLGE = F.silu(summed).unflatten(-1, (-1, size))
    if eps is not None:
        square_BLG1 = heads_BLGE.square().sum(-1, keepdim=True)
        heads_BLGE = heads_BLGE * torch.rsqrt(square_BLG1 + eps)
    return heads_BLGE.to(x_NC.dtype)
