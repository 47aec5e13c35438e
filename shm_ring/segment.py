"""The files of a ring: create them, map them, take them over, remove them.

A ring is built in a temporary directory and appears by one rename, so nobody sees half of one and
exactly one creator wins. Whoever creates or takes over a ring keeps its OWNER lock until the
process ends: a second run finds it busy even before the first party has joined.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import shutil
import time
from pathlib import Path

from . import layout as at
from .crash import crash_point
from .errors import LayoutMismatch, NoSpace, RingBusy, RingError, RingMissing
from .layout import Field, Header, check_fields, check_same_table, parse_header
from .liveness import boot_id, live_parties, pid_namespace, start_ticks
from .locks import Control, LockFile
from .protocol import rewind, settle
from .space import require_files, require_space
from .state import EMPTY, NOBODY, View, pack_word
from .waiting import unlink_semaphores

SUSPECT_S, REAP_S, CTRL_S = 10.0, 0.25, 60.0

_owned: dict[Path, LockFile] = {}
"""OWNER locks of this process, held until it ends."""


def slot_path(path: Path, slot: int) -> Path:
    return path / f"slot_{slot:04d}"


def map_file(path: Path, size: int, *, writable: bool) -> mmap.mmap:
    """Shared, and absent from forked children. RingError when missing or of another size."""
    try:
        fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    except OSError as error:
        raise RingError(f"{path} cannot be opened: {error.strerror}") from None
    try:
        found = os.fstat(fd).st_size
        if found != size:
            raise RingError(f"{path} is damaged: {found} bytes, not {size}")
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        mapping = mmap.mmap(fd, size, access=access)
    except (OSError, ValueError) as error:
        raise RingError(f"{path} cannot be mapped: {error}") from None
    finally:
        os.close(fd)
    mapping.madvise(mmap.MADV_DONTFORK)
    return mapping


def open_lock(path: Path, *, writable: bool = True) -> LockFile:
    try:
        return LockFile(path / "meta.bin", writable=writable)
    except (FileNotFoundError, NotADirectoryError):
        raise RingMissing(f"no ring at {path}") from None
    except OSError as error:
        raise RingError(f"{path}/meta.bin cannot be opened: {error.strerror}") from None


class Segment:
    """An attached ring: `view` for the protocol, `data[slot][field]` for the payload."""

    def __init__(
        self, path: Path, *, fields: tuple[Field, ...] | None = None, writable_data: bool = False
    ) -> None:
        self.path = path
        self.lock = open_lock(path)
        meta = map_file(path / "meta.bin", at.META_BYTES, writable=True)
        self.header = read_header(meta, path)
        if fields is not None:
            check_same_table(path, self.header.run_name, self.header.fields, fields)
        self.fields = {field.name: field for field in self.header.fields}
        require_files(self.header.slots * (len(self.fields) + 1))
        slots = [slot_path(path, slot) for slot in range(self.header.slots)]
        ready = [map_file(slot / "ready.bin", at.READY_BYTES, writable=True) for slot in slots]
        self.data = [
            {
                field.name: map_file(
                    slot / f"{field.name}.bin", field.nbytes, writable=writable_data
                )
                for field in self.header.fields
            }
            for slot in slots
        ]
        self.view = View(
            at.words(memoryview(meta)),
            [at.words(memoryview(page)) for page in ready],
            at.max_tokens(self.header.fields),
        )

    def check_place(self) -> None:
        """Raises RingMissing when the directory no longer is the ring that this process mapped."""
        check_place(self.path, self.lock)


def check_place(path: Path, lock: LockFile) -> None:
    try:
        there = (path / "meta.bin").stat()
    except OSError:
        raise RingMissing(f"{path} was removed while it was in use") from None
    if lock.fd < 0 or not os.path.sameopenfile(lock.fd, lock.fd):
        raise RingError("this ring was left")
    mine = os.fstat(lock.fd)
    if (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino):
        raise RingMissing(f"{path} was replaced by another ring while it was in use")


def read_header(meta: mmap.mmap, path: Path) -> Header:
    header = parse_header(meta[:], path)
    if header.boot_id != boot_id():
        raise LayoutMismatch(f"{path} was left by an earlier boot of this machine: destroy it")
    return header


# ---------------------------------------------------------------- creation


def create(
    path: Path | str,
    fields: tuple[Field, ...],
    slots: int,
    *,
    end_seq: int,
    run_name: str,
    quarantine_s: float = 2.0,
) -> None:
    """Makes a ring whose pages are all reserved. The ring of a dead run is replaced.

    Raises RingBusy (the run that is alive there), NoSpace (how many slots would fit) or RingError.
    """
    path = Path(path)
    check_fields(fields)
    if not 1 <= slots <= at.MAX_SLOTS:
        raise RingError(f"a ring has 1 to {at.MAX_SLOTS} slots, not {slots}")
    if len(run_name.encode()) > 64 or not 0 <= end_seq < 2**62 or not 0 <= quarantine_s <= 3600:
        raise RingError("a run's name has at most 64 bytes, a quarantine at most 3600 s")
    if not path.parent.is_dir():
        raise RingError(f"{path.parent} is no directory: set ring.path to one inside a tmpfs")
    sweep(path)
    _remove_dead(path)
    require_space(path.parent, fields, slots)
    meta = _meta_bytes(fields, slots, end_seq, run_name, quarantine_s)
    temporary, held = _temporary_directory(path)
    try:
        lock = _build(temporary, fields, slots, meta)
        try:
            temporary.rename(path)
        except OSError as error:
            lock.close()
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise RingBusy(f"{path} was created by another run at the same moment") from None
            raise RingError(f"{path} cannot be created: {error.strerror}") from None
        crash_point("create.rename")
        _owned[path] = lock
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        os.close(held)


def _temporary_directory(path: Path) -> tuple[Path, int]:
    """(a new directory beside `path`, its locked descriptor): a free lock means a dead creator."""
    while True:
        name = path.with_name(f"{path.name}.tmp.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            name.mkdir(mode=0o700)
        except OSError as error:
            raise RingError(f"{path} cannot be created: {error.strerror}") from None
        crash_point("create.dir")
        held = _lock_directory(name)
        if held is not None:
            return name, held


def _lock_directory(path: Path) -> int | None:
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
        pass  # locked by its maker or its sweeper, or removed by the latter
    os.close(fd)
    return None


def _build(directory: Path, fields: tuple[Field, ...], slots: int, meta: bytes) -> LockFile:
    ready = at.words(bytearray(at.READY_BYTES))
    ready[at.WORD] = pack_word(EMPTY, NOBODY, 0)
    for slot in range(slots):
        slot_path(directory, slot).mkdir(mode=0o700)
        _write_file(slot_path(directory, slot) / "ready.bin", at.READY_BYTES, ready.tobytes())
        for field in fields:
            _write_file(slot_path(directory, slot) / f"{field.name}.bin", field.nbytes)
        crash_point("create.file")
    _write_file(directory / "meta.bin", at.META_BYTES, meta)
    lock = LockFile(directory / "meta.bin")
    assert lock.try_lock(at.OWNER_LOCK)
    crash_point("create.meta")
    return lock


def _write_file(path: Path, size: int, content: bytes = b"") -> None:
    """With its pages reserved: ENOSPC here instead of SIGBUS at the first store."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
            os.write(fd, content)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise NoSpace(
                f"no space left for {path}: fewer ring.slots, or a larger --shm-size"
            ) from None
        raise RingError(f"{path} cannot be created: {error.strerror}") from None


