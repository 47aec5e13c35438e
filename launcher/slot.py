"""Where the two packages meet: the ring's field table for a run. Both halves use it."""

from __future__ import annotations

from dflash.arch import DrafterArch
from dflash.config import Config
from shm_ring import Field, hidden_state_fields

RING_DTYPES = {"float32": "f32", "bfloat16": "bf16"}


def slot_fields(config: Config, arch: DrafterArch) -> tuple[Field, ...]:
    return hidden_state_fields(
        max_tokens=config.ring.max_tokens,
        max_docs=config.ring.max_docs,
        taps_width=arch.num_taps * arch.hidden_size,
        hidden=arch.hidden_size,
        dtype=RING_DTYPES[config.target.dtype],
        vlh=config.wants_vlh,
    )
