"""`launch.py doctor`: this machine, its shared memory, GPUs and packages, and what dead runs left.

Each line is a fact, `!` marks trouble and says what to do. Exit code 1 with trouble. Whether CUDA
can page-lock the ring is not tried here: that needs torch and a GPU, and the halves say it.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dflash.config import RingConfig
from shm_ring import Leftover, RingError, free_bytes, leftovers, snapshot

from .gpus import list_gpus
from .rings import LIVING, disk_below
from .rundir import package_version
from .screen import size

REQUIRED = ("torch", "transformers", "numpy", "safetensors", "posix_ipc", "pydantic", "typer")
OPTIONAL = {
    "gguf": "converting .gguf targets",
    "flash-linear-attention": "fast hybrid (Gated DeltaNet) targets on GPU",
    "accelerate": "loading a target straight onto a GPU",
    "causal-conv1d": "hybrid targets that have no fast layers here, such as Qwen3-Next, on GPU",
}
SHM: Path = RingConfig.model_fields["path"].default.parent
SMALL_SHM = 1 << 30
"""Docker's default /dev/shm is 64 MiB; below this only toys fit."""


@dataclass(frozen=True)
class Finding:
    text: str
    trouble: bool = False

    def __str__(self) -> str:
        return f"{'!' if self.trouble else ' '} {self.text}"


def doctor_command(command: str) -> int:
    """`command`: how the user calls us, for the commands to type next."""
    found = [*_machine(), *_shared_memory(), *_gpus(), *_packages(), *_rings(command)]
    print("\n".join(map(str, found)))
    return int(any(finding.trouble for finding in found))


def _machine() -> Iterator[Finding]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Finding(
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}, "
        f"{os.cpu_count()} cores, {size(memory)} memory"
    )
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if locked == resource.RLIM_INFINITY else size(locked)
    yield Finding(f"limits: {files} open files, {limit} page-locked memory")


def _shared_memory() -> Iterator[Finding]:
    total = shutil.disk_usage(SHM).total
    free, headroom = free_bytes(SHM)
    rest = "" if headroom is None else f", the memory limit leaves {size(headroom)}"
    yield Finding(f"{SHM}: {size(free)} of {size(total)} free{rest}")
    if (kind := disk_below(SHM)) is not None:
        text = f"{SHM} is on {kind}, not in memory: mount -t tmpfs tmpfs {SHM}, or set ring.path"
        yield Finding(f"{text} to a directory on a tmpfs", True)
    if total < SMALL_SHM:
        yield Finding(f"{SHM} is small: docker run --shm-size=16g, or --ipc=host", True)


def _gpus() -> Iterator[Finding]:
    gpus = list_gpus()
    for gpu in gpus:
        used = f"{size(gpu.used_bytes)} of {size(gpu.total_bytes)} used"
        yield Finding(f"GPU {gpu.index}: {gpu.name}, {used}")
    if not gpus:
        yield Finding("no GPU (nvidia-smi shows none): set target.device and drafter.device to cpu")


def _packages() -> Iterator[Finding]:
    versions = {name: package_version(name) for name in REQUIRED}
    there = [f"{name} {version}" for name, version in versions.items() if version]
    yield Finding(f"packages: {', '.join(there)}")
    for name, version in versions.items():
        if version is None:
            yield Finding(f"{name} is missing: pip install {name}", True)
    for name, use in OPTIONAL.items():
        found = package_version(name)
        yield Finding(f"{name} {found or 'not installed'} ({use})")


def _rings(command: str) -> Iterator[Finding]:
    for path in sorted(SHM.glob("*/meta.bin")):
        if (line := _living(path.parent)) is not None:
            yield Finding(line)
    for leftover in leftovers(SHM):
        yield Finding(_remains(leftover, command), True)


def _living(path: Path) -> str | None:
    try:
        view = snapshot(path)
    except RingError:
        return None
    living = sum(party.status in LIVING for party in view.parties)
    if not living and not view.owner_alive:
        return None
    return f"ring {path}: run {view.run_name}, {living} processes alive"


def _remains(leftover: Leftover, command: str) -> str:
    cure = {
        "ring": f"{command} ring destroy {leftover.path}",
        "half": f"rm -r {leftover.path}",
        "semaphores": f"rm {leftover.path}",
    }[leftover.kind]
    whose = f" of run {leftover.run_name}" if leftover.run_name else ""
    return f"{leftover.path}: {size(leftover.bytes)} left by a dead process{whose}: {cure}"
