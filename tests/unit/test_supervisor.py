"""Supervision with fake halves: what each kind of end leads to, and that nothing is left behind.

The fakes are `python -c` scripts. They speak to the launcher as the real halves do: through the
pipe whose number the environment carries, by exit codes, and (where it matters) through a ring.
"""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dflash.config import Config, parse_config
from launcher.process import Child, Program, StopSignals
from launcher.rundir import ROOT
from launcher.screen import Screen
from launcher.supervisor import MetricsTail, Supervisor
from shm_ring import create, destroy, hidden_state_fields

FIELDS = hidden_state_fields(
    max_tokens=16, max_docs=2, taps_width=4, hidden=4, dtype="f32", vlh=False
)
PRELUDE = """
import os, signal, sys, time
from pathlib import Path
def say(line): os.write(int(os.environ["DFLASH_RING_NOTIFY_FD"]), (line + "\\n").encode())
def sleep_forever():
    while True: time.sleep(60)
"""
PATIENT_TARGET = 'say("READY target"); sleep_forever()'
SAVING_TRAINER = """
def save(*_):
    Path("saved").write_text("yes"); os._exit(3)
signal.signal(signal.SIGTERM, save)
say("READY trainer")
"""


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "ring"
    create(path, FIELDS, 4, end_seq=2, run_name="r")
    yield path
    destroy(path)


