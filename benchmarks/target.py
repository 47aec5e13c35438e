"""The target's half on a GPU: tokens per second through the forward, and into the ring's slots.

    python launch.py bench target CONFIG [SECTION.KEY=VALUE ...] [--micro-batch-tokens N ...]

The documents are the config's own, dealt into slots by the run's plan. `forward` runs slots from
the token ids to the states on the device; `slots` is the target worker's own loop, into a real ring
that a reader empties: sums, copies and publishing included. `padding` is what the micro-batches'
rows have beside their tokens: fast layers pay for it in attention and recurrence alone. `python -m
benchmarks.target` is the same program.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from dflash.arch import DrafterArch, TargetArch
from dflash.config import Config, ConfigError, load_config
from dflash.data import Dataset
from dflash.plan import Plan
from dflash.prepare import Prepared, prepare
from dflash.spans import Spans
from dflash.target import CaptureError
from launcher.preflight import check_early
from launcher.slot import slot_fields
from shm_ring import RingError, RingReader, RingWriter, create, destroy
from shm_ring.pin import unpin
from target_worker import StagedFiller, load_target

from . import commit, count, keep, line, new_file
from .shapes import FLOP_PER_S, has_ceilings

SLOTS = 4
FIRST, LAST = 2, -2
"""The arrivals between which slots count: the pipeline is full at the first, and the host learns of
both in one way. It looks for a copy's end while it queues the next forward, and a launch queue that
is full holds it there, so it learns of it late: at 27B by a second. The last arrival has no forward
after it, and is seen at once."""


class Call(NamedTuple):
    """A micro-batch's forward."""

    rows: int
    length: int
    tokens: int
    """Without padding."""
    flop: float
    seconds: float


