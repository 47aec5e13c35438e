"""Who is alive: party records, the kernel's proof of death, and the reaper that acts on it.

A party holds the lock PARTY[i] from joining to its end, and the kernel drops it at any death.
Dead: that lock is free, or (in the same pid namespace) the process is gone. A late heartbeat only
says "suspect": a stopped process still holds its lock, and its slot.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from . import layout as at
from .crash import crash_point
from .errors import RingBusy, RingError
from .locks import LockFile
from .protocol import reap
from .state import U64, View, count, owners

FREE_RECORD, JOINED, EXITED, DEAD = range(4)
WRITER, READER = 1, 2
ROLES = {WRITER: "writer", READER: "reader"}
IDLE, WAITS_FREE, WAITS_READY = range(3)


@cache
def boot_id() -> bytes:
    text = Path("/proc/sys/kernel/random/boot_id").read_text()
    return bytes.fromhex(text.strip().replace("-", ""))


@cache
def pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino & 0xFFFFFFFF


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot, mod 2**32; None: gone, or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    parts = text.rpartition(")")[2].split()
    state, threads, started = parts[0], int(parts[17]), int(parts[19])
    if state in "ZX" and threads <= 1:
        return None
    return started & 0xFFFFFFFF


@dataclass(frozen=True)
class Record:
    """One party record of meta.bin, decoded; times by CLOCK_MONOTONIC."""

    index: int
    state: int
    role: int
    waiting: int
    pid: int
    start_ticks: int
    pid_namespace: int
    heartbeat_ns: int
    joined_s: int
    items: int
    waited_ns: int
    tokens: int
    name: str


def word_of(index: int) -> int:
    """The index of a party record's first u64 word."""
    return (at.PARTY_AT + index * at.PARTY_BYTES) // 8


