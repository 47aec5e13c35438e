"""One training step, the same function eager, compiled and captured.

    state = TrainState.create(config, arch, ends)
    train_step(state, batch, seq=17, pass_idx=0)   # step.mode: eager | compiled | graph
    figures = state.metrics.read()                 # the only call that waits for the device

anchors -> labels -> masks -> forward -> loss -> backward -> clip -> AdamW -> metrics.

No host sync and no data-dependent shape inside: what changes from step to step (seed, seq, pass,
learning rate) is one small tensor that `set_inputs` fills; everything random is a function of it.
(On a CPU, where reading a tensor costs nothing, the attention does follow the data: grouped_masks.)

Rows from total_tok on are stale: they may hold any bits, NaN too, and masking is not enough, since
0 * NaN is NaN in the backward of `fc` and of attention. So everything that such a row reaches is
*selected*: `documents` gives it document -1, which keeps it from every anchor, label and mask;
features and positions are zeroed before use; gathers of masked slots point at row 0.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from . import anchors as A
from . import block_attention
from .arch import DrafterArch
from .config import Config
from .head import by_unit, refuse_float8
from .loss import (
    TargetStates,
    decay_weights,
    dpace_weights,
    head_loss,
    head_loss_full,
    weighted_mean,
)
from .mask import Kind, Mask, dense_masks, grouped_masks
from .metrics import Metrics, count_correct
from .model import DFlashDrafter, FrozenEnds, KeyValue, layer_kinds
from .optim import MasterAdamW, learning_rate

P = ParamSpec("P")
R = TypeVar("R")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

COUNTED = ("tokens", "supervised", "anchors_asked")
"""Of a step's sums: what counts even where the step is skipped."""

SWITCH_INTERVAL_S = 1e-4
"""For sys.setswitchinterval in a process that launches steps. Every launch lets go of the
interpreter lock, and a busy thread that takes it then keeps it so long: by default 5 ms."""


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
    """0-d int64, at least 1 in a slot."""


@dataclass
class TrainState:
    """All that a trainer resumes from is here: drafter and optimizer state, and `step`."""

    config: Config
    drafter: DFlashDrafter
    ends: FrozenEnds
    optimizer: MasterAdamW
    metrics: Metrics
    inputs: Tensor
    """float64 [4], exact up to 2**53: seed, seq, pass, learning rate of the step about to run."""
    dry: Tensor
    """bool, 0-d: compute all and change nothing. For the warm-up of a captured step."""
    step: int = 0
    """Optimizer steps taken."""
    plain: bool = False
    """Dense masks and all logits at once: the obvious way, to compare with."""
    captured: Captured | None = None

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
        return cls.around(config, drafter.to(device, DTYPES[config.drafter.dtype]), ends)

    @classmethod
    def around(cls, config: Config, drafter: DFlashDrafter, ends: FrozenEnds) -> TrainState:
        """Of a drafter that stands on its device in its dtype."""
        device, train = drafter.fc.weight.device, config.train
        if config.step_mode != "eager":
            drafter.compile_pieces()
        if config.step.head_float8:
            refuse_float8(ends.head_VH)
            ends = replace(ends, float8=by_unit(ends.head_VH))
        optimizer = MasterAdamW(
            drafter, betas=train.betas, weight_decay=train.weight_decay, clip=train.clip
        )
        metrics = Metrics(drafter.arch.block_size, device)
        inputs = torch.zeros(4, dtype=torch.float64, device=device)
        dry = torch.zeros((), dtype=torch.bool, device=device)
        return cls(config, drafter, ends, optimizer, metrics, inputs, dry)

    def piece(self, function: Callable[P, R]) -> Callable[P, R]:
        """The function, compiled unless the mode is eager."""
        return function if self.config.step_mode == "eager" else _compiled(function)

    def part(self, name: str) -> AbstractContextManager[None]:
        """An NVTX range around the launches of a part of the step (of its capture, in mode
        graph)."""
        on_gpu = self.inputs.is_cuda
        return torch.cuda.nvtx.range(f"step: {name}") if on_gpu else nullcontext()

    @property
    def slot(self) -> int:
        """The seq of the slot that the next step reads."""
        return self.step // self.config.train.passes_per_slot

    @property
    def pass_idx(self) -> int:
        return self.step % self.config.train.passes_per_slot

    def set_inputs(self, seq: int, pass_idx: int) -> None:
        """Fill the step's inputs: one stream-ordered copy to a fixed address, no sync.

        From a new row of pinned memory each time: torch gives one out again only after the copy
        that reads it, and steps that run later may still wait for theirs.
        """
        train, pinned = self.config.train, self.inputs.is_cuda
        rate = learning_rate(self.step, total=train.steps, peak=train.lr, warmup=train.warmup)
        values = (self.config.run.seed, seq, pass_idx, rate)
        row = torch.tensor(values, dtype=torch.float64, pin_memory=pinned)
        self.inputs.copy_(row, non_blocking=True)


