"""One training step, the same function eager, compiled and captured.

    state = TrainState.create(config, arch, ends)
    train_step(state, batch, seq=17, pass_idx=0)
    figures = state.metrics.read()                 # the only call that waits for the device

anchors -> labels -> masks -> forward -> loss -> backward -> clip -> AdamW -> metrics.

No host sync and no data-dependent shape inside: what changes from step to step (seed, seq, pass,
learning rate) are 0-d tensors that `set_inputs` fills, and everything random is a function of them.
(On a CPU, where reading a tensor costs nothing, the attention does follow the data: grouped_masks.)

Rows from total_tok on are stale: they may hold any bits, NaN too, and masking is not enough, since
0 * NaN is NaN in the backward of `fc` and of attention. So everything that such a row reaches is
*selected*: `documents` gives it document -1, which keeps it from every anchor, label and mask;
features and positions are zeroed before use; gathers of masked slots point at row 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import anchors as A
from .arch import DrafterArch
from .config import Config
from .loss import decay_weights, dpace_weights, head_loss, head_loss_full, weighted_mean
from .mask import Kind, Mask, dense_masks, grouped_masks
from .metrics import Metrics, count_correct
from .model import DFlashDrafter, FrozenEnds, layer_kinds
from .optim import MasterAdamW, learning_rate

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Batch:
    """A slot's tensors without the leading 1: views of the ring's pages on CPU, static buffers on a
    GPU."""

    all_TF: Tensor
    """Tapped layer outputs, concatenated; the slot's dtype."""
    vlh_TH: Tensor | None
    """The target's last hidden state after its final norm; None where the loss does not need it."""
    ids_T: Tensor
    lm_T: Tensor
    lens_D: Tensor
    pos_T: Tensor
    total_tok: Tensor
    """0-d int64, at least 1."""


@dataclass
class TrainState:
    """All that a trainer resumes from is here: drafter and optimizer state, and `step`."""

    config: Config
    drafter: DFlashDrafter
    ends: FrozenEnds
    optimizer: MasterAdamW
    metrics: Metrics
    inputs: Tensor
    """int64 [3]: seed, seq, pass of the step about to run."""
    step: int = 0
    """Optimizer steps taken."""
    plain: bool = False
    """Dense masks and all logits at once: the obvious way, to compare with."""

    @classmethod
    def create(
        cls, config: Config, arch: DrafterArch, ends: FrozenEnds, *, zero_centred_norm: bool = False
    ) -> TrainState:
        """A fresh drafter in config.drafter's dtype and device; its final norm starts from the
        target's, if given."""
        device = torch.device(config.drafter.device)
        assert ends.embed_VH.dtype == ends.head_VH.dtype == DTYPES[config.drafter.dtype]
        drafter = DFlashDrafter(arch)
        drafter.init_weights(config.run.seed, ends.norm_H, zero_centred_norm)
        drafter.to(device, DTYPES[config.drafter.dtype])
        train = config.train
        optimizer = MasterAdamW(
            drafter, betas=train.betas, weight_decay=train.weight_decay, clip=train.clip
        )
        metrics = Metrics(arch.block_size, device)
        inputs = torch.zeros(3, dtype=torch.int64, device=device)
        return cls(config, drafter, ends, optimizer, metrics, inputs)

    @property
    def slot(self) -> int:
        """t: which of the trainer's slots the next step reads. Its seq is t * world + rank."""
        return self.step // self.config.train.passes_per_slot

    @property
    def pass_idx(self) -> int:
        return self.step % self.config.train.passes_per_slot

    def set_inputs(self, seq: int, pass_idx: int) -> None:
        """Fill the step's inputs: stream-ordered writes to fixed addresses, no sync."""
        train = self.config.train
        for index, value in enumerate((self.config.run.seed, seq, pass_idx)):
            self.inputs[index].fill_(value)
        rate = learning_rate(self.step, total=train.steps, peak=train.lr, warmup=train.warmup)
        self.optimizer.lr.fill_(rate)


def train_step(state: TrainState, batch: Batch, *, seq: int, pass_idx: int) -> Tensor:
    """One optimizer step on `batch`. Returns this step's metric sums (already added to
    state.metrics) on the device."""
    state.set_inputs(seq, pass_idx)
    sums = run_step(state, batch)
    state.step += 1
    return sums


