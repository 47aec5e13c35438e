"""The drafter: a few Qwen3 layers that read the target's states as extra keys and values. Names are
the checkpoint's.

    ctx_TH = drafter.context(feat_TF)                # fc over the concatenated taps, then a norm
    ctx_kv = drafter.context_kv(ctx_TH, pos_T)       # keys and values of every layer
    hidden_QH = drafter(x_QH, pos_Q, ctx_kv, masks)  # block tokens; logits = ends.logits(hidden)

Training and decoding are the same two calls: in training Q holds A blocks and `masks` (mask.py)
keeps them apart, in decoding Q is one block. There is no batch dimension, no embedding and no head
here: those are the target's, frozen (FrozenEnds). Source: reference of the z-lab checkpoint layout;
attention is in mask.py beside the masks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .arch import DrafterArch
from .head import Scaled
from .mask import Kind, Mask, attend

INIT_STD = 0.02

KeyValue = tuple[Tensor, Tensor]
Rope = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class FrozenEnds:
    """What the drafter borrows from the target: embedding, head, their scaling. Never trained."""

    embed_VH: Tensor
    head_VH: Tensor
    """The same tensor as embed_VH where the target ties them."""
    norm_H: Tensor | None = None
    """The target's final norm weight as stored (zero-centred families: the multiplier is 1 +
    it)."""
    embed_scale: float = 1.0
    logit_softcap: float | None = None
    float8: Scaled | None = None
    """What the training step makes the gradient with instead of head_VH, if given."""

    def embed(self, ids_Q: Tensor) -> Tensor:
        """Token ids -> x_QH, scaled as the target does it: by embed_scale rounded to the
        embedding's dtype."""
        x_QH = F.embedding(ids_Q, self.embed_VH)
        if self.embed_scale == 1.0:
            return x_QH
        return x_QH * torch.tensor(self.embed_scale, dtype=x_QH.dtype)

    def logits(self, hidden_QH: Tensor) -> Tensor:
        """Normed hidden states -> logits_QV in the head's dtype (float32 where the target
        soft-caps)."""
        raw_QV = F.linear(hidden_QH, self.head_VH)
        return raw_QV if self.logit_softcap is None else softcap(raw_QV.float(), self.logit_softcap)


def softcap(raw: Tensor, cap: float) -> Tensor:
    """cap * tanh(raw / cap)  (Gemma 2)."""
    return cap * torch.tanh(raw / cap)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in float32 inside. The drafter's norms are never
    zero-centred."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rope_tables(pos_S: Tensor, head_dim: int, theta: float) -> Rope:
    """cos, sin as float32 [S, 1, E]: neox halves over the whole head, to be broadcast over
    heads."""
    exponent = torch.arange(0, head_dim, 2, device=pos_S.device, dtype=torch.float32) / head_dim
    angle_SE = pos_S[:, None].float() * (1.0 / theta**exponent).repeat(2)
    return angle_SE.cos()[:, None], angle_SE.sin()[:, None]


def rotate(x_SGE: Tensor, rope: Rope) -> Tensor:
    """Apply rotary positions: halves (a, b) -> (a cos - b sin, b cos + a sin), in float32
    inside."""
    cos, sin = (table.to(torch.promote_types(x_SGE.dtype, torch.float32)) for table in rope)
    a, b = x_SGE.chunk(2, dim=-1)
    return (x_SGE * cos + torch.cat((-b, a), dim=-1) * sin).to(x_SGE.dtype)


