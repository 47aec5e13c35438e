"""Writers and readers on a real ring, one call after the other: leases, ends, refusals, sums."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rings import (
    FIELDS,
    claimed,
    counted,
    fill,
    holds_payload,
    new_path,
    new_ring,
    publish_one,
    reader_of,
    slot_states,
    tokens,
    until,
    writer_of,
)

from shm_ring import (
    Poisoned,
    ReadLease,
    RingBusy,
    RingError,
    StaleLease,
    Stopped,
    destroy,
)
from shm_ring import layout as at
from shm_ring.segment import map_file


@pytest.fixture
def path() -> Iterator[Path]:
    path = new_ring(new_path())
    yield path
    if path.exists():
        destroy(path, force=True)


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
