"""Decoding for real: the target alone, and the target with a drafter (DFlash's chain), both greedy.

    plain = plain_greedy(target, prompt_ids, max_new_tokens)
    drafted = speculative_greedy(target, drafter, ends, prompt_ids, max_new_tokens)
    verdict = compare(target, prompt_ids, plain, drafted)      # identical | tie | different

One round of the chain (z-lab/dflash `dflash_generate`): the drafter sees [last token, MASK x (K-1)]
and the keys and values of every token before it; its K-1 proposals go through the target in one
call with the last token; the longest prefix that the target agrees with is kept, and the target's
own next token (the bonus) comes on top. So a round emits accepted + 1 tokens, and

    tau = mean of accepted + 1 over the rounds; the prefill's own token belongs to no round.

The last round is cut at a stop token or at max_new_tokens: what lies beyond was not accepted. This
is `metrics.tau_walk` round by round.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .mask import decode_masks
from .model import DFlashDrafter, FrozenEnds, KeyValue, layer_kinds
from .target import Target, layer_output

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


class CachedTarget:
    """The target with a key/value cache: run tokens, then keep only the first of them.

    Recurrent layers have no rows to drop: their state before the last run is kept, and what is to
    stay runs again from there.
    """

    def __init__(self, target: Target, *, rollback: bool) -> None:
        from transformers import DynamicCache

        self.target, self.rollback, self.length = target, rollback, 0
        self.cache: Any = DynamicCache(config=target.model.config)
        layers = self.cache.layers
        self.recurrent = [layer for layer in layers if hasattr(layer, "recurrent_states")]
        self.attention = [layer for layer in layers if not hasattr(layer, "recurrent_states")]
        for layer in self.attention:
            if rollback and hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()  # a sliding window must not forget before keep()
        self._before: list[dict[str, Any]] = []
        self._ids_L = torch.empty(0, dtype=torch.int64)

    def run(self, ids_L: Tensor, last_only: bool = False) -> tuple[Tensor, Tensor]:
        """Append tokens. Returns (logits_LV, feat_LF): the model's own logits (of the last token
        with `last_only`) and the concatenated taps of all of them."""
        if self.rollback:
            self._before = [_recurrent_state(layer) for layer in self.recurrent]
        self._ids_L = ids_L
        self.length += len(ids_L)
        return self._forward(ids_L, last_only)

    def keep(self, length: int) -> None:
        """Take back the tokens of the last run from position `length` on."""
        assert self.rollback
        removed, start = self.length - length, self.length - len(self._ids_L)
        assert 0 <= removed <= len(self._ids_L)
        again = removed > 0 and len(self.recurrent) > 0
        for layer in self.attention:
            layer.crop(-(len(self._ids_L) if again else removed))
        if again:
            for layer, state in zip(self.recurrent, self._before, strict=True):
                vars(layer).update(state)
            self._forward(self._ids_L[: length - start], last_only=True)
        self.length = length

    def _forward(self, ids_L: Tensor, last_only: bool) -> tuple[Tensor, Tensor]:
        taps: dict[int, Tensor] = {}
        handles = [
            self.target.layers[tap].register_forward_hook(
                lambda module, args, output, tap=tap: taps.update({tap: layer_output(output)[0]})
            )
            for tap in self.target.taps
        ]
        output = self.target.model(
            input_ids=ids_L[None],
            use_cache=True,
            logits_to_keep=1 if last_only else 0,
            **{self.target.cache_name: self.cache},
        )
        for handle in handles:
            handle.remove()
        return output.logits[0], torch.cat([taps[tap] for tap in self.target.taps], dim=-1)


def _recurrent_state(layer: Any) -> dict[str, Any]:
    """Copies of everything a run changes in a recurrent cache layer."""
    return {
        name: {index: x.clone() if isinstance(x, Tensor) else x for index, x in value.items()}
        for name, value in vars(layer).items()
        if isinstance(value, dict)
    }


@torch.inference_mode()
def plain_greedy(
    target: Target,
    prompt: Sequence[int],
    max_new_tokens: int,
    stop: Collection[int] | None = None,
) -> Decoded:
    """The target alone, one token a call. `stop`: token ids that end it (None: the target's)."""
    stop = target.arch.eos_token_ids if stop is None else stop
    cached = CachedTarget(target, rollback=False)
    began = _now(target)
    logits_LV, _ = cached.run(_ids(target, prompt), last_only=True)
    tokens = [int(logits_LV[-1].argmax())]
    prefilled = _now(target)
    while len(tokens) < max_new_tokens and tokens[-1] not in stop:
        logits_LV, _ = cached.run(_ids(target, tokens[-1:]))
        tokens.append(int(logits_LV[-1].argmax()))
    return Decoded(tokens, prefilled - began, _now(target) - prefilled)


@torch.inference_mode()
def speculative_greedy(
    target: Target,
    drafter: DFlashDrafter,
    ends: FrozenEnds,
    prompt: Sequence[int],
    max_new_tokens: int,
    stop: Collection[int] | None = None,
) -> Decoded:
    """The target with the drafter: the same tokens in fewer target calls."""
    assert target.taps == drafter.arch.taps
    stop = target.arch.eos_token_ids if stop is None else stop
    cached = CachedTarget(target, rollback=True)
    began = _now(target)
    logits_LV, feat_LF = cached.run(_ids(target, prompt), last_only=True)
    cached.keep(len(prompt))
    tokens = [int(logits_LV[-1].argmax())]
    context = extend_context(drafter, [], feat_LF, start=0)
    prefilled = _now(target)
    rounds = []
    while len(tokens) < max_new_tokens and tokens[-1] not in stop:
        start = len(prompt) + len(tokens) - 1
        block_K = draft_block(drafter, ends, tokens[-1], start, context)
        logits_KV, feat_KF = cached.run(block_K)
        answer_K = logits_KV.argmax(dim=-1)
        agreed = (block_K[1:] == answer_K[:-1]).cumprod(dim=0).sum()
        accepted, *answer = torch.cat((agreed[None], answer_K)).tolist()  # the round's one sync
        new = _cut(answer[: accepted + 1], stop, max_new_tokens - len(tokens))
        whole = min(len(block_K) - 1, max_new_tokens - len(tokens))
        judged = len(new) if len(new) <= accepted else whole
        rounds.append(Round(min(accepted, len(new)), judged))
        tokens += new
        cached.keep(start + len(new))
        context = extend_context(drafter, context, feat_KF[: len(new)], start)
    return Decoded(tokens, prefilled - began, _now(target) - prefilled, tuple(rounds))


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


def draft_block(
    drafter: DFlashDrafter,
    ends: FrozenEnds,
    last_token: int,
    start: int,
    context: Sequence[KeyValue],
) -> Tensor:
    """[last token, K-1 proposals] for the token at position `start`; `context` holds 0..start-1."""
    arch, device = drafter.arch, ends.embed_VH.device
    assert len(context[0][0]) == start
    ids_K = torch.full((arch.block_size,), arch.mask_token_id, device=device)
    ids_K[0] = last_token
    pos_K = torch.arange(start, start + arch.block_size, device=device)
    masks = decode_masks(start, arch.block_size, layer_kinds(arch), device)
    hidden_KH = drafter(ends.embed(ids_K), pos_K, context, masks)
    ids_K[1:] = ends.logits(hidden_KH[1:]).argmax(dim=-1)
    return ids_K


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


@dataclass(frozen=True)
class Verdict:
    kind: Literal["identical", "tie", "different"]
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
