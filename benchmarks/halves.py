"""Both halves of a run as `launch.py run` starts them, for a bench that decides when each works.

The programs, their environment, the ring and the preflight are those of launcher/; only the
supervisor is missing, since here a half that is stopped is no failure.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace

import psutil

from launcher.child import HOLD, USER_ERROR
from launcher.process import Child, Program, StopSignals

LAST_LINES = 15
TARGET_STOP_S = 15.0
"""For the slot in its hands, as in launcher/supervisor.py; then SIGKILL."""


class BenchFailed(Exception):
    """The text is what the user sees; `code` is the exit code."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


class Halves:
    """Target workers that wait at READY until `release`, and the trainer."""

    def __init__(self, programs: Sequence[Program], signals: StopSignals) -> None:
        self._signals = signals
        self.children: list[Child] = []
        *targets, trainer = programs
        for program in targets:
            held = replace(program, env={**program.env, HOLD: "1"})
            self.children.append(Child.start(held))
        self.children.append(Child.start(trainer))
        self._expected = list(self.children)

    @property
    def targets(self) -> list[Child]:
        return self.children[:-1]

    @property
    def ready(self) -> bool:
        """All are READY, and the target workers stand still: one that has said READY, but has not
        stopped yet, would miss its release."""
        said = all(child.ready is not None for child in self.children)
        return said and all(stands_still(child.pid) for child in self.targets)

    def look(self) -> None:
        """Raises BenchFailed when a half has ended, or the user wants to stop."""
        if self._signals.first is not None:
            raise BenchFailed("stopped; nothing is measured", self._signals.exit_code)
        for child in self._expected:
            child.listen()
            if not child.alive:
                raise BenchFailed(_how(child), USER_ERROR if child.exit_code == USER_ERROR else 1)

    def release(self) -> None:
        for child in self.targets:
            os.kill(child.pid, signal.SIGCONT)

    def end_targets(self) -> None:
        """Lets them finish or give up what is in their hands. Returns when they are gone."""
        self._expected = self.children[-1:]
        deadline = time.monotonic() + TARGET_STOP_S
        for child in self.targets:
            child.signal(signal.SIGTERM)
        while any(child.alive for child in self.targets) and time.monotonic() < deadline:
            self.look()
            time.sleep(0.05)
        for child in self.targets:
            child.kill()

    def last_lines(self) -> str:
        """Of all their logs."""
        return "\n".join(f"{child.name}:\n{_log_end(child)}" for child in self.children)

    def close(self) -> None:
        """Ends what still lives; the trainer without a checkpoint."""
        for child in self.children:
            child.close()


def stands_still(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:  # gone: `look` says why
        return False


def _how(child: Child) -> str:
    if child.errors:
        return "\n".join(f"{child.name}: {line}" for line in child.errors)
    return f"{child.name} {child.how_it_ended()}; the end of its log:\n{_log_end(child)}"


def _log_end(child: Child) -> str:
    return "\n".join(f"  | {line}" for line in child.last_lines(LAST_LINES))