@functools.cache
def _compiled(function: Callable[P, R]) -> Callable[P, R]:
    return torch.compile(function, fullgraph=True, dynamic=False)


def train_step(state: TrainState, batch: Batch, *, seq: int, pass_idx: int) -> Tensor:
    """One optimizer step on `batch`. Returns this step's metric sums (already added to
    state.metrics) on the device.

    In mode graph the first call captures, and the batch must be the same tensors ever after.
    """
    state.set_inputs(seq, pass_idx)
    if state.config.step_mode == "graph":
        state.captured = state.captured or capture(state, batch)
        assert state.captured.batch is batch, "a captured step reads the batch it was captured with"
        state.captured.graph.replay()
        sums = state.captured.sums
    else:
        sums = run_step(state, batch)
    state.step += 1
    return sums


class Captured(NamedTuple):
    """A whole step as one CUDA graph: its inputs, and where its result stands after a replay."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    sums: Tensor


def warm_up(state: TrainState, batch: Batch) -> None:
    """Compiles the step before its first batch is there, and captures it in mode graph. Changes
    nothing else in `state`, whatever the batch holds."""
    if state.config.step_mode == "graph":
        state.captured = capture(state, batch)
        return
    with _dry(state):
        run_step(state, batch)


def capture(state: TrainState, batch: Batch, warm_ups: int = 2) -> Captured:
    """Compiles, warms up and captures run_step(state, batch). Changes nothing in `state`, whatever
    the batch holds."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with _dry(state):
        stream.wait_stream(torch.cuda.current_stream())
        # Libraries keep workspaces a stream, so the warm-up runs where the capture will.
        # thread_local: what other threads do on the device meanwhile is no error.
        with torch.cuda.stream(stream):
            for _ in range(warm_ups):
                run_step(state, batch)
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            sums = run_step(state, batch)
        torch.cuda.current_stream().wait_stream(stream)
    return Captured(graph, batch, sums)


@contextlib.contextmanager
def _dry(state: TrainState) -> Iterator[None]:
    """Steps inside compute all and change nothing."""
    sums_before = state.metrics.sums.clone()
    state.dry.fill_(True)
    try:
        yield
    finally:
        state.metrics.sums.copy_(sums_before)
        state.dry.fill_(False)


def run_step(state: TrainState, batch: Batch) -> Tensor:
    """The part that a CUDA graph captures: reads and writes device tensors only."""
    loss, sums = forward_loss(state, batch)
    with state.part("backward"):
        state.optimizer.gradients(loss)
    with state.part("optimizer"):
        state.optimizer.lr.copy_(state.inputs[3])
        norm, skipped = state.optimizer.step(skip=(sums["weight"] == 0) | state.dry)
        return state.piece(_count)(state.metrics, sums, norm, skipped)


def _count(metrics: Metrics, sums: dict[str, Tensor], norm: Tensor, skipped: Tensor) -> Tensor:
    # A skipped step is counted, and kept out of the interval's means: NaN as well as labels that
    # nobody trained on.
    sums = {k: x if k in COUNTED else torch.where(skipped, 0, x) for k, x in sums.items()}
    sums |= {"skipped": skipped, "steps": torch.ones_like(norm)}
    sums["grad_norm"] = torch.where(skipped, 0, norm)
    vector = metrics.layout.pack(sums)
    metrics.add(vector)
    return vector


