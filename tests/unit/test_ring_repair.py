"""`ring reap` and `ring drain`: a ring set right by hand, from outside."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rings import (
    claimed,
    hear,
    holds_payload,
    new_path,
    publish_one,
    reader_of,
    slot_states,
    spawn,
    until,
    writer_of,
)

from shm_ring import RingBusy, destroy, drain, reap

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def path() -> Iterator[Path]:
    """The ring of a run whose owner is dead."""
    path = new_path()
    owner = spawn("own", path, "dead")
    hear(owner)
    owner.kill()
    owner.communicate()
    yield path
    destroy(path, force=True)


def leave_dead(path: Path, *role: object) -> None:
    process = spawn(role[0], path, *role[1:])
    assert hear(process)
    process.kill()
    process.communicate()


def launch(*argv: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "launch.py"), *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_reap_takes_back_what_the_dead_held(path: Path) -> None:
    leave_dead(path, "hold", "target_0", 1)  # publishes 0, holds 1
    leave_dead(path, "keep", "trainer_0", 1, 0)
    assert slot_states(path)[:2] == ["READING", "QUARANTINE"]  # the second joined, and reaped
    found = reap(path)
    assert (found.died, found.quarantined) == (1, 1) or (found.died, found.slots) == (1, 2)
    until(lambda: reap(path).quarantined == 0)
    assert slot_states(path)[:2] == ["READY", "REDO"]
    done = launch("ring", "reap", path)
    assert (done.returncode, done.stdout) == (0, f"{path}: 0 dead processes, 0 slots changed\n")


def test_reap_leaves_the_living_alone(path: Path) -> None:
    writer = writer_of(path)
    lease = claimed(writer)
    assert reap(path).slots == 0
    assert slot_states(path)[lease.slot] == "WRITING"


def test_drain_empties_the_ring_of_a_dead_run_and_its_poison(path: Path) -> None:
    writer, reader = writer_of(path), reader_of(path)
    publish_one(writer)
    reader.take(0)
    for _ in range(3):
        writer.abort(claimed(writer))
    assert slot_states(path)[:2] == ["READING", "POISON"]
    writer._lock.close()  # as the kernel does
    refused = launch("ring", "drain", path)
    assert refused.returncode == 2
    assert f"trainer_0 is alive as process {os.getpid()}" in refused.stderr
    with pytest.raises(RingBusy, match="trainer_0 is alive"):
        drain(path)
    reader._lock.close()
    assert drain(path) == 2
    assert set(slot_states(path)) == {"EMPTY"}


def test_the_next_run_starts_from_an_empty_ring(path: Path) -> None:
    leave_dead(path, "hold", "target_0", 1)
    leave_dead(path, "keep", "trainer_0", 1, 0)
    done = launch("ring", "drain", path)
    assert (done.returncode, done.stdout) == (0, f"{path}: 2 slots emptied\n")
    assert set(slot_states(path)) == {"EMPTY"}
    reader, writer = reader_of(path), writer_of(path)
    reader.rewind(0)
    assert publish_one(writer) == 0
    assert holds_payload(reader.take(0))
