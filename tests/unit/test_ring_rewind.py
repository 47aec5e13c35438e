"""Rewinds of the pure core, whole and interrupted, and damage under it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
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
from rings import memory_view

from shm_ring import RingError, crash, protocol
from shm_ring import layout as at
from shm_ring.state import (
    CONSUMED,
    EMPTY,
    POISON,
    QUARANTINE,
    READING,
    READY,
    REDO,
    WRITING,
    View,
    is_over,
    owner_of,
    poisoned,
)


def six_slots() -> View:
    """EMPTY is missing: CONSUMED 0, READY 1, READING 2, REDO 3, WRITING 4, QUARANTINE 5."""
    view = memory_view(6, 20)
    for _ in range(3):
        ready(view)
    protocol.done(view, taken(view, 0), 1)
    taken(view, 2)
    three, _, _ = claim(view), claim(view, P), claim(view, Q)
    protocol.abort(view, three, 1)
    protocol.reap(view, {Q}, 1)
    assert states(view) == [CONSUMED, READY, READING, REDO, WRITING, QUARANTINE]
    return view


AFTER_REWIND = [EMPTY, EMPTY, READING, EMPTY, WRITING, QUARANTINE]


def test_a_rewind_voids_what_nobody_holds() -> None:
    view = six_slots()
    view.meta[at.CLOSED] = 1
    assert protocol.rewind(view, 3, 2) == 2
    assert states(view) == AFTER_REWIND
    assert owner_of(view.slots[4][at.WORD]) == P
    assert head_tail(view) == (3, 3)
    assert (view.meta[at.CLOSED], view.meta[at.SETTLED], view.meta[at.BASE_SEQ]) == (0, 2, 3)
    assert counts(view)["voided"] == 1
    assert claim(view, P).seq == 3


def test_a_rewind_voids_poison() -> None:
    view = memory_view(1, 9)
    for _ in range(3):
        fails_by_abort(view)
    protocol.rewind(view, 0, 1)
    assert states(view) == [EMPTY]
    fails_by_abort(view)
    assert states(view) == [REDO]  # the count starts anew


@pytest.mark.parametrize("point", crash.POINTS["rewinder"])
def test_a_rewind_that_dies_anywhere_is_finished_or_has_not_begun(point: str) -> None:
    view = six_slots()
    view.meta[at.CLOSED] = 1
    before = states(view)
    die_at(point, lambda: protocol.rewind(view, 1, 2))
    protocol.settle(view, 3)
    assert view.meta[at.SETTLED] == view.meta[at.EPOCH]
    if point == "rewind.base":
        assert states(view) == before and view.meta[at.EPOCH] == 1
        assert head_tail(view) == (6, 1)
    else:
        assert states(view) == AFTER_REWIND and view.meta[at.EPOCH] == 2
        assert head_tail(view) == (1, 1) and view.meta[at.CLOSED] == 0


def test_old_leases_are_refused_and_release_their_slots() -> None:
    for action in ("publish", "abort", "done", "give_back", "reject"):
        view = memory_view(1, 9)
        if action in ("publish", "abort"):
            token = claim(view)
        else:
            ready(view)
            token = taken(view, 0)
        protocol.rewind(view, 0, 1)
        assert protocol.claim(view, Q, 1) is None  # still held
        if action == "publish":
            assert not protocol.publish(view, token, 5, None, 1)
        else:
            assert not getattr(protocol, action)(view, token, 1)
        assert states(view) == [EMPTY]
        assert counts(view)["refused_epoch"] == 1
        assert claim(view, Q).epoch == 2


def test_the_dead_of_an_old_epoch_leave_empty_slots() -> None:
    view = six_slots()
    protocol.rewind(view, 0, 2)
    protocol.reap(view, {P, Q, C}, 100)
    protocol.reap(view, {P, Q, C}, 100 + QUARANTINE_NS)
    assert states(view) == [EMPTY] * 6


def test_an_old_ready_slot_is_not_delivered_in_a_new_epoch() -> None:
    view = memory_view(2, 9)
    ready(view)
    die_at("rewind.epoch", lambda: protocol.rewind(view, 0, 1))
    assert protocol.take(view, 0, C, 1) is None


def test_the_run_is_over_when_closed_and_everything_is_acknowledged() -> None:
    view = memory_view(2, 2)
    ready(view), ready(view)
    protocol.done(view, taken(view, 0), 1)
    assert protocol.close(view, 1)
    assert not is_over(view)
    protocol.done(view, taken(view, 1), 1)
    assert is_over(view)
    assert not protocol.close(view, 7)  # another epoch


DAMAGE = st.one_of(
    st.tuples(
        st.sampled_from(range(6)),
        st.sampled_from([at.WORD, at.SEQ, at.SLOT_EPOCH, *range(8, 40)]),
        st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 0x4FF), st.just(2**64 - 1)),
    ),
    st.tuples(
        st.just(-1),
        st.sampled_from([*range(13), at.QUARANTINE_NS, *range(128, 512)]),
        st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 30)),
    ),
)


@given(st.lists(DAMAGE, min_size=1, max_size=4), st.integers(0, 2**63))
def test_garbage_gives_an_error_or_a_legal_state_never_more(
    damage: list[tuple[int, int, int]], now: int
) -> None:
    view = six_slots()
    for slot, word, value in damage:
        (view.meta if slot < 0 else view.slots[slot])[word] = value
    try:
        for _ in range(3):
            protocol.settle(view, now)
            protocol.reap(view, {P, C}, now)
            protocol.settle(view, now)
            protocol.take(view, 1, C, now)
            protocol.settle(view, now)
            protocol.claim(view, P, now)
            protocol.release_party(view, P, now)
            poisoned(view)
            protocol.settle(view, now)
            protocol.rewind(view, 0, now)
            protocol.settle(view, now)
    except RingError:
        return
    assert set(states(view)) <= {EMPTY, WRITING, QUARANTINE, REDO, READY, READING, CONSUMED, POISON}
    assert view.meta[at.TAIL] <= view.meta[at.HEAD] <= view.meta[at.END_SEQ]
