"""Plain torch in place of the servers' GPU layers, for one request on one device.

vLLM's and SGLang's DFlash models are built from parallel linear layers, fused norms, rotary kernels
and paged attention. These have the same signatures and the same meaning, so that the servers' own
model code (config to layers, names to weights, order of operations) runs here as it is. Every
parameter starts as NaN: one that no tensor of the file fills shows.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Unquantized:
    """Both servers ask a layer's quant_method whether it is this."""


class Linear(nn.Module):
    """Some linear layers in one: their outputs side by side, loaded one by one ("shards")."""

    def __init__(self, inputs: int, parts: dict[Any, int], bias: bool, return_bias: bool) -> None:
        super().__init__()
        self.parts, self.return_bias, self.input_size = parts, return_bias, inputs
        self.quant_method = Unquantized()
        outputs = sum(parts.values())
        self.weight = self._parameter(outputs, inputs)
        self.bias = self._parameter(outputs) if bias else None

    def _parameter(self, *shape: int) -> nn.Parameter:
        parameter = nn.Parameter(torch.full(shape, torch.nan), requires_grad=False)
        parameter.weight_loader = self._load  # type: ignore[attr-defined]
        return parameter

    def _load(self, parameter: nn.Parameter, loaded: Tensor, shard: Any = None) -> None:
        """SGLang says the shard, vLLM writes it on the tensor."""
        shard = getattr(loaded, "shard_id", None) if shard is None else shard
        start = sum(size for name, size in self.parts.items() if list(self.parts).index(name)
                    < list(self.parts).index(shard))  # fmt: skip
        rows = parameter.data[start : start + self.parts[shard]]
        assert rows.shape == loaded.shape, (rows.shape, loaded.shape)
        rows.copy_(loaded)

    def forward(self, x: Tensor) -> Any:
        out = F.linear(x, self.weight, self.bias)
        return (out, None) if self.return_bias else out


class QKVParallelLinear(Linear):
    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        total_num_heads: int,
        total_num_kv_heads: int,
        bias: bool = False,
        **rest: Any,
    ) -> None:
        kv = total_num_kv_heads * head_size
        super().__init__(
            hidden_size, {"q": total_num_heads * head_size, "k": kv, "v": kv}, bias, True
        )


class MergedColumnParallelLinear(Linear):
    def __init__(self, inputs: int, outputs: list[int], bias: bool = False, **rest: Any) -> None:
        super().__init__(inputs, dict(enumerate(outputs)), bias, True)


class RowParallelLinear(Linear):
    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = False,
        return_bias: bool = True,
        **rest: Any,
    ) -> None:
        super().__init__(input_size, {None: output_size}, bias, return_bias)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), torch.nan), requires_grad=False)
        self.variance_epsilon = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        total = x if residual is None else x + residual
        normed = rms_norm(total, self.weight, self.variance_epsilon)
        return normed if residual is None else (normed, total)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


class SiluAndMul(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


class Qwen2MLP(nn.Module):
    """vLLM's, which its DFlash model uses."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, hidden_act: str, **rest: Any
    ) -> None:
        super().__init__()
        assert hidden_act == "silu"
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, [intermediate_size] * 2)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size)
        self.act_fn = SiluAndMul()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)[0]))[0]


class Embedding(nn.Module):
    def __init__(self, rows: int, size: int, **rest: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((rows, size), torch.nan), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class Rope:
    """What get_rope returns: the rotation by (base, head size), and its table."""

    def __init__(self, head_size: int, base: float, max_position: int, is_neox_style: bool) -> None:
        self.head_size, self.base, self.is_neox_style = head_size, base, is_neox_style
        frequency = 1.0 / base ** (torch.arange(0, head_size, 2).float() / head_size)
        angle = torch.arange(max_position).float()[:, None] * frequency
        self.cos_sin_cache = torch.cat((angle.cos(), angle.sin()), dim=-1)
        self.rotary_dim = head_size

    def __call__(self, positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return (
            rotate(positions, q, self.head_size, self.cos_sin_cache),
            rotate(positions, k, self.head_size, self.cos_sin_cache),
        )


def get_rope(
    head_size: int,
    *,
    max_position: int,
    is_neox_style: bool,
    rope_parameters: dict[str, Any] | None = None,
    rotary_dim: int | None = None,
    base: float | None = None,
    rope_scaling: dict[str, Any] | None = None,
    partial_rotary_factor: float = 1.0,
) -> Rope:
    """vLLM gives rope_parameters, SGLang base and the rest."""
    parameters = rope_parameters or rope_scaling or {}
    assert parameters.get("rope_type", "default") == "default" and is_neox_style
    assert rotary_dim in (None, head_size) and partial_rotary_factor == 1.0
    theta = parameters["rope_theta"] if base is None else base
    return Rope(head_size, theta, min(max_position, 4096), is_neox_style)


def rotate(positions: Tensor, x: Tensor, head_size: int, table: Tensor) -> Tensor:
    cos, sin = table[positions].chunk(2, dim=-1)
    heads = x.view(len(positions), -1, head_size)
    a, b = heads.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).view_as(x)


def rotary_in_place(
    positions: Tensor, q: Tensor, k: None, head_size: int, table: Tensor, is_neox: bool
) -> None:
    assert is_neox
    q.copy_(rotate(positions, q, head_size, table))


def rms_norm_into(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """weight [H], or one row a leading index of x, as vLLM's grouped kernel has it."""
    rows = weight if weight.ndim == 1 else weight.view(-1, *[1] * (x.ndim - 2), weight.shape[-1])
    out.copy_(rms_norm(x, rows, eps))


class DenseAttention:
    """Of one block after its context: what a paged, windowed kernel computes."""

    def __init__(self, heads: int, head_dim: int, scaling: float, kv_heads: int) -> None:
        self.heads, self.head_dim, self.scaling, self.kv_heads = heads, head_dim, scaling, kv_heads
        self.window: int | None = None
        """q - k < window."""
        self.causal = False
        self.context: tuple[Tensor, Tensor] | None = None

    def store(self, key: Tensor, value: Tensor) -> None:
        shape = (-1, self.kv_heads, self.head_dim)
        self.context = key.reshape(shape), value.reshape(shape)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, batch: Any = None) -> Tensor:
        assert self.context is not None
        keys, values = (
            torch.cat((known, new.view(-1, self.kv_heads, self.head_dim)))
            for known, new in zip(self.context, (k, v), strict=True)
        )
        at_S = torch.arange(len(keys))
        ahead_QS = at_S - at_S[-len(q) :, None]
        sees_QS = ahead_QS <= 0 if self.causal else torch.ones_like(ahead_QS, dtype=torch.bool)
        if self.window is not None:
            sees_QS = sees_QS & (ahead_QS.abs() < self.window)
        queries = q.view(-1, self.heads, self.head_dim)
        out = F.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (queries, keys, values)),
            attn_mask=sees_QS,
            scale=self.scaling,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1).flatten(1)


def load_whole(parameter: nn.Parameter, loaded: Tensor) -> None:
    assert parameter.shape == loaded.shape
    parameter.data.copy_(loaded)


def one_device() -> SimpleNamespace:
    return SimpleNamespace(tp_size=1, tp_rank=0)
