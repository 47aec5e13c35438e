"""The closed-form masks against a loop and against torch's own mask builder."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from dflash.anchors import Anchors
from dflash.mask import Kind, attend, decode_masks, dense_mask, dense_masks, grouped_masks

KINDS: list[Kind] = [(None, False), (None, True), (4, True), (4, False), (7, True), (1000, False)]


def scene(seed: int, blocks: int = 11) -> tuple[Tensor, Anchors, Tensor]:
    """(doc_T, sorted anchors with padded ones at the end, start_A), documents of 1..12 tokens."""
    rng = random.Random(seed)
    doc, starts = [], []
    while len(doc) < 40:
        starts.append(len(doc))
        doc += [len(starts) - 1] * min(rng.randint(1, 12), 40 - len(doc))
    doc_T = torch.tensor(doc + [-1] * 6)
    valid = rng.randint(0, blocks)
    drawn = sorted(rng.sample(range(40), valid))
    padding = list(range(45, 45 - blocks + valid, -1))  # stale positions: document -1, as theirs
    position_A = torch.tensor(drawn + padding)
    valid_A = torch.arange(blocks) < valid
    doc_A = torch.where(valid_A, doc_T[position_A], -1)
    return doc_T, Anchors(position_A, valid_A, doc_A), torch.tensor(starts)[doc_A.clamp_min(0)]


def slow_mask(doc_T: Tensor, anchors: Anchors, block: int, kind: Kind) -> list[list[bool]]:
    window, causal = kind
    doc, rows = doc_T.tolist(), []
    for j, a in enumerate(anchors.position_A.tolist()):
        valid = bool(anchors.valid_A[j])
        for o in range(block):
            row = []
            for t in range(len(doc)):
                near = window is None or t >= a + o - (window - 1)
                row.append(valid and t < a and doc[t] == doc[a] and near)
            for other in range(anchors.position_A.numel()):
                for offset in range(block):
                    row.append(other == j and (not causal or offset <= o))
            rows.append(row)
    return rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(8))
def test_mask_equals_a_loop_and_torchs_create_mask(seed: int, kind: Kind) -> None:
    block = 4
    doc_T, anchors, _ = scene(seed)
    allow_QS = dense_mask(doc_T, anchors.position_A, anchors.doc_A, block, kind)
    assert allow_QS.tolist() == slow_mask(doc_T, anchors, block, kind)
    assert allow_QS.any(dim=1).all(), "a fully masked row is NaN in a plain softmax"

    tokens, (window, causal) = doc_T.numel(), kind

    def rule(b: Tensor, h: Tensor, q: Tensor, s: Tensor) -> Tensor:
        j, o = q // block, q % block
        a, t, key = anchors.position_A[j], s.clamp_max(tokens - 1), s - tokens
        context = anchors.valid_A[j] & (t < a) & (doc_T[t] == doc_T[a])
        if window is not None:
            context = context & (a + o - t < window)
        inside = (key // block == j) & ((key % block <= o) | (not causal))
        return torch.where(s < tokens, context, inside)

    rows = anchors.position_A.numel() * block
    theirs = create_mask(rule, None, None, rows, tokens + rows, device="cpu")
    assert torch.equal(allow_QS, theirs[0, 0])


def test_the_anchors_own_state_is_never_visible() -> None:
    doc_T = torch.zeros(9).long()
    for kind in KINDS:
        allow_QS = dense_mask(doc_T, torch.tensor([5]), torch.tensor([0]), 4, kind)
        assert not allow_QS[:, 5:9].any()
        assert allow_QS[0, 4]


@pytest.mark.parametrize("seed", range(8))
def test_grouped_attention_equals_dense_attention(seed: int) -> None:
    """Outputs and all gradients, for padded blocks and one mask of every kind."""
    doc_T, anchors, start_A = scene(seed, blocks=19)
    block, rows = 4, 19 * 4
    torch.manual_seed(seed)
    leaves = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((rows, 4, 8), (46, 2, 8), (46, 2, 8), (rows, 2, 8), (rows, 2, 8))
    ]
    query, key_t, value_t, key_q, value_q = leaves
    weight = torch.randn(rows, 4, 8).double()
    dense = dense_masks(doc_T, anchors, block, KINDS)
    grouped = grouped_masks(doc_T, start_A, anchors, block, KINDS)
    for kind in KINDS:
        outcomes = []
        for mask in (dense[kind], grouped[kind]):
            out = attend(query, (key_t, value_t), (key_q, value_q), mask)
            outcomes.append((out, *torch.autograd.grad((out * weight).sum(), leaves)))
        for ours, theirs in zip(*outcomes, strict=True):
            assert ours.isfinite().all()
            torch.testing.assert_close(ours, theirs)


def test_groups_read_only_their_stretch_of_context() -> None:
    """What makes it fast: 16 blocks in 16 documents of 100 tokens read 800 keys, not 1,600."""
    doc_T = torch.arange(16).repeat_interleave(100)
    position_A = torch.arange(16) * 100 + 50
    anchors = Anchors(position_A, torch.ones(16, dtype=torch.bool), torch.arange(16))
    groups = grouped_masks(doc_T, torch.arange(16) * 100, anchors, 4, [(None, False)])[None, False]
    assert [(g.q0, g.q1, g.t0, g.t1) for g in groups] == [(0, 32, 0, 750), (32, 64, 800, 1550)]
    windowed = grouped_masks(doc_T, torch.arange(16) * 100, anchors, 4, [(10, True)])[10, True]
    assert [(g.t0, g.t1) for g in windowed] == [(41, 750), (841, 1550)]


def test_attention_equals_softmax_written_out() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    allow_QS = torch.rand(3, 5) < 0.7
    allow_QS[:, 4] = True
    out = attend(query, (key[:2], value[:2]), (key[2:], value[2:]), allow_QS)
    for h in range(4):
        scores = query[:, h] @ key[:, h // 2].T / 8**0.5
        expected = scores.masked_fill(~allow_QS, -torch.inf).softmax(-1) @ value[:, h // 2]
        torch.testing.assert_close(out[:, h], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_sees_what_training_sees(kind: Kind) -> None:
    """One block after n cached rows: the row of the training mask whose anchor is token n."""
    trained = dense_mask(torch.zeros(20).long(), torch.tensor([13]), torch.tensor([0]), 4, kind)
    decoding = decode_masks(13, 4, [kind], torch.device("cpu"))[kind]
    expected = torch.cat((trained[:, :13], trained[:, 20:]), dim=1)
    if kind == (None, False):
        assert decoding is None and expected.all()
    else:
        assert isinstance(decoding, Tensor) and torch.equal(decoding, expected)
