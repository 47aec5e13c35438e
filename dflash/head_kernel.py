# mypy: disallow_untyped_defs=False
"""One pass over a chunk of logits on a GPU: row losses, and the gradient in place of the logits.

A program owns a row and reads it twice: first for the sums of the online softmax (Milakov and
Gimelshein 2018), then to overwrite it with the gradient. The sums are kept a lane: every lane has
its own running maximum, so the loop holds no reduction across threads, and one exp a logit serves
both cases, since of exp(old - new) and exp(z - new) one is always 1. Stored logits stay bf16; all
arithmetic is float32. loss.head_loss_full is what this must equal.

A gradient in float8 needs its row's largest entry before the first is stored. The sums give it:
with ce it is the label's, 1 - q; with kl, q - p with both positive, no entry exceeds the larger of
the two largest probabilities.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .head import FLOAT8, Scaled

LARGEST = tl.constexpr(448.0)
"""Of float8's numbers."""
LOWEST = tl.constexpr(-1e30)
"""Stands for -inf: differences of two of them are 0, not NaN."""
BLOCK, WARPS = 4096, 32
"""Measured on an H200 at 3,968 x 248,320, without the load ahead: 3.0 TB/s with the target's logits
and 3.3 without (with it 3.2 and 3.5); 16 warps give 2.1 and 3.1, 8 warps 1.8 and 2.8, blocks of
8192 2.8 and 2.8."""


@triton.jit
def _capped(raw, cap):
    return cap - 2 * cap / (tl.exp(2 * raw / cap) + 1)  # cap * tanh(raw / cap)


@triton.jit
def _part(row_ptr, at, vocab):
    return tl.load(row_ptr + at, mask=at < vocab, other=LOWEST)


@triton.jit
def _rows_kernel(
    raw_ptr,
    target_ptr,
    target_row_ptr,
    target_stride,
    label_ptr,
    loss_ptr,
    nll_ptr,
    rank_ptr,
    grad_ptr,
    grad_scale_ptr,
    vocab,
    cap,
    KL: tl.constexpr,
    CAP: tl.constexpr,
    FLOAT8: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    raw_ptr += row * vocab
    grad_ptr += row * vocab
    if KL:
        target_ptr += tl.load(target_row_ptr + row) * target_stride
    lane = tl.arange(0, BLOCK)
    label = tl.load(label_ptr + row)
    raw_own = tl.load(raw_ptr + label).to(tl.float32)

    top = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    p_top = tl.full([BLOCK], LOWEST, tl.float32)
    p_total = tl.zeros([BLOCK], tl.float32)
    gap = tl.zeros([BLOCK], tl.float32)  # sum of e^(t - p_top) * (t - z)
    above = tl.zeros([BLOCK], tl.int32)
    tied = tl.zeros([BLOCK], tl.int32)
    # One part ahead: a part's logits arrive while the one before is summed.
    next_raw = _part(raw_ptr, lane, vocab)
    next_t = next_raw
    if KL:
        next_t = _part(target_ptr, lane, vocab)
    for start in range(0, vocab, BLOCK):
        at = start + lane
        raw, t = next_raw.to(tl.float32), next_t.to(tl.float32)
        next_raw = _part(raw_ptr, at + BLOCK, vocab)
        if KL:
            next_t = _part(target_ptr, at + BLOCK, vocab)
        above += tl.where(raw <= raw_own, 0, 1)  # 1 of NaN, which is never right
        tied += ((raw == raw_own) & (at < label)).to(tl.int32)
        z = raw
        if CAP:
            z = tl.where(at < vocab, _capped(raw, cap), LOWEST)
        fade = tl.exp(-tl.abs(z - top))
        total = tl.where(z > top, total * fade + 1, total + fade)
        top = tl.maximum(top, z)
        if KL:
            if CAP:
                t = tl.where(at < vocab, _capped(t, cap), LOWEST)
            fade = tl.exp(-tl.abs(t - p_top))
            p_total = tl.where(t > p_top, p_total * fade + 1, p_total + fade)
            gap = tl.where(t > p_top, gap * fade + (t - z), gap + fade * (t - z))
            p_top = tl.maximum(p_top, t)

    row_top = tl.max(top, 0)
    log_sum = row_top + tl.log(tl.sum(total * tl.exp(top - row_top), 0))
    own = raw_own
    if CAP:
        own = _capped(raw_own, cap)
    nll = log_sum - own
    loss = nll
    p_log_sum = log_sum
    most = 1 - tl.exp(-nll)
    if KL:
        p_row_top = tl.max(p_top, 0)
        scale = tl.exp(p_top - p_row_top)
        p_sum = tl.sum(p_total * scale, 0)
        p_log_sum = p_row_top + tl.log(p_sum)
        loss = tl.sum(gap * scale, 0) / p_sum - p_log_sum + log_sum
        most = tl.maximum(tl.exp(row_top - log_sum), 1 / p_sum)
    stretch = 1.0
    if FLOAT8:
        most = tl.maximum(most, 1e-6)
        stretch = LARGEST / most
        tl.store(grad_scale_ptr + row, most / LARGEST)
    tl.store(loss_ptr + row, loss)
    tl.store(nll_ptr + row, nll)
    tl.store(rank_ptr + row, tl.sum(above + tied, 0).to(tl.int64))

    next_raw = _part(raw_ptr, lane, vocab)
    next_t = next_raw
    if KL:
        next_t = _part(target_ptr, lane, vocab)
    for start in range(0, vocab, BLOCK):
        at = start + lane
        z, t = next_raw.to(tl.float32), next_t.to(tl.float32)
        next_raw = _part(raw_ptr, at + BLOCK, vocab)
        if KL:
            next_t = _part(target_ptr, at + BLOCK, vocab)
        slope = 1.0
        if CAP:
            z = _capped(z, cap)
            slope = 1 - (z / cap) * (z / cap)
        grad = tl.exp(z - log_sum)
        if KL:
            if CAP:
                t = _capped(t, cap)
            grad -= tl.exp(t - p_log_sum)
        else:
            grad -= (at == label).to(tl.float32)
        grad = (grad * slope * stretch).to(grad_ptr.dtype.element_ty)
        tl.store(grad_ptr + at, grad, mask=at < vocab)


def rows(
    raw_CV: Tensor,
    label_C: Tensor,
    target: tuple[Tensor, Tensor] | None,
    cap: float | None,
    out: tuple[Tensor, Tensor, Tensor],
    float8: bool = False,
) -> Tensor | Scaled:
    """Fills `out` (loss_C, nll_C float32, rank_C int64). Returns d loss / d raw: in place of
    raw_CV, or in float8.

    raw_CV: contiguous logits before the cap. target: the like logits_UV, and row_C, int64: row c's
    are logits_UV[row_C[c]]. See loss._rows for the meaning.
    """
    assert raw_CV.is_contiguous()
    logits_UV, row_C = (raw_CV, label_C) if target is None else target
    assert logits_UV.stride(1) == 1
    grad = Scaled(raw_CV, out[0])
    if float8:
        grad = Scaled(torch.empty_like(raw_CV, dtype=FLOAT8), torch.empty_like(out[0])[:, None])
    _rows_kernel[(raw_CV.shape[0],)](
        raw_CV,
        logits_UV,
        row_C,
        logits_UV.stride(0),
        label_C,
        *out,
        *grad,
        raw_CV.shape[1],
        1.0 if cap is None else cap,
        KL=target is not None,
        CAP=cap is not None,
        FLOAT8=float8,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return grad if float8 else raw_CV
