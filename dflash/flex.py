"""The attention mask as flex_attention's BlockMask, in closed form, and the attention that uses it.

    mask = FlexMask(block_mask_of(tiles, ...), ...)     # one a kind of layer, shared by its layers
    out_QNE = flex_attend(q_QNE, ctx, block, mask)

The mask is mask.py's. create_block_mask finds its tiles by asking about every (row, key) pair, or
by a compiled search; here they follow from three numbers a block: it sees context [low, anchor) and
itself. So a tile of keys is *full* for a tile of rows if it lies inside [low, anchor) of every
block there, and is skipped if it touches no block's range. Only the other tiles ask `mask_mod`. No
data-dependent shape, no sync.

Query heads that share a key head are folded into the rows, row = (block * n + head) * K + offset:
a tile of 128 rows then holds few blocks (one, of 4 heads x 32), so nearly all tiles are full or
skipped whatever the order of the anchors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from .anchors import Anchors

TILE = 128


@dataclass(frozen=True)
class Grid:
    """What the tiles depend on besides the data."""

    num_tokens: int
    num_blocks: int
    block_size: int
    heads: int
    """Query heads folded into the rows: those of one key head."""

    @property
    def rows(self) -> int:
        return self.num_blocks * self.block_rows

    @property
    def block_rows(self) -> int:
        """Rows of one block."""
        return self.heads * self.block_size

    @property
    def keys(self) -> int:
        return self.num_tokens + self.num_blocks * self.block_size


class Tiles(NamedTuple):
    """Of one kind of layer: per tile of rows the key tiles, and per tile of keys the row tiles.

    Each is (count, indices), int32 [1, 1, M] and [1, 1, M, C]: the wanted ones first, in order.
    """

    kv: tuple[Tensor, Tensor]
    full_kv: tuple[Tensor, Tensor]
    q: tuple[Tensor, Tensor]
    full_q: tuple[Tensor, Tensor]


def context_range(anchors: Anchors, lens_D: Tensor) -> tuple[Tensor, Tensor]:
    """(low_A, high_A) int32: block j of a full layer sees context [low, high); empty if invalid."""
    start_D = lens_D.cumsum(0) - lens_D
    low_A = torch.where(anchors.valid_A, start_D[anchors.doc_A.clamp_min(0)], 0)
    high_A = torch.where(anchors.valid_A, anchors.position_A, 0)
    return low_A.int(), high_A.int()


def find_flags(
    anchors: Anchors, lens_D: Tensor, windows: Sequence[int | None], grid: Grid
) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """(low_A, high_A, tile_flags of each window)."""
    low_A, high_A = context_range(anchors, lens_D)
    return low_A, high_A, [tile_flags(low_A, high_A, window, grid) for window in windows]


def find_tiles(part_MC: Tensor, every_MC: Tensor) -> Tiles:
    return Tiles(
        _in_order(part_MC), _in_order(every_MC), _in_order(part_MC.T), _in_order(every_MC.T)
    )


def tile_flags(
    low_A: Tensor, high_A: Tensor, window: int | None, grid: Grid
) -> tuple[Tensor, Tensor]:
    """bool [M, C], disjoint: rows that see some of the keys; every row sees every key.

    The window is taken loosely for the first and strictly for the second, which is exact where a
    tile holds whole runs of K rows.
    """
    device, block = low_A.device, grid.block_size
    m_M1 = torch.arange(-(-grid.rows // TILE), device=device)[:, None]
    begin_C = torch.arange(-(-grid.keys // TILE), device=device) * TILE
    end_C = begin_C + TILE
    first_M1 = m_M1 * TILE // grid.block_rows
    last_M1 = ((m_M1 + 1) * TILE - 1) // grid.block_rows
    whole = TILE % grid.block_rows == 0 or grid.block_rows % TILE == 0
    most = max(1, TILE // grid.block_rows) if whole else (TILE - 2) // grid.block_rows + 2
    some_MC = torch.zeros_like(m_M1 + begin_C, dtype=torch.bool)
    every_MC = ((m_M1 + 1) * TILE <= grid.rows).expand_as(some_MC)
    for step in range(most):
        j_M1 = first_M1 + step
        here_M1 = (j_M1 <= last_M1) & (j_M1 < grid.num_blocks)
        j_M1 = j_M1.clamp_max(grid.num_blocks - 1)
        low_M1, high_M1 = low_A[j_M1], high_A[j_M1]
        strict_M1 = low_M1
        if window is not None:
            strict_M1 = torch.maximum(low_M1, high_M1 - window + block)
            low_M1 = torch.maximum(low_M1, high_M1 - window + 1)
        sees_MC = torch.maximum(low_M1, begin_C) < torch.minimum(high_M1, end_C)
        own_M1 = grid.num_tokens + j_M1 * block
        own_MC = (own_M1 < end_C) & (begin_C < own_M1 + block)
        some_MC = some_MC | (here_M1 & (sees_MC | own_MC))
        every_MC = every_MC & (~here_M1 | ((strict_M1 <= begin_C) & (end_C <= high_M1)))
    return some_MC & ~every_MC, every_MC


def _in_order(want_MC: Tensor) -> tuple[Tensor, Tensor]:
    """The order of create_block_mask: the wanted columns first; contiguous, since the kernels read
    indices with stride 1 whatever the tensor's strides are.

    Not to be compiled: of a short row's sort inductor 2.11 makes a kernel that takes minutes to
    compile (40 columns: over 80 s)."""
    if want_MC.is_cuda:
        from .tiles_kernel import in_order

        count_M, index_MC = in_order(want_MC)
    else:
        order_MC = want_MC.int().argsort(dim=1, descending=True, stable=True)
        index_MC = order_MC.int().contiguous()
        count_M = want_MC.sum(dim=1).int()
    return count_M[None, None], index_MC[None, None]


def block_mask_of(
    tiles: Tiles, low_A: Tensor, high_A: Tensor, window: int | None, causal: bool, grid: Grid
) -> BlockMask:
    return BlockMask(
        seq_lengths=(grid.rows, grid.keys),
        kv_num_blocks=tiles.kv[0],
        kv_indices=tiles.kv[1],
        full_kv_num_blocks=tiles.full_kv[0],
        full_kv_indices=tiles.full_kv[1],
        q_num_blocks=tiles.q[0],
        q_indices=tiles.q[1],
        full_q_num_blocks=tiles.full_q[0],
        full_q_indices=tiles.full_q[1],
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=mask_mod_of(low_A, high_A, window, causal, grid),
    )


def mask_mod_of(
    low_A: Tensor, high_A: Tensor, window: int | None, causal: bool, grid: Grid
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """flex_attention's mask_mod(batch, head, row, key) of folded rows."""
    block, block_rows, tokens = grid.block_size, grid.block_rows, grid.num_tokens

    def may_see(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        j, offset = row // block_rows, row % block
        low, high = low_A[j], high_A[j]
        if window is not None:
            low = torch.maximum(low, high + offset - (window - 1))
        own = key - tokens
        mine = (own >= 0) & (own // block == j)
        if causal:
            mine = mine & (own % block <= offset)
        return ((key >= low) & (key < high)) | mine

    return may_see


_compiled_flex: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)


def fold(x_QNE: Tensor, heads: int, block_size: int) -> Tensor:
    """[Q, G*n, E] -> [1, G, A*n*K, E], rows in the order of the module's docstring."""
    x_AKGnE = x_QNE.unflatten(0, (-1, block_size)).unflatten(2, (-1, heads))
    return x_AKGnE.permute(2, 0, 3, 1, 4).flatten(1, 3)[None]


def unfold(x_1GRE: Tensor, heads: int, block_size: int) -> Tensor:
    x_GAnKE = x_1GRE[0].unflatten(1, (-1, heads, block_size))
    return x_GAnKE.permute(1, 3, 0, 2, 4).flatten(2, 3).flatten(0, 1)


class FlexMask(NamedTuple):
    """Of one kind of layer."""

    mask: BlockMask
    heads: int
    """Query heads of a key head, folded into the rows."""
    block_size: int


def flex_attend(
    q_QNE: Tensor, ctx: Sequence[Tensor], block: Sequence[Tensor], mask: FlexMask
) -> Tensor:
    """out_QNE. Uncompiled, flex_attention makes all scores: so only in a CPU's tests."""
    attention: Any = _compiled_flex if q_QNE.is_cuda else flex_attention
    k_1GSE, v_1GSE = (
        torch.cat((of_ctx, of_block)).transpose(0, 1)[None]
        for of_ctx, of_block in zip(ctx, block, strict=True)
    )
    rows_1GRE = fold(q_QNE, mask.heads, mask.block_size)
    out_1GRE = attention(rows_1GRE, k_1GSE, v_1GSE, block_mask=mask.mask)
    assert isinstance(out_1GRE, Tensor)
    return unfold(out_1GRE, mask.heads, mask.block_size)