class Attention(nn.Module):
    def __init__(self, arch: DrafterArch) -> None:
        super().__init__()
        hidden, bias = arch.hidden_size, arch.attention_bias
        self.head_dim = arch.head_dim
        self.q_proj = nn.Linear(hidden, arch.num_attention_heads * arch.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, arch.num_key_value_heads * arch.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, arch.num_key_value_heads * arch.head_dim, bias=bias)
        self.o_proj = nn.Linear(arch.num_attention_heads * arch.head_dim, hidden, bias=bias)
        self.q_norm = RMSNorm(arch.head_dim, arch.rms_norm_eps)
        self.k_norm = RMSNorm(arch.head_dim, arch.rms_norm_eps)

    def key_value_projections(self) -> tuple[nn.Linear, nn.Linear]:
        return self.k_proj, self.v_proj

    def forward(
        self, x_SH: Tensor, rope: Rope, ctx: KeyValue, mask: Mask, block_size: int | None = None
    ) -> Tensor:
        """Of the block rows, after input_layernorm. x_SH has a row for each of rope's, or is
        `distinct`. With block_size, out has no row of an anchor."""
        rows = len(rope[0])
        q_QNE, k_QGE, v_QGE = (
            spread(x.unflatten(-1, (-1, self.head_dim)), rows)
            for x in (self.q_proj(x_SH), self.k_proj(x_SH), self.v_proj(x_SH))
        )
        q_QNE, k_QGE = rotate(self.q_norm(q_QNE), rope), rotate(self.k_norm(k_QGE), rope)
        out_QNE = attend(q_QNE, ctx, (k_QGE, v_QGE), mask)
        return self.o_proj(_skip_anchors(out_QNE, block_size).flatten(-2))


def spread(x: Tensor, rows: int) -> Tensor:
    """Distinct rows [A anchors, the masked one] -> [Q], block by block: anchor, then the masked one
    K-1 times. As it is if it has `rows` rows."""
    if len(x) == rows:
        return x
    anchors, masked = x[:-1, None], x[-1]
    masked = masked.expand(len(anchors), rows // len(anchors) - 1, *masked.shape)
    return torch.cat((anchors, masked), dim=1).flatten(0, 1)


def _skip_anchors(x: Tensor, block_size: int | None) -> Tensor:
    return x if block_size is None else x.unflatten(0, (-1, block_size))[:, 1:].flatten(0, 1)


class MLP(nn.Module):
    def __init__(self, arch: DrafterArch) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(arch.hidden_size, arch.intermediate_size, bias=False)
        self.up_proj = nn.Linear(arch.hidden_size, arch.intermediate_size, bias=False)
        self.down_proj = nn.Linear(arch.intermediate_size, arch.hidden_size, bias=False)

    def forward(self, x_QH: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_QH)) * self.up_proj(x_QH))


class Layer(nn.Module):
    def __init__(self, arch: DrafterArch) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.self_attn = Attention(arch)
        self.post_attention_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.mlp = MLP(arch)

    def forward(
        self,
        x_QH: Tensor,
        rope: Rope,
        ctx: KeyValue,
        mask: Mask,
        distinct_UH: Tensor | None = None,
        block_size: int | None = None,
    ) -> Tensor:
        """distinct_UH: what x_QH is `spread` from, where it is. block_size: leave out the anchors'
        rows."""
        source = x_QH if distinct_UH is None else distinct_UH
        attended = self.self_attn(self.input_layernorm(source), rope, ctx, mask, block_size)
        x_QH = _skip_anchors(x_QH, block_size) + attended
        return x_QH + self.mlp(self.post_attention_layernorm(x_QH))


