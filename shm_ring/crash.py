"""Named crash points: DFLASH_RING_CRASH=claim.word:3 kills the process at its third passage there.

A test drives every point of `POINTS` with real processes. A test of the pure core puts its own
function into `action` and raises from it: the store before the point has happened, the next has
not. Unset, a passage costs one comparison.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

VARIABLE = "DFLASH_RING_CRASH"

# role: the points that it passes. "any" is whoever holds CTRL.
POINTS: dict[str, tuple[str, ...]] = {
    "any": (
        "ctrl.locked",
        "derive.head",
        "derive.tail",
        "fail.count",
        "ctrl.unlocked",
        "wake.hint",
    ),
    "producer": (
        "claim.seq",
        "claim.word",
        "claim.head",
        "publish.seal",
        "publish.word",
        "abort.word",
        "release.word",
    ),
    "consumer": (
        "take.count",
        "take.word",
        "done.word",
        "give_back.word",
        "reject.word",
        "close.closed",
        "release.word",
    ),
    "reaper": ("reap.deadline", "reap.word", "reap.party"),
    "rewinder": (
        "rewind.base",
        "rewind.epoch",
        "finish.slot",
        "finish.head",
        "finish.tail",
        "finish.closed",
        "finish.settled",
    ),
    "joiner": ("join.lock", "join.record", "join.state", "leave.state"),
    "creator": ("create.dir", "create.file", "create.meta", "create.rename"),
    "remover": ("remove.rename", "remove.semaphores"),
    "starter": ("clear.rewound", "clear.end"),
}


def _planned() -> tuple[str, int] | None:
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    name, _, count = text.partition(":")
    if not any(name in names for names in POINTS.values()):
        raise ValueError(f"{VARIABLE}: {name!r} is no crash point")
    return name, int(count or 1)


_plan = _planned()
_passages = 0
action: Callable[[str], None] | None = None


def _kill(name: str) -> None:
    global _passages
    if _plan is None or _plan[0] != name:
        return
    _passages += 1
    if _passages == _plan[1]:
        os.kill(os.getpid(), signal.SIGKILL)


if _plan is not None:
    action = _kill


def crash_point(name: str) -> None:
    if action is not None:
        action(name)
