"""A run on disk: `runs/<name>/`, who runs it now, how far it is, and what may change on a resume.

run.yaml         the resolved config            metrics.jsonl   one object per log interval
prepared.json    target, dataset, mask token    checkpoints/    step_*/
launch.json      argv, commit, versions         eval/, export/  what those commands write
lock             held (flock) by the launcher   logs/attempt_<n>/<role>_<rank>.log, logs/latest
                                                trace/attempt_<n>/<role>_<rank>.json (run.trace)
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

from dflash.complete import complete_checkpoints, damaged_files
from dflash.config import Config, ConfigError, RunConfig, dump_config, load_config

ROOT = Path(__file__).resolve().parent.parent
"""Where launch.py, target_worker.py and drafter_trainer.py are, installed or not."""
PACKAGES = ("torch", "transformers", "numpy", "safetensors", "posix_ipc", "pydantic")

HARMLESS = (
    "run.dir",
    "run.trace",
    "data.path",
    "targets",
    "ring.path",
    "ring.slots",
    "ring.verify",
    "ring.quarantine_s",
    "train.log_every",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "eval",
    "supervise",
)
"""What may differ when a run that has a checkpoint is started again: none of it reaches a weight.

data.path is only where the data is: `accept_prepared` compares what is in it.
train.steps is not among them (the learning rate is a function of it), nor are the threads and
target.micro_batch_tokens (they change the order of sums, so the last bits).
"""


@dataclass(frozen=True)
class Holder:
    """The launcher that has a run in its hands."""

    pid: int
    state: str
    """`starting`, `running` or `stopping`."""


class RunLock:
    """The held lock of a run; `note` tells other terminals what the launcher is doing."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def note(self, state: str) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._file.write(json.dumps({"pid": os.getpid(), "state": state}))
        self._file.flush()


