"""The speculators layout (vLLM's training library), which vLLM serves without further options.

The same tensors as z-lab's layout, other keys, and three traps that this module closes:

- aux_hidden_state_layer_ids count from 1: the output of layer i is i + 1;
- the layer config must be whole: Qwen3Config and vLLM fill gaps differently;
- one flag, sliding_window_non_causal, speaks for all layers: vLLM makes every layer causal in the
  block where it is false, full layers too, and speculators never makes a full layer causal. What
  the flag cannot say is refused, and so is what the layout has no key for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from . import zlab
from .arch import DrafterArch
from .config import ConfigError

VERSION = "0.9.0"
"""Of speculators: whose keys these are."""


@dataclass(frozen=True)
class Verifier:
    """The target, in this layout's words: what a server loads, and the class that it is."""

    name_or_path: str
    architecture: str


LAYER_KEYS = (
    "model_type",
    "dtype",
    "attention_bias",
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "max_window_layers",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "use_cache",
    "use_sliding_window",
    "vocab_size",
)
"""transformer_layer_config: z-lab's key of the same name, each."""


def to_config(arch: DrafterArch, verifier: Verifier) -> dict[str, Any]:
    """Raises ConfigError for a drafter that the layout has no words for."""
    non_causal = _non_causal(arch)
    _check_expressible(arch)
    layer = zlab.to_config(arch)
    return {
        "architectures": ["DFlashDraftModel"],
        "dtype": "bfloat16",
        "speculators_model_type": "dflash",
        "speculators_version": VERSION,
        "transformer_layer_config": {key: layer[key] for key in LAYER_KEYS},
        "aux_hidden_state_layer_ids": [tap + 1 for tap in arch.taps],
        "block_size": arch.block_size,
        "draft_vocab_size": arch.vocab_size,
        "mask_token_id": arch.mask_token_id,
        "num_target_layers": arch.num_target_layers,  # ours: speculators and vLLM pass over it
        "sample_from_anchor": False,
        "sliding_window_non_causal": non_causal,
        "target_hidden_size": None,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": arch.block_size - 1,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {
                "name_or_path": verifier.name_or_path,
                "architectures": [verifier.architecture],
            },
        },
    }


def _non_causal(arch: DrafterArch) -> bool:
    """sliding_window_non_causal, such that speculators and vLLM both mean what was trained."""
    causal = {arch.layer_causal(layer) for layer in range(arch.num_layers)}
    full = "full_attention" in arch.layer_types
    if causal == {False}:
        return True
    if causal == {True} and not full:
        return False
    what = (
        "full layers that are causal in the block"
        if causal == {True}
        else "sliding layers causal and full ones not (vLLM would make all causal)"
    )
    raise ConfigError(f"--format speculators: it cannot say {what}: use --format z-lab")


def _check_expressible(arch: DrafterArch) -> None:
    missing = [
        name
        for name, there in {
            f"a scaled embedding (times {arch.embed_scale:g})": arch.embed_scale != 1.0,
            f"soft-capped logits (at {arch.logit_softcap})": arch.logit_softcap is not None,
        }.items()
        if there
    ]
    if missing:
        raise ConfigError(
            f"--format speculators: it has no key for {' and '.join(missing)}: use --format z-lab"
        )


