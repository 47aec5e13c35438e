"""`status`: what it says of a real ring in each condition, and its exit code."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash.complete import write_marker
from dflash.config import parse_config
from launcher import status as status_module
from launcher.rundir import ROOT, RunDir
from launcher.status import BROKEN, DEGRADED, NOTHING, OK, Place, look, ring_path, status_command
from launcher.status_text import brief_line, status_text
from shm_ring import RingMissing, RingReader, RingWriter, create, destroy, hidden_state_fields

FIELDS = hidden_state_fields(
    max_tokens=16, max_docs=2, taps_width=4, hidden=4, dtype="f32", vlh=False
)
METRICS = {"step": 12, "steps": 40, "loss": 2.0, "tau_anchor": 1.5, "eta_s": 30.0}


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "ring"
    create(path, FIELDS, 4, end_seq=10, run_name="r")
    yield path
    if path.exists():
        destroy(path, force=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Short pauses, and a working directory without runs."""
    monkeypatch.setattr(status_module, "WINDOW_S", 0.05)
    monkeypatch.setattr(status_module, "WATCH_S", 0.05)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(tmp_path: Path, ring: Path) -> RunDir:
    run = RunDir(tmp_path / "runs" / "r")
    config = parse_config(
        {
            "run": {"name": "r"},
            "data": {"path": "d"},
            "target": {"model": "m"},
            "ring": {"path": str(ring)},
            "train": {"steps": 40},
        },
        "test",
    )
    run.begin_attempt(config, [])
    run.metrics_file.write_text(json.dumps(METRICS) + "\n")
    return run


def publish(writer: RingWriter, tokens: int) -> None:
    lease = writer.claim()
    assert lease is not None
    lease.array("lens")[:] = [tokens, 0]
    writer.publish(lease, total_tok=tokens)


