"""The shapes that the drafter's step is measured at, and what the step costs at least.

Ceilings of one H200, measured: 790 TFLOP/s (an 8192^3 bf16 product), 4.3 TB/s (a device copy).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from dflash.arch import DrafterArch, TargetArch
from dflash.config import Config, ConfigError, load_config, parse_config
from dflash.target_files import resolve_config

FLOP_PER_S = 790e12
BYTES_PER_S = 4.3e12
DOCUMENT_TOKENS = 4096
"""Of a random slot's documents, where the slot holds as much and nobody says another length."""


def has_ceilings(gpu: str) -> bool:
    """Whether FLOP_PER_S and BYTES_PER_S are those of the GPU of that name. Not a GH200's."""
    return re.search(r"\bH200\b", gpu) is not None


@dataclass(frozen=True)
class Case:
    """One thing to measure."""

    name: str
    config: Config
    arch: DrafterArch
    document_tokens: int
    """Of each document of a random slot."""
    tied: bool

    def with_float8_head(self) -> Case:
        step = self.config.step.model_copy(update={"head_float8": True})
        return replace(self, config=self.config.model_copy(update={"step": step}))

    @classmethod
    def of_config(
        cls,
        path: Path,
        overrides: Sequence[str] = (),
        *,
        loss: str | None = None,
        mode: str | None = None,
        document_tokens: int | None = None,
    ) -> Case:
        """The drafter and slot of a run's config, over its target's shapes; needs no weights. What
        is None is the config's own. Raises ConfigError."""
        said = {"train.loss": loss, "step.mode": mode}
        said |= {"target.device": "cuda", "drafter.device": "cuda"}
        changes = [f"{key}={value}" for key, value in said.items() if value is not None]
        config = load_config(path, [*overrides, *changes])
        target = TargetArch.read(resolve_config(config.target.model))
        arch = DrafterArch.build(config, target, mask_token_id=target.vocab_size - 1)
        length = fit_documents(config, document_tokens)
        return cls(path.stem, config, arch, length, target.tie_word_embeddings)


def fit_documents(config: Config, document_tokens: int | None) -> int:
    """Tokens of each document of a full slot. Raises ConfigError."""
    tokens, most = config.ring.max_tokens, config.ring.max_docs
    least = max(2, -(-tokens // most))  # an anchor needs a token after it
    if document_tokens is None:
        return max(least, min(tokens, DOCUMENT_TOKENS))
    if not least <= document_tokens <= tokens:
        raise ConfigError(
            f"--document-tokens {document_tokens}: a slot of ring.max_tokens={tokens} and "
            f"ring.max_docs={most} is full of documents of {least} to {tokens} tokens: say one of "
            "these, or change the ring"
        )
    return document_tokens


@dataclass(frozen=True)
class Shapes:
    """The published sizes, without a target at hand."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tokens: int
    document_tokens: int
    anchors: int
    block: int
    window: int | None = None
    """Of 4 sliding layers, or all 5; None: 5 full layers."""
    last_slides: bool = False
    tied: bool = False

    def case(self, name: str, loss: str, mode: str) -> Case:
        config = parse_config(
            {
                "run": {"name": "bench"},
                "data": {"path": "-"},
                "target": {"model": "-"},
                "drafter": {"device": "cuda", "block_size": self.block},
                "ring": {
                    "max_tokens": self.tokens,
                    "max_docs": self.tokens // self.document_tokens,
                },
                "train": {
                    "steps": 10**6,
                    "loss": loss,
                    "anchor_density": 1000 * self.anchors / self.tokens,
                },
                "step": {"mode": mode},
            },
            "bench",
        )
        return Case(name, config, self.arch(), self.document_tokens, self.tied)

    def arch(self) -> DrafterArch:
        kinds = {True: "sliding_attention", False: "full_attention"}
        slides = self.window is not None
        return DrafterArch(
            num_layers=5,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=1e-6,
            rope_theta=1e6,
            max_position_embeddings=32768,
            attention_bias=False,
            layer_types=(kinds[slides],) * 4 + (kinds[slides and self.last_slides],),
            sliding_window=self.window,
            is_causal=None,
            block_size=self.block,
            mask_token_id=self.vocab - 1,
            taps=(1, 8, 15, 22, 29),
            num_target_layers=32,
            vocab_size=self.vocab,
        )


_27B = Shapes(5120, 17408, 32, 8, 128, 248320, 49152, 4096, 1024, 32, window=2048)
SHAPES = {
    "27b": _27B,
    "27b-sliding": replace(_27B, last_slides=True),
    "8b": Shapes(4096, 12288, 32, 8, 128, 151936, 8192, 2048, 512, 16),
    "8b-49k": Shapes(4096, 12288, 32, 8, 128, 151936, 49152, 4096, 1024, 32),
    "smollm2": Shapes(576, 1536, 9, 3, 64, 49152, 4096, 1024, 64, 16, tied=True),
}


class Work(NamedTuple):
    """What a slot gives a step to do. Rows that the step computes beyond it count for nothing."""

    tokens: int
    anchors: int
    pairs: float
    """(block row, key) pairs that the masks let through, over all layers."""

    @classmethod
    def full(cls, config: Config, pairs: float = 0.0) -> Work:
        """Of a slot full of tokens and of anchors."""
        return cls(config.ring.max_tokens, config.num_anchors, pairs)


def step_flop(arch: DrafterArch, config: Config, work: Work) -> float:
    """Of one step, nothing recomputed: matmuls forward and backward, and attention at 3.5 times its
    forward."""
    h, e = arch.hidden_size, arch.head_dim
    q, kv = arch.num_attention_heads * e, arch.num_key_value_heads * e
    rows = work.anchors * arch.block_size
    layer = h * (2 * q + 2 * kv + 3 * arch.intermediate_size)
    blocks = 6 * rows * layer * arch.num_layers
    context = work.tokens * (6 * 2 * kv * h * arch.num_layers + 4 * arch.num_taps * h * h)
    passes = 3 if config.wants_vlh else 2
    head = 2 * passes * (rows - work.anchors) * h * arch.vocab_size
    return blocks + context + head + 3.5 * 4 * q * work.pairs


def floor_s(arch: DrafterArch, config: Config, work: Work) -> float:
    """Time that the arithmetic takes at FLOP_PER_S, and after it the logits (each matrix written
    once and read once, the gradient written once and read once) and AdamW at BYTES_PER_S."""
    logits = 2 * work.anchors * (arch.block_size - 1) * arch.vocab_size
    moved = logits * (6 if config.wants_vlh else 4) + 30 * arch.num_parameters
    return step_flop(arch, config, work) / FLOP_PER_S + moved / BYTES_PER_S
