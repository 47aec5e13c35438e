"""What `status` shows of a ring that has lived: ages, rates, fullness, lengths, anomalies."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rings import claimed, fill, new_path, new_ring, publish_one, reader_of, set_meta, writer_of

from launcher.status import Place, look
from launcher.status_text import status_text
from shm_ring import destroy, snapshot
from shm_ring import layout as at

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def path() -> Iterator[Path]:
    path = new_ring(new_path(), slots=4, end_seq=10)
    yield path
    if path.exists():
        destroy(path, force=True)


def test_status_shows_age_fullness_lengths_rates_and_anomalies(path: Path) -> None:
    writer, reader = writer_of(path), reader_of(path)
    for tokens in (3, 20):
        lease = claimed(writer)
        fill(lease)
        lease.array("lens")[:] = [tokens, 0, 0, 0]
        writer.publish(lease, total_tok=tokens)
    writer.abort(claimed(writer))
    time.sleep(0.05)
    lease = reader.take(0)
    reader.give_back(lease)
    time.sleep(0.02)
    set_meta(path, at.SUSPECT_NS, 1)
    text = status_text(look(Place(path, None), 0.01))
    (flow,) = (line for line in text.splitlines() if line.startswith("flow:"))
    assert "1 redo" in flow and "2 ready" in flow and "oldest ready" in flow
    heads = next(line.split() for line in text.splitlines() if "slots/s" in line)
    assert heads[:2] == ["slots/s", "tok/s"] and "GB/s" in heads
    assert [w[0] for w in map(str.split, text.splitlines()) if w[:1] in (["target"], ["trainer"])]
    assert "ready slots over time: " in text and "4/8" in text
    assert "documents in ready slots, by tokens: up to 4: 1, up to 32: 1" in text
    rows = [line.split() for line in text.splitlines()]
    assert any(row[:2] == ["aborted", "1"] and "ago" in row for row in rows)
    assert any(row[:2] == ["given_back", "1"] for row in rows)
    assert "target_0 (pid" in text and "shows no sign of life" in text  # suspect, by name
    oldest = snapshot(path).oldest_ready_s
    assert oldest is not None and 0.02 <= oldest < 20
    writer.leave()
    reader.leave()


def test_watch_on_a_terminal_is_one_screen_until_the_ring_is_gone(path: Path) -> None:
    publish_one(writer_of(path))
    ours, theirs = os.openpty()
    command = [sys.executable, str(ROOT / "launch.py"), "status", str(path), "--watch"]
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "50"}
    process = subprocess.Popen(command, stdout=theirs, env=env)
    os.close(theirs)
    shown = ""
    while "slot" not in shown:
        shown += os.read(ours, 65536).decode()
    destroy(path, force=True)
    with pytest.raises(OSError):  # EIO: the process has ended
        while True:
            shown += os.read(ours, 65536).decode()
    os.close(ours)
    assert process.wait() == 0
    assert "\x1b[?1049h" in shown and "\x1b[?1049l" in shown  # its own screen, given back
    assert shown.rstrip().endswith("the ring is gone: the run has ended")
