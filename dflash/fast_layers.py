"""The target's decoder layers for a GPU: the stock layers' arithmetic in fewer passes over memory.

    layers = FastLayers.of(backbone, arch)            # None: not a family known here
    for index, state_NH in layers(documents, L): ...  # the residual stream after each layer

Tokens are packed, [N]: whatever works token by token never sees padding. Only what mixes tokens
(attention, the recurrence) runs on right-padded rows [B, L], one a document, from position 0,
without cache or mask: so no document can reach another. `Rows` knows the way between the two.

Matmuls are the library's; a projection back into the residual stream adds to it in place. What lies
between them (norms, gates, rotary positions, a short convolution) is layer_kernels.py on a GPU and
layer_functions.py on a CPU, where tests compare every layer with the stock one.
The recurrence of Gated DeltaNet layers is flash-linear-attention's kernel; without that package it
is transformers' own, many times slower. The state that is yielded is overwritten by the next layer.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import layer_functions
from .arch import TargetArch, has_fla
from .experts import add_mixture, has_grouped

Rope = tuple[Tensor, Tensor]
"""cos_L1R, sin_L1R."""

FAMILIES = (
    "LlamaDecoderLayer",
    "Qwen2DecoderLayer",
    "Qwen3DecoderLayer",
    "Qwen3MoeDecoderLayer",
    "Qwen3_5DecoderLayer",
    "Qwen3_5MoeDecoderLayer",
)
"""norm, mixer, add, norm, MLP, add. Others (Gemma's four norms, Falcon's two mixers) run as they
are."""
KINDS = ("full_attention", "linear_attention")
L2_EPS = 1e-6


class FastLayers:
    def __init__(self, backbone: Any, arch: TargetArch) -> None:
        self.backbone, self.layers = backbone, list(backbone.layers)
        self.offset = 1.0 if arch.zero_centred_norm else 0.0
        on_gpu = backbone.embed_tokens.weight.is_cuda
        self.between: ModuleType = layer_functions
        if on_gpu:
            from . import layer_kernels

            self.between = layer_kernels
        self.recurrence = fla_rule if on_gpu and has_fla() else torch_rule
        self._gates = {
            layer: torch.cat((mixer.in_proj_a.weight, mixer.in_proj_b.weight))
            for layer in self.layers
            if (mixer := getattr(layer, "linear_attn", None)) is not None
        }

    @classmethod
    def of(cls, backbone: Any, arch: TargetArch) -> FastLayers | None:
        layers, config = list(getattr(backbone, "layers", [])), backbone.config
        kinds = set(getattr(config, "layer_types", None) or KINDS)
        known = all(type(layer).__name__ in FAMILIES for layer in layers) and kinds <= set(KINDS)
        silu = getattr(config, "hidden_act", None) in ("silu", "swish")
        return cls(backbone, arch) if layers and known and silu and are_plain(layers) else None

    @property
    def hybrid(self) -> bool:
        return bool(self._gates)

    def __call__(self, documents: Sequence[Tensor], length: int) -> Iterator[tuple[int, Tensor]]:
        """`documents`: token ids on the host, each at most `length` of them; rows of the state are
        theirs, one document after the other."""
        rows = Rows([len(ids) for ids in documents], length, self.backbone.embed_tokens.weight)
        state_NH = self.backbone.embed_tokens(rows.here(torch.cat(list(documents))))
        place = torch.arange(length, device=state_NH.device)[None]
        if hasattr(self.backbone.rotary_emb, "mrope_section"):  # time, height, width: one for text
            place = place.expand(3, 1, -1)
        cos_1LR, sin_1LR = self.backbone.rotary_emb(state_NH[None], place)
        rope = cos_1LR[0, :, None], sin_1LR[0, :, None]
        for index, layer in enumerate(self.layers):
            self._layer(layer, state_NH, rows, rope)
            yield index, state_NH

    def final_norm(self, state_NH: Tensor) -> Tensor:
        return self._norm(self.backbone.norm, state_NH)

    def _layer(self, layer: Any, state_NH: Tensor, rows: Rows, rope: Rope) -> None:
        """One layer, onto the state in place."""
        x_NH = self._norm(layer.input_layernorm, state_NH)
        if layer in self._gates:
            mixed, out = self._delta_net(layer, x_NH, rows), layer.linear_attn.out_proj
        else:
            mixed, out = self._attention(layer.self_attn, x_NH, rows, rope), layer.self_attn.o_proj
        add_projected(state_NH, mixed, out)
        x_NH, mlp = self._norm(layer.post_attention_layernorm, state_NH), layer.mlp
        if hasattr(mlp, "down_proj") and hasattr(mlp, "gate_proj"):
            inner_NF = self.between.silu_times(mlp.gate_proj(x_NH), mlp.up_proj(x_NH))
            add_projected(state_NH, inner_NF, mlp.down_proj)
        elif has_grouped(mlp, x_NH):
            add_mixture(state_NH, x_NH, mlp, self.between)
        else:  # experts of another making
            found = mlp(x_NH[None])
            state_NH.add_((found[0] if isinstance(found, tuple) else found)[0])

    def _norm(self, norm: Any, x_NH: Tensor) -> Tensor:
        return self.between.rms_norm(x_NH, norm.weight, epsilon(norm), self.offset)

    def _attention(self, mixer: Any, x_NH: Tensor, rows: Rows, rope: Rope) -> Tensor:
        size, heads = mixer.head_dim, mixer.o_proj.in_features // mixer.head_dim
        q_NGE = mixer.q_proj(x_NH).unflatten(-1, (heads, -1))
        k_NGE = mixer.k_proj(x_NH).unflatten(-1, (-1, size))
        v_NGE = mixer.v_proj(x_NH).unflatten(-1, (-1, size))
        q_NGE, *gate = q_NGE.split(size, dim=-1)  # a gated family projects [query, gate] a head
        q_BLGE, k_BLGE = (
            self._normed_and_rotated(getattr(mixer, name, None), x_NGE, rows, rope)
            for name, x_NGE in (("q_norm", q_NGE), ("k_norm", k_NGE))
        )
        out_BLGE = F.scaled_dot_product_attention(
            q_BLGE.transpose(1, 2),
            k_BLGE.transpose(1, 2),
            rows.padded(v_NGE).transpose(1, 2),
            is_causal=True,
            scale=mixer.scaling,
            enable_gqa=True,
        ).transpose(1, 2)
        if not gate:
            return rows.packed(out_BLGE).flatten(-2)
        return self.between.gated(out_BLGE.flatten(0, 1), rows.from_N, gate[0]).flatten(-2)

    def _normed_and_rotated(self, norm: Any, x_NGE: Tensor, rows: Rows, rope: Rope) -> Tensor:
        how = () if norm is None else (norm.weight, epsilon(norm), self.offset)
        return self.between.norm_rotate(x_NGE, rows.into_BL, *rope, *how)

    def _delta_net(self, layer: Any, x_NH: Tensor, rows: Rows) -> Tensor:
        mixer = layer.linear_attn
        z_NVE = mixer.in_proj_z(x_NH).unflatten(-1, (-1, mixer.head_v_dim))
        a_BLV, b_BLV = rows.padded(F.linear(x_NH, self._gates[layer])).chunk(2, dim=-1)
        x_NC, keys = mixer.in_proj_qkv(x_NH), mixer.key_dim
        weight_CW = mixer.conv1d.weight[:, 0]
        q_BLKE, k_BLKE, v_BLVE = (
            self.between.short_conv(x_NC[:, part], rows, weight_CW[part], size, eps)
            for part, size, eps in (
                (slice(keys), mixer.head_k_dim, L2_EPS),
                (slice(keys, 2 * keys), mixer.head_k_dim, L2_EPS),
                (slice(2 * keys, None), mixer.head_v_dim, None),
            )
        )
        out_BLVE = self.recurrence(mixer, q_BLKE, k_BLKE, v_BLVE, a_BLV, b_BLV)
        out_RVE, norm = out_BLVE.flatten(0, 1), mixer.norm
        normed = self.between.gated_norm
        return normed(out_RVE, rows.from_N, z_NVE, norm.weight, epsilon(norm)).flatten(-2)


class Rows:
    """A micro-batch's tokens packed, [N], and padded on the right, [B, L]."""

    def __init__(self, lengths: Sequence[int], length: int, like: Tensor) -> None:
        """`like`: a tensor on the device that the states are on."""
        self._device, self._shape = like.device, (len(lengths), length)
        count_B1 = torch.tensor(lengths)[:, None]
        start_B1 = count_B1.cumsum(0) - count_B1
        place_L = torch.arange(length)
        self.full = int(count_B1.sum()) == len(lengths) * length
        self.start_B, self.count_B = self.here(start_B1[:, 0]), self.here(count_B1[:, 0])
        # Padding repeats a document's last token: finite, and nothing before it looks there.
        self.into_BL = self.here(start_B1 + torch.minimum(place_L, count_B1 - 1))
        self.from_N = self.here((place_L < count_B1).flatten().nonzero()[:, 0])

    def here(self, x: Tensor) -> Tensor:
        """A host tensor on the device, without waiting."""
        return (
            x.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else x
        )

    def padded(self, x_N: Tensor) -> Tensor:
        """[N, ...] -> [B, L, ...]."""
        if not self.full:
            x_N = x_N.index_select(0, self.into_BL.flatten())
        return x_N.unflatten(0, self._shape)

    def packed(self, x_BL: Tensor) -> Tensor:
        """[B, L, ...] -> [N, ...]."""
        x_R = x_BL.flatten(0, 1)
        return x_R if self.full else x_R.index_select(0, self.from_N)


