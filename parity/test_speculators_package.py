"""speculators 0.9.0 on our speculators export: config, logits, masks, and the loss of a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import Subject, say
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.losses import resolve_loss_config
from speculators.models.dflash.attention import create_anchor_block_mask_mod
from speculators.models.dflash.metrics import compute_metrics
from torch.nn.attention.flex_attention import create_mask

from dflash.anchors import Anchors, block_inputs, labels
from dflash.export import read_export
from dflash.loss import (
    TargetStates,
    decay_weights,
    dpace_weights,
    head_loss_full,
    weighted_mean,
)
from dflash.mask import dense_masks
from dflash.model import layer_kinds
from dflash.target import load_ends

TOLERANCE = 1e-4
TOKENS = 48


@pytest.fixture
def exported(subject: Subject) -> Subject:
    if subject.speculators_dir is None:
        pytest.skip(f"{subject.name}: the layout has no words for it; the export is refused")
    return subject


@pytest.fixture
def theirs(exported: Subject) -> Any:
    config = SpeculatorModelConfig.from_pretrained(exported.speculators_dir)
    config.transformer_layer_config._attn_implementation = "sdpa"  # flex_attention: GPU, compiled
    model = SpeculatorModel.from_pretrained(
        exported.speculators_dir, config=config, dtype=torch.float32
    )
    model.load_verifier_weights()
    return model.float().eval()


def test_it_reads_the_config_as_it_was_meant(theirs: Any, exported: Subject) -> None:
    arch, config = exported.arch, theirs.config
    assert type(theirs).__name__ == "DFlashDraftModel" and "dflash.core" in type(theirs).__module__
    assert [index - 1 for index in theirs.target_layer_ids] == list(arch.taps)
    assert (theirs.block_size, theirs.mask_token_id) == (arch.block_size, arch.mask_token_id)
    assert not theirs.use_draft_vocab and config.sample_from_anchor is False
    layer = config.transformer_layer_config
    assert layer.layer_types == list(arch.layer_types)
    assert layer.rope_parameters["rope_theta"] == arch.rope_theta
    for index in range(arch.num_layers):
        slides = index in theirs.sliding_window_indices
        assert (theirs.sliding_window if slides else None) == arch.layer_window(index)
        assert (slides and not theirs.sliding_window_non_causal) == arch.layer_causal(index)
    proposal = config.speculators_config.proposal_methods[0]
    assert proposal.speculative_tokens == arch.block_size - 1


def test_it_loads_every_tensor(theirs: Any, exported: Subject) -> None:
    _, weights, _ = read_export(exported.speculators_dir or "")
    state = theirs.state_dict()
    assert all(torch.equal(state[name], weight.float()) for name, weight in weights.items())
    own = {name for name in state if not name.startswith(("embed_", "lm_head", "verifier_"))}
    assert own == set(weights)


# --- a batch --------------------------------------------------------------------------------------


def make_batch(subject: Subject, lens: list[int]) -> dict[str, torch.Tensor]:
    """Documents side by side: real captured states, random tokens (greedy ones where a loss reads
    them), supervised from their third token on."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(4, 90, (n,), generator=generator) for n in lens]
    total, target, hidden = sum(lens), subject.target, subject.arch.hidden_size
    all_TF = torch.empty(total, subject.arch.num_taps * hidden)
    vlh_TH, start = torch.empty(total, hidden), 0
    for doc in ids:
        rows = slice(start, start + len(doc))
        target.capture([doc], all_TF[rows], vlh_TH[rows])
        start += len(doc)
    pos_T = torch.cat([torch.arange(n) for n in lens])
    doc_T = torch.cat([torch.full((n,), index) for index, n in enumerate(lens)])
    return {
        "all_TF": all_TF,
        "vlh_TH": vlh_TH,
        "ids_T": torch.cat(ids),
        "lm_T": pos_T >= 2,
        "doc_T": doc_T,
        "pos_T": pos_T,
    }