def by_shape(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Of all micro-batches of a shape, longest first: rates, and what is padding."""
    shapes = sorted({(call.length, call.rows) for call in calls}, reverse=True)
    found = []
    for length, rows in shapes:
        same = [call for call in calls if (call.length, call.rows) == (length, rows)]
        tokens, seconds = sum(call.tokens for call in same), sum(call.seconds for call in same)
        found.append(
            {
                "shape": f"{rows}x{length}",
                "calls": len(same),
                "tok_per_s": tokens / seconds,
                "tflop_per_s": sum(call.flop for call in same) / seconds / 1e12,
                "padding": len(same) * rows * length / tokens - 1,
            }
        )
    return found


class Bench:
    def __init__(self, config: Config, shapes: str, *, stock: bool) -> None:
        self.config, self.shapes = config, shapes
        self.prepared: Prepared = prepare(config)
        self.target_arch = TargetArch.read(self.prepared.target_dir)
        self.arch = DrafterArch.build(config, self.target_arch, self.prepared.mask_token_id)
        self.dataset = Dataset.load(self.prepared.dataset)
        ring = config.ring
        self.plan = Plan(
            self.dataset.lengths,
            seed=config.run.seed,
            max_tokens=ring.max_tokens,
            max_docs=ring.max_docs,
        )
        start_s = time.monotonic()
        self.target = load_target(config, self.prepared, self.arch)
        if stock:
            self.target.fast = None
        self.load_s = time.monotonic() - start_s
        self.self_test = "passed"

    def documents(self, seq: int) -> list[tuple[np.ndarray, np.ndarray]]:
        return [self.dataset.document(int(name)) for name in self.plan.slot(seq)]

    def measure(
        self, loss: str, micro_batch_tokens: int, slots: int, kernels: int
    ) -> dict[str, Any]:
        train = self.config.train.model_copy(update={"loss": loss})
        self.config = self.config.model_copy(update={"train": train})
        self.target.micro_batch_tokens = micro_batch_tokens
        torch.cuda.reset_peak_memory_stats()
        forward = self.forward(slots, kernels)
        in_slots = self.into_slots(slots)
        return {
            "bench": "target",
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "command": "python -m benchmarks.target " + " ".join(sys.argv[1:]),
            "commit": commit(),
            "shapes": self.shapes,
            "self_test": self.self_test,
            "model": self.config.target.model,
            "random_weights": self.config.target.random_weights,
            "layers": "stock" if self.target.fast is None else "fast",
            "loss": loss,
            "layers_run": self.layers_run,
            "micro_batch_tokens": micro_batch_tokens,
            "load_s": self.load_s,
            **forward,
            **in_slots,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        }

    def forward(self, slots: int, kernels: int) -> dict[str, Any]:
        """Of `slots` slots in a row, after another: the median of their rates."""
        rows, hidden = self.config.ring.max_tokens, self.arch.hidden_size
        options: dict[str, Any] = {"dtype": self.target.dtype, "device": self.target.device}
        all_TF = torch.empty(rows, self.arch.num_taps * hidden, **options)
        vlh_TH = torch.empty(rows, hidden, **options) if self.config.wants_vlh else None
        ids = [[ids for ids, _ in self.documents(seq)] for seq in range(slots + 1)]
        start_s = time.monotonic()
        self.target.capture(ids[0], all_TF, vlh_TH)
        torch.cuda.synchronize()
        first_s = time.monotonic() - start_s
        marks: list[torch.cuda.Event] = []
        begins, calls = [0], list[Call]()

        def mark() -> None:  # at a micro-batch's begin, and at a slot's end
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()

        for docs in ids[1:]:
            self.target.capture(docs, all_TF, vlh_TH, beat=mark)
            begins.append(len(marks))
        mark()
        torch.cuda.synchronize()
        took = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]
        times = [sum(took[a:b]) for a, b in itertools.pairwise(begins)]
        for docs in ids[1:]:
            for batch in self.target.micro_batches([len(ids) for ids in docs]):
                own = [docs[number] for number in batch.documents]
                tokens, flop = sum(map(len, own)), self.flop(own)
                calls.append(Call(len(own), batch.length, tokens, flop, took[len(calls)]))
        real = [sum(map(len, docs)) for docs in ids[1:]]
        padded = sum(call.rows * call.length for call in calls)
        flop = sum(call.flop for call in calls) / sum(real)
        tok_per_s = statistics.median(n / s for n, s in zip(real, times, strict=True))
        table = {}
        if kernels:
            with profile(activities=[ProfilerActivity.CUDA]) as prof:
                self.target.capture(ids[1], all_TF, vlh_TH)
                torch.cuda.synchronize()
            table = kernel_table(prof, kernels)
        return {
            "forward_s": statistics.median(times),
            "forward_tok_per_s": tok_per_s,
            "tflop_per_s": flop * tok_per_s / 1e12,
            "share_of_matmul_roof": flop * tok_per_s / FLOP_PER_S
            if has_ceilings(torch.cuda.get_device_name())
            else None,
            "padding": padded / sum(real) - 1,
            "documents_per_slot": statistics.mean(map(len, ids)),
            "micro_batches": by_shape(calls),
            "first_slot_s": first_s,
            "kernels_ms": table,
        }

    @property
    def layers_run(self) -> int:
        return self.arch.num_target_layers if self.config.wants_vlh else self.arch.taps[-1] + 1

    def flop(self, documents: Sequence[np.ndarray]) -> float:
        """Of the layers that run: their matmuls, and attention's two, of what is not masked."""
        layers: list[Any] = list(self.target.layers[: self.layers_run])
        tokens, pairs = sum(map(len, documents)), sum(len(ids) ** 2 / 2 for ids in documents)
        weights, attention = 0.0, 0.0
        for layer in layers:
            for name, module in layer.named_modules():
                if isinstance(module, torch.nn.Linear):
                    weights += module.weight.numel()
                elif name.split(".")[-1] == "experts":  # not shared_experts, of linear layers
                    held = sum(p.numel() for p in module.parameters(recurse=False))
                    weights += (
                        held / module.num_experts * self.target.backbone.config.num_experts_per_tok
                    )
            if hasattr(layer, "self_attn"):
                attention += 4 * layer.self_attn.o_proj.in_features * pairs
        return 2 * tokens * weights + attention

    def into_slots(self, slots: int) -> dict[str, Any]:
        """The target worker's loop; a slot counts when it is published."""
        config, fields = self.config, slot_fields(self.config, self.arch)
        path = config.ring.path.with_name(f"{config.ring.path.name}_bench")
        total = FIRST - LAST + slots
        create(path, fields, SLOTS, end_seq=total, run_name="bench target")
        writer = RingWriter(path, "target_0", fields=fields, verify=config.ring.verify)
        reader = RingReader(path, "reader", fields=fields, verify=False)
        arrived: list[tuple[float, int]] = []

        def read() -> None:
            for seq in range(total):
                lease = reader.take(seq)
                arrived.append((time.monotonic(), lease.total_tok))
                reader.done(lease)
            reader.close_run()

        try:
            reader.rewind(0)
            start_s = time.monotonic()
            filler = StagedFiller(writer, self.target, config, self.arch, Spans(None, "cuda"))
            pin_s = time.monotonic() - start_s
            thread = threading.Thread(target=read, daemon=True)
            thread.start()
            while (lease := filler.claim()) is not None:
                names = self.plan.slot(lease.seq).tolist()
                filler.fill(lease, names, self.documents(lease.seq))
            filler.finish()
            thread.join()
            unpin(writer)  # else the next ring, at the same address, counts as locked
        finally:
            writer.leave()
            reader.leave()
            destroy(path, force=True)
        slot_s, tok_per_s = rate(arrived)
        rows = arrived[-1][1]
        nbytes = sum(field.valid_bytes(rows) for field in fields if field.name in ("all", "vlh"))
        return {
            "slots_tok_per_s": tok_per_s,
            "slot_s": slot_s,
            "slot_gb": nbytes / 1e9,
            "gb_per_s": nbytes / slot_s / 1e9,
            "copy_s": self.copy_s(rows),
            "pin_s": pin_s,
        }

    def copy_s(self, rows: int) -> float:
        """Of so many rows of a slot's states to page-locked memory, nothing else running."""
        hidden = self.arch.hidden_size
        widths = [self.arch.num_taps * hidden, *([hidden] if self.config.wants_vlh else [])]
        options: dict[str, Any] = {"dtype": self.target.dtype}
        here = [torch.empty(rows, width, device="cuda", **options) for width in widths]
        there = [torch.empty(rows, width, pin_memory=True, **options) for width in widths]
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        marks[0].record()
        for mark in marks[1:]:  # the first time to warm up
            for to, states in zip(there, here, strict=True):
                to.copy_(states, non_blocking=True)
            mark.record()
        torch.cuda.synchronize()
        return marks[1].elapsed_time(marks[2]) / 1e3


def rate(arrived: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Seconds a slot and tokens a second, of each slot's arrival (a clock's seconds) and tokens."""
    taken_s = arrived[LAST][0] - arrived[FIRST][0]
    tokens = [total_tok for _, total_tok in arrived][FIRST + 1 : LAST + 1]
    return taken_s / len(tokens), sum(tokens) / taken_s


def kernel_table(prof: Any, top: int) -> dict[str, float]:
    """Milliseconds of the `top` kernels, matmuls taken together."""
    found: dict[str, list[float]] = {}
    for event in prof.key_averages():
        if event.self_device_time_total > 0:
            name = "matmuls" if is_matmul(event.key) else event.key[:90]
            entry = found.setdefault(name, [0.0, 0])
            entry[0] += event.self_device_time_total / 1e3
            entry[1] += event.count
    ranked = sorted(found.items(), key=lambda item: -item[1][0])[:top]
    return {f"{name} x{int(count)}": ms for name, (ms, count) in ranked}


def is_matmul(name: str) -> bool:
    return any(part in name for part in ("nvjet", "gemm", "cutlass", "cublas"))


SHAPE_COLUMNS = {
    "shape": "{}",
    "calls": "{}",
    "tok_per_s": "{:,.0f}",
    "tflop_per_s": "{:.0f}",
    "padding": "{:.3f}",
}
COLUMNS = {
    "layers": "{}",
    "loss": "{}",
    "layers_run": "{}",
    "micro_batch_tokens": "{}",
    "forward_tok_per_s": "{:,.0f}",
    "slots_tok_per_s": "{:,.0f}",
    "tflop_per_s": "{:.0f}",
    "share_of_matmul_roof": "{:.3f}",
    "padding": "{:.3f}",
    "slot_s": "{:.3f}",
    "copy_s": "{:.3f}",
    "pin_s": "{:.1f}",
    "load_s": "{:.0f}",
    "first_slot_s": "{:.0f}",
    "peak_gib": "{:.1f}",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="launch.py bench target", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument(
        "--micro-batch-tokens", type=count, nargs="+", help="instead of the config's"
    )
    parser.add_argument(
        "--loss", nargs="+", choices=["ce", "kl"], help="kl needs all layers; default: the config's"
    )
    parser.add_argument("--slots", type=count, default=6, help="measured slots")
    parser.add_argument("--stock", action="store_true", help="transformers' own layers")
    parser.add_argument("--kernels", type=int, default=0, help="show so many kernels' times")
    parser.add_argument("--json", type=new_file, help="write all measurements there")
    args = parser.parse_intermixed_args()
    if not torch.cuda.is_available():
        parser.exit(2, "the target's half is measured on a CUDA device, and there is none\n")
    try:
        config = load_config(
            args.config, [*args.overrides, "target.device=cuda", "drafter.device=cuda"]
        )
        check_early(config)
        bench = Bench(config, args.config.stem, stock=args.stock)
    except ConfigError as error:
        parser.exit(2, f"{error}\n")
    try:
        start_s = time.monotonic()
        bench.target.self_test()
        print(f"capture self-test passed in {time.monotonic() - start_s:.1f} s")
    except CaptureError as error:
        bench.self_test = str(error)
        print(f"NOT the model's states: {error}")
    found = []
    budgets = args.micro_batch_tokens or [config.target.micro_batch_tokens]
    for loss, tokens in itertools.product(args.loss or [config.train.loss], budgets):
        try:
            found.append(bench.measure(loss, tokens, args.slots, args.kernels))
        except RingError as error:  # no room for it, most of all
            parser.exit(1, f"{error}\n")
        for kernel, ms in found[-1]["kernels_ms"].items():
            print(f"{ms:9.3f} ms  {kernel}")
        for shape in found[-1]["micro_batches"]:
            print("  " + line(shape, SHAPE_COLUMNS))
        print(line(found[-1], COLUMNS))
        keep(found, args.json)


if __name__ == "__main__":
    main()
