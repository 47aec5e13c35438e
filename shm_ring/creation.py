"""Making a ring, and taking over one that an ended run left.

A ring is built in a temporary directory and appears by one rename: nobody sees half of one, and one
of several creators wins. Whoever creates or takes over keeps the OWNER lock until the process ends,
so that a second run finds the ring busy even before the first party has joined.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path

from . import layout as at
from .crash import crash_point
from .errors import NoSpace, RingBusy, RingError, RingMissing
from .layout import Field, check_fields
from .liveness import boot_id, pid_namespace, start_ticks
from .locks import Control, LockFile
from .protocol import rewind, settle
from .remove import (
    destroy,
    lock_directory,
    own,
    owner_lock,
    owns,
    require_nobody,
    sweep,
    temporary_name,
)
from .segment import Segment, check_place, slot_path
from .space import require_space
from .state import EMPTY, NOBODY, pack_word

SUSPECT_S, REAP_S, CTRL_S = 10.0, 0.25, 60.0


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
    path = Path(path).absolute()
    check_fields(fields)
    if not 1 <= slots <= at.MAX_SLOTS:
        raise RingError(f"a ring has 1 to {at.MAX_SLOTS} slots, not {slots}")
    if len(run_name.encode()) > 64 or not 0 <= end_seq < 2**62 or not 0 <= quarantine_s <= 3600:
        raise RingError("a run's name has at most 64 bytes, a quarantine at most 3600 s")
    if not path.parent.is_dir():
        raise RingError(f"{path.parent} is no directory: set ring.path to one inside a tmpfs")
    sweep(path)
    _make_room(path)
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
        own(path, lock)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        os.close(held)


def _make_room(path: Path) -> None:
    """Removes the ring of an ended run. An empty directory may stay; what is no ring is refused."""
    if owns(path):
        raise RingBusy(f"{path} belongs to a run of this very process: destroy it first")
    if path.exists() and not path.is_dir():
        raise RingError(f"{path} is a file: set ring.path to a new directory inside a tmpfs")
    with suppress(RingMissing, FileNotFoundError):  # another creator was faster
        if any(path.iterdir()):
            destroy(path)


def _temporary_directory(path: Path) -> tuple[Path, int]:
    """(a new directory beside `path`, its locked descriptor): a free lock means a dead creator."""
    while True:
        name = temporary_name(path)
        try:
            name.mkdir(mode=0o700)
        except OSError as error:
            raise RingError(f"{path} cannot be created: {error.strerror}") from None
        crash_point("create.dir")
        held = lock_directory(name)
        if held is not None:
            return name, held


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


def clear_closed(path: Path | str, end_seq: int) -> None:
    """Takes over the ring of an ended run: a new epoch, without `closed`, and a new `end_seq`.

    For the process that starts a run, before it starts any other: its trainer's rewind then names
    the seq to start at. Raises RingMissing, RingBusy, LayoutMismatch or RingError.
    """
    path = Path(path).absolute()
    lock = owner_lock(path)
    segment = Segment(path)
    meta = segment.view.meta
    with Control(lock, meta):
        check_place(path, lock)
        require_nobody(path, lock, segment.header, meta)
        if not lock.try_lock(at.OWNER_LOCK):
            raise RingBusy(f"{path} is being taken over by another run")
        now = time.monotonic_ns()
        settle(segment.view, now)
        rewind(segment.view, min(meta[at.BASE_SEQ], end_seq), now)
        crash_point("clear.rewound")
        meta[at.END_SEQ] = end_seq
        crash_point("clear.end")
        meta[at.CREATOR] = os.getpid() | pid_namespace() << 32
        meta[at.CREATOR_START] = start_ticks(os.getpid()) or 0
    own(path, lock)
