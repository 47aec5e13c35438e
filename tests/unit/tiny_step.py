"""A tiny drafter's whole training state and a slot of random documents, for the step's tests."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from dflash.arch import DrafterArch
from dflash.config import Config, parse_config
from dflash.model import FrozenEnds
from dflash.step import Batch, TrainState

TOKENS, DOCS, HIDDEN, TAPS, VOCAB, BLOCK = 96, 8, 24, 2, 50, 4
MASK_TOKEN = 1


def make_config(**changes: Any) -> Config:
    train = {"steps": 400, "anchor_density": 125.0, "lr": 1e-2, "log_every": 1}
    drafter = {"num_layers": 2, "block_size": BLOCK, "dtype": "float32"}
    step = {"mode": changes.pop("mode", None)}
    for key, value in changes.items():
        (drafter if key in ("dtype", "device") else train)[key] = value
    raw = {
        "run": {"name": "t", "seed": 5},
        "data": {"path": "-"},
        "target": {"model": "-"},
        "drafter": drafter,
        "ring": {"max_tokens": TOKENS, "max_docs": DOCS},
        "train": train,
        "step": step,
    }
    return parse_config(raw, "test")


def make_arch(**changes: Any) -> DrafterArch:
    arch = DrafterArch(
        num_layers=2,
        hidden_size=HIDDEN,
        intermediate_size=40,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=512,
        attention_bias=False,
        layer_types=("sliding_attention", "full_attention"),
        sliding_window=6,
        is_causal=None,
        block_size=BLOCK,
        mask_token_id=MASK_TOKEN,
        taps=(1, 3),
        num_target_layers=5,
        vocab_size=VOCAB,
    )
    return dataclasses.replace(arch, **changes)


def make_state(arch: DrafterArch | None = None, **changes: Any) -> TrainState:
    config = make_config(**changes)
    dtype = torch.bfloat16 if config.drafter.dtype == "bfloat16" else torch.float32
    generator = torch.Generator().manual_seed(1)
    embed_VH, head_VH = (torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype) for _ in "eh")
    arch = arch or make_arch()
    return TrainState.create(
        config, arch, FrozenEnds(embed_VH, head_VH, None, 1.0, arch.logit_softcap)
    )


def make_batch(lens: tuple[int, ...] = (30, 21, 9, 1, 17), seed: int = 2) -> Batch:
    """Random states and tokens; rows beyond the documents are 0."""
    generator, total = torch.Generator().manual_seed(seed), sum(lens)
    batch = Batch(
        all_TF=torch.randn(TOKENS, TAPS * HIDDEN, generator=generator),
        vlh_TH=torch.randn(TOKENS, HIDDEN, generator=generator),
        ids_T=torch.randint(2, VOCAB, (TOKENS,), generator=generator),
        lm_T=torch.rand(TOKENS, generator=generator) < 0.9,
        lens_D=torch.tensor([*lens, *[0] * (DOCS - len(lens))]),
        pos_T=torch.cat([*(torch.arange(n) for n in lens), torch.zeros(TOKENS - total).long()]),
        total_tok=torch.tensor(total),
    )
    for x in (batch.all_TF, batch.vlh_TH, batch.ids_T, batch.lm_T):
        x[total:] = 0
    return batch
