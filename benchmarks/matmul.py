"""The matmuls of a drafter's step, one by one on a GPU: TFLOP/s beside the chip's clock and power.

    python -m benchmarks.matmul --shapes 27b --json FILE

A product runs in a row for SECONDS after a rest. `first` is its speed before power holds the clock
down, `steady` that of the last half, which is what a step gets. Random bits, but for one product of
zeros: the same arithmetic at less power. The last line adds up a step's products at their steady
speed: what is left of a step's time is everything else.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from dflash.arch import DrafterArch
from dflash.config import Config
from dflash.head import FrozenHead, by_unit, quantise
from dflash.loss import chunk_rows
from dflash.step import DTYPES

from . import commit, keep, new_file
from .load import chip_figures, read_chip
from .shapes import SHAPES

SECONDS, FIRST_S, REST_S = 1.5, 0.1, 1.0
LARGE = ("27b", "8b", "8b-49k")
"""Elsewhere a launch takes longer than a product."""

Kind = Literal["forward", "input gradient", "weight gradient"]


@dataclass(frozen=True)
class Product:
    """One of the three of a linear layer, x_RI @ w_OI.T = y_RO."""

    name: str
    kind: Kind
    rows: int
    inputs: int
    outputs: int
    times: float
    """Of it in a step."""
    how: Literal["random", "zeros", "float8"] = "random"

    @property
    def flop(self) -> int:
        return 2 * self.rows * self.inputs * self.outputs

    def ready(self, dtype: torch.dtype, device: str) -> Callable[[], Any]:
        """A call that multiplies once, over operands that stay."""
        make = torch.zeros if self.how == "zeros" else torch.randn
        r, i, o = self.rows, self.inputs, self.outputs
        x_RI, y_RO, w_OI = (make(s, dtype=dtype, device=device) for s in ((r, i), (r, o), (o, i)))
        if self.how == "float8":  # as step.head_float8: the gradient comes rounded
            head, y = FrozenHead(w_OI, by_unit(w_OI)), quantise(y_RO)
            return lambda: head.input_grad(y, out=x_RI)
        if self.kind == "forward":
            return lambda: torch.mm(x_RI, w_OI.T, out=y_RO)
        if self.kind == "input gradient":
            return lambda: torch.mm(y_RO, w_OI, out=x_RI)
        return lambda: torch.mm(y_RO.T, x_RI, out=w_OI)


def products(arch: DrafterArch, config: Config, device: str) -> Iterator[Product]:
    """All of a step's, as shapes.step_flop counts them."""
    h, layers, tokens = arch.hidden_size, arch.num_layers, config.ring.max_tokens
    q, kv = (n * arch.head_dim for n in (arch.num_attention_heads, arch.num_key_value_heads))
    rows = config.num_anchors * arch.block_size
    yield from _linear("query", rows, h, q, layers)
    yield from _linear("key, value", rows, h, kv, 2 * layers)
    yield from _linear("attention's output", rows, q, h, layers)
    yield from _linear("gate, up", rows, h, arch.intermediate_size, 2 * layers)
    yield from _linear("down", rows, arch.intermediate_size, h, layers)
    features, *_, gradient = _linear("features", tokens, arch.num_taps * h, h, 1)
    yield from (features, gradient)
    yield from _linear("context's keys, values", tokens, h, 2 * kv * layers, 1)
    yield from head_products(arch, config, device)


def head_products(arch: DrafterArch, config: Config, device: str) -> Iterator[Product]:
    """A chunk's. The target's pass is counted as long as the draft's, though it is shorter: of
    distinct positions."""
    rows, h, vocab = config.num_anchors * (arch.block_size - 1), arch.hidden_size, arch.vocab_size
    head_VH = torch.empty(vocab, h, dtype=DTYPES[config.drafter.dtype], device=device)
    chunk = min(rows, chunk_rows(rows, head_VH))
    forward, gradient, _ = _linear("head", chunk, h, vocab, rows / chunk)
    yield replace(forward, times=forward.times * (2 if config.wants_vlh else 1))
    yield gradient


def _linear(name: str, rows: int, inputs: int, outputs: int, times: float) -> list[Product]:
    kinds: tuple[Kind, ...] = ("forward", "input gradient", "weight gradient")
    return [Product(name, kind, rows, inputs, outputs, times) for kind in kinds]


def measure(product: Product, dtype: torch.dtype) -> dict[str, Any]:
    multiply = product.ready(dtype, "cuda")
    once_s = between(launch(multiply, 3))[-1]
    count = max(8, round(SECONDS / once_s))
    time.sleep(REST_S)
    marks = launch(multiply, count)
    while not marks[count // 2].query():
        time.sleep(0.01)
    chips = []
    while not marks[-1].query():
        chips.append(read_chip())
    times_s = between(marks)
    first = max(1, round(FIRST_S / once_s))
    steady_s = sum(times_s[count // 2 :]) / (count - count // 2)
    return {
        "name": f"{product.name}, {product.kind}",
        "how": product.how,
        "rows_inputs_outputs": [product.rows, product.inputs, product.outputs],
        "times_a_step": product.times,
        "steady_s": steady_s,
        "first_tflop_per_s": product.flop * first / sum(times_s[:first]) / 1e12,
        "steady_tflop_per_s": product.flop / steady_s / 1e12,
        **chip_figures(chips),
    }


def launch(multiply: Callable[[], Any], count: int) -> list[torch.cuda.Event]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        multiply()
        mark.record()
    return marks


def between(marks: list[torch.cuda.Event]) -> list[float]:
    """Seconds of each; waits for the last."""
    marks[-1].synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]


def line(found: dict[str, Any]) -> str:
    return (
        f"{found['name']:40} {found['how']:7} {1e3 * found['steady_s']:8.3f} ms"
        f"  {found['first_tflop_per_s']:5.0f} first, {found['steady_tflop_per_s']:5.0f} TFLOP/s"
        f"  {found['sm_mhz']} MHz  {found['watt']} W  held by {found['held_by']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", choices=LARGE, required=True)
    parser.add_argument("--loss", choices=["ce", "kl"], default="kl")
    parser.add_argument("--json", type=new_file, help="write all measurements there")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "matmuls are measured on a CUDA device, and there is none\n")
    case = SHAPES[args.shapes].case(args.shapes, args.loss, "graph")
    of_a_step = list(products(case.arch, case.config, "cuda"))
    head = list(head_products(case.arch, case.config, "cuda"))
    beside = [replace(head[0], how="zeros"), replace(head[1], how="float8")]
    facts = {"bench": "matmul", "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    facts |= {"commit": commit(), "shapes": args.shapes, "loss": args.loss}
    results = []
    for product in (*of_a_step, *beside):
        results.append(facts | measure(product, DTYPES[case.config.drafter.dtype]))
        print(line(results[-1]), flush=True)
        keep(results, args.json)
    ours = results[: len(of_a_step)]
    total_s = sum(found["steady_s"] * found["times_a_step"] for found in ours)
    flop = sum(product.flop * product.times for product in of_a_step)
    print(f"a step's matmuls: {total_s:.4f} s, {flop / total_s / 1e12:.0f} TFLOP/s")


if __name__ == "__main__":
    main()