def read_record(meta: memoryview, index: int) -> Record:
    w = meta[word_of(index) : word_of(index) + at.PARTY_BYTES // 8]
    name = bytes(w[at.P_NAME :]).rstrip(b"\0").decode(errors="replace")
    low = 0xFFFFFFFF
    return Record(
        index,
        w[0] & 0xFF,
        w[0] >> 8 & 0xFF,
        w[0] >> 16 & 0xFF,
        w[0] >> 32,
        w[at.P_START] & low,
        w[at.P_START] >> 32,
        w[at.P_HEARTBEAT],
        w[at.P_ITEMS] & low,
        w[at.P_ITEMS] >> 32,
        w[at.P_WAITED],
        w[at.P_TOKENS],
        name,
    )


def waiting_parties(meta: memoryview, kinds: tuple[int, ...]) -> list[int]:
    """Indices of the parties that wait for one of these. Hints go to them."""
    wanted = [JOINED | kind << 16 for kind in kinds]
    step = at.PARTY_BYTES // 8
    states = meta[word_of(0) : word_of(at.MAX_PARTIES) : step].tolist()
    return [index for index, word in enumerate(states) if word & 0xFF00FF in wanted]


def proved_dead(lock: LockFile, record: Record) -> bool:
    """Never by the heartbeat. A forked child may keep the lock of a parent that is gone."""
    if not lock.held_elsewhere(at.PARTY_LOCK + record.index):
        return True
    if record.pid_namespace != pid_namespace():
        return False
    return start_ticks(record.pid) != record.start_ticks


def joined(meta: memoryview) -> list[Record]:
    records = [read_record(meta, index) for index in range(at.MAX_PARTIES)]
    return [record for record in records if record.state == JOINED]


def live_parties(meta: memoryview, lock: LockFile) -> list[Record]:
    return [record for record in joined(meta) if not proved_dead(lock, record)]


class PartyRecord:
    """This process's own record. Only its owner writes it while it lives, so without CTRL."""

    def __init__(self, meta: memoryview, index: int) -> None:
        self._meta, self.index, self._word = meta, index, word_of(index)
        self.waited_ns = 0

    def write(self, role: int, name: str, now: int) -> None:
        meta, word = self._meta, self._word
        meta[word] = role << 8 | os.getpid() << 32
        ticks = start_ticks(os.getpid()) or 0
        meta[word + at.P_START] = ticks | pid_namespace() << 32
        meta[word + at.P_HEARTBEAT] = now
        meta[word + at.P_ITEMS] = now // 10**9 & 0xFFFFFFFF
        meta[word + at.P_WAITED] = meta[word + at.P_TOKENS] = 0
        padded = name.encode()[: at.P_NAME_BYTES].ljust(at.P_NAME_BYTES, b"\0")
        meta[word + at.P_NAME] = int.from_bytes(padded[:8], "little")
        meta[word + at.P_NAME + 1] = int.from_bytes(padded[8:], "little")

    def set_state(self, state: int) -> None:
        self._meta[self._word] = self._meta[self._word] & ~0xFF | state

    def set_waiting(self, kind: int) -> None:
        self._meta[self._word] = self._meta[self._word] & ~0xFF0000 | kind << 16

    def beat(self, now: int) -> None:
        self._meta[self._word + at.P_HEARTBEAT] = now

    def add_wait(self, waited_ns: int) -> None:
        self.waited_ns += waited_ns
        self._meta[self._word + at.P_WAITED] = self.waited_ns

    def add_item(self, tokens: int) -> None:
        word = self._word + at.P_ITEMS
        items = (self._meta[word] >> 32) + 1 & 0xFFFFFFFF
        self._meta[word] = self._meta[word] & 0xFFFFFFFF | items << 32
        word = self._word + at.P_TOKENS
        self._meta[word] = self._meta[word] + tokens & U64


def join(view: View, lock: LockFile, role: int, name: str, now: int) -> PartyRecord:
    """Under CTRL: takes a record that no slot names and whose lock is free; its state comes last.

    Raises RingBusy when a living party has this name, RingError when all records are taken.
    """
    if not 1 <= len(name.encode()) <= at.P_NAME_BYTES:
        raise RingError(f"a party's name has 1 to {at.P_NAME_BYTES} bytes: {name!r}")
    for other in live_parties(view.meta, lock):
        if other.name == name:
            raise RingBusy(f"{name} is already joined to this ring, by process {other.pid}")
    named = owners(view)
    states = {index: read_record(view.meta, index).state for index in range(at.MAX_PARTIES)}
    for index in sorted(states, key=lambda i: (states[i] != FREE_RECORD, i)):
        if index in named or not lock.try_lock(at.PARTY_LOCK + index):
            continue
        crash_point("join.lock")
        record = PartyRecord(view.meta, index)
        record.write(role, name, now)
        crash_point("join.record")
        record.set_state(JOINED)
        count(view, "joined", now)
        crash_point("join.state")
        return record
    raise RingError(f"all {at.MAX_PARTIES} party records of this ring are taken")


def leave(view: View, lock: LockFile, record: PartyRecord, now: int) -> None:
    """Under CTRL, after the party's slots were released."""
    record.set_state(EXITED)
    count(view, "left", now)
    crash_point("leave.state")
    lock.unlock(at.PARTY_LOCK + record.index)


def reap_due(meta: memoryview, now: int) -> bool:
    """Once a period for the whole ring, whoever comes first. A time from the future is damage."""
    return not 0 <= now - meta[at.REAPED_NS] < meta[at.REAP_NS]


def reap_pass(view: View, lock: LockFile, me: int | None = None) -> int:
    """Under CTRL: marks the dead, lets go of their slots. Returns the number of slots changed."""
    now = time.monotonic_ns()
    alive = set()
    for record in joined(view.meta):
        if record.index == me or not proved_dead(lock, record):
            alive.add(record.index)
            continue
        PartyRecord(view.meta, record.index).set_state(DEAD)
        count(view, "died", now)
        crash_point("reap.party")
    # A slot whose owner never joined, or has left, is damage: that owner is as good as dead.
    changed = reap(view, set(range(at.MAX_PARTIES)) - alive, now)
    view.meta[at.REAPED_NS] = now
    return changed
