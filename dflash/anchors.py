"""Which blocks a step trains on: documents, valid anchors, a random static number of them, and
their labels.

All of it is tensor code with static shapes: no host sync, nothing data-dependent. Randomness is a
function, not a state: the key of position t is an integer hash of (seed, seq, pass, t), the same
bits on CPU and GPU.

An anchor `a` is a real token; its block asks for tokens a+1 .. a+K-1 and may look at context
strictly before `a`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

POSITION_BITS = 21
"""Low bits of a key hold the position, so that keys are unique and a draw has no ties."""


class Anchors(NamedTuple):
    position_A: Tensor
    """int64, rising over the valid ones, which come first."""
    valid_A: Tensor
    """bool; surplus blocks (fewer valid anchors than A) are False."""
    doc_A: Tensor
    """int64 document of the anchor, -1 where invalid."""


def documents(lens_D: Tensor, total_tok: Tensor, num_tokens: int) -> Tensor:
    """doc_T int64: the document of every packed token, -1 at and beyond `total_tok` (0-d int64).

    A slot's tail still holds its previous batch: nothing beyond total_tok may be believed, and this
    is where it ends.
    """
    token_T = torch.arange(num_tokens, device=lens_D.device)
    doc_T = torch.bucketize(token_T, lens_D.cumsum(0), right=True)
    return torch.where(token_T < total_tok, doc_T, -1)


def valid_anchors(lm_T: Tensor, doc_T: Tensor) -> Tensor:
    """bool [T]: lm[a] & lm[a+1] & doc[a] == doc[a+1] >= 0; the last position is never
    valid."""
    valid_T = torch.zeros_like(lm_T)
    valid_T[:-1] = lm_T[:-1] & lm_T[1:] & (doc_T[:-1] == doc_T[1:]) & (doc_T[:-1] >= 0)
    return valid_T


def hash_keys(
    seed: int | Tensor,
    seq: int | Tensor,
    pass_idx: int | Tensor,
    num_tokens: int,
    device: torch.device,
) -> Tensor:
    """int64 [T], non-negative and distinct: a pure function of (seed, seq, pass, position).

    The three are ints or 0-d int64 tensors on `device` (inputs of a captured step). splitmix64's
    mixer (Steele et al. 2014) chained over the four values; int64 products wrap the same way
    everywhere.
    """
    assert num_tokens <= 1 << POSITION_BITS
    stream = torch.zeros((), dtype=torch.int64, device=device)
    for word in (seed, seq, pass_idx):
        stream = _mix(stream + word)
    position_T = torch.arange(num_tokens, device=device)
    random_T = _mix(stream + position_T)
    return (random_T & ((1 << 63) - (1 << POSITION_BITS))) | position_T


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser on int64 bits, after its odd increment (so that 0 does not map to
    0)."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's >> on int64 copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def sample_anchors(key_T: Tensor, valid_T: Tensor, doc_T: Tensor, num_anchors: int) -> Anchors:
    """`num_anchors` valid positions, uniformly without replacement: those with the largest keys;
    sorted.

    Sorting does not change the loss; it makes neighbouring blocks read the same stretch of context.
    """
    num_tokens = key_T.numel()
    assert num_anchors <= num_tokens
    # An invalid position loses to every valid one: its key becomes negative, and stays distinct.
    picked_A = torch.where(valid_T, key_T, key_T + (-1 << 63)).topk(num_anchors).indices
    late_A = torch.where(valid_T[picked_A], 0, num_tokens)
    order_A = (picked_A + late_A).sort().values
    ok_A = order_A < num_tokens
    position_A = torch.where(ok_A, order_A, order_A - num_tokens)
    return Anchors(position_A, ok_A, torch.where(ok_A, doc_T[position_A], -1))


def labels(
    anchors: Anchors, ids_T: Tensor, lm_T: Tensor, doc_T: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What slots 1..K-1 of each block are asked for: (label_AJ, mask_AJ, at_AJ), J = K-1.

    Slot k predicts the token at a+k, no shift. mask: m_k = prod_{i<=k} lm[a+i] & doc[a+i] == doc[a]
    & in bounds, so a block is trained up to the first token that is not the target's own. at_AJ is
    a+k (0 where masked) and label 0 where masked: safe to gather with.
    """
    num_tokens = ids_T.numel()
    slot_J = torch.arange(1, block_size, device=ids_T.device)
    at_AJ = anchors.position_A[:, None] + slot_J
    inside_AJ = at_AJ < num_tokens
    at_AJ = torch.where(inside_AJ, at_AJ, 0)
    own_AJ = (doc_T[at_AJ] == anchors.doc_A[:, None]) & anchors.valid_A[:, None]
    mask_AJ = (inside_AJ & own_AJ & lm_T[at_AJ]).cumprod(dim=1).bool()
    at_AJ = torch.where(mask_AJ, at_AJ, 0)
    return torch.where(mask_AJ, ids_T[at_AJ], 0), mask_AJ, at_AJ


def block_inputs(
    anchors: Anchors, ids_T: Tensor, pos_T: Tensor, block_size: int, mask_token_id: int
) -> tuple[Tensor, Tensor]:
    """Token ids and positions of the block rows: ids_Q = [token at a, MASK x (K-1)], pos_Q = pos[a]
    + 0..K-1.

    An invalid block is all MASK at position 0: what stands at its position may be stale.
    """
    ids_AK = ids_T.new_full((anchors.position_A.numel(), block_size), mask_token_id)
    ids_AK[:, 0] = torch.where(anchors.valid_A, ids_T[anchors.position_A], mask_token_id)
    start_A = torch.where(anchors.valid_A, pos_T[anchors.position_A], 0)
    pos_AK = start_A[:, None] + torch.arange(block_size, device=ids_T.device)
    return ids_AK.flatten(), pos_AK.flatten()
