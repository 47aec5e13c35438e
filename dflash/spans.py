"""What a half did when, on the GPU and on the host: a trace that ui.perfetto.dev opens.

    spans = Spans(run.traces / "target_0.json" if config.run.trace else None, device)
    mark = spans.begin("forward")           # what is launched on the current stream from here ...
    spans.end(mark, seq)                    # ... to here
    mark = spans.begin("d2h", COPY)         # the same inside `with torch.cuda.stream(copies)`
    since_s = time.monotonic()
    lease = ring.claim()
    spans.waited("free slot", since_s, lease.seq)

With None all of it does nothing; where the file can't be written (a full disk), it says so once and
the run goes on without. On CUDA a span is a pair of timing events, read once both have
passed and never waited for; also an NVTX range, for nsys. Times are CLOCK_MONOTONIC, which all
processes of a machine share: the GPU's clock is tied to it at the start and again each TIE_S.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

COMPUTE, COPY, HOST = "compute", "copy", "host"
ROWS = (COMPUTE, COPY, HOST)
TIE_S = 10.0
TIE_ERROR_S = 2e-3
"""A tie that differs from the one before by more was taken late: a busy GPU let it wait."""
SHORTEST_WAIT_S = 1e-4
"""Below, nobody has waited."""


@dataclass(frozen=True)
class Span:
    """One line of a trace. `who`: target_0, trainer_0; times by CLOCK_MONOTONIC."""

    who: str
    row: str
    name: str
    start_s: float
    end_s: float
    seq: int | None


@dataclass(frozen=True)
class Mark:
    """A begun span."""

    name: str
    row: str
    start: float | torch.cuda.Event


class Spans:
    """The trace of one process. `path`: None switches it off; its stem names the process, and the
    logger that a failure is told to: `target` of target_0."""

    def __init__(self, path: Path | None, device: str) -> None:
        self._file = None
        if path is None:
            return
        self._path = path
        self._gpu = _GpuClock() if device == "cuda" else None
        self._under_way: dict[str, deque[tuple[Mark, torch.cuda.Event, int | None]]] = {}
        with self._or_no_trace():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", buffering=1)  # line by line: a kill loses what is under way
            self._file.write("[\n")
        self._name("process_name", path.stem)
        for row in ROWS:
            self._name("thread_name", row, row)

    def begin(self, name: str, row: str = COMPUTE) -> Mark | None:
        """Work on the device; on a CPU, work here."""
        if self._file is None:
            return None
        if self._gpu is None:
            return Mark(name, row, time.monotonic())
        torch.cuda.nvtx.range_push(name)
        return Mark(name, row, self._gpu.record())

    def end(self, mark: Mark | None, seq: int | None = None) -> None:
        """Of `begin`, on the same stream. `seq`: the slot that it was for."""
        if mark is None:
            return
        if isinstance(mark.start, float):
            self._write(mark.row, mark.name, mark.start, time.monotonic(), seq)
            return
        assert self._gpu is not None
        self._under_way.setdefault(mark.row, deque()).append((mark, self._gpu.record(), seq))
        torch.cuda.nvtx.range_pop()
        self._gpu.tie()
        self._write_passed()

    def waited(self, name: str, since_s: float, seq: int | None = None) -> None:
        """The host stood still from `since_s` (time.monotonic()) until now."""
        now_s = time.monotonic()
        if self._file is not None and now_s - since_s >= SHORTEST_WAIT_S:
            self._write(HOST, name, since_s, now_s, seq)

    def close(self) -> None:
        """After the device's work has ended; what has not passed by now is left out."""
        if self._file is not None:
            self._write_passed()
        if self._file is not None:
            with self._or_no_trace():
                self._file.close()
            self._file = None

    def _write_passed(self) -> None:
        assert self._gpu is not None or not self._under_way
        for row in self._under_way.values():
            while row and row[0][1].query():
                mark, end, seq = row.popleft()
                assert self._gpu is not None and isinstance(mark.start, torch.cuda.Event)
                start_s, end_s = self._gpu.time_s(mark.start), self._gpu.time_s(end)
                self._write(mark.row, mark.name, start_s, end_s, seq)
                self._gpu.forget(mark.start, end)

    def _write(self, row: str, name: str, start_s: float, end_s: float, seq: int | None) -> None:
        event: dict[str, Any] = {"name": name, "ph": "X", "ts": _us(start_s)}
        event |= {"dur": _us(max(0.0, end_s - start_s))} | _place(row)
        self._line(event | ({"args": {"seq": seq}} if seq is not None else {}))

    def _name(self, kind: str, name: str, row: str = HOST) -> None:
        self._line({"name": kind, "ph": "M", "args": {"name": name}} | _place(row))

    def _line(self, event: dict[str, Any]) -> None:
        """The format allows a comma after the last event, and no bracket."""
        if self._file is not None:
            with self._or_no_trace():
                self._file.write(json.dumps(event) + ",\n")

    @contextlib.contextmanager
    def _or_no_trace(self) -> Iterator[None]:
        """A trace is no reason to lose a run."""
        try:
            yield
        except OSError as error:
            log = logging.getLogger(self._path.stem.partition("_")[0])
            log.warning("%s: %s: the run goes on without a trace", self._path, error.strerror)
            file, self._file = self._file, None
            if file is not None:
                with contextlib.suppress(OSError):  # the line that it could not write
                    file.close()


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def _place(row: str) -> dict[str, int]:
    return {"pid": os.getpid(), "tid": ROWS.index(row)}


