"""Transitions of the pure core in short, for its tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shm_ring import crash, protocol
from shm_ring import layout as at
from shm_ring.state import (
    Token,
    View,
    counters,
    state_of,
)

P, Q, C = 3, 4, 7  # two producers and a consumer
QUARANTINE_NS = 50


class Death(Exception):
    """Raised at a crash point: the store before it has happened, the next has not."""


def die_at(name: str, transition: Callable[[], object]) -> None:
    def act(passed: str) -> None:
        if passed == name:
            raise Death

    crash.action = act
    try:
        with pytest.raises(Death):
            transition()
    finally:
        crash.action = None


def states(view: View) -> list[int]:
    return [state_of(words[at.WORD]) for words in view.slots]


def head_tail(view: View) -> tuple[int, int]:
    return view.meta[at.HEAD], view.meta[at.TAIL]


def claim(view: View, party: int = P, now: int = 1) -> Token:
    protocol.settle(view, now)
    token = protocol.claim(view, party, now)
    assert token is not None
    return token


def ready(view: View, now: int = 1) -> Token:
    token = claim(view, now=now)
    assert protocol.publish(view, token, 5, [1, 2], now)
    return token


def taken(view: View, seq: int, now: int = 1) -> Token:
    protocol.settle(view, now)
    token = protocol.take(view, seq, C, now)
    assert token is not None
    return token


def counts(view: View) -> dict[str, int]:
    return {name: values[0] for name, values in counters(view.meta).items() if values[0]}


def fails_by_abort(view: View) -> None:
    protocol.abort(view, claim(view), 1)
