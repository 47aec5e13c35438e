# mypy: disallow_untyped_defs=False
"""layer_functions.py on a GPU, which this must equal: each a Triton kernel of one pass over memory.

Tiles are fixed. Inductor times tiles at its first call, here the self-test's few tokens, and keeps
its choice on disk: its SiLU x up took 76 ms a slot of the 27B model in one run and 122 in another
(H200; 78 at 4 TB/s). Of q's and k's norm and rotation it makes a loop of several passes, since
their rows are gathered: 48 ms a slot of Qwen3-8B (9 at 4 TB/s).

Offsets of rows are int64: at 49,152 tokens of 17,408 numbers they are 40 % of what int32 holds.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .conv_kernel import short_conv

__all__ = [
    "add_weighted",
    "gated",
    "gated_norm",
    "norm_rotate",
    "rms_norm",
    "short_conv",
    "silu_times",
]

TILE, TILE_WARPS = 4096, 4
"""Numbers that a program takes at a time where heads are apart: 8 KiB of bf16 in, as much out."""
BLOCK, BLOCK_WARPS = 4096, 8
ADD_WARPS = 4
LANES_A_WARP, MOST_WARPS = 1024, 16
"""Of a norm's row, which is one program's."""


@triton.jit
def _rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, row_stride, eps, offset, SIZE: tl.constexpr, LANES: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    known = lane < SIZE
    weight = tl.load(weight_ptr + lane, mask=known, other=0.0).to(tl.float32) + offset
    x = tl.load(x_ptr + row * row_stride + lane, mask=known, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    tl.store(out_ptr + row * SIZE + lane, (x * weight).to(out_ptr.dtype.element_ty), mask=known)


def rms_norm(x_NH: Tensor, weight_H: Tensor, eps: float, offset: float) -> Tensor:
    (tokens, size), lanes = x_NH.shape, triton.next_power_of_2(x_NH.shape[1])
    assert x_NH.stride(1) == 1 and weight_H.is_contiguous()
    out_NH = x_NH.new_empty(tokens, size)
    _rms_norm_kernel[(tokens,)](
        x_NH,
        weight_H,
        out_NH,
        x_NH.stride(0),
        eps,
        offset,
        SIZE=size,
        LANES=lanes,
        num_warps=min(max(lanes // LANES_A_WARP, 1), MOST_WARPS),
    )
    return out_NH


@triton.jit
def _silu_times_kernel(
    gate_ptr, up_ptr, out_ptr, size, row_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    source = at
    if WIDTH:
        source = at // WIDTH * row_stride + at % WIDTH
    gate = tl.load(gate_ptr + source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + source, mask=inside, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


def silu_times(gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    """The two may be halves of one tensor's rows."""
    assert gate_NF.shape == up_NF.shape and gate_NF.stride() == up_NF.stride()
    assert gate_NF.stride(1) == 1
    out_NF, size = up_NF.new_empty(up_NF.shape), up_NF.numel()
    _silu_times_kernel[(triton.cdiv(size, BLOCK),)](
        gate_NF,
        up_NF,
        out_NF,
        size,
        gate_NF.stride(0),
        WIDTH=0 if gate_NF.is_contiguous() else gate_NF.shape[1],
        BLOCK=BLOCK,
        num_warps=BLOCK_WARPS,
    )
    return out_NF


