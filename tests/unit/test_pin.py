"""Page-locking: all of a ring's files or none, by turns, and no error left behind."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rings import FIELDS, new_path, new_ring

from shm_ring import RingReader, RingWriter, destroy
from shm_ring.pin import PORTABLE, READ_ONLY, pin, unpin

SLOTS = 4


class FakeCuda:
    """Refuses registration number `limit`."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit, self.calls, self.last_error = limit, 0, 0
        self.locked: dict[int, tuple[int, int]] = {}

    def register(self, address: int, nbytes: int, flags: int) -> int:
        self.calls += 1
        if self.calls == self.limit:
            self.last_error = 2
            return 2
        assert address not in self.locked
        self.locked[address] = nbytes, flags
        return 0

    def unregister(self, address: int) -> int:
        del self.locked[address]
        return 0

    def forget_error(self) -> None:
        self.last_error = 0

    def explain(self, error: int) -> str:
        return "out of memory"


@pytest.fixture
def ring() -> Iterator[Path]:
    path = new_ring(new_path(), SLOTS)
    yield path
    destroy(path, force=True)


def test_every_data_file_of_every_slot_is_locked(ring: Path) -> None:
    reader, cuda = RingReader(ring, "trainer_0", fields=FIELDS), FakeCuda()
    report = pin(reader, cuda)
    assert report.refused is None and len(cuda.locked) == SLOTS * len(FIELDS)
    assert report.nbytes == SLOTS * sum(field.nbytes for field in FIELDS)
    assert {flags for _, flags in cuda.locked.values()} == {PORTABLE | READ_ONLY}
    assert all(address % os.sysconf("SC_PAGE_SIZE") == 0 for address in cuda.locked)
    unpin(reader, cuda)
    assert not cuda.locked
    reader.leave()


def test_a_writers_pages_are_locked_writable(ring: Path) -> None:
    writer, cuda = RingWriter(ring, "target_0", fields=FIELDS), FakeCuda()
    pin(writer, cuda)
    assert {flags for _, flags in cuda.locked.values()} == {PORTABLE}
    writer.leave()


@pytest.mark.parametrize("limit", [1, 9, SLOTS * len(FIELDS)])
def test_one_refusal_locks_nothing_says_why_and_leaves_no_error(ring: Path, limit: int) -> None:
    reader, cuda = RingReader(ring, "trainer_0", fields=FIELDS), FakeCuda(limit)
    report = pin(reader, cuda)
    assert not cuda.locked and cuda.last_error == 0 and report.nbytes == 0
    slot, field = divmod(limit - 1, len(FIELDS))
    name = f"slot_{slot:04d}/{FIELDS[field].name}.bin"
    assert f"cudaHostRegister of {name}: out of memory" in str(report)
    reader.leave()


def test_processes_take_turns(ring: Path) -> None:
    reader, cuda = RingReader(ring, "trainer_0", fields=FIELDS), FakeCuda()
    holder = os.open(ring, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    waiting = threading.Thread(target=pin, args=(reader, cuda))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive() and not cuda.locked
    os.close(holder)
    waiting.join(10)
    assert not waiting.is_alive() and cuda.locked
    reader.leave()
