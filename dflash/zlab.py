"""The checkpoint layout of z-lab's DFlash, which vLLM and SGLang read too: config keys and tensors.

A drafter that is trained well and exported with one wrong key is served badly and in silence, so
every key is written in each place where one of the readers looks, and `check_config` and
`check_tensors` hold what is to be written against tables that owe nothing to the model's code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .arch import DrafterArch
from .config import ConfigError


def to_config(arch: DrafterArch) -> dict[str, Any]:
    """The union of the keys that z-lab's package, vLLM and SGLang read: block_size and the rotary
    base stand in both of their places; layer types and window are always explicit."""
    sliding = "sliding_attention" in arch.layer_types
    eos: int | list[int] | None = list(arch.eos_token_ids)
    if len(arch.eos_token_ids) < 2:
        eos = next(iter(arch.eos_token_ids), None)
    dflash: dict[str, Any] = {
        "mask_token_id": arch.mask_token_id,
        "target_layer_ids": list(arch.taps),
        "block_size": arch.block_size,
    }
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "attention_bias": arch.attention_bias,
        "attention_dropout": 0.0,
        "block_size": arch.block_size,
        "bos_token_id": arch.bos_token_id,
        "dflash_config": dflash,
        "eos_token_id": eos,
        "head_dim": arch.head_dim,
        "hidden_act": "silu",
        "hidden_size": arch.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": arch.intermediate_size,
        "layer_types": list(arch.layer_types),
        "max_position_embeddings": arch.max_position_embeddings,
        # Qwen3Config makes layers below this full when it derives layer types itself.
        "max_window_layers": arch.num_layers,
        "num_attention_heads": arch.num_attention_heads,
        "num_hidden_layers": arch.num_layers,
        "num_key_value_heads": arch.num_key_value_heads,
        "num_target_layers": arch.num_target_layers,
        "rms_norm_eps": arch.rms_norm_eps,
        "rope_parameters": {"rope_theta": arch.rope_theta, "rope_type": "default"},
        "rope_scaling": None,
        "rope_theta": arch.rope_theta,
        "sliding_window": arch.sliding_window,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": sliding,
        "vocab_size": arch.vocab_size,
    }
    if arch.is_causal is not None:
        # z-lab and SGLang read the first, vLLM the second. Absent: sliding layers are causal in
        # the block, full ones are not, for all three.
        config["is_causal"] = dflash["causal"] = arch.is_causal
    if arch.embed_scale != 1.0:
        dflash["input_embedding_scale"] = arch.embed_scale
    if arch.logit_softcap is not None:
        dflash["final_logit_softcapping"] = arch.logit_softcap
    return config


KEY_TYPES: dict[str, type | tuple[type, ...]] = {
    "architectures": list,
    "model_type": str,
    "dtype": str,
    "attention_bias": bool,
    "attention_dropout": float,
    "block_size": int,
    "dflash_config": dict,
    "head_dim": int,
    "hidden_act": str,
    "hidden_size": int,
    "initializer_range": float,
    "intermediate_size": int,
    "layer_types": list,
    "max_position_embeddings": int,
    "max_window_layers": int,
    "num_attention_heads": int,
    "num_hidden_layers": int,
    "num_key_value_heads": int,
    "num_target_layers": int,
    "rms_norm_eps": float,
    "rope_parameters": dict,
    "rope_theta": (int, float),
    "tie_word_embeddings": bool,
    "use_cache": bool,
    "use_sliding_window": bool,
    "vocab_size": int,
}


def check_config(config: dict[str, Any], arch: DrafterArch) -> None:
    """Key by key, from the readers' side. Raises ConfigError naming the first that is wrong."""
    inner = config.get("dflash_config", {})
    for key, kind in KEY_TYPES.items():
        if not isinstance(config.get(key), kind):
            raise ConfigError(f"export: config.json: {key} is {config.get(key)!r}")
    layers, window = config["num_hidden_layers"], config.get("sliding_window")
    rules = {
        "architectures": config["architectures"] == ["DFlashDraftModel"],
        "block_size": config["block_size"] == inner.get("block_size") >= 2,
        "dflash_config.mask_token_id": 0 <= inner.get("mask_token_id", -1) < config["vocab_size"],
        "dflash_config.target_layer_ids": inner.get("target_layer_ids") == list(arch.taps)
        and max(arch.taps) < config["num_target_layers"],
        "layer_types": len(config["layer_types"]) == layers,
        "sliding_window and use_sliding_window": ("sliding_attention" in config["layer_types"])
        == config["use_sliding_window"]
        == (window is not None),
        "max_window_layers": config["max_window_layers"] == layers,
        "rope_theta and rope_parameters": config["rope_theta"]
        == config["rope_parameters"].get("rope_theta"),
        "is_causal": config.get("is_causal") == inner.get("causal") == arch.is_causal,
        "draft_vocab_size": "draft_vocab_size" not in config,
        # What is read back must be the drafter that was trained.
        "config": from_config(config) == arch,
    }
    wrong = [key for key, holds in rules.items() if not holds]
    if wrong:
        raise ConfigError(f"export: config.json: {', '.join(wrong)}: breaks the layout's rules")


