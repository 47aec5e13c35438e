"""The training step of `specforge` 0.2.0 (SGLang's trainer) beside ours, on one GPU.

    python -m benchmarks.peers.specforge_step --json FILE
    python -m benchmarks.peers.specforge_step --tiny

Its published micro-benchmark: 2 documents of 768 tokens, Qwen3-8B shapes, block 16, 256 anchors,
CE on tokens; 211 ms a step, 44 % of an H200's peak. It counts anchors a document (`width` of
`_sample_anchor_positions`), so a step has 512 blocks, 8,192 rows. Ours takes the same documents
packed in one slot, with as many anchors a document on average, drawn over the whole slot: first
the same two documents, then as many as --documents says. The ratio is time a document.

Theirs is `TrainerCore.train_step` itself: its strategy, its model, its backend unwrapped (one GPU:
no FSDP, which could only cost it time) and `BF16Optimizer`: bfloat16 weights, float32 masters and
moments, as ours. `specforge` is its default kernels, `specforge, liger` its `use_liger_kernel`.
Both under torch 2.11, which it pins; transformers is newer than its pin.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from dflash.anchors import Anchors
from dflash.loss import default_gamma
from dflash.step import DTYPES
from dflash.zlab import to_config

from .. import keep
from ..drafter import random_weights
from ..shapes import SHAPES, Case, Shapes
from . import sides

DOCUMENT_TOKENS, ANCHORS_A_DOCUMENT, BATCH = 768, 256, 2
KERNELS = ("default", "liger")


DIFFERS = [
    "theirs: padded batch, so many anchors in each document; ours: packed slot, so many on average",
    "theirs: one GPU without FSDP",
]


def shapes_of(documents: int) -> Shapes:
    return replace(
        SHAPES["8b"],
        tokens=documents * DOCUMENT_TOKENS,
        document_tokens=DOCUMENT_TOKENS,
        anchors=documents * ANCHORS_A_DOCUMENT,
    )


def build_model(case: Case, kernels: str, attention: str) -> Any:
    """(OnlineDFlashModel, its trainable part), with our weights."""
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from specforge.modeling.draft.dflash_kernels import load_liger_dflash_kernels

    arch, dtype = case.arch, DTYPES[case.config.drafter.dtype]
    config = DFlashDraftModel.config_class(**to_config(arch))
    config._attn_implementation = attention
    drafter, ends = random_weights(case)
    with torch.device(case.config.drafter.device):
        draft = DFlashDraftModel(
            config, load_liger_dflash_kernels() if kernels == "liger" else None
        )
        draft.load_state_dict(drafter.state_dict())
        head = nn.Linear(arch.hidden_size, arch.vocab_size, bias=False)
        embed = nn.Embedding(arch.vocab_size, arch.hidden_size)
    head.weight, embed.weight = (
        nn.Parameter(weight, requires_grad=False) for weight in (ends.head_VH, ends.embed_VH)
    )
    model = OnlineDFlashModel(
        draft_model=draft,
        target_lm_head=head,
        target_embed_tokens=embed,
        mask_token_id=arch.mask_token_id,
        block_size=arch.block_size,
        attention_backend=attention,
        num_anchors=case.config.num_anchors
        // (case.config.ring.max_tokens // case.document_tokens),
        loss_decay_gamma=case.config.train.gamma or default_gamma(arch.block_size),
    )
    return model.to(dtype), draft


class SpecForge:
    keeps_a_pool = False

    def __init__(self, case: Case, kernels: str) -> None:
        from specforge.optimizer import BF16Optimizer
        from specforge.runtime.contracts import TrainBatch
        from specforge.training.backend import FSDPTrainingBackend, ParallelConfig
        from specforge.training.controller import TrainerCore
        from specforge.training.strategies.base import DFlashTrainStrategy

        attention = "flex_attention" if torch.cuda.is_available() else "sdpa"
        self.name, self.case = f"specforge, {kernels}", case
        batch = sides.common_batch(case)
        self.documents = len(batch.lens_D)
        self.drawn = sides.first_draw(case, batch)
        self.model, draft = build_model(case, kernels, attention)
        self.model.train()
        backend = FSDPTrainingBackend(
            ParallelConfig(),
            optimizer_factory=lambda trainable: BF16Optimizer(
                trainable, lr=6e-4, max_grad_norm=1.0, total_steps=10**6
            ),
        )
        backend.prepare_model(self.model, wrap=False, optimizer_target=draft)
        self.core = TrainerCore(DFlashTrainStrategy(self.model), backend)
        rows = (self.documents, case.document_tokens)
        self.batch = TrainBatch(
            sample_ids=[str(index) for index in range(self.documents)],
            strategy="dflash",
            tensors={
                "input_ids": batch.ids_T.view(rows),
                "hidden_states": batch.all_TF.view(*rows, -1),
                "loss_mask": batch.lm_T.view(rows).float(),
            },
        )
        self.first: float | None = None

    def run(self, steps: int) -> list[float]:
        clock = sides.Clock()
        clock.mark()
        for _ in range(steps):
            if self.first is None:
                self._first_step()
            else:
                self.core.train_step(self.batch)
            clock.mark()
        return clock.seconds()

    def _first_step(self) -> None:
        """With our anchors."""
        drawn = anchors_by_document(self.drawn.anchors, self.documents, self.case.document_tokens)
        own = self.model._sample_anchor_positions
        self.model._sample_anchor_positions = lambda *_: drawn
        self.first = float(self.core.train_step(self.batch).loss)
        self.model._sample_anchor_positions = own

    def loss(self) -> float:
        assert self.first is not None
        return self.first

    def holds(self) -> str:
        optimizer = self.core.backend.optimizer
        return sides.theirs_hold(optimizer.model_params[0], optimizer.optimizer)


def anchors_by_document(
    anchors: Anchors, documents: int, document_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """([D, widest] positions in their documents, [D, widest] which are anchors), as theirs draws
    them: rising, the others at position 0."""
    own = [
        anchors.position_A[anchors.valid_A & (anchors.doc_A == index)] - index * document_tokens
        for index in range(documents)
    ]
    there = [torch.ones_like(position, dtype=torch.bool) for position in own]
    return pad_sequence(own, batch_first=True), pad_sequence(there, batch_first=True)


def main() -> None:
    assert __doc__ is not None
    parser = sides.options(__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, nargs="+", default=[2, 8], help="of our slots")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=["default"])
    args = sides.parse(parser)
    print(f"specforge {version('specforge')}; nothing stubbed")
    if args.tiny:
        case = sides.tiny_case("ce", replace(sides.TINY, window=None))
        cases = {case.config.ring.max_docs: case}
    else:
        cases = {n: shapes_of(n).case("8b", "ce", "graph") for n in {BATCH, *args.documents}}
        case = cases[BATCH]
    facts = {
        "peer": f"specforge {version('specforge')}",
        "shapes": case.name,
        "loss": "ce",
        "document_tokens": case.document_tokens,
        "anchors_a_document": case.config.num_anchors / case.config.ring.max_docs,
        "block": case.arch.block_size,
        "differs": DIFFERS,
    }
    ours = {
        f"ours, {n} documents": functools.partial(sides.Ours, cases[n], f"ours, {n} documents")
        for n in sorted(cases)
    }
    theirs = {
        f"specforge, {kernels}": functools.partial(SpecForge, case, kernels)
        for kernels in args.kernels
    }
    keep(sides.compare(ours, theirs, args, facts), args.json)


if __name__ == "__main__":
    main()
