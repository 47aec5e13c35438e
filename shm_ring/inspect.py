"""A read-only picture of a ring: `status`, `doctor` and the metrics read only this.

Takes no lock and no party record, maps meta.bin and ready.bin only, and never blocks the run. The
parts are read one after the other, so two figures may differ by a transition; each slot is read
until its word stayed the same. Rates come from two pictures: `rates(before, after)`.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import layout as at
from .errors import RingError
from .layout import Field, Header
from .liveness import DEAD as DEAD_RECORD
from .liveness import FREE_RECORD, JOINED, ROLES, Record, proved_dead, read_record
from .locks import LockFile
from .segment import map_file, open_lock, read_header, slot_path
from .state import (
    COUNTERS,
    NOBODY,
    OWNED,
    READY,
    REASONS,
    STATE_NAMES,
    counters,
    generation_of,
    owner_of,
    state_of,
)

ANOMALIES = COUNTERS[COUNTERS.index("aborted") :]
WAITS = ("", "free slot", "ready slot")


@dataclass(frozen=True)
class SlotView:
    index: int
    state: str
    seq: int | None
    """None in EMPTY and CONSUMED, where it means nothing."""
    epoch: int
    generation: int
    owner: int | None
    age_s: float
    """Seconds in this state."""
    total_tok: int | None
    """None unless READY or READING."""
    failures: int
    last_failure: str
    deliveries: int


@dataclass(frozen=True)
class PartyView:
    id: int
    role: str
    name: str
    pid: int
    status: str
    """alive; suspect: its heartbeat is late; dead: the kernel says so; exited."""
    heartbeat_age_s: float
    waited_s: float
    waits_for: str
    items: int
    """Slots published or acknowledged."""
    tokens: int
    bytes: int
    since_s: float


@dataclass(frozen=True)
class RingSnapshot:
    path: str
    run_name: str
    ring_id: str
    time_s: float
    """CLOCK_MONOTONIC, for rates."""
    epoch: int
    settled: int
    head: int
    tail: int
    base_seq: int
    end_seq: int
    closed: bool
    owner_alive: bool
    """The process that created or took over this ring lives."""
    age_s: float
    slot_count: int
    slot_bytes: int
    slots: list[SlotView]
    parties: list[PartyView]
    counters: dict[str, tuple[int, float, float]]
    """name: (count, seconds since the first, seconds since the last)."""
    occupancy: list[float]
    """Share of the time with 0, about 1/8 ... 7/8, all slots READY."""
    lengths: dict[int, int]
    """Documents of the READY slots by length: {upper bound, a power of 2: count}."""

    @property
    def backlog(self) -> int:
        """READY slots."""
        return sum(slot.state == "READY" for slot in self.slots)

    @property
    def oldest_ready_s(self) -> float | None:
        return max((slot.age_s for slot in self.slots if slot.state == "READY"), default=None)

    @property
    def anomalies(self) -> dict[str, tuple[int, float, float]]:
        """The counters of what a quiet run does not show, where not zero."""
        return {name: self.counters[name] for name in ANOMALIES if self.counters[name][0]}

    def to_json(self) -> dict[str, Any]:
        derived = {
            "backlog": self.backlog,
            "oldest_ready_s": self.oldest_ready_s,
            "anomalies": self.anomalies,
        }
        return dataclasses.asdict(self) | derived


def snapshot(path: Path | str) -> RingSnapshot:
    """Raises RingMissing where no ring is, RingError where a damaged one is."""
    path = Path(path)
    lock = open_lock(path, writable=False)
    try:
        page = map_file(path / "meta.bin", at.META_BYTES, writable=False)
        header = read_header(page, path)
        meta = at.words(memoryview(page))
        now = time.monotonic_ns()
        slots = [_slot(path, index, now) for index in range(header.slots)]
        parties = _parties(meta, header, lock, now)
        owner_alive = lock.held_elsewhere(at.OWNER_LOCK)
    finally:
        lock.close()
    return RingSnapshot(
        path=str(path),
        run_name=header.run_name,
        ring_id=f"{header.ring_id:016x}",
        time_s=now / 1e9,
        epoch=meta[at.EPOCH],
        settled=meta[at.SETTLED],
        head=meta[at.HEAD],
        tail=meta[at.TAIL],
        base_seq=meta[at.BASE_SEQ],
        end_seq=meta[at.END_SEQ],
        closed=bool(meta[at.CLOSED]),
        owner_alive=owner_alive,
        age_s=max(0.0, (time.time_ns() - meta[at.CREATED_NS]) / 1e9),
        slot_count=header.slots,
        slot_bytes=meta[at.SLOT_SIZE],
        slots=slots,
        parties=parties,
        counters={
            name: (times, _age(first, now), _age(last, now))
            for name, (times, first, last) in counters(meta).items()
        },
        occupancy=_occupancy(meta),
        lengths=_lengths(path, header.fields, slots),
    )


def _age(then_ns: int, now_ns: int) -> float:
    return max(0, now_ns - then_ns) / 1e9 if then_ns else 0.0


def _slot(path: Path, index: int, now: int) -> SlotView:
    page = map_file(slot_path(path, index) / "ready.bin", at.READY_BYTES, writable=False)
    words = at.words(memoryview(page))
    for _ in range(10):
        copy = words[:].tolist()
        if words[at.WORD] == copy[at.WORD]:
            break
    word = copy[at.WORD]
    state, owner, failures = state_of(word), owner_of(word), copy[at.FAILURES]
    name = STATE_NAMES.get(state, f"garbage {state:#06x}")
    trusted = name not in ("EMPTY", "CONSUMED")
    return SlotView(
        index=index,
        state=name,
        seq=copy[at.SEQ] if trusted else None,
        epoch=copy[at.SLOT_EPOCH],
        generation=generation_of(word),
        owner=owner if state in OWNED and owner != NOBODY else None,
        age_s=_age(copy[at.CHANGED_NS], now),
        total_tok=copy[at.TOTAL_TOK] if name in ("READY", "READING") else None,
        failures=failures & 0xFFFF if trusted else 0,
        last_failure=REASONS[min(failures >> 16 & 0xFFFF, len(REASONS) - 1)] if trusted else "",
        deliveries=copy[at.DELIVERIES] if trusted else 0,
    )


def _parties(meta: memoryview, header: Header, lock: LockFile, now: int) -> list[PartyView]:
    records = [read_record(meta, index) for index in range(at.MAX_PARTIES)]
    return [
        _party(record, header.fields, _status(record, lock, meta[at.SUSPECT_NS], now), now)
        for record in records
        if record.state != FREE_RECORD
    ]


def _status(record: Record, lock: LockFile, suspect_ns: int, now: int) -> str:
    if record.state == DEAD_RECORD:
        return "dead"
    if record.state != JOINED:
        return "exited"
    if proved_dead(lock, record):
        return "dead"
    return "suspect" if now - record.heartbeat_ns > suspect_ns else "alive"


def _party(record: Record, fields: tuple[Field, ...], status: str, now: int) -> PartyView:
    per_item = sum(field.nbytes for field in fields if not field.per_token)
    per_token = sum(field.valid_bytes(1) for field in fields if field.per_token)
    return PartyView(
        id=record.index,
        role=ROLES.get(record.role, "unknown"),
        name=record.name,
        pid=record.pid,
        status=status,
        heartbeat_age_s=_age(record.heartbeat_ns, now),
        waited_s=record.waited_ns / 1e9,
        waits_for=WAITS[record.waiting] if record.waiting < len(WAITS) else "",
        items=record.items,
        tokens=record.tokens,
        bytes=record.items * per_item + record.tokens * per_token,
        since_s=max(0.0, now / 1e9 - record.joined_s),
    )


def _occupancy(meta: memoryview) -> list[float]:
    times = meta[at.OCCUPANCY : at.OCCUPANCY + at.OCCUPANCY_BUCKETS].tolist()
    return [spent / max(1, sum(times)) for spent in times]


def _lengths(path: Path, fields: tuple[Field, ...], slots: list[SlotView]) -> dict[int, int]:
    """A slot that is refilled meanwhile may give a mixed picture: these are for looking at."""
    field = next((f for f in fields if f.name == "lens" and f.dtype == "i64"), None)
    if field is None:
        return {}
    found: dict[int, int] = {}
    for slot in slots:
        if slot.state != STATE_NAMES[READY]:
            continue
        page = map_file(slot_path(path, slot.index) / "lens.bin", field.nbytes, writable=False)
        lens = np.frombuffer(page, "<i8")
        for length in lens[(lens > 0) & (lens <= at.max_tokens(fields))].tolist():
            bound = 1 << (length - 1).bit_length()
            found[bound] = found.get(bound, 0) + 1
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class Rates:
    """Of one side between two pictures, and how much of the time its parties waited (0 to 1)."""

    slots_per_s: float
    tok_per_s: float
    gb_per_s: float
    waiting: float


def rates(before: RingSnapshot, after: RingSnapshot) -> dict[str, Rates]:
    """{"writer": ..., "reader": ...}; parties that are in both pictures count."""
    span_s = after.time_s - before.time_s
    if span_s <= 0 or before.ring_id != after.ring_id:
        raise RingError("rates need two pictures of one ring, in order")
    return {role: _rates_of(role, before, after, span_s) for role in ROLES.values()}


def _rates_of(role: str, before: RingSnapshot, after: RingSnapshot, span_s: float) -> Rates:
    earlier = {(p.id, p.pid): p for p in before.parties if p.role == role}
    pairs = [
        (earlier[party.id, party.pid], party)
        for party in after.parties
        if (party.id, party.pid) in earlier
    ]
    return Rates(
        sum(b.items - a.items for a, b in pairs) / span_s,
        sum(b.tokens - a.tokens for a, b in pairs) / span_s,
        sum(b.bytes - a.bytes for a, b in pairs) / span_s / 1e9,
        sum(b.waited_s - a.waited_s for a, b in pairs) / span_s / max(1, len(pairs)),
    )
