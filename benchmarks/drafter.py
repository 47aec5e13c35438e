"""The drafter's training step on a GPU: time, floor, memory, launches, gaps, host time, syncs.

    python launch.py bench drafter --shapes 27b --loss kl --mode graph --json FILE
    python launch.py bench drafter CONFIG [SECTION.KEY=VALUE ...] [--slot DIRECTORY]

Random weights; random states under equal documents, every token supervised: the same work as a full
slot. Or a slot that a run has recorded, as full as that one was: its directory in the ring, or a
copy. Neither needs the target's weights. `python -m benchmarks.drafter` is the same program.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import statistics
import sys
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from dflash.anchors import documents, hash_keys, sample_anchors, valid_anchors
from dflash.arch import DrafterArch
from dflash.block_attention import context_range
from dflash.config import Config, ConfigError
from dflash.model import DFlashDrafter, FrozenEnds
from dflash.step import DTYPES, Batch, TrainState, draw, masks, train_step

from . import commit, count, keep, line, new_file
from .load import NEIGHBOURS, Chip, chip_figures, read_chip
from .recorded import recorded_slot, to_device
from .shapes import SHAPES, Case, Work, floor_s, has_ceilings, step_flop

WARM_UP_S = 2.0
"""Of steps in a row before any is timed: matmuls run a tenth faster for a second after a pause."""
LEAST_S = 1.0
"""Of the timed steps together."""
PROFILED_S = 0.1
"""Of the steps in a row in which the GPU's gaps are looked for: a profiler keeps every kernel."""


def random_weights(case: Case) -> tuple[DFlashDrafter, FrozenEnds]:
    """The same values at every call."""
    torch.manual_seed(0)
    arch, dtype = case.arch, DTYPES[case.config.drafter.dtype]
    with torch.device(case.config.drafter.device):
        drafter = DFlashDrafter(arch).to(dtype)
        for parameter in drafter.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.02)
        embed_VH = torch.empty(arch.vocab_size, arch.hidden_size, dtype=dtype).normal_(std=0.02)
        head_VH = embed_VH if case.tied else torch.empty_like(embed_VH).normal_(std=0.02)
    return drafter, FrozenEnds(embed_VH, head_VH)


def random_state(case: Case) -> TrainState:
    return TrainState.around(case.config, *random_weights(case))


