"""Small rings for tests, and the processes that run on them.

python tests/unit/rings.py write|read|hold PATH NAME ...     what `spawn` starts
"""

from __future__ import annotations

import os
import resource
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import shm_ring
from shm_ring import (
    Field,
    RingReader,
    RingWriter,
    WriteLease,
    create,
    hidden_state_fields,
    snapshot,
)
from shm_ring import layout as at
from shm_ring.remove import owner_lock
from shm_ring.segment import map_file
from shm_ring.state import EMPTY, NOBODY, View, pack_word

T, D = 32, 4
FIELDS = hidden_state_fields(
    max_tokens=T, max_docs=D, taps_width=6, hidden=2, dtype="bf16", vlh=True
)
QUARANTINE_S = 0.05


def new_path() -> Path:
    return Path("/dev/shm") / f"ring_test_{os.getpid()}_{secrets.token_hex(4)}"


def new_ring(path: Path, slots: int = 4, end_seq: int = 1000, run_name: str = "test") -> Path:
    create(path, FIELDS, slots, end_seq=end_seq, run_name=run_name, quarantine_s=QUARANTINE_S)
    return path


def memory_view(slots: int, end_seq: int, *, quarantine_ns: int = 50) -> View:
    """The words of a fresh ring in plain memory, for the pure core."""
    meta = at.words(bytearray(at.META_BYTES))
    meta[at.SLOT_COUNT], meta[at.EPOCH], meta[at.SETTLED] = slots, 1, 1
    meta[at.END_SEQ], meta[at.QUARANTINE_NS] = end_seq, quarantine_ns
    pages = [at.words(bytearray(at.READY_BYTES)) for _ in range(slots)]
    for page in pages:
        page[at.WORD] = pack_word(EMPTY, NOBODY, 0)
    return View(meta, pages, max_tokens=T)


def payload(epoch: int, seq: int, field: Field) -> np.ndarray:
    """Bytes that no other (epoch, seq, field, offset) has: a torn or stale read shows."""
    start = (epoch * 1_000_003 + seq * 7919 + sum(field.name.encode())) % 251
    return ((np.arange(field.nbytes, dtype=np.uint64) * 31 + start) % 251).astype(np.uint8)


def fill(lease: shm_ring.WriteLease) -> int:
    """Every field but total_tok; returns the tokens of this seq."""
    for field in FIELDS:
        if field.name != "total_tok":
            whole = np.frombuffer(lease.buffer(field.name), np.uint8)
            whole[:] = payload(lease.epoch, lease.seq, field)
    return tokens(lease.seq)


def tokens(seq: int) -> int:
    return 1 + seq * 5 % T


def holds_payload(lease: shm_ring.ReadLease) -> bool:
    valid = [(field, field.valid_bytes(lease.total_tok)) for field in FIELDS]
    return lease.total_tok == tokens(lease.seq) and all(
        (
            np.frombuffer(lease.buffer(field.name), np.uint8)[:size]
            == payload(lease.epoch, lease.seq, field)[:size]
        ).all()
        for field, size in valid
        if field.name != "total_tok"
    )


def writer_of(path: Path, name: str = "target_0", **options: bool) -> RingWriter:
    return RingWriter(path, name, fields=FIELDS, **options)


def reader_of(path: Path, name: str = "trainer_0", **options: bool) -> RingReader:
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