@triton.jit
def _add_weighted_kernel(
    state_ptr,
    rows_ptr,
    place_ptr,
    weight_ptr,
    SIZE: tl.constexpr,
    PICKS: tl.constexpr,
    LANES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    known = lane < SIZE
    state = state_ptr + token * SIZE + lane
    total = tl.load(state, mask=known, other=0.0).to(tl.float32)
    for pick in tl.static_range(PICKS):
        row = tl.load(place_ptr + token * PICKS + pick)
        weight = tl.load(weight_ptr + token * PICKS + pick).to(tl.float32)
        x = tl.load(rows_ptr + row * SIZE + lane, mask=known, other=0.0).to(tl.float32)
        total += weight * x
    tl.store(state, total.to(state_ptr.dtype.element_ty), mask=known)


def add_weighted(state_NH: Tensor, rows_SH: Tensor, place_NP: Tensor, weight_NP: Tensor) -> None:
    inputs, (tokens, size) = (state_NH, rows_SH, place_NP, weight_NP), state_NH.shape
    assert all(x.is_contiguous() for x in inputs)
    lanes = min(LANES_A_WARP, triton.next_power_of_2(size))
    _add_weighted_kernel[(tokens, triton.cdiv(size, lanes))](
        *inputs, SIZE=size, PICKS=place_NP.shape[1], LANES=lanes, num_warps=ADD_WARPS
    )


@triton.jit(do_not_specialize=["pairs"])
def _gated_kernel(
    x_ptr,
    from_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    pairs,
    x_row_stride,
    x_head_stride,
    gate_row_stride,
    gate_head_stride,
    eps,
    NORMED: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    PAIRS: tl.constexpr,
):
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    row, head = (pair // HEADS).to(tl.int64), pair % HEADS
    source = tl.load(from_ptr + row, mask=pair < pairs, other=0)
    lane = tl.arange(0, LANES)
    known = (pair < pairs)[:, None] & (lane < SIZE)[None, :]
    x_at = (source * x_row_stride + head * x_head_stride)[:, None] + lane[None, :]
    x = tl.load(x_ptr + x_at, mask=known, other=0.0).to(tl.float32)
    gate_at = (row * gate_row_stride + head * gate_head_stride)[:, None] + lane[None, :]
    gate = tl.load(gate_ptr + gate_at, mask=known, other=0.0).to(tl.float32)
    factor = tl.sigmoid(gate)
    if NORMED:
        weight = tl.load(weight_ptr + lane, mask=lane < SIZE, other=0.0).to(tl.float32)
        x *= tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)[:, None] * weight[None, :]
        factor *= gate
    out = out_ptr + pair.to(tl.int64)[:, None] * SIZE + lane[None, :]
    tl.store(out, (x * factor).to(out_ptr.dtype.element_ty), mask=known)


def gated(x_RGE: Tensor, from_N: Tensor, gate_NGE: Tensor) -> Tensor:
    return _gated(x_RGE, from_N, gate_NGE, None, 0.0)


def gated_norm(
    x_RGE: Tensor, from_N: Tensor, gate_NGE: Tensor, weight_E: Tensor, eps: float
) -> Tensor:
    return _gated(x_RGE, from_N, gate_NGE, weight_E, eps)


def _gated(
    x_RGE: Tensor, from_N: Tensor, gate_NGE: Tensor, weight_E: Tensor | None, eps: float
) -> Tensor:
    tokens, heads, size = gate_NGE.shape
    assert x_RGE.shape[1:] == (heads, size) and from_N.is_contiguous()
    assert x_RGE.stride(2) == gate_NGE.stride(2) == 1
    out_NGE = x_RGE.new_empty(tokens, heads, size)
    lanes, count, grid = _tile(tokens * heads, size)
    _gated_kernel[grid](
        x_RGE,
        from_N,
        gate_NGE,
        weight_E,
        out_NGE,
        tokens * heads,
        *x_RGE.stride()[:2],
        *gate_NGE.stride()[:2],
        eps,
        NORMED=weight_E is not None,
        HEADS=heads,
        SIZE=size,
        LANES=lanes,
        PAIRS=count,
        num_warps=TILE_WARPS,
    )
    return out_NGE


@triton.jit
def _weighted(x, scale, weight_ptr, offset, lane, SIZE: tl.constexpr):
    """Of the columns `lane` of a normed head."""
    weight = tl.load(weight_ptr + lane, mask=lane < SIZE, other=0.0).to(tl.float32) + offset
    return x * scale[:, None] * weight[None, :]


@triton.jit(do_not_specialize=["pairs", "length"])
def _norm_rotate_kernel(
    x_ptr,
    into_ptr,
    cos_ptr,
    sin_ptr,
    weight_ptr,
    out_ptr,
    pairs,
    length,
    row_stride,
    head_stride,
    table_stride,
    eps,
    offset,
    NORMED: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_LANES: tl.constexpr,
    STILL_LANES: tl.constexpr,
    PAIRS: tl.constexpr,
):
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    row, head = pair // HEADS, pair % HEADS
    here = (pair < pairs)[:, None]
    source = tl.load(into_ptr + row, mask=pair < pairs, other=0)
    x_ptr += (source * row_stride + head * head_stride)[:, None]
    out_ptr += pair.to(tl.int64)[:, None] * SIZE

    lane = tl.arange(0, HALF_LANES)
    known = here & (lane < HALF)[None, :]
    a = tl.load(x_ptr + lane[None, :], mask=known, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + (HALF + lane)[None, :], mask=known, other=0.0).to(tl.float32)
    place = (row % length * table_stride)[:, None] + lane[None, :]
    cos_a = tl.load(cos_ptr + place, mask=known, other=0.0).to(tl.float32)
    sin_a = tl.load(sin_ptr + place, mask=known, other=0.0).to(tl.float32)
    cos_b = tl.load(cos_ptr + HALF + place, mask=known, other=0.0).to(tl.float32)
    sin_b = tl.load(sin_ptr + HALF + place, mask=known, other=0.0).to(tl.float32)
    square = tl.sum(a * a + b * b, 1)
    if STILL_LANES > 0:
        still_lane = 2 * HALF + tl.arange(0, STILL_LANES)
        still_known = here & (still_lane < SIZE)[None, :]
        still = tl.load(x_ptr + still_lane[None, :], mask=still_known, other=0.0).to(tl.float32)
        square += tl.sum(still * still, 1)
    if NORMED:
        scale = tl.rsqrt(square / SIZE + eps)
        a = _weighted(a, scale, weight_ptr, offset, lane, HALF)
        b = _weighted(b, scale, weight_ptr + HALF, offset, lane, HALF)
    turned_a, turned_b = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + lane[None, :], turned_a.to(dtype), mask=known)
    tl.store(out_ptr + (HALF + lane)[None, :], turned_b.to(dtype), mask=known)
    if STILL_LANES > 0:
        if NORMED:
            still = _weighted(still, scale, weight_ptr, offset, still_lane, SIZE)
        tl.store(out_ptr + still_lane[None, :], still.to(dtype), mask=still_known)


