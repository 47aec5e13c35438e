"""What a measurement stands beside: the chip's clock and power, and neighbours that keep the host
busy."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple


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
def busy_thread() -> Iterator[None]:
    """Another thread of this process that never lets go of the interpreter by itself."""
    stop = False

    def spin() -> None:
        while not stop:
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        stop = True
        thread.join()


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
    "thread": busy_thread,
    "cores": busy_cores,
}
