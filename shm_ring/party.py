"""What writers and readers share: joining, CTRL around each change, timed waits, leaving."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import numpy as np

from . import layout as at
from . import protocol
from .crash import crash_point
from .errors import Poisoned, RingError, Stopped
from .layout import Field
from .liveness import (
    IDLE,
    WAITS_FREE,
    WAITS_READY,
    join,
    leave,
    reap_due,
    reap_pass,
    waiting_parties,
)
from .locks import Control
from .segment import Segment
from .state import MAX_FAILURES, Token, count, poisoned
from .waiting import FIRST_WAIT_S, LONGEST_WAIT_S, Bells

T = TypeVar("T")
Stop = Callable[[], bool] | None
BEAT_S = 1.0
"""Between two signs of life of `beating`."""
NUMPY_DTYPES = {"bf16": np.uint16, "f32": np.float32, "i64": np.int64, "bool": np.bool_}


class Lease:
    """A slot that this party may use until it lets go of it."""

    def __init__(self, segment: Segment, token: Token) -> None:
        self._segment, self.token = segment, token

    @property
    def seq(self) -> int:
        return self.token.seq

    @property
    def epoch(self) -> int:
        return self.token.epoch

    @property
    def slot(self) -> int:
        return self.token.slot

    def buffer(self, name: str) -> memoryview:
        """The bytes of the whole field. Writable in a writer's lease only."""
        return memoryview(self._segment.data[self.token.slot][name])

    def array(self, name: str) -> np.ndarray:
        """The field with its dtype and shape; numpy has no bfloat16, so bf16 comes as uint16."""
        field = self._segment.fields[name]
        return np.frombuffer(self.buffer(name), NUMPY_DTYPES[field.dtype]).reshape(field.shape)


class Party:
    """One process's place in a ring. Its methods may be called from any thread of the process.

    A wait has no time-out: it ends with what it waits for, by `stop()`, or with the ring.
    """

    def __init__(
        self,
        path: Path | str,
        role: int,
        name: str,
        fields: tuple[Field, ...] | None,
        *,
        writable_data: bool,
    ) -> None:
        self.name = name
        self._segment = Segment(Path(path).absolute(), fields=fields, writable_data=writable_data)
        self._view, self._lock = self._segment.view, self._segment.lock
        self._control = Control(self._lock, self._view.meta)
        self._notes: list[str] = []
        with self._control:
            self._segment.check_place()
            now = time.monotonic_ns()
            protocol.settle(self._view, now)
            reap_pass(self._view, self._lock)
            self._record = join(self._view, self._lock, role, name, now)
            self.id = self._control.party = self._record.index
            self._bells = Bells(self._segment.header.ring_id, self.id)
        self._control.beat = self._record.beat
        self._checked_ns = now

    @property
    def fields(self) -> tuple[Field, ...]:
        return self._segment.header.fields

    @property
    def end_seq(self) -> int:
        return int(self._view.meta[at.END_SEQ])

    @property
    def waited_s(self) -> float:
        return self._record.waited_ns / 1e9

    def _change(self, transition: Callable[[int], T]) -> T:
        """One transition, under CTRL, after what every holder of CTRL does first."""
        with self._control:
            now = time.monotonic_ns()
            protocol.settle(self._view, now)
            result = transition(now)
            if self._notes or self._control.slow:
                self._count_notes(now)
        self._record.beat(now)
        return result

    def _count_notes(self, now: int) -> None:
        if self._control.slow:
            self._notes.append("slow_ctrl")
            self._control.slow = False
        while self._notes:
            count(self._view, self._notes.pop(), now)

    def beat(self) -> None:
        """A sign of life from inside long work. Four times a second it also looks after the ring.

        Raises RingMissing when the directory was removed or replaced.
        """
        if self._lock.fd < 0:
            raise RingError(
                "this ring was left, or this process was forked from one of its parties"
            )
        now = time.monotonic_ns()
        self._record.beat(now)
        if now - self._checked_ns > self._view.meta[at.REAP_NS]:
            self._checked_ns = now
            self._segment.check_place()
        if reap_due(self._view.meta, now):
            self._reap()

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Beats from a thread, around one long call that cannot beat by itself. It says no more
        than that the process lives: whoever waits for the call needs a time limit of his own."""
        over = threading.Event()

        def beat() -> None:
            with suppress(RingError):  # the next call on this ring will say so
                while not over.wait(BEAT_S):
                    self.beat()

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _reap(self) -> None:
        """By one party at a time. CTRL alone makes it safe: a stopped reaper is passed over."""
        overdue_ns = time.monotonic_ns() - self._view.meta[at.REAPED_NS]
        if not self._lock.try_lock(at.REAPER_LOCK) and overdue_ns < 8 * self._view.meta[at.REAP_NS]:
            return
        try:
            if self._change(lambda _: reap_pass(self._view, self._lock, self.id)):
                self._wake()
        finally:
            self._lock.unlock(at.REAPER_LOCK)

    def _wake(self, *kinds: int) -> None:
        """Rings the parties that wait for one of these; for anything, without one."""
        crash_point("wake.hint")
        for index in waiting_parties(self._view.meta, kinds or (WAITS_FREE, WAITS_READY)):
            if index != self.id:
                self._bells.ring(index)

    def _wait(self, attempt: Callable[[], T | None], kind: int, stop: Stop) -> T:
        """Repeats `attempt` until it gives something: at a bell, or after 0.01 to 0.25 s."""
        self._raise_if_stopped(stop)
        found = attempt()
        if found is not None:
            return found
        pause, woken = FIRST_WAIT_S, True
        self._record.set_waiting(kind)
        try:
            while (found := attempt()) is None:
                self._raise_if_stopped(stop)
                start = time.monotonic_ns()
                woken = self._bells.wait(pause)
                self._record.add_wait(time.monotonic_ns() - start)
                self.beat()
                pause = FIRST_WAIT_S if woken else min(2 * pause, LONGEST_WAIT_S)
        finally:
            self._record.set_waiting(IDLE)
        if not woken:
            self._notes.append("late_wakeup")
        return found

    def _raise_if_stopped(self, stop: Stop) -> None:
        if stop is not None and stop():
            raise Stopped(f"{self.name} was told to stop")

    def _raise_if_poisoned(self) -> None:
        found = poisoned(self._view)
        if found is not None:
            seq, reason = found
            raise Poisoned(f"seq {seq} failed {MAX_FAILURES} times, at last because {reason}", seq)

    def leave(self) -> None:
        """Lets go of all leases, whose copies must have ended, and of the place. Idempotent."""
        if self._lock.fd < 0:
            return
        self._change(self._leave)
        self._wake()
        self._bells.close()
        self._lock.close()

    def _leave(self, now: int) -> None:
        protocol.release_party(self._view, self.id, now)
        leave(self._view, self._lock, self._record, now)