def norm_rotate(
    x_NGE: Tensor,
    into_BL: Tensor,
    cos_L1R: Tensor,
    sin_L1R: Tensor,
    weight_E: Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
) -> Tensor:
    (documents, length), (_, heads, size) = into_BL.shape, x_NGE.shape
    turned = cos_L1R.shape[2]
    assert x_NGE.stride(2) == cos_L1R.stride(2) == 1 and into_BL.is_contiguous()
    assert cos_L1R.shape == (length, 1, turned) and turned % 2 == 0
    assert cos_L1R.stride() == sin_L1R.stride()
    out_BLGE = x_NGE.new_empty(documents, length, heads, size)
    _, count, grid = _tile(documents * length * heads, size)
    _norm_rotate_kernel[grid](
        x_NGE,
        into_BL,
        cos_L1R,
        sin_L1R,
        weight_E,
        out_BLGE,
        documents * length * heads,
        length,
        *x_NGE.stride()[:2],
        cos_L1R.stride(0),
        eps,
        offset,
        NORMED=weight_E is not None,
        HEADS=heads,
        SIZE=size,
        HALF=turned // 2,
        HALF_LANES=triton.next_power_of_2(turned // 2),
        STILL_LANES=triton.next_power_of_2(size - turned) if size > turned else 0,
        PAIRS=count,
        num_warps=TILE_WARPS,
    )
    return out_BLGE


def _tile(pairs: int, size: int) -> tuple[int, int, tuple[int]]:
    """Lanes of a head; (row, head) pairs of a program, in the order of the result; its grid."""
    lanes = triton.next_power_of_2(size)
    count = max(TILE // lanes, 1)
    return lanes, count, (triton.cdiv(pairs, count),)
