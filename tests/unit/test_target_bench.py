"""The parts of `bench target` that need no GPU: how many operations it counts, which arrivals bound
its window, of which kernels its table is made, and what it says where there is no GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import LAYERS, load_tiny
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.target import Bench, is_matmul, kernel_table, rate
from launcher.rundir import ROOT


@pytest.mark.parametrize("loss", ["ce", "kl"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_operations_are_those_that_torch_counts(family: str, loss: str, tmp_path: Path) -> None:
    """torch counts all of the scores; what the causal mask leaves is half of them."""
    target = load_tiny(tmp_path, family, taps=(0, 1))
    bench = Bench.__new__(Bench)
    bench.target = target
    bench.arch = SimpleNamespace(taps=target.taps, num_target_layers=LAYERS)  # type: ignore[assignment]
    bench.config = SimpleNamespace(wants_vlh=loss == "kl")  # type: ignore[assignment]
    docs = [np.arange(3, 3 + n) for n in (48, 16)]
    by_torch = 0
    for ids in docs:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            rows = torch.empty(len(ids), 2 * target.arch.hidden_size)
            target.capture([ids], rows, rows[:, :32].clone() if loss == "kl" else None)
        by_torch += counter.get_total_flops()
    assert bench.layers_run == (LAYERS if loss == "kl" else 2)
    width = target.layers[0].self_attn.o_proj.in_features
    masked = sum(4 * width * len(ids) ** 2 / 2 for ids in docs) * bench.layers_run
    assert bench.flop(docs) == by_torch - masked


class Clock:
    """torch.cuda.Event where every event is a second after the one before."""

    made = 0

    def __init__(self, **_: bool) -> None:
        pass

    def record(self) -> None:
        self.at, Clock.made = Clock.made, Clock.made + 1

    def elapsed_time(self, later: Clock) -> float:
        return 1000.0 * (later.at - self.at)


def test_every_micro_batch_counts_for_its_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two slots of three documents, cut into [40, 40] and [9] each: a second a call."""
    for name, stand_in in {
        "Event": Clock,
        "synchronize": lambda: None,
        "get_device_name": lambda: "H200",
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    bench = Bench.__new__(Bench)
    bench.target = load_tiny(tmp_path, "llama", taps=(0, 1))
    bench.target.micro_batch_tokens = 200
    ring = SimpleNamespace(max_tokens=96)
    bench.config = SimpleNamespace(wants_vlh=False, ring=ring)  # type: ignore[assignment]
    sizes = {"hidden_size": bench.target.arch.hidden_size, "num_taps": 2}
    bench.arch = SimpleNamespace(taps=(0, 1), num_target_layers=LAYERS, **sizes)  # type: ignore[assignment]
    ids = [np.arange(3, 3 + n) for n in (9, 40, 40)]
    monkeypatch.setattr(bench, "documents", lambda seq: [(x, x) for x in ids], raising=False)
    found = bench.forward(slots=2, kernels=0)
    assert found["forward_s"] == 2 and found["forward_tok_per_s"] == 89 / 2
    padded = sum(len(b.documents) * b.length for b in bench.target.micro_batches([9, 40, 40]))
    assert found["padding"] == padded / 89 - 1
    large, small = found["micro_batches"]
    assert (large["shape"][:2], large["calls"], large["tok_per_s"]) == ("2x", 2, 80)
    assert (small["shape"][:2], small["calls"], small["tok_per_s"]) == ("1x", 2, 9)
    assert large["tflop_per_s"] == bench.flop(ids[1:]) / 1e12
    assert found["tflop_per_s"] == pytest.approx(bench.flop(ids) / 2 / 1e12)


def test_of_a_mixture_s_experts_those_count_that_a_token_takes(tmp_path: Path) -> None:
    """DeepSeek-V3's layers: one dense, then two of six experts and a shared one, which torch counts
    too; and the router, which we leave out."""
    import transformers

    config = transformers.DeepseekV3Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=4,
        qk_rope_head_dim=4,
        v_head_dim=8,
    )
    torch.manual_seed(0)
    # eager: torch doesn't count grouped matmuls
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    bench = Bench.__new__(Bench)
    bench.target = SimpleNamespace(backbone=model.model, layers=model.model.layers)  # type: ignore[assignment]
    bench.arch = SimpleNamespace(num_target_layers=3)  # type: ignore[assignment]
    bench.config = SimpleNamespace(wants_vlh=True)  # type: ignore[assignment]
    ids = np.arange(3, 35)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model.model(torch.from_numpy(ids)[None])
    masked, router = 3 * 4 * 32 * 32**2 / 2, 2 * 2 * 32 * 32 * 6
    assert bench.flop([ids]) == counter.get_total_flops() - masked - router


def test_a_late_look_at_the_copies_makes_no_slot_faster() -> None:
    """By hand: the GPU ends a slot every 4 s. The host learns of it 1.5 s later, under the next
    slot's forward; of the last one, with none after it, at once: to there it would be 3 slots in
    10.5 s."""
    tokens = [700, 700, 700, 400, 440, 999]
    ends_s = [9.0, 13.0, 17.0, 21.0, 25.0, 29.0]
    noticed_s = [end_s + 1.5 for end_s in ends_s[:-1]] + ends_s[-1:]
    arrived = list(zip(noticed_s, tokens, strict=True))
    assert rate(arrived) == (4.0, (400 + 440) / 8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_is_one_line() -> None:
    command = [sys.executable, "-m", "benchmarks.target", "configs/qwen36_27b_2gpu.yaml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "the target's half is measured on a CUDA device, and there is none\n"


def test_the_table_takes_matmuls_together_and_keeps_the_longest() -> None:
    def kernel(key: str, us: float, count: int) -> SimpleNamespace:
        return SimpleNamespace(key=key, self_device_time_total=us, count=count)

    events = [
        kernel("nvjet_tst_128x256", 5000.0, 3),
        kernel("triton_red_fused_norm", 4000.0, 2),
        kernel("sm90_xmma_gemm_bf16", 1000.0, 1),
        kernel("Memset", 10.0, 1),
        kernel("cudaLaunchKernel", 0.0, 99),
    ]
    profile = SimpleNamespace(key_averages=lambda: events)
    assert kernel_table(profile, 2) == {"matmuls x4": 6.0, "triton_red_fused_norm x2": 4.0}
    assert not is_matmul("flash_fwd_kernel")
