"""What a step reports: sums and counts in one device vector, added up without a sync and read once
per log interval.

`tau_anchor`, made here, is the mean over sampled anchors of 1 + (leading slots where draft argmax
== data token): cheap, for the log. `tau_walk` is what decoding would give on a greedy continuation;
only it may be compared with `eval`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RECALL_AT = (1, 4, 8)


@dataclass(frozen=True)
class Layout:
    """Named places of the vector. Scalars first, then per-slot sums for slots 1..K-1."""

    block_size: int

    SCALARS = (
        "steps",
        "skipped",
        "loss",
        "weight",
        "grad_norm",
        "tokens",
        "supervised",
        "anchors_asked",
        "anchors_valid",
        *(f"oracle_{top}" for top in RECALL_AT),
    )
    PER_SLOT = ("labels", *(f"recall_{top}" for top in RECALL_AT))

    @property
    def size(self) -> int:
        return len(self.SCALARS) + len(self.PER_SLOT) * (self.block_size - 1)

    def pack(self, values: dict[str, Tensor]) -> Tensor:
        """float64 [size] from a 0-d tensor per scalar and a [K-1] tensor per per-slot name."""
        assert values.keys() == {*self.SCALARS, *self.PER_SLOT}
        parts = [values[name].reshape(-1).double() for name in (*self.SCALARS, *self.PER_SLOT)]
        vector = torch.cat(parts)
        assert vector.numel() == self.size
        return vector

    def unpack(self, vector: Sequence[float]) -> tuple[dict[str, float], dict[str, list[float]]]:
        scalars = dict(zip(self.SCALARS, vector, strict=False))
        slots, at = {}, len(self.SCALARS)
        for name in self.PER_SLOT:
            slots[name] = list(vector[at : at + self.block_size - 1])
            at += self.block_size - 1
        return scalars, slots


def count_correct(rank_AJ: Tensor, mask_AJ: Tensor, valid_A: Tensor) -> dict[str, Tensor]:
    """Per-slot and per-anchor sums from the rank of the data token (loss.data_rank).

    recall@K of a slot: the data token is among the draft's K best. oracle_len@K of a block: 1 + the
    run of slots that recall it, what an unlimited tree of width K would accept. K = 1: accuracy and
    tau_anchor.
    """
    sums = {"labels": mask_AJ.sum(0), "anchors_valid": valid_A.sum()}
    for top in RECALL_AT:
        hit_AJ = (rank_AJ < top) & mask_AJ
        sums[f"recall_{top}"] = hit_AJ.sum(0)
        length_A = 1 + hit_AJ.cumprod(dim=1).sum(1)
        sums[f"oracle_{top}"] = torch.where(valid_A, length_A, 0).sum()
    return sums


class Metrics:
    """The running sums of one trainer since the last read."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self.layout = Layout(block_size)
        self.sums = torch.zeros(self.layout.size, dtype=torch.float64, device=device)

    def add(self, vector: Tensor) -> None:
        self.sums += vector

    def read(self) -> dict[str, float]:
        """Means since the last read, and back to zero. Waits for the device."""
        return self.post()()

    def post(self) -> Callable[[], dict[str, float]]:
        """`read` in two parts: copies the sums and zeroes them behind the launched steps; the
        returned function waits for that copy alone, not for steps launched since."""
        copied, arrived = torch.empty_like(self.sums, device="cpu"), None
        if self.sums.is_cuda:
            copied, arrived = copied.pin_memory(), torch.cuda.Event(blocking=True)  # no spin
        copied.copy_(self.sums, non_blocking=True)
        self.sums.zero_()
        if arrived is not None:
            arrived.record()

        def figures() -> dict[str, float]:
            if arrived is not None:
                arrived.synchronize()
            return summarise(*self.layout.unpack(copied.tolist()))

        return figures


def summarise(scalars: dict[str, float], slots: dict[str, list[float]]) -> dict[str, float]:
    """Sums -> the logged figures. A mean over nothing is NaN."""
    taken = scalars["steps"] - scalars["skipped"]
    labels = sum(slots["labels"])
    figures = {
        "loss": _ratio(scalars["loss"], scalars["weight"]),
        "tau_anchor": _ratio(scalars["oracle_1"], scalars["anchors_valid"]),
        "accuracy": _ratio(sum(slots["recall_1"]), labels),
        "grad_norm": _ratio(scalars["grad_norm"], taken),
        "skipped": scalars["skipped"],
        "steps": scalars["steps"],
        "tokens": scalars["tokens"],
        "supervised": scalars["supervised"],
        "labels": labels,
        "anchors_asked": scalars["anchors_asked"],
        "anchors_valid": scalars["anchors_valid"],
    }
    for top in RECALL_AT[1:]:
        figures[f"recall@{top}"] = _ratio(sum(slots[f"recall_{top}"]), labels)
        figures[f"oracle_len@{top}"] = _ratio(scalars[f"oracle_{top}"], scalars["anchors_valid"])
    for slot, (hits, asked) in enumerate(zip(slots["recall_1"], slots["labels"], strict=True), 1):
        figures[f"accuracy_{slot}"] = _ratio(hits, asked)
    return figures


def _ratio(total: float, count: float) -> float:
    return total / count if count else math.nan


def tau_walk(correct_PJ: Sequence[Sequence[bool]]) -> tuple[float, list[int]]:
    """Decoding's acceptance length on a greedy continuation where every position was drafted from.

    correct_PJ[p][j]: the block anchored at p predicts token p+1+j (False past the end). A round at
    `start` accepts the leading correct slots and the bonus token, then start += accepted + 1. ->
    (tokens per round, accepted of each round).
    """
    accepted, start = [], 0
    while start < len(correct_PJ):
        run = 0
        for right in correct_PJ[start]:
            if not right:
                break
            run += 1
        accepted.append(run)
        start += run + 1
    return _ratio(sum(accepted) + len(accepted), len(accepted)), accepted