def their_draft(theirs: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """(logits_AKV, targets_AKV, mask_AK, anchor_A): every anchor that speculators thinks valid."""
    block = theirs.block_size
    anchors = int(batch["lm_T"][:-block].sum())
    # It norms the target's last state itself; our captured one is after the norm.
    theirs.verifier_norm = torch.nn.Identity()
    _, logits, targets, mask, at = theirs._backbone_forward(
        batch["all_TF"][None],
        batch["ids_T"][None],
        batch["lm_T"][None],
        batch["vlh_TH"][None],
        batch["doc_T"][None],
        batch["pos_T"][None],
        max_anchors=anchors,
    )
    shape = (anchors, block, -1)
    return logits.view(shape), targets.view(shape), mask.view(anchors, block), at.view(shape)[:, 0]


def our_draft(
    subject: Subject, batch: dict[str, torch.Tensor], anchors: Anchors, masks: Any = None
) -> torch.Tensor:
    """hidden_AKH after the final norm, with our masks or those given."""
    drafter, arch = subject.drafter, subject.arch
    ids_Q, pos_Q = block_inputs(
        anchors, batch["ids_T"], batch["pos_T"], arch.block_size, arch.mask_token_id
    )
    if masks is None:
        masks = dense_masks(batch["doc_T"], anchors, arch.block_size, layer_kinds(arch))
    context = drafter.context_kv(drafter.context(batch["all_TF"]), batch["pos_T"])
    hidden_QH = drafter(subject.ends.embed(ids_Q), pos_Q, context, masks)
    return hidden_QH.unflatten(0, (-1, arch.block_size))


def anchors_at(position_A: torch.Tensor, doc_T: torch.Tensor) -> Anchors:
    return Anchors(position_A, torch.ones_like(position_A, dtype=torch.bool), doc_T[position_A])


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@torch.inference_mode()
def test_it_drafts_the_same_logits(theirs: Any, exported: Subject) -> None:
    """Packed documents, every anchor. Its window is measured from the anchor, t >= a - W; serving's
    (z-lab, vLLM, SGLang) and ours from the query, t > a + o - W. So: with its masks in our model
    the logits are the same; with our own they are, too, where no window bites."""
    arch, lens = exported.arch, [TOKENS, TOKENS // 2, TOKENS]
    batch = make_batch(exported, lens)
    logits_AKV, _, _, anchor_A = their_draft(theirs, batch)
    anchors = anchors_at(anchor_A[:, 0], batch["doc_T"])
    masks = {}
    for window, causal in layer_kinds(arch):
        rule, queries, keys = create_anchor_block_mask_mod(
            batch["doc_T"], len(batch["doc_T"]), anchors.position_A, arch.block_size, window,
            not causal,
        )  # fmt: skip
        masks[window, causal] = create_mask(rule, 1, 1, queries, keys, "cpu")[0, 0]
    head = exported.ends.logits
    with_theirs = relative(head(our_draft(exported, batch, anchors, masks)), logits_AKV)
    ours_AKV = head(our_draft(exported, batch, anchors))
    bites_A = torch.zeros_like(anchor_A[:, 0], dtype=torch.bool)
    if arch.sliding_window is not None:
        bites_A = batch["pos_T"][anchors.position_A] > arch.sliding_window - arch.block_size
    with_ours = relative(ours_AKV[~bites_A], logits_AKV[~bites_A])
    say(f"{exported.name}: logits of {len(anchor_A)} blocks differ by {with_theirs:.1e}")
    assert with_theirs < TOLERANCE and with_ours < TOLERANCE
    if bites_A.any():
        apart = relative(ours_AKV[bites_A], logits_AKV[bites_A])
        say(f"{exported.name}: its window rule moves logits by {apart:.1e}")
        assert apart > TOLERANCE


@torch.inference_mode()
@pytest.mark.parametrize(
    ("loss", "weights"), [("kl_div", "fixed-exp-decay"), ("ce", "fixed-exp-decay"), ("ce", "dpace")]
)
def test_its_loss_of_the_same_batch_is_ours(
    theirs: Any, exported: Subject, loss: str, weights: str
) -> None:
    """One document, so that its blocks end inside (it has no rule for a document's end: the others
    mask there). Same rows, same weights; the denominators differ: it divides by the number of
    rows, we by the sum of their weights. Its `ce` is against the target's argmax, ours against the
    data, which here are that argmax. Its D-PACE reads exp(-loss) of any loss as a confidence,
    ours the probability of the data token: the same for ce only."""
    arch, window = exported.arch, exported.arch.sliding_window
    batch = make_batch(exported, [TOKENS if window is None else window + 8])
    logits_AKV, targets_AKV, mask_AK, anchor_A = their_draft(theirs, batch)
    if window is not None:  # where both window rules are the same
        near_A = anchor_A[:, 0] <= window - arch.block_size
        logits_AKV, targets_AKV = logits_AKV[near_A], targets_AKV[near_A]
        mask_AK, anchor_A = mask_AK[near_A], anchor_A[near_A]
    flat = (1, -1, arch.vocab_size)
    said, metrics = compute_metrics(
        logits_AKV.reshape(flat), targets_AKV.reshape(flat), mask_AK.reshape(1, -1).float(),
        arch.block_size, gamma=4.0, loss_config=resolve_loss_config(loss, "eager"),
        per_position_loss_weight=weights, dpace_alpha=0.5,
    )  # fmt: skip

    ends = load_ends(exported.target.directory, exported.target.arch, torch.float32, "cpu")
    anchors = anchors_at(anchor_A[:, 0], batch["doc_T"])
    _, mask_AJ, at_AJ = labels(
        anchors, batch["ids_T"], batch["lm_T"], batch["doc_T"], arch.block_size
    )
    assert torch.equal(mask_AJ, mask_AK[:, 1:].bool())
    target = TargetStates(batch["vlh_TH"], (at_AJ - 1).flatten())
    label_R = ends.logits(target.states_TH[target.at_R]).argmax(dim=-1)
    hidden_RH = our_draft(exported, batch, anchors)[:, 1:].flatten(0, 1)
    rows = head_loss_full(hidden_RH, ends.head_VH, label_R, target if loss == "kl_div" else None)
    loss_AJ, nll_AJ = rows.loss_R.view_as(mask_AJ), rows.nll_R.view_as(mask_AJ)
    weight_AJ = dpace_weights(nll_AJ, mask_AJ, 0.5)
    if weights != "dpace":
        weight_AJ = decay_weights(arch.block_size, 4.0, nll_AJ.device).expand_as(nll_AJ)
    total, weight = weighted_mean(loss_AJ, weight_AJ, mask_AJ)
    rows_counted = float(mask_AJ.sum())
    ours = float(total) / (rows_counted + 1e-5)
    say(
        f"{exported.name}: {loss}, {weights}: speculators {float(said):.6f}, ours over its "
        f"denominator {ours:.6f} (over our own {float(total / weight):.6f})"
    )
    assert ours == pytest.approx(float(said), rel=TOLERANCE)
    hits = float((rows.rank_R.view_as(mask_AJ) == 0)[mask_AJ].sum())
    assert float(metrics["full_acc_sum"]) == hits
    assert float(metrics["full_acc_total"]) == rows_counted
