"""What decoding will accept on a known text, computed as training computes it.

    states_TF = text_states(target, [*prompt, *tokens])
    lengths = walk(drafter, ends, states_TF, prompt, tokens)    # {"tau_walk": [...], ...}

The slow, obvious side of decode.py: all positions at once, the block mask, no cache, no
verification. On the target's own greedy text and in float32, `tau_walk` is the accepted lengths of
real chains and `ddtree_len@N` those of real trees of N nodes, round by round; where they aren't,
the drafter is not served what it was trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .anchors import Anchors, block_inputs
from .ddtree import best_tokens, walk_tree
from .mask import dense_masks
from .metrics import tau_walk
from .model import DFlashDrafter, FrozenEnds, layer_kinds
from .target import Target

WALK_BLOCKS = 32
"""Blocks drafted at once: bounds the logits in memory."""
TREE_SIZES = (16, 64)
"""Nodes of the trees that are always walked: a small one, and one of about the best speed-up."""


@torch.inference_mode()
def text_states(target: Target, text: Sequence[int]) -> torch.Tensor:
    """The tapped states of one text, [T, n_taps*H], on the target's device."""
    width = len(target.taps) * target.arch.hidden_size
    states_TF = torch.empty(len(text), width, dtype=target.dtype, device=target.device)
    target.capture([torch.tensor(text)], states_TF)
    return states_TF


def walk(
    drafter: DFlashDrafter,
    ends: FrozenEnds,
    states_TF: torch.Tensor,
    prompt: Sequence[int],
    tokens: Sequence[int],
    tree_sizes: Sequence[int] = TREE_SIZES,
) -> dict[str, list[int]]:
    """Accepted tokens of each round over `tokens`, a continuation of `prompt`, by kind of draft."""
    names = ["tau_walk", *(f"ddtree_len@{size}" for size in tree_sizes)]
    parts = []
    for logits_PJV in walk_logits(drafter, ends, states_TF, prompt, tokens):
        found = logits_PJV.argmax(dim=-1), *best_tokens(logits_PJV, max(tree_sizes))
        parts.append([x.cpu() for x in found])
    if not parts:
        return {name: [] for name in names}
    best_PJ, logp_PJM, token_PJM = (torch.cat(x) for x in zip(*parts, strict=True))
    trees = [walk_tree(logp_PJM, token_PJM, tokens, size) for size in tree_sizes]
    return dict(zip(names, [walk_chain(best_PJ, tokens), *trees], strict=True))


@torch.inference_mode()
def walk_logits(
    drafter: DFlashDrafter,
    ends: FrozenEnds,
    states_TF: torch.Tensor,
    prompt: Sequence[int],
    tokens: Sequence[int],
) -> Iterator[torch.Tensor]:
    """logits [P, K-1, V] of some blocks at a time: one for each token but the last, in order.

    As training computes it: the target's states of the whole text at once, every position an
    anchor, the block mask, no cache. The row of tokens[p] drafts tokens[p+1..p+K-1].
    """
    arch, device = drafter.arch, ends.embed_VH.device
    text_T = torch.tensor([*prompt, *tokens], device=device)
    assert len(states_TF) == len(text_T)
    pos_T, doc_T = torch.arange(len(text_T), device=device), torch.zeros_like(text_T)
    ctx_TH = drafter.context(states_TF.to(device, drafter.fc.weight.dtype))
    ctx_kv = drafter.context_kv(ctx_TH, pos_T)
    for position_A in pos_T[len(prompt) : -1].split(WALK_BLOCKS):
        if len(position_A) == 0:  # a text of one token
            return
        valid_A = torch.ones_like(position_A, dtype=torch.bool)
        anchors = Anchors(position_A, valid_A, torch.zeros_like(position_A))
        ids_Q, pos_Q = block_inputs(anchors, text_T, pos_T, arch.block_size, arch.mask_token_id)
        masks = dense_masks(doc_T, anchors, arch.block_size, layer_kinds(arch))
        hidden_QH = drafter(ends.embed(ids_Q), pos_Q, ctx_kv, masks)
        hidden_RH = hidden_QH.unflatten(0, (-1, arch.block_size))[:, 1:].flatten(0, 1)
        yield ends.logits(hidden_RH).unflatten(0, (-1, arch.block_size - 1))


def walk_chain(proposals_PJ: torch.Tensor, tokens: Sequence[int]) -> list[int]:
    """Accepted tokens of each round of tau_walk over the continuation."""
    slots = proposals_PJ.shape[1]
    label_PJ = torch.tensor([*tokens, *([-1] * slots)]).unfold(0, slots, 1)[1 : len(tokens)]
    return tau_walk((proposals_PJ == label_PJ).tolist())[1]


def mean_length(accepted: Sequence[int]) -> float | None:
    """Tokens per round, the bonus token included; None where there was no round."""
    return sum(n + 1 for n in accepted) / len(accepted) if accepted else None
