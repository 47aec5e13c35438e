"""vLLM 0.33.0's and SGLang 0.5.23's own modules on our export: config, names, and a drafted block.

Neither can run here: their layers need a GPU. So their config parsers and model files are taken
from the wheels and run as they are, over plain torch layers (plain_layers.py) and stand-ins for the
hundreds of modules that these import and do not need. What this shows: each key is read as it was
meant, each tensor ends where it belongs and none is left out, and the order of operations is ours.
What it can't: kernels, paged caches, scheduling, and how a server captures the target's layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import others
import plain_layers as plain
import pytest
import torch
from conftest import Subject, need, say
from others import StandIn, standing_in
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig

from dflash.mask import decode_masks
from dflash.model import layer_kinds

TOLERANCE = 1e-4
TOKENS = 60


class VllmAttention(plain.DenseAttention):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        per_layer_sliding_window: int | None,
        **rest: Any,
    ) -> None:
        super().__init__(num_heads, head_size, scale, num_kv_heads)
        self.window, self.layer_name = per_layer_sliding_window, rest["prefix"]
        self.impl, self.kv_cache = self, None

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, cache: Any, slots: Any
    ) -> None:
        self.store(key, value)


class VllmConfig:
    use_v2_model_runner, cache_config = True, None

    @staticmethod
    def get_quantization_config(*args: Any) -> None:
        return None


VLLM_INSTEAD: dict[str, Any] = {
    "_custom_ops": SimpleNamespace(
        rms_norm=plain.rms_norm_into, rotary_embedding=plain.rotary_in_place
    ),
    "Attention": VllmAttention,
    "ParallelLMHead": plain.Embedding,
    "QKVParallelLinear": plain.QKVParallelLinear,
    "Qwen2MLP": plain.Qwen2MLP,
    "Qwen3ForCausalLM": nn.Module,
    "RMSNorm": plain.RMSNorm,
    "ReplicatedLinear": plain.RowParallelLinear,
    "RowParallelLinear": plain.RowParallelLinear,
    "UnquantizedLinearMethod": plain.Unquantized,
    "VllmConfig": VllmConfig,
    "VocabParallelEmbedding": plain.Embedding,
    "default_weight_loader": plain.load_whole,
    "get_current_vllm_config": VllmConfig,
    "get_hf_file_bytes": lambda *args: None,
    "get_rope": plain.get_rope,
    "get_tensor_model_parallel_world_size": lambda: 1,
    "without_trust_remote_code": lambda options: options,
}


class AttentionType(Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class RadixAttention(plain.DenseAttention):
    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        scaling: float,
        num_kv_heads: int,
        sliding_window_size: int,
        attn_type: AttentionType,
        **rest: Any,
    ) -> None:
        super().__init__(num_heads, head_dim, scaling, num_kv_heads)
        # SGLang stores how many keys to the left are seen, -1 for all.
        self.window = None if sliding_window_size < 0 else sliding_window_size + 1
        self.causal = attn_type is AttentionType.DECODER


def apply_qk_norm(
    q: torch.Tensor, k: torch.Tensor, q_norm: Any, k_norm: Any, head_dim: int, **rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    norms = zip((q, k), (q_norm, k_norm), strict=True)
    q, k = (norm(x.reshape(-1, head_dim)).view_as(x) for x, norm in norms)
    return q, k


SGLANG_INSTEAD: dict[str, Any] = {
    "AttentionType": AttentionType,
    "LogitsProcessorOutput": SimpleNamespace,
    "MergedColumnParallelLinear": plain.MergedColumnParallelLinear,
    "QKVParallelLinear": plain.QKVParallelLinear,
    "RMSNorm": plain.RMSNorm,
    "RadixAttention": RadixAttention,
    "RowParallelLinear": plain.RowParallelLinear,
    "SiluAndMul": plain.SiluAndMul,
    "UnquantizedLinearMethod": plain.Unquantized,
    "apply_qk_norm": apply_qk_norm,
    "default_weight_loader": plain.load_whole,
    "get_compiler_backend": lambda: "eager",
    "get_parallel": plain.one_device,
    "get_rope": plain.get_rope,
    # Its own takes both from rope_parameters where they are there.
    "get_rope_config": lambda config: (
        config.rope_parameters["rope_theta"],
        config.rope_parameters,
    ),
    "is_npu": lambda: False,
}


def weights_of(directory: Path) -> list[tuple[str, torch.Tensor]]:
    return list(load_file(directory / "model.safetensors").items())


def our_hidden(
    subject: Subject, feat_TF: torch.Tensor, ids_K: torch.Tensor, scaled: bool = True
) -> torch.Tensor:
    """Of our drafter; on the target's embeddings as they are stored where not `scaled`."""
    arch, drafter, ends = subject.arch, subject.drafter, subject.ends
    if not scaled:
        ends = replace(ends, embed_scale=1.0)
    context = drafter.context_kv(drafter.context(feat_TF), torch.arange(len(feat_TF)))
    pos_K = torch.arange(len(feat_TF), len(feat_TF) + len(ids_K))
    masks = decode_masks(len(feat_TF), len(ids_K), layer_kinds(arch), ids_K.device)
    return drafter(ends.embed(ids_K), pos_K, context, masks)


