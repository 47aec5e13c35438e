# mypy: disallow_untyped_defs=False
"""The short convolution of a Gated DeltaNet layer on a GPU, one pass from packed tokens to padded
rows: W shifted reads that the cache serves, SiLU, and each head to length one where queries and
keys are made.

Inductor's code for layer_functions.short_conv, which this must equal, moves 0.85 TB/s on an H200.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from .fast_layers import Rows

TOKENS, WARPS = 32, 4


@triton.jit
def _conv_kernel(
    x_ptr,
    start_ptr,
    count_ptr,
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
    document = tl.program_id(0) // blocks
    start, count = tl.load(start_ptr + document), tl.load(count_ptr + document)
    t = tl.program_id(0) % blocks * TOKENS + tl.arange(0, TOKENS)
    lane = tl.arange(0, LANES)
    channel = head * SIZE + lane
    known = lane < SIZE
    total = tl.zeros([TOKENS, LANES], tl.float32)
    for tap in tl.static_range(WIDTH):
        at = t + (tap - WIDTH + 1)
        x = tl.load(
            x_ptr + (start + at)[:, None] * row_stride + channel[None, :],
            mask=((at >= 0) & (at < count))[:, None] & known[None, :],
            other=0.0,
        )
        weight = tl.load(weight_ptr + channel * WIDTH + tap, mask=known, other=0.0)
        total += x.to(tl.float32) * weight.to(tl.float32)[None, :]
    total = total * tl.sigmoid(total)
    if NORMED:
        total *= tl.rsqrt(tl.sum(total * total, 1) + eps)[:, None]
    row = document.to(tl.int64) * length + t
    out = out_ptr + row[:, None] * (heads * SIZE) + channel[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=(t < length)[:, None] & known[None, :])


def short_conv(x_NC: Tensor, rows: Rows, weight_CW: Tensor, size: int, eps: float | None) -> Tensor:
    """[B, L, C/size, size]. x_NC may be a slice of channels of whole rows."""
    (documents, length), channels = rows.into_BL.shape, x_NC.shape[1]
    assert x_NC.stride(1) == 1 and weight_CW.is_contiguous()
    out = x_NC.new_empty(documents, length, channels // size, size)
    _conv_kernel[(documents * triton.cdiv(length, TOKENS), channels // size)](
        x_NC,
        rows.start_B,
        rows.count_B,
        weight_CW,
        out,
        length,
        x_NC.stride(0),
        0.0 if eps is None else eps,
        NORMED=eps is not None,
        WIDTH=weight_CW.shape[1],
        SIZE=size,
        LANES=triton.next_power_of_2(size),
        TOKENS=TOKENS,
        num_warps=WARPS,
    )
    return out
