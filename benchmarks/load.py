"""What a measurement stands beside: the chip's clock and power, and neighbours that keep the host
busy."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import NamedTuple

from dflash.step import SWITCH_INTERVAL_S


class Chip(NamedTuple):
    """Of one GPU, at one moment."""

    sm_mhz: float
    watt: float


def read_chip() -> Chip:
    """Of the first visible GPU, by nvidia-smi: torch asks through a package that we don't need."""
    which = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    answer = subprocess.run([*query, "-i", which], capture_output=True, text=True, check=True)
    sm_mhz, watt = answer.stdout.split(",")
    return Chip(float(sm_mhz), float(watt))


@contextmanager
def busy_thread(switch_interval_s: float) -> Iterator[None]:
    """Another thread of this process that never lets go of the interpreter by itself."""
    stop, before_s = False, sys.getswitchinterval()

    def spin() -> None:
        while not stop:
            pass

    thread = threading.Thread(target=spin)
    sys.setswitchinterval(switch_interval_s)
    thread.start()
    try:
        yield
    finally:
        stop = True
        thread.join()
        sys.setswitchinterval(before_s)


@contextmanager
def busy_cores() -> Iterator[None]:
    """As many busy processes as there are cores."""
    spin = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(spin) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


NEIGHBOURS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "thread": partial(busy_thread, SWITCH_INTERVAL_S),  # as the trainer has it
    "thread-5ms": partial(busy_thread, 5e-3),  # Python's default
    "cores": busy_cores,
}