def _meta_bytes(
    fields: tuple[Field, ...], slots: int, end_seq: int, run_name: str, quarantine_s: float
) -> bytes:
    page = bytearray(at.META_BYTES)
    table = at.pack_table(fields)
    page[at.TABLE_AT : at.TABLE_AT + len(table)] = table
    page[at.NAME_BYTES] = run_name.encode().ljust(64, b"\0")
    page[at.BOOT_ID * 8 : at.BOOT_ID * 8 + 16] = boot_id()
    meta = at.words(page)
    for word, value in {
        at.SLOT_COUNT: slots,
        at.SLOT_SIZE: at.slot_size(fields),
        at.MAGIC_WORD: at.MAGIC,
        at.VERSION_WORD: at.VERSION,
        at.LAYOUT_HASH: at.layout_hash(slots, table),
        at.RING_ID: secrets.randbits(64),
        at.EPOCH: 1,
        at.SETTLED: 1,
        at.END_SEQ: end_seq,
        at.FIELD_COUNT: len(fields),
        at.QUARANTINE_NS: int(quarantine_s * 1e9),
        at.SUSPECT_NS: int(SUSPECT_S * 1e9),
        at.REAP_NS: int(REAP_S * 1e9),
        at.CTRL_NS: int(CTRL_S * 1e9),
        at.CREATED_NS: time.time_ns(),
        at.CREATOR: os.getpid() | pid_namespace() << 32,
        at.CREATOR_START: start_ticks(os.getpid()) or 0,
    }.items():
        meta[word] = value
    return bytes(page)


