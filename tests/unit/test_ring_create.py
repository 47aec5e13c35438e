"""Making, taking over and removing rings: races, dead creators, what stays."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import posix_ipc
import pytest
from rings import beside, disown, end, fill, hear, new_path, new_ring, spawn

from shm_ring import (
    RingBusy,
    RingError,
    RingMissing,
    RingReader,
    RingWriter,
    clear_closed,
    destroy,
    leftovers,
    snapshot,
    sweep,
)
from shm_ring.waiting import semaphore_name

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a tmpfs, which needs root")


@pytest.fixture
def path() -> Iterator[Path]:
    path = new_path()
    yield path
    sweep(path)
    if path.is_dir() and any(path.iterdir()):
        destroy(path, force=True)
    assert beside(path) == []


# ---------------------------------------------------------------- who gets the path


def test_a_second_creator_is_refused_with_the_name_of_the_run(path: Path) -> None:
    creator = spawn("own", path, "first")
    assert hear(creator) == ["created", "first"]
    page = (path / "meta.bin").read_bytes()
    with pytest.raises(RingBusy, match="run 'first', alive as process"):
        new_ring(path, run_name="second")
    assert (path / "meta.bin").read_bytes() == page
    assert beside(path) == [path.name]
    end(creator)


def test_a_process_does_not_replace_its_own_ring(path: Path) -> None:
    new_ring(path)
    with pytest.raises(RingBusy, match="of this very process"):
        new_ring(path)
    destroy(path)
    new_ring(path)


def test_one_of_many_creators_wins(path: Path) -> None:
    creators = [spawn("own", path, f"run_{i}") for i in range(5)]
    answers = [hear(creator) for creator in creators]
    assert sorted(words[0] for words in answers) == ["busy"] * 4 + ["created"]
    winner = next(words[1] for words in answers if words[0] == "created")
    assert snapshot(path).run_name == winner
    assert beside(path) == [path.name]
    for creator in creators:
        end(creator)


def test_the_ring_of_a_dead_run_is_replaced(path: Path) -> None:
    creator = spawn("own", path, "first")
    assert hear(creator) == ["created", "first"]
    old = snapshot(path).ring_id
    end(creator)
    new_ring(path, run_name="second")
    view = snapshot(path)
    assert view.run_name == "second" and view.ring_id != old


def test_a_ring_whose_party_lives_is_not_replaced(path: Path) -> None:
    new_ring(path)
    writer = RingWriter(path, "target_0")
    disown(path)
    with pytest.raises(RingBusy, match=f"target_0 is alive as process {os.getpid()}"):
        new_ring(path)
    with pytest.raises(RingBusy):
        destroy(path)
    with pytest.raises(RingBusy):
        clear_closed(path, 5)
    writer.leave()
    new_ring(path)


@pytest.mark.parametrize("point", ["create.dir", "create.file", "create.meta"])
def test_what_a_dead_creator_left_is_swept(path: Path, point: str) -> None:
    creator = spawn("own", path, "first", crash=point)
    assert creator.wait() == -signal.SIGKILL
    end(creator)
    assert not path.exists()
    assert len(beside(path)) == 1
    assert [left.kind for left in leftovers(path.parent) if path.name in left.path.name] == ["half"]
    new_ring(path)
    assert beside(path) == [path.name]


def test_a_creator_at_work_is_not_swept(path: Path) -> None:
    creator = spawn("own", path, "first", crash="create.rename")
    creator.wait()  # it died after the rename: the ring is complete, and nobody's
    end(creator)
    assert [left.kind for left in leftovers(path.parent) if left.path == path] == ["ring"]
    half = path.with_name(f"{path.name}.tmp.1.00000000")
    half.mkdir()
    held = os.open(half, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    assert sweep(path) == []
    os.close(held)
    assert sweep(path) == [half]


@pytest.mark.parametrize("point", ["remove.rename", "remove.semaphores"])
def test_a_removal_that_dies_is_swept_with_its_semaphores(path: Path, point: str) -> None:
    new_ring(path)
    RingWriter(path, "target_0").leave()
    ring_id = int(snapshot(path).ring_id, 16)
    disown(path)
    remover = spawn("own", path, "second", crash=point)
    assert remover.wait() == -signal.SIGKILL
    end(remover)
    assert not path.exists()
    sweep(path)
    with pytest.raises(posix_ipc.ExistentialError):
        posix_ipc.Semaphore(semaphore_name(ring_id, 0))


# ---------------------------------------------------------------- taking over


def test_the_ring_of_a_finished_run_is_taken_over(path: Path) -> None:
    new_ring(path, slots=2, end_seq=1)
    writer, reader = RingWriter(path, "target_0"), RingReader(path, "trainer_0")
    lease = writer.claim()
    assert lease is not None
    writer.publish(lease, total_tok=fill(lease))
    reader.done(reader.take(0))
    reader.close_run()
    assert writer.claim() is None
    writer.leave()
    reader.leave()
    disown(path)
    clear_closed(path, 3)
    view = snapshot(path)
    assert (view.closed, view.end_seq, view.epoch, view.owner_alive) == (False, 3, 2, True)
    with pytest.raises(RingBusy):
        new_ring(path)


def test_the_ring_of_a_run_that_died_whole_is_taken_over(path: Path) -> None:
    """WRITING, READING and POISON of the dead; a new run reaps, rewinds and goes through."""
    new_ring(path, slots=4, end_seq=50)
    writer = RingWriter(path, "target_0")
    for _ in range(3):
        lease = writer.claim()
        assert lease is not None
        writer.abort(lease)
    second = RingWriter(path, "target_1")
    writer._lock.close()  # as the kernel does
    with pytest.raises(RingError):
        second.claim()
    second._lock.close()
    dead = [spawn("hold", path, "target_2", 2), spawn("keep", path, "trainer_0", 1, 1)]
    for process in dead:
        end(process)
    disown(path)

    clear_closed(path, 6)
    new_writer, reader = RingWriter(path, "target_0"), RingReader(path, "trainer_0")
    reader.rewind(2)
    for seq in range(2, 6):
        lease = new_writer.claim()
        assert lease is not None and lease.seq == seq
        new_writer.publish(lease, total_tok=fill(lease))
        reader.done(reader.take(seq))
    reader.close_run()
    assert new_writer.claim() is None


@pytest.mark.parametrize("end_seq", [0, 1, 2, 9])
def test_a_takeover_may_shorten_the_run(path: Path, end_seq: int) -> None:
    new_ring(path, slots=4, end_seq=5)
    writer = RingWriter(path, "target_0")
    for _ in range(3):
        assert writer.claim() is not None
    writer.leave()
    disown(path)
    clear_closed(path, end_seq)
    reader = RingReader(path, "trainer_0")
    with pytest.raises(RingError):
        reader.rewind(end_seq + 1)
    reader.rewind(end_seq)
    reader.close_run()
    assert RingWriter(path, "target_0").claim() is None


def test_a_takeover_that_dies_is_done_again(path: Path) -> None:
    new_ring(path, end_seq=5)
    disown(path)
    for point in ("clear.rewound", "clear.end"):
        starter = spawn("start_again", path, 9, crash=point)
        assert starter.wait() == -signal.SIGKILL
        end(starter)
    clear_closed(path, 9)
    assert snapshot(path).end_seq == 9 and snapshot(path).epoch == 4


# ---------------------------------------------------------------- removing


def test_nothing_stays_after_destroy(path: Path) -> None:
    new_ring(path)
    ring_id = snapshot(path).ring_id
    for name in ("target_0", "trainer_0"):
        RingWriter(path, name).leave()
    assert list(Path("/dev/shm").glob(f"*{ring_id}*"))
    destroy(path)
    assert not list(Path("/dev/shm").glob(f"*{ring_id}*"))
    assert beside(path) == []
    with pytest.raises(RingMissing, match=f"no ring at {path}"):
        destroy(path)


def test_a_directory_that_is_no_ring_is_left_alone(path: Path) -> None:
    path.mkdir()
    (path / "thesis.txt").write_text("mine")
    for attempt in (lambda: new_ring(path), lambda: destroy(path, force=True)):
        with pytest.raises(RingError, match="holds files that no ring has"):
            attempt()
    (path / "thesis.txt").unlink()
    new_ring(path)  # an empty directory may be used


def test_a_file_in_the_way_is_refused(path: Path) -> None:
    path.write_text("mine")
    with pytest.raises(RingError, match="is a file"):
        new_ring(path)
    path.unlink()


def test_semaphores_without_a_ring_are_leftovers() -> None:
    name = semaphore_name(0xABCDEF, 3)
    posix_ipc.Semaphore(name, posix_ipc.O_CREAT).close()
    found = [left.path.name for left in leftovers() if left.kind == "semaphores"]
    assert f"sem.{name[1:]}" in found
    posix_ipc.unlink_semaphore(name)
