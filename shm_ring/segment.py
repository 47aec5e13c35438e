"""Attaching to a ring: its files mapped, checked against what this process expects."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from . import layout as at
from .errors import LayoutMismatch, RingError, RingMissing
from .layout import Field, Header, check_same_table, parse_header
from .liveness import boot_id
from .locks import LockFile
from .space import require_files
from .state import View


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
    if lock.fd < 0:
        raise RingMissing(f"{path} was left by this process, or it was forked from a party")
    try:
        there = (path / "meta.bin").stat()
    except OSError:
        raise RingMissing(f"{path} was removed while it was in use") from None
    mine = os.fstat(lock.fd)
    if (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino):
        raise RingMissing(f"{path} was replaced by another ring while it was in use")


def read_header(meta: mmap.mmap, path: Path) -> Header:
    header = parse_header(meta[:], path)
    if header.boot_id != boot_id():
        raise LayoutMismatch(f"{path} was left by an earlier boot of this machine: destroy it")
    return header
