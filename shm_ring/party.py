"""What writers and readers share: joining, CTRL around each change, timed waits, leaving."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from . import layout as at
from . import protocol
from .crash import crash_point
from .errors import Poisoned, RingError, RingMissing, Stopped
from .layout import Field
from .liveness import (
    IDLE,
    JOINED,
    join,
    leave,
    read_record,
    reap_due,
    reap_pass,
)
from .locks import Control
from .segment import Segment
from .state import Token, count
from .waiting import FIRST_WAIT_S, LONGEST_WAIT_S, Bells

T = TypeVar("T")
Stop = Callable[[], bool] | None
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
    """One process's place in a ring. Its methods may be called from any thread of the process."""

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
        self._segment = Segment(Path(path), fields=fields, writable_data=writable_data)
        self._view, self._lock = self._segment.view, self._segment.lock
        self._control = Control(self._lock, self._view.meta)
        with self._control:
            self._segment.check_place()
            now = time.monotonic_ns()
            protocol.settle(self._view, now)
            if reap_due(self._view.meta, now):
                reap_pass(self._view, self._lock)
            self._record = join(self._view, self._lock, role, name, now)
        self.id = self._control.party = self._record.index
        self._bells = Bells(self._segment.header.ring_id, self.id)
        self._left = False

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
        now = time.monotonic_ns()
        with self._control:
            protocol.settle(self._view, now)
            result = transition(now)
        self._record.beat(now)
        return result

    def beat(self) -> None:
        """A sign of life from inside long work; also reaps the dead when that is due."""
        if self._lock.fd < 0:
            raise RingError(
                "this ring was left, or this process was forked from one of its parties"
            )
        now = time.monotonic_ns()
        self._record.beat(now)
        if not reap_due(self._view.meta, now) or not self._lock.try_lock(at.REAPER_LOCK):
            return
        try:
            self._segment.check_place()
            if self._change(lambda _: reap_pass(self._view, self._lock, self.id)):
                self._wake_all()
        finally:
            self._lock.unlock(at.REAPER_LOCK)

    def _wake(self, kind: int) -> None:
        """Rings the parties that wait for this kind of change."""
        crash_point("publish.hint")
        for index in range(at.MAX_PARTIES):
            record = read_record(self._view.meta, index)
            if record.state == JOINED and record.waiting == kind:
                self._bells.ring(index)

    def _wake_all(self) -> None:
        for index in range(at.MAX_PARTIES):
            record = read_record(self._view.meta, index)
            if record.state == JOINED and record.waiting != IDLE:
                self._bells.ring(index)

    def _wait(self, attempt: Callable[[], T | None], kind: int, stop: Stop) -> T:
        """Repeats `attempt` until it gives something. A bell wakes at once, a timer within 0.25 s."""
        found = attempt()
        if found is not None:
            return found
        pause, woken = FIRST_WAIT_S, True
        self._record.set_waiting(kind)
        try:
            while (found := attempt()) is None:
                if stop is not None and stop():
                    raise Stopped(f"{self.name} was told to stop while it waited for the ring")
                start = time.monotonic_ns()
                woken = self._bells.wait(pause)
                self._record.add_wait(time.monotonic_ns() - start)
                self.beat()
                pause = FIRST_WAIT_S if woken else min(2 * pause, LONGEST_WAIT_S)
        finally:
            self._record.set_waiting(IDLE)
        return found

    def _raise_if_poisoned(self) -> None:
        found = protocol.poisoned(self._view)
        if found is not None:
            seq, reason = found
            raise Poisoned(
                f"slot {seq} of the plan failed {protocol.MAX_FAILURES} times, at last: {reason}",
                seq,
            )

    def leave(self) -> None:
        """Lets go of all leases, whose copies must have ended, and of the place. Idempotent."""
        if self._left or self._lock.fd < 0:
            return
        self._left = True
        try:
            self._change(self._leave)
            self._wake_all()
        except RingMissing:
            pass  # removed under us: nothing to let go of
        self._bells.close()
        self._lock.close()

    def _leave(self, now: int) -> None:
        protocol.release_party(self._view, self.id, now)
        leave(self._view, self._lock, self._record, now)

    def _count(self, name: str) -> Callable[[int], None]:
        return lambda now: count(self._view, name, now)
