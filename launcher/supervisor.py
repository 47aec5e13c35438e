"""Both halves from their start to their end: one loop that looks, and one way to wind down.

    code = Supervisor(trainer, targets, ring, config, screen, signals).run()

Every 0.1 s: what the halves said, whether one ended, whether the user wants to stop, and (once a
second) what the ring shows. No threads. Whatever happens, no child is alive when `run` returns.
The exit code is `launch.py run`'s: 0 done, 1 a half failed, 2 the user's mistake, 128 + signal
after a stop with a saved checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.config import Config
from shm_ring import PartyView, RingError, RingSnapshot, snapshot

from . import child as codes
from .process import Child, Program, StopSignals
from .screen import Screen, metrics_line, seconds

POLL_S = 0.1
LOOK_S = 1.0
"""Between two looks into the ring."""
TARGET_STOP_S = 10.0
"""A target worker has nothing to save: this long for the slot in its hands, then SIGKILL."""
LAST_LINES = 15


@dataclass(frozen=True)
class Failure:
    name: str
    how: str
    """`exited with code 1`, `was killed by SIGKILL`, `was silent for 900 s`."""
    code: int
    """What launch.py exits with: 2 for the user's mistake, else 1."""


class Supervisor:
    def __init__(
        self,
        trainer: Program,
        targets: Sequence[Program],
        config: Config,
        metrics: MetricsTail,
        screen: Screen,
        signals: StopSignals,
        on_stopping: Callable[[], None] = lambda: None,
    ) -> None:
        self._programs = (*targets, trainer)
        self._config = config
        self._limits = config.supervise
        self._metrics = metrics
        self._screen = screen
        self._signals = signals
        self._on_stopping = on_stopping
        self._children: list[Child] = []
        self._suspects: set[str] = set()
        self._warned: set[str] = set()
        self._next_look = 0.0
        self._made_all = False

    def run(self) -> int:
        """Start the halves and stay until they have ended; returns the exit code."""
        self._deadline = time.monotonic() + self._limits.ready_s
        try:
            for program in self._programs:
                self._children.append(Child.start(program))
            self._trainer = self._children[-1]
            self._targets = self._children[:-1]
            return self._watch()
        finally:
            for child in self._children:
                child.close()
            self._screen.end_progress()

    def _watch(self) -> int:
        while True:
            self._hear()
            if self._signals.first is not None:
                return self._stop()
            if self._trainer.exit_code == codes.DONE:
                return self._finish()
            if self._trainer.exit_code == codes.STOPPED:
                saved = ", and saved" if self._trainer.ready is not None else ""
                self._screen.line(f"trainer_0 was asked to stop{saved}")
                self._end_targets()
                return 128 + signal.SIGTERM
            failure = self._exited() or self._late() or self._look()
            if failure is not None:
                return self._fail(failure)
            time.sleep(POLL_S)

    # --- looking ---

    def _hear(self) -> None:
        """READY of each half and each warning once (the target workers have the same ones), and
        each new line of metrics."""
        for child in self._children:
            was_ready = child.ready is not None
            child.listen()
            for text in child.warnings:
                if text not in self._warned:
                    self._screen.line(f"warning: {child.name}: {text}")
                    self._warned.add(text)
            child.warnings.clear()
            if child.ready is not None and not was_ready:
                self._screen.line(f"{child.name} ready (pid {child.pid}) {child.ready}".rstrip())
        if self._trainer.ready is not None:
            for row in self._metrics.new_rows():
                self._screen.line(metrics_line(row, self._made_all))
                self._screen.progress(row["step"], row["steps"])

    def _exited(self) -> Failure | None:
        """The first half that ended and should not have."""
        for child in self._children:
            if child.alive or (child.exit_code == codes.DONE and self._is_over()):
                continue
            child.listen()
            how = child.how_it_ended()
            if child.exit_code == codes.DONE:
                how += " before the run was over"
            code = codes.USER_ERROR if child.exit_code == codes.USER_ERROR else codes.FAILED
            return Failure(child.name, how, code)
        return None

    def _is_over(self) -> bool:
        """Whether the trainer has closed the run: then the target workers end by themselves."""
        with contextlib.suppress(RingError):  # removed: `_look` will say so
            return not self._trainer.alive or snapshot(self._config.ring.path).closed
        return True

    def _late(self) -> Failure | None:
        """A half that is not READY in time is killed."""
        late = [child for child in self._children if child.ready is None]
        if not late or time.monotonic() < self._deadline:
            return None
        late[0].kill()
        how = f"was not ready after {seconds(self._limits.ready_s)} (supervise.ready_s): killed"
        return Failure(late[0].name, how, codes.FAILED)

    def _look(self) -> Failure | None:
        """Once a second, into the ring: progress between two lines, and signs of life."""
        if time.monotonic() < self._next_look:
            return None
        self._next_look = time.monotonic() + LOOK_S
        try:
            view = snapshot(self._config.ring.path)
        except RingError as error:
            return Failure("ring", f"cannot be read any more: {error}", codes.FAILED)
        self._made_all = view.head >= view.end_seq
        if self._trainer.ready is not None:
            train = self._config.train
            step = min(view.tail * train.passes_per_slot, train.steps)
            self._screen.progress(step, train.steps)
        return self._silent(view)

    def _silent(self, view: RingSnapshot) -> Failure | None:
        """Name who shows no sign of life; kill who has not for supervise.stall_s."""
        for child in self._children:
            party = _party_of(view, child.pid)
            if party is None or not child.alive:
                continue
            age = party.heartbeat_age_s
            if age > self._limits.stall_s:
                child.kill()
                how = f"was silent for {seconds(age)} (supervise.stall_s): killed"
                return Failure(child.name, how, codes.FAILED)
            if party.status == "suspect" and child.name not in self._suspects:
                self._suspects.add(child.name)
                self._screen.line(
                    f"{child.name} (pid {child.pid}) shows no sign of life since {seconds(age)}; "
                    f"killed at {seconds(self._limits.stall_s)}"
                )
            elif party.status == "alive" and child.name in self._suspects:
                self._suspects.remove(child.name)
                self._screen.line(f"{child.name} is back")
        return None

    # --- ending ---

    def _finish(self) -> int:
        """The trainer is done: the target workers see `closed` and end."""
        self._hear()
        failed = [c for c in self._targets if not c.wait(self._limits.stop_s) or c.exit_code != 0]
        for child in failed:
            how = "did not end when the run was over" if child.alive else child.how_it_ended()
            self._screen.error(f"{child.name} {how} (the run itself is complete and saved)")
        return codes.FAILED if failed else codes.DONE

    def _stop(self) -> int:
        """The user wants to stop: save, then end. A second signal: end."""
        name = signal.Signals(self._signals.exit_code - 128).name
        saving = "saving and " if self._trainer.ready is not None else ""
        self._screen.line(f"{name}: {saving}stopping; once more to stop now")
        self._end_trainer()
        self._end_targets()
        if self._trainer.exit_code == codes.DONE:
            return codes.DONE
        # Before READY there is nothing new to save, and a plain end is as good.
        if self._trainer.exit_code == codes.STOPPED or self._trainer.ready is None:
            return self._signals.exit_code
        if self._signals.now:
            self._screen.error("stopped now, without saving")
        else:
            self._report(self._trainer, self._trainer.how_it_ended())
        return codes.FAILED

    def _fail(self, failure: Failure) -> int:
        """One half failed: say so, let the trainer save, end everything."""
        child = next((c for c in self._children if c.name == failure.name), None)
        if child is None:
            self._screen.error(f"{failure.name} {failure.how}")
        else:
            self._report(child, failure.how)
        if self._trainer.alive and self._trainer.ready is not None:
            self._screen.line("ending trainer_0, which saves first")
        self._end_trainer()
        self._end_targets()
        return failure.code

    def _report(self, child: Child, how: str) -> None:
        """The failing side, by name: a user's mistake in its own line, else the end of its log."""
        if child.exit_code == codes.USER_ERROR and child.errors:
            for line in child.errors:
                self._screen.error(f"{child.name}: {line}")
            return
        self._screen.error(f"{child.name} {how}; its log is {child.program.log}")
        for line in child.last_lines(LAST_LINES):
            self._screen.error(f"  | {line}")

    def _end_trainer(self) -> None:
        """SIGTERM, and time to save. Killed after supervise.stop_s, at the second signal, or at
        once before READY: then it compiles, which nothing interrupts, and has nothing to save."""
        self._on_stopping()
        self._hear()
        if self._trainer.ready is None:
            self._trainer.kill()
        self._trainer.signal(signal.SIGTERM)
        deadline = time.monotonic() + self._limits.stop_s
        while self._trainer.alive and not self._signals.now:
            if time.monotonic() > deadline:
                self._screen.error(
                    f"trainer_0 did not save within {seconds(self._limits.stop_s)} "
                    f"(supervise.stop_s): killed"
                )
                break
            self._hear()
            time.sleep(POLL_S)
        self._trainer.kill()
        self._hear()

    def _end_targets(self) -> None:
        for child in self._targets:
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + TARGET_STOP_S
        while any(c.alive for c in self._targets) and time.monotonic() < deadline:
            if self._signals.now:
                break
            time.sleep(POLL_S)
        for child in self._targets:
            child.kill()


class MetricsTail:
    """The new lines of metrics.jsonl: those beyond the step that the run resumes from.

    The trainer cuts the file back to its checkpoint before READY and appends after it, so the file
    is read from its start once, and from where we were from then on.
    """

    def __init__(self, path: Path, after_step: int) -> None:
        self._path = path
        self._after_step = after_step
        self._offset = 0

    def new_rows(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        rows = [json.loads(line) for line in whole.splitlines() if line]
        return [row for row in rows if row["step"] > self._after_step]


def _party_of(view: RingSnapshot, pid: int) -> PartyView | None:
    return next((party for party in view.parties if party.pid == pid), None)
