"""Waits: bells, lost hints, a lock that is held; the ring goes away or is damaged."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import posix_ipc
import pytest
from rings import (
    FIELDS,
    QUARANTINE_S,
    claimed,
    counted,
    holds_payload,
    new_path,
    new_ring,
    payload,
    publish_one,
    reader_of,
    set_meta,
    until,
    writer_of,
)

from shm_ring import (
    RingBusy,
    RingError,
    RingMissing,
    RingWriter,
    Stopped,
    destroy,
    snapshot,
)
from shm_ring import layout as at
from shm_ring.locks import Control, LockFile
from shm_ring.segment import map_file
from shm_ring.waiting import LONGEST_WAIT_S, Bells, semaphore_name


@pytest.fixture
def path() -> Iterator[Path]:
    path = new_ring(new_path())
    yield path
    if path.exists():
        destroy(path, force=True)


def publish_soon(writer: RingWriter) -> threading.Thread:
    """After the reader has begun to wait."""

    def run() -> None:
        view = writer._segment.path
        until(lambda: any(p.waits_for == "ready slot" for p in snapshot(view).parties))
        publish_one(writer)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_waiting_reader_is_woken_by_its_bell(path: Path, monkeypatch: Any) -> None:
    writer, reader = writer_of(path), reader_of(path)
    heard: list[bool] = []
    wait = Bells.wait
    monkeypatch.setattr(Bells, "wait", lambda s, t: heard.append(wait(s, 10)) or heard[-1])
    thread = publish_soon(writer)
    assert holds_payload(reader.take(0))
    thread.join()
    assert heard == [True]


def test_a_lost_hint_costs_a_timed_look_and_is_counted(path: Path, monkeypatch: Any) -> None:
    writer, reader = writer_of(path), reader_of(path)
    monkeypatch.setattr(Bells, "ring", lambda *_: None)
    thread = publish_soon(writer)
    lease = reader.take(0)
    thread.join()
    assert holds_payload(lease)
    reader.done(lease)
    assert counted(path, "late_wakeup") == 1


@pytest.mark.parametrize("posts", [0, 2])
def test_dropped_and_doubled_hints_do_not_matter(path: Path, monkeypatch: Any, posts: int) -> None:
    """A whole run, both sides waiting for each other."""
    ring = Bells.ring
    monkeypatch.setattr(Bells, "ring", lambda s, p: [ring(s, p) for _ in range(posts)])
    writer, reader = writer_of(path), reader_of(path)

    def fill_slots() -> None:
        for _ in range(9):
            publish_one(writer)

    thread = threading.Thread(target=fill_slots)
    thread.start()
    for seq in range(9):
        lease = reader.take(seq)
        assert holds_payload(lease)
        reader.done(lease)
    thread.join()


def test_removed_semaphores_do_not_matter(path: Path) -> None:
    writer, reader = writer_of(path), reader_of(path)
    for party in (writer.id, reader.id):
        posix_ipc.unlink_semaphore(semaphore_name(reader._segment.header.ring_id, party))
    thread = publish_soon(writer)
    assert holds_payload(reader.take(0))
    thread.join()


@pytest.mark.parametrize("value", [1, 30_000])
def test_a_preset_semaphore_does_not_matter(path: Path, value: int) -> None:
    writer, reader = writer_of(path), reader_of(path)
    name = semaphore_name(reader._segment.header.ring_id, reader.id)
    bell = posix_ipc.Semaphore(name)
    for _ in range(value):
        bell.release()
    thread = publish_soon(writer)
    assert holds_payload(reader.take(0))
    thread.join()
    bell.close()


def test_idle_waits_grow_to_a_quarter_of_a_second(path: Path, monkeypatch: Any) -> None:
    reader = reader_of(path)
    waits: list[float] = []
    monkeypatch.setattr(Bells, "wait", lambda _self, timeout_s: bool(waits.append(timeout_s)))
    with pytest.raises(Stopped):
        reader.take(0, stop=lambda: len(waits) >= 12)
    assert waits[:3] == [0.01, 0.02, 0.04]
    assert waits[-4:] == [LONGEST_WAIT_S] * 4 == [0.25] * 4


def test_a_held_control_lock_ends_in_an_error_that_names_the_holder(path: Path) -> None:
    writer = writer_of(path)
    set_meta(path, at.CTRL_NS, 20_000_000)
    other = LockFile(path / "meta.bin")
    meta = at.words(bytearray(at.META_BYTES))
    with Control(other, meta), pytest.raises(RingBusy, match=f"process {os.getpid()} has held"):
        writer.claim()
    set_meta(path, at.CTRL_NS, 10**10)
    claimed(writer)
    assert counted(path, "slow_ctrl") == 0  # the wait that failed is an error, not a slow one


def test_a_control_lock_left_by_an_interrupt_is_taken_over_by_its_thread(path: Path) -> None:
    writer = writer_of(path)
    writer._control.__enter__()
    assert claimed(writer).seq == 0


# ---------------------------------------------------------------- the ring goes away, or is damaged


def test_a_removed_directory_ends_the_wait(path: Path) -> None:
    reader = reader_of(path)
    destroy(path, force=True)
    with pytest.raises(RingMissing, match="was removed while it was in use"):
        reader.take(0)


def test_a_replaced_directory_ends_the_wait(path: Path) -> None:
    reader = reader_of(path)
    destroy(path, force=True)
    new_ring(path)
    with pytest.raises(RingMissing, match="was replaced by another ring"):
        reader.take(0)


def test_damage_under_a_running_ring_is_an_error(path: Path) -> None:
    writer = writer_of(path)
    page = map_file(path / "slot_0002" / "ready.bin", at.READY_BYTES, writable=True)
    at.words(memoryview(page))[at.WORD] = 0x4444
    with pytest.raises(RingError, match=r"slot_0002/ready\.bin is damaged"):
        writer.claim()


def test_a_word_of_padding_is_never_a_payload() -> None:
    """The payload that these tests compare tells epochs, seqs and fields apart."""
    field = FIELDS[0]
    pages = [payload(epoch, seq, field) for epoch in (1, 2) for seq in (0, 1, 2)]
    assert all((a != b).any() for i, a in enumerate(pages) for b in pages[:i])
    assert np.unique(pages[0]).size > 100
    assert QUARANTINE_S == 0.05


def test_a_long_call_shows_signs_of_life_from_a_thread(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it ends, and no exception of the thread's own where the ring goes away."""
    monkeypatch.setattr("shm_ring.party.BEAT_S", 0.001)
    reader, others = reader_of(path), threading.active_count()
    with reader.beating():
        reader._record.beat(0)  # as if it were silent since the machine's start
        until(lambda: snapshot(path).parties[0].heartbeat_age_s < 10)
    assert threading.active_count() == others
    with reader.beating():
        destroy(path, force=True)
        until(lambda: threading.active_count() == others)
    with pytest.raises(RingMissing):
        until(lambda: reader.beat() is not None)