def a_block(subject: Subject) -> tuple[torch.Tensor, torch.Tensor]:
    """(feat_TF, ids_K): random features, one token and masks."""
    arch = subject.arch
    generator = torch.Generator().manual_seed(5)
    feat_TF = torch.randn(TOKENS, arch.num_taps * arch.hidden_size, generator=generator)
    ids_K = torch.full((arch.block_size,), arch.mask_token_id)
    ids_K[0] = 7
    return feat_TF, ids_K


def check_hidden(
    subject: Subject, name: str, hidden_KH: torch.Tensor, block: Any, scaled: bool = True
) -> None:
    """As logits of the target's head: against the largest, and against what the context does."""
    feat_TF, ids_K = block
    head_HV = subject.ends.head_VH.T
    ours = our_hidden(subject, feat_TF, ids_K, scaled) @ head_HV
    elsewhere = our_hidden(subject, feat_TF.flip(0), ids_K, scaled) @ head_HV
    error = float((ours - hidden_KH @ head_HV).abs().max())
    largest, moved = float(ours.abs().max()), float((ours - elsewhere).abs().max())
    say(
        f"{subject.name}: {name}'s model drafts the same logits to {error / largest:.1e} of the "
        f"largest (another context moves them by {moved / largest:.1e})"
    )
    assert error < TOLERANCE * largest and error < 0.01 * moved


# --- vLLM -----------------------------------------------------------------------------------------


@pytest.fixture
def vllm() -> Iterator[None]:
    need(others.VLLM)
    with standing_in(others.VLLM, VLLM_INSTEAD):
        yield


def vllm_config(subject: Subject, layout: str) -> tuple[Any, Path]:
    """The drafter's config as vLLM makes it, by the method `dflash`."""
    from vllm.transformers_utils.configs.eagle import EAGLEConfig
    from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

    if layout == "z-lab":
        own = AutoConfig.from_pretrained(subject.zlab_dir)
        return EAGLEConfig(own, method="dflash", model_type="eagle"), subject.zlab_dir
    if subject.speculators_dir is None:
        pytest.skip(f"{subject.name}: the layout has no words for it; the export is refused")
    return SpeculatorsConfig.from_pretrained(subject.speculators_dir), subject.speculators_dir


def vllm_model(subject: Subject, config: Any, directory: Path) -> Any:
    from vllm.model_executor.models import qwen3_dflash

    target = subject.target.arch
    draft = SimpleNamespace(hf_config=config, model=str(directory), revision=None)
    model = qwen3_dflash.DFlashQwen3ForCausalLM(
        vllm_config=SimpleNamespace(
            speculative_config=SimpleNamespace(draft_model_config=draft),
            load_config=None,
            model_config=SimpleNamespace(
                dtype=torch.float32,
                get_total_num_hidden_layers=lambda: target.num_layers,
                get_vocab_size=lambda: target.vocab_size,
            ),
        )
    )
    model.load_weights(weights_of(directory))
    model.model.embed_tokens.weight.copy_(subject.ends.embed_VH)  # shared by the server
    model.lm_head.weight.copy_(subject.ends.head_VH)
    return model


@pytest.mark.parametrize("layout", ["z-lab", "speculators"])
def test_vllm_reads_the_config_as_it_was_meant(vllm: None, subject: Subject, layout: str) -> None:
    from vllm.model_executor.models import qwen3_dflash
    from vllm.v1.worker.gpu.spec_decode.eagle import eagle3_utils

    config, _ = vllm_config(subject, layout)
    arch = subject.arch
    assert config.architectures == ["DFlashDraftModel"]
    assert config.dflash_config["mask_token_id"] == arch.mask_token_id
    spec = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config))
    captured = eagle3_utils.get_eagle3_aux_layers_from_config(spec)
    assert captured == tuple(tap + 1 for tap in arch.taps)  # it counts the embedding as 0
    assert config.rope_parameters["rope_theta"] == arch.rope_theta
    for index in range(arch.num_layers):
        meant = arch.layer_window(index), arch.layer_causal(index)
        assert qwen3_dflash._resolve_layer_attention(config, index) == meant
    assert qwen3_dflash.dflash_has_any_non_causal(config) != all(
        arch.layer_causal(index) for index in range(arch.num_layers)
    )


