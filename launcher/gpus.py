"""The machine's GPUs, as nvidia-smi tells them, and what the two halves will need of them.

Estimates come from shapes alone: parameters as target_size.py and DrafterArch count them, and the
activations that one compiled step keeps. Within 7 % of the peaks of the drafter steps measured at
27B and 8B shapes (benchmarks/results/drafter_h200_*.json).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

from dflash.arch import DrafterArch, TargetArch
from dflash.config import Config

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
CONTEXT_BYTES = 1 << 30
"""The CUDA context, the allocator's slack and the kernels' workspaces."""


@dataclass(frozen=True)
class Gpu:
    index: int
    uuid: str
    name: str
    total_bytes: int
    used_bytes: int


@dataclass(frozen=True)
class Need:
    """Bytes of one half on its GPU."""

    weights: int
    """Weights, gradients and optimizer states."""
    ends: int
    """The target's embedding and head, where the drafter borrows them."""
    slots: int
    """Two slots on the device."""
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.ends + self.slots + self.activations + CONTEXT_BYTES


def list_gpus() -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES leaves, in its order. Empty without a driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = "--query-gpu=index,uuid,name,memory.total,memory.used"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return visible(parse_gpus(done.stdout), os.environ.get("CUDA_VISIBLE_DEVICES"))


def parse_gpus(csv: str) -> list[Gpu]:
    """From nvidia-smi's csv; memory there is in MiB."""
    rows = [[cell.strip() for cell in line.split(",")] for line in csv.splitlines()]
    return [
        Gpu(int(r[0]), r[1], r[2], int(r[3]) << 20, int(r[4]) << 20)
        for r in rows
        if len(r) == 5 and r[0].isdigit() and r[3].isdigit() and r[4].isdigit()
    ]


def visible(gpus: list[Gpu], variable: str | None) -> list[Gpu]:
    """The GPUs that a CUDA_VISIBLE_DEVICES value names, in its order."""
    if variable is None:
        return gpus
    by_name = {str(gpu.index): gpu for gpu in gpus} | {gpu.uuid: gpu for gpu in gpus}
    return [by_name[name.strip()] for name in variable.split(",") if name.strip() in by_name]


def target_need(config: Config, arch: TargetArch, slot_bytes: int, longest: int = 0) -> Need:
    """`longest`: tokens of the longest document, which goes through in one piece."""
    size = DTYPE_BYTES[config.target.dtype]
    tokens = max(config.target.micro_batch_tokens, longest)
    # At the start the self-test holds a second copy of embedding and head.
    ends = (1 if arch.tie_word_embeddings else 2) * arch.vocab_size * arch.hidden_size
    return Need(
        weights=arch.num_parameters * size,
        ends=0,
        slots=2 * slot_bytes,
        activations=max(tokens * arch.layer_width, ends) * size,
    )


def drafter_need(config: Config, target: TargetArch, arch: DrafterArch, slot_bytes: int) -> Need:
    size = DTYPE_BYTES[config.drafter.dtype]
    rows = config.num_anchors * arch.block_size
    row = 10 * arch.hidden_size + 3 * arch.intermediate_size
    context = config.ring.max_tokens * arch.hidden_size * (2 + arch.num_layers)
    logits = min(rows, 4096) * arch.vocab_size * 4  # one chunk of the head, float32
    copies = 2 if target.tie_word_embeddings is False else 1
    head_float8 = 1 if config.step.head_float8 else 0  # bytes a weight
    return Need(
        # Compute copy and gradient in the drafter's dtype; master and two moments in float32.
        weights=arch.num_parameters * (2 * size + 12),
        ends=(copies * size + head_float8) * arch.vocab_size * arch.hidden_size,
        slots=2 * slot_bytes,
        activations=(rows * row * arch.num_layers + context) * size + logits,
    )
