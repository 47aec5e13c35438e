"""Both halves together and each alone, in one run: what the pipeline keeps of its slower half.

    python launch.py bench pipeline CONFIG [section.key=value ...] --seconds 180 --json FILE
        [--alone-seconds 40] [--timeline FILE.svg] [--trace FILE.json]

The real programs over the real ring, started once, so that all three measurements share processes,
compiled code, page-locked memory and clocks:

1. warm-up: the trainer, which has compiled its step before READY, trains on two slots
   of random states from the bench; the next seq stays in the bench's hands, so that the trainer
   waits. Target workers wait at READY.
2. target alone: they go on, and fill the ring. The trainer still waits.
3. both: the bench lets go of its seq. After the backlog has settled: the measured window.
4. drafter alone: the target workers have ended; the bench publishes each freed slot again at once,
   unchanged.

Rates are slot tokens a second, from hand-over to hand-over. The pipeline's is that of the slower
side, so a growing or shrinking backlog is not counted. Nothing is trained that could be used: the
run lives in a temporary directory, and its learning rate has hardly left zero.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash.config import Config, ConfigError, load_config
from dflash.prepare import Prepared
from launcher.preflight import Facts, check_early, refuse_early
from launcher.process import StopSignals
from launcher.rings import close_ring, open_ring, refuse_used
from launcher.rundir import RunDir
from launcher.screen import Screen
from launcher.session import prepare_program, programs, run_prepare
from shm_ring import RingError
from shm_ring import layout as at

from . import keep, new_file, positive
from .halves import BenchFailed, Halves
from .pipeline_figures import figures, summary
from .stand_in import StandIn
from .timeline import draw, merged
from .watch import Rate, Smi, Watch, Window, cpu_s

POLL_S = 0.01
WARM_SLOTS = 2
"""Of each side, before what is measured."""
SETTLE_S = 15.0
"""At most, for the backlog that the target has made alone to be used up, or to fill the ring."""
TRAINER = "trainer_0"


@dataclass
class Measured:
    """What the phases leave behind; `figures` makes numbers of it."""

    watch: Watch
    smi: Smi
    ring_s: float
    """To create the ring."""
    warm_s: float = 0.0
    """From the start of the processes to a warm trainer and READY targets."""
    windows: dict[str, Window] = field(default_factory=dict)
    """target, both, drafter."""
    target_rate: Rate | None = None
    """Alone. The other rates stand in `watch`."""
    waited_s: dict[str, float] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)
    """Of each process, within the window of both."""


def bench_config(config: Config, directory: Path) -> Config:
    """The run without an end, a checkpoint or an evaluation; and with a trace."""
    passes = config.train.passes_per_slot
    endless = {"steps": (2**31 - 1) // passes * passes, "checkpoint_every": 2**31}
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"dir": directory, "trace": True}),
            "train": config.train.model_copy(update=endless),
            "eval": config.eval.model_copy(update={"every": 0}),
        }
    )


class Phases:
    def __init__(self, stand_in: StandIn, halves: Halves, found: Measured, ready_s: float) -> None:
        self._stand_in, self._halves, self._found = stand_in, halves, found
        self._watch, self._ready_s = found.watch, ready_s
        self._targets = [child.name for child in halves.targets]
        self._next_look_s = 0.0

    def warm_up(self) -> None:
        began_s, meta = time.monotonic(), self._stand_in.writer._view.meta
        epoch = meta[at.EPOCH]
        self._until(lambda: meta[at.EPOCH] > epoch, "trainer_0 has not joined the ring")
        self._stand_in.fill(WARM_SLOTS)
        self._held_seq = self._stand_in.hold()
        self._until(
            lambda: self._halves.ready and self._trainer_waits(WARM_SLOTS),
            "the halves are not ready and warm",
        )
        self._found.warm_s = time.monotonic() - began_s

    def target_alone(self, seconds: float) -> None:
        """Until the ring is full, if that comes first."""
        self._halves.release()
        self._until(lambda: self._made(WARM_SLOTS) or self._full(), "the target makes no slots")
        end_s = time.monotonic() + seconds
        self._until(lambda: self._full() or time.monotonic() >= end_s)
        made = self._watch.made(self._held_seq, WARM_SLOTS * len(self._targets))
        if made is None:
            raise BenchFailed("the target made less than two slots: raise --alone-seconds", 2)
        self._found.windows["target"], self._found.target_rate = made

    def both(self, seconds: float) -> None:
        self._stand_in.let_go()
        before = self._watch.items(TRAINER)
        self._until(
            lambda: self._watch.items(TRAINER) >= before + WARM_SLOTS, "the trainer takes no slots"
        )
        settled_s = time.monotonic() + SETTLE_S
        self._until(lambda: self._settled() or time.monotonic() > settled_s)
        pids = {child.name: child.pid for child in self._halves.children}
        waited_s, spent_s = self._watch.waited_s(), cpu_s(pids)
        self._window("both", seconds)
        waited_now_s, spent_now_s = self._watch.waited_s(), cpu_s(pids)
        self._found.waited_s = {name: waited_now_s[name] - waited_s[name] for name in pids}
        known = spent_s.keys() & spent_now_s.keys()
        self._found.cpu_s = {name: spent_now_s[name] - spent_s[name] for name in known}

    def drafter_alone(self, seconds: float) -> None:
        self._halves.end_targets()
        with self._stand_in.feeding():
            before = self._watch.items(TRAINER)
            self._until(
                lambda: (
                    self._stand_in.fed_all and self._watch.items(TRAINER) >= before + WARM_SLOTS
                ),
                "the trainer takes no slots",
            )
            self._window("drafter", seconds)

    def _trainer_waits(self, items: int) -> bool:
        return self._watch.items(TRAINER) >= items and self._watch.waits_for_slots(TRAINER)

    def _made(self, items: int) -> bool:
        return all(self._watch.items(name) >= items for name in self._targets)

    def _full(self) -> bool:
        return all(self._watch.waits_for_slots(name) for name in self._targets)

    def _settled(self) -> bool:
        return self._watch.ready[-1][1] <= 1 or any(map(self._watch.waits_for_slots, self._targets))

    def _window(self, name: str, seconds: float) -> None:
        start_s = time.monotonic()
        self._until(lambda: time.monotonic() >= start_s + seconds)
        self._found.windows[name] = Window(start_s, time.monotonic())

    def _until(self, condition: Callable[[], bool], problem: str = "") -> None:
        """Looks at everything until then. `problem`: what to say after supervise.ready_s."""
        deadline = time.monotonic() + self._ready_s
        self._watch.look()
        while not condition():
            time.sleep(POLL_S)
            self._watch.look()
            now_s = time.monotonic()
            if now_s >= self._next_look_s:
                self._next_look_s = now_s + 0.1
                self._halves.look()
            if problem and now_s > deadline:
                limit = f"{self._ready_s:.0f} s (supervise.ready_s)"
                raise BenchFailed(f"{problem} after {limit}\n{self._halves.last_lines()}")


def run(config: Config, run: RunDir, args: argparse.Namespace) -> tuple[Measured, dict[str, Any]]:
    """From the preflight to the figures. Raises ConfigError, RingError, BenchFailed."""
    check_early(config)
    refuse_early(config)
    refuse_used(config.ring.path)
    with StopSignals() as signals, run.lock():
        attempt = run.begin_attempt(config, sys.argv)
        with closing(Screen(attempt / "launch.log")) as screen:
            prepared_file = attempt / "prepared.json"
            program = prepare_program(run.config_file, prepared_file, attempt)
            if code := run_prepare(program, screen, signals):
                raise BenchFailed("", code)
            run.accept_prepared(prepared_file)
            prepared = Prepared.from_json(run.prepared_file.read_text())
            facts = Facts.gather(config, Path(prepared.target_dir), prepared)
            facts.refuse()
            for warning in facts.warnings():
                screen.line(f"warning: {warning}")
            began_s = time.monotonic()
            screen.line(open_ring(config, facts.fields, None))
            try:
                ring_s = time.monotonic() - began_s
                found = measure(config, facts, attempt, signals, screen, ring_s, args)
                return found, figures(found, facts, run, attempt)
            finally:
                if left := close_ring(config):
                    screen.error(left)


def measure(
    config: Config,
    facts: Facts,
    attempt: Path,
    signals: StopSignals,
    screen: Screen,
    ring_s: float,
    args: argparse.Namespace,
) -> Measured:
    """Whatever happens, no process of the run is alive and the bench has left the ring after it."""
    stand_in = StandIn(config, facts)
    try:
        with (
            closing(Halves(programs(facts, config.run.path, attempt), signals)) as halves,
            closing(Smi()) as smi,
        ):
            found = Measured(Watch(stand_in.writer), smi, ring_s)
            phases = Phases(stand_in, halves, found, config.supervise.ready_s)
            screen.line(f"starting {len(halves.children)} processes; logs in {attempt}")
            phases.warm_up()
            screen.line(f"warm after {found.warm_s:.0f} s; the target alone ...")
            phases.target_alone(args.alone_seconds)
            screen.line(f"both, for {args.seconds:.0f} s ...")
            phases.both(args.seconds)
            screen.line("the drafter alone ...")
            phases.drafter_alone(args.alone_seconds)
        return found
    finally:
        stand_in.writer.leave()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="launch.py bench pipeline", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--seconds", type=positive, default=180, help="of both halves together")
    parser.add_argument("--alone-seconds", type=positive, default=40, help="of each half alone")
    parser.add_argument("--json", type=new_file, help="write all figures there")
    parser.add_argument("--timeline", type=new_file, help="draw a few slots of both halves: an SVG")
    parser.add_argument("--trace", type=new_file, help="keep the trace, for ui.perfetto.dev")
    parser.add_argument("--keep", type=Path, help="run in this directory, and leave it there")
    return parser.parse_intermixed_args()


def main() -> int:
    args = parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="dflash_bench_") as temporary:
            directory = args.keep or Path(temporary)
            config = bench_config(load_config(args.config, args.overrides), directory)
            run_dir = RunDir(config.run.path)
            found, row = run(config, run_dir, args)
            traces = sorted(run_dir.traces.glob("*.json"))
            if args.trace:
                args.trace.write_text(merged(traces, found.watch.ready))
            if args.timeline:
                ready, window = found.watch.ready, found.windows["both"]
                args.timeline.write_text(draw(traces, ready, config.ring.slots, window))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except RingError as error:
        print(error, file=sys.stderr)
        return 1
    except BenchFailed as error:
        if str(error):
            print(error, file=sys.stderr)
        return error.code
    row["command"] = shlex.join(["launch.py", "bench", "pipeline", *sys.argv[1:]])
    row["shapes"] = args.config.stem
    keep([row], args.json)
    print(summary(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
