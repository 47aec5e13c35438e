"""Writers and readers in processes that are killed, stopped and forked."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rings import (
    claimed,
    counted,
    fill,
    hear,
    holds_payload,
    new_path,
    new_ring,
    publish_one,
    reader_of,
    set_meta,
    slot_states,
    spawn,
    until,
    writer_of,
)

from shm_ring import (
    Poisoned,
    Stopped,
    destroy,
    snapshot,
)
from shm_ring import layout as at

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def path() -> Iterator[Path]:
    path = new_ring(new_path())
    yield path
    if path.exists():
        destroy(path, force=True)


@pytest.fixture
def start(path: Path) -> Iterator[Start]:
    """Starts rings.py roles on this ring; kills them at the end."""
    started: list[subprocess.Popen[str]] = []

    def begin(role: str, *argv: object, crash: str = "", on: Path = path) -> Any:
        started.append(spawn(role, on, *argv, crash=crash))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None and process.stdin is not None
        process.stdout.close()
        process.stdin.close()


def test_two_processes_through_a_small_ring(path: Path, start: Start) -> None:
    reader = reader_of(path)
    reader.rewind(0)
    start("write", "target_0")
    for seq in range(60):
        lease = reader.take(seq)
        assert holds_payload(lease)
        reader.done(lease)


def second_words(process: subprocess.Popen[str], first: str) -> list[int]:
    """The numbers that it said, to its end."""
    lines = [line.split() for line in process.communicate(timeout=60)[0].splitlines()]
    return [int(line[1]) for line in lines if line[0] == first]


def test_three_writers_and_two_readers(start: Start) -> None:
    path = new_ring(new_path(), slots=10, end_seq=80)
    closer = reader_of(path, "closer")
    epoch = closer.rewind(0)
    writers = [start("write", f"target_{i}", on=path) for i in range(3)]
    readers = [start("read", f"trainer_{i}", epoch, i, 2, 40, on=path) for i in (0, 1)]
    took = [second_words(reader, "took") for reader in readers]
    closer.close_run()
    claims = [seq for writer in writers for seq in second_words(writer, "claimed")]
    closer.leave()
    assert took == [list(range(0, 80, 2)), list(range(1, 80, 2))]
    assert sorted(claims) == list(range(80))
    assert [process.returncode for process in (*writers, *readers)] == [0] * 5
    view = snapshot(path)
    assert (view.head, view.tail) == (80, 80)
    assert view.counters["acknowledged"][0] == view.counters["published"][0] == 80
    destroy(path)


def test_a_writer_killed_while_writing_is_redone_after_quarantine(path: Path, start: Start) -> None:
    holder = start("hold", "target_0", 1)
    assert hear(holder) == ["holds", "1"]
    reader = reader_of(path)
    holder.kill()
    holder.wait()
    writer = writer_of(path, "target_1")
    assert slot_states(path)[1] == "QUARANTINE"
    until(lambda: publish_one(writer) == 1)
    lease = reader.take(1)
    assert holds_payload(lease)
    assert [counted(path, n) for n in ("died", "quarantined", "reclaimed_writing")] == [1, 1, 1]


def test_a_reader_killed_while_reading_is_followed_by_another(path: Path, start: Start) -> None:
    writer = writer_of(path)
    publish_one(writer)
    keeper = start("keep", "trainer_0", 1, 0)
    assert hear(keeper) == ["keeps", "0"]
    keeper.kill()
    keeper.wait()
    reader = reader_of(path, "trainer_1")
    lease = reader.take(0)
    assert holds_payload(lease)
    assert counted(path, "redelivered") == 1
    assert snapshot(path).slots[0].deliveries == 2


def test_three_killed_readers_of_one_seq_are_poison(path: Path, start: Start) -> None:
    publish_one(writer_of(path))
    for i in range(3):
        keeper = start("keep", f"trainer_{i}", 1, 0)
        assert hear(keeper) == ["keeps", "0"]
        keeper.kill()
        keeper.wait()
    with pytest.raises(Poisoned, match="seq 0 failed 3 times, at last because its reader died"):
        reader_of(path, "trainer_3").take(0)


def test_a_stopped_writer_is_suspect_keeps_its_slot_and_goes_on(path: Path, start: Start) -> None:
    set_meta(path, at.SUSPECT_NS, 50_000_000)
    holder = start("hold", "target_0", 0)
    hear(holder)
    holder.send_signal(signal.SIGSTOP)
    reader = reader_of(path)
    until(lambda: snapshot(path).parties[0].status == "suspect")
    writer = writer_of(path, "target_1")
    assert claimed(writer).seq == 1
    assert slot_states(path)[0] == "WRITING"
    holder.send_signal(signal.SIGCONT)
    assert holder.stdin is not None
    holder.stdin.close()  # ends its pause
    lease = reader.take(0)
    assert holds_payload(lease)
    assert counted(path, "died") == 0


def test_a_writer_that_slept_through_a_rewind_is_refused(path: Path, start: Start) -> None:
    holder = start("hold", "target_0", 0)
    hear(holder)
    holder.send_signal(signal.SIGSTOP)
    reader = reader_of(path)
    reader.rewind(5)
    writer = writer_of(path, "target_1")
    assert publish_one(writer) == 5
    assert slot_states(path)[0] == "WRITING"
    holder.send_signal(signal.SIGCONT)
    assert holder.stdin is not None
    holder.stdin.close()
    until(lambda: counted(path, "refused_epoch") == 1)
    assert holds_payload(reader.take(5))
    assert holds_payload(reader.take(6))  # by the one that slept


def test_a_forked_child_neither_uses_nor_keeps_its_parents_place(path: Path, start: Start) -> None:
    parent = start("fork", "target_0")
    lines = {line[0]: line[1:] for line in (hear(parent), hear(parent))}
    assert "forked from one of its parties" in " ".join(lines["child"])
    child = int(lines["holds"][0])
    parent.kill()
    parent.wait()
    os.kill(child, 0)  # it lives
    assert snapshot(path).parties[0].status == "dead"
    writer = writer_of(path, "target_1")
    assert publish_one(writer) in (0, 1)
    until(lambda: publish_one(writer) == 0 or slot_states(path)[0] == "READY")
    os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    "crash", ["claim.seq:2", "claim.word:2", "claim.head:2", "publish.seal:1", "publish.word:2"]
)
def test_the_survivors_finish_whatever_a_writer_died_at(
    path: Path, start: Start, crash: str
) -> None:
    dying = start("write", "target_0", crash=crash)
    assert dying.wait() == -signal.SIGKILL
    writer, reader = writer_of(path, "target_1"), reader_of(path)
    finished = threading.Event()

    def make_slots() -> None:
        with suppress(Stopped):
            while (lease := writer.claim(stop=finished.is_set)) is not None:
                writer.publish(lease, total_tok=fill(lease))

    maker = threading.Thread(target=make_slots)
    maker.start()
    for seq in range(6):
        lease = reader.take(seq)
        assert holds_payload(lease)
        reader.done(lease)
    finished.set()
    maker.join()
    assert snapshot(path).counters["died"][0] == 1
