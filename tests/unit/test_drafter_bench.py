"""What the drafter's bench counts, against torch's own counter of a real step's operations."""

from __future__ import annotations

import os
import sys
import threading

import psutil
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.drafter import union
from benchmarks.load import NEIGHBOURS, Chip, chip_figures, chip_of
from benchmarks.shapes import SHAPES, Case, Shapes, floor_s, step_flop
from dflash.model import DFlashDrafter, FrozenEnds
from dflash.step import Batch, TrainState, forward_loss

TINY = Shapes(32, 48, 4, 2, 8, 64, 64, 32, 8, 8)


def tiny_step(loss: str) -> tuple[TrainState, Batch]:
    case = TINY.case("tiny", loss, "graph")
    on_cpu = {"device": "cpu", "dtype": "float32"}
    config = case.config.model_copy(
        update={
            "drafter": case.config.drafter.model_copy(update=on_cpu),
            "step": case.config.step.model_copy(update={"mode": "eager"}),
        }
    )
    ends = FrozenEnds(torch.randn(64, 32), torch.randn(64, 32))
    state = TrainState.around(config, DFlashDrafter(case.arch), ends)
    state.plain = True
    batch = Batch(
        all_TF=torch.randn(64, 160),
        vlh_TH=torch.randn(64, 32) if loss == "kl" else None,
        ids_T=torch.randint(60, (64,)),
        lm_T=torch.ones(64, dtype=torch.bool),
        lens_D=torch.full((2,), 32),
        pos_T=torch.arange(32).repeat(2),
        total_tok=torch.tensor(64),
    )
    return state, batch


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_counted_operations_are_those_of_a_step(loss: str) -> None:
    """Its matmuls, but for two savings that the count, like other trainers' steps, leaves out. Not
    attention: the plain step computes what the masks hide."""
    state, batch = tiny_step(loss)
    state.set_inputs(0, 0)
    with FlopCounterMode(display=False) as counter:
        value, _ = forward_loss(state, batch)
        torch.autograd.grad(value, state.optimizer.parameters)
    matmuls = sum(
        flop
        for operator, flop in counter.get_flop_counts()["Global"].items()
        if operator.__name__ in ("mm", "addmm")
    )
    counted = step_flop(state.drafter.arch, state.config, 0)
    repeated = 6 * (64 - 9) * 32 * (32 + 2 * 16)  # of 64 rows, the first layer projects 9
    anchors = 6 * 8 * (32 * 32 + 3 * 32 * 48)  # 8 rows that the last layer leaves out
    assert matmuls == counted - repeated - anchors


@pytest.mark.parametrize("name", SHAPES)
def test_the_floor_grows_with_the_target_pass_of_kl(name: str) -> None:
    floors = []
    for loss in ("ce", "kl"):
        case: Case = SHAPES[name].case(name, loss, "graph")
        assert case.config.num_anchors == SHAPES[name].anchors
        flop = step_flop(case.arch, case.config, 1e6)
        floors.append(floor_s(case.arch, case.config, flop))
    assert floors[0] < floors[1] < 1.5 * floors[0]


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_a_busy_neighbour_is_there_inside_the_block_alone(name: str) -> None:
    def alive() -> int:
        return len(psutil.Process().children()) + threading.active_count()

    before, interval_s = alive(), sys.getswitchinterval()
    with NEIGHBOURS[name]():
        assert alive() == before + (os.cpu_count() if name == "cores" else 1)
        wanted_s = {"thread": 1e-4, "thread-5ms": 5e-3, "cores": interval_s}[name]
        assert sys.getswitchinterval() == pytest.approx(wanted_s)
    assert alive() == before and sys.getswitchinterval() == interval_s


def test_the_time_that_a_gpu_runs_something_counts_once_and_gaps_count_not() -> None:
    """Two overlap, one lies inside another, one begins where another ends, two after a gap."""
    ran = [(15.0, 18.0), (0.0, 4.0), (2.0, 6.0), (3.0, 5.0), (6.0, 7.0), (10.0, 12.0)]
    assert union(ran) == (7.0 + 2.0 + 3.0, 18.0)
    assert union([(100.5, 101.0)]) == (0.5, 0.5)


def test_a_chips_figures_are_medians_and_every_reason_for_a_low_clock() -> None:
    """The first line is an H200's."""
    lines = ["1545, 690.65, 0x0000000000000004\n", "1470, 695, 0x40\n", "1980, 375, 0x0\n"]
    chips = [chip_of(line) for line in lines]
    assert chips[0] == Chip(1545, 690.65, 4)
    assert chip_figures(chips) == {"sm_mhz": 1545, "watt": 690.65, "held_by": "0x44"}
    assert chip_figures([]) == {"sm_mhz": None, "watt": None, "held_by": None}


def test_a_case_slides_in_all_layers_or_in_all_but_the_last() -> None:
    types = {name: SHAPES[name].arch().layer_types for name in ("27b", "27b-sliding", "8b")}
    sliding, full = "sliding_attention", "full_attention"
    assert types["27b"] == (sliding,) * 4 + (full,)
    assert types["27b-sliding"] == (sliding,) * 5 and types["8b"] == (full,) * 5


def test_a_case_with_a_float8_head_says_so_in_its_config() -> None:
    case = SHAPES["8b"].case("8b", "kl", "graph")
    assert case.with_float8_head().config.step.head_float8 and not case.config.step.head_float8
