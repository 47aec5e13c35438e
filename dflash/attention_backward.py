# mypy: disallow_untyped_defs=False
"""The gradient of attention_kernel.py's attention, in two kernels and without atomics: the same
bits every time.

First a program for a tile of rows: the gradient of the queries, and of the blocks' own keys and
values, which no other block sees. Then one for a tile of context keys, over the blocks that `seen`
names (block_attention.seen_by): the gradient of the context's keys and values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_kernel import (
    LOG2_E,
    Sizes,
    Tiling,
    at_rows,
    at_tokens,
    bounds_of,
    in_block,
    in_range,
    key_tiles,
    keys_at,
    launch,
    options,
    own_rows,
    real_rows,
    row_of,
    strides,
)
from .block_attention import TILE

OF_ROWS = {
    128: (Tiling(rows=128, keys=64, warps=8, stages=3), Tiling(64, 32, 4, 2)),
    256: (Tiling(64, 32, 8, 2), Tiling(32, 32, 4, 1)),
}
OF_KEYS = {
    128: (Tiling(rows=64, keys=TILE, warps=4, stages=2), Tiling(32, TILE, 4, 2)),
    256: (Tiling(32, TILE, 8, 2), Tiling(32, TILE, 8, 1), Tiling(16, TILE, 8, 1)),
}


@triton.jit
def _score_grad(q, k, v, grad, log_sum, delta, scale, PRECISION: tl.constexpr):
    """(p, d loss / d score) [rows, keys]."""
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    p = tl.exp2(score - log_sum[:, None])
    p_grad = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
    return p, p * (p_grad - delta[:, None])


@triton.jit
def _query_grad_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    own_k_ptr,
    own_v_ptr,
    out_ptr,
    grad_ptr,
    sum_ptr,
    delta_ptr,
    low_ptr,
    high_ptr,
    q_grad_ptr,
    own_k_grad_ptr,
    own_v_grad_ptr,
    q_stride,
    k_stride,
    v_stride,
    own_k_stride,
    own_v_stride,
    num_blocks,
    scale,
    natural_scale,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    HP: tl.constexpr,
    KP: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    first, g = tl.program_id(0) * BLOCKS, tl.program_id(1) // SPLITS
    groups, split = tl.num_programs(1) // SPLITS, tl.program_id(1) % SPLITS
    block, head, offset, real = real_rows(
        first * (HP * KP), split * HP, num_blocks, BLOCKS * HP * KP, HEADS, K, HP, KP
    )
    q_at = at_rows(block, offset, g * HEADS + head, q_stride, K, E)
    at = at_rows(block, offset, g * HEADS + head, groups * HEADS * E, K, E)
    q = tl.load(q_ptr + q_at, mask=real, other=0.0)
    grad = tl.load(grad_ptr + at, mask=real, other=0.0)
    out = tl.load(out_ptr + at, mask=real, other=0.0)
    sum_at = ((g * num_blocks + block) * (SPLITS * HP) + head) * KP + offset
    log_sum = tl.load(sum_ptr + sum_at, mask=block < num_blocks, other=0.0)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta_ptr + sum_at, delta, mask=block < num_blocks)

    own_block, own_offset, there = own_rows(first, num_blocks, K, KP, BLOCKS)
    k_at = at_rows(own_block, own_offset, g, own_k_stride, K, E)
    v_at = at_rows(own_block, own_offset, g, own_v_stride, K, E)
    own_k = tl.load(own_k_ptr + k_at, mask=there, other=0.0)
    own_v = tl.load(own_v_ptr + v_at, mask=there, other=0.0)
    own_p, own_score_grad = _score_grad(q, own_k, own_v, grad, log_sum, delta, scale, PRECISION)
    own_seen = in_block(block, offset, own_block, own_offset, K, CAUSAL)
    own_p = tl.where(own_seen, own_p, 0.0).to(q.dtype)
    own_score_grad = tl.where(own_seen, own_score_grad, 0.0).to(q.dtype)
    q_grad = tl.dot(own_score_grad, own_k, input_precision=PRECISION)
    own_k_grad = tl.dot(tl.trans(own_score_grad), q, input_precision=PRECISION) * natural_scale
    own_v_grad = tl.dot(tl.trans(own_p), grad, input_precision=PRECISION)
    own_at = at_rows(own_block + split * num_blocks, own_offset, g, groups * E, K, E)
    tl.store(own_k_grad_ptr + own_at, own_k_grad.to(own_k_grad_ptr.dtype.element_ty), mask=there)
    tl.store(own_v_grad_ptr + own_at, own_v_grad.to(own_v_grad_ptr.dtype.element_ty), mask=there)

    low, end, before, whole, tiles = key_tiles(
        low_ptr, high_ptr, first, num_blocks, BLOCKS, K, WINDOW, KEYS
    )
    row_low, row_high = bounds_of(low_ptr, high_ptr, block, num_blocks)
    for i in range(0, before + tiles - whole):
        token = low + tl.where(i < before, i, i - before + whole) * KEYS + tl.arange(0, KEYS)
        k, v = keys_at(k_ptr, v_ptr, token, end, g, k_stride, v_stride, E, True)
        score_grad = _score_grad(q, k, v, grad, log_sum, delta, scale, PRECISION)[1]
        seen = in_range(
            token[None, :], row_low[:, None], row_high[:, None], offset[:, None], WINDOW
        )
        score_grad = tl.where(seen, score_grad, 0.0).to(k.dtype)
        q_grad = tl.dot(score_grad, k, q_grad, input_precision=PRECISION)
    for i in range(before, whole):
        token = low + i * KEYS + tl.arange(0, KEYS)
        k, v = keys_at(k_ptr, v_ptr, token, end, g, k_stride, v_stride, E, False)
        score_grad = _score_grad(q, k, v, grad, log_sum, delta, scale, PRECISION)[1]
        q_grad = tl.dot(score_grad.to(k.dtype), k, q_grad, input_precision=PRECISION)
    tl.store(q_grad_ptr + at, (q_grad * natural_scale).to(q_grad_ptr.dtype.element_ty), mask=real)


@triton.jit
def _context_grad_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    sum_ptr,
    delta_ptr,
    low_ptr,
    high_ptr,
    seen_ptr,
    k_grad_ptr,
    v_grad_ptr,
    q_stride,
    k_stride,
    v_stride,
    num_blocks,
    num_tokens,
    scale,
    natural_scale,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    HP: tl.constexpr,
    KP: tl.constexpr,
):
    """HP: all heads, rounded up."""
    c, g, groups = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    token = c * KEYS + tl.arange(0, KEYS)
    k, v = keys_at(k_ptr, v_ptr, token, num_tokens, g, k_stride, v_stride, E, True)
    k_grad = tl.zeros([KEYS, E], tl.float32)
    v_grad = tl.zeros([KEYS, E], tl.float32)

    # In tiles of rows: [begin, end), of which those in [before, whole) see every key here.
    begin = tl.load(seen_ptr + c * 4) * (HP * KP) // ROWS
    before = tl.cdiv(tl.load(seen_ptr + c * 4 + 1) * (HP * KP), ROWS)
    whole = tl.maximum(before, tl.load(seen_ptr + c * 4 + 2) * (HP * KP) // ROWS)
    end = tl.maximum(whole, tl.cdiv(tl.load(seen_ptr + c * 4 + 3) * (HP * KP), ROWS))
    for i in range(begin, before + end - whole):
        first = tl.where(i < before, i, i - before + whole) * ROWS
        block, head, offset, real = real_rows(first, 0, num_blocks, ROWS, HEADS, K, HP, KP)
        q_at = at_rows(block, offset, g * HEADS + head, q_stride, K, E)
        at = at_rows(block, offset, g * HEADS + head, groups * HEADS * E, K, E)
        q = tl.load(q_ptr + q_at, mask=real, other=0.0)
        grad = tl.load(grad_ptr + at, mask=real, other=0.0)
        sum_at = g * num_blocks * (HP * KP) + first + tl.arange(0, ROWS)
        log_sum = tl.load(sum_ptr + sum_at, mask=block < num_blocks, other=0.0)
        delta = tl.load(delta_ptr + sum_at, mask=block < num_blocks, other=0.0)
        low, high = bounds_of(low_ptr, high_ptr, block, num_blocks)
        seen = in_range(token[:, None], low[None, :], high[None, :], offset[None, :], WINDOW)
        score = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale
        p = tl.where(seen, tl.exp2(score - log_sum[None, :]), 0.0)
        v_grad = tl.dot(p.to(q.dtype), grad, v_grad, input_precision=PRECISION)
        p_grad = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        score_grad = tl.where(seen, p * (p_grad - delta[None, :]), 0.0).to(q.dtype)
        k_grad = tl.dot(score_grad, q, k_grad, input_precision=PRECISION)
    for i in range(before, whole):
        block, head, offset = row_of(i * ROWS, ROWS, HP, KP)
        q_at = at_rows(block, offset, g * HEADS + head, q_stride, K, E)
        at = at_rows(block, offset, g * HEADS + head, groups * HEADS * E, K, E)
        if HP == HEADS and KP == K:
            q, grad = tl.load(q_ptr + q_at), tl.load(grad_ptr + at)
        else:
            real = ((head < HEADS) & (offset < K))[:, None]
            q = tl.load(q_ptr + q_at, mask=real, other=0.0)
            grad = tl.load(grad_ptr + at, mask=real, other=0.0)
        sum_at = g * num_blocks * (HP * KP) + i * ROWS + tl.arange(0, ROWS)
        log_sum, delta = tl.load(sum_ptr + sum_at), tl.load(delta_ptr + sum_at)
        score = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale
        p = tl.exp2(score - log_sum[None, :])
        v_grad = tl.dot(p.to(q.dtype), grad, v_grad, input_precision=PRECISION)
        p_grad = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        score_grad = (p * (p_grad - delta[None, :])).to(q.dtype)
        k_grad = tl.dot(score_grad, q, k_grad, input_precision=PRECISION)
    out_at, inside = at_tokens(token, g, groups * E, E), (token < num_tokens)[:, None]
    k_grad = (k_grad * natural_scale).to(k_grad_ptr.dtype.element_ty)
    tl.store(k_grad_ptr + out_at, k_grad, mask=inside)
    tl.store(v_grad_ptr + out_at, v_grad.to(v_grad_ptr.dtype.element_ty), mask=inside)


def backward(
    grad_QNE: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    out_QNE: Tensor,
    sums: Tensor,
    low_A: Tensor,
    high_A: Tensor,
    seen_C4: Tensor,
    scale: float,
    window: int | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `inputs`, which are forward's first five."""
    q_QNE, k_TGE, v_TGE, *_ = inputs
    (rows, heads, size), groups, blocks = q_QNE.shape, k_TGE.shape[1], len(low_A)
    grad_QNE, delta = grad_QNE.contiguous(), torch.empty_like(sums)
    q_grad = q_QNE.new_empty(q_QNE.shape)
    k_grad, v_grad = (x.new_empty(x.shape) for x in (k_TGE, v_TGE))
    scales = (scale * LOG2_E, scale)
    own: list[Tensor] = []

    def of_rows(tiling: Tiling) -> None:
        sizes = Sizes.of(heads // groups, rows // blocks, size, tiling.rows)
        # A block whose heads are split gets its own gradients in parts: rounded once, as a sum.
        dtype = q_QNE.dtype if sizes.SPLITS == 1 else torch.float32
        shape = sizes.SPLITS, rows, groups, size
        own[:] = (q_QNE.new_empty(shape, dtype=dtype) for _ in range(2))
        _query_grad_kernel[(triton.cdiv(blocks, sizes.BLOCKS), groups * sizes.SPLITS)](
            *inputs,
            out_QNE,
            grad_QNE,
            sums,
            delta,
            low_A,
            high_A,
            q_grad,
            *own,
            *strides(*inputs),
            blocks,
            *scales,
            WINDOW=window or 0,
            CAUSAL=causal,
            KEYS=tiling.keys,
            **sizes._asdict(),
            **options(tiling, q_QNE),
        )

    def of_keys(tiling: Tiling) -> None:
        sizes = Sizes.of(heads // groups, rows // blocks, size, tiling.rows)
        _context_grad_kernel[(len(seen_C4), groups)](
            q_QNE,
            k_TGE,
            v_TGE,
            grad_QNE,
            sums,
            delta,
            low_A,
            high_A,
            seen_C4,
            k_grad,
            v_grad,
            *strides(q_QNE, k_TGE, v_TGE),
            blocks,
            len(k_TGE),
            *scales,
            WINDOW=window or 0,
            ROWS=tiling.rows,
            KEYS=TILE,
            HEADS=sizes.HEADS,
            K=sizes.K,
            E=size,
            HP=sizes.SPLITS * sizes.HP,
            KP=sizes.KP,
            **options(tiling, q_QNE),
        )

    launch(OF_ROWS, q_QNE, of_rows)
    launch(OF_KEYS, q_QNE, of_keys)
    own_k_grad, own_v_grad = (x[0] if len(x) == 1 else x.sum(0).to(q_QNE.dtype) for x in own)
    return q_grad, k_grad, v_grad, own_k_grad, own_v_grad
