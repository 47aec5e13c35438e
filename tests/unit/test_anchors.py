"""Anchors, labels and the hash that draws them, against loops and plain Python integers."""

from __future__ import annotations

import random

import pytest
import torch

from dflash import anchors as A

CPU = torch.device("cpu")


def draw(
    seed: int, tokens: int = 60, docs: int = 6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random (lens_D, total_tok, lm_T); empty documents and a stale tail happen."""
    rng = random.Random(seed)
    lens = [rng.choice([0, 1, 2, 5, 9, 14]) for _ in range(docs - 2)] + [0, 0]
    while sum(lens) > tokens:
        lens[lens.index(max(lens))] = 0
    lens[0] = lens[0] or 3
    lm_T = torch.tensor([rng.random() < 0.7 for _ in range(tokens)])
    return torch.tensor(lens), torch.tensor(sum(lens)), lm_T


@pytest.mark.parametrize("seed", range(20))
def test_documents_follow_the_lengths_and_end_at_total_tok(seed: int) -> None:
    lens_D, total_tok, _ = draw(seed)
    expected = [d for d, n in enumerate(lens_D.tolist()) for _ in range(n)]
    expected += [-1] * (60 - len(expected))
    assert A.documents(lens_D, total_tok, 60).tolist() == expected


def test_a_full_slot_has_no_tail() -> None:
    assert A.documents(torch.tensor([4, 4]), torch.tensor(8), 8).tolist() == [0] * 4 + [1] * 4


@pytest.mark.parametrize("seed", range(20))
def test_valid_anchors_and_labels_equal_a_loop(seed: int) -> None:
    lens_D, total_tok, lm_T = draw(seed)
    doc_T = A.documents(lens_D, total_tok, 60)
    ids_T = torch.arange(60) + 100
    lm, doc = lm_T.tolist(), doc_T.tolist()
    expected = [a + 1 < 60 and lm[a] and lm[a + 1] and doc[a] == doc[a + 1] >= 0 for a in range(60)]
    valid_T = A.valid_anchors(lm_T, doc_T)
    assert valid_T.tolist() == expected

    anchors = A.sample_anchors(A.hash_keys(1, 2, 3, 60, CPU), valid_T, doc_T, 40)
    label_AJ, mask_AJ, at_AJ = A.labels(anchors, ids_T, lm_T, doc_T, 8)
    for j, a in enumerate(anchors.position_A.tolist()):
        alive = bool(anchors.valid_A[j])
        assert alive == (int(anchors.doc_A[j]) >= 0)
        for k in range(1, 8):
            alive = alive and a + k < 60 and lm[a + k] and doc[a + k] == doc[a]
            assert bool(mask_AJ[j, k - 1]) == alive
            assert int(label_AJ[j, k - 1]) == (100 + a + k if alive else 0)  # no shift
            assert int(at_AJ[j, k - 1]) == (a + k if alive else 0)
        if anchors.valid_A[j]:
            assert mask_AJ[j, 0], "a valid anchor has at least one label"


def test_a_long_slot_followed_by_a_short_one_leaves_no_stale_anchor() -> None:
    """The device buffer keeps the long slot's mask and ids beyond the short slot's end."""
    lm_T = torch.ones(40, dtype=torch.bool)
    long_T = A.documents(torch.tensor([20, 20]), torch.tensor(40), 40)
    short_T = A.documents(torch.tensor([6, 0]), torch.tensor(6), 40)
    assert A.valid_anchors(lm_T, long_T).sum() == 38
    assert A.valid_anchors(lm_T, short_T).nonzero().flatten().tolist() == [0, 1, 2, 3, 4]
    anchors = A.sample_anchors(
        A.hash_keys(0, 0, 0, 40, CPU), A.valid_anchors(lm_T, short_T), short_T, 10
    )
    assert anchors.valid_A.tolist() == [True] * 5 + [False] * 5
    label_AJ, mask_AJ, _ = A.labels(anchors, torch.arange(40), lm_T, short_T, 4)
    assert label_AJ.max() == 5 and not mask_AJ[5:].any()


def test_stale_ids_never_reach_the_embedding() -> None:
    ids_T, pos_T = torch.tensor([7, 8, 9, -5, 10**9]), torch.tensor([0, 1, 2, -9, 10**12])
    doc_T = torch.tensor([0, 0, 0, -1, -1])
    anchors = A.sample_anchors(
        A.hash_keys(0, 0, 0, 5, CPU), torch.tensor([False, True, False, False, False]), doc_T, 5
    )
    ids_Q, pos_Q = A.block_inputs(anchors, ids_T, pos_T, 3, mask_token_id=2)
    assert ids_Q.tolist() == [8, 2, 2] + [2, 2, 2] * 4
    assert pos_Q.tolist() == [1, 2, 3] + [0, 1, 2] * 4


# ---- the draw ---------------------------------------------------------------------------------


def python_mix(x: int) -> int:
    """splitmix64, in integers that do not wrap by themselves."""
    low = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & low
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & low
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & low
    return x ^ (x >> 31)


@pytest.mark.parametrize("words", [(0, 0, 0), (1, 2, 3), (2**31 - 1, 10**12, 7)])
def test_keys_are_splitmix64_of_seed_seq_pass_position(words: tuple[int, int, int]) -> None:
    stream = 0
    for word in words:
        stream = python_mix((stream + word) & ((1 << 64) - 1))
    keys = A.hash_keys(*words, 50, CPU).tolist()
    for position, key in enumerate(keys):
        full = python_mix((stream + position) & ((1 << 64) - 1))
        assert key >> 21 == (full & ((1 << 63) - 1)) >> 21
        assert key & ((1 << 21) - 1) == position


def test_splitmix64_gives_its_published_numbers() -> None:
    """The first outputs of the generator seeded with 1234567 (the usual test vector)."""
    out = [python_mix(1234567 + i * 0x9E3779B97F4A7C15) for i in range(3)]
    assert out == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_every_word_of_the_key_matters() -> None:
    base = A.hash_keys(5, 6, 7, 100, CPU)
    assert torch.equal(base, A.hash_keys(*(torch.tensor(w) for w in (5, 6, 7)), 100, CPU))
    for words in ((4, 6, 7), (5, 7, 7), (5, 6, 8), (6, 5, 7)):
        assert not torch.equal(base, A.hash_keys(*words, 100, CPU))


def test_keys_are_distinct_and_not_negative() -> None:
    keys = A.hash_keys(1, 2, 3, 50_000, CPU)
    assert keys.unique().numel() == 50_000 and keys.min() >= 0


def test_draws_are_valid_distinct_sorted_and_static() -> None:
    valid_T = torch.rand(200, generator=torch.Generator().manual_seed(0)) < 0.3
    doc_T = torch.zeros(200).long()
    for asked in (1, 20, 200):
        anchors = A.sample_anchors(A.hash_keys(1, 2, 3, 200, CPU), valid_T, doc_T, asked)
        assert anchors.position_A.shape == (asked,)
        count = min(asked, int(valid_T.sum()))
        assert anchors.valid_A.tolist() == [True] * count + [False] * (asked - count)
        drawn = anchors.position_A[:count]
        assert valid_T[drawn].all() and (drawn.diff() > 0).all()
        assert anchors.position_A.unique().numel() == asked


def test_draws_are_uniform_over_the_valid_positions() -> None:
    """2,000 draws of 5 among 25: each position within 5 standard deviations of 400."""
    valid_T = torch.zeros(50, dtype=torch.bool)
    valid_T[::2] = True
    doc_T, counts_T = torch.zeros(50).long(), torch.zeros(50)
    for seq in range(1000):
        for pass_idx in range(2):
            keys = A.hash_keys(0, seq, pass_idx, 50, CPU)
            counts_T[A.sample_anchors(keys, valid_T, doc_T, 5).position_A] += 1
    assert counts_T[1::2].sum() == 0
    deviation = (2000 * 0.2 * 0.8) ** 0.5
    assert (counts_T[::2] - 400).abs().max() < 5 * deviation
