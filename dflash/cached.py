"""The target with its cache, for decoding: run tokens, look, keep some of them.

    cached = CachedTarget(target)
    logits_LV, feat_LF = cached.run(prompt_L, last_only=True)
    cached.keep(range(len(prompt_L)))
    logits_LV, feat_LF = cached.run(drafted_L)      # or run_tree: branches, in one call
    cached.keep([0, 1, 4])                          # rows of that run; the others never happened

A cache of keys and values drops rows. A recurrent state has none: the state before the last run is
kept, and what is to stay runs again from there.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .config import ConfigError
from .target import Target, layer_output


class CachedTarget:
    """`rollback=False` is for plain decoding: nothing is prepared for `keep`. Raises ConfigError
    for a target that has no such cache."""

    def __init__(self, target: Target, *, rollback: bool = True) -> None:
        from transformers import DynamicCache

        _refuse_other_cache(target)
        # Told every time: Bamba, for one, would count each run from 0.
        self._told = "position_ids" in inspect.signature(type(target.model).forward).parameters
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

    def check_trees(self) -> None:
        """Raises ConfigError where the target can't judge branches in one call."""
        from transformers.cache_utils import DynamicLayer

        other = {type(layer).__name__ for layer in self.cache.layers} - {DynamicLayer.__name__}
        if other:
            raise ConfigError(
                f"--tree: the target's layers keep {', '.join(sorted(other))}: a tree needs full "
                "attention in every layer (recurrent states and sliding windows can't branch); "
                "leave --tree out"
            )

    def run(self, ids_L: Tensor, last_only: bool = False) -> tuple[Tensor, Tensor]:
        """Append tokens. Returns (logits_LV, feat_LF): the model's own logits (of the last token
        with `last_only`) and the concatenated taps of all of them."""
        if self.rollback:
            self._before = [_recurrent_state(layer) for layer in self.recurrent]
        self._ids_L = ids_L
        self.length += len(ids_L)
        return self._forward(ids_L, self.length - len(ids_L), last_only)

    def run_tree(self, ids_L: Tensor, depth_L: Tensor, sees_LL: Tensor) -> tuple[Tensor, Tensor]:
        """Append a tree of tokens: row i stands at position length + depth_L[i] and sees all that
        is kept and the rows of bool sees_LL[i]. Returns as `run`."""
        past, size = self.length, len(ids_L)
        self._ids_L = ids_L
        self.length += size
        # Additive: the one form that eager attention and SDPA both take.
        mask_LS = torch.zeros(size, past + size, dtype=self.target.dtype, device=ids_L.device)
        mask_LS[:, past:].masked_fill_(~sees_LL, torch.finfo(self.target.dtype).min)
        return self._forward(
            ids_L,
            past,
            last_only=False,
            attention_mask=mask_LS[None, None],
            position_ids=(past + depth_L)[None],
        )

    def keep(self, rows: Sequence[int]) -> None:
        """Of the last run, keep these rows, rising; the next run follows them."""
        assert self.rollback
        removed, start = len(self._ids_L) - len(rows), self.length - len(self._ids_L)
        assert removed >= 0
        again = removed > 0 and len(self.recurrent) > 0
        if list(rows) != list(range(len(rows))):
            assert not self.recurrent
            self._move(rows, start)
        for layer in self.attention:
            layer.crop(-(len(self._ids_L) if again else removed))
        if again:
            for layer, state in zip(self.recurrent, self._before, strict=True):
                vars(layer).update(state)
            self._forward(self._ids_L[: len(rows)], start, last_only=True)
        self.length = start + len(rows)

    def _move(self, rows: Sequence[int], start: int) -> None:
        """The keys and values of these rows of the last run to where it starts."""
        from_R = torch.tensor(rows, device=self.target.device) + start
        for layer in self.attention:
            for cached in (layer.keys, layer.values):
                cached[..., start : start + len(rows), :] = cached.index_select(-2, from_R)

    def _forward(
        self, ids_L: Tensor, start: int, last_only: bool, **tree: Tensor
    ) -> tuple[Tensor, Tensor]:
        taps: dict[int, Tensor] = {}
        handles = [
            self.target.layers[tap].register_forward_hook(
                lambda module, args, output, tap=tap: taps.update({tap: layer_output(output)[0]})
            )
            for tap in self.target.taps
        ]
        if self._told:
            tree.setdefault(
                "position_ids", torch.arange(start, start + len(ids_L), device=ids_L.device)[None]
            )
        output = self.target.model(
            input_ids=ids_L[None],
            use_cache=True,
            logits_to_keep=1 if last_only else 0,
            **{self.target.cache_name: self.cache},
            **tree,
        )
        for handle in handles:
            handle.remove()
        return output.logits[0], torch.cat([taps[tap] for tap in self.target.taps], dim=-1)


def _refuse_other_cache(target: Target) -> None:
    """MiniMax has a class of its own for it, that drops no rows and keeps no states."""
    from transformers import DynamicCache

    family = sys.modules[type(target.model).__module__]
    for name, value in vars(family).items():
        if isinstance(value, type) and issubclass(value, DynamicCache) and value != DynamicCache:
            raise ConfigError(
                f"target.model: {target.directory}: {type(target.model).__name__} decodes with a "
                f"{name} alone, which can't take back a rejected draft: no eval and no eval.every "
                "for this target"
            )


def _recurrent_state(layer: Any) -> dict[str, Any]:
    """What a run changes in a recurrent cache layer. Its states are overwritten, so they are
    copied; keys and values that stand in the same layer (Falcon-H1) are replaced."""
    return {
        name: {index: x.clone() if isinstance(x, Tensor) else x for index, x in value.items()}
        if isinstance(value, dict)
        else value
        for name, value in vars(layer).items()
    }
