"""`launch.py status`: what runs, what flows, who waits. Read-only, from any terminal.

Two pictures of the ring a short time apart give the rates; metrics.jsonl gives the step. The exit
code: 0 ok, 1 degraded (somebody is silent or dead), 2 broken (poisoned, damaged, or all dead),
3 nothing there.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.config import ConfigError, RingConfig
from shm_ring import PartyView, RingError, RingMissing, RingSnapshot, rates, snapshot

from .rings import LIVING
from .rundir import Holder, RunDir, find_run, live_runs
from .screen import seconds, who_waits

OK, DEGRADED, BROKEN, NOTHING = range(4)
LEVELS = ("ok", "degraded", "broken", "nothing")
DEFAULT_RING: Path = RingConfig.model_fields["path"].default
WINDOW_S = 1.0
"""Between the two pictures of a single look."""
WATCH_S = 2.0
WATCH_WINDOW = 5
"""Pictures back that a watched rate goes over."""


@dataclass(frozen=True)
class Flow:
    """Of one side. `now`: over the window; `mean`: since its parties joined."""

    slots_per_s: float
    tok_per_s: float
    gb_per_s: float
    waiting: float
    mean_tok_per_s: float


@dataclass(frozen=True)
class Status:
    ring: RingSnapshot
    target: Flow
    trainer: Flow
    parties: tuple[PartyView, ...]
    """The newest of each name: a ring that was taken over also remembers the dead ones."""
    run: RunDir | None
    holder: Holder | None
    metrics: dict[str, Any] | None
    level: int
    problems: tuple[str, ...]

    @property
    def waits(self) -> str:
        if self.ring.closed:
            return "the run is over"
        if not any(party.status in LIVING for party in self.parties):
            return "nobody is there"
        made_all = self.ring.head >= self.ring.end_seq
        return who_waits(self.trainer.waiting, self.target.waiting, made_all)

    def to_json(self) -> dict[str, Any]:
        return {
            "state": LEVELS[self.level],
            "problems": list(self.problems),
            "waits": self.waits,
            "target": dataclasses.asdict(self.target),
            "trainer": dataclasses.asdict(self.trainer),
            "run": None if self.run is None else str(self.run.path),
            "launcher_pid": None if self.holder is None else self.holder.pid,
            "metrics": self.metrics,
            "ring": self.ring.to_json(),
        }


@dataclass(frozen=True)
class Place:
    """What `status` was asked about: a ring, and the run it belongs to where that is known."""

    ring: Path
    run: RunDir | None


class NothingThere(Exception):
    """The text says what is not there; `starting`: but will be."""

    def __init__(self, text: str, starting: bool = False) -> None:
        super().__init__(text)
        self.starting = starting


def status_command(what: str | None, *, as_json: bool, watch: bool) -> int:
    from .status_text import status_text

    try:
        place = find_place(what)
        if watch:
            return _watch(place, as_json)
        status = look(place, WINDOW_S)
    except NothingThere as nothing:
        if as_json:
            print(json.dumps({"state": LEVELS[NOTHING], "problems": [str(nothing)]}))
        else:
            print(nothing, file=sys.stdout if nothing.starting else sys.stderr)
        return OK if nothing.starting else NOTHING
    except RingError as error:
        if as_json:
            print(json.dumps({"state": LEVELS[BROKEN], "problems": [str(error)]}))
        else:
            print(error, file=sys.stderr)
        return BROKEN
    print(json.dumps(status.to_json()) if as_json else status_text(status))
    return status.level


def find_place(what: str | None) -> Place:
    """The ring of a run (by name or directory), a ring by its path, or whatever runs here."""
    if what is None:
        return _default_place()
    run = find_run(what)
    if run is not None:
        return Place(run.config().ring.path, run)
    if (Path(what) / "meta.bin").exists():
        return Place(Path(what), None)
    raise NothingThere(f"no run and no ring {what}")


def _default_place() -> Place:
    runs = live_runs()
    if len(runs) > 1:
        names = ", ".join(run.name for run in runs)
        raise ConfigError(f"several runs are alive here ({names}): name one")
    if runs:
        return Place(runs[0].config().ring.path, runs[0])
    if (DEFAULT_RING / "meta.bin").exists():
        return Place(DEFAULT_RING, None)
    raise NothingThere(f"nothing runs here: no live run in runs/, no ring at {DEFAULT_RING}")


def ring_path(what: str | None) -> Path:
    """For `ring destroy` and `ring dump`: also a damaged ring has a path. Raises RingMissing."""
    if what is not None and find_run(what) is None and Path(what).is_dir():
        return Path(what)
    try:
        return find_place(what).ring
    except NothingThere as nothing:
        raise RingMissing(str(nothing)) from None


def look(place: Place, window_s: float) -> Status:
    """Two pictures, `window_s` apart. Raises NothingThere; RingError where a ring is damaged."""
    before = _picture(place)
    time.sleep(window_s)
    return _status(place, before, _picture(place))


def _picture(place: Place) -> RingSnapshot:
    run = place.run
    try:
        view = snapshot(place.ring)
    except RingMissing as error:
        if run is None:
            raise NothingThere(str(error)) from None
        view = None
    if view is not None and (run is None or view.run_name == run.name):
        return view
    assert run is not None
    holder = run.holder()
    if holder is not None:
        raise NothingThere(
            f"run {run.name} is {holder.state} (pid {holder.pid}), no ring yet", True
        )
    saved = f"step {run.last_step()} of {run.config().train.steps} is saved"
    if damage := run.damage():
        saved += f", but {damage}: `run` again goes on from the newest sound checkpoint"
    raise NothingThere(f"run {run.name} is not running: {saved}")


def _status(place: Place, before: RingSnapshot, after: RingSnapshot) -> Status:
    parties = _newest_of_each_name(after.parties)
    holder = None if place.run is None else place.run.holder()
    stopping = holder is not None and holder.state == "stopping"
    level, problems = judge(after, parties, ending=after.closed or stopping)
    sides = rates(before, after)
    flows = {}
    for role, side in sides.items():
        mine = [party for party in parties if party.role == role]
        mean = sum(party.tokens / max(party.since_s, 1e-9) for party in mine)
        waiting = _share_waited(before, after, mine)
        flows[role] = Flow(side.slots_per_s, side.tok_per_s, side.gb_per_s, waiting, mean)
    return Status(
        ring=after,
        target=flows["writer"],
        trainer=flows["reader"],
        parties=parties,
        run=place.run,
        holder=holder,
        metrics=None if place.run is None else place.run.last_metrics(),
        level=level,
        problems=problems,
    )


def _share_waited(before: RingSnapshot, after: RingSnapshot, mine: list[PartyView]) -> float:
    """Of the time between two pictures, the mean over the parties; a wait that goes on counts."""
    earlier = {(party.id, party.pid): _waited_s(party) for party in before.parties}
    spans = [
        _waited_s(party) - earlier[party.id, party.pid]
        for party in mine
        if (party.id, party.pid) in earlier
    ]
    share = sum(spans) / max(1, len(spans)) / (after.time_s - before.time_s)
    return min(max(share, 0.0), 1.0)


def _waited_s(party: PartyView) -> float:
    """waited_s grows when a party wakes, at most 0.25 s apart, and it beats whenever it wakes."""
    return party.waited_s + (party.heartbeat_age_s if party.waits_for else 0.0)


def _newest_of_each_name(parties: list[PartyView]) -> tuple[PartyView, ...]:
    newest: dict[str, PartyView] = {}
    for party in sorted(parties, key=lambda p: -p.since_s):
        newest[party.name] = party
    return tuple(newest[name] for name in sorted(newest))


def judge(
    ring: RingSnapshot, parties: tuple[PartyView, ...], ending: bool
) -> tuple[int, tuple[str, ...]]:
    """(level, what is wrong in words). A counter of past anomalies alone is no trouble now.

    `ending`: the run is over or was asked to stop, so its processes may go.
    """
    living = [party for party in parties if party.status in LIVING]
    broken = [
        f"slot {slot.seq} is poisoned: it failed {slot.failures} times, at last: "
        f"{slot.last_failure}"
        for slot in ring.slots
        if slot.state == "POISON"
    ]
    broken += [f"slot_{s.index:04d} is {s.state}" for s in ring.slots if "garbage" in s.state]
    if not ring.owner_alive and not living:
        broken.append("all its processes are dead: `run` again resumes, `ring destroy` removes it")
    degraded = [_trouble(party) for party in living if _trouble(party)]
    if living and not ending:
        degraded += [f"{p.name} (pid {p.pid}) is {p.status}" for p in parties if p not in living]
    if not ring.owner_alive and living:
        degraded.append("its launcher is dead, and its processes are about to be")
    if waiting := [slot.index for slot in ring.slots if slot.state == "QUARANTINE"]:
        degraded.append(f"{len(waiting)} slot(s) of a dead party in quarantine")
    level = BROKEN if broken else DEGRADED if degraded else OK
    return level, (*broken, *degraded)


def _trouble(party: PartyView) -> str:
    """In words, where a living party does not do its work."""
    age = seconds(party.heartbeat_age_s)
    if is_stopped(party.pid):
        return f"{party.name} is stopped, silent for {age}: kill -CONT {party.pid} lets it go on"
    if party.status == "suspect":
        return f"{party.name} (pid {party.pid}) shows no sign of life since {age}"
    return ""


def is_stopped(pid: int) -> bool:
    """By a signal (SIGSTOP, Ctrl-Z), as the kernel sees it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == "T"


