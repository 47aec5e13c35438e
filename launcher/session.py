"""`launch.py run` from the config to the exit code: records, preflight, prepare, ring, both halves.

Order matters: what costs nothing is refused first, a complete run ends at once (unless its last
checkpoint is damaged: then it goes on from the one before), and a ring exists only between
`open_ring` and the `finally` that destroys it.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from contextlib import closing
from pathlib import Path

from dflash.complete import set_aside_damaged
from dflash.config import Config
from dflash.prepare import Prepared

from .preflight import Facts, check_early, refuse_early
from .process import Child, Program, StopSignals, python, thread_env
from .rings import close_ring, open_ring, refuse_used
from .rundir import ROOT, RunDir, RunLock
from .screen import Screen, seconds
from .supervisor import LAST_LINES, MetricsTail, Supervisor


def command_name() -> str:
    """How the user called us: `python launch.py` or `dflash-ring`."""
    program = Path(sys.argv[0])
    return f"python {program}" if program.name == "launch.py" else program.name


def module_env() -> dict[str, str]:
    """So that `python -m dflash.x` finds the package from any working directory; and its idle
    threads sleep (see process.thread_env)."""
    old = os.environ.get("PYTHONPATH")
    path = f"{ROOT}{os.pathsep}{old}" if old else str(ROOT)
    return {"PYTHONPATH": path, "OMP_WAIT_POLICY": "passive"}


def run_command(config: Config, argv: list[str]) -> int:
    """Run, or resume, both halves. Returns the exit code; raises ConfigError, RingError."""
    run = RunDir(config.run.path)
    run.refuse_if_held()
    run.check_resumable(config)
    if run.last_step() >= config.train.steps and not run.damage():
        print(_complete_text(run, config))
        return 0
    check_early(config)
    refuse_early(config)
    refuse_used(config.ring.path)
    with StopSignals() as signals, run.lock() as lock:
        run.check_resumable(config)  # again: another launcher may have come and gone
        previous = run.config() if run.exists() else None
        attempt = run.begin_attempt(config, argv)
        with closing(Screen(attempt / "launch.log")) as screen:
            return _Session(run, config, previous, argv, attempt, lock, screen, signals).run()


class _Session:
    """One attempt, from the held lock on."""

    def __init__(
        self,
        run: RunDir,
        config: Config,
        previous: Config | None,
        argv: list[str],
        attempt: Path,
        lock: RunLock,
        screen: Screen,
        signals: StopSignals,
    ) -> None:
        self._run = run
        self._config = config
        self._previous = previous
        self._argv = argv
        self._attempt = attempt
        self._lock = lock
        self._screen = screen
        self._signals = signals
        self._start = time.monotonic()

    def run(self) -> int:
        self._greet()
        code = self._prepare()
        if code == 0:
            code = self._train()
            self._farewell(code)
        return code

    def _greet(self) -> None:
        damaged = set_aside_damaged(self._run.checkpoints)
        for line in damaged:
            self._screen.error(line)
        name, steps, done = run_argument(self._run), self._config.train.steps, self._run.last_step()
        start = f"resumes from step {done} of {steps}" if done else f"{steps} steps"
        if damaged and not done:
            start = f"no sound checkpoint is left: all {steps} steps again"
        self._screen.line(f"run {self._run.name}: {start}; logs in {self._attempt}")
        self._screen.line(f"  watch  {command_name()} status {name} --watch")
        self._screen.line(f"  stop   {command_name()} stop {name}   (or Ctrl-C: saves, then stops)")

    def _prepare(self) -> int:
        """Target, data and mask token, in a child that may import torch. 0, or the exit code."""
        out = self._attempt / "prepared.json"
        program = prepare_program(self._run.config_file, out, self._attempt)
        code = run_prepare(program, self._screen, self._signals)
        if code == 0:
            self._run.accept_prepared(out)
        return code

    def _train(self) -> int:
        config = self._config
        prepared = Prepared.from_json(self._run.prepared_file.read_text())
        facts = Facts.gather(config, Path(prepared.target_dir), prepared)
        facts.refuse()
        for warning in facts.warnings():
            self._screen.line(f"warning: {warning}")
        *targets, trainer = programs(facts, self._run.path, self._attempt)
        self._screen.line(open_ring(config, facts.fields, self._previous))
        self._lock.note("running")
        try:
            return Supervisor(
                trainer,
                targets,
                config,
                MetricsTail(self._run.metrics_file, self._run.last_step()),
                self._screen,
                self._signals,
                on_stopping=lambda: self._lock.note("stopping"),
            ).run()
        finally:
            if left := close_ring(config):
                self._screen.error(left)

    def _farewell(self, code: int) -> None:
        took = seconds(time.monotonic() - self._start)
        if code == 0:
            self._screen.line(f"{_complete_text(self._run, self._config)}\n  took   {took}")
            return
        step, steps = self._run.last_step(), self._config.train.steps
        where = f"step {step} of {steps} is saved" if step else "nothing is saved yet"
        word = "failed" if code in (1, 2) else "stopped"
        self._screen.line(f"run {self._run.name} {word} after {took}: {where}")
        if code != 2:
            self._screen.line(f"  resume {command_name()} {shlex.join(self._argv[1:])}")


def prepare_program(config_file: Path, out: Path, logs: Path) -> Program:
    argv = python("-m", "dflash.prepare", config_file, out)
    return Program("prepare", argv, logs / "prepare.log", module_env())


def run_prepare(program: Program, screen: Screen, signals: StopSignals) -> int:
    """Run the preparing child. 0, or the exit code of the launcher."""
    screen.line(f"preparing target and data; log {program.log}")
    child = Child.start(program)
    try:
        while child.alive and signals.first is None:
            time.sleep(0.05)
        if child.alive:
            return signals.exit_code
        if child.exit_code == 2:  # the user's mistake: one line, its last
            screen.error(child.last_lines(1)[0])
            return 2
        if child.exit_code != 0:
            screen.error(f"prepare {child.how_it_ended()}; its log is {program.log}")
            for line in child.last_lines(LAST_LINES):
                screen.error(f"  | {line}")
            return 1
        for line in program.log.read_text(errors="replace").splitlines():
            if line.startswith("warning: "):
                screen.line(line)
        return 0
    finally:
        child.close()


def programs(facts: Facts, run_dir: Path, attempt: Path) -> list[Program]:
    """The target workers and, last, the trainer."""
    result = []
    for place in facts.places:
        role, _, rank = place.name.rpartition("_")
        args = [run_dir] if role == "trainer" else [run_dir, "--rank", rank]
        script = "drafter_trainer.py" if role == "trainer" else "target_worker.py"
        env = {
            **thread_env(place.threads),
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
            "CUDA_VISIBLE_DEVICES": place.gpu.uuid if place.gpu is not None else "",
        }
        log = attempt / f"{place.name}.log"
        result.append(Program(place.name, python(ROOT / script, *args), log, env))
    return result


def run_argument(run: RunDir) -> str:
    """What to type for this run: its name where that is enough."""
    from dflash.config import RunConfig

    default = RunConfig.model_fields["dir"].default
    return run.name if run.path == default / run.name else str(run.path)


def _complete_text(run: RunDir, config: Config) -> str:
    name, steps = run_argument(run), config.train.steps
    complete = f"run {run.name} is complete ({steps} of {steps} steps)"
    if config.target.random_weights:
        return f"{complete}\n  a benchmark (target.random_weights): nothing to eval or export"
    return (
        f"{complete}\n"
        f"  eval   {command_name()} eval {name}\n"
        f"  export {command_name()} export {name} --to exports/{run.name}"
    )