# ---------------------------------------------------------------- taking over and removing


def _require_nobody(path: Path, lock: LockFile, meta: mmap.mmap) -> None:
    """Raises RingBusy that names the run whose owner or party is alive."""
    name = bytes(meta[at.NAME_BYTES]).rstrip(b"\0").decode(errors="replace")
    if lock.held_elsewhere(at.OWNER_LOCK):
        pid = int.from_bytes(meta[at.CREATOR * 8 : at.CREATOR * 8 + 4], "little")
        raise RingBusy(f"{path} belongs to run {name!r}, which is alive (started by process {pid})")
    for party in live_parties(at.words(memoryview(meta)), lock):
        raise RingBusy(f"{path} belongs to run {name!r}: {party.name} (pid {party.pid}) is alive")


def clear_closed(path: Path | str, end_seq: int) -> None:
    """Takes over the ring of an ended run: a new epoch without `closed`, and a new `end_seq`.

    For the process that starts a run, before it starts any other. Raises RingMissing, RingBusy,
    LayoutMismatch or RingError.
    """
    path = Path(path)
    lock = open_lock(path) if path not in _owned else _owned[path]
    segment = Segment(path)
    meta = segment.view.meta
    _take_ownership(path, lock)
    with Control(lock, meta):
        check_place(path, lock)
        now = time.monotonic_ns()
        settle(segment.view, now)
        rewind(segment.view, min(meta[at.BASE_SEQ], end_seq), now)
        crash_point("clear.closed")
        meta[at.END_SEQ] = end_seq
        crash_point("clear.end")


def _take_ownership(path: Path, lock: LockFile) -> None:
    meta = map_file(path / "meta.bin", at.META_BYTES, writable=False)
    _require_nobody(path, lock, meta)
    if not lock.try_lock(at.OWNER_LOCK):
        raise RingBusy(f"{path} is being taken over by another run")
    _owned[path] = lock


def _remove_dead(path: Path) -> None:
    """Removes the ring of a run that is over. Raises RingBusy, or RingError: this is no ring."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    destroy(path)


def destroy(path: Path | str, force: bool = False) -> None:
    """Removes the ring and its semaphores. Raises RingBusy while its owner or a party lives.

    With `force` also then: the living get RingMissing at their next wake-up.
    """
    path = Path(path)
    if path in _owned:
        _owned.pop(path).close()
    lock = open_lock(path)
    if not _is_ring_shaped(path):
        raise RingError(f"{path} holds files that no ring has: remove it by hand")
    meta = map_file(path / "meta.bin", at.META_BYTES, writable=False)
    if bytes(meta[at.MAGIC_WORD * 8 : at.MAGIC_WORD * 8 + 8]) != at.MAGIC.to_bytes(8, "little"):
        if not force:
            raise LayoutMismatch(f"{path}/meta.bin is no ring's: destroy it with force")
    elif not force:
        _require_nobody(path, lock, meta)
        if not lock.try_lock(at.OWNER_LOCK):
            raise RingBusy(f"{path} is being removed by another process")
    ring_id = int.from_bytes(meta[at.RING_ID * 8 : at.RING_ID * 8 + 8], "little")
    _remove(path)
    unlink_semaphores(ring_id)
    lock.close()


def _is_ring_shaped(path: Path) -> bool:
    names = [entry.name for entry in path.iterdir()]
    return all(name == "meta.bin" or name.startswith("slot_") for name in names)


def _remove(path: Path) -> None:
    """First out of sight in one step, then the files. The lock keeps sweepers off meanwhile."""
    held = _lock_directory(path)
    aside = path.with_name(f"{path.name}.tmp.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        path.rename(aside)
        crash_point("remove.rename")
        shutil.rmtree(aside)
    except OSError as error:
        raise RingError(f"{path} cannot be removed: {error.strerror}") from None
    finally:
        if held is not None:
            os.close(held)


def temporary_directories(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}.tmp.*"))


def sweep(path: Path | str) -> list[Path]:
    """Removes what creators left that died half-way. Returns the directories removed."""
    removed = []
    for directory in temporary_directories(Path(path)):
        held = _lock_directory(directory)
        if held is None:
            continue
        try:
            if _is_ring_shaped(directory):
                shutil.rmtree(directory, ignore_errors=True)
                removed.append(directory)
        finally:
            os.close(held)
    return removed
