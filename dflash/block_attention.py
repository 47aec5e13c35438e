"""Attention of block rows over [context | their own block]: the mask in closed form, and the
differentiable operation that reads it on a GPU.

    ranges = Ranges(low_A, high_A, seen_by(low_A, high_A, valid_A, ...), ...)  # a kind of layer
    out_QNE = attend_blocks(q_QNE, ctx, block, ranges)

The mask is mask.py's. Of it, a block needs two numbers: it sees context [low, high) and itself
(window and causality follow from the row's place in the block). A tile of context keys needs four:
anchors are sorted, so the blocks that see some of it are a run, and those that see all of it a run
within. No search over (row, key) pairs, no shape from data, no sync. The kernels are
attention_kernel.py and attention_backward.py; `plain` is their reference, and runs on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .anchors import Anchors

TILE = 64
"""Context keys of a tile."""


class Ranges(NamedTuple):
    """Of one kind of layer."""

    low_A: Tensor
    high_A: Tensor
    """int32: block j of a full layer sees context [low, high); both 0 if invalid."""
    seen_C4: Tensor
    """int32, of each tile of context keys: no block outside [0, 3) sees any, and every row of
    blocks [1, 2) sees all."""
    window: int | None
    causal: bool


def context_range(anchors: Anchors, lens_D: Tensor) -> tuple[Tensor, Tensor]:
    """(low_A, high_A) of a full layer."""
    start_D = lens_D.cumsum(0) - lens_D
    low_A = torch.where(anchors.valid_A, start_D[anchors.doc_A.clamp_min(0)], 0)
    high_A = torch.where(anchors.valid_A, anchors.position_A, 0)
    return low_A.int(), high_A.int()


def seen_by(
    low_A: Tensor,
    high_A: Tensor,
    valid_A: Tensor,
    window: int | None,
    block_size: int,
    num_tokens: int,
) -> Tensor:
    """seen_C4 of Ranges. Over valid blocks, which come first, both bounds rise."""
    begin_C1 = torch.arange(0, num_tokens, TILE, device=low_A.device, dtype=torch.int32)[:, None]
    end_C1 = begin_C1 + TILE
    strict_A = low_A
    if window is not None:
        strict_A = torch.maximum(low_A, high_A - window + block_size)
        low_A = torch.maximum(low_A, high_A - window + 1)

    def count(which_CA: Tensor) -> Tensor:
        return (which_CA & valid_A).sum(dim=1)

    first_C, last_C = count(high_A <= begin_C1), count(low_A < end_C1)
    last_C = torch.maximum(first_C, last_C)
    from_C = count(high_A < end_C1).clamp(first_C, last_C)
    to_C = torch.maximum(from_C, torch.minimum(count(strict_A <= begin_C1), last_C))
    return torch.stack((first_C, from_C, to_C, last_C), dim=1).int()


def attend_blocks(
    q_QNE: Tensor, ctx: Sequence[Tensor], block: Sequence[Tensor], ranges: Ranges
) -> Tensor:
    """out_QNE. G key heads serve N = n * G query heads."""
    size = q_QNE.shape[-1]
    if not q_QNE.is_cuda:
        return plain(q_QNE, ctx, block, ranges)
    padded = max(16, 1 << (size - 1).bit_length())
    inputs = [q_QNE, *ctx, *block]
    if padded != size:
        inputs = [F.pad(x, (0, padded - size)) for x in inputs]
    low_A, high_A, seen_C4, window, causal = ranges
    out_QNE, _ = _attend(*inputs, low_A, high_A, seen_C4, size**-0.5, window, causal)
    return out_QNE if padded == size else out_QNE[..., :size]


def plain(q_QNE: Tensor, ctx: Sequence[Tensor], block: Sequence[Tensor], ranges: Ranges) -> Tensor:
    """The obvious way: all scores, a mask, autograd."""
    low_A, high_A, _, window, causal = ranges
    rows, tokens = len(q_QNE), len(ctx[0])
    row_Q1 = torch.arange(rows, device=q_QNE.device)[:, None]
    key_S = torch.arange(tokens + rows, device=q_QNE.device)
    block_Q1, offset_Q1 = row_Q1 // (rows // len(low_A)), row_Q1 % (rows // len(low_A))
    low_Q1, high_Q1 = low_A[block_Q1], high_A[block_Q1]
    if window is not None:
        low_Q1 = torch.maximum(low_Q1, high_Q1 + offset_Q1 - (window - 1))
    own_S = key_S - tokens
    own_QS = (own_S >= 0) & (own_S // (rows // len(low_A)) == block_Q1)
    if causal:
        own_QS = own_QS & (own_S <= row_Q1)
    seen_QS = ((key_S >= low_Q1) & (key_S < high_Q1)) | own_QS
    k_SGE, v_SGE = (torch.cat(both) for both in zip(ctx, block, strict=True))
    q_NQE, k_GSE, v_GSE = (x.transpose(0, 1) for x in (q_QNE, k_SGE, v_SGE))
    out_1NQE = F.scaled_dot_product_attention(
        q_NQE[None], k_GSE[None], v_GSE[None], attn_mask=seen_QS, enable_gqa=True
    )
    return out_1NQE[0].transpose(0, 1)


@torch.library.custom_op("dflash::attend_blocks", mutates_args=())
def _attend(
    q_QNE: Tensor,
    k_TGE: Tensor,
    v_TGE: Tensor,
    own_k_QGE: Tensor,
    own_v_QGE: Tensor,
    low_A: Tensor,
    high_A: Tensor,
    seen_C4: Tensor,
    scale: float,
    window: int | None,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    from .attention_kernel import forward

    inputs = (q_QNE, k_TGE, v_TGE, own_k_QGE, own_v_QGE)
    return forward(*inputs, low_A, high_A, scale, window, causal)


@_attend.register_fake
def _(q_QNE: Tensor, k_TGE: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    from .attention_kernel import sums_shape

    shape = sums_shape(q_QNE, k_TGE, rest[3])
    return q_QNE.new_empty(q_QNE.shape), q_QNE.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("dflash::attend_blocks_backward", mutates_args=())
def _attend_backward(
    grad_QNE: Tensor,
    q_QNE: Tensor,
    k_TGE: Tensor,
    v_TGE: Tensor,
    own_k_QGE: Tensor,
    own_v_QGE: Tensor,
    out_QNE: Tensor,
    sums: Tensor,
    low_A: Tensor,
    high_A: Tensor,
    seen_C4: Tensor,
    scale: float,
    window: int | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from .attention_backward import backward

    inputs = (q_QNE, k_TGE, v_TGE, own_k_QGE, own_v_QGE)
    ranges = (low_A, high_A, seen_C4)
    return backward(grad_QNE, inputs, out_QNE, sums, *ranges, scale, window, causal)


@_attend_backward.register_fake
def _(grad_QNE: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in rest[:5])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.window, ctx.causal = inputs
    ctx.save_for_backward(*tensors[:5], *output, *tensors[5:])


def _backward(ctx: Any, grad_QNE: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    grads = _attend_backward(grad_QNE, *ctx.saved_tensors, ctx.scale, ctx.window, ctx.causal)
    return (*grads, None, None, None, None, None, None)


_attend.register_autograd(_backward, setup_context=_setup)
