"""The ring's state machine: every transition as a function over words in memory. No I/O.

Whoever holds CTRL calls `settle` first, then at most one transition. A transition checks what it
expects, stores its side fields, and commits with ONE store of the slot's word; so a death between
any two stores leaves a state that the next holder of CTRL understands. `now` is CLOCK_MONOTONIC
in ns. The states:

    EMPTY -claim-> WRITING -publish-> READY -take-> READING -done-> CONSUMED (claimed like EMPTY)
    WRITING -abort-> REDO -claim-> WRITING
    READING -give_back-> READY;  READING -reject (wrong sums)-> REDO
    WRITING -owner dead-> QUARANTINE -time over-> REDO;  READING -owner dead-> READY
    the third failure of one seq: POISON in place of REDO or READY
    rewind: READY, CONSUMED, REDO, POISON -> EMPTY; the rest when the owner lets go or is reaped

The model in tests/model/ checks this table: each of its inlines names the function it stands for.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from . import layout as at
from .crash import crash_point
from .errors import RingError, StaleLease
from .state import (
    ABORTED,
    BAD_SUM,
    CONSUMED,
    DIED_READING,
    DIED_WRITING,
    EMPTY,
    FREE,
    MAX_FAILURES,
    NOBODY,
    POISON,
    QUARANTINE,
    READING,
    READY,
    REDO,
    STATE_NAMES,
    VOIDED_BY_REWIND,
    WRITING,
    Token,
    View,
    count,
    generation_of,
    is_mine,
    note_occupancy,
    owner_of,
    pack_word,
    scan,
    seqs_of_epoch,
    state_of,
)


def _commit(view: View, slot: int, state: int, owner: int, now: int) -> None:
    words = view.slots[slot]
    words[at.CHANGED_NS] = now
    words[at.WORD] = pack_word(state, owner, generation_of(words[at.WORD]))


# ---------------------------------------------------------------- every holder of CTRL, first


def settle(view: View, now: int) -> None:
    """Finish a rewind whose party died, then derive head and tail. The model's FIX."""
    found = scan(view)
    note_occupancy(view, found.ready, now)
    if view.meta[at.SETTLED] != view.meta[at.EPOCH]:
        finish_rewind(view, now)
        found = scan(view)
    derive(view, found.seqs)


def derive(view: View, seqs: list[int]) -> None:
    """head = 1 + the highest of this epoch's seqs, if more; tail = the lowest, else head.

    The model's DERIVE.
    """
    meta = view.meta
    head = meta[at.HEAD]
    if len(set(seqs)) != len(seqs):
        raise RingError(f"the ring is damaged: two slots hold one seq, among {sorted(seqs)}")
    if seqs and max(seqs) >= head:
        head = max(seqs) + 1
        meta[at.HEAD] = head
        crash_point("derive.head")
    tail = min(seqs, default=head)
    if tail != meta[at.TAIL]:
        meta[at.TAIL] = tail
        crash_point("derive.tail")


def finish_rewind(view: View, now: int) -> None:
    """Any holder of CTRL repeats it until `settled` is stored. The model's FINISH."""
    meta = view.meta
    for slot, words in enumerate(view.slots):
        state = state_of(words[at.WORD])
        if state in VOIDED_BY_REWIND and words[at.SLOT_EPOCH] != meta[at.EPOCH]:
            _commit(view, slot, EMPTY, NOBODY, now)
            if state == READY:
                count(view, "voided", now)
            crash_point("finish.slot")
    meta[at.HEAD] = meta[at.BASE_SEQ]
    crash_point("finish.head")
    meta[at.TAIL] = meta[at.BASE_SEQ]
    crash_point("finish.tail")
    meta[at.CLOSED] = 0
    crash_point("finish.closed")
    meta[at.SETTLED] = meta[at.EPOCH]
    crash_point("finish.settled")


# ---------------------------------------------------------------- failures


def fail(view: View, slot: int, reason: int, now: int, otherwise: int = REDO) -> int:
    """One more failure of the slot's seq: POISON at the third, else `otherwise`. The new state.

    It is stored with (generation, delivery) of the try that failed: whoever repeats this after a
    death counts it once.
    """
    words = view.slots[slot]
    old = words[at.FAILURES]
    attempt = (generation_of(words[at.WORD]) & 0xFFFF) | (words[at.DELIVERIES] & 0xFFFF) << 16
    failures = min(0xFFFF, (old & 0xFFFF) + (old == 0 or old >> 32 != attempt))
    words[at.FAILURES] = failures | reason << 16 | attempt << 32
    crash_point("fail.count")
    state = POISON if failures >= MAX_FAILURES else otherwise
    if state == POISON:
        count(view, "poisoned", now)
    _commit(view, slot, state, NOBODY, now)
    return state


# ---------------------------------------------------------------- the producer