@pytest.fixture
def supervise(tmp_path: Path, ring: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run a fake trainer and one fake target worker under a real Supervisor."""
    monkeypatch.chdir(tmp_path)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup and some CI runners start us without it

    def run(trainer: str, target: str = PATIENT_TARGET, **limits: float) -> int:
        with StopSignals() as signals:
            supervisor = Supervisor(
                program(tmp_path, "trainer_0", trainer),
                [program(tmp_path, "target_0", target)],
                config_of(ring, limits),
                MetricsTail(tmp_path / "metrics.jsonl", after_step=10),
                Screen(),
                signals,
            )
            return supervisor.run()

    return run


def config_of(ring: Path, limits: dict[str, float]) -> Config:
    return parse_config(
        {
            "run": {"name": "r"},
            "data": {"path": "d"},
            "target": {"model": "m"},
            "ring": {"path": str(ring), "slots": 4, "max_tokens": 32},
            "train": {"steps": 20},
            "supervise": {"ready_s": 20, "stop_s": 20, "stall_s": 20} | limits,
        },
        "test",
    )


def program(tmp_path: Path, name: str, source: str) -> Program:
    argv = (sys.executable, "-c", PRELUDE + textwrap.dedent(source))
    return Program(name, argv, tmp_path / f"{name}.log", {"PYTHONPATH": str(ROOT)})


def is_gone(pid: int) -> bool:
    """Dead, reaped or not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


def until_gone(pid: int) -> None:
    """A killed process may take a moment."""
    deadline = time.monotonic() + 20
    while not is_gone(pid):
        assert time.monotonic() < deadline, "it outlives its parent"
        time.sleep(0.02)


def test_a_run_to_the_end_shows_its_lines_and_exits_0(
    supervise: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    row = {
        "steps": 20, "seq": 1, "loss": 2.5, "tau_anchor": 1.25, "accuracy": 0.5,
        "tok_per_s": 1234.4, "lr": 1e-3, "grad_norm": 1.0, "ready_slots": 3, "slots": 4,
        "trainer_wait_s": 0.5, "target_wait_s": 0.0, "interval_s": 2.0, "eta_s": 65, "time": 0,
    }  # fmt: skip
    lines = "".join(json.dumps({"step": step} | row) + "\n" for step in (10, 15, 20))
    code = supervise(
        f"""
        from shm_ring import RingReader
        ring = RingReader("ring", "trainer_0"); ring.rewind(2)
        say("READY trainer")
        Path("metrics.jsonl").write_text({lines!r})
        ring.close_run(); ring.leave()
        """,
        """
        from shm_ring import RingWriter
        ring = RingWriter("ring", "target_0"); say("READY target")
        while ring.claim() is not None: time.sleep(0.01)
        """,
    )
    assert code == 0
    out = capsys.readouterr().out
    assert "step 15/20  loss 2.5000  tau_anchor 1.250  accuracy 50.0%  1,234 tok/s" in out
    assert "ring 3/4 ready  trainer waits for the target (25%)  ETA 1m05s" in out
    assert "step 10/20" not in out  # of the attempt before
    assert "trainer_0 ready" in out and "target_0 ready" in out


def test_a_crashed_trainer_is_named_with_its_code_and_last_lines(
    supervise: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code = supervise(
        'say("READY"); [print("line", i) for i in range(40)]; sys.exit(7)',
        'Path("pid").write_text(str(os.getpid())); say("READY"); sleep_forever()',
    )
    assert code == 1
    err = capsys.readouterr().err
    assert "trainer_0 exited with code 7" in err and "trainer_0.log" in err
    assert "line 39" in err and "line 25" in err and "line 24" not in err
    pid = tmp_path / "pid"
    assert not pid.exists() or is_gone(int(pid.read_text()))


def test_a_killed_target_is_named_and_the_trainer_saves(
    supervise: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code = supervise(
        f'{SAVING_TRAINER}\nPath("up").write_text("yes")\nsleep_forever()',
        """
        say("READY")
        while not Path("up").exists(): time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    assert code == 1
    assert "target_0 was killed by SIGKILL" in capsys.readouterr().err
    assert (tmp_path / "saved").exists()


def test_a_users_mistake_in_a_half_is_one_line_and_code_2(
    supervise: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    code = supervise(
        'print("noise"); say("ERROR target.taps: [99]: no such layer"); sys.exit(2)',
    )
    assert code == 2
    assert capsys.readouterr().err == "trainer_0: target.taps: [99]: no such layer\n"


def test_the_warnings_of_a_half_are_shown_once(
    supervise: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    target = """
    import logging
    from launcher import child
    def main():
        log = logging.getLogger("target")
        log.info("a detail")
        for _ in range(2): log.warning("slow\\n%s", "layers")
        logging.getLogger("a library").warning("not ours")
        return 1
    child.run("target", 0, main)
    """
    assert supervise(f"{SAVING_TRAINER}\nsleep_forever()", target) == 1
    out = capsys.readouterr().out
    assert out.count("warning: target_0: slow layers\n") == 1
    assert "a detail" not in out and "not ours" not in out


def test_a_target_that_leaves_early_is_a_failure(
    supervise: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert supervise(f"{SAVING_TRAINER}\nsleep_forever()", 'say("READY")') == 1
    assert "target_0 exited with code 0 before the run was over" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGHUP", 129)])
def test_the_first_signal_saves_and_stops(
    supervise: Callable[..., int], tmp_path: Path, name: str, code: int
) -> None:
    trainer = f"{SAVING_TRAINER}\nos.kill(os.getppid(), signal.{name}); sleep_forever()"
    assert supervise(trainer) == code
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize("target", [PATIENT_TARGET, "os.kill(os.getppid(), signal.SIGTERM)"])
def test_a_trainer_that_is_not_ready_is_not_waited_for(
    supervise: Callable[..., int], capsys: pytest.CaptureFixture[str], target: str
) -> None:
    """It compiles, hears no signal, and has nothing to save: not when the user stops it, not when
    the other half has failed."""
    ends = target != PATIENT_TARGET
    trainer = f"""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path("up").write_text("yes")
    {"" if ends else "os.kill(os.getppid(), signal.SIGTERM);"} sleep_forever()
    """
    if ends:
        target = 'while not Path("up").exists(): time.sleep(0.01)\nraise SystemExit(1)'
    assert supervise(trainer, target, stop_s=3600) == (1 if ends else 143)
    said = "".join(capsys.readouterr())
    assert "sav" not in said


def test_the_same_signal_twice_at_once_counts_once(
    supervise: Callable[..., int], tmp_path: Path
) -> None:
    send = "os.kill(os.getppid(), signal.SIGINT);"
    trainer = f"{SAVING_TRAINER}\n{send} time.sleep(0.05); {send} sleep_forever()"
    assert supervise(trainer) == 130
    assert (tmp_path / "saved").exists()


def test_the_second_signal_stops_now(
    supervise: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    wait = StopSignals.REPEAT_S + 0.3
    trainer = f"""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say("READY")
    os.kill(os.getppid(), signal.SIGINT); time.sleep({wait})
    os.kill(os.getppid(), signal.SIGINT); sleep_forever()
    """
    assert supervise(trainer) == 1
    assert "stopped now, without saving" in capsys.readouterr().err


def test_a_trainer_that_does_not_save_in_time_is_killed(
    supervise: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say("READY")
    os.kill(os.getppid(), signal.SIGTERM); sleep_forever()
    """
    assert supervise(trainer, stop_s=0.5) == 1
    assert "trainer_0 did not save within 0.5 s (supervise.stop_s)" in capsys.readouterr().err


def test_a_stopped_trainer_is_continued_so_that_it_can_save(
    supervise: Callable[..., int], tmp_path: Path
) -> None:
    trainer = f"""{SAVING_TRAINER}
os.kill(os.getppid(), signal.SIGTERM); os.kill(os.getpid(), signal.SIGSTOP); sleep_forever()"""
    assert supervise(trainer) == 143
    assert (tmp_path / "saved").exists()


def test_a_half_that_is_not_ready_in_time_is_named(
    supervise: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert supervise("sleep_forever()", ready_s=1.0) == 1
    err = capsys.readouterr().err
    assert "trainer_0 was not ready after 1.0 s (supervise.ready_s)" in err


def test_a_silent_half_is_named_and_killed_after_stall_s(
    supervise: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = """
    from shm_ring import RingReader
    ring = RingReader("ring", "trainer_0"); ring.rewind(0)
    say("READY")
    os.kill(os.getpid(), signal.SIGSTOP)
    """
    assert supervise(trainer, stall_s=1.0) == 1
    assert "trainer_0 was silent for" in capsys.readouterr().err


def test_what_a_half_started_dies_with_it(supervise: Callable[..., int], tmp_path: Path) -> None:
    trainer = """
    import subprocess
    grandchild = subprocess.Popen(["sleep", "600"])
    Path("grandchild").write_text(str(grandchild.pid))
    os._exit(1)
    """
    assert supervise(trainer) == 1
    until_gone(int((tmp_path / "grandchild").read_text()))


def test_children_die_with_a_killed_launcher(tmp_path: Path) -> None:
    code = f"""
import os, signal, sys, time
from pathlib import Path
from launcher.process import Child, Program
child = Child.start(Program("c", ("sleep", "600"), Path({str(tmp_path / "log")!r})))
print(child.pid, flush=True)
time.sleep(600)
"""
    launcher = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    child = int(launcher.stdout.readline())
    assert not is_gone(child)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    until_gone(child)


def test_a_child_has_its_own_session_and_environment(tmp_path: Path) -> None:
    source = PRELUDE + 'print(os.getsid(0) == os.getpid(), os.environ["OMP_NUM_THREADS"])'
    argv = (sys.executable, "-c", source)
    child = Child.start(Program("c", argv, tmp_path / "log", {"OMP_NUM_THREADS": "3"}))
    assert child.wait(20)
    assert child.last_lines(5) == ["True 3"]
    child.close()


def test_a_long_line_of_a_log_is_shown_from_its_start(tmp_path: Path) -> None:
    source = PRELUDE + 'print("first"); print("data.path: " + "a name " * 300)'
    child = Child.start(Program("c", (sys.executable, "-c", source), tmp_path / "log", {}))
    assert child.wait(20)
    assert child.last_lines(1) == ["data.path: " + "a name " * 300]
    child.close()


def test_metrics_are_shown_once_whole_and_beyond_the_resumed_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path, after_step=1)
    assert tail.new_rows() == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert tail.new_rows() == [{"step": 2}]
    with path.open("a") as file:
        file.write('ep": 3}\n')
    assert tail.new_rows() == [{"step": 3}]
    assert tail.new_rows() == []


def test_signals_are_as_before_after_supervision() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.exit_code == 143 and not signals.now
    assert signal.getsignal(signal.SIGTERM) == before