QWEN3_DEFAULTS: dict[str, Any] = {
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""Of Qwen3Config, which speculators leaves out when it writes."""


KEY_TYPES: dict[str, type] = {
    "architectures": list,
    "speculators_model_type": str,
    "speculators_version": str,
    "transformer_layer_config": dict,
    "aux_hidden_state_layer_ids": list,
    "block_size": int,
    "draft_vocab_size": int,
    "mask_token_id": int,
    "sample_from_anchor": bool,
    "sliding_window_non_causal": bool,
    "speculators_config": dict,
}


def check_config(config: dict[str, Any], arch: DrafterArch) -> None:
    """Key by key, from the readers' side. Raises ConfigError naming the first that is wrong."""
    for key, kind in KEY_TYPES.items():
        if not isinstance(config.get(key), kind):
            raise ConfigError(f"export: config.json: {key} is {config.get(key)!r}")
    layer, outer = config["transformer_layer_config"], config["speculators_config"]
    types, methods = layer.get("layer_types") or [], outer.get("proposal_methods") or [{}]
    verifier = outer.get("verifier") or {}
    absent = [key for key in LAYER_KEYS if key not in layer]
    slides, window = "sliding_attention" in types, layer.get("sliding_window")
    rules = {
        "speculators_model_type": config["speculators_model_type"] == "dflash",
        f"transformer_layer_config: {', '.join(absent)}": not absent,
        "layer_types": len(types) == layer.get("num_hidden_layers"),
        "max_window_layers": layer.get("max_window_layers") == len(types),
        "sliding_window and use_sliding_window": slides
        == layer.get("use_sliding_window")
        == (window is not None),
        "aux_hidden_state_layer_ids": config["aux_hidden_state_layer_ids"]
        == [tap + 1 for tap in arch.taps],
        "draft_vocab_size": config["draft_vocab_size"] == layer.get("vocab_size"),
        "mask_token_id": 0 <= config["mask_token_id"] < config["draft_vocab_size"],
        "sample_from_anchor": config["sample_from_anchor"] is False,
        # Of vLLM, which applies it to every layer; of speculators, to the sliding ones.
        "sliding_window_non_causal": all(
            arch.layer_causal(index) != config["sliding_window_non_causal"]
            for index in range(len(types))
        ),
        "speculative_tokens": methods[0].get("speculative_tokens") == config["block_size"] - 1,
        "default_proposal_method": outer.get("default_proposal_method")
        == methods[0].get("proposal_type"),
        "verifier": bool(verifier.get("name_or_path")) and bool(verifier.get("architectures")),
    }
    wrong = [key for key, holds in rules.items() if not holds]
    # What is read back must be the drafter that was trained.
    if not wrong and from_config(config) != normal(arch):
        wrong = ["config"]
    if wrong:
        raise ConfigError(f"export: config.json: {', '.join(wrong)}: breaks the layout's rules")


def from_config(raw: dict[str, Any]) -> DrafterArch:
    """The drafter that a speculators config.json describes, as speculators itself reads it.

    Raises ConfigError where it is none, or has what a DFlash drafter here has not.
    """
    if raw.get("speculators_model_type") != "dflash":
        kind = raw.get("speculators_model_type")
        raise ConfigError(f"config.json: a speculators drafter of kind {kind!r}, not dflash")
    layer = QWEN3_DEFAULTS | (raw.get("transformer_layer_config") or {})
    if raw.get("draft_vocab_size", 32000) != layer.get("vocab_size"):
        raise ConfigError("config.json: draft_vocab_size: a reduced vocabulary is not supported")
    if raw.get("sample_from_anchor"):
        raise ConfigError("config.json: sample_from_anchor: not a DFlash drafter (DSpark's)")
    if raw.get("sliding_window_non_causal") is None:
        raise ConfigError("config.json has no sliding_window_non_causal: its readers disagree")
    ids = raw.get("aux_hidden_state_layer_ids")
    if not ids:
        raise ConfigError("config.json has no aux_hidden_state_layer_ids: not a DFlash drafter")
    flat = {key: value for key, value in layer.items() if key != "is_causal"} | {
        "block_size": raw.get("block_size", 8),
        "mask_token_id": raw.get("mask_token_id"),
        "target_layer_ids": [index - 1 for index in ids],
        "num_target_layers": raw.get("num_target_layers", max(ids)),
    }
    # Full layers are never causal here, so the default rule holds where the flag is false.
    non_causal = raw["sliding_window_non_causal"]
    return normal(replace(zlab.from_config(flat), is_causal=False if non_causal else None))


def normal(arch: DrafterArch) -> DrafterArch:
    """The same drafter with is_causal only where the layer types' own rule would say otherwise."""
    by_default = replace(arch, is_causal=None)
    layers = range(arch.num_layers)
    same = all(arch.layer_causal(i) == by_default.layer_causal(i) for i in layers)
    return by_default if same else arch
