# mypy: disallow_untyped_defs=False
"""AdamW on a GPU in one pass: float32 master and moments, the gradient as the drafter has it,
and the drafter's bf16 weight written on the way.

torch's fused AdamW wants float32 gradients and knows no low-precision copy: three more passes, and
4 bytes a parameter more. Same formula as torch.optim.AdamW; tests compare.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _adamw_kernel(
    weight_ptr,
    master_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    grad_ptr,
    count_ptr,
    lr_ptr,
    grad_scale_ptr,
    skip_ptr,
    size,
    decayed,
    weight_decay,
    beta1,
    beta2,
    log_beta1,
    log_beta2,
    eps,
    BLOCK: tl.constexpr,
):
    if tl.load(skip_ptr) != 0:
        return
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    lr = tl.load(lr_ptr)
    step = tl.load(count_ptr).to(tl.float64) + 1
    correction1 = (1 - tl.exp(step * log_beta1)).to(tl.float32)
    correction2 = tl.sqrt((1 - tl.exp(step * log_beta2)).to(tl.float32))
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32) / tl.load(grad_scale_ptr)
    exp_avg = tl.load(exp_avg_ptr + at, mask=inside, other=0.0)
    exp_avg += (1 - beta1) * (grad - exp_avg)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + at, mask=inside, other=0.0)
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    master = tl.load(master_ptr + at, mask=inside, other=0.0)
    master *= 1 - lr * tl.where(at < decayed, weight_decay, 0.0)
    master -= lr / correction1 * exp_avg / (tl.sqrt(exp_avg_sq) / correction2 + eps)
    tl.store(exp_avg_ptr + at, exp_avg, mask=inside)
    tl.store(exp_avg_sq_ptr + at, exp_avg_sq, mask=inside)
    tl.store(master_ptr + at, master, mask=inside)
    tl.store(weight_ptr + at, master.to(weight_ptr.dtype.element_ty), mask=inside)


def adamw(
    weights: Tensor,
    masters: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grads: Tensor,
    *,
    count: Tensor,
    lr: Tensor,
    grad_scale: Tensor,
    skip: Tensor,
    decayed: int,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """One update of the flat buffers, unless `skip` is not 0. 0-d float32 on the device: `count`
    (updates taken before this one; not advanced here), `lr`, `grad_scale`, `skip`. Weight decay for
    the first `decayed` elements."""
    size = weights.numel()
    _adamw_kernel[(triton.cdiv(size, BLOCK),)](
        weights,
        masters,
        exp_avg,
        exp_avg_sq,
        grads,
        count,
        lr,
        grad_scale,
        skip,
        size,
        decayed,
        weight_decay,
        *betas,
        *(math.log(beta) if beta else -1e30 for beta in betas),
        eps,
        BLOCK=BLOCK,
    )
