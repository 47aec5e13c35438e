"""The matmul bench's products, against the step's count and torch's own counter."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.matmul import Product, products
from benchmarks.shapes import SHAPES, Shapes, Work, step_flop

TINY = Shapes(32, 48, 4, 2, 8, 64, 64, 32, 8, 8)


@pytest.mark.parametrize("loss", ["ce", "kl"])
@pytest.mark.parametrize("shapes", [TINY, SHAPES["smollm2"]])
def test_the_products_are_all_of_a_steps(shapes: Shapes, loss: str) -> None:
    case = shapes.case("any", loss, "graph")
    flop = sum(each.flop * each.times for each in products(case.arch, case.config, "cpu"))
    assert flop == pytest.approx(step_flop(case.arch, case.config, Work.full(case.config)))


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("forward", "random"),
        ("input gradient", "random"),
        ("weight gradient", "random"),
        ("input gradient", "float8"),
    ],
)
def test_a_product_multiplies_what_it_says(kind: str, how: str) -> None:
    product = Product("any", kind, 6, 10, 14, 1, how)  # type: ignore[arg-type]
    multiply = product.ready(torch.float32, "cpu")
    with FlopCounterMode(display=False) as counter:
        multiply()
    assert counter.get_total_flops() == product.flop
