"""The crash matrix: a process dies by SIGKILL at each named point of each role, then the survivors
take the ring to its end: nothing is lost, doubled, torn or left.

Creators, removers and starters die in test_ring_create.py, at every store of the pure core in
test_ring_machine.py.
"""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from rings import (
    fill,
    hear,
    holds_payload,
    new_path,
    new_ring,
    publish_one,
    reader_of,
    spawn,
    writer_of,
)

from shm_ring import RingReader, Stopped, destroy, snapshot
from shm_ring.crash import POINTS

END = 6
Start = Callable[..., subprocess.Popen[str]]

CASES = {
    "producer": [
        *POINTS["producer"],
        *POINTS["joiner"],
        *("fail.count", "ctrl.locked:1", "ctrl.locked:2", "ctrl.locked:5"),
        *("ctrl.unlocked:2", "ctrl.unlocked:4", "wake.hint:1", "wake.hint:2"),
    ],
    "consumer": [
        *POINTS["consumer"],
        *POINTS["joiner"],
        *("derive.tail", "fail.count", "ctrl.locked:3", "ctrl.unlocked:5", "wake.hint:3"),
    ],
    "reaper": [*POINTS["reaper"], "reap.word:2", "fail.count", "derive.head"],
    "rewinder": [*POINTS["rewinder"], "ctrl.locked:2", "ctrl.unlocked:2", "wake.hint"],
}


@pytest.fixture
def path() -> Iterator[Path]:
    path = new_ring(new_path(), slots=4, end_seq=END)
    yield path
    if path.exists():
        destroy(path, force=True)


@pytest.fixture
def start(path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def begin(role: str, name: str, *argv: object, crash: str) -> subprocess.Popen[str]:
        started.append(spawn(role, path, name, *argv, crash=crash))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def maker(path: Path) -> Iterator[Callable[[], threading.Thread]]:
    """Starts a writer that fills slots until the run is over."""
    give_up = threading.Event()
    threads = []

    def fill_slots() -> None:
        writer = writer_of(path, "maker")
        with suppress(Stopped):
            while (lease := writer.claim(stop=give_up.is_set)) is not None:
                writer.publish(lease, total_tok=fill(lease))
        writer.leave()

    def begin() -> threading.Thread:
        threads.append(threading.Thread(target=fill_slots))
        threads[-1].start()
        return threads[-1]

    yield begin
    give_up.set()
    for thread in threads:
        thread.join()


def finish(path: Path, maker: threading.Thread, reader: RingReader, first: int) -> None:
    """The survivors go through, from `first` on, and leave nothing behind."""
    for seq in range(first, END):
        lease = reader.take(seq)
        assert lease.seq == seq and holds_payload(lease)
        assert reader.done(lease)
    reader.follow(snapshot(path).epoch)
    reader.close_run()
    maker.join(timeout=20)
    view = snapshot(path)
    assert (view.head, view.tail, view.settled) == (END, END, view.epoch)
    assert {slot.state for slot in view.slots} <= {"EMPTY", "CONSUMED"}
    reader.leave()
    destroy(path)  # it refuses where a party seems to live
    assert not path.exists()


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def acknowledged(path: Path) -> int:
    return snapshot(path).counters["acknowledged"][0]


@pytest.mark.parametrize("point", CASES["producer"])
def test_after_the_death_of_a_producer(
    path: Path, start: Start, maker: Callable[[], threading.Thread], point: str
) -> None:
    dying = start("produce", "target_0", crash=point)
    reader = None
    if hear(dying):
        if point == "release.word":
            reader = reader_of(path, "survivor")
            reader.rewind(0)
        go_on(dying)
    assert dying.wait() == -signal.SIGKILL
    reader = reader or reader_of(path, "survivor")
    thread = maker()
    finish(path, thread, reader, 0)


@pytest.mark.parametrize("point", CASES["consumer"])
def test_after_the_death_of_a_consumer(
    path: Path, start: Start, maker: Callable[[], threading.Thread], point: str
) -> None:
    thread = maker()
    dying = start("consume", "trainer_0", crash=point)
    if hear(dying):
        if point == "release.word":
            rewinder = reader_of(path, "rewinder")
            rewinder.rewind(0)
            rewinder.leave()
        go_on(dying)
    assert dying.wait() == -signal.SIGKILL
    reader = reader_of(path, "survivor")
    first = snapshot(path).tail
    if point != "release.word":
        assert acknowledged(path) == first  # each once
    finish(path, thread, reader, first)


@pytest.mark.parametrize("point", CASES["reaper"])
def test_after_the_death_of_a_reaper(
    path: Path, start: Start, maker: Callable[[], threading.Thread], point: str
) -> None:
    first = start("produce", "target_0", crash="claim.word")
    assert first.wait() == -signal.SIGKILL
    reaper = start("write", "target_1", crash=point)
    assert reaper.wait() == -signal.SIGKILL
    finish(path, maker(), reader_of(path, "survivor"), 0)


@pytest.mark.parametrize("point", CASES["rewinder"])
def test_after_the_death_of_a_rewinder(
    path: Path, start: Start, maker: Callable[[], threading.Thread], point: str
) -> None:
    writer = writer_of(path)
    publish_one(writer)
    publish_one(writer)
    rewinder = start("start_over", "trainer_0", 1, crash=point)
    assert rewinder.wait() == -signal.SIGKILL
    reader = reader_of(path, "survivor")
    assert snapshot(path).settled == snapshot(path).epoch  # joining has finished it
    rewound = snapshot(path).epoch == 2
    assert rewound == (point not in ("rewind.base", "ctrl.locked:2"))
    writer.leave()
    finish(path, maker(), reader, 1 if rewound else 0)


def test_the_matrix_has_every_point() -> None:
    driven = {point.split(":")[0] for points in CASES.values() for point in points}
    elsewhere = {*POINTS["creator"], *POINTS["remover"], *POINTS["starter"]}
    assert driven | elsewhere == {point for points in POINTS.values() for point in points}
