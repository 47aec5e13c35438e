"""A mixture of experts for fast_layers.py: two grouped matmuls over the tokens' rows, sorted by
expert, and one pass that brings them back onto the residual stream.

Which experts a token takes, and with what weights, is the stock router's word. The stock layer's
way back weighs a row for every (token, expert), puts them back in order, sums them and adds: a pass
over memory each. Rows S are the (token, pick) pairs: P picks a token.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def has_grouped(mlp: Any, like: Tensor) -> bool:
    """Whether its experts are two plain tensors in `like`'s dtype: not quantised, none apart."""
    experts = getattr(mlp, "experts", None)
    weights = [getattr(experts, name, None) for name in ("gate_up_proj", "down_proj")]
    return all(torch.is_tensor(weight) and weight.dtype == like.dtype for weight in weights)


def add_mixture(state_NH: Tensor, x_NH: Tensor, mlp: Any, between: ModuleType) -> None:
    """state += mlp(x), in place. `between`: layer_functions or layer_kernels."""
    _, weight_NP, expert_NP = mlp.gate(x_NH)
    picks, experts = expert_NP.shape[1], mlp.experts
    expert_S, order_S = expert_NP.flatten().sort(stable=True)
    each_E = torch.arange(len(experts.down_proj), device=x_NH.device)
    end_E = torch.searchsorted(expert_S, each_E, right=True, out_int32=True)
    both_SF = F.grouped_mm(x_NH[order_S // picks], experts.gate_up_proj.mT, offs=end_E)
    inner_SF = between.silu_times(*both_SF.chunk(2, dim=-1))
    out_SH = F.grouped_mm(inner_SF, experts.down_proj.mT, offs=end_E)
    place_S = torch.empty_like(order_S)
    place_S[order_S] = torch.arange(len(order_S), device=x_NH.device)
    between.add_weighted(state_NH, out_SH, place_S.view_as(expert_NP), weight_NP)
    shared = getattr(mlp, "shared_expert", None)
    if shared is not None:
        inner_NF = between.silu_times(shared.gate_proj(x_NH), shared.up_proj(x_NH))
        state_NH.addcmul_(shared.down_proj(inner_NF), mlp.shared_expert_gate(x_NH).sigmoid())
