"""The capture self-test: are the states in a slot really the model's? Seconds, at every start.

Two short documents go through `Target.capture`; beside it, the whole causal LM runs on each of
them alone, watched by plain forward hooks and by its own `output_hidden_states`. Most drafters
that train well and serve badly were trained on states that fail one of these lines.

Last, what decoding will need: that the stock model goes on from its own cache as if it had read the
whole text. Where it does not, the states are still right, and other programs may serve the target
well; but `eval` can't, so that is a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .cached import CachedTarget
from .target import CaptureError, layer_output, padded_length

if TYPE_CHECKING:
    from .target import Target

log = logging.getLogger("target")

LONG, SHORT = padded_length(33), 21
"""Document lengths: the first needs no padding, so that its forward is the reference's own shape
and must agree to the last bits; the second is padded beside it."""
SAME_SHAPE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
OTHER_SHAPE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest allowed |difference| / |reference| (Euclidean norms over one document and layer): one
forward shape rounds unlike another, and so do fast_layers.py and the stock layers; bfloat16 carries
8 bits through every layer."""


@dataclass(frozen=True)
class Reference:
    """What the stock model says about one document."""

    hooked: dict[int, torch.Tensor]
    """tap -> [t, H], seen by a plain forward hook."""
    hidden_states: tuple[torch.Tensor, ...]
    """HF's own: the embeddings, then every layer's output; the LAST entry is normed."""
    logits_TV: torch.Tensor


def self_test(target: Target, documents: Sequence[np.ndarray] | None = None) -> None:
    """Raises CaptureError, naming layer and size. Warns of a target that `eval` can't decode."""
    docs = _two_documents(target, documents)
    slot, (vlh_TH, all_TF) = _capture(target, docs, vlh=True), _capture(target, docs[:1], vlh=True)
    references = [_reference(target, ids) for ids in docs]
    _check_alone(target, references[0], all_TF, vlh_TH)
    _check_ends(target, docs[0], references[0], vlh_TH)
    _check_early_stop(target, docs[:1], all_TF)
    _check_in_slot(target, docs, references, slot)
    problem = (
        "" if target.random_weights else cache_problem(target, docs[0], references[0].logits_TV)
    )
    if problem:
        log.warning(
            "target self-test: %s: neither `eval` nor eval.every will be right for this target",
            problem,
        )


def _same_shape(target: Target) -> float:
    return (SAME_SHAPE if target.fast is None else OTHER_SHAPE)[target.dtype]


def _two_documents(target: Target, documents: Sequence[np.ndarray] | None) -> list[np.ndarray]:
    """Tokens of `documents` where there are enough of them, else random ones."""
    tokens = np.random.default_rng(0).integers(0, target.arch.vocab_size, LONG + SHORT)
    if documents is not None:
        real = np.concatenate([np.asarray(ids) for ids in documents])[: LONG + SHORT]
        tokens[: len(real)] = real
    return [tokens[:LONG], tokens[LONG:]]


