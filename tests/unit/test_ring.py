"""Writers and readers on a real ring: processes that are killed, stopped and forked; hints lost."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import posix_ipc
import pytest
from rings import (
    FIELDS,
    QUARANTINE_S,
    fill,
    hear,
    holds_payload,
    new_path,
    new_ring,
    payload,
    spawn,
    tokens,
    until,
)

from shm_ring import (
    Poisoned,
    ReadLease,
    RingBusy,
    RingError,
    RingMissing,
    RingReader,
    RingWriter,
    StaleLease,
    Stopped,
    WriteLease,
    destroy,
    snapshot,
)
from shm_ring import layout as at
from shm_ring.locks import Control, LockFile
from shm_ring.segment import map_file
from shm_ring.waiting import LONGEST_WAIT_S, Bells, semaphore_name

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


def writer_of(path: Path, name: str = "target_0", **options: Any) -> RingWriter:
    return RingWriter(path, name, fields=FIELDS, **options)


def reader_of(path: Path, name: str = "trainer_0", **options: Any) -> RingReader:
    return RingReader(path, name, fields=FIELDS, **options)


def claimed(writer: RingWriter) -> WriteLease:
    lease = writer.claim()
    assert lease is not None
    return lease


def publish_one(writer: RingWriter) -> int:
    lease = claimed(writer)
    assert writer.publish(lease, total_tok=fill(lease))
    return lease.seq


def counted(path: Path, name: str) -> int:
    return snapshot(path).counters[name][0]


def slot_states(path: Path) -> list[str]:
    return [slot.state for slot in snapshot(path).slots]


def set_meta(path: Path, word: int, value: int) -> None:
    at.words(memoryview(map_file(path / "meta.bin", at.META_BYTES, writable=True)))[word] = value


# ---------------------------------------------------------------- one after the other


def test_what_is_written_is_read(path: Path) -> None:
    writer, reader = writer_of(path), reader_of(path)
    reader.rewind(3)
    for seq in range(3, 20):
        assert publish_one(writer) == seq
        lease = reader.take(seq)
        assert (lease.seq, lease.epoch, lease.total_tok) == (seq, 2, tokens(seq))
        assert lease.array("total_tok") == tokens(seq)
        assert holds_payload(lease)
        assert reader.done(lease)
    writer.leave()
    reader.leave()


def test_a_writers_lease_is_writable_and_a_readers_is_not(path: Path) -> None:
    writer, reader = writer_of(path), reader_of(path)
    lease = claimed(writer)
    lease.array("ids")[0, 0] = 7
    writer.publish(lease, total_tok=1)
    taken = reader.take(0)
    assert taken.array("ids")[0, 0] == 7
    with pytest.raises(ValueError, match="read-only"):
        taken.array("ids")[0, 0] = 8
    with pytest.raises(TypeError):
        taken.buffer("ids")[0] = 8


def test_claim_returns_none_when_closed_and_all_is_acknowledged() -> None:
    path = new_ring(new_path(), end_seq=2)
    writer, reader = writer_of(path), reader_of(path)
    reader.rewind(0)
    for seq in range(2):
        publish_one(writer)
        reader.done(reader.take(seq))
    reader.close_run()
    assert writer.claim() is None
    writer.leave()
    reader.leave()
    destroy(path)


def test_waits_end_when_stop_says_so(path: Path) -> None:
    reader = reader_of(path)
    answers = iter([False, False, True])
    with pytest.raises(Stopped):
        reader.take(0, stop=lambda: next(answers))
    assert reader.waited_s > 0
    writer = writer_of(path)
    with pytest.raises(Stopped):
        writer.claim(stop=lambda: True)  # though there are free slots
    assert slot_states(path) == ["EMPTY"] * 4


def test_a_seq_that_cannot_come_is_refused(path: Path) -> None:
    writer, reader = writer_of(path), reader_of(path)
    publish_one(writer)
    reader.done(reader.take(0))
    for seq in (0, 1000):
        with pytest.raises(RingError, match=f"seq {seq} will not come: .* has 1 to 999"):
            reader.take(seq)


def test_a_slot_whose_owner_never_was_is_let_go(path: Path) -> None:
    writer = writer_of(path)
    claimed(writer)
    page = map_file(path / "slot_0000" / "ready.bin", at.READY_BYTES, writable=True)
    at.words(memoryview(page))[at.WORD] += 9 << 16
    until(lambda: claimed(writer).seq == 0)


def test_a_lease_works_once(path: Path) -> None:
    writer, reader = writer_of(path), reader_of(path)
    lease = claimed(writer)
    writer.publish(lease, total_tok=1)
    with pytest.raises(StaleLease):
        writer.publish(lease, total_tok=1)
    with pytest.raises(StaleLease):
        writer.abort(lease)
    taken = reader.take(0)
    reader.done(taken)
    with pytest.raises(StaleLease):
        reader.give_back(taken)
    assert counted(path, "stale_lease") == 3


def test_a_seq_that_was_aborted_is_made_again_first(path: Path) -> None:
    writer, reader = writer_of(path), reader_of(path)
    first, _second = claimed(writer), claimed(writer)
    writer.abort(first)
    again = claimed(writer)
    assert (again.seq, again.slot) == (first.seq, first.slot)
    writer.publish(again, total_tok=fill(again))
    assert holds_payload(reader.take(0))


def test_three_aborts_of_one_seq_end_both_sides_by_name(path: Path) -> None:
    writer, reader = writer_of(path), reader_of(path)
    publish_one(writer)
    for _ in range(3):
        writer.abort(claimed(writer))
    with pytest.raises(Poisoned, match="seq 1 failed 3 times") as caught:
        writer.claim()
    assert caught.value.seq == 1
    reader.done(reader.take(0))  # what is good is still delivered
    with pytest.raises(Poisoned, match="its writer gave it up"):
        reader.take(1)
    with pytest.raises(Poisoned):
        reader.take(2)
    reader.rewind(0)
    assert claimed(writer).seq == 0


def test_a_rewind_refuses_old_leases_and_frees_their_slots(path: Path) -> None:
    writer, reader = writer_of(path), reader_of(path)
    publish_one(writer)
    old_read, old_write = reader.take(0), claimed(writer)
    reader.rewind(0)
    assert writer.publish(old_write, total_tok=1) is False
    assert reader.done(old_read) is False
    assert slot_states(path) == ["EMPTY"] * 4
    assert counted(path, "refused_epoch") == 2
    assert claimed(writer).seq == 0


def test_a_trainer_whose_ring_was_rewound_by_another_is_refused(path: Path) -> None:
    old, new = reader_of(path, "trainer_0"), reader_of(path, "trainer_1")
    old.rewind(0)
    epoch = new.rewind(0)
    with pytest.raises(StaleLease):
        old.take(0)
    with pytest.raises(StaleLease):
        old.close_run()
    old.follow(epoch)
    old.close_run()


def test_a_rewind_past_the_end_is_refused(path: Path) -> None:
    with pytest.raises(RingError, match="the run has 1000 slots"):
        reader_of(path).rewind(1001)


def test_who_leaves_lets_go(path: Path) -> None:
    writer, reader = writer_of(path), reader_of(path)
    publish_one(writer)
    reader.take(0)
    claimed(writer)
    reader.leave()
    writer.leave()
    writer.leave()
    assert slot_states(path) == ["READY", "REDO", "EMPTY", "EMPTY"]
    with pytest.raises(RingError, match="left"):
        writer.beat()
    with pytest.raises(RingError, match="left"):
        writer.claim()


def test_a_name_joins_once_at_a_time(path: Path) -> None:
    writer = writer_of(path)
    with pytest.raises(RingBusy, match=f"target_0 is already joined.*{os.getpid()}"):
        writer_of(path)
    writer.leave()
    writer_of(path).leave()


def test_thirty_two_parties_and_no_more(path: Path) -> None:
    parties = [reader_of(path, f"r{i}") for i in range(32)]
    with pytest.raises(RingError, match="all 32 party records"):
        reader_of(path, "one_more")
    parties[5].leave()
    assert reader_of(path, "one_more").id == 5


@pytest.mark.parametrize("name", ["", "seventeen_letters"])
def test_a_name_that_does_not_fit_is_refused(path: Path, name: str) -> None:
    with pytest.raises(RingError, match="1 to 16 bytes"):
        writer_of(path, name)


# ---------------------------------------------------------------- sums


def corrupt(path: Path, slot: int, field: str, offset: int) -> None:
    page = map_file(
        path / f"slot_{slot:04d}" / f"{field}.bin",
        next(f.nbytes for f in FIELDS if f.name == field),
        writable=True,
    )
    page[offset] ^= 0x40


@pytest.mark.parametrize("field", [f.name for f in FIELDS])
def test_a_slot_with_wrong_sums_is_made_again_and_never_delivered(path: Path, field: str) -> None:
    writer, reader = writer_of(path), reader_of(path)
    publish_one(writer)
    corrupt(path, 0, field, 0)
    got: list[ReadLease] = []
    taker = threading.Thread(target=lambda: got.append(reader.take(0)))
    taker.start()
    until(lambda: slot_states(path)[0] == "REDO")
    publish_one(writer)
    taker.join()
    assert holds_payload(got[0])
    assert counted(path, "bad_sum") == 1


def test_sums_cover_the_valid_prefix_only(path: Path) -> None:
    writer, reader = writer_of(path), reader_of(path)
    publish_one(writer)
    assert tokens(0) == 1
    corrupt(path, 0, "ids", 8)  # the second token
    assert holds_payload(reader.take(0))


def test_sums_can_be_off_on_either_side(path: Path) -> None:
    writer, reader = writer_of(path, verify=False), reader_of(path)
    publish_one(writer)
    corrupt(path, 0, "ids", 0)
    lease = reader.take(0)
    assert lease.sums == ()
    blind = reader_of(path, "trainer_1", verify=False)
    publish_one(writer_of(path, "target_1"))
    corrupt(path, 1, "ids", 0)
    assert len(blind.take(1).sums) == len(FIELDS)


def test_sums_may_come_from_the_device(path: Path) -> None:
    writer, reader = writer_of(path), reader_of(path, verify=False)
    lease = claimed(writer)
    writer.publish(lease, total_tok=fill(lease), sums=[5, 2**64 - 1])
    taken = reader.take(0)
    assert taken.sums == (5, 2**64 - 1)
    assert reader.reject(taken)
    assert slot_states(path)[0] == "REDO"


# ---------------------------------------------------------------- processes


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


# ---------------------------------------------------------------- waiting


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
