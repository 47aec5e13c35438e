"""A run's directory: records, the lock between launchers, what a resume may change."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash.config import Config, ConfigError, dump_config, parse_config
from launcher.rundir import HARMLESS, ROOT, RunDir, changed_keys


def config_of(tmp_path: Path, **changes: object) -> Config:
    raw: dict = {
        "run": {"name": "r", "dir": str(tmp_path)},
        "data": {"path": "d.jsonl"},
        "target": {"model": "m"},
        "train": {"steps": 40},
    }
    for key, value in changes.items():
        section, name = key.split("__")
        raw.setdefault(section, {})[name] = value
    return parse_config(raw, "test")


def write_checkpoint(run: RunDir, step: int) -> None:
    path = run.checkpoints / f"step_{step:08d}"
    path.mkdir(parents=True)
    (path / "run.yaml").write_text(run.config_file.read_text())
    (path / "COMPLETE").write_text("{}")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "r")
    run.begin_attempt(config_of(tmp_path), ["launch.py", "run", "c.yaml"])
    return run


def test_an_attempt_writes_its_records_and_moves_latest(run: RunDir, tmp_path: Path) -> None:
    second = run.begin_attempt(config_of(tmp_path), ["launch.py", "run", "c.yaml"])
    assert second.name == "attempt_2"
    assert (run.path / "logs" / "latest").resolve() == second.resolve()
    assert run.config() == config_of(tmp_path)
    record = json.loads((run.path / "launch.json").read_text())
    assert record["argv"] == ["launch.py", "run", "c.yaml"]
    assert record["attempt"] == "attempt_2"
    assert record["versions"]["pydantic"]


def test_each_attempt_has_traces_of_its_own(run: RunDir, tmp_path: Path) -> None:
    assert run.traces == run.path / "trace" / "attempt_1"
    run.begin_attempt(config_of(tmp_path), ["launch.py", "run", "c.yaml"])
    assert run.traces == run.path / "trace" / "attempt_2"


def test_only_whole_checkpoints_count(run: RunDir) -> None:
    assert run.last_step() == 0
    write_checkpoint(run, 10)
    write_checkpoint(run, 20)
    (run.checkpoints / "step_00000030").mkdir()
    write_checkpoint(run, 40)
    (run.checkpoints / "step_00000040" / "COMPLETE").write_text('{"model.safetensors": 100}')
    write_checkpoint(run, 50)
    (run.checkpoints / "step_00000050").rename(run.checkpoints / "step_50_mine")
    assert run.checkpoint_steps() == [10, 20]


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run = RunDir(tmp_path / "file" / "run")
    with pytest.raises(ConfigError, match=r"run\.dir: .* cannot be written"), run.lock():
        pass


def test_before_a_checkpoint_any_config_may_start_the_run(run: RunDir, tmp_path: Path) -> None:
    run.check_resumable(config_of(tmp_path, train__lr=1e-5, train__steps=7))


def test_a_changed_config_is_refused_by_its_keys(run: RunDir, tmp_path: Path) -> None:
    write_checkpoint(run, 10)
    changed = config_of(tmp_path, train__lr=1e-5, train__steps=50, train__log_every=3)
    with pytest.raises(ConfigError) as error:
        run.check_resumable(changed)
    text = str(error.value)
    assert "\n" not in text
    assert "train.lr" in text and "train.steps" in text and "run.name" in text
    assert "log_every" not in text


def test_a_lost_or_edited_run_yaml_does_not_hide_what_was_trained(
    run: RunDir, tmp_path: Path
) -> None:
    write_checkpoint(run, 10)
    changed = config_of(tmp_path, train__lr=1e-5)
    run.config_file.write_text(dump_config(changed))
    with pytest.raises(ConfigError, match=r"step 10 with another train\.lr"):
        run.check_resumable(changed)
    run.config_file.unlink()
    with pytest.raises(ConfigError, match=r"the values of .*step_00000010/run\.yaml"):
        run.check_resumable(changed)
    run.check_resumable(config_of(tmp_path))


def test_harmless_keys_may_change_on_a_resume(run: RunDir, tmp_path: Path) -> None:
    write_checkpoint(run, 10)
    changes = {
        "train__log_every": 3,
        "ring__slots": 12,
        "eval__prompts": 2,
        "data__path": "e.jsonl",
    }
    run.check_resumable(config_of(tmp_path, **changes))


def test_every_harmless_key_is_a_key_of_the_schema(tmp_path: Path) -> None:
    dump = config_of(tmp_path).model_dump()
    for key in HARMLESS:
        node = dump
        for part in key.split("."):
            node = node[part]


def test_changed_keys_are_dotted(tmp_path: Path) -> None:
    a, b = config_of(tmp_path), config_of(tmp_path, target__taps=[1, 2], target__num_taps=2)
    assert changed_keys(a, b) == ["target.taps", "target.num_taps"]


def test_a_key_that_only_one_mapping_has_is_a_change(tmp_path: Path) -> None:
    a, b = config_of(tmp_path), config_of(tmp_path, data__template_kwargs={"enable_thinking": None})
    assert changed_keys(a, b) == changed_keys(b, a) == ["data.template_kwargs.enable_thinking"]


@pytest.mark.parametrize("key", ["fingerprint", "mask_token_id"])
def test_other_data_under_a_half_trained_run_is_refused(run: RunDir, key: str) -> None:
    prepared = {"fingerprint": "aa", "mask_token_id": 3}
    new = run.path / "new.json"
    new.write_text(json.dumps(prepared))
    run.accept_prepared(new)
    new.write_text(json.dumps(prepared | {key: "bb"}))
    write_checkpoint(run, 10)
    with pytest.raises(ConfigError, match=key):
        run.accept_prepared(new)


def test_the_last_whole_line_of_metrics_is_the_last_metrics(run: RunDir) -> None:
    assert run.last_metrics() is None
    run.metrics_file.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "lo')
    assert run.last_metrics() == {"step": 2}


def test_a_held_run_names_its_pid_and_state(run: RunDir) -> None:
    assert run.holder() is None
    with run.lock() as lock:
        lock.note("stopping")
        holder = run.holder()
        assert holder is not None and (holder.pid, holder.state) == (os.getpid(), "stopping")
        with pytest.raises(ConfigError, match=f"pid {os.getpid()}"), run.lock():
            pass
    assert run.holder() is None


def test_the_lock_of_a_killed_launcher_is_free(run: RunDir) -> None:
    code = f"""
import os, signal
from pathlib import Path
from launcher.rundir import RunDir
with RunDir(Path({str(run.path)!r})).lock():
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert killed.returncode == -9
    assert json.loads((run.path / "lock").read_text())["state"] == "starting"
    assert run.holder() is None
    with run.lock():
        pass