def random_batch(case: Case) -> Batch:
    """Full of documents, to the last token."""
    arch, tokens = case.arch, case.config.ring.max_tokens
    lens = torch.full((-(-tokens // case.document_tokens),), case.document_tokens)
    lens[-1] -= int(lens.sum()) - tokens
    dtype, device = DTYPES[case.config.target.dtype], case.config.drafter.device
    with torch.device(device):
        return Batch(
            all_TF=torch.randn(tokens, arch.num_taps * arch.hidden_size, dtype=dtype),
            vlh_TH=torch.randn(tokens, arch.hidden_size, dtype=dtype)
            if case.config.wants_vlh
            else None,
            ids_T=torch.randint(arch.vocab_size - 1, (tokens,)),
            lm_T=torch.ones(tokens, dtype=torch.bool),
            lens_D=lens.to(device),
            pos_T=torch.cat([torch.arange(int(n)) for n in lens]),
            total_tok=torch.tensor(tokens),
        )


def given_work(arch: DrafterArch, batch: Batch, config: Config) -> Work:
    """What the batch gives the run's first step to do."""
    tokens, block = len(batch.ids_T), arch.block_size
    doc_T = documents(batch.lens_D, batch.total_tok, tokens)
    keys_T = hash_keys(config.run.seed, 0, 0, tokens, doc_T.device)
    valid_T = valid_anchors(batch.lm_T, doc_T)
    anchors = sample_anchors(keys_T, valid_T, doc_T, config.num_anchors)
    low_A, high_A = context_range(anchors, batch.lens_D)
    length_A1, valid = (high_A - low_A)[:, None], int(anchors.valid_A.sum())
    offset_K, pairs = torch.arange(block, device=doc_T.device), 0
    for layer in range(arch.num_layers):
        window = arch.layer_window(layer) or tokens + block
        reach_K = (window - 1 - offset_K).clamp_min(0)
        own = block * (block + 1) // 2 if arch.layer_causal(layer) else block * block
        pairs += int(length_A1.minimum(reach_K).sum()) + own * valid
    return Work(int(batch.total_tok), valid, pairs)


def documents_of(batch: Batch) -> dict[str, int]:
    """How many, and their tokens in the mean."""
    count = int((batch.lens_D > 0).sum())
    return {"documents": count, "document_tokens": round(int(batch.total_tok) / count)}


def measure(
    case: Case, recorded: Batch | None, steps: int, kernels: int, beside: list[str]
) -> dict[str, Any]:
    config, arch, gpu = case.config, case.arch, torch.cuda.get_device_name()
    state = random_state(case)
    batch = random_batch(case) if recorded is None else to_device(recorded, config.drafter.device)
    torch.cuda.reset_peak_memory_stats()
    start_s = time.monotonic()
    for seq in range(3):
        train_step(state, batch, seq=seq, pass_idx=0)
    torch.cuda.synchronize()
    first_s = time.monotonic() - start_s

    estimate_s = statistics.median(time_steps(state, batch, 3)[0])
    time_steps(state, batch, math.ceil(WARM_UP_S / estimate_s))
    times, chips = time_steps(state, batch, max(steps, math.ceil(LEAST_S / estimate_s)))
    step_s = statistics.median(times)

    start_s = time.monotonic()
    train_step(state, batch, seq=0, pass_idx=2)
    host_s = time.monotonic() - start_s
    torch.cuda.synchronize()
    work = given_work(arch, batch, config)
    flop = step_flop(arch, config, work)
    figures = state.metrics.read()
    floor = floor_s(arch, config, work) if has_ceilings(gpu) else None
    launches, table = count_kernels(state, batch, kernels)
    busy, profiled_s = profile_gaps(state, batch, max(3, math.ceil(PROFILED_S / step_s)))
    peak_gib = torch.cuda.max_memory_allocated() / 2**30
    return {
        "bench": "drafter",
        "gpu": gpu,
        "torch": torch.__version__,
        "command": "python -m benchmarks.drafter " + " ".join(sys.argv[1:]),
        "commit": commit(),
        "shapes": case.name,
        "loss": config.train.loss,
        "mode": config.step_mode,
        "head_float8": config.step.head_float8,
        "slot": "random" if recorded is None else "recorded",
        "tokens": work.tokens,
        **documents_of(batch),
        "anchors": work.anchors,
        "step_s": step_s,
        "step_s_min": min(times),
        "step_s_max": max(times),
        "tok_per_s": work.tokens / step_s,
        "tflop_per_s": flop / step_s / 1e12,
        "floor_s": floor,
        "share_of_floor": None if floor is None else floor / step_s,
        "peak_gib": peak_gib,
        "launches": launches,
        "busy_share": busy,
        "profiled_step_s": profiled_s,
        "host_s": host_s,
        "syncs": count_syncs(state, batch),
        "first_steps_s": first_s,
        "masks_s": time_masks(state, batch),
        **{f"step_s_beside_{name}": time_beside(state, batch, name, len(times)) for name in beside},
        **chip_figures(chips),
        "kernels_ms": table,
        "loss_value": figures["loss"],
        "grad_norm": figures["grad_norm"],
        "skipped": figures["skipped"],
    }


def time_steps(state: TrainState, batch: Batch, steps: int) -> tuple[list[float], list[Chip]]:
    """Seconds on the GPU of each of `steps` steps in a row, and how the chip ran once the host had
    launched them all."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for seq in range(steps):
        train_step(state, batch, seq=seq, pass_idx=1)
        marks[seq + 1].record()
    chips = []
    while not marks[-1].query():
        chips.append(read_chip())
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)], chips


def time_beside(state: TrainState, batch: Batch, neighbour: str, steps: int) -> float:
    with NEIGHBOURS[neighbour]():
        return statistics.median(time_steps(state, batch, steps)[0])


def time_masks(state: TrainState, batch: Batch, replays: int = 20) -> float:
    """Seconds of making a step's masks, by themselves as one graph."""
    drawn = draw(batch, state.inputs, state.config.num_anchors, state.drafter.arch)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        masks(state, batch.lens_D, drawn)
    with torch.cuda.graph(graph, stream=stream):
        kept = masks(state, batch.lens_D, drawn)
    torch.cuda.current_stream().wait_stream(stream)
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    del kept
    return start.elapsed_time(end) / 1e3 / replays


def count_kernels(state: TrainState, batch: Batch, top: int) -> tuple[int, dict[str, float]]:
    """(launches, milliseconds of the `top` kernels) of one step."""
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        train_step(state, batch, seq=1, pass_idx=3)
        torch.cuda.synchronize()
    events = [e for e in prof.key_averages() if e.self_device_time_total > 0]
    events.sort(key=lambda e: -e.self_device_time_total)
    table = {f"{e.key[:90]} x{e.count}": e.self_device_time_total / 1e3 for e in events[:top]}
    return sum(e.count for e in events), table


def profile_gaps(state: TrainState, batch: Batch, steps: int) -> tuple[float, float]:
    """(share of the time in which the GPU runs a kernel, a copy or a fill; seconds a step), over
    `steps` in a row. The profiler slows steps of many kernels, so gaps are shorter without it."""
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for seq in range(steps):
            train_step(state, batch, seq=seq, pass_idx=4)
        torch.cuda.synchronize()
    ran_us = [
        (event.time_range.start, event.time_range.end)
        for event in prof.events() or ()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    covered_us, span_us = union(ran_us)
    return covered_us / span_us, span_us / 1e6 / steps


def union(intervals: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """(how much of the line the (start, end) cover; how much there is from first to last)."""
    ordered = sorted(intervals)
    first = reached = ordered[0][0]
    covered = 0.0
    for start, end in ordered:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered, reached - first


def count_syncs(state: TrainState, batch: Batch) -> int:
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_step(state, batch, seq=2, pass_idx=3)
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(w.message) for w in caught)


COLUMNS = {
    "shapes": "{}",
    "loss": "{}",
    "mode": "{}",
    "head_float8": "{}",
    "slot": "{}",
    "tokens": "{:,}",
    "documents": "{:,}",
    "document_tokens": "{:,}",
    "step_s": "{:.4f}",
    "tok_per_s": "{:,.0f}",
    "tflop_per_s": "{:.0f}",
    "share_of_floor": "{:.2f}",
    "peak_gib": "{:.1f}",
    "launches": "{}",
    "busy_share": "{:.3f}",
    "host_s": "{:.4f}",
    "syncs": "{}",
    "first_steps_s": "{:.0f}",
    "masks_s": "{:.6f}",
    "sm_mhz": "{}",
    "watt": "{}",
    "held_by": "{}",
}


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="launch.py bench drafter", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("config", type=Path, nargs="?", help="a run's config, for its shapes")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="instead: published sizes")
    parser.add_argument(
        "--slot",
        type=Path,
        metavar="DIRECTORY",
        help="with CONFIG: a slot_NNNN of its run's ring, or a copy, instead of random states",
    )
    parser.add_argument(
        "--document-tokens",
        type=count,
        metavar="N",
        help="with CONFIG: of each random document; default: 4096, or ring.max_tokens if less",
    )
    parser.add_argument(
        "--loss", nargs="+", choices=["ce", "kl"], help="default: the config's; kl with --shapes"
    )
    parser.add_argument(
        "--mode",
        nargs="+",
        choices=["eager", "compiled", "graph"],
        help="default: the config's; graph with --shapes",
    )
    parser.add_argument("--float8-head", action="store_true", help="step.head_float8=true")
    parser.add_argument("--steps", type=count, default=10, help="timed, at least")
    parser.add_argument(
        "--beside",
        nargs="+",
        choices=NEIGHBOURS,
        default=[],
        help="time it again beside a busy thread of this process (which switches as the trainer, "
        "or as Python by itself), or beside busy processes on all cores",
    )
    parser.add_argument("--kernels", type=int, default=0, help="show so many kernels' times")
    parser.add_argument("--json", type=new_file, help="write all measurements there")
    return parser


def asked_for(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> list[tuple[Case, Batch | None]]:
    """All that is to be measured, and the recorded slot, if it is on one. Raises ConfigError."""
    if (args.config is None) == (args.shapes is None):
        parser.error("say a CONFIG or --shapes")
    if args.shapes and (args.slot or args.document_tokens):
        parser.error("--slot and --document-tokens are of a CONFIG's ring: not with --shapes")
    if args.slot and args.document_tokens:
        parser.error("--document-tokens is of random documents: not with --slot")
    losses = args.loss or ([None] if args.config else ["kl"])
    modes = args.mode or ([None] if args.config else ["graph"])
    cases = [
        SHAPES[name].case(name, loss, mode)
        if name is not None
        else Case.of_config(
            args.config,
            args.overrides,
            loss=loss,
            mode=mode,
            document_tokens=args.document_tokens,
        )
        for name, loss, mode in itertools.product(args.shapes or [None], losses, modes)
    ]
    if args.float8_head:
        cases = [case.with_float8_head() for case in cases]
    return [(case, recorded_slot(case, args.slot) if args.slot else None) for case in cases]


def main() -> int:
    parser = options()
    args = parser.parse_intermixed_args()
    try:
        asked = asked_for(parser, args)
        if not torch.cuda.is_available():
            parser.exit(2, "the drafter's step is measured on a CUDA device, and there is none\n")
        found = []
        for case, recorded in asked:
            found.append(measure(case, recorded, args.steps, args.kernels, args.beside))
            for kernel, ms in found[-1]["kernels_ms"].items():
                print(f"{ms:9.3f} ms  {kernel}")
            print(line(found[-1], COLUMNS))
            for name in args.beside:
                print(f"beside busy {name}: {found[-1][f'step_s_beside_{name}']:.4f} s")
            keep(found, args.json)
            torch.compiler.reset()  # a function is compiled for at most 8 sets of shapes
            gc.collect()
            torch.cuda.empty_cache()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
