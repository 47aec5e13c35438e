"""Removing rings: one that is over, and what a creator left half-built when it died.

A ring goes out of sight by one rename, then its files go. Every half-built or half-removed
directory is called NAME.tmp.PID.RANDOM and flocked by its maker: a free lock means garbage.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from . import layout as at
from .crash import crash_point
from .errors import LayoutMismatch, RingBusy, RingError, RingMissing
from .layout import Header, parse_header
from .liveness import live_parties
from .locks import Control, LockFile
from .segment import check_place, map_file, open_lock
from .waiting import unlink_semaphores

_owned: dict[Path, LockFile] = {}
_TEMPORARY = re.compile(r"(.+)\.tmp\.\d+\.[0-9a-f]{8}")
_SEMAPHORE = re.compile(r"sem\.dflash_ring_([0-9a-f]{16})_\d+")


def own(path: Path, lock: LockFile) -> None:
    """Keeps a lock file, with the OWNER lock in it, until this process ends or removes the ring."""
    _owned[path] = lock


def owns(path: Path) -> bool:
    """Whether this process owns the ring that is at `path` now."""
    if path in _owned:
        try:
            check_place(path, _owned[path])
        except RingMissing:
            _owned.pop(path).close()
    return path in _owned


def owner_lock(path: Path) -> LockFile:
    """This process's lock file of the ring if it owns it, else a new one. Raises RingMissing."""
    return _owned[path] if owns(path) else open_lock(path)


def require_nobody(path: Path, lock: LockFile, header: Header, meta: memoryview) -> None:
    """Raises RingBusy that names the run whose owner or party is alive."""
    if lock.held_elsewhere(at.OWNER_LOCK):
        pid = meta[at.CREATOR] & 0xFFFFFFFF
        raise RingBusy(f"{path} belongs to run {header.run_name!r}, alive as process {pid}")
    for party in live_parties(meta, lock):
        raise RingBusy(
            f"{path} belongs to run {header.run_name!r}, whose {party.name} is alive "
            f"as process {party.pid}"
        )


def destroy(path: Path | str, force: bool = False) -> None:
    """Removes the ring and its semaphores. Raises RingBusy while its owner or a party lives.

    With `force` also then, and when meta.bin is unreadable; the living get RingMissing.
    """
    path = Path(path).absolute()
    if not path.is_dir():
        raise RingMissing(f"no ring at {path}")
    if not _is_ring_shaped(path):
        raise RingError(f"{path} holds files that no ring has: remove it by hand")
    header = _header(path)
    if force:
        aside, held = _rename_aside(path)
    elif header is None:
        raise LayoutMismatch(f"{path}/meta.bin is not readable by this version: destroy with force")
    else:
        lock = owner_lock(path)
        meta = at.words(memoryview(map_file(path / "meta.bin", at.META_BYTES, writable=True)))
        require_nobody(path, lock, header, meta)
        with Control(lock, meta):  # so that nobody joins meanwhile
            check_place(path, lock)
            require_nobody(path, lock, header, meta)
            aside, held = _rename_aside(path)
    _discard(aside)
    if path in _owned:
        _owned.pop(path).close()
    if held is not None:
        os.close(held)


def _header(path: Path) -> Header | None:
    """None where meta.bin is missing or says nothing that this version understands."""
    try:
        return parse_header((path / "meta.bin").read_bytes(), path)
    except (OSError, RingError):
        return None


def _is_ring_shaped(path: Path) -> bool:
    names = [entry.name for entry in path.iterdir()]
    return all(name == "meta.bin" or name.startswith("slot_") for name in names)


def temporary_name(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp.{os.getpid()}.{secrets.token_hex(4)}")


def _rename_aside(path: Path) -> tuple[Path, int | None]:
    held = lock_directory(path)
    aside = temporary_name(path)
    try:
        path.rename(aside)
    except OSError as error:
        raise RingError(f"{path} cannot be removed: {error.strerror}") from None
    crash_point("remove.rename")
    return aside, held


def _discard(directory: Path) -> None:
    """The semaphores first: meta.bin knows their names."""
    header = _header(directory)
    if header is not None:
        unlink_semaphores(header.ring_id)
    crash_point("remove.semaphores")
    shutil.rmtree(directory, ignore_errors=True)
    if directory.exists():
        raise RingError(f"{directory} cannot be removed: not ours, or on a read-only file system")


def lock_directory(path: Path) -> int | None:
    """A descriptor that holds the directory's flock; None when it is locked or just removed."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.stat().st_ino == os.fstat(fd).st_ino:
            return fd
    except OSError:
        pass  # locked by its maker or a sweeper, or removed by the latter
    os.close(fd)
    return None


def sweep(path: Path | str) -> list[Path]:
    """Removes what dead creators and removers of this ring left. Returns the directories."""
    path = Path(path).absolute()
    removed = []
    for directory in sorted(path.parent.glob(f"{path.name}.tmp.*")):
        held = lock_directory(directory) if _TEMPORARY.fullmatch(directory.name) else None
        if held is None:
            continue
        try:
            if _is_ring_shaped(directory):
                _discard(directory)
                removed.append(directory)
        finally:
            os.close(held)
    return removed


@dataclass(frozen=True)
class Leftover:
    """What a dead run left. `kind`: "ring", "half" (made or removed half-way) or "semaphores"."""

    path: Path
    """Of the ring, the half ring, or the semaphore's file."""
    kind: str
    run_name: str
    bytes: int


def leftovers(directory: Path | str = "/dev/shm") -> list[Leftover]:
    """Rings in this directory that nobody uses, half ones, and semaphores without a ring here."""
    directory = Path(directory)
    found, ring_ids = [], set()
    for path in sorted(p for p in directory.iterdir() if p.is_dir()):
        header = _header(path)
        if header is not None:
            ring_ids.add(header.ring_id)
        if _is_half(path):
            found.append(_leftover(path, "half", header))
        elif header is not None and not _TEMPORARY.fullmatch(path.name) and _is_dead(path, header):
            found.append(_leftover(path, "ring", header))
    for path in sorted(directory.glob("sem.dflash_ring_*")):
        match = _SEMAPHORE.fullmatch(path.name)
        if match and int(match[1], 16) not in ring_ids:
            found.append(Leftover(path, "semaphores", "", path.stat().st_blocks * 512))
    return found


def _leftover(path: Path, kind: str, header: Header | None) -> Leftover:
    size = sum(file.stat().st_blocks * 512 for file in path.rglob("*"))
    return Leftover(path, kind, header.run_name if header else "", size)


def _is_half(path: Path) -> bool:
    held = lock_directory(path) if _TEMPORARY.fullmatch(path.name) else None
    if held is None:
        return False
    os.close(held)
    return _is_ring_shaped(path)


def _is_dead(path: Path, header: Header) -> bool:
    try:
        lock = open_lock(path, writable=False)
        meta = at.words(memoryview(map_file(path / "meta.bin", at.META_BYTES, writable=False)))
        require_nobody(path, lock, header, meta)
    except RingError:
        return False
    return True
