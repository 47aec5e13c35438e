"""The drafter against other code: loops over reference section 1, transformers' Qwen3, a name
table."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from dflash.anchors import Anchors
from dflash.arch import DrafterArch, TargetArch
from dflash.mask import decode_masks, dense_masks
from dflash.model import DFlashDrafter, FrozenEnds, layer_kinds, rope_tables

ARCH = DrafterArch(
    num_layers=3,
    hidden_size=24,
    intermediate_size=40,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    max_position_embeddings=512,
    attention_bias=False,
    layer_types=("full_attention",) * 3,
    sliding_window=None,
    is_causal=None,
    block_size=4,
    mask_token_id=1,
    taps=(1, 3),
    num_target_layers=5,
    vocab_size=50,
)
SLIDING = ("sliding_attention", "full_attention", "sliding_attention")
VARIANTS = {
    "full": {},
    "sliding and full": {"layer_types": SLIDING, "sliding_window": 5},
    "explicit causal": {"layer_types": SLIDING, "sliding_window": 5, "is_causal": True},
    "explicit bidirectional": {"layer_types": SLIDING, "sliding_window": 5, "is_causal": False},
    "biases": {"attention_bias": True},
    "one kv head": {"num_key_value_heads": 1},
}


def make_drafter(arch: DrafterArch, seed: int = 0) -> DFlashDrafter:
    """float64, with weights large enough for attention to have opinions and norms that are not
    1."""
    torch.manual_seed(seed)
    drafter = DFlashDrafter(arch).double()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3 + (parameter.ndim == 1))
    return drafter


def test_parameters_are_those_of_a_dflash_checkpoint() -> None:
    hidden, q, kv, ffn, head = 24, 4 * 8, 2 * 8, 40, 8
    expected = {"fc.weight": (hidden, 2 * hidden), "hidden_norm.weight": (hidden,)}
    expected["norm.weight"] = (hidden,)
    for i in range(3):
        expected |= {
            f"layers.{i}.input_layernorm.weight": (hidden,),
            f"layers.{i}.post_attention_layernorm.weight": (hidden,),
            f"layers.{i}.self_attn.q_proj.weight": (q, hidden),
            f"layers.{i}.self_attn.k_proj.weight": (kv, hidden),
            f"layers.{i}.self_attn.v_proj.weight": (kv, hidden),
            f"layers.{i}.self_attn.o_proj.weight": (hidden, q),
            f"layers.{i}.self_attn.q_norm.weight": (head,),
            f"layers.{i}.self_attn.k_norm.weight": (head,),
            f"layers.{i}.mlp.gate_proj.weight": (ffn, hidden),
            f"layers.{i}.mlp.up_proj.weight": (ffn, hidden),
            f"layers.{i}.mlp.down_proj.weight": (hidden, ffn),
        }
    state = DFlashDrafter(ARCH).state_dict()
    assert {name: tuple(x.shape) for name, x in state.items()} == expected
    assert len(state) == 3 + 11 * 3


@pytest.mark.parametrize("bias", [False, True])
def test_arch_counts_the_parameters(bias: bool) -> None:
    drafter = DFlashDrafter(dataclasses.replace(ARCH, attention_bias=bias))
    assert sum(p.numel() for p in drafter.parameters()) == drafter.arch.num_parameters
    assert ("layers.0.self_attn.o_proj.bias" in drafter.state_dict()) == bias


# ---- a second implementation: one block, one head, one key at a time -------------------------


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / math.sqrt(float((x * x).mean()) + 1e-6) * weight


def turn(x: Tensor, position: int) -> Tensor:
    """RoPE as a rotation of the complex number (x[i], x[i + E/2])."""
    half = len(x) // 2
    angle = torch.tensor([position * 10000.0 ** (-i / half) for i in range(half)]).double()
    turned = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones(half).double(), angle)
    return torch.cat((turned.real, turned.imag))


def slow_block(drafter: DFlashDrafter, feats: Tensor, x: Tensor) -> Tensor:
    """Final hidden states of one block, straight from reference section 1. `feats` are the tokens
    of the anchor's document before it, so their number is the anchor's position."""
    arch, w = drafter.arch, drafter.state_dict()
    group = arch.num_attention_heads // arch.num_key_value_heads
    pos = len(feats)
    context = [norm(w["fc.weight"] @ feat, w["hidden_norm.weight"]) for feat in feats]
    rows = list(x)
    for i in range(arch.num_layers):

        def project(name: str, row: Tensor, i: int = i) -> Tensor:
            out = w[f"layers.{i}.self_attn.{name}_proj.weight"] @ row
            return out + w.get(f"layers.{i}.self_attn.{name}_proj.bias", 0.0)

        window = arch.sliding_window if arch.layer_types[i] == "sliding_attention" else None
        causal = arch.is_causal if arch.is_causal is not None else window is not None
        normed = [norm(row, w[f"layers.{i}.input_layernorm.weight"]) for row in rows]
        keys, values = [], []
        for place, row in enumerate([*context, *normed]):
            heads = project("k", row).view(-1, arch.head_dim)
            scale = w[f"layers.{i}.self_attn.k_norm.weight"]
            keys.append([turn(norm(head, scale), place) for head in heads])
            values.append(project("v", row).view(-1, arch.head_dim))
        after = []
        for o, row in enumerate(normed):
            out = []
            heads = project("q", row).view(-1, arch.head_dim)
            for h, head in enumerate(heads):
                scale = w[f"layers.{i}.self_attn.q_norm.weight"]
                query = turn(norm(head, scale), pos + o)
                seen = []
                for s in range(len(keys)):
                    if s < pos:
                        if window is None or pos + o - s < window:
                            seen.append(s)
                    elif not causal or s - pos <= o:
                        seen.append(s)
                scores = torch.stack([query @ keys[s][h // group] for s in seen])
                weights = (scores / math.sqrt(arch.head_dim)).softmax(0)
                out.append(sum(weights[n] * values[s][h // group] for n, s in enumerate(seen)))
            after.append(rows[o] + project("o", torch.cat(out)))
        rows = []
        for row in after:
            y = norm(row, w[f"layers.{i}.post_attention_layernorm.weight"])
            gate, up = (w[f"layers.{i}.mlp.{n}_proj.weight"] @ y for n in ("gate", "up"))
            swiglu = gate / (1 + torch.exp(-gate)) * up
            rows.append(row + w[f"layers.{i}.mlp.down_proj.weight"] @ swiglu)
    return torch.stack([norm(row, w["norm.weight"]) for row in rows])


@pytest.mark.parametrize("variant", VARIANTS)
def test_blocks_equal_an_independent_computation(variant: str) -> None:
    arch = dataclasses.replace(ARCH, **VARIANTS[variant])
    drafter = make_drafter(arch)
    doc_T = torch.tensor([0] * 9 + [1] * 8 + [-1] * 3)
    pos_T = torch.tensor([*range(9), *range(8), 0, 0, 0])
    positions = [0, 7, 9, 15]
    anchor_A, doc_A = torch.tensor([*positions, 18]), torch.tensor([0, 0, 1, 1, -1])
    anchors = Anchors(anchor_A, doc_A >= 0, doc_A)
    feat_TF = torch.randn(20, 48).double()
    x_QH = torch.randn(20, 24).double()
    pos_Q = torch.cat([pos_T[a] + torch.arange(4) for a in anchor_A])
    masks = dense_masks(doc_T, anchors, 4, layer_kinds(arch))
    ctx_kv = drafter.context_kv(drafter.context(feat_TF), pos_T)
    hidden_QH = drafter(x_QH, pos_Q, ctx_kv, masks)
    assert hidden_QH.isfinite().all()
    for j, a in enumerate(positions):
        start = 0 if a < 9 else 9
        expected = slow_block(drafter, feat_TF[start:a], x_QH[4 * j : 4 * j + 4])
        torch.testing.assert_close(hidden_QH[4 * j : 4 * j + 4], expected, atol=2e-6, rtol=2e-6)


def test_without_context_a_causal_block_is_a_qwen3_model() -> None:
    """transformers' own layers, norms and rotary code with our weights."""
    from transformers import Qwen3Config, Qwen3Model

    arch = dataclasses.replace(ARCH, is_causal=True)
    drafter = make_drafter(arch)
    config = Qwen3Config(
        vocab_size=50,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    qwen = Qwen3Model(config).double().eval()
    unmatched = qwen.load_state_dict(drafter.state_dict(), strict=False)
    assert unmatched.missing_keys == ["embed_tokens.weight"]
    assert unmatched.unexpected_keys == ["fc.weight", "hidden_norm.weight"]
    x_QH = torch.randn(6, 24).double()
    empty = drafter.context_kv(torch.empty(0, 24).double(), torch.empty(0).long())
    masks = decode_masks(0, 6, layer_kinds(arch), torch.device("cpu"))
    with torch.no_grad():
        expected = qwen(inputs_embeds=x_QH[None]).last_hidden_state[0]
        hidden_QH = drafter(x_QH, torch.arange(6), empty, masks)
    torch.testing.assert_close(hidden_QH, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("variant", ["full", "sliding and full"])
def test_a_grown_cache_gives_what_training_gives(variant: str) -> None:
    """Decoding appends context rows as they come; the block then sees the same as in training."""
    arch = dataclasses.replace(ARCH, **VARIANTS[variant])
    drafter = make_drafter(arch)
    feat_TF, x_QH = torch.randn(12, 48).double(), torch.randn(4, 24).double()
    anchors = Anchors(torch.tensor([11]), torch.tensor([True]), torch.tensor([0]))
    pos_T, pos_Q = torch.arange(12), torch.arange(11, 15)
    ctx_kv = drafter.context_kv(drafter.context(feat_TF), pos_T)
    masks = dense_masks(torch.zeros(12).long(), anchors, 4, layer_kinds(arch))
    trained = drafter(x_QH, pos_Q, ctx_kv, masks)

    parts = [slice(0, 5), slice(5, 6), slice(6, 11)]
    kvs = [drafter.context_kv(drafter.context(feat_TF[p]), pos_T[p]) for p in parts]
    cache = [
        (torch.cat([kv[i][0] for kv in kvs]), torch.cat([kv[i][1] for kv in kvs])) for i in range(3)
    ]
    decoding = decode_masks(11, 4, layer_kinds(arch), torch.device("cpu"))
    decoded = drafter(x_QH, pos_Q, cache, decoding)
    torch.testing.assert_close(decoded, trained)


def test_rope_tables_keep_float32_at_long_positions() -> None:
    """A bf16 model must not round its angles: at position 100,000 that would be noise."""
    cos, sin = rope_tables(torch.tensor([100_000]), 8, 1e6)
    exact = [100_000 * 1e6 ** (-i / 4) for i in range(4)]
    assert cos.dtype == sin.dtype == torch.float32
    exact_E = torch.tensor(exact, dtype=torch.float64).cos()
    torch.testing.assert_close(cos[0, 0, :4].double(), exact_E, atol=1e-2, rtol=0)
    assert torch.equal(cos[..., :4], cos[..., 4:])


# ---- weights at the start, and the target's ends ----------------------------------------------


def test_initial_weights() -> None:
    big = dataclasses.replace(ARCH, hidden_size=256, intermediate_size=512, attention_bias=True)
    drafter = DFlashDrafter(big)
    drafter.init_weights(seed=3)
    for name, parameter in drafter.named_parameters():
        if parameter.ndim == 1:
            assert (parameter == (0.0 if name.endswith("bias") else 1.0)).all()
        else:
            assert abs(float(parameter.detach().std()) - 0.02) < 0.002, name
    again, other = DFlashDrafter(big), DFlashDrafter(big)
    again.init_weights(seed=3)
    other.init_weights(seed=4)
    assert torch.equal(again.fc.weight, drafter.fc.weight)
    assert not torch.equal(other.fc.weight, drafter.fc.weight)


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Gemma3Text", "Gemma4Text", "Qwen3_5Text"])
def test_zero_centred_families_are_those_whose_fresh_norm_is_zero(family: str) -> None:
    import transformers

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 8}
    config = getattr(transformers, f"{family}Config")(**sizes)
    with torch.device("meta"):
        backbone = transformers.AutoModel.from_config(config)
    norm = type(backbone.norm)(8)
    arch = TargetArch.from_config(config.to_dict(), config.to_dict())
    assert arch.zero_centred_norm == (not norm.weight.any())


def test_final_norm_starts_from_the_targets_multiplier() -> None:
    """Zero-centred families store w and multiply by 1 + w; the drafter's norm is always plain."""
    stored_H = torch.rand(24)
    drafter = DFlashDrafter(ARCH)
    drafter.init_weights(0, stored_H)
    assert torch.equal(drafter.norm.weight, stored_H)
    drafter.init_weights(0, stored_H, zero_centred=True)
    assert torch.equal(drafter.norm.weight, stored_H + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_embedding_is_gemmas(dtype: torch.dtype) -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    scale = math.sqrt(24)
    theirs = Gemma3TextScaledWordEmbedding(50, 24, padding_idx=0, embed_scale=scale).to(dtype)
    ends = FrozenEnds(theirs.weight.detach(), theirs.weight.detach(), embed_scale=scale)
    ids = torch.tensor([3, 49, 0])
    assert torch.equal(ends.embed(ids), theirs(ids).detach())
    assert torch.equal(dataclasses.replace(ends, embed_scale=1.0).embed(ids), theirs.weight[ids])


def test_soft_cap_bounds_the_logits() -> None:
    head_VH, hidden_QH = torch.randn(50, 24), torch.randn(7, 24) * 9
    raw = hidden_QH @ head_VH.T
    assert torch.equal(FrozenEnds(head_VH, head_VH).logits(hidden_QH), raw)
    capped = FrozenEnds(head_VH, head_VH, logit_softcap=3.0).logits(hidden_QH)
    torch.testing.assert_close(capped, 3 * torch.tanh(raw / 3))
    assert raw.abs().max() > 3 >= capped.abs().max()
