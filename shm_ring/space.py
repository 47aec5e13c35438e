"""How much fits: free bytes of the file system and of the cgroup that its pages are charged to."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from .errors import NoSpace, RingError
from .layout import Field, ring_bytes, slot_bytes

CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_UNLIMITED = 2**62
_SPARE_FILES = 64


def free_bytes(path: Path | str) -> tuple[int, int | None]:
    """(free bytes of the file system of `path`, headroom of the cgroup or None: no limit)."""
    directory = Path(path)
    while not directory.is_dir():
        directory = directory.parent
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize, cgroup_headroom()


def cgroup_headroom() -> int | None:
    """The least limit - usage from this process's cgroup up to the root; page cache is free."""
    found = [
        limit - used
        for directory, names in _memory_cgroups()
        for limit, used in [_limit_and_use(directory, *names)]
        if limit < _UNLIMITED
    ]
    return max(0, min(found)) if found else None


_V2 = ("memory.max", "memory.current", "inactive_file", "active_file")
_V1 = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
    "total_active_file",
)


def _memory_cgroups() -> list[tuple[Path, tuple[str, str, str, str]]]:
    """Directories from the process's own cgroup to the root. A container may see only the root."""
    found = []
    for line in OWN_CGROUP.read_text().splitlines():
        _, controllers, inside = line.split(":", 2)
        if controllers == "":
            root, names = CGROUPS, _V2
        elif "memory" in controllers.split(","):
            root, names = CGROUPS / "memory", _V1
        else:
            continue
        own = root / inside.lstrip("/")
        found += [(d, names) for d in (own, *own.parents) if d.is_relative_to(root)]
    return [(directory, names) for directory, names in found if (directory / names[0]).is_file()]


def _limit_and_use(directory: Path, limit_name: str, use_name: str, *cache: str) -> tuple[int, int]:
    text = (directory / limit_name).read_text().strip()
    limit = _UNLIMITED if text == "max" else int(text)
    stat = dict(
        line.split() for line in (directory / "memory.stat").read_text().splitlines() if line
    )
    used = int((directory / use_name).read_text())
    return limit, used - sum(int(stat.get(name, 0)) for name in cache)


def require_space(path: Path, fields: tuple[Field, ...], slots: int) -> None:
    """Raises NoSpace that names the number of slots that would fit, and the option to enlarge."""
    need = ring_bytes(fields, slots)
    free, headroom = free_bytes(path)
    fixed = ring_bytes(fields, 0)
    for have, where, cure in (
        (free, f"the file system of {path} has", "enlarge it (docker: --shm-size)"),
        (headroom, "the memory limit of this container leaves", "raise it (docker: --memory)"),
    ):
        if have is not None and need > have:
            fitting = max(0, (have - fixed) // slot_bytes(fields))
            raise NoSpace(
                f"{slots} slots need {_gib(need)}, {where} {_gib(have)}: "
                f"ring.slots={fitting} would fit, or {cure} to {_gib(need)} more free"
            )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.1f} MiB"


def require_files(count: int) -> None:
    """Raises the soft limit of open files for `count` more; RingError: the hard one is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = len(os.listdir("/proc/self/fd")) + count + _SPARE_FILES  # noqa: PTH208
    if soft == resource.RLIM_INFINITY or need <= soft:
        return
    if hard != resource.RLIM_INFINITY and need > hard:
        raise RingError(f"this ring needs {need} open files, the limit is {hard}: raise ulimit -n")
    resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
