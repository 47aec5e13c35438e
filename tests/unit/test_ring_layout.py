"""The bytes of a ring, read with offsets and formats written out here by hand."""

from __future__ import annotations

import hashlib
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rings import FIELDS, D, T, fill, memory_view, new_path, new_ring

from shm_ring import (
    Field,
    LayoutMismatch,
    RingError,
    RingReader,
    RingWriter,
    destroy,
    hidden_state_fields,
    ring_bytes,
)
from shm_ring import layout as at
from shm_ring.creation import _meta_bytes


@pytest.fixture
def path() -> Iterator[Path]:
    path = new_ring(new_path(), slots=3, end_seq=77, run_name="bytes")
    yield path
    destroy(path, force=True)


def u64(page: bytes, offset: int) -> int:
    return int(struct.unpack_from("<Q", page, offset)[0])


def test_the_fields_are_the_prescribed_ones() -> None:
    table = [(f.name, f.dtype, f.shape) for f in FIELDS]
    assert table == [
        ("all", "bf16", (1, T, 6)),
        ("vlh", "bf16", (1, T, 2)),
        ("ids", "i64", (1, T)),
        ("lm", "bool", (1, T)),
        ("lens", "i64", (D,)),
        ("pos", "i64", (1, T)),
        ("total_tok", "i64", ()),
    ]
    without = hidden_state_fields(
        max_tokens=8, max_docs=2, taps_width=4, hidden=2, dtype="f32", vlh=False
    )
    assert [f.name for f in without] == ["all", "ids", "lm", "lens", "pos", "total_tok"]
    assert without[0].dtype == "f32" and without[0].nbytes == 8 * 4 * 4


def test_meta_bin_of_a_fresh_ring(path: Path) -> None:
    page = (path / "meta.bin").read_bytes()
    sizes = [T * 6 * 2, T * 2 * 2, T * 8, T, D * 8, T * 8, 8]
    assert len(page) == 4096
    assert struct.unpack_from("<4Q", page) == (0, 0, 3, sum(sizes))
    assert page[32:40] == b"DFLRING\x01" and u64(page, 40) == 1
    table = page[320 : 320 + 7 * 32]
    digest = hashlib.sha256(struct.pack("<QQ", 1, 3) + table).digest()
    assert page[48:56] == digest[:8]
    assert u64(page, 56) != 0  # ring_id
    # epoch, settled, base_seq, end_seq, closed, field count
    assert struct.unpack_from("<6Q", page, 64) == (1, 1, 0, 77, 0, 7)
    # quarantine, suspect, reap and CTRL times in ns
    assert struct.unpack_from("<4Q", page, 112) == (50_000_000, 10**10, 250_000_000, 6 * 10**10)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    assert page[168:184].hex() == boot
    assert page[256:320].rstrip(b"\0") == b"bytes"
    assert table[:32] == struct.pack("<16sBBBx3I", b"all", 1, 3, 1, 1, T, 6)
    assert table[64:96] == struct.pack("<16sBBBx3I", b"ids", 3, 2, 1, 1, T, 0)
    assert table[128:160] == struct.pack("<16sBBBx3I", b"lens", 3, 1, 0, D, 0, 0)
    assert table[192:] == struct.pack("<16sBBBx3I", b"total_tok", 3, 0, 0, 0, 0, 0)
    assert page[1024:3840] == bytes(2816)  # no party, no counter


def test_the_files_of_a_slot(path: Path) -> None:
    assert sorted(p.name for p in path.iterdir()) == [
        "meta.bin",
        "slot_0000",
        "slot_0001",
        "slot_0002",
    ]
    slot = path / "slot_0002"
    sizes = {p.name: p.stat().st_size for p in slot.iterdir()}
    assert sizes == {f"{f.name}.bin": f.nbytes for f in FIELDS} | {"ready.bin": 4096}
    assert {stat.S_IMODE(p.stat().st_mode) for p in path.rglob("*.bin")} == {0o600}
    assert struct.unpack_from("<4Q", (slot / "ready.bin").read_bytes()) == (0xFFFF0000, 0, 0, 0)


def test_ring_bytes_is_what_the_tmpfs_holds(path: Path) -> None:
    blocks = sum(p.stat().st_blocks * 512 for p in path.rglob("*.bin"))
    assert ring_bytes(FIELDS, 3) - 32 * 4096 == blocks  # and a page for each party's semaphore


