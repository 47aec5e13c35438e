"""Decoding for real: the target alone, and the target with a drafter; greedy or sampled.

    plain = plain_greedy(target, prompt_ids, max_new_tokens)
    drafted = speculative_greedy(target, drafter, ends, prompt_ids, max_new_tokens)
    verdict = compare(target, prompt_ids, plain.tokens, drafted.tokens)
    speculative(..., Method(tree=32, temperature=0.8, seed=1))     # a tree of 32 nodes, sampled

One round (z-lab/dflash `dflash_generate`): the drafter sees [last token, MASK x (K-1)] and the keys
and values of every token before it; what it drafts for the next K-1 places, a chain or a tree
(ddtree.py), goes through the target in one call with the last token; the longest path that the
target agrees with is kept, and the target's own next token (the bonus) comes on top. So a round
emits accepted + 1 tokens, and

    tau = mean of accepted + 1 over the rounds; the prefill's own token belongs to no round.

The last round is cut at a stop token or at max_new_tokens: what lies beyond was not accepted. On a
greedy text this is what walk.py computes, round by round.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .cached import CachedTarget
from .ddtree import best_tokens, build_tree
from .mask import decode_masks
from .model import DFlashDrafter, FrozenEnds, KeyValue, layer_kinds
from .sampling import Sampler
from .target import Target

TIE_ULPS = 4
"""Two logits this near, in units in the last place of the larger, are a tie: a block of K tokens
and one token alone go through other matmul shapes, which round differently. On SmolLM2-135M in
bfloat16, 10 of 18 answers of 48 to 96 tokens met a tie: 0, 1 or (once) 2 units wide."""


@dataclass(frozen=True)
class Round:
    accepted: int
    """Drafted tokens that were emitted."""
    judged: int
    """Drafted tokens that could have been: K-1, or less in the last round."""


@dataclass(frozen=True)
class Decoded:
    tokens: list[int]
    """New tokens, a stop token included."""
    prefill_s: float
    decode_s: float
    rounds: tuple[Round, ...] = ()

    @property
    def tau(self) -> float:
        """NaN where the prefill's token was all."""
        lengths = [round_.accepted + 1 for round_ in self.rounds]
        return sum(lengths) / len(lengths) if lengths else math.nan


