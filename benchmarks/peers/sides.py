"""Two training steps that take turns on one GPU: the same weights, batch, anchors and loss.

A side builds itself, warms up, is timed alone, and is freed before the next one starts; the turns
go around (ours, theirs, ours, theirs), so that both see the chip warm. Compiled code is kept from
turn to turn. The first step of every side has the anchors that our first step draws, so that its
loss shows whether both train the same thing.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash.step import Batch, Drawn, draw, train_step

from .. import commit, count, new_file
from ..drafter import LEAST_S, WARM_UP_S, random_batch, random_state
from ..shapes import Case, Shapes

WARM_UPS = 3
"""Steps that compile; then as many as warm the chip."""
LEFT_OVER_BYTES = 256 * 2**20
"""What may be allocated between sides: the libraries' workspaces."""

TINY = Shapes(64, 96, 4, 2, 16, 211, 120, 40, 12, 4, window=64)
"""For a dry run on a CPU: eager, float32, windows longer than the documents."""


class Side(Protocol):
    name: str
    """As a column of the table."""
    documents: int
    """Of one step."""
    keeps_a_pool: bool
    """A captured graph owns its memory between steps, so its peak counts from the start."""

    def run(self, steps: int) -> list[float]:
        """Seconds of each."""

    def loss(self) -> float:
        """Of the first step: over the supervised rows, weighted as ours."""

    def holds(self) -> str:
        """What weights, masters and moments are kept in."""


class Clock:
    """Marks on the GPU's time line, without a sync in between; wall clock on a CPU."""

    def __init__(self) -> None:
        self.marks: list[Any] = []

    def mark(self) -> None:
        if torch.cuda.is_available():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Between the marks; waits for the last."""
        if not torch.cuda.is_available():
            return [after - before for before, after in itertools.pairwise(self.marks)]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(self.marks)]


def common_batch(case: Case) -> Batch:
    """Documents whose last block_size tokens are not supervised: the peers differ in what a block
    does at a document's end, and here none gets there."""
    torch.manual_seed(1)
    batch = random_batch(case)
    end_T = batch.lens_D.cumsum(0)[first_documents(batch)]
    position_T = torch.arange(len(end_T), device=end_T.device)
    return replace(batch, lm_T=position_T < end_T - case.arch.block_size)


def first_documents(batch: Batch) -> Tensor:
    """doc_T of a full slot."""
    return torch.repeat_interleave(batch.lens_D)


def first_draw(case: Case, batch: Batch) -> Drawn:
    """What our step draws at seq 0, pass 0."""
    inputs = torch.tensor([case.config.run.seed, 0, 0], device=batch.ids_T.device)
    return draw(batch, inputs, case.config.num_anchors, case.arch)


class Ours:
    def __init__(self, case: Case, name: str = "ours") -> None:
        self.name, self.case = name, case
        self.keeps_a_pool = case.config.step_mode == "graph"
        batch = common_batch(case)
        self.documents = len(batch.lens_D)
        if batch.vlh_TH is not None:
            # Ours is after the target's final norm; speculators norms it in its step.
            normed_TH = F.rms_norm(
                batch.vlh_TH, batch.vlh_TH.shape[-1:], eps=case.arch.rms_norm_eps
            )
            batch = replace(batch, vlh_TH=normed_TH)
        self.batch, self.state, self.seq = batch, random_state(case), 0
        self.first: float | None = None

    def run(self, steps: int) -> list[float]:
        clock = Clock()
        clock.mark()
        for _ in range(steps):
            train_step(self.state, self.batch, seq=self.seq, pass_idx=0)
            self.seq += 1
            clock.mark()
            if self.first is None:
                self.first = self.state.metrics.read()["loss"]
        return clock.seconds()

    def loss(self) -> float:
        assert self.first is not None
        return self.first

    def holds(self) -> str:
        kept = self.state.optimizer
        return f"weights {kept.weights.dtype}, masters {kept.masters.dtype}, moments " + str(
            kept.exp_avg.dtype
        )


def theirs_hold(weights: Tensor, optimizer: torch.optim.Optimizer) -> str:
    """optimizer: theirs, after a step. Its own parameters are the masters."""
    master = next(p for p in optimizer.param_groups[0]["params"] if p in optimizer.state)
    moment = optimizer.state[master]["exp_avg"]
    return f"weights {weights.dtype}, masters {master.dtype}, moments {moment.dtype}"


@dataclass
class Turn:
    times_s: list[float]
    first_s: float
    """Building, compiling, warming up."""
    left_gib: float
    """Allocated before it began: of the peak, not its own."""
    peak_gib: float
    loss: float
    holds: str
    documents: int


def free_the_last_side() -> float:
    """GiB that are held all the same."""
    gc.collect()
    if not torch.cuda.is_available():
        return 0.0
    if torch.cuda.memory_allocated() > LEFT_OVER_BYTES:
        torch.compiler.reset()  # compiled code may hold what it was compiled for
        gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated() / 2**30