def run_step(state: TrainState, batch: Batch) -> Tensor:
    """The part that a CUDA graph captures: reads and writes device tensors only."""
    loss, sums = forward_loss(state, batch)
    loss.backward()
    norm, skipped = state.optimizer.step(skip=sums["weight"] == 0)
    sums |= {"skipped": skipped, "steps": torch.ones_like(norm), "grad_norm": norm}
    for name in ("loss", "weight", "grad_norm"):
        # A skipped step is counted, and its NaN kept out of the interval's means.
        sums[name] = torch.where(skipped, 0.0, sums[name])
    vector = state.metrics.layout.pack(sums)
    state.metrics.add(vector)
    return vector


def forward_loss(state: TrainState, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """(scalar loss with graph, metric sums) of the anchors that state.inputs draws."""
    drafter, ends, config = state.drafter, state.ends, state.config
    arch, num_tokens = drafter.arch, batch.ids_T.numel()
    block = arch.block_size

    doc_T = A.documents(batch.lens_D, batch.total_tok, num_tokens)
    seed, seq, pass_idx = state.inputs.unbind()
    key_T = A.hash_keys(seed, seq, pass_idx, num_tokens, doc_T.device)
    valid_T = A.valid_anchors(batch.lm_T, doc_T)
    anchors = A.sample_anchors(key_T, valid_T, doc_T, config.num_anchors)
    label_AJ, mask_AJ, at_AJ = A.labels(anchors, batch.ids_T, batch.lm_T, doc_T, block)
    ids_Q, pos_Q = A.block_inputs(anchors, batch.ids_T, batch.pos_T, block, arch.mask_token_id)

    feat_TF = torch.where((doc_T >= 0)[:, None], batch.all_TF, 0).to(drafter.fc.weight.dtype)
    pos_T = torch.where(doc_T >= 0, batch.pos_T, 0)
    ctx_kv = drafter.context_kv(drafter.context(feat_TF), pos_T)
    masks = _masks(state, batch.lens_D, doc_T, anchors)
    hidden_QH = drafter(ends.embed(ids_Q), pos_Q, ctx_kv, masks)

    hidden_RH = hidden_QH.unflatten(0, (-1, block))[:, 1:].flatten(0, 1)
    teacher_RH = None
    if config.train.loss == "kl":
        assert batch.vlh_TH is not None
        # The target's distribution of token a+k stands at a+k-1. Masked slots read row 0, which is
        # never stale.
        teacher_RH = batch.vlh_TH[(at_AJ - 1).clamp_min(0).flatten()].to(ends.head_VH.dtype)
    rows = (head_loss_full if state.plain else head_loss)(
        hidden_RH, ends.head_VH, label_AJ.flatten(), teacher_RH, ends.logit_softcap
    )

    weight_AJ = _weights(state, rows.nll_R.view_as(label_AJ), mask_AJ)
    total, weight = weighted_mean(rows.loss_R.view_as(label_AJ), weight_AJ, mask_AJ)
    sums = count_correct(rows.rank_R.view_as(label_AJ), mask_AJ, anchors.valid_A) | {
        "loss": total.detach(),
        "weight": weight,
        "tokens": batch.total_tok,
        "supervised": (batch.lm_T & (doc_T >= 0)).sum(),
        "anchors_asked": torch.full_like(batch.total_tok, config.num_anchors),
    }
    return total / weight.clamp_min(torch.finfo(weight.dtype).tiny), sums


def _masks(
    state: TrainState, lens_D: Tensor, doc_T: Tensor, anchors: A.Anchors
) -> dict[Kind, Mask]:
    arch = state.drafter.arch
    kinds, block = layer_kinds(arch), arch.block_size
    if state.plain or doc_T.device.type != "cpu":
        return dense_masks(doc_T, anchors, block, kinds)
    start_A = (lens_D.cumsum(0) - lens_D)[anchors.doc_A.clamp_min(0)]
    return grouped_masks(doc_T, start_A, anchors, block, kinds)


def _weights(state: TrainState, nll_AJ: Tensor, mask_AJ: Tensor) -> Tensor:
    train = state.config.train
    if train.position_weights == "dpace":
        return dpace_weights(nll_AJ, mask_AJ, train.dpace_alpha)
    weight_J = decay_weights(state.drafter.arch.block_size, train.gamma, nll_AJ.device)
    return weight_J.expand_as(nll_AJ)