def spawn(*argv: object, crash: str = "") -> subprocess.Popen[str]:
    """A process that runs `main` below; `crash` is its crash point. Kill it when the test ends."""
    root = Path(__file__).resolve().parents[2]
    env = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "DFLASH_RING_CRASH": crash}
    return subprocess.Popen(
        [sys.executable, __file__, *map(str, argv)],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def say(*words: object) -> None:
    """One line, in one write: a forked child says something too."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def hear(process: subprocess.Popen[str]) -> list[str]:
    """The words of its next line; [] at its end."""
    assert process.stdout is not None
    return process.stdout.readline().split()


def until(fact: Callable[[], bool], limit_s: float = 20.0) -> None:
    """Waits for something that another process does. A limit so that a failure ends."""
    deadline = time.monotonic() + limit_s
    while not fact():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def write(path: str, name: str) -> None:
    """Fills slots until the run is over."""
    writer = RingWriter(path, name, fields=FIELDS)
    while (lease := writer.claim()) is not None:
        say("claimed", lease.seq)
        writer.publish(lease, total_tok=fill(lease))
    writer.leave()


def hold(path: str, name: str, seq: str) -> None:
    """Claims up to `seq`, publishes what is before it, and keeps that one half written."""
    writer = RingWriter(path, name, fields=FIELDS)
    while (lease := writer.claim()) is not None:
        if lease.seq == int(seq):
            np.frombuffer(lease.buffer("all"), np.uint8)[:100] = 255
            say("holds", lease.slot)
            sys.stdin.read()
        writer.publish(lease, total_tok=fill(lease))


def read(path: str, name: str, epoch: str, first: str, step: str, count: str) -> None:
    """Takes first, first + step, ...; "held" says that a lease is held."""
    reader = RingReader(path, name, fields=FIELDS)
    reader.follow(int(epoch))
    for seq in range(int(first), int(first) + int(step) * int(count), int(step)):
        lease = reader.take(seq)
        assert holds_payload(lease)
        say("took", seq)
        reader.done(lease)
    reader.leave()


def keep(path: str, name: str, epoch: str, seq: str) -> None:
    """Takes one seq and keeps it."""
    reader = RingReader(path, name, fields=FIELDS)
    reader.follow(int(epoch))
    reader.take(int(seq))
    say("keeps", seq)
    sys.stdin.read()


def fork(path: str, name: str) -> None:
    """Holds a claimed slot, and has a forked child that outlives it."""
    writer = RingWriter(path, name, fields=FIELDS)
    assert writer.claim() is not None
    child = os.fork()
    if child == 0:
        try:
            writer.claim()
        except shm_ring.RingError as error:
            say("child", error)
        sys.stdin.read()
        os._exit(0)
    say("holds", child)
    os.waitpid(child, 0)


def limited(path: str, name: str, files: str) -> None:
    """Joins with a hard limit of open files."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(files), int(files)))
    try:
        RingReader(path, name)
    except shm_ring.RingError as error:
        say("refused", error)


def own(path: str, run_name: str) -> None:
    """Creates the ring and stays."""
    try:
        new_ring(Path(path), run_name=run_name)
    except shm_ring.RingBusy as error:
        say("busy", error)
        return
    say("created", run_name)
    sys.stdin.read()


def start_again(path: str, end_seq: str) -> None:
    """Takes over the ring of an ended run."""
    shm_ring.clear_closed(path, int(end_seq))


def produce(path: str, name: str) -> None:
    """Passes all that a writer can pass: an abort, a publish, and one after a pause."""
    writer = RingWriter(path, name, fields=FIELDS)
    writer.abort(claimed(writer))
    publish_one(writer)
    lease = claimed(writer)
    say("holds", lease.seq)
    sys.stdin.readline()
    writer.publish(lease, total_tok=fill(lease))
    writer.leave()


def consume(path: str, name: str) -> None:
    """Passes all that a reader can pass, and ends the run. It needs a writer beside it."""
    reader = RingReader(path, name, fields=FIELDS)
    reader.give_back(reader.take(0))
    reader.reject(reader.take(0))
    reader.done(reader.take(0))
    lease = reader.take(1)
    say("holds", 1)
    sys.stdin.readline()
    reader.done(lease)
    for seq in range(2, reader.end_seq):
        reader.done(reader.take(seq))
    reader.close_run()
    reader.leave()


def start_over(path: str, name: str, base: str) -> None:
    RingReader(path, name, fields=FIELDS).rewind(int(base))


ROLES = {
    f.__name__: f
    for f in (
        write,
        hold,
        read,
        keep,
        fork,
        limited,
        own,
        start_again,
        produce,
        consume,
        start_over,
    )
}


def beside(path: Path) -> list[str]:
    """Everything that bears the ring's name."""
    return sorted(p.name for p in path.parent.glob(f"{path.name}*"))


def disown(path: Path) -> None:
    """As if the process that created the ring had died."""
    owner_lock(path).close()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.stdout.close()


if __name__ == "__main__":
    ROLES[sys.argv[1]](*sys.argv[2:])
