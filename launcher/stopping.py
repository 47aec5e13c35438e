"""`launch.py stop RUN`: SIGTERM to the launcher of a run, once, and waiting until it has let go."""

from __future__ import annotations

import os
import signal
import sys
import time

from .rundir import RunDir, find_run
from .screen import seconds

NOTHING = 3
"""Exit code where there is nothing to stop, as of `status`."""
POLL_S = 0.1


def stop_command(name: str) -> int:
    """0: it stopped; 1: it still runs; 3: there was nothing to stop."""
    run = find_run(name)
    if run is None:
        return _nothing(f"no run {name} here")
    holder = run.holder()
    if holder is None:
        return _nothing(f"run {run.name} is not running")
    if holder.state == "stopping":  # a second signal would end it before it has saved
        print(f"run {run.name} is stopping already (pid {holder.pid})", flush=True)
    else:
        print(f"asking run {run.name} (pid {holder.pid}) to save and stop", flush=True)
        os.kill(holder.pid, signal.SIGTERM)
    return _wait(run)


def _wait(run: RunDir) -> int:
    # Saving has stop_s, the target workers have a little more after it.
    patience_s = run.config().supervise.stop_s + 30
    deadline = time.monotonic() + patience_s
    while (holder := run.holder()) is not None:
        if time.monotonic() > deadline:
            print(
                f"run {run.name} still runs after {seconds(patience_s)}: kill -KILL {holder.pid} "
                f"ends it and its halves",
                file=sys.stderr,
            )
            return 1
        time.sleep(POLL_S)
    steps = run.config().train.steps
    print(f"run {run.name} stopped: step {run.last_step()} of {steps} is saved")
    return 0


def _nothing(text: str) -> int:
    print(text, file=sys.stderr)
    return NOTHING
