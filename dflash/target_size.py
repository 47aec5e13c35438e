"""How large a target is, from its config.json: its parameters, and what a token takes on the way.

Right within a few percent (biases are left out) for dense models, for mixtures of experts and for
hybrids with Gated DeltaNet layers (Qwen3-Next, Qwen3.5, Qwen3.6). Other recurrent layers are
counted as attention, and Gemma's embeddings per layer not at all. A vision tower or a head for
multi-token prediction is not counted: neither is loaded.
"""

from __future__ import annotations

from typing import Any

Text = dict[str, Any]
"""The text part of a config.json, as transformers 4 or 5 writes it."""
DELTA_CHUNK = 64
"""Tokens between two states that flash-linear-attention keeps of a DeltaNet layer."""


def count_parameters(text: Text, tied: bool) -> int:
    """Of the whole causal LM; `tied`: its head is its embedding."""
    hidden, layers = text["hidden_size"], range(text["num_hidden_layers"])
    ends = text["vocab_size"] * hidden * (1 if tied else 2)
    return int(
        ends
        + sum(_linear_attention(text) if _is_linear(text, n) else _attention(text) for n in layers)
        + sum(_experts(text) if _is_sparse(text, n) else _dense_mlp(text) for n in layers)
        + (2 * len(layers) + 1) * hidden
    )


def layer_width(text: Text) -> int:
    """Numbers that one token holds in the widest part of a layer, the residual stream included."""
    layers = range(text["num_hidden_layers"])
    return int(
        4 * text["hidden_size"]
        + max(
            *(
                _linear_width(text) if _is_linear(text, n) else _attention_width(text)
                for n in layers
            ),
            *(_sparse_width(text) if _is_sparse(text, n) else 3 * _dense_ffn(text) for n in layers),
        )
    )


def count_delta_layers(text: Text) -> int:
    """Gated DeltaNet layers."""
    return sum(_is_linear(text, layer) for layer in range(text["num_hidden_layers"]))


# --- which layer is what --------------------------------------------------------------------------


def _is_linear(text: Text, layer: int) -> bool:
    if not text.get("linear_num_value_heads"):
        return False
    if types := text.get("layer_types"):
        return bool(types[layer] == "linear_attention")
    return bool((layer + 1) % text.get("full_attention_interval", 4))


def _is_sparse(text: Text, layer: int) -> bool:
    """Whether the layer has experts: three ways to say which ones have not."""
    return bool(
        _num_experts(text)
        and layer not in (text.get("mlp_only_layers") or ())
        and (layer + 1) % (text.get("decoder_sparse_step") or 1) == 0
        and layer >= (text.get("first_k_dense_replace") or 0)
    )


def _num_experts(text: Text) -> int:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((int(text[name]) for name in names if text.get(name)), 0)


# --- parameters -----------------------------------------------------------------------------------


def _attention(text: Text) -> int:
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    if rank := text.get("kv_lora_rank"):  # multi-head latent attention
        plain, rotated = text["qk_nope_head_dim"], text["qk_rope_head_dim"]
        query, value = heads * (plain + rotated), heads * text["v_head_dim"]
        q_rank = text.get("q_lora_rank")
        queries = q_rank * (hidden + query) if q_rank else hidden * query
        return int(queries + hidden * (rank + rotated) + rank * (heads * plain + value)) + (
            value * hidden
        )
    query, keys = _query(text), 2 * _key(text)
    return int(hidden * (query * (2 + _gated(text)) + keys))


def _linear_attention(text: Text) -> int:
    """Gated DeltaNet: q, k, v and the gate z; beta and decay; the convolution; the output."""
    hidden, (key, value) = text["hidden_size"], _linear_sizes(text)
    heads, taps = text["linear_num_value_heads"], text.get("linear_conv_kernel_dim", 4)
    projections = hidden * (2 * key + 2 * value + 2 * heads) + value * hidden
    return int(projections + taps * (2 * key + value))


def _dense_mlp(text: Text) -> int:
    return 3 * int(text["hidden_size"]) * _dense_ffn(text)


def _experts(text: Text) -> int:
    hidden, experts = text["hidden_size"], _num_experts(text)
    return hidden * (experts * (3 * _expert_ffn(text) + 1) + 3 * _shared_ffn(text))


def _query(text: Text) -> int:
    return int(text["num_attention_heads"]) * _head_dim(text)


def _key(text: Text) -> int:
    return int(text.get("num_key_value_heads") or text["num_attention_heads"]) * _head_dim(text)


def _head_dim(text: Text) -> int:
    return int(text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"])


def _gated(text: Text) -> bool:
    """Qwen's hybrids multiply the attention's output by a gate as wide as the query."""
    return bool(text.get("attn_output_gate", "linear_num_value_heads" in text))


def _linear_sizes(text: Text) -> tuple[int, int]:
    key = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    return key, text["linear_num_value_heads"] * text["linear_value_head_dim"]


def _dense_ffn(text: Text) -> int:
    return int(text.get("intermediate_size") or 4 * text["hidden_size"])


def _expert_ffn(text: Text) -> int:
    return int(text.get("moe_intermediate_size") or _dense_ffn(text))


def _shared_ffn(text: Text) -> int:
    return int(
        text.get("shared_expert_intermediate_size")
        or (text.get("n_shared_experts") or 0) * _expert_ffn(text)
    )


# --- widths ---------------------------------------------------------------------------------------


def _attention_width(text: Text) -> int:
    """q twice (before and after RoPE), its gate, k and v, the output."""
    return (3 + _gated(text)) * _query(text) + 3 * _key(text)


def _linear_width(text: Text) -> int:
    """In and out of the convolution, the gate, four tensors of the recurrence, its states."""
    key, value = _linear_sizes(text)
    states = value * text["linear_key_head_dim"] // DELTA_CHUNK
    return int(2 * (2 * key + value) + 6 * value + states)


def _sparse_width(text: Text) -> int:
    """gate, up and their product, and the token in and out, for each expert that it goes to."""
    chosen = text.get("num_experts_per_tok") or 1
    routed = chosen * (2 * text["hidden_size"] + 3 * _expert_ffn(text))
    return int(routed + 3 * _shared_ffn(text))