def _capture(
    target: Target, docs: Sequence[np.ndarray], *, vlh: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(vlh_TH, all_TF) of a small slot, full of NaN before: a row never written shows."""
    tokens, hidden = sum(map(len, docs)), target.arch.hidden_size
    options: dict[str, Any] = {"dtype": target.dtype, "device": target.device}
    all_TF = torch.full((tokens, len(target.taps) * hidden), torch.nan, **options)
    vlh_TH = torch.full((tokens, hidden), torch.nan, **options)
    target.capture(docs, all_TF, vlh_TH if vlh else None)
    return vlh_TH, all_TF


@torch.inference_mode()
def _reference(target: Target, ids: np.ndarray) -> Reference:
    hooked = {}
    handles = [
        target.layers[tap].register_forward_hook(
            lambda module, args, output, tap=tap: hooked.update({tap: layer_output(output)[0]})
        )
        for tap in target.taps
    ]
    output = target.model(
        input_ids=torch.as_tensor(ids, device=target.device)[None],
        use_cache=False,
        output_hidden_states=True,
    )
    for handle in handles:
        handle.remove()
    return Reference(
        hooked, tuple(state[0] for state in output.hidden_states), output.logits[0].float()
    )


def _check_alone(
    target: Target, reference: Reference, all_TF: torch.Tensor, vlh_TH: torch.Tensor
) -> None:
    """Document 0 by itself, in the reference's own shape."""
    limit = _same_shape(target)
    last = len(target.layers) - 1
    for tap, state_TH in _by_tap(target, all_TF):
        name = f"the tap of layer {tap}"
        _finite(state_TH, name)
        _close(state_TH, reference.hooked[tap], limit, f"{name} and a plain forward hook")
        if tap != last:
            stock = reference.hidden_states[tap + 1]
            _close(state_TH, stock, limit, f"{name} and hidden_states[{tap + 1}]")
    _finite(vlh_TH, "the last hidden state")
    _close(vlh_TH, reference.hidden_states[-1], limit, "the last hidden state and the model's")


def _check_ends(
    target: Target, ids: np.ndarray, reference: Reference, vlh_TH: torch.Tensor
) -> None:
    """What the drafter borrows: head(vlh) is the model's logits, its embeddings are the model's."""
    ends, limit = target.ends(), _same_shape(target)
    _close(
        ends.logits(vlh_TH),
        reference.logits_TV,
        limit,
        "head(last hidden state) and the model's logits",
    )
    embedded_TH = ends.embed(torch.as_tensor(ids, device=target.device))
    _close(embedded_TH, reference.hidden_states[0], limit, "the embeddings and the model's")


def _check_early_stop(target: Target, docs: Sequence[np.ndarray], all_TF: torch.Tensor) -> None:
    _, stopped_TF = _capture(target, docs, vlh=False)
    for (tap, stopped_TH), (_, state_TH) in zip(
        _by_tap(target, stopped_TF), _by_tap(target, all_TF), strict=True
    ):
        _close(
            stopped_TH,
            state_TH,
            _same_shape(target),
            f"the tap of layer {tap} with and without the layers above the last tap",
        )


def _check_in_slot(
    target: Target,
    docs: Sequence[np.ndarray],
    references: Sequence[Reference],
    slot: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Each document of a shared slot against itself alone."""
    vlh_TH, all_TF = slot
    limit, start = OTHER_SHAPE[target.dtype], 0
    for number, (ids, reference) in enumerate(zip(docs, references, strict=True)):
        rows = slice(start, start + len(ids))
        start += len(ids)
        for tap, state_TH in _by_tap(target, all_TF[rows]):
            _close(
                state_TH,
                reference.hooked[tap],
                limit,
                f"the tap of layer {tap}, document {number} in a slot and alone",
            )
        _close(
            vlh_TH[rows],
            reference.hidden_states[-1],
            limit,
            f"the last hidden state, document {number} in a slot and alone",
        )


@torch.inference_mode()
def cache_problem(target: Target, ids: np.ndarray, logits_TV: torch.Tensor) -> str:
    """What is wrong where the document is read in decoding's way (a prompt, a block with a rejected
    tail, a longer block), compared with logits_TV, the uncached forward's; empty if nothing is.

    In bfloat16 only what is larger than its rounding shows: a lost state does, once it matters.
    """
    name = type(target.model).__name__
    ids_T = torch.as_tensor(ids, dtype=torch.int64, device=target.device)
    start = len(ids) // 2
    try:
        cached = CachedTarget(target)
        cached.run(ids_T[:start])
        cached.keep(range(start))
        first_KV, _ = cached.run(torch.cat((ids_T[start : start + 1], ids_T[:3])))
        cached.keep([0])
        rest_KV, _ = cached.run(ids_T[start + 1 :])
    except Exception as error:  # whatever its code raises, the states are right
        return f"{name} can't decode with a cache ({' '.join(str(error).split())[:200]})"
    wanted_KV = logits_TV[start:]
    gap = (torch.cat((first_KV[:1], rest_KV)).float() - wanted_KV).norm() / wanted_KV.norm()
    if gap <= OTHER_SHAPE[target.dtype]:
        return ""
    return f"{name} does not go on from its own cache (logits differ by {gap:.1e} of their size)"


def _by_tap(target: Target, all_TF: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    return list(zip(target.taps, all_TF.split(target.arch.hidden_size, dim=1), strict=True))


def _finite(state_TH: torch.Tensor, name: str) -> None:
    if not torch.isfinite(state_TH).all():
        bad = int((~torch.isfinite(state_TH)).sum())
        raise CaptureError(f"target self-test: {name}: {bad} of {state_TH.numel()} are not finite")
    if not state_TH.any():
        raise CaptureError(f"target self-test: {name} is all zero")


def _close(got: torch.Tensor, wanted: torch.Tensor, limit: float, what: str) -> None:
    difference = (got.float() - wanted.float()).norm() / wanted.float().norm().clamp_min(1e-30)
    if not difference <= limit:  # NaN fails too
        largest = (got.float() - wanted.float()).abs().max()
        raise CaptureError(
            f"target self-test: {what} differ by {difference:.1e} of their size "
            f"(largest {largest:.2e}); at most {limit:.0e} is rounding"
        )