def lowest_redo(view: View) -> int | None:
    """The slot of the lowest seq to make again. The model's ISREDO."""
    redo = [
        (words[at.SEQ], slot)
        for slot, words in enumerate(view.slots)
        if words[at.WORD] & 0xFFFF == REDO and is_mine(view, words)
    ]
    return min(redo)[1] if redo else None


def free_slot(view: View) -> int | None:
    """The first free slot from head % slot_count on."""
    slots, head = len(view.slots), view.meta[at.HEAD]
    order = ((head + step) % slots for step in range(slots))
    return next((slot for slot in order if state_of(view.slots[slot][at.WORD]) in FREE), None)


def claim(view: View, party: int, now: int) -> Token | None:
    """T1: the lowest REDO seq, else the next fresh seq in a free slot, else None."""
    meta = view.meta
    epoch = meta[at.EPOCH]
    slot = lowest_redo(view)
    fresh = slot is None
    if slot is None:
        slot = free_slot(view)
        if slot is None or meta[at.HEAD] >= meta[at.END_SEQ]:
            return None
        words = view.slots[slot]
        words[at.SLOT_EPOCH] = epoch
        words[at.SEQ] = meta[at.HEAD]
        words[at.FAILURES] = 0
    words = view.slots[slot]
    words[at.DELIVERIES] = 0
    words[at.CLAIMED_NS] = words[at.CHANGED_NS] = now
    crash_point("claim.seq")
    generation = (generation_of(words[at.WORD]) + 1) & 0xFFFFFFFF
    words[at.WORD] = pack_word(WRITING, party, generation)
    crash_point("claim.word")
    if fresh:
        meta[at.HEAD] = words[at.SEQ] + 1
        crash_point("claim.head")
    else:
        count(view, "redone", now)
    return Token(slot, generation, party, epoch, words[at.SEQ])


def _expect(view: View, token: Token, state: int, now: int) -> memoryview:
    words = view.slots[token.slot]
    if words[at.WORD] != pack_word(state, token.party, token.generation):
        count(view, "stale_lease", now)
        raise StaleLease(
            f"slot {token.slot} (seq {token.seq}) is no longer this party's: "
            f"{STATE_NAMES[state_of(words[at.WORD])]}, generation {generation_of(words[at.WORD])}"
        )
    return words


def _refused(view: View, token: Token, now: int) -> bool:
    """An old-epoch slot is released and its owner told so."""
    if view.slots[token.slot][at.SLOT_EPOCH] == view.meta[at.EPOCH]:
        return False
    count(view, "refused_epoch", now)
    _commit(view, token.slot, EMPTY, NOBODY, now)
    crash_point("release.word")
    return True


def publish(view: View, token: Token, total_tok: int, sums: Sequence[int] | None, now: int) -> bool:
    """T2, after the copy's own event. `sums`: one a field, mod 2**64, or None. False: refused."""
    words = _expect(view, token, WRITING, now)
    if _refused(view, token, now):
        return False
    words[at.SEAL_GENERATION] = token.generation
    words[at.SEAL_SEQ] = token.seq
    words[at.SEAL_EPOCH] = token.epoch
    words[at.TOTAL_TOK] = total_tok
    words[at.SUM_COUNT] = 0 if sums is None else len(sums)
    for index, value in enumerate(sums or ()):
        words[at.SUMS + index] = value
    words[at.PUBLISHED_NS] = now
    crash_point("publish.seal")
    _commit(view, token.slot, READY, NOBODY, now)
    count(view, "published", now)
    crash_point("publish.word")
    return True


def abort(view: View, token: Token, now: int) -> bool:
    """T3, after the copy's own event. False: the slot was of an old epoch, and is released."""
    _expect(view, token, WRITING, now)
    if _refused(view, token, now):
        return False
    fail(view, token.slot, ABORTED, now)
    count(view, "aborted", now)
    crash_point("abort.word")
    return True


# ---------------------------------------------------------------- the consumer


def wanted(view: View, seq: int) -> int | None:
    """The slot that holds this seq READY, in this epoch."""
    for slot, words in enumerate(view.slots):
        if words[at.SEQ] == seq and words[at.WORD] & 0xFFFF == READY and is_mine(view, words):
            return slot
    return None


def seal_fits(view: View, words: memoryview) -> bool:
    return (
        words[at.SEAL_GENERATION] == generation_of(words[at.WORD])
        and words[at.SEAL_SEQ] == words[at.SEQ]
        and words[at.SEAL_EPOCH] == words[at.SLOT_EPOCH]
        and words[at.TOTAL_TOK] <= view.max_tokens
        and words[at.SUM_COUNT] <= at.MAX_FIELDS
    )


