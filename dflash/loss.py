"""The loss behind a frozen head: per-row losses over the whole vocabulary without ever keeping the
logits.

The head does not learn, so the only gradient is that of the hidden states, and row i of it is
weight_i * (d loss_i / d logits_i) @ head: linear in the weight. So the forward makes the
*unweighted* row gradients while each chunk of logits exists, and the backward multiplies rows. The
head is passed over twice for `ce` and three times for `kl` (the third is the target's own
distribution, of distinct positions alone: neighbouring blocks overlap), never again for
recomputation, and the weights may depend on the losses of the whole batch. `head_loss_full` is the
obvious version, kept as the reference.

    ce   -log softmax(z)[data token]
    kl   KL(target || draft) = sum_v p_v (log p_v - log softmax(z)_v),
         p = softmax(head(target's last hidden state))

with z the (soft-capped, where the target caps) logits. Loss = sum(m * w * l) / sum(m * w), w from
`decay_weights` or `dpace_weights`, m from anchors.labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .head import FrozenHead, Scaled
from .model import softcap

LossKind = Literal["ce", "kl"]

CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 2 << 30}
"""Of a chunk's logits, the rows of one matmul: below 128 rows a CPU loses a tenth of its speed."""
TILE_BYTES = 2 << 20
"""Of the rows that a CPU's elementwise passes take at a time: they stay in its cache (4x)."""


class TargetStates(NamedTuple):
    """Whose distribution `kl` learns."""

    states_TH: Tensor
    """The target's last hidden states after its final norm; only rows at_R are read."""
    at_R: Tensor
    """int64: the position whose state predicts what row R is asked for."""


@dataclass(frozen=True)
class HeadLoss:
    loss_R: Tensor
    """float32 (float64 of float64 inputs); differentiable."""
    nll_R: Tensor
    """-log softmax(z)[data token], whatever the loss is; no gradient."""
    rank_R: Tensor
    """int64: how many tokens the draft puts before the data token; 0 means that the draft's argmax
    is right."""


def head_loss(
    hidden_RH: Tensor,
    head_VH: Tensor,
    label_R: Tensor,
    target: TargetStates | None = None,
    cap: float | None = None,
    rows: int | None = None,
    float8: Scaled | None = None,
) -> HeadLoss:
    """Chunked row losses: `kl` if the target's states are given, else `ce` on data tokens. float8:
    head.by_unit(head_VH), to make the gradient with.

    Flat rows on purpose: a batched [B, A, K, H] @ head.T copies the head for every batch.
    """
    assert hidden_RH.ndim == 2 and label_R.shape == hidden_RH.shape[:1]
    rows = rows or chunk_rows(label_R.numel(), head_VH)
    wants_grad = torch.is_grad_enabled() and hidden_RH.requires_grad
    loss_R, nll_R, rank_R, _ = _frozen_head(
        hidden_RH,
        [head_VH, *(float8 or ())],
        label_R,
        *(target or (None, None)),
        cap,
        rows,
        wants_grad,
    )
    return HeadLoss(loss_R, nll_R.detach(), rank_R)


