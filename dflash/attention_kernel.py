# mypy: disallow_untyped_defs=False
"""block_attention.py on a GPU, the forward: a Triton kernel after FlashAttention 2 (Dao 2023),
without a mask in memory.

A tile of rows holds whole blocks with query heads of one key head: rows are (block, head, offset),
heads and offsets rounded up to powers of two; where a block has more than a tile's rows, its heads
are split over several tiles. The context that a block sees is one range, so only at its two ends
does a tile of keys ask who may see what. Each row's log2 sum is kept for attention_backward.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from .config import ConfigError

LOWEST = tl.constexpr(-1e30)
FAR = tl.constexpr(1 << 30)
"""Beyond all tokens."""
LOG2_E = 1.4426950408889634


class Tiling(NamedTuple):
    """How a kernel is cut and launched."""

    rows: int
    keys: int
    warps: int
    stages: int


FORWARD = {
    128: (Tiling(rows=128, keys=64, warps=8, stages=3), Tiling(64, 32, 4, 2)),
    256: (Tiling(128, 32, 8, 2), Tiling(64, 32, 4, 2), Tiling(64, 32, 4, 1)),
}
"""By head size, up to it: the fastest on an H200 at 128 (docs/lab-notebook.md), at 256 one without
spills; then smaller ones, for a GPU with less shared memory. The backward's are like these."""
FLOAT32 = {size: (Tiling(32, 32, 4, 1), Tiling(16, 32, 4, 1)) for size in FORWARD}
"""Chosen for tests; a drafter that trains in it on a GPU has no better."""


