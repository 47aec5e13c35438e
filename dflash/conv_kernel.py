# mypy: disallow_untyped_defs=False
"""The short convolution of a Gated DeltaNet layer on a GPU, in one pass: W shifted reads that the
cache serves, SiLU, and each head to length one where queries and keys are made.

Inductor's code for fast_layers.short_conv, which this must equal, moves 0.85 TB/s on an H200.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TOKENS, WARPS = 32, 4


@triton.jit
def _conv_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    length,
    row_stride,
    eps,
    NORMED: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    head, heads = tl.program_id(1), tl.num_programs(1)
    blocks = tl.cdiv(length, TOKENS)
    row = (tl.program_id(0) // blocks).to(tl.int64) * length
    t = tl.program_id(0) % blocks * TOKENS + tl.arange(0, TOKENS)
    lane = tl.arange(0, LANES)
    channel = head * SIZE + lane
    inside = (t < length)[:, None] & (lane < SIZE)[None, :]
    total = tl.zeros([TOKENS, LANES], tl.float32)
    for tap in tl.static_range(WIDTH):
        at = t + (tap - WIDTH + 1)
        x = tl.load(
            x_ptr + (row + at)[:, None] * row_stride + channel[None, :],
            mask=inside & (at >= 0)[:, None],
            other=0.0,
        )
        weight = tl.load(weight_ptr + channel * WIDTH + tap, mask=lane < SIZE, other=0.0)
        total += x.to(tl.float32) * weight.to(tl.float32)[None, :]
    total = total * tl.sigmoid(total)
    if NORMED:
        total *= tl.rsqrt(tl.sum(total * total, 1) + eps)[:, None]
    out = out_ptr + (row + t)[:, None] * (heads * SIZE) + channel[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside)


def short_conv(x_BLC: Tensor, weight_CW: Tensor, size: int, eps: float | None) -> Tensor:
    """[B, L, C/size, size]. x_BLC may be a slice of channels of whole rows."""
    rows, length, channels = x_BLC.shape
    assert x_BLC.stride(2) == 1 and x_BLC.stride(0) == length * x_BLC.stride(1)
    assert weight_CW.is_contiguous()
    out = x_BLC.new_empty(rows, length, channels // size, size)
    _conv_kernel[(rows * triton.cdiv(length, TOKENS), channels // size)](
        x_BLC,
        weight_CW,
        out,
        length,
        x_BLC.stride(1),
        0.0 if eps is None else eps,
        NORMED=eps is not None,
        WIDTH=weight_CW.shape[1],
        SIZE=size,
        LANES=triton.next_power_of_2(size),
        TOKENS=TOKENS,
        num_warps=WARPS,
    )
    return out