def chunk_rows(num_rows: int, head_VH: Tensor) -> int:
    """Rows of one chunk: even chunks of at most CHUNK_BYTES of logits, in whole tiles of a
    matmul."""
    limit = CHUNK_BYTES[head_VH.device.type] // (head_VH.shape[0] * head_VH.element_size())
    chunks = -(-num_rows // max(16, limit))
    rows = -(-num_rows // max(1, chunks))
    return max(16, rows if rows <= 128 else -(-rows // 128) * 128)


@torch.library.custom_op(
    "dflash::frozen_head",
    mutates_args=(),
    schema="(Tensor hidden_RH, Tensor[] head, Tensor label_R, Tensor? states_TH, Tensor? at_R, "
    "float? cap, int rows, bool wants_grad) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _frozen_head(
    hidden_RH: Tensor,
    head: list[Tensor],
    label_R: Tensor,
    states_TH: Tensor | None,
    at_R: Tensor | None,
    cap: float | None,
    rows: int,
    wants_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """loss_R, nll_R, rank_R, and grad_RH: d loss_i / d hidden_i, unweighted (no rows unless
    wanted)."""
    weight_VH, *rounded = head
    products = FrozenHead(weight_VH, Scaled(*rounded) if rounded else None)
    loss_R, nll_R, rank_R, grad_RH = _outputs(hidden_RH, label_R, wants_grad)
    raw_CV = weight_VH.new_empty(min(rows, label_R.numel()), len(weight_VH))
    for start in range(0, label_R.numel(), rows):
        part = slice(start, min(start + rows, label_R.numel()))
        raw = products.logits(hidden_RH[part], out=raw_CV[: part.stop - start])
        target = None
        if states_TH is not None and at_R is not None:
            target = _target_logits(states_TH, at_R[part], products)
        out = (loss_R[part], nll_R[part], rank_R[part])
        dlogits = _fill_rows(raw, label_R[part], target, cap, out, bool(rounded))
        del target  # before the next chunk's: it is as large as raw_CV
        if wants_grad:
            products.input_grad(dlogits, out=grad_RH[part])
    return loss_R, nll_R, rank_R, grad_RH


class TargetLogits(NamedTuple):
    """Of a chunk's distinct positions."""

    logits_UV: Tensor
    """Before the cap. Rows that no row_C names hold anything."""
    row_C: Tensor
    """int64: which of them belongs to the chunk's row."""


def _target_logits(states_TH: Tensor, at_C: Tensor, head: FrozenHead) -> TargetLogits:
    row_C, at_C, count_1 = distinct(at_C, len(states_TH))
    if not at_C.is_cuda:
        at_C = at_C[: int(count_1)]  # reading a tensor is free there
    states_CH = states_TH[at_C].to(head.weight_VH.dtype)
    return TargetLogits(head.first_logits(states_CH, count_1), row_C)


def distinct(at_C: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of indices below `size`: (row_C, at_U, count_1) with at_U[row_C] == at_C, at_U [C] rising
    over its first `count` (int32), 0 from there on. No sync, no shape from data."""
    seen_T = torch.zeros(size, dtype=torch.int32, device=at_C.device)
    place_T = seen_T.scatter_(0, at_C, 1).cumsum(0, dtype=torch.int32)
    row_C = place_T[at_C].long() - 1
    return row_C, torch.zeros_like(at_C).scatter_(0, row_C, at_C), place_T[-1:]


def _outputs(
    hidden_RH: Tensor, label_R: Tensor, wants_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = torch.promote_types(hidden_RH.dtype, torch.float32)
    loss_R, nll_R = (label_R.new_empty(label_R.shape, dtype=wide) for _ in range(2))
    grad_RH = hidden_RH.new_empty(hidden_RH.shape if wants_grad else (0, hidden_RH.shape[1]))
    return loss_R, nll_R, torch.empty_like(label_R), grad_RH


@_frozen_head.register_fake
def _(
    hidden_RH: Tensor,
    head: list[Tensor],
    label_R: Tensor,
    states_TH: Tensor | None,
    at_R: Tensor | None,
    cap: float | None,
    rows: int,
    wants_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _outputs(hidden_RH, label_R, wants_grad)


def _save_grad(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[3])
    ctx.other_grads = (len(inputs[1]) * [None], *[None] * 6)


def _weigh_grad(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    (grad_RH,) = ctx.saved_tensors
    return (grad_RH * grads[0][:, None]).to(grad_RH.dtype), *ctx.other_grads


_frozen_head.register_autograd(_weigh_grad, setup_context=_save_grad)


def _fill_rows(
    raw_CV: Tensor,
    label_C: Tensor,
    target: TargetLogits | None,
    cap: float | None,
    out: tuple[Tensor, Tensor, Tensor],
    float8: bool,
) -> Tensor | Scaled:
    """_rows of a chunk into `out`: a tile at a time, or by head_kernel on a GPU. Returns
    d loss / d raw; uses raw_CV up."""
    if raw_CV.is_cuda:
        from .head_kernel import rows

        return rows(raw_CV, label_C, target, cap, out, float8)
    size = max(1, TILE_BYTES // (4 * raw_CV.shape[1]))
    for start in range(0, len(label_C), size):
        part = slice(start, start + size)
        target_CV = None if target is None else target.logits_UV[target.row_C[part]]
        found = _rows(raw_CV[part], label_C[part], target_CV, cap, out[0].dtype)
        for whole, tile in zip(out, found, strict=True):
            whole[part] = tile
    return raw_CV


def _rows(
    raw_CV: Tensor, label_C: Tensor, target_CV: Tensor | None, cap: float | None, wide: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, nll, rank) of some rows. Leaves d loss / d raw in raw_CV, and target_CV used up.

    In place as far as it goes; with s = z - max z and t likewise of the target,
    kl = sum(e^t (t - s)) / sum(e^t) - log sum(e^t) + log sum(e^s).
    """
    label_C1 = label_C[:, None]
    rank_C = data_rank(raw_CV, label_C)
    draft_CV = _logits(raw_CV, cap, wide)
    slope_CV = None if cap is None else 1 - (draft_CV / cap).square_()
    draft_CV.sub_(draft_CV.amax(dim=-1, keepdim=True))
    own_C1 = draft_CV.gather(1, label_C1)
    if target_CV is None:
        sum_C1 = draft_CV.exp_().sum(dim=-1, keepdim=True)
        nll_C1 = loss_C1 = sum_C1.log() - own_C1
        dlogits_CV = draft_CV.div_(sum_C1)
        dlogits_CV.scatter_add_(1, label_C1, torch.full_like(own_C1, -1))
    else:
        target_CV = _logits(target_CV, cap, wide)
        target_CV.sub_(target_CV.amax(dim=-1, keepdim=True))
        gap_CV = target_CV - draft_CV
        p_sum_C1 = target_CV.exp_().sum(dim=-1, keepdim=True)
        sum_C1 = draft_CV.exp_().sum(dim=-1, keepdim=True)
        p_CV = target_CV.div_(p_sum_C1)
        nll_C1 = sum_C1.log() - own_C1
        loss_C1 = gap_CV.mul_(p_CV).sum(dim=-1, keepdim=True) - p_sum_C1.log() + sum_C1.log()
        dlogits_CV = draft_CV.div_(sum_C1).sub_(p_CV)
    raw_CV.copy_(dlogits_CV if slope_CV is None else dlogits_CV.mul_(slope_CV))
    return loss_C1[:, 0], nll_C1[:, 0], rank_C


def _logits(raw_CV: Tensor, cap: float | None, wide: torch.dtype) -> Tensor:
    """Widened and soft-capped, as a copy to write on unless raw is that wide already."""
    wide_CV = raw_CV.to(wide)
    return wide_CV if cap is None else wide_CV.div_(cap).tanh_().mul_(cap)


def data_rank(raw_CV: Tensor, label_C: Tensor) -> Tensor:
    """How many tokens the draft puts before the data token: those with a larger logit and, of equal
    logits (in bf16 many are), those with a smaller id, as argmax does. So rank 0 means exactly "the
    draft's argmax is right". NaN logits come before all, so a row of them is not right.

    No sort. A soft cap is monotone, so raw logits serve. Row by row, two counts beside the label
    are one pass over the logits: faster on a CPU than masks of all of them.
    """
    own_C1 = raw_CV.gather(1, label_C[:, None])
    not_before_C = [
        torch.count_nonzero(raw_V[:label] < own) + torch.count_nonzero(raw_V[label:] <= own)
        for raw_V, own, label in zip(raw_CV, own_C1, label_C.tolist(), strict=True)
    ]
    return raw_CV.shape[1] - torch.stack(not_before_C)


def head_loss_full(
    hidden_RH: Tensor,
    head_VH: Tensor,
    label_R: Tensor,
    target: TargetStates | None = None,
    cap: float | None = None,
) -> HeadLoss:
    """The reference: all logits at once, autograd's gradient."""
    wide = torch.promote_types(hidden_RH.dtype, torch.float32)

    def log_probs(x_RH: Tensor) -> Tensor:
        raw_RV = F.linear(x_RH, head_VH).to(wide)
        return (raw_RV if cap is None else softcap(raw_RV, cap)).log_softmax(dim=-1)

    logq_RV = log_probs(hidden_RH)
    nll_R = F.nll_loss(logq_RV, label_R, reduction="none")
    loss_R = nll_R
    if target is not None:
        logp_RV = log_probs(target.states_TH[target.at_R].to(head_VH.dtype))
        loss_R = F.kl_div(logq_RV, logp_RV, reduction="none", log_target=True).sum(-1)
    own_R1 = logq_RV.gather(1, label_R[:, None])
    first_RV = torch.arange(len(head_VH), device=label_R.device) < label_R[:, None]
    rank_R = (~(logq_RV <= own_R1) | ((logq_RV == own_R1) & first_RV)).sum(dim=-1)
    return HeadLoss(loss_R, nll_R.detach(), rank_R)


def default_gamma(block_size: int) -> float:
    """DFlash's decay length: 8 -> 4, 10 -> 5, 16 -> 7; linear between these, and on with the end
    slopes (1/2 below 8, 1/3 above 16)."""
    return block_size / 2 if block_size <= 10 else 5 + (block_size - 10) / 3


def decay_weights(block_size: int, gamma: float | None, device: torch.device) -> Tensor:
    """w_J, J = K-1: w_k = exp(-(k-1) / gamma)."""
    slot_J = torch.arange(block_size - 1, device=device, dtype=torch.float32)
    return torch.exp(-slot_J / (gamma or default_gamma(block_size)))


def dpace_weights(nll_AJ: Tensor, mask_AJ: Tensor, alpha: float) -> Tensor:
    """D-PACE (arXiv 2605.18810): w_k = sum_{m>=k} C_m * mask_m, C_m = prod_{i<=m} ((1-alpha) q_i +
    alpha) with q = exp(-nll) the draft's probability of the data token; masked factors are 1.
    Carries no gradient."""
    smooth_AJ = (1 - alpha) * torch.exp(-nll_AJ.detach()) + alpha
    reach_AJ = torch.where(mask_AJ, smooth_AJ, 1.0).cumprod(dim=1) * mask_AJ
    return reach_AJ.flip(1).cumsum(dim=1).flip(1)


def weighted_mean(loss_AJ: Tensor, weight_AJ: Tensor, mask_AJ: Tensor) -> tuple[Tensor, Tensor]:
    """(sum(m * w * l), sum(m * w)). Selected, not multiplied: a masked row's loss may be anything,
    also NaN."""
    weighted_AJ = torch.where(mask_AJ, loss_AJ * weight_AJ, 0.0)
    return weighted_AJ.sum(), torch.where(mask_AJ, weight_AJ, 0.0).sum()
