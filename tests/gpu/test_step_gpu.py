"""The step on a CUDA device: the CPU's draw, no host sync, and a captured step that moves."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tiny_step import make_batch, make_state

from dflash.anchors import hash_keys
from dflash.model import FrozenEnds
from dflash.step import Batch, TrainState, run_step, train_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_gpu(batch: Batch) -> Batch:
    return Batch(**{f.name: getattr(batch, f.name).cuda() for f in dataclasses.fields(batch)})


def gpu_state(**changes: Any) -> TrainState:
    ends = make_state(**changes).ends
    state = make_state(device="cuda", **changes)
    state.ends = FrozenEnds(ends.embed_VH.cuda(), ends.head_VH.cuda())
    return state


def test_both_devices_draw_the_same_anchors() -> None:
    words = (2**31 - 1, 10**10, 3)
    on_cpu = hash_keys(*words, 10_000, torch.device("cpu"))
    assert torch.equal(hash_keys(*words, 10_000, torch.device("cuda")).cpu(), on_cpu)


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_a_gpu_step_gives_the_cpu_steps_figures(loss: str) -> None:
    """float32; matmuls add in another order, so 1e-3."""
    cpu, gpu = make_state(loss=loss), gpu_state(loss=loss)
    for step in range(3):
        one = train_step(cpu, make_batch(), seq=step, pass_idx=0)
        two = train_step(gpu, on_gpu(make_batch()), seq=step, pass_idx=0)
        torch.testing.assert_close(two.cpu(), one, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("weights", ["decay", "dpace"])
@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_a_step_never_makes_the_host_wait(loss: str, weights: str, dtype: str) -> None:
    state = gpu_state(loss=loss, position_weights=weights, dtype=dtype)
    batch = on_gpu(make_batch())
    train_step(state, batch, seq=0, pass_idx=0)  # libraries start up
    torch.cuda.set_sync_debug_mode("error")
    try:
        train_step(state, batch, seq=1, pass_idx=0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert state.metrics.read()["steps"] == 2


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_a_captured_step_replays_as_the_eager_one(loss: str) -> None:
    """The same function under a CUDA graph: other inputs, other anchors, the same numbers."""
    eager, graphed = gpu_state(loss=loss), gpu_state(loss=loss)
    batch = on_gpu(make_batch())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for state in (eager, graphed):  # the warm-up is a step of both
            train_step(state, batch, seq=0, pass_idx=0)
        with torch.cuda.graph(graph, stream=stream):
            sums = run_step(graphed, batch)
        seen = []
        for seq in (1, 2, 3):
            expected = train_step(eager, batch, seq=seq, pass_idx=0)
            graphed.set_inputs(seq, 0)
            graph.replay()
            graphed.step += 1
            torch.testing.assert_close(sums, expected, rtol=1e-3, atol=1e-3)
            seen.append(sums.clone())
    assert not torch.equal(seen[0], seen[1]), "two replays drew the same anchors"
    torch.testing.assert_close(
        graphed.optimizer.weights, eager.optimizer.weights, rtol=1e-3, atol=1e-4
    )


def test_stale_rows_change_nothing_on_a_gpu() -> None:
    clean, dirty, batch = gpu_state(), gpu_state(), make_batch()
    total = int(batch.total_tok)
    for step in range(2):
        one = train_step(clean, on_gpu(batch), seq=step, pass_idx=0)
        stale = on_gpu(batch)
        stale.all_TF[total:], stale.ids_T[total:], stale.pos_T[total:] = torch.nan, 2**40, -1
        stale.lm_T[total:] = True
        two = train_step(dirty, stale, seq=step, pass_idx=0)
        assert two.isfinite().all()
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)