@dataclass(frozen=True)
class Method:
    """How to decode. Lossless in every form: the text, or its distribution, is the target's."""

    tree: int | None = None
    """Nodes of the drafted tree; None: a chain."""
    temperature: float = 0.0
    seed: int = 0
    """Of the sampled tokens; nothing is random at temperature 0."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def sampler(self, target: Target) -> Sampler:
        return Sampler(self.temperature, self.seed, target.device)


GREEDY = Method()


@torch.inference_mode()
def plain(
    target: Target,
    prompt: Sequence[int],
    max_new_tokens: int,
    stop: Collection[int] | None = None,
    method: Method = GREEDY,
) -> Decoded:
    """The target alone, one token a call. `stop`: token ids that end it (None: the target's)."""
    stop = target.arch.eos_token_ids if stop is None else stop
    cached, sampler = CachedTarget(target, rollback=False), method.sampler(target)
    began = _now(target)
    logits_LV, _ = cached.run(_ids(target, prompt), last_only=True)
    tokens = sampler.pick(logits_LV).tolist()
    prefilled = _now(target)
    while len(tokens) < max_new_tokens and tokens[-1] not in stop:
        logits_LV, _ = cached.run(_ids(target, tokens[-1:]))
        tokens += sampler.pick(logits_LV).tolist()
    return Decoded(tokens, prefilled - began, _now(target) - prefilled)


@torch.inference_mode()
def speculative(
    target: Target,
    drafter: DFlashDrafter,
    ends: FrozenEnds,
    prompt: Sequence[int],
    max_new_tokens: int,
    stop: Collection[int] | None = None,
    method: Method = GREEDY,
) -> Decoded:
    """The target with the drafter: the same tokens (sampled: the same distribution) in fewer target
    calls. Raises ConfigError where the target can't judge a tree."""
    assert target.taps == drafter.arch.taps
    stop = target.arch.eos_token_ids if stop is None else stop
    cached, sampler = CachedTarget(target), method.sampler(target)
    if method.tree is not None:
        cached.check_trees()
    began = _now(target)
    logits_LV, feat_LF = cached.run(_ids(target, prompt), last_only=True)
    cached.keep(range(len(prompt)))
    tokens = sampler.pick(logits_LV).tolist()
    context = extend_context(drafter, [], feat_LF, start=0)
    prefilled = _now(target)
    rounds = []
    while len(tokens) < max_new_tokens and tokens[-1] not in stop:
        start = len(prompt) + len(tokens) - 1
        logits_JV = draft_logits(drafter, ends, tokens[-1], start, context)
        if method.tree is None:
            judged = judge_chain(cached, tokens[-1], logits_JV, sampler)
        else:
            judged = judge_tree(cached, tokens[-1], logits_JV, method.tree, sampler)
        accepted, room = len(judged.tokens) - 1, max_new_tokens - len(tokens)
        new = _cut(judged.tokens, stop, room)
        could = len(new) if len(new) <= accepted else min(len(logits_JV), room)
        rounds.append(Round(min(accepted, len(new)), could))
        tokens += new
        rows = judged.rows[: len(new)]
        cached.keep(rows)
        context = extend_context(drafter, context, judged.feat_LF[rows], start)
    return Decoded(tokens, prefilled - began, _now(target) - prefilled, tuple(rounds))


def plain_greedy(
    target: Target,
    prompt: Sequence[int],
    max_new_tokens: int,
    stop: Collection[int] | None = None,
) -> Decoded:
    return plain(target, prompt, max_new_tokens, stop)


def speculative_greedy(
    target: Target,
    drafter: DFlashDrafter,
    ends: FrozenEnds,
    prompt: Sequence[int],
    max_new_tokens: int,
    stop: Collection[int] | None = None,
) -> Decoded:
    """Chains."""
    return speculative(target, drafter, ends, prompt, max_new_tokens, stop)


# --- one round ------------------------------------------------------------------------------------


class Judged(NamedTuple):
    tokens: list[int]
    """The accepted ones, and the target's own."""
    rows: list[int]
    """Of the target's run: the last token's and the accepted ones'."""
    feat_LF: Tensor
    """The taps of every row of the run."""


def judge_chain(
    cached: CachedTarget, last_token: int, logits_JV: Tensor, sampler: Sampler
) -> Judged:
    draft_J = sampler.pick(logits_JV)
    ids_K = torch.cat((draft_J.new_tensor([last_token]), draft_J))
    logits_KV, feat_KF = cached.run(ids_K)
    found = torch.stack(sampler.judge(draft_J, logits_JV, logits_KV))
    accepted, own, *draft = torch.cat((found, draft_J)).tolist()  # the round's one sync
    return Judged([*draft[:accepted], own], list(range(accepted + 1)), feat_KF)


def judge_tree(
    cached: CachedTarget, last_token: int, logits_JV: Tensor, nodes: int, sampler: Sampler
) -> Judged:
    logp_JM, token_JM = best_tokens(logits_JV, nodes)
    tree = build_tree(logp_JM.tolist(), token_JM.tolist(), nodes)
    device = logits_JV.device
    ids_L, depth_L = (
        torch.tensor(column, device=device)
        for column in ([last_token, *tree.token[1:]], tree.depth)
    )
    logits_LV, feat_LF = cached.run_tree(ids_L, depth_L, tree.sees().to(device))
    # A sampled token of every node, of which those on the path are used: they are independent.
    answer = sampler.pick(logits_LV).tolist()
    path = tree.descend(answer.__getitem__)
    return Judged([*(tree.token[node] for node in path[1:]), answer[path[-1]]], path, feat_LF)


def extend_context(
    drafter: DFlashDrafter, context: Sequence[KeyValue], feat_LF: Tensor, start: int
) -> list[KeyValue]:
    """The drafter's cache with the keys and values of L more tokens, from position `start` on."""
    dtype = drafter.fc.weight.dtype
    pos_L = torch.arange(start, start + len(feat_LF), device=feat_LF.device)
    more = drafter.context_kv(drafter.context(feat_LF.to(dtype)), pos_L)
    if not context:
        return more
    return [
        (torch.cat((k, more_k)), torch.cat((v, more_v)))
        for (k, v), (more_k, more_v) in zip(context, more, strict=True)
    ]


def draft_logits(
    drafter: DFlashDrafter,
    ends: FrozenEnds,
    last_token: int,
    start: int,
    context: Sequence[KeyValue],
) -> Tensor:
    """logits_JV of the K-1 tokens after the one at position `start`; `context` holds 0..start-1."""
    arch, device = drafter.arch, ends.embed_VH.device
    assert len(context[0][0]) == start
    ids_K = torch.full((arch.block_size,), arch.mask_token_id, device=device)
    ids_K[0] = last_token
    pos_K = torch.arange(start, start + arch.block_size, device=device)
    masks = decode_masks(start, arch.block_size, layer_kinds(arch), device)
    hidden_KH = drafter(ends.embed(ids_K), pos_K, context, masks)
    return ends.logits(hidden_KH[1:])


def _cut(tokens: list[int], stop: Collection[int], room: int) -> list[int]:
    """Up to the first stop token, at most `room`."""
    ends = [index + 1 for index, token in enumerate(tokens) if token in stop]
    return tokens[: min([room, *ends])]


def _ids(target: Target, tokens: Sequence[int]) -> Tensor:
    return torch.tensor(list(tokens), dtype=torch.int64, device=target.device)


def _now(target: Target) -> float:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()


# --- is it lossless? ------------------------------------------------------------------------------


VerdictKind = Literal["identical", "tie", "different"]


@dataclass(frozen=True)
class Verdict:
    kind: VerdictKind
    position: int | None = None
    """First differing new token."""
    gap: float | None = None
    """Between the target's logits of the two tokens there."""
    ulp: float | None = None
    """The spacing of the target's number format at the larger of them."""


@torch.inference_mode()
def compare(
    target: Target, prompt: Sequence[int], plain: Sequence[int], drafted: Sequence[int]
) -> Verdict:
    """Is speculative decoding lossless here? In bfloat16 the first difference may be a tie: the two
    tokens are the best two (or among equals) and their logits lie within TIE_ULPS of each other, as
    computed by one plain forward over the common text. In float32 nothing but equality will do."""
    differs = [i for i, (a, b) in enumerate(zip(plain, drafted, strict=False)) if a != b]
    if not differs and len(plain) == len(drafted):
        return Verdict("identical")
    if not differs:  # one goes on where the other stopped: no tie explains that
        return Verdict("different", min(len(plain), len(drafted)))
    at = differs[0]
    ids_L = _ids(target, [*prompt, *plain[:at]])
    logits_V = target.model(input_ids=ids_L[None], use_cache=False).logits[0, -1].float()
    pair = logits_V[[plain[at], drafted[at]]]
    top, gap = float(logits_V.max()), float((pair[0] - pair[1]).abs())
    ulp = (
        float(torch.finfo(target.dtype).eps) * 2.0 ** torch.tensor(top).abs().log2().floor().item()
    )
    near = top - float(pair.min()) <= TIE_ULPS * ulp
    tie = near and target.dtype != torch.float32
    return Verdict("tie" if tie else "different", at, gap, ulp)
