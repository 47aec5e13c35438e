"""Wake-up hints: one named POSIX semaphore a party. The words in shared memory are the truth.

A semaphore has no owner: a death leaves its value wrong for ever. So nothing depends on one: each
wait is timed and followed by a look at the ring. A missing semaphore only makes the wait coarser.
"""

from __future__ import annotations

import time

import posix_ipc

from .layout import MAX_PARTIES

FIRST_WAIT_S, LONGEST_WAIT_S = 0.01, 0.25
_MOST_DRAINED = 10_000


def semaphore_name(ring_id: int, party: int) -> str:
    return f"/dflash_ring_{ring_id:016x}_{party}"


def unlink_semaphores(ring_id: int) -> None:
    for party in range(MAX_PARTIES):
        try:
            posix_ipc.unlink_semaphore(semaphore_name(ring_id, party))
        except posix_ipc.ExistentialError:
            continue


class Bells:
    """Wakes other parties, and waits for this one's own bell."""

    def __init__(self, ring_id: int, me: int) -> None:
        self._ring_id = ring_id
        self._known: dict[int, posix_ipc.Semaphore] = {}
        self._own = self._open(me, posix_ipc.O_CREAT)
        self._drain()

    def _open(self, party: int, flags: int = 0) -> posix_ipc.Semaphore | None:
        """None where it is missing, or where the system has no room or right for it."""
        if party not in self._known:
            name = semaphore_name(self._ring_id, party)
            try:
                self._known[party] = posix_ipc.Semaphore(name, flags, mode=0o600)
            except (OSError, posix_ipc.Error):
                return None
        return self._known[party]

    def _drain(self) -> None:
        """Left-over posts would turn waits into a spin."""
        if self._own is None:
            return
        try:
            for _ in range(_MOST_DRAINED):
                self._own.acquire(0)
        except posix_ipc.BusyError:
            return

    def ring(self, party: int) -> None:
        bell = self._open(party)
        if bell is not None and bell.value == 0:
            bell.release()

    def wait(self, timeout_s: float) -> bool:
        """True when woken. A signal ends the wait too."""
        if self._own is None:
            time.sleep(timeout_s)
            return False
        try:
            self._own.acquire(timeout_s)
        except posix_ipc.BusyError:
            return False
        except posix_ipc.SignalError:
            return True
        self._drain()
        return True

    def close(self) -> None:
        for bell in self._known.values():
            bell.close()
        self._known.clear()
        self._own = None
