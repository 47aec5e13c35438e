# mypy: disallow_untyped_defs=False
"""A stable partition of the columns of a bool matrix, a row a program, on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _in_order_kernel(
    want_ptr, count_ptr, index_ptr, columns, row_stride, column_stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    want = tl.load(want_ptr + row * row_stride + column * column_stride, mask=inside, other=0)
    want = (want != 0).to(tl.int32)
    before = tl.cumsum(want, 0) - want
    count = tl.sum(want, 0)
    place = tl.where(want != 0, before, count + column - before)
    tl.store(index_ptr + row * columns + place, column, mask=inside)
    tl.store(count_ptr + row, count)


def in_order(want_MC: Tensor) -> tuple[Tensor, Tensor]:
    """(how many are True in each row, int32 [M]; the columns, True ones first, int32 [M, C])."""
    rows, columns = want_MC.shape
    count_M = torch.empty(rows, dtype=torch.int32, device=want_MC.device)
    index_MC = torch.empty(rows, columns, dtype=torch.int32, device=want_MC.device)
    _in_order_kernel[(rows,)](
        want_MC.view(torch.uint8),
        count_M,
        index_MC,
        columns,
        *want_MC.stride(),
        BLOCK=triton.next_power_of_2(columns),
    )
    return count_M, index_MC