def test_vllm_takes_its_speculative_config_from_the_speculators_export(
    vllm: None, subject: Subject
) -> None:
    from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

    _, directory = vllm_config(subject, "speculators")
    raw, _ = SpeculatorsConfig.get_config_dict(directory)
    assert SpeculatorsConfig.extract_vllm_speculative_config(raw) == {
        "method": "dflash",
        "num_speculative_tokens": subject.arch.block_size - 1,
    }


@torch.inference_mode()
@pytest.mark.parametrize("layout", ["z-lab", "speculators"])
def test_vllm_loads_every_tensor_and_drafts_the_same(
    vllm: None, subject: Subject, layout: str
) -> None:
    model = vllm_model(subject, *vllm_config(subject, layout))
    empty = [name for name, p in model.named_parameters() if p.isnan().any()]
    assert not empty
    first, ours = model.model.layers[0].self_attn, subject.drafter.layers[0].self_attn
    parts = [getattr(ours, f"{name}_proj").weight for name in "qkv"]
    assert torch.equal(first.qkv_proj.weight, torch.cat(parts))

    block = feat_TF, ids_K = a_block(subject)
    for attention, causal in zip(
        model.model._attn_layers, model.get_draft_attn_causal(), strict=True
    ):
        attention.causal = causal  # as the attention metadata says it
    model.precompute_and_store_context_kv(
        model.combine_hidden_states(feat_TF), torch.arange(TOKENS), torch.arange(TOKENS)
    )
    hidden_KH = model(ids_K, torch.arange(TOKENS, TOKENS + len(ids_K)))
    check_hidden(subject, f"vLLM ({layout})", hidden_KH, block, scaled=False)
    if subject.arch.embed_scale != 1.0:  # docs/serving.md says what that means
        scaled_KH = our_hidden(subject, *block)
        assert not torch.allclose(hidden_KH, scaled_KH, rtol=0.01)
        say(f"{subject.name}: vLLM does not scale the embedding as the training did")


# --- SGLang ---------------------------------------------------------------------------------------


@pytest.fixture
def sglang() -> Iterator[None]:
    need(others.SGLANG)
    with standing_in(others.SGLANG, SGLANG_INSTEAD):
        yield


def test_sglang_reads_the_config_as_it_was_meant(sglang: None, subject: Subject) -> None:
    from sglang.srt.models import dflash
    from sglang.srt.speculative import dflash_utils

    arch, config = subject.arch, AutoConfig.from_pretrained(subject.zlab_dir)
    parsed = dflash_utils.parse_dflash_draft_config(draft_hf_config=config)
    assert parsed.block_size == arch.block_size and parsed.mask_token_id == arch.mask_token_id
    assert parsed.num_hidden_layers == arch.num_layers
    layers = subject.target.arch.num_layers
    assert parsed.num_target_layers == layers
    assert parsed.resolve_target_layer_ids(target_num_layers=layers) == list(arch.taps)
    assert parsed.final_logit_softcapping == arch.logit_softcap
    for index in range(arch.num_layers):
        left, kind = dflash._get_dflash_layer_attention_params(config, index)
        assert (None if left < 0 else left + 1) == arch.layer_window(index)
        assert (kind is AttentionType.DECODER) == arch.layer_causal(index)


@torch.inference_mode()
def test_sglang_loads_every_tensor_and_drafts_the_same(sglang: None, subject: Subject) -> None:
    from sglang.srt.models.dflash import DFlashDraftModel

    model = DFlashDraftModel(AutoConfig.from_pretrained(subject.zlab_dir))
    for parameter in model.parameters():
        parameter.fill_(torch.nan)
    model.load_weights(weights_of(subject.zlab_dir))
    empty = [name for name, p in model.named_parameters() if p.isnan().any()]
    assert not empty

    block = feat_TF, ids_K = a_block(subject)
    ctx_TH = model.project_target_hidden(feat_TF)
    for layer in model.layers:  # as dflash_worker_v2 fills the cache
        attention = layer.self_attn
        k, v = attention.kv_proj_only(ctx_TH)
        k = attention.apply_k_rope(torch.arange(TOKENS), attention.apply_k_norm(k))
        attention.attn.store(k, v)
    # It calls the target's own embedding module, and Gemma's scales.
    embeds = subject.ends.embed(ids_K)
    positions = torch.arange(TOKENS, TOKENS + len(ids_K))
    said = model(ids_K, positions, None, input_embeds=embeds)
    check_hidden(subject, "SGLang", said.hidden_states, block)


def test_a_stand_in_is_never_mistaken_for_the_code_under_test(vllm: None) -> None:
    from vllm.model_executor.models import qwen3_dflash
    from vllm.transformers_utils.configs.speculators import algos

    assert qwen3_dflash._resolve_layer_attention is not StandIn
    assert algos.SUPPORTED_SPECULATORS_TYPES["dflash"].__module__ == algos.__name__
