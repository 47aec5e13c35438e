"""The command line, and `run` from the config to the exit code with fake halves."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from test_preflight import PREPARED, TARGET

import launch
from dflash.config import ConfigError, parse_config
from launcher import session
from launcher.process import Program
from launcher.rundir import ROOT, RunDir
from launcher.stopping import stop_command
from shm_ring import RingBusy, hidden_state_fields, snapshot

TORCH_FREE = "import sys; assert not {'torch', 'transformers'} & set(sys.modules), sys.modules"
GOOD_TRAINER = """
import os, sys
from pathlib import Path
from shm_ring import RingReader
run, ring, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
reader = RingReader(ring, "trainer_0")
reader.rewind(reader.end_seq)
checkpoint = run / "checkpoints" / f"step_{steps:08d}"
checkpoint.mkdir(parents=True)
(checkpoint / "run.yaml").write_text((run / "run.yaml").read_text())
(checkpoint / "COMPLETE").write_text("{}")
reader.close_run()
reader.leave()
"""
GOOD_TARGET = """
import sys
from shm_ring import RingWriter
writer = RingWriter(sys.argv[2], "target_0")
while writer.claim() is not None: pass
"""
DYING = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


def call(*args: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """launch.py as the user calls it."""
    argv = [sys.executable, str(ROOT / "launch.py"), *map(str, args)]
    return subprocess.run(argv, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("args", [["--help"], ["run", "--help"], ["status", "nix"]])
def test_no_torch_and_no_transformers(args: list[str]) -> None:
    code = f"import launch; sys.argv = {['launch.py', *args]}; launch._main()"
    code = f"import sys; {code}; {TORCH_FREE}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_what_run_plan_and_doctor_import_is_torch_free() -> None:
    names = "session", "describe", "status_text", "stopping", "doctor", "child"
    code = "".join(f"import launcher.{name}; " for name in names) + TORCH_FREE
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["rum"], "No such command 'rum'"),
        (["run"], "Missing argument"),
        (["run", "--fast"], "No such option: --fast"),
        (["run", "nix.yaml"], "nix.yaml: no such file"),
        (["plan", "nix.yaml"], "nix.yaml: no such file"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_and_code_2(
    args: list[str], words: str, tmp_path: Path
) -> None:
    done = call(*args, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr and done.stderr.count("\n") == 1


def test_every_mistake_in_a_config_has_its_line(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("run: {name: r}\ndata: {path: d}\ntarget: {model: m}\ntrain: {stpes: 3}\n")
    done = call("run", path, "ring.slots=seven", cwd=tmp_path)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert len(lines) == 3
    assert any("train.stpes: unknown key; nearest: train.steps" in line for line in lines)
    assert any("ring.slots: 'seven'" in line for line in lines)


def test_eval_and_export_become_their_module(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    became: list[list[str]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execve", lambda path, argv, env: became.append(argv))
    (tmp_path / "runs" / "r").mkdir(parents=True)
    (tmp_path / "runs" / "r" / "run.yaml").touch()
    for args in (["eval", "r", "--data", "f"], ["export", "some/step_8", "--to", "d"]):
        monkeypatch.setattr(sys, "argv", ["launch.py", *args])
        launch._main()
    assert became == [
        [sys.executable, "-m", "dflash.evaluate", "runs/r", "--data", "f"],
        [sys.executable, "-m", "dflash.export", "some/step_8", "--to", "d"],
    ]


# --- run, with fake halves ------------------------------------------------------------------------


@pytest.fixture
def raw(tmp_path: Path) -> dict[str, Any]:
    """A config over a target that is only a config.json."""
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(TARGET))
    (tmp_path / "data.jsonl").touch()
    return {
        "run": {"name": "r", "dir": str(tmp_path / "runs")},
        "data": {"path": str(tmp_path / "data.jsonl")},
        "target": {"model": str(tmp_path / "target"), "num_taps": 2},
        "drafter": {"num_layers": 1, "block_size": 4},
        "ring": {"path": str(tmp_path / "ring"), "max_tokens": 32, "slots": 4, "max_docs": 4},
        "train": {"steps": 20},
        "eval": {"prompts": 1},
    }


@pytest.fixture
def run(raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`run_command` with these halves in the place of the real ones."""
    prepared = json.dumps(asdict(PREPARED) | {"target_dir": str(tmp_path / "target")})

    def fake(name: str, logs: Path, source: str, *args: object) -> Program:
        argv = (sys.executable, "-c", source, *map(str, args))
        return Program(name, argv, logs / f"{name}.log", session.module_env())

    def run(
        trainer: str = GOOD_TRAINER,
        target: str = GOOD_TARGET,
        prepare: str = f"import sys; open(sys.argv[2], 'w').write({prepared!r})",
        **changes: Any,
    ) -> int:
        sections = {name: dict(values) for name, values in raw.items()}
        for key, value in changes.items():
            section, name = key.split("__")
            sections[section][name] = value
        config = parse_config(sections, "test")
        monkeypatch.setattr(
            session,
            "prepare_program",
            lambda config_file, out, logs: fake("prepare", logs, prepare, config_file, out),
        )
        halves = {"target_0": target, "trainer_0": trainer}
        monkeypatch.setattr(
            session,
            "programs",
            lambda facts, run_dir, attempt: [
                fake(name, attempt, source, run_dir, config.ring.path, config.train.steps)
                for name, source in halves.items()
            ],
        )
        return session.run_command(config, ["launch.py", "run", "c.yaml"])

    return run


