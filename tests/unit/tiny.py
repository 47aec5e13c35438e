"""Tiny random targets of several families, and drafters for them. Saved as any HF model is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dflash.arch import DrafterArch, TargetArch
from dflash.model import DFlashDrafter
from dflash.target import Target

VOCAB, HIDDEN, LAYERS = 96, 32, 4
FAMILIES = ("llama", "qwen3", "gemma3", "qwen3_5")


def tiny_config(family: str) -> Any:
    import transformers

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if family == "llama":
        return transformers.LlamaConfig(**sizes, tie_word_embeddings=False)
    if family == "qwen3":
        return transformers.Qwen3Config(**sizes, tie_word_embeddings=True)
    if family == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        return transformers.Qwen3MoeConfig(**sizes, **experts, tie_word_embeddings=True)
    if family == "gemma3":
        return transformers.Gemma3TextConfig(
            **sizes,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"] * 2,
            final_logit_softcapping=3.0,
            initializer_range=0.3,
        )
    if family == "falcon_h1":  # a recurrent state and keys in the same layer
        return transformers.FalconH1Config(
            **sizes,
            mamba_d_ssm=32,
            mamba_n_heads=4,
            mamba_d_head=8,
            mamba_n_groups=1,
            mamba_d_state=8,
            mamba_chunk_size=16,
        )
    del sizes["head_dim"]
    if family == "bamba":  # its own default positions forget the cache
        return transformers.BambaConfig(
            **sizes,
            attn_layer_indices=[1, 3],
            mamba_n_heads=8,
            mamba_d_head=8,
            mamba_n_groups=1,
            mamba_d_state=8,
            mamba_chunk_size=16,
        )
    if family == "jamba":  # several tokens at once forget its recurrent state
        return transformers.JambaConfig(
            **sizes,
            num_experts=2,
            num_experts_per_tok=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            attn_layer_period=2,
            attn_layer_offset=1,
            mamba_d_state=8,
            mamba_dt_rank=4,
        )
    if family == "minimax":  # a cache class of its own
        kinds = ["linear_attention", "full_attention"] * 2
        return transformers.MiniMaxConfig(
            **sizes, head_dim=8, num_local_experts=2, block_size=16, layer_types=kinds
        )
    hybrid = {
        "head_dim": 8,
        "tie_word_embeddings": False,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    if family == "qwen3_5_moe":
        del sizes["intermediate_size"]
        return transformers.Qwen3_5MoeTextConfig(
            **sizes,
            **hybrid,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=16,
        )
    assert family == "qwen3_5"
    return transformers.Qwen3_5TextConfig(**sizes, **hybrid)


def save_tiny(directory: Path, family: str, seed: int = 0) -> Path:
    """A random model with norms that are not all one, so that a forgotten norm shows."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.rand_like(parameter) * 0.5)
            elif parameter.ndim == 2:
                parameter.mul_(5)  # logits with opinions
    path = directory / f"{family}-{seed}"
    model.save_pretrained(path)
    return path


def load_tiny(
    directory: Path, family: str, taps: tuple[int, ...] = (0, 2), seed: int = 0, **options: Any
) -> Target:
    path = save_tiny(directory, family, seed)
    options = {"dtype": torch.float32, "micro_batch_tokens": 128} | options
    return Target.load(path, TargetArch.read(path), taps, **options)


def drafter_arch(target: Target, **changes: Any) -> DrafterArch:
    fields = {
        "num_layers": 2,
        "hidden_size": target.arch.hidden_size,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "attention_bias": False,
        "layer_types": ("full_attention", "full_attention"),
        "sliding_window": None,
        "is_causal": None,
        "block_size": 4,
        "mask_token_id": VOCAB - 1,
        "taps": target.taps,
        "num_target_layers": target.arch.num_layers,
        "vocab_size": target.arch.vocab_size,
        "embed_scale": target.arch.embed_scale,
        "logit_softcap": target.arch.logit_softcap,
        "bos_token_id": 1,
        "eos_token_ids": (2,),
    }
    return DrafterArch(**(fields | changes))


def random_drafter(arch: DrafterArch, seed: int = 0) -> DFlashDrafter:
    drafter = DFlashDrafter(arch)
    drafter.init_weights(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)
    return drafter.eval()
