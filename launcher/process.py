"""Child processes: started in their own sessions, heard through a pipe, never outliving us.

    child = Child.start(Program("target_0", argv, env, log))
    child.listen()       # READY and ERROR lines that it sent (child.py writes them)
    child.signal(SIGTERM)

Only groups that were started here are ever signalled.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from .child import NOTIFY_FD

PR_SET_PDEATHSIG = 1
TAIL_BYTES = 64 << 10
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
HINTS = {
    signal.SIGKILL: "the kernel's out-of-memory killer, or someone's kill -9",
    signal.SIGBUS: "a mapped file shrank or /dev/shm ran full",
}


@dataclass(frozen=True)
class Program:
    """What to start, and where its output goes."""

    name: str
    argv: tuple[str, ...]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to our own environment."""


def python(*args: str | Path) -> tuple[str, ...]:
    """A command line of the interpreter that runs us."""
    return (sys.executable, *map(str, args))


def thread_env(threads: int) -> dict[str, str]:
    """The halves share cores, so a thread that waits sleeps: left to itself OpenMP spins, which
    halved the speed of a two-thread process beside a busy neighbour (two cores, measured)."""
    return {**dict.fromkeys(THREAD_VARIABLES, str(threads)), "OMP_WAIT_POLICY": "passive"}


class Child:
    """A running Program. `ready`, `warnings` and `errors` fill as `listen` hears them."""

    def __init__(self, program: Program, process: subprocess.Popen[bytes], pipe: int) -> None:
        self.program = program
        self.name = program.name
        self.ready: str | None = None
        """What it said with READY; None before."""
        self.warnings: list[str] = []
        self.errors: list[str] = []
        self._process = process
        self._pipe = pipe
        self._heard = b""

    @classmethod
    def start(cls, program: Program) -> Child:
        """Fork and exec, in a session of its own: the terminal's Ctrl-C reaches only us."""
        ours, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        program.log.parent.mkdir(parents=True, exist_ok=True)
        with program.log.open("ab") as log:
            process = subprocess.Popen(
                program.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **program.env, NOTIFY_FD: str(theirs)},
                pass_fds=(theirs,),
                start_new_session=True,
                # Safe here: the launcher has no threads when it starts children.
                preexec_fn=_die_with(os.getpid()),
            )
        os.close(theirs)
        return cls(program, process, ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it lives; negative: the signal that killed it."""
        if self._process.returncode is None:
            peek = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if os.waitid(os.P_PID, self.pid, peek) is not None:
                # What it started goes with it. Its pid can't be another's before poll() reaps it.
                os.killpg(self.pid, signal.SIGKILL)
        return self._process.poll()

    @property
    def alive(self) -> bool:
        return self.exit_code is None

    def listen(self) -> None:
        """Read what the child sent since the last call. Never blocks."""
        try:
            self._heard += os.read(self._pipe, 65536)
        except BlockingIOError:
            return
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            kind, _, text = line.decode(errors="replace").partition(" ")
            if kind == "READY":
                self.ready = text
            elif kind == "WARNING":
                self.warnings.append(text)
            elif kind == "ERROR":
                self.errors.append(text)

    def signal(self, signum: int) -> None:
        """To the child's whole group. A stopped child is continued, so that it can hear us."""
        if self.alive:
            os.killpg(self.pid, signum)
            os.killpg(self.pid, signal.SIGCONT)

    def wait(self, seconds: float) -> bool:
        """Whether it ended within that time."""
        deadline = time.monotonic() + seconds
        while self.alive and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self.alive

    def kill(self) -> None:
        """End it now, and whatever it started. Returns when it is gone."""
        self.signal(signal.SIGKILL)
        while self.alive:
            time.sleep(0.01)

    def close(self) -> None:
        self.kill()
        os.close(self._pipe)

    def last_lines(self, count: int) -> list[str]:
        """Of its log, as far as they lie in its last TAIL_BYTES."""
        with self.program.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()[-count:]

    def how_it_ended(self) -> str:
        code = self.exit_code
        assert code is not None, f"{self.name} still runs"
        if code >= 0:
            return f"exited with code {code}"
        name = signal.Signals(-code).name
        hint = HINTS.get(signal.Signals(-code))
        return f"was killed by {name}" + (f" ({hint})" if hint else "")


def _die_with(parent: int) -> Callable[[], None]:
    """To run between fork and exec: the kernel kills the child when the launcher dies."""
    libc = ctypes.CDLL(None)

    def ask() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)

    return ask


class StopSignals:
    """SIGINT, SIGTERM and SIGHUP as something to look at, while it is entered.

    The first asks for save and stop; a later one for stop now. Wrappers (torchrun, uv, a terminal's
    whole foreground group) send the same signal twice within moments: that counts once.
    """

    REPEAT_S = 0.7

    def __init__(self) -> None:
        self.first: int | None = None
        self.now = False
        self._first_time = 0.0
        self._old: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> StopSignals:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN:
                continue  # nohup
            self._old[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(self, *exc: object) -> None:
        for signum, handler in self._old.items():
            signal.signal(signum, handler)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.first is None:
            self.first, self._first_time = signum, time.monotonic()
        elif time.monotonic() - self._first_time > self.REPEAT_S:
            self.now = True

    @property
    def exit_code(self) -> int:
        """128 + the first signal, as shells say it."""
        assert self.first is not None
        return 128 + self.first
