"""The pure core against a dict: random transitions, deaths at every store, rewinds, time.

The oracle knows seqs, not slots: {seq: (state, owner)} of this epoch, what old epochs still hold,
failures, acknowledgements. A death inside a transition must leave what the oracle says before it or
after it, once the next holder of CTRL has settled.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rings import memory_view

from shm_ring import StaleLease, crash, protocol
from shm_ring import layout as at
from shm_ring.state import (
    FREE,
    NOBODY,
    OWNED,
    STATE_NAMES,
    Token,
    View,
    is_over,
    owner_of,
    state_of,
)

QUARANTINE_NS = 50
WRITERS, READERS = (0, 1, 2), (10, 11)


class Death(Exception):
    pass


class Oracle:
    """What should be true, in the words of the design."""

    def __init__(self, slots: int, end: int) -> None:
        self.slots, self.end = slots, end
        self.epoch, self.base, self.head, self.closed = 1, 0, 0, False
        self.seqs: dict[int, tuple[str, int]] = {}
        self.old: Counter[tuple[str, int]] = Counter()
        self.failures: Counter[int] = Counter()
        self.acked: set[int] = set()
        self.deadline: dict[int | str, int] = {}

    @property
    def free(self) -> int:
        return self.slots - len(self.seqs) - self.old.total()

    @property
    def tail(self) -> int:
        return min(self.seqs, default=self.head)

    def next_claim(self) -> int | None:
        redo = [seq for seq, (state, _) in self.seqs.items() if state == "REDO"]
        if redo:
            return min(redo)
        return self.head if self.head < self.end and self.free else None

    def claim(self, party: int) -> None:
        seq = self.next_claim()
        assert seq is not None
        self.head = max(self.head, seq + 1)
        self.seqs[seq] = ("WRITING", party)

    def let_go(self, token: Token, state: str, *, fails: bool = False) -> None:
        """The owner of a slot ends its lease."""
        held = "READING" if token.party in READERS else "WRITING"
        if token.epoch != self.epoch:
            self.old[held, token.party] -= 1
        elif fails:
            self.fail(token.seq, state)
        elif state == "CONSUMED":
            del self.seqs[token.seq]
            self.acked.add(token.seq)
        else:
            self.seqs[token.seq] = (state, NOBODY)

    def fail(self, seq: int, otherwise: str) -> None:
        self.failures[seq] += 1
        self.seqs[seq] = ("POISON" if self.failures[seq] >= 3 else otherwise, NOBODY)

    def rewind(self, base: int) -> None:
        for state, owner in self.seqs.values():
            if state in ("WRITING", "READING", "QUARANTINE"):
                self.old[state, owner] += 1
        self.epoch, self.base, self.head, self.closed = self.epoch + 1, base, base, False
        self.seqs, self.acked = {}, set()
        self.failures.clear()

    def reap(self, dead: set[int], quarantine_over: bool) -> None:
        for seq, (state, owner) in list(self.seqs.items()):
            if state == "WRITING" and owner in dead:
                self.seqs[seq] = ("QUARANTINE", owner)
            elif state == "QUARANTINE" and quarantine_over:
                self.fail(seq, "REDO")
            elif state == "READING" and owner in dead:
                self.fail(seq, "READY")
        for (state, owner), number in list(self.old.items()):
            if state == "WRITING" and owner in dead:
                self.old["QUARANTINE", owner] += number
                del self.old[state, owner]
            elif (state == "QUARANTINE" and quarantine_over) or (
                state == "READING" and owner in dead
            ):
                del self.old[state, owner]

    def picture(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "head": self.head,
            "tail": self.tail,
            "closed": self.closed,
            "seqs": self.seqs,
            "old": {key: number for key, number in self.old.items() if number},
        }


def picture(view: View) -> dict[str, Any]:
    """The same, of the real words."""
    meta, seqs, old = view.meta, {}, Counter[tuple[str, int]]()
    for words in view.slots:
        state, owner = state_of(words[at.WORD]), owner_of(words[at.WORD])
        if words[at.SLOT_EPOCH] == meta[at.EPOCH] and state not in FREE:
            assert words[at.SEQ] not in seqs
            seqs[words[at.SEQ]] = (STATE_NAMES[state], owner)
        elif state not in FREE:
            old[STATE_NAMES[state], owner] += 1
    return {
        "epoch": meta[at.EPOCH],
        "head": meta[at.HEAD],
        "tail": meta[at.TAIL],
        "closed": bool(meta[at.CLOSED]),
        "seqs": seqs,
        "old": dict(old),
    }


class RingMachine(RuleBasedStateMachine):
    @initialize(slots=st.integers(1, 5), end=st.integers(1, 12))
    def start(self, slots: int, end: int) -> None:
        crash.action = None
        self.view = memory_view(slots, end, quarantine_ns=QUARANTINE_NS)
        self.oracle = Oracle(slots, end)
        self.now = 1
        self.dead: set[int] = set()
        self.tokens: list[Token] = []
        self.spent: list[Token] = []
        self.generations = [0] * slots
        self.reader_epoch: dict[int, int] = {}

    def teardown(self) -> None:
        crash.action = None

    # --- one transition, as its party would do it, perhaps dying at the n-th crash point ---

    def act(
        self,
        party: int,
        transition: Callable[[], Any],
        expected: Callable[[Oracle], None],
        dies_at: int,
    ) -> Any:
        """Runs it under "CTRL". Returns its result, or None when the party died inside."""
        self.settle()
        result, died = None, False
        with self.death_at(dies_at):
            try:
                result = transition()
            except Death:
                died = True
                self.bury(party)
        self.settle()
        there, before = picture(self.view), self.oracle
        self.oracle = copy.deepcopy(before)
        expected(self.oracle)
        if died and there == before.picture():
            self.oracle = before
        assert there == self.oracle.picture()
        return result

    @contextmanager
    def death_at(self, passage: int) -> Iterator[None]:
        """Inside, the n-th crash point raises Death; 0: none does."""
        passed = 0

        def pass_by(name: str) -> None:
            nonlocal passed
            passed += 1
            if passed == passage:
                raise Death

        crash.action = pass_by
        yield
        crash.action = None

    def settle(self) -> None:
        self.now += 1
        protocol.settle(self.view, self.now)

    def bury(self, party: int) -> None:
        self.dead.add(party)
        self.tokens = [token for token in self.tokens if token.party != party]

    def mine(self, party: int) -> list[Token]:
        return [token for token in self.tokens if token.party == party]

    @rule(party=st.sampled_from(WRITERS), dies_at=st.integers(0, 6))
    def claim(self, party: int, dies_at: int) -> None:
        seq = self.oracle.next_claim()
        if party in self.dead or seq is None:
            return
        token = self.act(
            party,
            lambda: protocol.claim(self.view, party, self.now),
            lambda oracle: oracle.claim(party),
            dies_at,
        )
        if token is not None:
            assert (token.seq, token.epoch) == (seq, self.oracle.epoch)
            self.tokens.append(token)

    @precondition(lambda self: self.oracle.next_claim() is None)
    @rule()
    def nothing_to_claim(self) -> None:
        self.settle()
        assert protocol.claim(self.view, WRITERS[0], self.now) is None

    @rule(
        data=st.data(),
        party=st.sampled_from(WRITERS + READERS),
        how=st.sampled_from(["first", "first", "second", "third"]),
        dies_at=st.integers(0, 4),
    )
    def let_go(self, data: st.DataObject, party: int, how: str, dies_at: int) -> None:
        if not self.mine(party):
            return
        token = data.draw(st.sampled_from(self.mine(party)))
        view, now = self.view, self.now
        moves: dict[str, tuple[Callable[[], bool], str, bool]]
        if party in WRITERS:
            publish = (lambda: protocol.publish(view, token, 3, None, now), "READY", False)
            abort = (lambda: protocol.abort(view, token, now), "REDO", True)
            moves = {"first": publish, "second": abort, "third": abort}
        else:
            moves = {
                "first": (lambda: protocol.done(view, token, now), "CONSUMED", False),
                "second": (lambda: protocol.give_back(view, token, now), "READY", False),
                "third": (lambda: protocol.reject(view, token, now), "REDO", True),
            }
        transition, state, fails = moves[how]
        self.tokens.remove(token)
        accepted = self.act(
            party, transition, lambda oracle: oracle.let_go(token, state, fails=fails), dies_at
        )
        if accepted is not None:  # else it died, perhaps before the token was spent
            self.spent.append(token)
            assert accepted == (token.epoch == self.oracle.epoch)

    @rule(party=st.sampled_from(READERS), offset=st.integers(-1, 3), dies_at=st.integers(0, 3))
    def take(self, party: int, offset: int, dies_at: int) -> None:
        seq = self.oracle.tail + offset
        if party in self.dead:
            return
        is_ready = self.oracle.seqs.get(seq) == ("READY", NOBODY)

        def expected(oracle: Oracle) -> None:
            if is_ready:
                oracle.seqs[seq] = ("READING", party)

        token = self.act(
            party,
            lambda: protocol.take(self.view, seq, party, self.now),
            expected,
            dies_at if is_ready else 0,
        )
        if token is not None:
            assert is_ready and token.seq == seq
            self.tokens.append(token)

    @rule(party=st.sampled_from(READERS), share=st.floats(0, 1), dies_at=st.integers(0, 12))
    def rewind(self, party: int, share: float, dies_at: int) -> None:
        if party in self.dead:
            return
        base = int(share * self.oracle.end)
        self.act(
            party,
            lambda: protocol.rewind(self.view, base, self.now),
            lambda oracle: oracle.rewind(base),
            dies_at,
        )

    @rule(party=st.sampled_from(READERS), dies_at=st.integers(0, 1))
    def close(self, party: int, dies_at: int) -> None:
        if party in self.dead:
            return
        self.act(
            party,
            lambda: protocol.close(self.view, self.oracle.epoch),
            lambda oracle: setattr(oracle, "closed", True),
            dies_at,
        )
        done = self.oracle.closed and self.oracle.tail == self.oracle.end
        assert is_over(self.view) == done

    @rule(party=st.sampled_from(WRITERS + READERS))
    def die(self, party: int) -> None:
        self.bury(party)

    @rule(party=st.sampled_from(WRITERS + READERS))
    def join_again(self, party: int) -> None:
        """A record is used again once no slot names it."""
        if party in self.dead and party not in [
            owner_of(words[at.WORD])
            for words in self.view.slots
            if state_of(words[at.WORD]) in OWNED
        ]:
            self.dead.remove(party)

    @rule(time_passes=st.booleans(), dies_at=st.integers(0, 4))
    def reap(self, time_passes: bool, dies_at: int) -> None:
        """A reaper that dies is replaced by another; together they do it once."""
        self.settle()
        if time_passes:
            self.now += 2 * QUARANTINE_NS
        over = [
            self.now >= words[at.DEADLINE_NS]
            for words in self.view.slots
            if STATE_NAMES[state_of(words[at.WORD])] == "QUARANTINE"
        ]
        if len(set(over)) == 2:
            return  # the oracle has one clock for all
        self.oracle.reap(self.dead, bool(over) and over[0])
        with self.death_at(dies_at), suppress(Death):
            protocol.reap(self.view, self.dead, self.now)
        protocol.settle(self.view, self.now)
        protocol.reap(self.view, self.dead, self.now)
        self.settle()
        assert picture(self.view) == self.oracle.picture()

    @rule(data=st.data())
    def use_a_spent_token(self, data: st.DataObject) -> None:
        if not self.spent:
            return
        token = data.draw(st.sampled_from(self.spent))
        before = [words.tobytes() for words in self.view.slots]
        for action in (protocol.done, protocol.give_back, protocol.reject, protocol.abort):
            with pytest.raises(StaleLease):
                action(self.view, token, self.now)
        with pytest.raises(StaleLease):
            protocol.publish(self.view, token, 3, None, self.now)
        assert [words.tobytes() for words in self.view.slots] == before

    @invariant()
    def generations_never_go_back(self) -> None:
        there = [words[at.WORD] >> 32 for words in self.view.slots]
        assert all(new >= old for new, old in zip(there, self.generations, strict=True))
        self.generations = there

    @invariant()
    def every_seq_is_acknowledged_or_somewhere(self) -> None:
        """No gap: what was claimed in this epoch is in a slot, or acknowledged."""
        oracle = self.oracle
        assert set(range(oracle.base, oracle.head)) == set(oracle.seqs) | oracle.acked
        assert not set(oracle.seqs) & oracle.acked

    @invariant()
    def a_live_owner_has_its_token(self) -> None:
        held = Counter((token.slot, token.party) for token in self.tokens)
        for slot, words in enumerate(self.view.slots):
            state, owner = state_of(words[at.WORD]), owner_of(words[at.WORD])
            if state in OWNED and owner not in self.dead:
                assert held[slot, owner] == 1


TestRingMachine = RingMachine.TestCase
TestRingMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