def take(view: View, seq: int, party: int, now: int) -> Token | None:
    """T4: None while the seq is not READY. A seal that does not fit is a failure of the seq."""
    slot = wanted(view, seq)
    if slot is None:
        return None
    words = view.slots[slot]
    if not seal_fits(view, words):
        fail(view, slot, BAD_SUM, now)
        count(view, "bad_seal", now)
        return None
    words[at.DELIVERIES] = words[at.DELIVERIES] + 1 & 0xFFFFFFFF
    words[at.TAKEN_NS] = now
    crash_point("take.count")
    _commit(view, slot, READING, party, now)
    crash_point("take.word")
    return Token(slot, generation_of(words[at.WORD]), party, words[at.SLOT_EPOCH], words[at.SEQ])


def done(view: View, token: Token, now: int) -> bool:
    """T5, after the copy off the slot. False: refused, an old epoch; the slot is released."""
    _expect(view, token, READING, now)
    if _refused(view, token, now):
        return False
    _commit(view, token.slot, CONSUMED, NOBODY, now)
    count(view, "acknowledged", now)
    crash_point("done.word")
    derive(view, seqs_of_epoch(view))
    return True


def give_back(view: View, token: Token, now: int) -> bool:
    """T6: READY again, not a failure. False as in `done`."""
    _expect(view, token, READING, now)
    if _refused(view, token, now):
        return False
    _commit(view, token.slot, READY, NOBODY, now)
    count(view, "given_back", now)
    crash_point("give_back.word")
    return True


def reject(view: View, token: Token, now: int) -> bool:
    """The sums of a taken slot are wrong: REDO, or POISON. False as in `done`."""
    _expect(view, token, READING, now)
    if _refused(view, token, now):
        return False
    fail(view, token.slot, BAD_SUM, now)
    count(view, "bad_sum", now)
    crash_point("reject.word")
    return True


def close(view: View, epoch: int) -> bool:
    """The trainer's last act. False: somebody has rewound the ring since."""
    if view.meta[at.EPOCH] != epoch:
        return False
    view.meta[at.CLOSED] = 1
    crash_point("close.closed")
    return True


def rewind(view: View, base: int, now: int) -> int:
    """base_seq first, then the epoch, which is the commit. Returns the new epoch."""
    meta = view.meta
    assert meta[at.SETTLED] == meta[at.EPOCH]
    assert base <= meta[at.END_SEQ]
    meta[at.BASE_SEQ] = base
    crash_point("rewind.base")
    meta[at.EPOCH] += 1
    crash_point("rewind.epoch")
    finish_rewind(view, now)
    count(view, "rewinds", now)
    derive(view, seqs_of_epoch(view))
    return int(meta[at.EPOCH])


# ---------------------------------------------------------------- the reaper; a party that leaves


def reap(view: View, dead: Collection[int], now: int) -> int:
    """R1-R4 on every slot. `dead`: parties proved dead by the kernel. How many slots changed."""
    return sum(reap_one(view, slot, dead, now) for slot in range(len(view.slots)))


def reap_one(view: View, slot: int, dead: Collection[int], now: int) -> bool:
    """The model's REAPONE, for one slot. False: nothing to do."""
    words = view.slots[slot]
    word = words[at.WORD]
    state, dead_owner = state_of(word), owner_of(word) in dead
    if state == WRITING and dead_owner:  # R1: its copy may still be landing
        words[at.DEADLINE_NS] = now + view.meta[at.QUARANTINE_NS]
        crash_point("reap.deadline")
        _commit(view, slot, QUARANTINE, owner_of(word), now)
        count(view, "quarantined", now)
    elif state == QUARANTINE and _quarantine_over(view, words, now):  # R2
        _let_go(view, slot, DIED_WRITING, now)
        count(view, "reclaimed_writing", now)
    elif state == READING and dead_owner:  # R3, R4: the data is intact
        _let_go(view, slot, DIED_READING, now, otherwise=READY)
        count(view, "redelivered", now)
    else:
        return False
    crash_point("reap.word")
    return True


def _quarantine_over(view: View, words: memoryview, now: int) -> bool:
    longest = now + view.meta[at.QUARANTINE_NS]
    if words[at.DEADLINE_NS] > longest:  # damaged: must not hold the slot for ever
        words[at.DEADLINE_NS] = longest
    return bool(now >= words[at.DEADLINE_NS])


def _let_go(view: View, slot: int, reason: int, now: int, otherwise: int = REDO) -> None:
    if view.slots[slot][at.SLOT_EPOCH] == view.meta[at.EPOCH]:
        fail(view, slot, reason, now, otherwise)
    else:
        _commit(view, slot, EMPTY, NOBODY, now)


def release_party(view: View, party: int, now: int) -> None:
    """A party that leaves lets go of all that it owns; its copies have ended."""
    for slot, words in enumerate(view.slots):
        word = words[at.WORD]
        if owner_of(word) != party:
            continue
        token = Token(slot, generation_of(word), party, words[at.SLOT_EPOCH], words[at.SEQ])
        if state_of(word) == WRITING:
            abort(view, token, now)
        elif state_of(word) == READING:
            give_back(view, token, now)
