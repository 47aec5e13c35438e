"""z-lab's own package, dflash 0.1.0, on our z-lab export: the same logits, the same acceptance."""

from __future__ import annotations

import time
from typing import Any

import others
import pytest
import torch
from conftest import KINDS, Subject, need, say

from dflash.decode import Decoded, plain_greedy, speculative_greedy
from dflash.mask import decode_masks
from dflash.model import layer_kinds

TOLERANCE = 1e-4
"""Of the largest logit: float32, sums in another order."""


@pytest.fixture(scope="module")
def zlab() -> Any:
    need(others.ZLAB)
    module = others.zlab()
    module._cuda_time = time.perf_counter  # its clock waits for a GPU
    return module


@pytest.fixture
def theirs(zlab: Any, subject: Subject) -> Any:
    model = zlab.DFlashDraftModel.from_pretrained(subject.zlab_dir, dtype=torch.float32)
    return model.eval()


def test_it_reads_the_config_as_it_was_meant(theirs: Any, subject: Subject) -> None:
    arch = subject.arch
    assert tuple(theirs.target_layer_ids) == arch.taps
    assert theirs.block_size == arch.block_size and theirs.mask_token_id == arch.mask_token_id
    for index, layer in enumerate(theirs.layers):
        assert layer.self_attn.is_causal == arch.layer_causal(index)
        assert layer.self_attn.sliding_window == arch.layer_window(index)


def test_it_loads_every_tensor_and_no_other(theirs: Any, subject: Subject) -> None:
    ours = subject.drafter.state_dict()
    assert theirs.state_dict().keys() == ours.keys()
    assert all(torch.equal(theirs.state_dict()[name], ours[name]) for name in ours)


@torch.inference_mode()
@pytest.mark.parametrize("tokens", [3, 24, 90])
def test_it_drafts_the_same_logits(zlab: Any, theirs: Any, subject: Subject, tokens: int) -> None:
    """One block after a context of random features, longer than the window too."""
    arch, drafter, ends = subject.arch, subject.drafter, subject.ends
    generator = torch.Generator().manual_seed(tokens)
    feat_TF = torch.randn(tokens, arch.num_taps * arch.hidden_size, generator=generator)
    ids_K = torch.full((arch.block_size,), arch.mask_token_id)
    ids_K[0] = 7
    pos_K = torch.arange(tokens, tokens + arch.block_size)
    masks = decode_masks(tokens, arch.block_size, layer_kinds(arch), ids_K.device)

    def ours(feat_TF: torch.Tensor) -> torch.Tensor:
        context = drafter.context_kv(drafter.context(feat_TF), torch.arange(tokens))
        return ends.logits(drafter(ends.embed(ids_K), pos_K, context, masks))

    model = subject.target.model
    scale = zlab._draft_value(theirs.config, "input_embedding_scale", 1.0)
    hidden = theirs(
        target_hidden=feat_TF[None],
        noise_embedding=zlab._raw_input_embeddings(model, ids_K[None], float(scale)),
        position_ids=torch.arange(tokens + arch.block_size)[None],
    )
    theirs_KV = theirs.compute_logits(hidden, zlab._output_head(model))[0]
    error = float((ours(feat_TF) - theirs_KV).abs().max())
    largest = float(theirs_KV.abs().max())
    moved = float((ours(feat_TF.flip(0)) - theirs_KV).abs().max())
    say(
        f"{subject.name}: z-lab drafts the same logits to {error / largest:.1e} of the largest, "
        f"after {tokens} tokens (another context moves them by {moved / largest:.1e})"
    )
    assert error < TOLERANCE * largest and error < 0.01 * moved


def rounds_to_compare(subject: Subject, ours: Decoded) -> list[int]:
    """Tokens emitted in each round, as z-lab counts them, as far as both must be the same.

    One convention differs. Near max_new_tokens z-lab drafts a shorter block (fewer masks: another
    draft), we a whole one that is cut: only rounds with room for a whole block are compared. And of
    a cut round z-lab counts what was emitted, we the drafted tokens accepted plus one.
    """
    lengths: list[int] = []
    for index, round_ in enumerate(ours.rounds):
        emitted = 1 + sum(lengths)  # the first token is the prefill's
        if subject.max_new_tokens - emitted < subject.arch.block_size:
            break
        last = index == len(ours.rounds) - 1
        lengths.append(len(ours.tokens) - emitted if last else round_.accepted + 1)
        if subject.name == "hybrid" and lengths[-1] < subject.arch.block_size:
            break  # z-lab's cache takes tokens back from there on, and see below
    return lengths


def test_it_decodes_the_same_text_with_the_same_acceptance(
    zlab: Any, theirs: Any, subject: Subject
) -> None:
    """Round by round. On a hybrid target only up to the first rejected token: transformers' cache
    (5.15.0 and 5.19.0, on a CPU) does not take the recurrent state back, so z-lab's text is from
    there on not the target's own; ours is, which is asserted."""
    counts: list[int] = []
    stop = list(subject.target.arch.eos_token_ids)
    for prompt in subject.prompts:
        limit, ends = subject.max_new_tokens, subject.ends
        ours = speculative_greedy(subject.target, subject.drafter, ends, prompt, limit, stop)
        said = zlab.dflash_generate(
            theirs, subject.target.model, torch.tensor([prompt]), limit, stop, return_stats=True
        )
        text = said.output_ids[0, len(prompt) :].tolist()
        lengths = rounds_to_compare(subject, ours)
        same = len(ours.tokens) if subject.name != "hybrid" else 1 + sum(lengths)
        assert text[:same] == ours.tokens[:same]
        assert len(text) == len(ours.tokens) or subject.name == "hybrid"
        assert ours.tokens == plain_greedy(subject.target, prompt, limit, stop).tokens
        assert said.acceptance_lengths[: len(lengths)] == lengths
        counts += lengths
    assert counts and (max(counts) > 1 or subject.name not in KINDS)
    tau = sum(counts) / len(counts)
    say(f"{subject.name}: acceptance the same in {len(counts)} rounds, tau {tau:.3f}: {counts}")