def test_a_run_leaves_records_and_no_ring_and_says_what_to_type_next(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run() == 0
    out = capsys.readouterr().out
    assert "run r is complete (20 of 20 steps)" in out
    for command in ("status", "stop", "eval", "export"):
        assert f" {command} {tmp_path}/runs/r" in out
    found = RunDir(tmp_path / "runs" / "r")
    assert found.last_step() == 20 and found.holder() is None
    logs = found.path / "logs" / "latest"
    assert {p.name for p in logs.iterdir()} == {
        "launch.log", "prepare.log", "target_0.log", "trainer_0.log"
    }  # fmt: skip
    assert "is complete" in (logs / "launch.log").read_text()
    assert not (tmp_path / "ring").exists()


def test_a_complete_run_starts_nothing(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run() == 0
    capsys.readouterr()
    assert run(trainer=DYING, target=DYING, prepare=DYING) == 0
    assert capsys.readouterr().out.startswith("run r is complete (20 of 20 steps)\n")
    assert not (tmp_path / "runs" / "r" / "logs" / "attempt_2").exists()


def test_a_failed_half_leaves_no_ring_and_the_same_command_goes_on(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(trainer=DYING) == 1
    captured = capsys.readouterr()
    assert "trainer_0 was killed by SIGKILL" in captured.err
    assert "run r failed" in captured.out and "run c.yaml" in captured.out
    assert not (tmp_path / "ring").exists()
    assert run() == 0
    assert (tmp_path / "runs" / "r" / "logs" / "latest").resolve().name == "attempt_2"


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_resumed(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (8, 12):
        step_only = GOOD_TRAINER.replace("{steps:08d}", f"{step:08d}") + DYING
        assert run(trainer=step_only) == 1
    checkpoints = tmp_path / "runs" / "r" / "checkpoints"
    damage(checkpoints / "step_00000012")
    capsys.readouterr()
    assert run() == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("checkpoint step_00000012: arch.json damaged: kept as ")
    assert "run r: resumes from step 8 of 20" in captured.out

    damage(checkpoints / "step_00000020")  # of a complete run
    assert run() == 0
    captured = capsys.readouterr()
    aside = checkpoints / "damaged-step_00000020"
    assert captured.err == f"checkpoint step_00000020: arch.json damaged: kept as {aside}\n"
    assert "run r: resumes from step 8 of 20" in captured.out
    assert "run r is complete (20 of 20 steps)" in captured.out
    assert run(trainer=DYING, target=DYING, prepare=DYING) == 0  # it is


def test_without_a_sound_checkpoint_a_complete_run_says_that_it_begins_again(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run() == 0
    damage(tmp_path / "runs" / "r" / "checkpoints" / "step_00000020")
    capsys.readouterr()
    assert run() == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("checkpoint step_00000020: arch.json damaged: kept as ")
    assert "run r: no sound checkpoint is left: all 20 steps again" in captured.out


def damage(checkpoint: Path) -> None:
    """A file of other bytes than its checksum (the crc32 of no chunk at all) says."""
    (checkpoint / "arch.json").write_text("{}")
    marker = {"arch.json": {"bytes": 2, "crc32": "00000000"}}
    (checkpoint / "COMPLETE").write_text(json.dumps(marker))


def test_the_mistake_that_prepare_finds_is_one_line_and_code_2(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mistake = (
        "import sys; print('log'); sys.exit(print('data.path: no rows', file=sys.stderr) or 2)"
    )
    assert run(prepare=mistake) == 2
    assert capsys.readouterr().err == "data.path: no rows\n"
    assert not (tmp_path / "ring").exists()


def test_a_warning_of_prepare_is_shown(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared = json.dumps(asdict(PREPARED) | {"target_dir": str(tmp_path / "target")})
    told = "print('a detail'); print('warning: d.npz: damaged')"
    assert run(prepare=f"import sys; {told}; open(sys.argv[2], 'w').write({prepared!r})") == 0
    out = capsys.readouterr().out
    assert "\nwarning: d.npz: damaged\n" in out and "a detail" not in out


def test_a_signal_while_preparing_ends_at_once(run: Callable[..., int], tmp_path: Path) -> None:
    stopping = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(600)"
    assert run(prepare=stopping) == 128 + signal.SIGTERM
    assert not (tmp_path / "ring").exists()


def test_a_run_that_is_held_is_refused_with_its_pid(
    run: Callable[..., int], tmp_path: Path
) -> None:
    with RunDir(tmp_path / "runs" / "r").lock():
        (tmp_path / "runs" / "r" / "run.yaml").touch()
        with pytest.raises(ConfigError, match=f"already starting .pid {os.getpid()}"):
            run()


def test_the_ring_of_another_live_run_is_refused_by_its_name(
    run: Callable[..., int], tmp_path: Path
) -> None:
    fields = hidden_state_fields(
        max_tokens=16, max_docs=2, taps_width=4, hidden=4, dtype="f32", vlh=False
    )
    code = f"""
from shm_ring import *
create({str(tmp_path / "ring")!r}, {fields!r}, 4, end_seq=1, run_name="other")
print("up", flush=True)
input()
"""
    other = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert other.stdout is not None and other.stdout.readline() == "up\n"
    with pytest.raises(RingBusy, match="'other': stop it, or set another ring"):
        run()
    assert not (tmp_path / "runs").exists()
    other.communicate("\n")
    assert run() == 0  # nobody is left there


def test_what_preflight_refuses_never_makes_a_run(run: Callable[..., int], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"target\.taps"):
        run(target__taps=[0, 99])
    assert not (tmp_path / "runs").exists()


def test_a_half_trained_run_refuses_another_config(run: Callable[..., int], tmp_path: Path) -> None:
    assert run(trainer=GOOD_TRAINER.replace("{steps:08d}", "00000008") + DYING) == 1
    with pytest.raises(ConfigError, match=r"step 8 with another train\.lr: choose another"):
        run(train__lr=0.5)


@pytest.mark.parametrize("same_ring", [True, False])
def test_the_ring_of_a_killed_launcher_is_taken_over_or_replaced(
    run: Callable[..., int],
    tmp_path: Path,
    raw: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    same_ring: bool,
) -> None:
    # A launcher that is killed with its ring in place: a fork that never comes back.
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        run(trainer="import os, signal; os.kill(os.getppid(), signal.SIGKILL)")
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    capsys.readouterr()
    assert snapshot(tmp_path / "ring").run_name == "r"
    assert run(ring__slots=4 if same_ring else 6) == 0
    assert ("taken over" in capsys.readouterr().out) == same_ring
    assert not (tmp_path / "ring").exists()


def test_stop_waits_until_the_run_has_saved(
    tmp_path: Path, raw: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path / "runs" / "r")
    run.begin_attempt(parse_config(raw, "test"), [])
    assert stop_command(str(run.path)) == 3
    code = f"""
import os, signal, time
from pathlib import Path
from launcher.process import StopSignals
from launcher.rundir import RunDir
with StopSignals() as signals, RunDir(Path({str(run.path)!r})).lock():
    print("up", flush=True)
    while signals.first is None: time.sleep(0.01)
    Path({str(tmp_path / "saved")!r}).touch()
"""
    launcher = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None and launcher.stdout.readline() == "up\n"
    capsys.readouterr()
    assert stop_command(str(run.path)) == 0
    assert (tmp_path / "saved").exists()
    assert "run r stopped: step 0 of 20 is saved" in capsys.readouterr().out
    launcher.wait()


def test_stop_does_not_signal_a_run_that_is_stopping(
    tmp_path: Path, raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "runs" / "r")
    run.begin_attempt(parse_config(raw, "test"), [])
    states = iter([True, False])
    monkeypatch.setattr("launcher.stopping.POLL_S", 0.01)
    with run.lock() as lock:
        lock.note("stopping")
        real = RunDir.holder
        monkeypatch.setattr(RunDir, "holder", lambda self: real(self) if next(states) else None)
        assert stop_command(str(run.path)) == 0  # a SIGTERM would have ended this test