def _watch(place: Place, as_json: bool) -> int:
    """Looks until the ring is gone: a live screen on a terminal, a line a look in a pipe."""
    from .status_text import brief_line

    level = OK
    if as_json or not sys.stdout.isatty():
        for status in _looks(place):
            level = status.level
            text = json.dumps(status.to_json()) if as_json else brief_line(status)
            print(text, flush=True)
    else:
        level = _watch_on_terminal(place)
    if not as_json:
        print("the ring is gone: the run has ended")
    return level


def _watch_on_terminal(place: Place) -> int:
    from rich.live import Live
    from rich.text import Text

    from .status_text import status_text

    level = OK
    with Live(Text(), auto_refresh=False, screen=True) as live:
        for status in _looks(place):
            level = status.level
            live.update(Text(status_text(status)), refresh=True)
    return level


def _looks(place: Place) -> Iterator[Status]:
    """A status every WATCH_S, its rates over the last few pictures. Ends with the ring."""
    pictures = deque([_picture(place)], maxlen=WATCH_WINDOW)
    time.sleep(WINDOW_S)
    while True:
        try:
            pictures.append(_picture(place))
        except NothingThere:
            return
        if pictures[0].ring_id != pictures[-1].ring_id:
            pictures = deque([pictures[-1]], maxlen=WATCH_WINDOW)  # a new ring at the same path
        else:
            yield _status(place, pictures[0], pictures[-1])
        time.sleep(WATCH_S)
