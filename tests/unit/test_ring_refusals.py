"""What is refused in one line: no room, too few files, wrong or damaged rings."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rings import FIELDS, beside, disown, end, hear, new_path, new_ring, spawn

from shm_ring import (
    LayoutMismatch,
    NoSpace,
    RingError,
    RingMissing,
    RingReader,
    RingWriter,
    clear_closed,
    create,
    destroy,
    free_bytes,
    ring_bytes,
    snapshot,
    space,
    sweep,
)
from shm_ring import layout as at
from shm_ring.segment import map_file

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a tmpfs, which needs root")


@pytest.fixture
def path() -> Iterator[Path]:
    path = new_path()
    yield path
    sweep(path)
    if path.is_dir() and any(path.iterdir()):
        destroy(path, force=True)
    assert beside(path) == []


# ---------------------------------------------------------------- room


def test_too_many_slots_are_refused_with_the_number_that_fits(path: Path, monkeypatch: Any) -> None:
    free = ring_bytes(FIELDS, 7)
    monkeypatch.setattr(space, "free_bytes", lambda _: (free, None))
    with pytest.raises(NoSpace, match=r"8 slots need .*ring\.slots=7 would fit.*--shm-size"):
        new_ring(path, slots=8)
    assert beside(path) == []
    new_ring(path, slots=7)


def test_the_memory_limit_of_the_container_counts_too(path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(space, "free_bytes", lambda _: (10**12, ring_bytes(FIELDS, 2)))
    with pytest.raises(NoSpace, match=r"container leaves .*ring\.slots=2 would fit.*--memory"):
        new_ring(path, slots=3)


CGROUP_CASES = {
    "v2": (
        "0::/a/b\n",
        {
            "a/memory.max": "1000",
            "a/memory.current": "700",
            "a/memory.stat": "inactive_file 30\nactive_file 20\nshmem 5\n",
            "a/b/memory.max": "max",
            "a/b/memory.current": "600",
            "a/b/memory.stat": "inactive_file 1\n",
        },
        350,
    ),
    "v1": (
        "4:cpu:/x\n3:memory:/a\n0::/\n",
        {
            "memory/a/memory.limit_in_bytes": "9223372036854771712",
            "memory/a/memory.usage_in_bytes": "5",
            "memory/a/memory.stat": "total_inactive_file 1\n",
            "memory/memory.limit_in_bytes": "500",
            "memory/memory.usage_in_bytes": "450",
            "memory/memory.stat": "total_inactive_file 10\ntotal_active_file 5\n",
        },
        65,
    ),
    "over": (
        "0::/\n",
        {"memory.max": "10", "memory.current": "90", "memory.stat": "inactive_file 1\n"},
        0,
    ),
    "none": ("0::/\n", {}, None),
}


@pytest.mark.parametrize("case", CGROUP_CASES)
def test_cgroup_headroom(case: str, tmp_path: Path, monkeypatch: Any) -> None:
    mine, files, headroom = CGROUP_CASES[case]
    (tmp_path / "mine").write_text(mine)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(space, "CGROUPS", tmp_path)
    monkeypatch.setattr(space, "OWN_CGROUP", tmp_path / "mine")
    assert space.cgroup_headroom() == headroom


def test_free_bytes_of_a_path_that_does_not_exist_yet(path: Path) -> None:
    stat = os.statvfs("/dev/shm")
    assert abs(free_bytes(path / "deeper")[0] - stat.f_bavail * stat.f_frsize) < 2**28


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", tmp_path], check=True)
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


@ROOT_ONLY
def test_a_tmpfs_of_16_mb_is_refused_before_and_while_it_fills(
    small_tmpfs: Path, monkeypatch: Any
) -> None:
    path = small_tmpfs / "ring"
    slots = 16 * 2**20 // at.slot_bytes(FIELDS) + 1
    with pytest.raises(NoSpace, match=r"ring\.slots=\d+ would fit"):
        new_ring(path, slots=slots)
    monkeypatch.setattr("shm_ring.creation.require_space", lambda *_: None)
    with pytest.raises(NoSpace, match="no space left"):
        new_ring(path, slots=slots)
    assert list(small_tmpfs.iterdir()) == []
    stat = os.statvfs(small_tmpfs)
    assert stat.f_bfree == stat.f_blocks


@ROOT_ONLY
def test_a_read_only_file_system_is_one_line(small_tmpfs: Path) -> None:
    path = new_ring(small_tmpfs / "ring")
    disown(path)
    subprocess.run(["mount", "-o", "remount,ro", small_tmpfs], check=True)
    for attempt in (
        lambda: new_ring(small_tmpfs / "other"),
        lambda: RingReader(path, "trainer_0"),
        lambda: destroy(path),
    ):
        with pytest.raises(RingError, match="Read-only file system"):
            attempt()
    assert snapshot(path).slot_count == 4


def test_too_few_open_files_are_one_line(path: Path) -> None:
    new_ring(path, slots=8)
    process = spawn("limited", path, "trainer_0", 100)
    answer = hear(process)
    assert answer[0] == "refused" and "the limit is 100" in " ".join(answer)
    end(process)


# ---------------------------------------------------------------- what is refused at attaching


def set_word(path: Path, word: int, value: int) -> None:
    at.words(memoryview(map_file(path / "meta.bin", at.META_BYTES, writable=True)))[word] = value


@pytest.mark.parametrize(
    ("word", "value", "says"),
    [
        (at.MAGIC_WORD, 5, "no ring's magic number"),
        (at.VERSION_WORD, 9, "layout version 9, this program 1"),
        (at.LAYOUT_HASH, 5, "damaged: its layout hash"),
        (at.SLOT_COUNT, 5000, "damaged: 5000 slots"),
        (at.BOOT_ID, 5, "an earlier boot of this machine"),
        (at.EPOCH, 7, "damaged: epoch 7, settled 1"),
        (at.HEAD, 5000, "damaged: head 5000, end 1000"),
    ],
)
def test_a_changed_meta_bin_is_one_line(path: Path, word: int, value: int, says: str) -> None:
    new_ring(path)
    set_word(path, word, value)
    with pytest.raises(RingError, match=says):
        RingWriter(path, "target_0", fields=FIELDS)


def test_no_ring_is_one_line(path: Path) -> None:
    for attempt in (RingWriter, RingReader):
        with pytest.raises(RingMissing, match=f"no ring at {path}"):
            attempt(path, "target_0")
    with pytest.raises(RingMissing):
        clear_closed(path, 5)


def test_missing_and_short_files_are_named(path: Path) -> None:
    new_ring(path)
    with (path / "slot_0001" / "ids.bin").open("r+b") as file:
        file.truncate(8)
    with pytest.raises(RingError, match=r"slot_0001/ids\.bin is damaged: 8 bytes, not 256"):
        RingWriter(path, "target_0")
    (path / "slot_0000" / "lm.bin").unlink()
    with pytest.raises(RingError, match=r"slot_0000/lm\.bin cannot be opened"):
        RingWriter(path, "target_0")


def test_an_unreadable_ring_is_destroyed_only_by_force(path: Path) -> None:
    new_ring(path)
    disown(path)
    set_word(path, at.MAGIC_WORD, 5)
    for attempt in (lambda: destroy(path), lambda: new_ring(path)):
        with pytest.raises(LayoutMismatch, match="destroy with force"):
            attempt()
    destroy(path, force=True)
    assert beside(path) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"slots": 0},
        {"slots": 4097},
        {"end_seq": -1},
        {"run_name": "x" * 65},
        {"quarantine_s": -1},
        {"fields": ()},
    ],
)
def test_wrong_arguments_are_refused(path: Path, wrong: dict[str, Any]) -> None:
    good = {"fields": FIELDS, "slots": 4, "end_seq": 9, "run_name": "x"}
    with pytest.raises(RingError):
        create(path, **(good | wrong))


def test_a_missing_parent_directory_is_named(path: Path) -> None:
    with pytest.raises(RingError, match=f"{path} is no directory"):
        new_ring(path / "ring")


def test_ownership_ends_with_the_lock(path: Path) -> None:
    new_ring(path)
    assert snapshot(path).owner_alive
    disown(path)
    assert not snapshot(path).owner_alive
