"""A slot's way onto the GPU, under the step that runs.

    feed.start(slot, total_tok, seq) # copy stream: host pages -> staging, and the sums of what came
    sums = feed.wait()               # the host's one wait; then the slot may be given back
    feed.load()                      # compute stream: staging -> feed.batch, before the next step

Only rows before total_tok cross the bus. feed.batch is what a captured step reads, so it never
moves; the second copy on the device (1.4 ms for 3 GB) lets the next slot arrive meanwhile.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from .spans import COPY, Spans
from .step import Batch

FIELDS = {
    "all": "all_TF",
    "vlh": "vlh_TH",
    "ids": "ids_T",
    "lm": "lm_T",
    "lens": "lens_D",
    "pos": "pos_T",
    "total_tok": "total_tok",
}
"""A slot's file names and what Batch calls them."""
PER_TOKEN = ("all_TF", "vlh_TH", "ids_T", "lm_T", "pos_T")


class Feed:
    def __init__(self, like: Batch, device: torch.device | str, spans: Spans | None = None) -> None:
        """`like`: a slot's tensors, for their shapes and dtypes. `spans` gets the copies."""
        self._spans = spans or Spans(None, "cuda")
        self.batch, self._staging = _empty(like, device), _empty(like, device)
        self._stream = torch.cuda.Stream()
        self._loaded = torch.cuda.Event()
        self._arrived = torch.cuda.Event(blocking=True)  # `wait` sleeps, and does not spin
        self._loaded.record()  # the first copy comes after the zeros
        self._sums = torch.zeros(len(FIELDS), dtype=torch.int64).pin_memory()
        self._total_tok = 0

    def start(self, slot: Batch, total_tok: int, seq: int | None = None) -> None:
        """Begins the copy. The slot's pages must stay as they are until `wait` returns. `seq` is
        for the trace."""
        self._total_tok = total_tok
        self._stream.wait_event(self._loaded)
        with torch.cuda.stream(self._stream):
            mark = self._spans.begin("h2d", COPY)
            _copy_prefix(self._staging, slot, total_tok)
            self._spans.end(mark, seq)
            sums = [byte_sum(part) for part in _prefixes(self._staging, total_tok)]
            self._sums[: len(sums)].copy_(torch.stack(sums), non_blocking=True)
            self._arrived.record()

    def wait(self) -> list[int]:
        """Until the slot has arrived. One sum a field, in the order of FIELDS, as shm_ring makes
        them: of the valid prefix as int64, modulo 2**64."""
        self._arrived.synchronize()
        present = sum(getattr(self.batch, name) is not None for name in FIELDS.values())
        return [value % 2**64 for value in self._sums[:present].tolist()]

    def load(self) -> Batch:
        """feed.batch holds the slot for what is launched from now on."""
        torch.cuda.current_stream().wait_event(self._arrived)
        _copy_prefix(self.batch, self._staging, self._total_tok)
        self._loaded.record()
        return self.batch


def _empty(like: Batch, device: torch.device | str) -> Batch:
    """Zeros: rows that no slot has filled yet are as good as any."""
    fields: dict[str, Any] = {f.name: getattr(like, f.name) for f in dataclasses.fields(Batch)}
    empty: dict[str, Any] = {
        name: None if x is None else torch.zeros_like(x, device=device)
        for name, x in fields.items()
    }
    return Batch(**empty)


def _prefixes(batch: Batch, total_tok: int) -> list[Tensor]:
    """The valid part of each field that there is, in the order of FIELDS."""
    found = [(name, getattr(batch, name)) for name in FIELDS.values()]
    return [x[:total_tok] if name in PER_TOKEN else x for name, x in found if x is not None]


def _copy_prefix(to: Batch, source: Batch, total_tok: int) -> None:
    pairs = zip(_prefixes(to, total_tok), _prefixes(source, total_tok), strict=True)
    for there, here in pairs:
        there.copy_(here, non_blocking=True)


def byte_sum(x: Tensor) -> Tensor:
    """0-d int64, wrapping: x's bytes as int64, the last ones zero-extended."""
    bytes_ = x.reshape(-1).view(torch.uint8)
    whole = bytes_.numel() // 8 * 8
    shift = torch.arange(bytes_.numel() - whole, device=x.device) * 8
    return bytes_[:whole].view(torch.int64).sum() + (bytes_[whole:].long() << shift).sum()
