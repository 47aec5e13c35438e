"""What the drafter's bench counts, against torch's own counter of a real step's operations."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import psutil
import pytest
import torch
from tiny_step import make_arch, make_batch, make_config
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import line
from benchmarks.drafter import asked_for, documents_of, given_work, options, random_batch, union
from benchmarks.load import NEIGHBOURS, Chip, chip_figures, chip_of
from benchmarks.shapes import SHAPES, Case, Shapes, Work, floor_s, has_ceilings, step_flop
from dflash.anchors import documents
from dflash.config import ConfigError
from dflash.mask import dense_masks
from dflash.model import DFlashDrafter, FrozenEnds, layer_kinds
from dflash.step import Batch, TrainState, draw, forward_loss
from launcher.rundir import ROOT

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
    counted = step_flop(state.drafter.arch, state.config, Work.full(state.config))
    repeated = 6 * (64 - 9) * 32 * (32 + 2 * 16)  # of 64 rows, the first layer projects 9
    anchors = 6 * 8 * (32 * 32 + 3 * 32 * 48)  # 8 rows that the last layer leaves out
    assert matmuls == counted - repeated - anchors


@pytest.mark.parametrize("name", SHAPES)
def test_the_floor_grows_with_the_target_pass_of_kl(name: str) -> None:
    floors = []
    for loss in ("ce", "kl"):
        case: Case = SHAPES[name].case(name, loss, "graph")
        assert case.config.num_anchors == SHAPES[name].anchors
        floors.append(floor_s(case.arch, case.config, Work.full(case.config, pairs=1e6)))
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


@pytest.mark.parametrize("is_causal", [None, False])
def test_the_work_of_a_slot_is_its_tokens_and_what_the_dense_masks_let_through(
    is_causal: bool | None,
) -> None:
    """Of 12 anchors asked for, this slot has 8: two of its documents are trained."""
    config, arch, batch = make_config(), make_arch(is_causal=is_causal), make_batch()
    batch.lm_T.fill_(False)
    batch.lm_T[40:46] = True  # five that a token follows
    batch.lm_T[61:65] = True  # and three more
    inputs = torch.tensor([config.run.seed, 0, 0, 0.0], dtype=torch.float64)
    drawn = draw(batch, inputs, config.num_anchors, arch)
    doc_T = documents(batch.lens_D, batch.total_tok, len(batch.ids_T))
    dense = dense_masks(doc_T, drawn.anchors, arch.block_size, layer_kinds(arch))
    valid_Q = drawn.anchors.valid_A.repeat_interleave(arch.block_size)
    pairs = sum(int(dense[kind][valid_Q].sum()) for kind in layer_kinds(arch))
    assert given_work(arch, batch, config) == Work(78, 8, pairs)
    assert documents_of(batch) == {"documents": 5, "document_tokens": 16}


def test_a_half_full_slot_is_as_much_work_as_a_full_one_of_half_the_size() -> None:
    large = TINY.case("large", "kl", "graph")
    small = Shapes(32, 48, 4, 2, 8, 64, 32, 32, 8, 8).case("small", "kl", "graph")
    work = Work.full(large.config, pairs=100)._replace(tokens=32)
    assert work == Work.full(small.config, pairs=100)
    assert step_flop(large.arch, large.config, work) == step_flop(small.arch, small.config, work)


def test_a_floor_is_of_the_gpu_that_the_ceilings_were_measured_on() -> None:
    assert has_ceilings("NVIDIA H200") and has_ceilings("NVIDIA H200 NVL")
    assert not any(map(has_ceilings, ("NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB", "H20")))
    found = {"share_of_floor": None, "tokens": 1234}
    assert line(found, {"tokens": "{:,}", "share_of_floor": "{:.2f}"}) == (
        "tokens=1,234 share_of_floor=-"
    )


def asked(*arguments: str) -> list[Case]:
    parser = options()
    return [case for case, _ in asked_for(parser, parser.parse_intermixed_args(arguments))]


QWEN = "configs/qwen3_8b_2gpu.yaml"


def test_a_config_s_own_loss_mode_and_long_documents_are_the_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a target whose weights are not here."""
    monkeypatch.chdir(ROOT)
    (case,) = asked(QWEN, "ring.max_tokens=6144", "train.lr=1e-3")
    config = case.config
    assert (config.train.loss, config.step_mode, config.train.lr) == ("kl", "graph", 1e-3)
    assert (case.arch.hidden_size, case.arch.vocab_size) == (4096, 151936)
    assert case.document_tokens == 4096
    assert [case.document_tokens for case in asked(QWEN, "ring.max_tokens=2048")] == [2048]
    (case,) = asked(QWEN, "step.mode=compiled", "train.loss=ce", "--document-tokens", "550")
    assert (case.config.train.loss, case.config.step_mode) == ("ce", "compiled")
    assert case.document_tokens == 550
    both = asked(QWEN, "--loss", "kl", "ce", "--mode", "eager")
    assert [case.config.train.loss for case in both] == ["kl", "ce"]
    assert {case.config.step_mode for case in both} == {"eager"}
    (case,) = asked("--shapes", "8b")
    assert (case.config.train.loss, case.config.step_mode) == ("kl", "graph")


def test_documents_that_a_slot_cannot_be_full_of_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    for length in ("47", "49153"):  # 49,152 tokens, at most 1,024 documents
        with pytest.raises(ConfigError, match=f"--document-tokens {length}: .* 48 to 49152 tokens"):
            asked(QWEN, "--document-tokens", length)


def test_random_documents_fill_a_slot() -> None:
    case = TINY.case("tiny", "ce", "graph")
    on_cpu = case.config.drafter.model_copy(update={"device": "cpu"})
    config = case.config.model_copy(update={"drafter": on_cpu})
    batch = random_batch(Case("tiny", config, case.arch, 24, tied=False))
    assert batch.lens_D.tolist() == [24, 24, 16]
    assert documents_of(batch) == {"documents": 3, "document_tokens": 21}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nix.yaml"], "nix.yaml: no such file\n"),
        ([QWEN, "train.stpes=3"], f"{QWEN}: train.stpes: unknown key; nearest: train.steps\n"),
        ([QWEN, "--slot", "nix"], "--slot nix: no such directory: give a slot_NNNN of a ring\n"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(arguments: list[str], words: str) -> None:
    command = [sys.executable, "-m", "benchmarks.drafter", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shapes", "8b", "--slot", "slot_0000"], "not with --shapes"),
        (["--shapes", "8b", "--document-tokens", "9"], "not with --shapes"),
        ([QWEN, "--slot", "slot_0000", "--document-tokens", "9"], "not with --slot"),
        ([], "say a CONFIG or --shapes"),
        ([QWEN, "--shapes", "8b"], "say a CONFIG or --shapes"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        asked(*arguments)
    assert words in capsys.readouterr().err
