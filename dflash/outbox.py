"""A slot's states on their way from the GPU to its pages, under the forward of the next slot.

    all_TF, vlh_TH = outbox.states()             # the compute stream fills these
    leaving = outbox.send(slot, total_tok, seq)  # sums of them, then a copy on the outbox's stream
    leaving.arrived()                            # does not wait; then leaving.sums, leaving.finite

Two buffers: one leaves while the other is filled. Only rows before total_tok cross the bus.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .feed import byte_sum
from .spans import COPY, Spans
from .step import Batch


@dataclass(frozen=True)
class Leaving:
    """A copy under way. Its pages must stay claimed until it has arrived."""

    copied: torch.cuda.Event
    facts: Tensor
    """Pinned int64 [2 * states]: the sum of each state and whether it is finite, once arrived."""

    def arrived(self) -> bool:
        return self.copied.query()

    @property
    def sums(self) -> list[int]:
        """Of `all` and, if there is one, `vlh`: as shm_ring makes them."""
        return [value % 2**64 for value in self.facts[0::2].tolist()]

    @property
    def finite(self) -> bool:
        return bool(self.facts[1::2].all())


class Outbox:
    def __init__(self, like: Batch, device: torch.device | str, spans: Spans) -> None:
        """`like`: a slot's tensors, for their shapes and dtypes."""
        states = [x for x in (like.all_TF, like.vlh_TH) if x is not None]
        self._buffers = [
            [
                torch.zeros_like(x, device=device, memory_format=torch.contiguous_format)
                for x in states
            ]
            for _ in range(2)
        ]
        self._facts = [
            torch.zeros(2 * len(states), dtype=torch.int64).pin_memory() for _ in range(2)
        ]
        self._copied = [torch.cuda.Event(), torch.cuda.Event()]
        self._stream = torch.cuda.Stream()
        self._turn, self._spans = 0, spans

    def states(self) -> tuple[Tensor, Tensor | None]:
        """(all_TF, vlh_TH) of the next slot: what is launched from now on may write there."""
        torch.cuda.current_stream().wait_event(self._copied[self._turn])
        all_TF, *vlh_TH = self._buffers[self._turn]
        return all_TF, vlh_TH[0] if vlh_TH else None

    def send(self, slot: Batch, total_tok: int, seq: int) -> Leaving:
        """Queues the copy of what was launched since `states`. The Leaving of the call before last
        must have been read."""
        turn, self._turn = self._turn, 1 - self._turn
        valid = [state[:total_tok] for state in self._buffers[turn]]
        facts = torch.stack(
            [fact for state in valid for fact in (byte_sum(state), is_finite(state))]
        )
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            mark = self._spans.begin("d2h", COPY)
            pages = (x for x in (slot.all_TF, slot.vlh_TH) if x is not None)
            for page, state in zip(pages, valid, strict=True):
                page[:total_tok].copy_(state, non_blocking=True)
            self._facts[turn].copy_(facts, non_blocking=True)
            facts.record_stream(self._stream)
            self._copied[turn].record()
            self._spans.end(mark, seq)
        return Leaving(self._copied[turn], self._facts[turn])


def is_finite(x: Tensor) -> Tensor:
    """0-d int64. By the extremes, which a NaN takes over: no array of flags."""
    low, high = x.aminmax()
    return (low.isfinite() & high.isfinite()).long()
