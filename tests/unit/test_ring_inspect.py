"""The picture of a ring: what it shows, and that taking it changes and blocks nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rings import FIELDS, T, fill, hear, new_path, new_ring, spawn, tokens

from shm_ring import RingError, RingMissing, RingReader, RingWriter, destroy, rates, snapshot
from shm_ring import layout as at
from shm_ring.locks import Control, LockFile
from shm_ring.segment import map_file


@pytest.fixture
def path() -> Iterator[Path]:
    path = new_ring(new_path(), slots=5, end_seq=40, run_name="seen")
    yield path
    destroy(path, force=True)


def set_meta(path: Path, word: int, value: int) -> None:
    at.words(memoryview(map_file(path / "meta.bin", at.META_BYTES, writable=True)))[word] = value


def publish(writer: RingWriter, lens: tuple[int, ...] = ()) -> int:
    lease = writer.claim()
    assert lease is not None
    total = fill(lease)
    lease.array("lens")[:] = 0
    lease.array("lens")[: len(lens)] = lens
    writer.publish(lease, total_tok=total)
    return lease.seq


def test_a_fresh_ring(path: Path) -> None:
    view = snapshot(path)
    assert (view.path, view.run_name, view.head, view.tail, view.end_seq) == (
        str(path),
        "seen",
        0,
        0,
        40,
    )
    assert (view.epoch, view.settled, view.base_seq, view.closed) == (1, 1, 0, False)
    assert [slot.state for slot in view.slots] == ["EMPTY"] * 5
    assert view.parties == [] and view.anomalies == {} and view.owner_alive
    assert view.slot_bytes == sum(field.nbytes for field in FIELDS)
    assert (view.backlog, view.oldest_ready_s, view.lengths) == (0, None, {})


def test_every_state_of_a_slot_is_shown(path: Path) -> None:
    writer, reader = RingWriter(path, "target_0"), RingReader(path, "trainer_0")
    reader.rewind(0)
    for _ in range(3):
        publish(writer)
    reader.done(reader.take(0))
    reader.take(1)
    lease, _ = writer.claim(), writer.claim()
    assert lease is not None
    writer.abort(lease)
    view = snapshot(path)
    assert [(s.index, s.state, s.seq, s.owner) for s in view.slots] == [
        (0, "CONSUMED", None, None),
        (1, "READING", 1, reader.id),
        (2, "READY", 2, None),
        (3, "REDO", 3, None),
        (4, "WRITING", 4, writer.id),
    ]
    assert [s.total_tok for s in view.slots] == [None, tokens(1), tokens(2), None, None]
    assert (view.slots[3].failures, view.slots[3].last_failure) == (1, "its writer gave it up")
    assert view.slots[1].deliveries == 1
    assert all(0 <= s.age_s < 60 for s in view.slots)
    assert (view.head, view.tail, view.backlog) == (5, 1, 1)
    assert view.oldest_ready_s == view.slots[2].age_s
    assert list(view.anomalies) == ["aborted"]
    assert view.counters["published"][0] == 3 and view.counters["acknowledged"][0] == 1


def test_every_status_of_a_party_is_shown(path: Path) -> None:
    RingWriter(path, "target_0").leave()
    keeper = spawn("hold", path, "target_1", 0)
    assert hear(keeper)[0] == "holds"
    reader = RingReader(path, "trainer_0")
    keeper.kill()
    keeper.communicate()
    late = RingReader(path, "trainer_1")
    set_meta(path, at.SUSPECT_NS, 60 * 10**9)
    word = (at.PARTY_AT + at.PARTY_BYTES * late.id) // 8 + at.P_HEARTBEAT
    set_meta(path, word, 1)
    shown = {p.name: (p.role, p.status) for p in snapshot(path).parties}
    assert shown == {
        "target_0": ("writer", "exited"),
        "target_1": ("writer", "dead"),
        "trainer_0": ("reader", "alive"),
        "trainer_1": ("reader", "suspect"),
    }
    reader.leave()


def test_what_parties_did_and_the_rates_between_two_pictures(path: Path) -> None:
    writer, reader = RingWriter(path, "target_0"), RingReader(path, "trainer_0")
    reader.rewind(0)
    before = snapshot(path)
    for seq in range(4):
        publish(writer)
        if seq < 3:
            reader.done(reader.take(seq))
    after = snapshot(path)
    token_bytes = 6 * 2 + 2 * 2 + 8 + 1 + 8
    slot_bytes = 4 * 8 + 8
    for party, slots in ((after.parties[0], 4), (after.parties[1], 3)):
        total = sum(tokens(seq) for seq in range(slots))
        assert (party.items, party.tokens) == (slots, total)
        assert party.bytes == slots * slot_bytes + total * token_bytes
    span_s = after.time_s - before.time_s
    flow = rates(before, after)
    assert flow["writer"].slots_per_s == pytest.approx(4 / span_s)
    assert flow["reader"].tok_per_s == pytest.approx(sum(map(tokens, range(3))) / span_s)
    assert flow["writer"].gb_per_s == pytest.approx(after.parties[0].bytes / span_s / 1e9)
    assert 0 <= flow["reader"].waiting <= 1
    with pytest.raises(RingError):
        rates(after, before)


def test_lengths_of_the_documents_in_ready_slots(path: Path) -> None:
    writer = RingWriter(path, "target_0")
    publish(writer, (1, 2, 3, 4))
    publish(writer, (5, 9, T, T + 1))  # the last is no length of a slot of T tokens
    assert snapshot(path).lengths == {1: 1, 2: 1, 4: 2, 8: 1, 16: 1, 32: 1}


def test_the_occupancy_shares_add_up(path: Path) -> None:
    writer = RingWriter(path, "target_0")
    for _ in range(5):
        publish(writer)
    shares = snapshot(path).occupancy
    assert len(shares) == 9 and sum(shares) == pytest.approx(1)


def test_it_is_json(path: Path) -> None:
    publish(RingWriter(path, "target_0"), (3,))
    shown = json.loads(json.dumps(snapshot(path).to_json()))
    assert shown["slots"][0]["state"] == "READY"
    assert shown["parties"][0]["name"] == "target_0"
    assert shown["backlog"] == 1 and shown["lengths"] == {"4": 1}


def test_looking_changes_nothing_and_waits_for_nobody(path: Path) -> None:
    publish(RingWriter(path, "target_0"))
    files = sorted(path.rglob("*.bin"))
    before = [(file.read_bytes(), file.stat().st_mtime_ns) for file in files]
    other = LockFile(path / "meta.bin")
    with Control(other, at.words(bytearray(at.META_BYTES))):
        assert snapshot(path).backlog == 1
    assert [(file.read_bytes(), file.stat().st_mtime_ns) for file in files] == before


def test_a_file_that_goes_while_we_look_is_an_error_of_the_ring(path: Path) -> None:
    """As in a ring that is removed meanwhile: a trainer that looked must still save."""
    writer = RingWriter(path, "target_0")
    lease = writer.claim()
    assert lease is not None
    writer.publish(lease, total_tok=fill(lease))
    (path / f"slot_{lease.slot:04d}" / "lens.bin").unlink()
    with pytest.raises(RingError, match=r"lens\.bin"):
        snapshot(path)


def test_nothing_there(path: Path) -> None:
    with pytest.raises(RingMissing, match="no ring at"):
        snapshot(path / "nothing")


@given(seed=st.integers(0, 2**32), count=st.integers(1, 60), whole=st.booleans())
def test_garbage_is_an_error_or_a_picture_and_never_hangs_a_party(
    garbage_ring: Path, seed: int, count: int, whole: bool
) -> None:
    """In meta.bin and ready.bin; the picture is for looking at, so it shows unknown states."""
    spoil(garbage_ring, random.Random(seed), count, whole)
    with suppress(RingError):
        json.dumps(snapshot(garbage_ring).to_json())
    with suppress(RingError):
        reader = RingReader(garbage_ring, "trainer_0")
        reader.take(0, stop=lambda: True)
    with suppress(RingError):
        writer = RingWriter(garbage_ring, "target_1")
        writer.claim(stop=lambda: True)


def spoil(garbage_ring: Path, chance: random.Random, count: int, whole: bool) -> None:
    """Random bytes everywhere but in ring_id, which names the semaphores."""
    for name in ("meta.bin", "slot_0000/ready.bin", "slot_0001/ready.bin"):
        good = (garbage_ring / f"{name}.good").read_bytes()
        page = bytearray(chance.randbytes(4096) if whole and chance.random() < 0.3 else good)
        for _ in range(count):
            page[chance.randrange(4096)] = chance.randrange(256)
        page[56:64] = good[56:64]
        (garbage_ring / name).write_bytes(page)


@pytest.fixture(scope="module")
def garbage_ring() -> Iterator[Path]:
    path = new_ring(new_path(), slots=2)
    writer = RingWriter(path, "target_0")
    publish(writer, (3, 4))
    writer.claim()
    for file in list(path.rglob("*.bin")):
        if file.name in ("meta.bin", "ready.bin"):
            file.with_name(f"{file.name}.good").write_bytes(file.read_bytes())
    yield path
    for file in path.rglob("*.good"):
        file.with_name(file.stem).write_bytes(file.read_bytes())
        file.unlink()
    destroy(path, force=True)
