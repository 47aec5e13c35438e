"""The words that a transition reads and writes: states, tokens, counters, and the check of it all.

A slot's word is one u64: flag (byte 0: 0 empty, 1 ready, 2 consumed), sub-state (byte 1), owner
(bytes 2-3, 0xFFFF nobody), generation (bytes 4-7, +1 a claim). One aligned store changes them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from . import layout as at
from .errors import RingError

EMPTY, WRITING, QUARANTINE, REDO = 0x000, 0x100, 0x200, 0x300
READY, READING = 0x001, 0x101
CONSUMED, POISON = 0x002, 0x302
STATE_NAMES = {
    EMPTY: "EMPTY",
    WRITING: "WRITING",
    QUARANTINE: "QUARANTINE",
    REDO: "REDO",
    READY: "READY",
    READING: "READING",
    CONSUMED: "CONSUMED",
    POISON: "POISON",
}
FREE = frozenset((EMPTY, CONSUMED))
"""The seq of a slot means nothing in these two."""
OWNED = frozenset((WRITING, QUARANTINE, READING))
VOIDED_BY_REWIND = frozenset((READY, CONSUMED, REDO, POISON))
NOBODY = 0xFFFF
U64 = 2**64 - 1

MAX_FAILURES = 3
"""Of one seq, in one epoch; then POISON."""
REASONS = ("", "its writer died", "its writer gave it up", "wrong sums", "its reader died")
DIED_WRITING, ABORTED, BAD_SUM, DIED_READING = range(1, 5)

# Flow and anomalies, in the order of meta.bin; new ones go to the end.
COUNTERS = (
    "published",
    "acknowledged",
    "redone",
    "rewinds",
    "joined",
    "left",
    "aborted",
    "given_back",
    "bad_sum",
    "bad_seal",
    "died",
    "quarantined",
    "reclaimed_writing",
    "redelivered",
    "poisoned",
    "voided",
    "refused_epoch",
    "stale_lease",
    "slow_ctrl",
    "late_wakeup",
)
_COUNTER = {name: at.COUNTER_AT + i * at.COUNTER_WORDS for i, name in enumerate(COUNTERS)}


@dataclass(frozen=True, slots=True)
class View:
    """The words of meta.bin and of each ready.bin; `max_tokens` bounds what a seal may claim."""

    meta: memoryview
    slots: Sequence[memoryview]
    max_tokens: int


class Token(NamedTuple):
    """What a claim or a take gives to its party; worthless once a part of it no longer fits."""

    slot: int
    generation: int
    party: int
    epoch: int
    seq: int


def pack_word(state: int, owner: int, generation: int) -> int:
    return state | owner << 16 | (generation & 0xFFFFFFFF) << 32


def state_of(word: int) -> int:
    return word & 0xFFFF


def owner_of(word: int) -> int:
    return word >> 16 & 0xFFFF


def generation_of(word: int) -> int:
    return word >> 32


def is_mine(view: View, words: memoryview) -> bool:
    """The slot's seq is trusted and of the current epoch. The model's MINE."""
    return words[at.WORD] & 0xFFFF not in FREE and words[at.SLOT_EPOCH] == view.meta[at.EPOCH]


def owners(view: View) -> set[int]:
    """The parties that some slot names: their records may not be reused."""
    words = [slot[at.WORD] for slot in view.slots]
    return {owner_of(word) for word in words if state_of(word) in OWNED}


def is_over(view: View) -> bool:
    """The trainer has closed the run and every seq is acknowledged: target workers may leave."""
    return view.meta[at.CLOSED] == 1 and view.meta[at.TAIL] >= view.meta[at.END_SEQ]


def poisoned(view: View) -> tuple[int, str] | None:
    """(seq, reason of the last failure) of the lowest POISON of this epoch."""
    found = [
        (words[at.SEQ], REASONS[min(words[at.FAILURES] >> 16 & 0xFFFF, len(REASONS) - 1)])
        for words in view.slots
        if words[at.WORD] & 0xFFFF == POISON and is_mine(view, words)
    ]
    return min(found, default=None)


def count(view: View, name: str, now: int) -> None:
    """Adds one to a counter of meta.bin: count, first, last. No rule depends on a counter."""
    index = _COUNTER[name]
    if view.meta[index] == 0:
        view.meta[index + 1] = now
    view.meta[index + 2] = now
    view.meta[index] = view.meta[index] + 1 & U64


def counters(meta: memoryview) -> dict[str, tuple[int, int, int]]:
    """name: (count, first, last), times in ns of CLOCK_MONOTONIC."""
    return {
        name: (meta[index], meta[index + 1], meta[index + 2]) for name, index in _COUNTER.items()
    }


def occupancy_bucket(ready: int, slots: int) -> int:
    """0: no slot READY; 8: all; the eighths between."""
    eighths = 8 * ready // slots
    return eighths if ready in (0, slots) else min(7, max(1, eighths))


def note_occupancy(view: View, ready: int, now: int) -> None:
    """Adds the time since the last call, while this many slots were READY, to their bucket."""
    meta = view.meta
    since = meta[at.OCCUPANCY_NOTED]
    if 0 < since < now:
        index = at.OCCUPANCY + occupancy_bucket(ready, len(view.slots))
        meta[index] = meta[index] + now - since & U64
    meta[at.OCCUPANCY_NOTED] = now


class Scan(NamedTuple):
    """One look over all slots."""

    seqs: list[int]
    """Those of this epoch that count: see `is_mine`."""
    ready: int
    """READY slots, of any epoch."""


def scan(view: View) -> Scan:
    """Checks all that is read from shared memory, before it is used. Raises RingError: which word.

    The one loop over the slots that every holder of CTRL makes; 64 of them cost 14 us.
    """
    _check_meta(view)
    meta = view.meta
    epoch, head, end = meta[at.EPOCH], meta[at.HEAD], meta[at.END_SEQ]
    # A claim stores the word before head, so a seq may equal head, and never exceeds it.
    highest = min(head, end - 1) if meta[at.SETTLED] == epoch else U64
    seqs, ready = [], 0
    for words in view.slots:
        word = words[at.WORD]
        state = word & 0xFFFF
        if state in FREE:
            continue
        if state == READY:
            ready += 1
        elif state not in STATE_NAMES or (state in OWNED and owner_of(word) >= at.MAX_PARTIES):
            raise _damage(view, words)
        slot_epoch = words[at.SLOT_EPOCH]
        if slot_epoch == epoch:
            seq = words[at.SEQ]
            if seq > highest:
                raise _damage(view, words)
            seqs.append(seq)
        elif slot_epoch > epoch:
            raise _damage(view, words)
    return Scan(seqs, ready)


def seqs_of_epoch(view: View) -> list[int]:
    """As in `scan`, of words that it has checked."""
    epoch = view.meta[at.EPOCH]
    return [
        words[at.SEQ]
        for words in view.slots
        if words[at.SLOT_EPOCH] == epoch and words[at.WORD] & 0xFFFF not in FREE
    ]


def _damage(view: View, words: memoryview) -> RingError:
    meta, slot = view.meta, next(i for i, other in enumerate(view.slots) if other is words)
    return RingError(
        f"slot_{slot:04d}/ready.bin is damaged: word {words[at.WORD]:#018x}, seq {words[at.SEQ]} "
        f"of epoch {words[at.SLOT_EPOCH]}, while the ring is at {meta[at.HEAD]} "
        f"of {meta[at.END_SEQ]}, epoch {meta[at.EPOCH]}"
    )


def _check_meta(view: View) -> None:
    meta = view.meta
    head, end, base = meta[at.HEAD], meta[at.END_SEQ], meta[at.BASE_SEQ]
    epoch, settled = meta[at.EPOCH], meta[at.SETTLED]
    if not 1 <= settled <= epoch <= settled + 1 < 2**62:
        raise RingError(f"meta.bin is damaged: epoch {epoch}, settled {settled}")
    if not base <= end < 2**62 or meta[at.CLOSED] > 1:
        raise RingError(f"meta.bin is damaged: base {base}, end {end}, closed {meta[at.CLOSED]}")
    if settled == epoch and head > end:
        raise RingError(f"meta.bin is damaged: head {head}, end {end}")
    if meta[at.SLOT_COUNT] != len(view.slots) or meta[at.QUARANTINE_NS] >= 2**42:
        raise RingError("meta.bin is damaged: its slot count or quarantine changed")
