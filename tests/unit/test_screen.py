"""What a user reads: numbers, who waits, the line of an interval; and a terminal that goes away."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.rundir import ROOT
from launcher.screen import Screen, metrics_line, seconds, size, table, who_waits

ROW = {
    "step": 40, "steps": 240, "seq": 9, "loss": 3.21987, "tau_anchor": 1.2194, "accuracy": 0.21349,
    "tok_per_s": 1234.6, "lr": 1e-3, "grad_norm": 0.5, "ready_slots": 6, "slots": 8,
    "trainer_wait_s": 0.0, "target_wait_s": 7.6, "interval_s": 20.0, "eta_s": 250.0, "time": 0.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (59.4, "59 s"), (250, "4m10s"), (3599.6, "1h00m")],
)
def test_seconds_in_words(value: float, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (189 << 20, "189 MiB"), (3 << 29, "1.5 GiB")],
)
def test_bytes_in_words(value: float, text: str) -> None:
    assert size(value) == text


def test_the_side_that_waits_is_named_with_its_share() -> None:
    assert who_waits(0.38, 0.1) == "trainer waits for the target (38%)"
    assert who_waits(0.1, 0.995) == "target waits for the trainer (100%)"
    assert who_waits(0.01, 0.019) == "nobody waits"
    assert who_waits(0.0, 1.0, made_all=True) == "target is done"


def test_one_line_says_it_all() -> None:
    assert metrics_line(ROW) == (
        "step  40/240  loss 3.2199  tau_anchor 1.219  accuracy 21.3%  1,235 tok/s"
        "  ring 6/8 ready  target waits for the trainer (38%)  ETA 4m10s"
    )


def test_a_step_that_was_evaluated_shows_what_decoding_would_accept() -> None:
    assert "tau_anchor 1.219  tau_walk 1.337  accuracy" in metrics_line(ROW | {"tau_walk": 1.3374})


def test_steps_that_changed_nothing_are_told() -> None:
    row = ROW | {"skipped": 3.0, "loss": None, "tau_anchor": None, "accuracy": None}
    assert "loss none  tau_anchor none  accuracy none  skipped 3 of its steps" in metrics_line(row)
    assert "skipped" not in metrics_line(ROW | {"skipped": 0.0})


def test_columns_line_up() -> None:
    assert table([["a", "bb"], ["ccc", "d"]], indent="> ") == ["> a    bb", "> ccc  d"]


def test_everything_said_is_kept_in_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = Screen(tmp_path / "launch.log")
    screen.line("out [bold]")
    screen.progress(1, 2)  # no terminal: no bar
    screen.error("err")
    screen.close()
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("out [bold]\n", "err\n")
    assert (tmp_path / "launch.log").read_text() == "out [bold]\nerr\n"


def test_a_closed_pipe_does_not_end_a_run(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from launcher.screen import Screen
screen = Screen(Path({str(tmp_path / "log")!r}))
for i in range(3): screen.line(f"line {{i}}")
screen.close()
"""
    read, write = os.pipe()
    os.close(read)
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "log").read_text() == "line 0\nline 1\nline 2\n"


def test_a_terminal_has_a_bar_under_the_lines(tmp_path: Path) -> None:
    code = """
from launcher.screen import Screen
screen = Screen()
screen.progress(1, 4)
screen.line("a [line] of text")
screen.progress(4, 4)
screen.close()
"""
    ours, theirs = os.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=theirs, env=env, check=True)
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    os.close(theirs)
    assert "1/4" in shown and "4/4" in shown and "a [line] of text" in shown
