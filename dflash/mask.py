"""Who may look at what: the drafter's attention masks in closed form, and the attention that reads
them.

The key axis is [context 0..T-1 | block rows 0..Q-1]. Row q = j*K + o is offset o of block j, whose
anchor is a:

    context t   iff  block j valid and t < a and doc[t] == doc[a]
                         and (full layer or t >= a + o - (W-1))
    block row   iff  same block     and  (bidirectional layer or its offset <= o)

The anchor's own target state is not visible (t < a, strictly): when the drafter runs for real, it
does not exist yet. Invalid blocks see only themselves, so no row is ever fully masked (that is NaN
in a plain softmax). Masks depend on the layer only through its kind (window, causal) and are shared
by the layers of one kind.

`dense_masks` is the plain form. `grouped_masks` is the same attention on a CPU, where a dense mask
wastes 9/10 of the work: anchors are sorted, so a run of blocks reads one short stretch of context.
It reads that stretch's bounds on the host, which is free on a CPU; a GPU uses block_attention.py,
the same masks as ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .anchors import Anchors
from .block_attention import Ranges, attend_blocks

Kind = tuple[int | None, bool]
"""(sliding window or None, causal inside the block)."""


@dataclass(frozen=True)
class Group:
    """Block rows [q0, q1) see context [t0, t1) and one another, as far as allow_QS says."""

    q0: int
    q1: int
    t0: int
    t1: int
    allow_QS: Tensor


Mask = Tensor | Sequence[Group] | Ranges | None
"""allow_QS bool [Q, T+Q] (True: may see), or groups that cover the rows in order, or ranges, or
None: all see all."""

GROUP_BLOCKS = 8


def context_mask(
    doc_T: Tensor,
    anchor_A: Tensor,
    doc_A: Tensor,
    block_size: int,
    window: int | None,
    first: int = 0,
) -> Tensor:
    """bool [Q, T]: the context part. doc_A is -1 for invalid blocks; doc_T[0] is token number
    `first`."""
    token_T = torch.arange(doc_T.numel(), device=doc_T.device) + first
    same_AT = (doc_T == doc_A[:, None]) & (doc_A >= 0)[:, None]
    allow_AKT = (same_AT & (token_T < anchor_A[:, None]))[:, None].expand(-1, block_size, -1)
    if window is not None:
        assert window >= block_size
        query_AK = anchor_A[:, None] + torch.arange(block_size, device=doc_T.device)
        allow_AKT = allow_AKT & (query_AK[:, :, None] - token_T < window)
    return allow_AKT.flatten(0, 1)


def block_mask(num_blocks: int, block_size: int, causal: bool, device: torch.device) -> Tensor:
    """bool [Q, Q]: the block part, K x K tiles along the diagonal."""
    row_Q = torch.arange(num_blocks * block_size, device=device)
    block_Q = row_Q // block_size
    allow_QQ = block_Q[:, None] == block_Q
    return allow_QQ & (row_Q[:, None] >= row_Q) if causal else allow_QQ


def dense_mask(
    doc_T: Tensor, anchor_A: Tensor, doc_A: Tensor, block_size: int, kind: Kind
) -> Tensor:
    """allow_QS bool [Q, T+Q] of one kind of layer."""
    window, causal = kind
    ctx_QT = context_mask(doc_T, anchor_A, doc_A, block_size, window)
    blk_QQ = block_mask(anchor_A.numel(), block_size, causal, doc_T.device)
    return torch.cat((ctx_QT, blk_QQ), dim=1)


def dense_masks(
    doc_T: Tensor, anchors: Anchors, block_size: int, kinds: Sequence[Kind]
) -> dict[Kind, Mask]:
    return {
        kind: dense_mask(doc_T, anchors.position_A, anchors.doc_A, block_size, kind)
        for kind in kinds
    }


def decode_masks(
    context_len: int, block_size: int, kinds: Sequence[Kind], device: torch.device
) -> dict[Kind, Mask]:
    """Of one block that follows `context_len` cached context rows, all of one document."""
    zeros_T = torch.zeros(context_len, dtype=torch.int64, device=device)
    anchor_A = torch.full((1,), context_len, device=device)
    return {
        kind: None
        if kind == (None, False)
        else dense_mask(zeros_T, anchor_A, torch.zeros_like(anchor_A), block_size, kind)
        for kind in kinds
    }


def grouped_masks(
    doc_T: Tensor, start_A: Tensor, anchors: Anchors, block_size: int, kinds: Sequence[Kind]
) -> dict[Kind, Mask]:
    """The same as dense_masks for CPU attention. start_A: first token of the anchor's document (any
    if invalid)."""
    end_A = torch.where(anchors.valid_A, anchors.position_A, 0)
    start_A = torch.minimum(start_A, end_A)
    bounds = list(zip(start_A.split(GROUP_BLOCKS), end_A.split(GROUP_BLOCKS), strict=True))
    # Within a group the valid anchors come first and rise, and so do their documents' starts.
    spans = [(int(start[0]), int(end.max())) for start, end in bounds]
    return {kind: _groups(doc_T, anchors, block_size, kind, spans) for kind in kinds}


def _groups(
    doc_T: Tensor, anchors: Anchors, block_size: int, kind: Kind, spans: list[tuple[int, int]]
) -> list[Group]:
    window, causal = kind
    groups, row = [], 0
    for (t0, t1), anchor_A, doc_A in zip(
        spans,
        anchors.position_A.split(GROUP_BLOCKS),
        anchors.doc_A.split(GROUP_BLOCKS),
        strict=True,
    ):
        if window is not None:
            t0 = max(t0, min(t1, int(anchor_A[0]) - window + 1))
        rows = anchor_A.numel() * block_size
        ctx_QT = context_mask(doc_T[t0:t1], anchor_A, doc_A, block_size, window, first=t0)
        blk_QQ = block_mask(anchor_A.numel(), block_size, causal, doc_T.device)
        groups.append(Group(row, row + rows, t0, t1, torch.cat((ctx_QT, blk_QQ), dim=1)))
        row += rows
    return groups


def attend(
    q_QNE: Tensor, ctx: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], mask: Mask
) -> Tensor:
    """Attention of the block rows over [context | block rows] -> out_QNE. G key heads serve N = n*G
    query heads."""
    if isinstance(mask, Ranges):
        return attend_blocks(q_QNE, ctx, block, mask)
    if mask is None or isinstance(mask, Tensor):
        return _sdpa(q_QNE, _join(ctx[0], block[0]), _join(ctx[1], block[1]), mask)
    parts = []
    for group in mask:
        key_SGE, value_SGE = (
            _join(of_ctx[group.t0 : group.t1], of_block[group.q0 : group.q1])
            for of_ctx, of_block in zip(ctx, block, strict=True)
        )
        parts.append(_sdpa(q_QNE[group.q0 : group.q1], key_SGE, value_SGE, group.allow_QS))
    return torch.cat(parts)


def _join(ctx_TGE: Tensor, block_QGE: Tensor) -> Tensor:
    return torch.cat((ctx_TGE, block_QGE))


def _sdpa(q_QNE: Tensor, k_SGE: Tensor, v_SGE: Tensor, allow_QS: Tensor | None) -> Tensor:
    q_1NQE, k_1GSE, v_1GSE = (x.transpose(0, 1)[None] for x in (q_QNE, k_SGE, v_SGE))
    out_1NQE = F.scaled_dot_product_attention(
        q_1NQE, k_1GSE, v_1GSE, attn_mask=allow_QS, enable_gqa=True
    )
    return out_1NQE[0].transpose(0, 1)
