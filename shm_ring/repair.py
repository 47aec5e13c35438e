"""An operator's hand on a ring: what any party does by itself, done now and from outside."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from . import layout as at
from .layout import Header
from .liveness import reap_pass
from .locks import Control, LockFile
from .protocol import rewind, settle
from .remove import owner_lock, require_nobody
from .segment import Segment, check_place
from .state import FREE, OWNED, QUARANTINE, View, counters, state_of


@dataclass(frozen=True)
class Reaped:
    died: int
    """Parties found dead."""
    slots: int
    """Slots that changed."""
    quarantined: int
    """Slots of dead writers that wait for their time: reap again after it."""


def reap(path: Path | str) -> Reaped:
    """Marks the dead and lets go of what they held. Safe beside a live run, which does it too.

    Raises RingMissing, RingBusy (CTRL is held by a stopped process) or RingError.
    """
    path, lock, _, view = _attach(path)
    with Control(lock, view.meta):
        check_place(path, lock)
        settle(view, time.monotonic_ns())
        before = counters(view.meta)["died"][0]
        changed = reap_pass(view, lock)
        died = counters(view.meta)["died"][0] - before
        return Reaped(died, changed, _in(view, frozenset((QUARANTINE,))))


def drain(path: Path | str) -> int:
    """Empties the ring of an ended run, POISON too; the next run makes again what was not used.

    Waits for the quarantine. Returns how many slots were not free. Raises RingBusy while the run's
    owner or a party lives, or as `reap`.
    """
    path, lock, header, view = _attach(path)
    with Control(lock, view.meta):
        check_place(path, lock)
        require_nobody(path, lock, header, view.meta)
        now = time.monotonic_ns()
        settle(view, now)
        full = len(view.slots) - _in(view, FREE)
        rewind(view, view.meta[at.TAIL], now)
    while True:
        reap(path)
        if not _in(view, OWNED):
            return full
        time.sleep(0.05)


def _attach(path: Path | str) -> tuple[Path, LockFile, Header, View]:
    path = Path(path).absolute()
    lock = owner_lock(path)
    segment = Segment(path)
    return path, lock, segment.header, segment.view


def _in(view: View, states: frozenset[int]) -> int:
    return sum(state_of(words[at.WORD]) in states for words in view.slots)
