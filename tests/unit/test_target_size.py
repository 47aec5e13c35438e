"""A target's size is read off its config.json: against the model that transformers builds of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers
from tiny import FAMILIES, tiny_config

from dflash.arch import TargetArch
from dflash.config import ConfigError

MOE = {
    "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 128, "intermediate_size": 96, "moe_intermediate_size": 48,
    "num_experts_per_tok": 2,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": MOE | {"num_experts": 8, "mlp_only_layers": [1], "decoder_sparse_step": 2},
    "Qwen3Next": MOE | DELTA | {"num_experts": 8, "shared_expert_intermediate_size": 40},
    "Qwen3_5MoeText": MOE | DELTA | {"num_experts": 8, "shared_expert_intermediate_size": 40},
    "Mixtral": {key: MOE[key] for key in MOE if key != "moe_intermediate_size"}
    | {"num_local_experts": 4},
    "DeepseekV3": MOE
    | LATENT
    | {"num_key_value_heads": 4, "v_head_dim": 16, "n_routed_experts": 8, "n_group": 2}
    | {"n_shared_experts": 2, "first_k_dense_replace": 2, "topk_group": 1},
}


def arch_of(config: Any) -> TargetArch:
    raw = json.loads(config.to_json_string(use_diff=False))
    return TargetArch.from_config(raw, raw)


def parameters(config: Any) -> int:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_and_hybrid_targets(family: str) -> None:
    config = tiny_config(family)
    assert arch_of(config).num_parameters == pytest.approx(parameters(config), rel=0.02)


@pytest.mark.parametrize("name", SHAPES)
def test_targets_with_experts(name: str) -> None:
    config = getattr(transformers, f"{name}Config")(**SHAPES[name])
    assert arch_of(config).num_parameters == pytest.approx(parameters(config), rel=0.02)


def test_a_published_hybrid_config_names_no_layer_types() -> None:
    raw = json.loads(tiny_config("qwen3_5").to_json_string(use_diff=False))
    spelt = TargetArch.from_config(raw, raw).num_parameters
    del raw["layer_types"]
    raw["full_attention_interval"] = 4
    assert TargetArch.from_config(raw, raw).num_parameters == spelt


def test_the_widest_layer() -> None:
    """By hand: 4 H, and gate, up and product of the FFN, or of two experts and the shared one."""
    dense = transformers.LlamaConfig(hidden_size=64, intermediate_size=1000, num_attention_heads=4)
    assert arch_of(dense).layer_width == 4 * 64 + 3 * 1000
    experts = transformers.Qwen3NextConfig(
        **SHAPES["Qwen3Next"] | {"moe_intermediate_size": 500, "head_dim": 8}
    )
    assert arch_of(experts).layer_width == 4 * 64 + 2 * (2 * 64 + 3 * 500) + 3 * 40


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["BertForMaskedLM"]}, "config.json says BertForMaskedLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "says LlamaForSequenceClass"),
        ({"use_bidirectional_attention": True}, "attend to later ones"),
        ({"is_causal": False}, "attend to later ones"),
    ],
)
def test_a_model_of_another_kind_is_refused_by_its_config(
    changes: dict[str, Any], said: str
) -> None:
    raw = tiny_config("llama").to_dict() | {"architectures": ["LlamaForCausalLM"]}
    TargetArch.from_config(raw, raw)
    with pytest.raises(ConfigError, match=rf"target.model: .*{said}.*: not a causal LM") as error:
        TargetArch.from_config(raw | changes, raw | changes)
    assert "\n" not in str(error.value)


def test_a_config_that_does_not_fit_together_is_one_line() -> None:
    raw = json.loads(tiny_config("qwen3_5").to_json_string(use_diff=False))
    del raw["linear_key_head_dim"]
    with pytest.raises(ConfigError, match=r"does not fit together: .*linear_key_head_dim"):
        TargetArch.from_config(raw, raw)
