"""What a measurement stands beside: the chip's clock and power, and neighbours that keep the host
busy."""

from __future__ import annotations

import functools
import operator
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from dflash.step import SWITCH_INTERVAL_S


class Chip(NamedTuple):
    """Of one GPU, at one moment."""

    sm_mhz: float
    watt: float
    held_by: int
    """Why the clock isn't higher, NVML's bits: 0x4 is the power limit, 0x60 the temperature."""


def read_chip() -> Chip:
    """Of the first visible GPU, by nvidia-smi: torch asks through a package that we don't need."""
    which = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = "--query-gpu=clocks.sm,power.draw,clocks_event_reasons.active"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits", "-i", which]
    return chip_of(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def chip_of(answer: str) -> Chip:
    sm_mhz, watt, held_by = answer.split(",")
    return Chip(float(sm_mhz), float(watt), int(held_by, 16))


def chip_figures(chips: list[Chip]) -> dict[str, float | str | None]:
    """Of several moments, for a result."""
    if not chips:
        return {"sm_mhz": None, "watt": None, "held_by": None}
    return {
        "sm_mhz": statistics.median(chip.sm_mhz for chip in chips),
        "watt": statistics.median(chip.watt for chip in chips),
        "held_by": hex(functools.reduce(operator.or_, (chip.held_by for chip in chips))),
    }


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
    "thread": functools.partial(busy_thread, SWITCH_INTERVAL_S),  # as the trainer has it
    "thread-5ms": functools.partial(busy_thread, 5e-3),  # Python's default
    "cores": busy_cores,
}