REQUIRED = ("mask_token_id", "target_layer_ids", "block_size", "vocab_size")


def from_config(raw: dict[str, Any]) -> DrafterArch:
    """The drafter that a z-lab config.json describes, in the older or the newer form.

    Raises ConfigError where it is no such config.
    """
    inner = raw.get("dflash_config") or {}
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"):
        if not isinstance(raw.get(key), int):
            raise ConfigError(f"config.json has no {key}: not a DFlash drafter")

    def value(key: str, default: Any = None) -> Any:
        """Inside dflash_config (newer form) or beside it."""
        found = inner.get(key, raw.get(key, default))
        if found is None and key in REQUIRED:
            raise ConfigError(f"config.json has no {key}: not a DFlash drafter")
        return found

    _refuse_unknown(raw, value)
    rope = raw.get("rope_parameters") or {}
    layers, heads = raw["num_hidden_layers"], raw["num_attention_heads"]
    slides = raw.get("use_sliding_window", False)  # Qwen3Config's default, for every reader
    first = raw.get("max_window_layers", 28) if slides and raw.get("sliding_window") else layers
    by_qwen3 = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    eos = raw.get("eos_token_id")
    return DrafterArch(
        num_layers=layers,
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=raw.get("num_key_value_heads", heads),
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        max_position_embeddings=raw.get("max_position_embeddings", 32768),
        attention_bias=raw.get("attention_bias", False),
        layer_types=tuple(raw.get("layer_types") or by_qwen3),
        sliding_window=raw.get("sliding_window") if slides else None,
        is_causal=raw.get("is_causal", inner.get("causal")),
        block_size=value("block_size"),
        mask_token_id=value("mask_token_id"),
        taps=tuple(value("target_layer_ids")),
        num_target_layers=raw.get("num_target_layers", max(value("target_layer_ids")) + 1),
        vocab_size=value("vocab_size"),
        embed_scale=float(value("input_embedding_scale", 1.0)),
        logit_softcap=value("final_logit_softcapping"),
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=tuple([eos] if isinstance(eos, int) else eos or []),
    )


def _refuse_unknown(raw: dict[str, Any], value: Callable[..., Any]) -> None:
    """What the drafter here would compute differently, without a tensor that shows it."""
    ropes = [raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}]
    kinds = {str(rope.get("rope_type", rope.get("type", "default"))) for rope in ropes}
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    unknown = {
        "a sliding_window shorter than the block": bool(window) and window < value("block_size"),
        f"scaled rotary positions ({', '.join(sorted(kinds - {'default'}))})": kinds != {"default"},
        f"hidden_act {raw.get('hidden_act')!r}": raw.get("hidden_act", "silu") != "silu",
        "output_multiplier": value("output_multiplier", 1.0) != 1.0,
    }
    if found := [name for name, there in unknown.items() if there]:
        raise ConfigError(f"config.json: {' and '.join(found)}: not supported in a drafter")


def tensor_table(arch: DrafterArch) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of the checkpoint: 3 + 11 a layer (+ 4 biases)."""
    h, ff, e = arch.hidden_size, arch.intermediate_size, arch.head_dim
    q, kv = arch.num_attention_heads * e, arch.num_key_value_heads * e
    table: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, arch.num_taps * h),
        "hidden_norm.weight": (h,),
        "norm.weight": (h,),
    }
    projections = {"q_proj": (q, h), "k_proj": (kv, h), "v_proj": (kv, h), "o_proj": (h, q)}
    for layer in (f"layers.{index}." for index in range(arch.num_layers)):
        table[f"{layer}input_layernorm.weight"] = (h,)
        table[f"{layer}post_attention_layernorm.weight"] = (h,)
        for name, shape in projections.items():
            table[f"{layer}self_attn.{name}.weight"] = shape
            if arch.attention_bias:
                table[f"{layer}self_attn.{name}.bias"] = shape[:1]
        table[f"{layer}self_attn.q_norm.weight"] = (e,)
        table[f"{layer}self_attn.k_norm.weight"] = (e,)
        table[f"{layer}mlp.gate_proj.weight"] = (ff, h)
        table[f"{layer}mlp.up_proj.weight"] = (ff, h)
        table[f"{layer}mlp.down_proj.weight"] = (h, ff)
    return table


def check_tensors(weights: dict[str, torch.Tensor], arch: DrafterArch, where: str) -> None:
    """Raises ConfigError naming missing, unknown, misshapen or non-finite tensors."""
    table = tensor_table(arch)
    problems = [f"{name} is missing" for name in table if name not in weights]
    problems += [f"{name} is unknown" for name in weights if name not in table]
    problems += [
        f"{name} is {list(weight.shape)}, should be {list(table[name])}"
        for name, weight in weights.items()
        if name in table and tuple(weight.shape) != table[name]
    ]
    problems += [f"{name} is not finite" for name, w in weights.items() if not w.isfinite().all()]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ConfigError(f"{where}: {'; '.join(problems[:3])}{more}")