class _GpuClock:
    """Timing events, and when they passed by the host's clock."""

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []
        self._stream = torch.cuda.Stream()  # idle, so that a tie passes at once
        for _ in range(2):  # the first may have to wait for the stream to be made
            self._base, self._base_s = self._start_tie()
            self._base.synchronize()
        self._tie: tuple[torch.cuda.Event, float] | None = None

    def record(self) -> torch.cuda.Event:
        """On the current stream."""
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def forget(self, *events: torch.cuda.Event) -> None:
        self._free.extend(events)

    def time_s(self, event: torch.cuda.Event) -> float:
        """CLOCK_MONOTONIC when it passed."""
        return self._base_s + self._base.elapsed_time(event) / 1e3

    def tie(self) -> None:
        """To be called often: bounds the drift between the clocks, and waits for nothing."""
        if self._tie is None:
            if time.monotonic() - self._base_s > TIE_S:
                self._tie = self._start_tie()
        elif self._tie[0].query():
            (event, at_s), self._tie = self._tie, None
            if abs(self.time_s(event) - at_s) < TIE_ERROR_S:
                self._base, self._base_s = event, at_s

    def _start_tie(self) -> tuple[torch.cuda.Event, float]:
        event = torch.cuda.Event(enable_timing=True)
        at_s = time.monotonic()
        event.record(self._stream)
        return event, at_s


def read_trace(path: Path) -> list[Span]:
    """What stands in a trace, by start. The line that a kill has cut is left out."""
    spans = []
    for event in _events(path):
        if event["ph"] == "X":
            start_s = event["ts"] / 1e6
            seq = event.get("args", {}).get("seq")
            row, end_s = ROWS[event["tid"]], start_s + event["dur"] / 1e6
            spans.append(Span(path.stem, row, event["name"], start_s, end_s, seq))
    return sorted(spans, key=lambda span: span.start_s)


def _events(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines(keepends=True)[1:]
    return [json.loads(line.rstrip(",\n")) for line in lines if line.endswith(",\n")]


def busy_s(spans: Sequence[Span], start_s: float, end_s: float) -> float:
    """Seconds of [start_s, end_s] that at least one of the spans covers."""
    covered, until_s = 0.0, start_s
    for span in sorted(spans, key=lambda span: span.start_s):
        begin_s, stop_s = max(span.start_s, until_s), min(span.end_s, end_s)
        if stop_s > begin_s:
            covered, until_s = covered + stop_s - begin_s, stop_s
    return covered