def test_nothing_running_is_one_line_and_code_3(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(status_module, "DEFAULT_RING", tmp_path / "no_ring")
    assert status_command(None, as_json=False, watch=False) == NOTHING
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert status_command("nix", as_json=True, watch=False) == NOTHING
    assert json.loads(capsys.readouterr().out)["state"] == "nothing"


def test_a_run_that_is_not_running_says_how_far_it_is(
    run: RunDir, ring: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    destroy(ring)
    assert status_command("r", as_json=False, watch=False) == NOTHING
    assert "run r is not running: step 0 of 40 is saved" in capsys.readouterr().err


def test_a_damaged_last_checkpoint_is_named_with_its_cure(
    run: RunDir, ring: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    destroy(ring)
    checkpoint = run.checkpoints / "step_00000040"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.pt").write_text("123456789")
    write_marker(checkpoint)
    assert status_command("r", as_json=False, watch=False) == NOTHING
    assert capsys.readouterr().err == "run r is not running: step 40 of 40 is saved\n"
    (checkpoint / "state.pt").write_text("123456788")
    assert status_command("r", as_json=False, watch=False) == NOTHING
    assert capsys.readouterr().err == (
        "run r is not running: step 40 of 40 is saved, but state.pt of step_00000040 is damaged: "
        "`run` again goes on from the newest sound checkpoint\n"
    )


def test_a_run_that_has_no_ring_yet_is_starting(
    run: RunDir, ring: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    destroy(ring)
    with run.lock():
        assert status_command("r", as_json=False, watch=False) == OK
    assert f"run r is starting (pid {os.getpid()})" in capsys.readouterr().out


def test_an_interval_without_a_mean_is_shown(run: RunDir, ring: Path) -> None:
    run.metrics_file.write_text(json.dumps(METRICS | {"loss": None, "tau_anchor": None}) + "\n")
    text = status_text(look(Place(ring, run), 0.01))
    assert "step 12 of 40, loss none, tau_anchor none, ETA 30 s" in text


def test_a_working_ring_is_ok_and_shown_whole(run: RunDir, ring: Path) -> None:
    writer, reader = RingWriter(ring, "target_0"), RingReader(ring, "trainer_0")
    reader.rewind(0)
    publish(writer, 5)
    publish(writer, 9)
    reader.take(0)
    status = look(Place(ring, run), 0.01)
    assert (status.level, status.problems) == (OK, ())
    text = status_text(status)
    assert "run r: ok, step 12 of 40, loss 2.0000, tau_anchor 1.500, ETA 30 s" in text
    assert "head 2, tail 0 of 10 slots; 2 empty, 1 reading, 1 ready" in text
    assert "documents in ready slots, by tokens: up to 16: 1" in text
    slots = [line.split() for line in text.splitlines() if "READ" in line]
    assert ["0", "READING", "0", "5", "1", "trainer_0"] in [words[:6] for words in slots]
    assert ["1", "READY", "1", "9", "1"] in [words[:5] for words in slots]
    assert "target_0" in text and "trainer_0" in text
    assert "\n" not in brief_line(status)
    writer.leave()
    reader.leave()


def test_json_is_one_object_with_everything(
    run: RunDir, ring: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_command("r", as_json=True, watch=False) == OK
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    shown = json.loads(out)
    assert shown["state"] == "ok" and shown["metrics"] == METRICS
    assert shown["ring"]["end_seq"] == 10 and len(shown["ring"]["slots"]) == 4


def test_rates_count_what_happened_between_two_pictures(ring: Path) -> None:
    code = f"""
import time
from shm_ring import RingReader, RingWriter
writer, reader = RingWriter({str(ring)!r}, "target_0"), RingReader({str(ring)!r}, "trainer_0")
reader.rewind(0)
print("up", flush=True)
input()
for seq in range(4):
    writer.publish(writer.claim(), total_tok=10)
reader.done(reader.take(0))
print("done", flush=True)
input()
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdin is not None and child.stdout is not None
    assert child.stdout.readline() == "up\n"
    place = Place(ring, None)
    before = status_module._picture(place)
    child.stdin.write("\n")
    child.stdin.flush()
    assert child.stdout.readline() == "done\n"
    after = status_module._picture(place)
    status = status_module._status(place, before, after)
    span_s = after.time_s - before.time_s
    assert status.target.tok_per_s == pytest.approx(40 / span_s)
    assert status.trainer.slots_per_s == pytest.approx(1 / span_s)
    child.communicate("\n")


def test_a_full_ring_says_that_the_target_waits(ring: Path) -> None:
    code = f"""
from shm_ring import RingWriter
writer = RingWriter({str(ring)!r}, "target_0")
for _ in range(4): writer.publish(writer.claim(), total_tok=1)
print("full", flush=True)
writer.claim()
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "full\n"
    status = look(Place(ring, None), 1.5)
    assert status.target.waiting > 0.25
    assert status.waits.startswith("target waits for the trainer")
    child.kill()
    child.wait()


def test_a_stopped_process_is_named_with_the_command_that_continues_it(ring: Path) -> None:
    code = f"""
import os, signal
from shm_ring import RingReader
reader = RingReader({str(ring)!r}, "trainer_0")
os.kill(os.getpid(), signal.SIGSTOP)
reader.leave()
"""
    child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    while not status_module.is_stopped(child.pid):
        time.sleep(0.01)
    status = look(Place(ring, None), 0.01)
    assert status.level == DEGRADED
    assert f"trainer_0 is stopped, silent for 0.0 s: kill -CONT {child.pid}" in status.problems[0]
    child.send_signal(signal.SIGCONT)
    child.wait()


def test_a_ring_whose_processes_are_all_dead_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "dead"
    code = f"from shm_ring import *; create({str(path)!r}, {FIELDS!r}, 4, end_seq=1, run_name='r')"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    status = look(Place(path, None), 0.01)
    assert status.level == BROKEN
    assert "all its processes are dead" in status_text(status)
    destroy(path)


def test_a_damaged_ring_is_broken_in_one_line(
    ring: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    meta = ring / "meta.bin"
    meta.write_bytes(b"\xff" * 4096)
    assert status_command(str(ring), as_json=False, watch=False) == BROKEN
    assert capsys.readouterr().err.count("\n") == 1
    assert ring_path(str(ring)) == ring


def test_watch_in_a_pipe_gives_lines_until_the_ring_is_gone(
    run: RunDir, ring: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter(range(3))
    real_sleep = time.sleep

    def sleep(span_s: float) -> None:
        real_sleep(0.01)
        if next(looks, None) is None and ring.exists():
            destroy(ring)

    monkeypatch.setattr(status_module.time, "sleep", sleep)
    assert status_command("r", as_json=False, watch=True) == OK
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[-1] == "the ring is gone: the run has ended"
    assert all("head 0 tail 0 of 10" in line for line in lines[:3])


def test_no_ring_has_no_path(tmp_path: Path) -> None:
    with pytest.raises(RingMissing, match="no run and no ring nix"):
        ring_path("nix")


def test_a_gone_process_is_trouble_unless_the_run_is_ending(run: RunDir, ring: Path) -> None:
    other = RingWriter(ring, "target_1")
    code = f"import os, shm_ring; shm_ring.RingWriter({str(ring)!r}, 'target_0'); os._exit(1)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    place = Place(ring, run)
    with run.lock() as lock:
        lock.note("running")
        status = look(place, 0.01)
        assert status.level == DEGRADED and "target_0 (pid " in status.problems[0]
        lock.note("stopping")
        assert look(place, 0.01).level == OK
        assert f"launcher stopping (pid {os.getpid()})" in status_text(look(place, 0.01))
    other.leave()
