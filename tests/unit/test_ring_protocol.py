"""Each transition of the pure core, by hand: what it stores and refuses, what a death leaves."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from ring_core import (
    QUARANTINE_NS,
    C,
    P,
    Q,
    claim,
    counts,
    die_at,
    fails_by_abort,
    head_tail,
    ready,
    states,
    taken,
)
from rings import T, memory_view

from shm_ring import StaleLease, crash, protocol
from shm_ring import layout as at
from shm_ring.state import (
    CONSUMED,
    EMPTY,
    NOBODY,
    POISON,
    QUARANTINE,
    READING,
    READY,
    REDO,
    WRITING,
    Token,
    View,
    generation_of,
    pack_word,
    poisoned,
)


def test_one_slot_goes_round() -> None:
    view = memory_view(1, 9)
    for seq in range(3):
        token = claim(view)
        assert token == Token(slot=0, generation=seq + 1, party=P, epoch=1, seq=seq)
        assert view.slots[0][at.WORD] == pack_word(WRITING, P, seq + 1)
        assert protocol.claim(view, Q, 1) is None
        assert protocol.publish(view, token, 5, None, 1)
        assert view.slots[0][at.WORD] == pack_word(READY, NOBODY, seq + 1)
        assert protocol.take(view, seq + 1, C, 1) is None
        got = taken(view, seq)
        assert view.slots[0][at.WORD] == pack_word(READING, C, seq + 1)
        assert head_tail(view) == (seq + 1, seq)
        assert protocol.done(view, got, 1)
        assert view.slots[0][at.WORD] == pack_word(CONSUMED, NOBODY, seq + 1)
        assert head_tail(view) == (seq + 1, seq + 1)


def test_claims_are_in_order_and_end_at_end_seq() -> None:
    view = memory_view(8, 5)
    assert [claim(view, P + i % 2).seq for i in range(5)] == [0, 1, 2, 3, 4]
    assert protocol.claim(view, P, 1) is None


def test_the_tail_is_the_lowest_seq_that_is_not_acknowledged() -> None:
    view = memory_view(4, 9)
    for _ in range(3):
        ready(view)
    second, third = taken(view, 1), taken(view, 2)
    protocol.done(view, third, 1)
    protocol.done(view, second, 1)
    assert head_tail(view) == (3, 0)
    protocol.done(view, taken(view, 0), 1)
    assert head_tail(view) == (3, 3)


def test_the_lowest_redo_is_claimed_before_a_fresh_seq() -> None:
    view = memory_view(4, 9)
    tokens = [claim(view) for _ in range(3)]
    protocol.abort(view, tokens[2], 1)
    protocol.abort(view, tokens[1], 1)
    assert states(view) == [WRITING, REDO, REDO, EMPTY]
    again = claim(view, Q)
    assert (again.seq, again.slot, again.generation) == (1, 1, 2)
    assert [claim(view, Q).seq, claim(view, Q).seq] == [2, 3]


@pytest.mark.parametrize("action", ["publish", "abort", "done", "give_back", "reject"])
def test_a_stale_token_changes_nothing_and_is_counted(action: str) -> None:
    view = memory_view(2, 9)
    old = claim(view)
    protocol.abort(view, old, 1)
    new = claim(view, Q)
    assert new.slot == old.slot
    if action not in ("publish", "abort"):
        protocol.publish(view, new, 5, None, 1)
        kept = taken(view, 0)
        old = kept._replace(generation=old.generation)
    before = [page.tobytes() for page in view.slots], view.meta.tobytes()[:3072]
    with pytest.raises(StaleLease):
        if action == "publish":
            protocol.publish(view, old, 5, None, 1)
        else:
            getattr(protocol, action)(view, old, 1)
    assert ([page.tobytes() for page in view.slots], view.meta.tobytes()[:3072]) == before
    assert counts(view)["stale_lease"] == 1


def test_another_party_with_the_same_generation_is_stale() -> None:
    view = memory_view(1, 9)
    token = claim(view)
    with pytest.raises(StaleLease):
        protocol.publish(view, token._replace(party=Q), 5, None, 1)


def test_a_token_does_not_work_twice() -> None:
    view = memory_view(1, 9)
    ready(view)
    got = taken(view, 0)
    protocol.done(view, got, 1)
    for action in (protocol.done, protocol.give_back, protocol.reject):
        with pytest.raises(StaleLease):
            action(view, got, 1)


def test_a_dead_producer_is_quarantined_first_then_its_seq_is_redone() -> None:
    view = memory_view(2, 9)
    claim(view)
    assert protocol.reap(view, {Q, C}, 100) == 0  # another's death
    assert protocol.reap(view, {P}, 100) == 1
    assert view.slots[0][at.WORD] == pack_word(QUARANTINE, P, 1)
    assert protocol.reap(view, {P}, 100 + QUARANTINE_NS - 1) == 0
    assert states(view) == [QUARANTINE, EMPTY]
    assert protocol.reap(view, set(), 100 + QUARANTINE_NS) == 1
    assert states(view) == [REDO, EMPTY]
    assert claim(view, Q).seq == 0


def test_a_damaged_deadline_does_not_hold_the_slot() -> None:
    view = memory_view(1, 9)
    claim(view)
    protocol.reap(view, {P}, 100)
    view.slots[0][at.DEADLINE_NS] = 2**64 - 1
    assert protocol.reap(view, {P}, 100) == 0
    assert protocol.reap(view, {P}, 100 + QUARANTINE_NS) == 1


def test_a_dead_consumer_gives_its_slot_back() -> None:
    view = memory_view(1, 9)
    ready(view)
    taken(view, 0)
    assert protocol.reap(view, {C}, 1) == 1
    assert view.slots[0][at.WORD] == pack_word(READY, NOBODY, 1)
    assert taken(view, 0).seq == 0
    assert view.slots[0][at.DELIVERIES] == 2


def test_a_give_back_is_no_failure() -> None:
    view = memory_view(1, 9)
    ready(view)
    for _ in range(5):
        protocol.give_back(view, taken(view, 0), 1)
    assert states(view) == [READY]
    assert view.slots[0][at.FAILURES] == 0


def fails_by_death(view: View) -> None:
    claim(view)
    protocol.reap(view, {P}, 1)
    protocol.reap(view, {P}, 1 + QUARANTINE_NS)


def fails_by_sums(view: View) -> None:
    ready(view)
    protocol.reject(view, taken(view, 0), 1)


FAILURES = [fails_by_abort, fails_by_death, fails_by_sums]


@pytest.mark.parametrize("first", FAILURES)
@pytest.mark.parametrize("last", FAILURES)
def test_the_third_failure_of_one_seq_is_poison(
    first: Callable[[View], None], last: Callable[[View], None]
) -> None:
    view = memory_view(1, 9)
    for fails in (first, fails_by_abort):
        fails(view)
        assert states(view) == [REDO]
        assert poisoned(view) is None
    last(view)
    assert states(view) == [POISON]
    reason = {
        fails_by_abort: "its writer gave it up",
        fails_by_death: "its writer died",
        fails_by_sums: "wrong sums",
    }[last]
    assert poisoned(view) == (0, reason)
    assert protocol.claim(view, P, 1) is None and protocol.take(view, 0, C, 1) is None
    assert head_tail(view) == (1, 0)


def test_the_third_death_of_a_reader_is_poison() -> None:
    view = memory_view(1, 9)
    ready(view)
    for state in (READY, READY, POISON):
        taken(view, 0)
        protocol.reap(view, {C}, 1)
        assert states(view) == [state]
    assert poisoned(view) == (0, "its reader died")


def test_failures_of_different_seqs_do_not_add_up() -> None:
    view = memory_view(1, 9)
    for seq in range(4):
        fails_by_abort(view)
        fails_by_abort(view)
        assert states(view) == [REDO]
        ready(view)
        protocol.done(view, taken(view, seq), 1)


def test_a_failure_whose_party_dies_in_the_middle_counts_once() -> None:
    view = memory_view(1, 9)
    token = claim(view)
    die_at("fail.count", lambda: protocol.abort(view, token, 1))
    assert states(view) == [WRITING]
    protocol.reap(view, {P}, 1)
    die_at("fail.count", lambda: protocol.reap(view, {P}, 1 + QUARANTINE_NS))
    protocol.reap(view, {P}, 1 + QUARANTINE_NS)
    assert view.slots[0][at.FAILURES] & 0xFFFF == 1
    fails_by_abort(view)
    assert states(view) == [REDO]


@pytest.mark.parametrize("word", [at.SEAL_GENERATION, at.SEAL_SEQ, at.SEAL_EPOCH, at.TOTAL_TOK])
def test_a_seal_that_does_not_fit_is_never_delivered(word: int) -> None:
    view = memory_view(1, 9)
    ready(view)
    view.slots[0][word] = T + 1
    assert protocol.take(view, 0, C, 1) is None
    assert states(view) == [REDO]
    assert counts(view)["bad_seal"] == 1


def test_a_claim_that_dies_before_the_word_has_not_happened() -> None:
    view = memory_view(2, 9)
    die_at("claim.seq", lambda: claim(view))
    protocol.settle(view, 1)
    assert states(view) == [EMPTY, EMPTY] and head_tail(view) == (0, 0)
    assert claim(view, Q).seq == 0


def test_a_claim_that_dies_before_head_leaves_no_gap_and_no_double() -> None:
    view = memory_view(2, 9)
    die_at("claim.word", lambda: claim(view))
    assert head_tail(view) == (0, 0)
    assert claim(view, Q).seq == 1
    assert head_tail(view) == (2, 0)


def test_a_publish_that_dies_before_the_word_has_not_happened() -> None:
    view = memory_view(1, 9)
    token = claim(view)
    die_at("publish.seal", lambda: protocol.publish(view, token, 5, None, 1))
    assert states(view) == [WRITING]
    assert protocol.take(view, 0, C, 1) is None


def test_who_leaves_lets_go_of_everything() -> None:
    view = memory_view(4, 9)
    ready(view)
    protocol.take(view, 0, P, 1)
    claim(view, P), claim(view, Q)
    protocol.release_party(view, P, 1)
    assert states(view) == [READY, REDO, WRITING, EMPTY]


def test_the_generation_goes_up_by_one_a_claim_and_wraps() -> None:
    view = memory_view(1, 9)
    view.slots[0][at.WORD] = pack_word(EMPTY, NOBODY, 2**32 - 1)
    assert claim(view).generation == 0
    assert generation_of(view.slots[0][at.WORD]) == 0


def test_time_is_counted_by_the_number_of_ready_slots() -> None:
    view = memory_view(2, 9)
    protocol.settle(view, 1000)
    ready(view, now=1010)  # 10 ns without
    ready(view, now=1030)  # 20 ns with one
    protocol.settle(view, 1070)  # 40 ns with both
    buckets = view.meta[at.OCCUPANCY : at.OCCUPANCY + at.OCCUPANCY_BUCKETS].tolist()
    assert buckets == [10, 0, 0, 0, 20, 0, 0, 0, 40]


def test_every_crash_point_in_the_code_is_listed_once() -> None:
    source = "".join(p.read_text() for p in Path(protocol.__file__).parent.glob("*.py"))
    in_code = set(re.findall(r'crash_point\("([a-z_.]+)"\)', source))
    listed = {name for names in crash.POINTS.values() for name in names}
    assert in_code == listed
