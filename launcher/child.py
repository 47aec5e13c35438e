"""What a half owes the launcher that started it: a name, a log format, READY, and an exit code.

    child.run("target", rank, lambda: run(args.run_dir, args.rank))      # the last line of main()

Inside: `child.ready()` once, when the half is able to work; `child.stop_requested()` between two
pieces of work (true after SIGTERM or SIGINT). Started by hand, without launch.py, all of it works
too: READY then only stands in the log.

A child needs no protection against outliving the launcher: process.py asks the kernel for that.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from dflash.config import ConfigError
from shm_ring import RingError, Stopped

NOTIFY_FD = "DFLASH_RING_NOTIFY_FD"
"""Environment variable: the write end of the launcher's pipe, lines `READY text`, `WARNING text`,
`ERROR text`."""
HOLD = "DFLASH_RING_HOLD"
"""Environment variable: whoever sets it wants the half stopped (SIGSTOP) at READY, before it has
touched a slot, and will continue it: `bench pipeline` measures the halves one by one."""
DONE, FAILED, USER_ERROR, STOPPED = 0, 1, 2, 3
PR_SET_NAME = 15

log = logging.getLogger("child")
_stop_signals: list[int] = []


def run(role: str, rank: int, main: Callable[[], int | None]) -> NoReturn:
    """Run a half's `main` and leave the process with its code; None is 0. The launcher shows what
    is logged as a warning, or worse, to the logger named `role`.

    A ConfigError ends in one line and code 2, a RingError in one line and code 1, a stop request
    that `main` did not handle (shm_ring.Stopped) in code 3, anything else in its traceback.
    """
    _start(f"{role}_{rank}")
    logging.getLogger(role).addHandler(_Tell(logging.WARNING))
    try:
        code = main() or DONE
    except Stopped:
        log.info("stopped on request")
        code = STOPPED
    except ConfigError as error:
        code = _one_line(error, USER_ERROR)
    except RingError as error:
        code = _one_line(error, FAILED)
    sys.exit(code)


def ready(text: str = "") -> None:
    """Tell the launcher that this half can work. `text`: one line to show beside its name."""
    log.info("READY %s", text)
    _notify(f"READY {text}")
    if HOLD in os.environ:
        os.kill(os.getpid(), signal.SIGSTOP)


def stop_requested() -> bool:
    """Whether this half was asked to save and stop."""
    return bool(_stop_signals)


def fail(error: Exception) -> NoReturn:
    """End this half with one line and code 1: a failure that needs no traceback."""
    sys.exit(_one_line(error, FAILED))


def check_stop() -> None:
    """`stop_requested` for work that can only be given up. Raises Stopped."""
    if stop_requested():
        raise Stopped


class _Tell(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _notify(f"WARNING {' '.join(record.getMessage().split())}")


def _start(name: str) -> None:
    logging.basicConfig(
        format=f"%(asctime)s %(levelname)s {name} %(name)s: %(message)s",
        level=logging.INFO,
        stream=sys.stderr,
        force=True,
    )
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, _on_stop)
    # The name that ps, top and py-spy show.
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def _on_stop(signum: int, frame: FrameType | None) -> None:
    _stop_signals.append(signum)


def _one_line(error: Exception, code: int) -> int:
    text = str(error) or type(error).__name__
    for line in text.splitlines():
        log.error("%s", line)
        _notify(f"ERROR {line}")
    return code


def _notify(line: str) -> None:
    fd = os.environ.get(NOTIFY_FD)
    if fd is not None:
        os.write(int(fd), f"{line}\n".encode())