class DFlashDrafter(nn.Module):
    """F = num_taps * H. Module names give exactly the 3 + 11 * layers tensors of a DFlash
    checkpoint."""

    def __init__(self, arch: DrafterArch) -> None:
        super().__init__()
        self.arch = arch
        self.fc = nn.Linear(arch.num_taps * arch.hidden_size, arch.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(arch) for _ in range(arch.num_layers))
        self.norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self._rope_tables = rope_tables

    def compile_pieces(self, **options: Any) -> None:
        """From now on `blocks` runs compiled (`options` go to torch.compile). One layer's code
        serves all of its kind: at 27B shapes that compiles in a fifth of the whole stack's time.
        `forward` stays as it is: its shapes change from call to call."""
        options = {"fullgraph": True, "dynamic": False} | options
        for module in (*self.layers, self.norm):
            module.compile(**options)
        self._rope_tables = torch.compile(rope_tables, **options)

    @torch.no_grad()
    def init_weights(
        self, seed: int, final_norm_H: Tensor | None = None, zero_centred: bool = False
    ) -> None:
        """Matrices normal(0, 0.02), biases 0, norms 1, from an own CPU generator: the same bits on
        every device.

        `final_norm_H`: start the final norm from the target's, whose head reads it (+ 1 for
        zero-centred families).
        """
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * INIT_STD)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        if final_norm_H is not None:
            self.norm.weight.copy_(final_norm_H.float() + (1.0 if zero_centred else 0.0))

    def _layers(self) -> list[Layer]:
        return cast(list[Layer], list(self.layers))

    def context(self, feat_TF: Tensor) -> Tensor:
        """Concatenated taps -> ctx_TH, shared by every layer."""
        return self.hidden_norm(self.fc(feat_TF))

    def context_kv(self, ctx_TH: Tensor, pos_T: Tensor) -> list[KeyValue]:
        """Keys (normed, rotated) and values of the context, (k_TGE, v_TGE) a layer. Rows are
        independent: a cache grows by concatenation along dim 0."""
        head_dim, layers = self.arch.head_dim, self._layers()
        rope = rope_tables(pos_T, head_dim, self.arch.rope_theta)
        projections = [p for layer in layers for p in layer.self_attn.key_value_projections()]
        # One matmul: on a GPU it saves nine additions of ctx_TH's gradient.
        bias = None
        if projections[0].bias is not None:
            bias = torch.cat([p.bias for p in projections])
        both = F.linear(ctx_TH, torch.cat([p.weight for p in projections]), bias)
        kv_TLGE = both.unflatten(-1, (2 * len(layers), -1, head_dim)).unbind(1)
        return [
            (rotate(layer.self_attn.k_norm(kv_TLGE[2 * index]), rope), kv_TLGE[2 * index + 1])
            for index, layer in enumerate(layers)
        ]

    def forward(
        self, x_QH: Tensor, pos_Q: Tensor, ctx_kv: Sequence[KeyValue], masks: Mapping[Kind, Mask]
    ) -> Tensor:
        """Embedded block tokens -> hidden_QH after the final norm. `masks` has one entry a distinct
        kind of layer."""
        rope = rope_tables(pos_Q, self.arch.head_dim, self.arch.rope_theta)
        for index, layer in enumerate(self._layers()):
            # .forward: not what compile_pieces has compiled
            x_QH = layer.forward(x_QH, rope, ctx_kv[index], masks[layer_kind(self.arch, index)])
        return self.norm.forward(x_QH)

    def blocks(
        self,
        distinct_UH: Tensor,
        pos_Q: Tensor,
        ctx_kv: Sequence[KeyValue],
        masks: Mapping[Kind, Mask],
    ) -> Tensor:
        """`forward` of A whole blocks, for training: distinct_UH [A+1, H] holds the embedded
        anchors and the masked token; hidden_RH has the rows of slots 1..K-1 alone.

        The first layer projects the A+1 distinct rows, not all Q; the last one leaves the anchors'
        rows, which predict nothing, out of all that follows its attention.
        """
        block, last = self.arch.block_size, self.arch.num_layers - 1
        rope = self._rope_tables(pos_Q, self.arch.head_dim, self.arch.rope_theta)
        x_QH = spread(distinct_UH, len(pos_Q))
        for index, layer in enumerate(self._layers()):
            x_QH = layer(
                x_QH,
                rope,
                ctx_kv[index],
                masks[layer_kind(self.arch, index)],
                distinct_UH if index == 0 else None,
                block if index == last else None,
            )
        return self.norm(x_QH)


def layer_kind(arch: DrafterArch, layer: int) -> Kind:
    """(window, causal): all that an attention mask depends on besides the batch."""
    return arch.layer_window(layer), arch.layer_causal(layer)


def layer_kinds(arch: DrafterArch) -> list[Kind]:
    """The distinct kinds, in order of first use."""
    return list(dict.fromkeys(layer_kind(arch, layer) for layer in range(arch.num_layers)))