def test_ready_bin_and_meta_bin_after_each_step(path: Path) -> None:
    writer = RingWriter(path, "target_0", fields=FIELDS)
    reader = RingReader(path, "trainer_0", fields=FIELDS)
    assert reader.rewind(5) == 2
    lease = writer.claim()
    assert lease is not None
    slot = 5 % 3
    ready = path / f"slot_{slot:04d}" / "ready.bin"
    page = ready.read_bytes()
    assert page[:8] == struct.pack("<BBHI", 0, 1, writer.id, 1)  # flag, sub-state, owner, gen
    assert struct.unpack_from("<2Q", page, 8) == (5, 2)  # seq, epoch
    assert struct.unpack_from("<2Q", (path / "meta.bin").read_bytes()) == (6, 5)

    total = fill(lease)
    writer.publish(lease, total_tok=total)
    page = ready.read_bytes()
    assert page[:8] == struct.pack("<BBHI", 1, 0, 0xFFFF, 1)
    assert struct.unpack_from("<4Q", page, 64) == (1, 5, 2, total)  # seal: gen, seq, epoch, tokens
    assert u64(page, 152) == len(FIELDS)
    for index, field in enumerate(FIELDS):
        data = (path / f"slot_{slot:04d}" / f"{field.name}.bin").read_bytes()
        rows = field.nbytes // T * total if field.shape[:1] == (1,) else field.nbytes
        prefix = data[:rows] + bytes(-rows % 8)
        by_hand = sum(struct.unpack(f"<{len(prefix) // 8}q", prefix)) % 2**64
        assert u64(page, 160 + 8 * index) == by_hand

    taken = reader.take(5)
    assert ready.read_bytes()[:8] == struct.pack("<BBHI", 1, 1, reader.id, 1)
    reader.done(taken)
    assert ready.read_bytes()[:8] == struct.pack("<BBHI", 2, 0, 0xFFFF, 1)
    assert struct.unpack_from("<2Q", (path / "meta.bin").read_bytes()) == (6, 6)
    writer.leave()
    reader.leave()


def test_a_party_record(path: Path) -> None:
    writer = RingWriter(path, "target_0", fields=FIELDS)
    lease = writer.claim()
    assert lease is not None
    writer.publish(lease, total_tok=fill(lease))
    page = (path / "meta.bin").read_bytes()
    record = page[1024 + 64 * writer.id :][:64]
    state, role, waits, pid = struct.unpack_from("<BBBxI", record)
    own = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    assert (state, role, waits, pid) == (1, 1, 0, int(Path("/proc/self").readlink().name))
    assert struct.unpack_from("<I", record, 8)[0] == int(own[19]) % 2**32
    assert struct.unpack_from("<I", record, 28)[0] == 1  # items
    assert u64(record, 40) == lease.seq * 5 % T + 1  # tokens
    assert record[48:].rstrip(b"\0") == b"target_0"
    published, joined = 3072, 3072 + 4 * 24
    assert u64(page, published) == u64(page, joined) == 1
    assert u64(page, published + 8) == u64(page, published + 16) > 0
    writer.leave()
    assert (path / "meta.bin").read_bytes()[1024 + 64 * writer.id] == 2


def test_bf16_comes_as_uint16_and_scalars_as_zero_dimensional(path: Path) -> None:
    writer = RingWriter(path, "target_0", fields=FIELDS)
    lease = writer.claim()
    assert lease is not None
    shapes = {f.name: (lease.array(f.name).dtype, lease.array(f.name).shape) for f in FIELDS}
    assert shapes["all"] == (np.uint16, (1, T, 6))
    assert shapes["lm"] == (np.bool_, (1, T))
    assert shapes["total_tok"] == (np.int64, ())
    writer.leave()


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"max_tokens": T * 2}, "all bf16 [1, 64, 6]"),
        ({"dtype": "f32"}, "all f32 [1, 32, 6]"),
        ({"vlh": False}, "vlh bf16 [1, 32, 2]"),
        ({"max_docs": 9}, "lens i64 [9]"),
    ],
)
def test_another_table_is_refused_by_name(path: Path, other: dict, named: str) -> None:
    mine = {
        "max_tokens": T,
        "max_docs": D,
        "taps_width": 6,
        "hidden": 2,
        "dtype": "bf16",
        "vlh": True,
    }
    with pytest.raises(LayoutMismatch) as caught:
        RingWriter(path, "target_0", fields=hidden_state_fields(**(mine | other)))
    assert named in str(caught.value) and "bytes" in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        (),
        (Field("a", "i64", (2,)), Field("a", "i64", (2,))),
        (Field("ready", "i64", (2,)),),
        (Field("../a", "i64", (2,)),),
        (Field("a", "i8", (2,)),),
        (Field("a", "i64", (0,)),),
        (Field("a", "i64", (1, 2, 3, 4)),),
        (Field("a", "i64", (4,), per_token=True),),
        (Field("a", "i64", (1, 4), per_token=True), Field("b", "i64", (1, 5), per_token=True)),
    ],
)
def test_a_table_that_no_ring_can_have_is_refused(fields: tuple[Field, ...]) -> None:
    with pytest.raises(RingError):
        at.check_fields(fields)


META = _meta_bytes(FIELDS, 3, 77, "bytes", 0.05)


@given(st.binary(max_size=400))
def test_random_bytes_are_no_header(start: bytes) -> None:
    for page in (start, start.ljust(4096, b"\0"), start.rjust(4096, b"\xff")):
        with pytest.raises(RingError):
            at.parse_header(page, "here")


@given(st.lists(st.tuples(st.integers(0, 1023), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_changed_header_is_refused_or_means_the_same(changes: list[tuple[int, int]]) -> None:
    page = bytearray(META)
    for offset, value in changes:
        page[offset] = value
    try:
        header = at.parse_header(bytes(page), "here")
    except RingError:
        return
    assert (header.slots, header.fields) == (3, FIELDS)


def test_a_view_in_memory_is_like_the_file() -> None:
    """The pure core's tests start from what create() writes."""
    made, file = memory_view(3, 77, quarantine_ns=50_000_000).meta, at.words(META)
    words = (at.HEAD, at.TAIL, at.SLOT_COUNT, at.EPOCH, at.SETTLED, at.END_SEQ, at.QUARANTINE_NS)
    assert [made[w] for w in words] == [file[w] for w in words]
