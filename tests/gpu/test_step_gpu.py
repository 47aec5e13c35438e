"""The step on a CUDA device: the CPU's numbers from every mode, no host sync, replays that move."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tiny_step import make_arch, make_batch, make_state

from benchmarks.drafter import random_batch, random_state
from benchmarks.shapes import Case, Shapes
from dflash.anchors import hash_keys
from dflash.model import FrozenEnds
from dflash.step import Batch, TrainState, capture, train_step, warm_up

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ARCH = make_arch(head_dim=16)
MODES = ["eager", "compiled", "graph"]


def on_gpu(batch: Batch) -> Batch:
    return Batch(**{f.name: getattr(batch, f.name).cuda() for f in dataclasses.fields(batch)})


def gpu_state(mode: str = "eager", **changes: Any) -> TrainState:
    ends = make_state(ARCH, **changes).ends
    state = make_state(ARCH, device="cuda", mode=mode, **changes)
    state.ends = FrozenEnds(ends.embed_VH.cuda(), ends.head_VH.cuda())
    return state


def steps(state: TrainState, batch: Batch, count: int = 3) -> list[torch.Tensor]:
    return [train_step(state, batch, seq=seq, pass_idx=0).cpu() for seq in range(count)]


def test_both_devices_draw_the_same_anchors() -> None:
    words = (2**31 - 1, 10**10, 3)
    on_cpu = hash_keys(*words, 10_000, torch.device("cpu"))
    assert torch.equal(hash_keys(*words, 10_000, torch.device("cuda")).cpu(), on_cpu)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_every_mode_gives_the_cpus_figures(loss: str, mode: str) -> None:
    """float32: matmuls add in another order, so 1e-3. Three steps, each after the last's update."""
    cpu, gpu = make_state(ARCH, loss=loss), gpu_state(mode, loss=loss)
    want, got = steps(cpu, make_batch()), steps(gpu, on_gpu(make_batch()))
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(
        gpu.optimizer.weights.cpu(), cpu.optimizer.weights, rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize("weights", ["decay", "dpace"])
@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_modes_agree_in_bfloat16(loss: str, weights: str) -> None:
    """Fused kernels round less often: 3 % of the figures' size. The graph replays the compiled
    pieces, so those two agree to the last bit but for atomics: 0.1 %."""
    found = [
        torch.stack(
            steps(
                gpu_state(mode, loss=loss, position_weights=weights, dtype="bfloat16"),
                on_gpu(make_batch()),
            )
        )
        for mode in MODES
    ]
    assert (found[1] - found[0]).norm() < 0.03 * found[0].norm()
    assert (found[2] - found[1]).norm() < 0.001 * found[1].norm()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_a_step_never_makes_the_host_wait(loss: str, mode: str) -> None:
    state = gpu_state(mode, loss=loss, dtype="bfloat16")
    batch = on_gpu(make_batch())
    train_step(state, batch, seq=0, pass_idx=0)  # libraries start up
    torch.cuda.set_sync_debug_mode("error")
    try:
        train_step(state, batch, seq=1, pass_idx=0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert state.metrics.read()["steps"] == 2


def test_replays_draw_by_seq_and_pass_and_by_nothing_else() -> None:
    """At a learning rate of nothing: one graph, four replays."""
    state, batch = gpu_state("graph", lr=1e-30), on_gpu(make_batch())
    first, other_seq, other_pass, again = (
        train_step(state, batch, seq=seq, pass_idx=pass_idx).cpu()
        for seq, pass_idx in ((0, 0), (1, 0), (0, 1), (0, 0))
    )
    torch.testing.assert_close(again, first, rtol=1e-4, atol=1e-4)
    for other in (other_seq, other_pass):
        assert not torch.allclose(other, first, rtol=1e-2, atol=1e-2)


def test_every_step_has_its_own_inputs_however_late_it_runs() -> None:
    """The host is 200 steps ahead of a sleeping device."""
    state = gpu_state()
    torch.cuda._sleep(2_000_000_000)  # about a second
    seen = []
    for seq in range(200):
        state.set_inputs(seq, seq % 3)
        seen.append(state.inputs[:3].clone())
    assert not torch.cuda.current_stream().query()
    assert torch.stack(seen).tolist() == [[5, seq, seq % 3] for seq in range(200)]


def test_a_replay_reads_what_the_batch_holds_now() -> None:
    """Captured before there is a slot, as the trainer does."""
    graph, eager = (gpu_state(mode, loss="kl", lr=1e-30) for mode in ("graph", "eager"))
    long, short = on_gpu(make_batch()), on_gpu(make_batch((40, 33), seed=7))
    batch = Batch(**{name: torch.zeros_like(x) for name, x in vars(long).items()})
    warm_up(graph, batch)
    found = []
    for source in (long, short):
        for name, x in vars(source).items():
            getattr(batch, name).copy_(x)
        sums = train_step(graph, batch, seq=0, pass_idx=0).cpu()
        want = train_step(eager, source, seq=0, pass_idx=0).cpu()
        torch.testing.assert_close(sums, want, rtol=1e-3, atol=1e-3)
        found.append(sums)
    assert not torch.allclose(*found, rtol=1e-2, atol=1e-2)


def test_capturing_changes_nothing() -> None:
    state, batch = gpu_state("graph"), on_gpu(make_batch())
    steps(gpu_state("graph"), batch, 1)  # whatever compiles once
    state.set_inputs(3, 0)
    before = {key: x.clone() for key, x in vars(state.optimizer).items() if torch.is_tensor(x)}
    capture(state, batch)
    for key in ("weights", "masters", "exp_avg", "exp_avg_sq", "count"):
        assert torch.equal(before[key], getattr(state.optimizer, key)), key
    assert state.metrics.sums.abs().sum() == 0 and not state.dry


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_attention_over_ranges_equals_the_dense_masks(mode: str) -> None:
    ranges, dense = gpu_state(mode, loss="kl"), gpu_state("eager", loss="kl")
    dense.plain = True
    batch = on_gpu(make_batch())
    for a, b in zip(steps(ranges, batch), steps(dense, batch), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(
        ranges.optimizer.weights, dense.optimizer.weights, rtol=1e-3, atol=1e-4
    )


def float32_case(shapes: Shapes, loss: str, mode: str) -> Case:
    case = shapes.case("tiny", loss, mode)
    drafter = case.config.drafter.model_copy(update={"dtype": "float32"})
    return dataclasses.replace(case, config=case.config.model_copy(update={"drafter": drafter}))


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_gradients_over_many_tiles_equal_the_plain_steps(loss: str) -> None:
    """4 tiles of rows, 6 of keys; of every parameter, since a wrong tile need not show in the loss:
    random weights barely look at the context."""
    shapes = Shapes(64, 96, 4, 2, 16, 512, 512, 128, 32, 8, window=64)
    graph, plain = (random_state(float32_case(shapes, loss, m)) for m in ("graph", "eager"))
    plain.plain, batch = True, random_batch(float32_case(shapes, loss, "eager"))
    for state in (graph, plain):
        state.optimizer.weights.mul_(3)
        state.optimizer.reset_masters()
        train_step(state, batch, seq=0, pass_idx=0)
    dense = dict(plain.drafter.named_parameters())
    for name, parameter in graph.drafter.named_parameters():
        assert parameter.grad is not None and dense[name].grad is not None
        wrong = (parameter.grad - dense[name].grad).norm() / dense[name].grad.norm()
        assert wrong < 1e-3, name


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_stale_rows_change_nothing_on_a_gpu(mode: str) -> None:
    clean, dirty, batch = gpu_state(mode), gpu_state(mode), make_batch()
    total = int(batch.total_tok)
    stale = on_gpu(batch)
    stale.all_TF[total:], stale.ids_T[total:], stale.pos_T[total:] = torch.nan, 2**40, -1
    stale.lm_T[total:] = True
    for one, two in zip(steps(clean, on_gpu(batch)), steps(dirty, stale), strict=True):
        assert two.isfinite().all()
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)
