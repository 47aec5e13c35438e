"""What a bench sees of a run over time: the ring's counters, CPU time, nvidia-smi.

Counters are read every few milliseconds and each change is kept with its time, so that a rate runs
from one hand-over to another, and does not depend on where the window's ends fell between two.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

import psutil

from shm_ring import RingWriter
from shm_ring import layout as at
from shm_ring.liveness import WAITS_FREE, WAITS_READY, Record, joined
from shm_ring.state import READY, state_of

SMI_MS = 500
SMI_COLUMNS = {"utilization.gpu": "percent", "power.draw": "W", "clocks.sm": "MHz"}


@dataclass(frozen=True)
class Window:
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    def __contains__(self, time_s: float) -> bool:
        return self.start_s <= time_s <= self.end_s


@dataclass(frozen=True)
class Seen:
    """A party's counters, from `time_s` on."""

    time_s: float
    items: int
    tokens: int


@dataclass(frozen=True)
class Rate:
    slots: int
    """Handed over after the first one in the window."""
    tok_per_s: float
    slots_per_s: float


@dataclass
class Watch:
    """Looks at the ring through a party that is in it."""

    party: RingWriter
    history: dict[str, list[Seen]] = field(default_factory=dict)
    ready: list[tuple[float, int]] = field(default_factory=list)
    """(time, READY slots), at each change."""

    def look(self) -> None:
        now_s = time.monotonic()
        for record in self.records():
            seen = self.history.setdefault(record.name, [])
            if not seen or (record.items, record.tokens) != (seen[-1].items, seen[-1].tokens):
                seen.append(Seen(now_s, record.items, record.tokens))
        states = [state_of(words[at.WORD]) for words in self.party._view.slots]
        ready = states.count(READY)
        if not self.ready or ready != self.ready[-1][1]:
            self.ready.append((now_s, ready))

    def records(self) -> list[Record]:
        return joined(self.party._view.meta)

    def items(self, name: str) -> int:
        """Slots that the party has handed over; 0 before it joins."""
        return self.history[name][-1].items if name in self.history else 0

    def waits_for_slots(self, name: str) -> bool:
        """Whether the party waits, a target for a free slot or a trainer for a READY one."""
        waiting = {record.name: record.waiting for record in self.records()}
        return waiting.get(name) in (WAITS_FREE, WAITS_READY)

    def waited_s(self) -> dict[str, float]:
        return {record.name: record.waited_ns / 1e9 for record in self.records()}

    def rate(self, names: list[str], window: Window) -> Rate | None:
        """Of several parties together; None where one handed over less than two slots."""
        rates = []
        for name in names:
            seen = [s for s in self.history.get(name, []) if s.time_s in window]
            if len(seen) < 2:
                return None
            first, last = seen[0], seen[-1]
            span_s, slots = last.time_s - first.time_s, last.items - first.items
            rates.append(Rate(slots, (last.tokens - first.tokens) / span_s, slots / span_s))
        return Rate(
            sum(rate.slots for rate in rates),
            sum(rate.tok_per_s for rate in rates),
            sum(rate.slots_per_s for rate in rates),
        )

    def made(self, after_seq: int, skip: int) -> tuple[Window, Rate] | None:
        """Of the slots that stand READY, by the ring's own time of each; the first `skip` of them
        were a warm-up, where more than two are left. None with less than two."""
        slots = [w for w in self.party._view.slots if state_of(w[at.WORD]) == READY]
        stamps = sorted(
            (w[at.PUBLISHED_NS] / 1e9, w[at.TOTAL_TOK]) for w in slots if w[at.SEQ] > after_seq
        )
        stamps = stamps[max(0, min(skip, len(stamps) - 2)) :]
        if len(stamps) < 2:
            return None
        window = Window(stamps[0][0], stamps[-1][0])
        tokens = sum(tokens for _, tokens in stamps[1:])
        slots_after = len(stamps) - 1
        return window, Rate(slots_after, tokens / window.seconds, slots_after / window.seconds)


def cpu_s(pids: Mapping[str, int]) -> dict[str, float]:
    """CPU seconds of each process and its children so far; none of what can't be read."""
    found = {}
    for name, pid in pids.items():
        try:
            process = psutil.Process(pid)
            family = [process, *process.children(recursive=True)]
            found[name] = sum(sum(p.cpu_times()[:2]) for p in family)
        except psutil.Error:
            continue
    return found


class Smi:
    """nvidia-smi's own figures, twice a second; nothing where there is none."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, str, list[float]]] = []
        """(time, GPU uuid, figures in the order of SMI_COLUMNS)."""
        self._process = None
        if shutil.which("nvidia-smi") is None:
            return
        query = f"--query-gpu=timestamp,uuid,{','.join(SMI_COLUMNS)}"
        command = ["nvidia-smi", query, "--format=csv,noheader,nounits", "-lms", str(SMI_MS)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            self.note(line)

    def note(self, line: str) -> None:
        """A line of its csv. Its own time of it counts: a pipe may hold lines back."""
        stamp, uuid, *cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(SMI_COLUMNS) and all(is_number(cell) for cell in cells):
            at = datetime.strptime(stamp, "%Y/%m/%d %H:%M:%S.%f").timestamp()
            at_s = at - time.time() + time.monotonic()
            self.rows.append((at_s, uuid, [float(cell) for cell in cells]))

    def means(self, uuid: str, window: Window) -> dict[str, float] | None:
        """{"utilization.gpu": ..., ...} of one GPU."""
        rows = [figures for at_s, gpu, figures in self.rows if gpu == uuid and at_s in window]
        if not rows:
            return None
        columns = zip(*rows, strict=True)
        return {name: sum(c) / len(c) for name, c in zip(SMI_COLUMNS, columns, strict=True)}

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


def is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()