def forward_loss(state: TrainState, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """(scalar loss with graph, metric sums) of the anchors that state.inputs draws."""
    drafter, ends, config = state.drafter, state.ends, state.config
    block = drafter.arch.block_size

    with state.part("anchors and masks"):
        drawn = state.piece(draw)(batch, state.inputs, config.num_anchors, drafter.arch)
        allowed = masks(state, batch.lens_D, drawn)
    with state.part("context"):
        ctx_kv = state.piece(see_context)(drafter, batch.all_TF, drawn)
    with state.part("blocks"):
        ids_U = torch.cat((drawn.ids_Q[::block], drawn.ids_Q[1:2]))
        hidden_RH = drafter.blocks(ends.embed(ids_U), drawn.pos_Q, ctx_kv, allowed)

    target = None
    if config.train.loss == "kl":
        assert batch.vlh_TH is not None
        # The target's distribution of token a+k stands at a+k-1. Masked slots read row 0, which is
        # never stale.
        target = TargetStates(batch.vlh_TH, (drawn.at_AJ - 1).clamp_min(0).flatten())
    with state.part("head"):
        inputs = (hidden_RH, ends.head_VH, drawn.label_AJ.flatten(), target, ends.logit_softcap)
        rows = head_loss_full(*inputs) if state.plain else head_loss(*inputs, float8=ends.float8)
        return state.piece(score)(rows.loss_R, rows.nll_R, rows.rank_R, batch, drawn, config)


class Drawn(NamedTuple):
    """What a step trains on, of what the slot holds."""

    doc_T: Tensor
    """-1 on stale rows."""
    pos_T: Tensor
    """0 on stale rows."""
    anchors: A.Anchors
    label_AJ: Tensor
    mask_AJ: Tensor
    at_AJ: Tensor
    ids_Q: Tensor
    pos_Q: Tensor


def draw(batch: Batch, inputs: Tensor, num_anchors: int, arch: DrafterArch) -> Drawn:
    num_tokens, block = batch.ids_T.numel(), arch.block_size
    doc_T = A.documents(batch.lens_D, batch.total_tok, num_tokens)
    seed, seq, pass_idx = inputs[:3].long().unbind()
    key_T = A.hash_keys(seed, seq, pass_idx, num_tokens, doc_T.device)
    valid_T = A.valid_anchors(batch.lm_T, doc_T)
    anchors = A.sample_anchors(key_T, valid_T, doc_T, num_anchors)
    label_AJ, mask_AJ, at_AJ = A.labels(anchors, batch.ids_T, batch.lm_T, doc_T, block)
    ids_Q, pos_Q = A.block_inputs(anchors, batch.ids_T, batch.pos_T, block, arch.mask_token_id)
    pos_T = torch.where(doc_T >= 0, batch.pos_T, 0)
    return Drawn(doc_T, pos_T, anchors, label_AJ, mask_AJ, at_AJ, ids_Q, pos_Q)


def see_context(drafter: DFlashDrafter, all_TF: Tensor, drawn: Drawn) -> list[KeyValue]:
    feat_TF = torch.where((drawn.doc_T >= 0)[:, None], all_TF, 0).to(drafter.fc.weight.dtype)
    return drafter.context_kv(drafter.context(feat_TF), drawn.pos_T)


def score(
    loss_R: Tensor, nll_R: Tensor, rank_R: Tensor, batch: Batch, drawn: Drawn, config: Config
) -> tuple[Tensor, dict[str, Tensor]]:
    """(weighted mean loss, metric sums)."""
    mask_AJ = drawn.mask_AJ
    weight_AJ = _weights(config, nll_R.view_as(mask_AJ), mask_AJ)
    total, weight = weighted_mean(loss_R.view_as(mask_AJ), weight_AJ, mask_AJ)
    sums = count_correct(rank_R.view_as(mask_AJ), mask_AJ, drawn.anchors.valid_A) | {
        "loss": total.detach(),
        "weight": weight,
        "tokens": batch.total_tok,
        "supervised": (batch.lm_T & (drawn.doc_T >= 0)).sum(),
        "anchors_asked": torch.full_like(batch.total_tok, config.num_anchors),
    }
    return total / weight.clamp_min(torch.finfo(weight.dtype).tiny), sums


def masks(state: TrainState, lens_D: Tensor, drawn: Drawn) -> dict[Kind, Mask]:
    arch, doc_T, anchors = state.drafter.arch, drawn.doc_T, drawn.anchors
    kinds, block = layer_kinds(arch), arch.block_size
    if state.plain:
        return dense_masks(doc_T, anchors, block, kinds)
    if doc_T.device.type == "cpu":
        start_A = (lens_D.cumsum(0) - lens_D)[anchors.doc_A.clamp_min(0)]
        return grouped_masks(doc_T, start_A, anchors, block, kinds)
    return state.piece(ranges)(lens_D, anchors, kinds, block, doc_T.numel())


def ranges(
    lens_D: Tensor, anchors: A.Anchors, kinds: list[Kind], block_size: int, num_tokens: int
) -> dict[Kind, Mask]:
    """What the GPU's attention needs to know of each kind."""
    low_A, high_A = block_attention.context_range(anchors, lens_D)
    by_window = {
        window: block_attention.seen_by(
            low_A, high_A, anchors.valid_A, window, block_size, num_tokens
        )
        for window, _ in kinds
    }
    return {
        (window, causal): block_attention.Ranges(low_A, high_A, by_window[window], window, causal)
        for window, causal in kinds
    }


def _weights(config: Config, nll_AJ: Tensor, mask_AJ: Tensor) -> Tensor:
    train = config.train
    if train.position_weights == "dpace":
        return dpace_weights(nll_AJ, mask_AJ, train.dpace_alpha)
    weight_J = decay_weights(mask_AJ.shape[1] + 1, train.gamma, nll_AJ.device)
    return weight_J.expand_as(nll_AJ)
