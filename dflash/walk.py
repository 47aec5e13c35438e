"""tau_walk: what decoding will accept on a text, computed as training computes it.

The slow, obvious side of decode.py: all positions at once, the block mask, no cache, no
verification. In float32 its accepted lengths equal real decoding's, round by round; where they
don't, the drafter is not served what it was trained on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .anchors import Anchors, block_inputs
from .mask import dense_masks
from .metrics import tau_walk
from .model import DFlashDrafter, FrozenEnds, layer_kinds
from .target import Target

WALK_BLOCKS = 32
"""Blocks drafted at once: bounds the logits in memory."""


@torch.inference_mode()
def walk_proposals(
    target: Target,
    drafter: DFlashDrafter,
    ends: FrozenEnds,
    prompt: Sequence[int],
    tokens: Sequence[int],
) -> torch.Tensor:
    """int64 [P, K-1]: what the drafter proposes after each token of a continuation but its last.

    As training computes it: the target's states of the whole text at once, every position an
    anchor, the block mask, no cache. Row p stands at tokens[p] and proposes tokens[p+1..p+K-1].
    """
    arch, device = drafter.arch, target.device
    text_T = torch.tensor([*prompt, *tokens], device=device)
    feat_TF = torch.empty(
        len(text_T), arch.num_taps * arch.hidden_size, dtype=target.dtype, device=device
    )
    target.capture([text_T.cpu()], feat_TF)
    pos_T, doc_T = torch.arange(len(text_T), device=device), torch.zeros_like(text_T)
    ctx_TH = drafter.context(feat_TF.to(drafter.fc.weight.dtype))
    ctx_kv = drafter.context_kv(ctx_TH, pos_T)
    proposals = []
    for position_A in pos_T[len(prompt) : -1].split(WALK_BLOCKS):
        valid_A = torch.ones_like(position_A, dtype=torch.bool)
        anchors = Anchors(position_A, valid_A, torch.zeros_like(position_A))
        ids_Q, pos_Q = block_inputs(anchors, text_T, pos_T, arch.block_size, arch.mask_token_id)
        masks = dense_masks(doc_T, anchors, arch.block_size, layer_kinds(arch))
        hidden_QH = drafter(ends.embed(ids_Q), pos_Q, ctx_kv, masks)
        hidden_RH = hidden_QH.unflatten(0, (-1, arch.block_size))[:, 1:].flatten(0, 1)
        best_R = ends.logits(hidden_RH).argmax(dim=-1)
        proposals.append(best_R.view(-1, arch.block_size - 1).cpu())
    return torch.cat(proposals) if proposals else torch.empty(0, arch.block_size - 1).long()


def walk(proposals_PJ: torch.Tensor, tokens: Sequence[int]) -> list[int]:
    """Accepted tokens of each round of tau_walk over the continuation."""
    slots = proposals_PJ.shape[1]
    label_PJ = torch.tensor([*tokens, *([-1] * slots)]).unfold(0, slots, 1)[1 : len(tokens)]
    return tau_walk((proposals_PJ == label_PJ).tolist())[1]