class Sizes(NamedTuple):
    """Constants of a launch."""

    HEADS: int
    """Query heads of a key head."""
    K: int
    """Rows of a block."""
    E: int
    HP: int
    """Heads of a tile of rows."""
    KP: int
    """K, rounded up."""
    SPLITS: int
    """Tiles that share a block's heads."""
    BLOCKS: int
    """Blocks of a tile."""

    @classmethod
    def of(cls, heads: int, block_size: int, head_dim: int, rows: int) -> Sizes:
        """`rows`: of a tile, about."""
        heads_up = triton.next_power_of_2(heads)
        block_up = max(16, triton.next_power_of_2(block_size))
        together = max(1, min(heads_up, rows // block_up))
        blocks = max(1, rows // (together * block_up))
        splits = heads_up // together
        return cls(heads, block_size, head_dim, together, block_up, splits, blocks)


@triton.jit
def bounds_of(low_ptr, high_ptr, block, num_blocks):
    here = block < num_blocks
    low = tl.load(low_ptr + block, mask=here, other=0)
    return low, tl.load(high_ptr + block, mask=here, other=0)


@triton.jit
def key_tiles(
    low_ptr,
    high_ptr,
    first,
    num_blocks,
    BLOCKS: tl.constexpr,
    K: tl.constexpr,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
):
    """(low, end, before, whole, tiles) of BLOCKS blocks: no row sees keys outside [low, end); of
    the tiles from `low` on, every row sees all of those in [before, whole)."""
    low, full_low, full_high, end = FAR, 0, FAR, 0
    for step in tl.static_range(BLOCKS):
        own_low, own_high = bounds_of(low_ptr, high_ptr, first + step, num_blocks)
        strict = own_low
        if WINDOW > 0:
            strict = tl.maximum(own_low, own_high - WINDOW + K)
            own_low = tl.maximum(own_low, own_high - WINDOW + 1)
        low = tl.minimum(low, tl.where(own_low < own_high, own_low, FAR))
        full_low = tl.maximum(full_low, strict)
        full_high = tl.minimum(full_high, own_high)
        end = tl.maximum(end, own_high)
    low = tl.minimum(low, end)
    tiles = tl.cdiv(end - low, KEYS)
    before = tl.minimum(tl.cdiv(tl.maximum(full_low - low, 0), KEYS), tiles)
    whole = before + tl.maximum(full_high - low - before * KEYS, 0) // KEYS
    return low, end, before, whole, tiles


@triton.jit
def row_of(first, ROWS: tl.constexpr, HP: tl.constexpr, KP: tl.constexpr):
    """(block, head, offset) of ROWS rows, from row `first` of the (block, HP, KP) on."""
    row = first + tl.arange(0, ROWS)
    return row // (HP * KP), row // KP % HP, row % KP


@triton.jit
def real_rows(
    first,
    first_head,
    num_blocks,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    HP: tl.constexpr,
    KP: tl.constexpr,
):
    """row_of's, their heads from `first_head` on, and which are not there for the rounding up:
    bool [rows, 1]."""
    block, head, offset = row_of(first, ROWS, HP, KP)
    head += first_head
    return block, head, offset, ((head < HEADS) & (offset < K) & (block < num_blocks))[:, None]


@triton.jit
def own_rows(first, num_blocks, K: tl.constexpr, KP: tl.constexpr, BLOCKS: tl.constexpr):
    """(block, offset, bool [keys, 1]: is there) of the keys of a tile's own blocks."""
    block, _, offset = row_of(first * KP, BLOCKS * KP, 1, KP)
    return block, offset, ((offset < K) & (block < num_blocks))[:, None]


@triton.jit
def at_rows(block, offset, head, stride, K: tl.constexpr, E: tl.constexpr):
    """Offsets [rows, E] into [Q, heads, E], `stride` elements from row to row."""
    start = (block * K + offset).to(tl.int64) * stride + head * E
    return start[:, None] + tl.arange(0, E)[None, :]


@triton.jit
def at_tokens(token, g, stride, E: tl.constexpr):
    """Offsets [keys, E] into [T, G, E]."""
    return token.to(tl.int64)[:, None] * stride + (g * E + tl.arange(0, E))[None, :]


@triton.jit
def keys_at(k_ptr, v_ptr, token, end, g, k_stride, v_stride, E: tl.constexpr, MASKED: tl.constexpr):
    """Keys and values of the context. MASKED: zeros from `end` on."""
    k_ptrs = k_ptr + at_tokens(token, g, k_stride, E)
    v_ptrs = v_ptr + at_tokens(token, g, v_stride, E)
    if MASKED:
        near = (token < end)[:, None]
        k, v = tl.load(k_ptrs, mask=near, other=0.0), tl.load(v_ptrs, mask=near, other=0.0)
    else:
        k, v = tl.load(k_ptrs), tl.load(v_ptrs)
    return k, v


@triton.jit
def in_range(token, low, high, offset, WINDOW: tl.constexpr):
    """bool: may a row (of bounds low, high and offset) see the token? Shapes broadcast."""
    if WINDOW > 0:
        low = tl.maximum(low, high + offset - (WINDOW - 1))
    return (token >= low) & (token < high)


@triton.jit
def in_block(block, offset, own_block, own_offset, K: tl.constexpr, CAUSAL: tl.constexpr):
    """bool [rows, own keys]: the same block, and not later where causal."""
    seen = (block[:, None] == own_block[None, :]) & (own_offset < K)[None, :]
    if CAUSAL:
        seen = seen & (own_offset[None, :] <= offset[:, None])
    return seen


@triton.jit
def _more_keys(
    top, total, out, q, k, v, seen, scale, MASKED: tl.constexpr, PRECISION: tl.constexpr
):
    """A tile of keys into the online softmax."""
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if MASKED:
        score = tl.where(seen, score, LOWEST)
    new_top = tl.maximum(top, tl.max(score, 1))
    p = tl.exp2(score - new_top[:, None])
    fade = tl.exp2(top - new_top)
    out = tl.dot(p.to(v.dtype), v, out * fade[:, None], input_precision=PRECISION)
    return new_top, total * fade + tl.sum(p, 1), out


@triton.jit
def _forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    own_k_ptr,
    own_v_ptr,
    out_ptr,
    sum_ptr,
    low_ptr,
    high_ptr,
    q_stride,
    k_stride,
    v_stride,
    own_k_stride,
    own_v_stride,
    num_blocks,
    scale,
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
    q = tl.load(q_ptr + q_at, mask=real, other=0.0)

    # The blocks themselves first, so that every row has seen something.
    own_block, own_offset, there = own_rows(first, num_blocks, K, KP, BLOCKS)
    k_at = at_rows(own_block, own_offset, g, own_k_stride, K, E)
    v_at = at_rows(own_block, own_offset, g, own_v_stride, K, E)
    own_k = tl.load(own_k_ptr + k_at, mask=there, other=0.0)
    own_v = tl.load(own_v_ptr + v_at, mask=there, other=0.0)
    score = tl.dot(q, tl.trans(own_k), input_precision=PRECISION) * scale
    score = tl.where(in_block(block, offset, own_block, own_offset, K, CAUSAL), score, LOWEST)
    top = tl.max(score, 1)
    p = tl.exp2(score - top[:, None])
    total = tl.sum(p, 1)
    out = tl.dot(p.to(own_v.dtype), own_v, input_precision=PRECISION)

    low, end, before, whole, tiles = key_tiles(
        low_ptr, high_ptr, first, num_blocks, BLOCKS, K, WINDOW, KEYS
    )
    row_low, row_high = bounds_of(low_ptr, high_ptr, block, num_blocks)
    for i in range(0, before + tiles - whole):
        token = low + tl.where(i < before, i, i - before + whole) * KEYS + tl.arange(0, KEYS)
        k, v = keys_at(k_ptr, v_ptr, token, end, g, k_stride, v_stride, E, True)
        seen = in_range(
            token[None, :], row_low[:, None], row_high[:, None], offset[:, None], WINDOW
        )
        top, total, out = _more_keys(top, total, out, q, k, v, seen, scale, True, PRECISION)
    for i in range(before, whole):
        token = low + i * KEYS + tl.arange(0, KEYS)
        k, v = keys_at(k_ptr, v_ptr, token, end, g, k_stride, v_stride, E, False)
        top, total, out = _more_keys(top, total, out, q, k, v, True, scale, False, PRECISION)
    out_at = at_rows(block, offset, g * HEADS + head, groups * HEADS * E, K, E)
    tl.store(out_ptr + out_at, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=real)
    sum_at = ((g * num_blocks + block) * (SPLITS * HP) + head) * KP + offset
    tl.store(sum_ptr + sum_at, top + tl.log2(total), mask=block < num_blocks)


def sums_shape(q_QNE: Tensor, k_TGE: Tensor, low_A: Tensor) -> tuple[int, int, int]:
    """[G, A, rows of a block], heads and offsets rounded up."""
    groups, blocks = k_TGE.shape[1], len(low_A)
    sizes = Sizes.of(q_QNE.shape[1] // groups, len(q_QNE) // blocks, q_QNE.shape[2], 1)
    return groups, blocks, sizes.SPLITS * sizes.HP * sizes.KP


def launch(
    tilings: Mapping[int, Sequence[Tiling]], like: Tensor, start: Callable[[Tiling], None]
) -> None:
    """`start` with the first tiling that this GPU has the shared memory for; ConfigError if none.
    `like`: [.., E]."""
    table = FLOAT32 if like.dtype == torch.float32 else tilings
    for tiling in table[128 if like.shape[-1] <= 128 else 256]:
        try:
            return start(tiling)
        except OutOfResources as error:  # raised before anything runs
            refused = error
    size, dtype = like.shape[-1], str(like.dtype).removeprefix("torch.")
    raise ConfigError(
        f"drafter.head_dim, drafter.block_size: attention over heads of {size} in {dtype} asks for "
        f"{refused.required} bytes of {refused.name}, this GPU has {refused.limit}: make one of "
        "them smaller, or drafter.dtype bfloat16"
    )


def options(tiling: Tiling, like: Tensor) -> dict[str, Any]:
    precision = "ieee" if like.dtype == torch.float32 else "tf32"
    return {"PRECISION": precision, "num_warps": tiling.warps, "num_stages": tiling.stages}


def strides(*tensors: Tensor) -> list[int]:
    """From row to row of [rows, heads, E], whose heads stand side by side."""
    assert all(x.stride(2) == 1 and x.stride(1) == x.shape[2] for x in tensors)
    return [x.stride(0) for x in tensors]


def forward(
    q_QNE: Tensor,
    k_TGE: Tensor,
    v_TGE: Tensor,
    own_k_QGE: Tensor,
    own_v_QGE: Tensor,
    low_A: Tensor,
    high_A: Tensor,
    scale: float,
    window: int | None,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """(out_QNE, log2 sums of `sums_shape`). E: a power of two, at least 16."""
    (rows, heads, size), groups, blocks = q_QNE.shape, k_TGE.shape[1], len(low_A)
    out_QNE = q_QNE.new_empty(q_QNE.shape)
    sums = low_A.new_empty(sums_shape(q_QNE, k_TGE, low_A), dtype=torch.float32)
    inputs = (q_QNE, k_TGE, v_TGE, own_k_QGE, own_v_QGE)

    def start(tiling: Tiling) -> None:
        sizes = Sizes.of(heads // groups, rows // blocks, size, tiling.rows)
        _forward_kernel[(triton.cdiv(blocks, sizes.BLOCKS), groups * sizes.SPLITS)](
            *inputs,
            out_QNE,
            sums,
            low_A,
            high_A,
            *strides(*inputs),
            blocks,
            scale * LOG2_E,
            WINDOW=window or 0,
            CAUSAL=causal,
            KEYS=tiling.keys,
            **sizes._asdict(),
            **options(tiling, q_QNE),
        )

    launch(FORWARD, q_QNE, start)
    return out_QNE, sums