def take_turn(make: Callable[[], Side], steps: int) -> Turn:
    """Builds, warms up and times one side, alone on the GPU."""
    on_gpu = torch.cuda.is_available()
    left_gib = free_the_last_side()
    start_s = time.monotonic()
    side = make()
    step_s = side.run(WARM_UPS)[-1]
    first_s = time.monotonic() - start_s
    if on_gpu:
        side.run(math.ceil(WARM_UP_S / step_s))
        steps = max(steps, math.ceil(LEAST_S / step_s))
    if on_gpu and not side.keeps_a_pool:
        torch.cuda.reset_peak_memory_stats()
    times_s = side.run(steps)
    peak_gib = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    return Turn(times_s, first_s, left_gib, peak_gib, side.loss(), side.holds(), side.documents)


def compare(
    ours: Mapping[str, Callable[[], Side]],
    theirs: Mapping[str, Callable[[], Side]],
    args: Namespace,
    facts: dict[str, Any],
) -> list[dict[str, Any]]:
    """One result for each pair. A peer that can't run is a result too: `failed` says why."""
    turns: dict[str, list[Turn]] = {name: [] for name in (*ours, *theirs)}
    failed: dict[str, str] = {}
    for _, (name, make) in itertools.product(range(args.rounds), {**ours, **theirs}.items()):
        if name in failed:
            continue
        try:
            turns[name].append(take_turn(make, args.steps))
        except Exception as error:
            if name in ours:
                raise
            failed[name] = f"{type(error).__name__}: {error}"[:2000]
        else:
            last = turns[name][-1]
            print(
                f"  {name}: {statistics.median(last.times_s):.4f} s, first {last.first_s:.0f} s, "
                f"{last.peak_gib:.1f} GiB ({last.left_gib:.2f} before)",
                flush=True,
            )
    torch.compiler.reset()
    found = []
    for our_name, their_name in itertools.product(ours, theirs):
        result = facts | machine() | {"ours": summary(our_name, turns[our_name])}
        if their_name in failed:
            result |= {"theirs": {"name": their_name, "failed": failed[their_name]}}
        else:
            result |= {"theirs": summary(their_name, turns[their_name])}
            result |= ratios(result["ours"], result["theirs"])
        print(line(result), flush=True)
        found.append(result)
    return found


def summary(name: str, turns: list[Turn]) -> dict[str, Any]:
    """Over all turns of a side."""
    times_s = [seconds for turn in turns for seconds in turn.times_s]
    step_s = statistics.median(times_s)
    return {
        "name": name,
        "step_s": step_s,
        "steps_s": times_s,
        "documents": turns[0].documents,
        "document_s": step_s / turns[0].documents,
        "peak_gib": max(turn.peak_gib for turn in turns),
        "left_gib": [turn.left_gib for turn in turns],
        "first_steps_s": [turn.first_s for turn in turns],
        "holds": turns[0].holds,
        "loss_value": turns[0].loss,
    }


def ratios(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    return {
        "ratio_per_document": theirs["document_s"] / ours["document_s"],
        "loss_differs_by": abs(theirs["loss_value"] / ours["loss_value"] - 1),
    }


def machine() -> dict[str, Any]:
    return {
        "bench": "peers",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "command": f"python -m benchmarks.peers.{Path(sys.argv[0]).stem} " + " ".join(sys.argv[1:]),
        "commit": commit(),
    }


def line(result: dict[str, Any]) -> str:
    ours, theirs = result["ours"], result["theirs"]
    sides = [
        f"{side['name']} {side['step_s']:.4f} s {side['peak_gib']:.1f} GiB ({side['holds']})"
        for side in (ours, theirs)
        if "failed" not in side
    ]
    if "failed" in theirs:
        return f"{result['shapes']}: {sides[0]} | {theirs['name']} FAILED: {theirs['failed']}"
    losses = f"loss {ours['loss_value']:.5f} and {theirs['loss_value']:.5f}"
    ratio = f"x{result['ratio_per_document']:.2f} a document"
    return f"{result['shapes']}: {' | '.join(sides)} | {ratio}, {losses}"


def tiny_case(loss: str, shapes: Shapes = TINY) -> Case:
    """On a CPU: eager and in float32."""
    case = shapes.case("tiny", loss, "eager")
    config = case.config
    changes = {
        "drafter": config.drafter.model_copy(update={"device": "cpu", "dtype": "float32"}),
        "target": config.target.model_copy(update={"dtype": "float32"}),
    }
    return replace(case, config=config.model_copy(update=changes))


def options(what: str) -> ArgumentParser:
    parser = ArgumentParser(description=what)
    parser.add_argument("--steps", type=count, default=3, help="timed in a turn, at least")
    parser.add_argument("--rounds", type=count, default=2, help="turns of each side")
    parser.add_argument("--tiny", action="store_true", help="a dry run on a CPU, at tiny shapes")
    parser.add_argument("--json", type=new_file, help="write all measurements there")
    return parser


def parse(parser: ArgumentParser) -> Namespace:
    args = parser.parse_args()
    if not args.tiny and not torch.cuda.is_available():
        parser.error("steps are compared on a CUDA device, and there is none (or: --tiny)")
    # A turn rebuilds its modules; where that recompiles, the default of 8 would be reached.
    torch._dynamo.config.recompile_limit = 64
    return args
