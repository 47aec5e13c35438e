"""The loss behind a frozen head: per-row losses over the whole vocabulary without ever keeping the
logits.

The head does not learn, so the only gradient is that of the hidden states, and row i of it is
weight_i * (d loss_i / d logits_i) @ head: linear in the weight. So the forward makes the
*unweighted* row gradients while each chunk of logits exists, and the backward multiplies rows. The
head is passed over twice for `ce` and three times for `kl` (the third is the target's own
distribution), never again for recomputation, and the weights may depend on the losses of the whole
batch. `head_loss_full` is the obvious version, kept as the reference.

    ce   -log softmax(z)[data token]
    kl   KL(target || draft) = sum_v p_v (log p_v - log softmax(z)_v),
         p = softmax(head(target's last hidden state))

with z the (soft-capped, where the target caps) logits. Loss = sum(m * w * l) / sum(m * w), w from
`decay_weights` or `dpace_weights`, m from anchors.labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .model import softcap

LossKind = Literal["ce", "kl"]

CPU_CHUNK_BYTES = 48 << 20
CUDA_CHUNK_BYTES = 2 << 30
"""Of one chunk's float32 logits. Below ~256 rows a CPU matmul with the head loses a tenth of its
speed."""


@dataclass(frozen=True)
class HeadLoss:
    loss_R: Tensor
    """float32 (float64 of float64 inputs); differentiable."""
    nll_R: Tensor
    """-log softmax(z)[data token], whatever the loss is; no gradient."""
    rank_R: Tensor
    """int64: how many tokens the draft puts before the data token; 0 means that the draft's argmax
    is right."""


def chunk_rows(vocab_size: int, device: torch.device) -> int:
    budget = CUDA_CHUNK_BYTES if device.type == "cuda" else CPU_CHUNK_BYTES
    return max(16, budget // (4 * vocab_size))


def head_loss(
    hidden_RH: Tensor,
    head_VH: Tensor,
    label_R: Tensor,
    teacher_RH: Tensor | None = None,
    cap: float | None = None,
    rows: int | None = None,
) -> HeadLoss:
    """Chunked row losses against data tokens (`kl` if teacher_RH, the target's normed states, is
    given; else `ce`).

    Flat rows on purpose: a batched [B, A, K, H] @ head.T copies the head for every batch.
    """
    assert hidden_RH.ndim == 2 and label_R.shape == hidden_RH.shape[:1]
    rows = rows or chunk_rows(head_VH.shape[0], hidden_RH.device)
    return HeadLoss(*_FrozenHead.apply(hidden_RH, head_VH, label_R, teacher_RH, cap, rows))


class _FrozenHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: Tensor,
        head_VH: Tensor,
        label_R: Tensor,
        teacher_RH: Tensor | None,
        cap: float | None,
        rows: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(hidden_RH.dtype, torch.float32)
        loss_R, nll_R = hidden_RH.new_empty(2, label_R.numel(), dtype=wide).unbind()
        rank_R = torch.empty_like(label_R)
        grad_RH = torch.empty_like(hidden_RH) if ctx.needs_input_grad[0] else None
        for start in range(0, label_R.numel(), rows):
            part = slice(start, start + rows)
            raw_CV = F.linear(hidden_RH[part], head_VH)
            teacher_CV = None if teacher_RH is None else F.linear(teacher_RH[part], head_VH)
            loss_R[part], nll_R[part], rank_R[part], dlogits_CV = _rows(
                raw_CV, label_R[part], teacher_CV, cap, wide
            )
            if grad_RH is not None:
                torch.mm(dlogits_CV.to(head_VH.dtype), head_VH, out=grad_RH[part])
        ctx.save_for_backward(grad_RH)
        ctx.mark_non_differentiable(nll_R, rank_R)
        return loss_R, nll_R, rank_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_RH,) = ctx.saved_tensors
        return (grad_RH * grads[0][:, None]).to(grad_RH.dtype), None, None, None, None, None


def _rows(
    raw_CV: Tensor, label_C: Tensor, teacher_CV: Tensor | None, cap: float | None, wide: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, nll, rank, d loss / d raw logits) of a chunk. Works in place on its own wide
    copies."""
    label_C1 = label_C[:, None]
    rank_C = data_rank(raw_CV, label_C)
    logits_CV = raw_CV.to(wide) if cap is None else softcap(raw_CV.to(wide), cap)
    slope_CV = None if cap is None else 1 - (logits_CV / cap).square_()
    logq_CV = F.log_softmax(logits_CV, dim=-1)
    nll_C = -logq_CV.gather(1, label_C1)[:, 0]
    if teacher_CV is None:
        loss_C = nll_C
        dlogits_CV = logq_CV.exp_()
        dlogits_CV.scatter_add_(1, label_C1, torch.full_like(label_C1, -1, dtype=wide))
    else:
        teacher_CV = teacher_CV.to(wide) if cap is None else softcap(teacher_CV.to(wide), cap)
        logp_CV = F.log_softmax(teacher_CV, dim=-1)
        p_CV = logp_CV.exp()
        loss_C = logp_CV.sub_(logq_CV).mul_(p_CV).sum(dim=-1)
        dlogits_CV = logq_CV.exp_().sub_(p_CV)
    return loss_C, nll_C, rank_C, dlogits_CV if slope_CV is None else dlogits_CV.mul_(slope_CV)


def data_rank(raw_CV: Tensor, label_C: Tensor) -> Tensor:
    """How many tokens come before the data token when logits are sorted, lower ids first among
    equals (as argmax does; bf16 logits tie often). No sort. A soft cap is monotone, so raw logits
    serve."""
    own_C1 = raw_CV.gather(1, label_C[:, None])
    earlier_CV = torch.arange(raw_CV.shape[1], device=raw_CV.device) < label_C[:, None]
    return ((raw_CV > own_C1) | ((raw_CV == own_C1) & earlier_CV)).sum(dim=-1)


def head_loss_full(
    hidden_RH: Tensor,
    head_VH: Tensor,
    label_R: Tensor,
    teacher_RH: Tensor | None = None,
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
    if teacher_RH is not None:
        loss_R = F.kl_div(logq_RV, log_probs(teacher_RH), reduction="none", log_target=True).sum(-1)
    order_RV = logq_RV.sort(dim=-1, descending=True, stable=True).indices
    rank_R = (order_RV == label_R[:, None]).int().argmax(dim=-1)
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