def are_plain(layers: Sequence[nn.Module]) -> bool:
    """Whether their projections are no more than matrices: not quantised, nothing added."""
    return all(
        type(module) is nn.Linear
        for layer in layers
        for name, module in layer.named_modules()
        if name.endswith("_proj")
    )


def epsilon(norm: Any) -> float:
    return float(getattr(norm, "variance_epsilon", None) or norm.eps)


def add_projected(state_NH: Tensor, x_NF: Tensor, projection: nn.Linear) -> None:
    """state += projection(x), inside the matmul: rounded once."""
    state_NH.addmm_(x_NF, projection.weight.T)
    if projection.bias is not None:
        state_NH.add_(projection.bias)


# --- the recurrence of Gated DeltaNet -------------------------------------------------------------


def fla_rule(mixer: Any, q: Tensor, k: Tensor, v: Tensor, a_BLV: Tensor, b_BLV: Tensor) -> Tensor:
    """Gate, beta and grouped value heads inside the kernel."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    out_BLVE, _ = chunk_gated_delta_rule(
        q,
        k,
        v,
        g=a_BLV,
        beta=b_BLV,
        A_log=mixer.A_log,
        dt_bias=mixer.dt_bias,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
    )
    return out_BLVE


def torch_rule(mixer: Any, q: Tensor, k: Tensor, v: Tensor, a_BLV: Tensor, b_BLV: Tensor) -> Tensor:
    """transformers' own: the reference of the other."""
    # Unwrapped: by that name transformers calls fla's where it is installed.
    rule = inspect.unwrap(sys.modules[type(mixer).__module__].torch_chunk_gated_delta_rule)
    group = v.shape[2] // k.shape[2]
    out_BLVE, _ = rule(
        q.repeat_interleave(group, dim=2),
        k.repeat_interleave(group, dim=2),
        v,
        g=-mixer.A_log.float().exp() * F.softplus(a_BLV.float() + mixer.dt_bias),
        beta=b_BLV.sigmoid(),
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
    )
    return out_BLVE