@dataclass(frozen=True)
class RunDir:
    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config_file(self) -> Path:
        return self.path / "run.yaml"

    @property
    def prepared_file(self) -> Path:
        return self.path / "prepared.json"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def traces(self) -> Path:
        """Of the newest attempt."""
        return self.path / "trace" / (self.path / "logs" / "latest").resolve().name

    def exists(self) -> bool:
        return self.config_file.exists()

    def config(self) -> Config:
        return load_config(self.config_file)

    # --- who runs it ---

    @contextmanager
    def lock(self) -> Iterator[RunLock]:
        """Hold the run. ConfigError, naming the pid, where another launcher does."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            opened = (self.path / "lock").open("a+")
        except OSError as error:
            raise ConfigError(
                f"run.dir: {self.path} cannot be written: {error.strerror}: set another run.dir"
            ) from None
        with opened as file:
            self._acquire(file)
            lock = RunLock(file)
            lock.note("starting")
            yield lock
            file.truncate(0)

    def _acquire(self, file: IO[str]) -> None:
        for patience in (True, True, False):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if patience:  # `holder()` in another terminal takes the lock for an instant
                    time.sleep(0.05)
        self.refuse_if_held()
        raise ConfigError(f"run.name: {self.name} is being started by another launcher")

    def holder(self) -> Holder | None:
        """Who holds the run, or None. Kernel-locked: right even after a kill -9."""
        path = self.path / "lock"
        if not path.exists():
            return None
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return None
            except BlockingIOError:
                noted = json.loads(file.read() or "null")
        return Holder(noted["pid"], noted["state"]) if noted else None

    def refuse_if_held(self) -> None:
        if (holder := self.holder()) is not None:
            raise ConfigError(
                f"run.name: {self.name} is already {holder.state} (pid {holder.pid}): "
                f"stop it, or choose another run.name"
            )

    # --- how far it is ---

    def checkpoint_steps(self) -> list[int]:
        """Steps of the checkpoints that the trainer would resume from, rising."""
        return [
            int(path.name.removeprefix("step_")) for path in complete_checkpoints(self.checkpoints)
        ]

    def last_step(self) -> int:
        """Of the newest checkpoint; 0 without one."""
        return max(self.checkpoint_steps(), default=0)

    def damage(self) -> str:
        """What is wrong with the newest checkpoint, in words; empty where it is sound. Reads all of
        it: 10 s for a 27B run's 21 GB in memory."""
        newest = complete_checkpoints(self.checkpoints)[-1:]
        damaged = damaged_files(newest[0]) if newest else []
        return f"{', '.join(damaged)} of {newest[0].name} is damaged" if damaged else ""

    def last_metrics(self) -> dict[str, Any] | None:
        """The newest complete line of metrics.jsonl."""
        if not self.metrics_file.exists():
            return None
        with self.metrics_file.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
            lines = file.read().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n") and line.startswith(b"{")]
        return json.loads(whole[-1]) if whole else None

    # --- starting it ---

    def check_resumable(self, new: Config) -> None:
        """ConfigError where `new` would make the rest of a half-trained run another run. What the
        run was is what its newest checkpoint says: run.yaml may be gone, or edited."""
        trained = complete_checkpoints(self.checkpoints)
        if not trained:
            return
        old = trained[-1] / "run.yaml"
        changed = [key for key in changed_keys(load_config(old), new) if not _harmless(key)]
        if changed:
            raise ConfigError(
                f"run {self.name} was trained to step {self.last_step()} with another "
                f"{', '.join(changed)}: choose another run.name, or the values of {old}"
            )

    def begin_attempt(self, config: Config, argv: list[str]) -> Path:
        """Write the run's records; returns the new directory for this attempt's logs."""
        logs = self.path / "logs"
        numbers = [int(p.name.removeprefix("attempt_")) for p in logs.glob("attempt_*")]
        attempt = logs / f"attempt_{max(numbers, default=0) + 1}"
        attempt.mkdir(parents=True)
        latest = logs / "latest.new"
        latest.unlink(missing_ok=True)
        latest.symlink_to(attempt.name)
        latest.replace(logs / "latest")
        _write(self.config_file, dump_config(config))
        _write(self.path / "launch.json", json.dumps(_record(argv, attempt.name), indent=2) + "\n")
        return attempt

    def accept_prepared(self, new: Path) -> None:
        """Make `new` the run's prepared.json. ConfigError where the data of a half-trained run
        is not what it was."""
        if self.prepared_file.exists() and self.last_step():
            try:
                old = json.loads(self.prepared_file.read_text())
            except ValueError:
                raise ConfigError(
                    f"{self.prepared_file}: not JSON any more: delete it (the checkpoint still "
                    "says which data the run was trained on)"
                ) from None
            now = json.loads(new.read_text())
            for key, word in (("fingerprint", "data.path"), ("mask_token_id", "target.model")):
                if old[key] != now[key]:
                    raise ConfigError(
                        f"run {self.name} was trained to step {self.last_step()} with another "
                        f"{key} ({old[key]}, now {now[key]}): {word} has changed; "
                        f"choose another run.name"
                    )
        new.replace(self.prepared_file)


def find_run(name: str) -> RunDir | None:
    """A run by its directory, or by its name in the default run.dir."""
    default = RunConfig.model_fields["dir"].default
    for path in (Path(name), default / name):
        if (path / "run.yaml").exists():
            return RunDir(path)
    return None


def live_runs() -> list[RunDir]:
    """The runs of the default run.dir that a launcher holds now."""
    default = RunConfig.model_fields["dir"].default
    runs = [RunDir(path.parent) for path in sorted(default.glob("*/run.yaml"))]
    return [run for run in runs if run.holder() is not None]


def changed_keys(old: Config, new: Config) -> list[str]:
    """Dotted names of the values that differ."""
    a, b = (dict(_flatten(c.model_dump(mode="json"))) for c in (old, new))
    # A mapping's own keys (data.template_kwargs) may be in one of them only.
    return [key for key in dict.fromkeys([*a, *b]) if a.get(key, ...) != b.get(key, ...)]


def _flatten(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _harmless(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in HARMLESS)


def _record(argv: list[str], attempt: str) -> dict[str, Any]:
    return {
        "argv": argv,
        "cwd": str(Path.cwd()),
        "attempt": attempt,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": platform.node(),
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": {name: package_version(name) for name in PACKAGES},
    }


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The checkout's commit, with `+` where files differ from it; None outside a checkout."""
    if not (ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--dirty=+"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    temp = path.with_name(f"{path.name}.new")
    temp.write_text(text)
    temp.replace(path)
