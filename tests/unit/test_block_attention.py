"""block_attention.py: ranges against mask.py's dense masks, the operation against SDPA, and a step
made of compiled pieces against the eager one."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tiny_step import make_batch, make_state

from dflash import step
from dflash.anchors import Anchors, documents, hash_keys, sample_anchors, valid_anchors
from dflash.block_attention import TILE, Ranges, context_range, seen_by
from dflash.mask import attend, dense_mask
from dflash.model import layer_kinds

CASES = [  # tokens, blocks, block size, query heads of a key head, documents, invalid blocks
    (512, 16, 32, 4, (200, 150, 100), 2),
    (512, 16, 16, 4, (512,), 0),
    (640, 8, 8, 1, (640,), 0),
    (300, 16, 16, 8, (120, 100, 60), 16),
    (500, 13, 16, 3, (100, 250, 120), 3),
    (333, 7, 5, 3, (40, 250), 1),
    (40, 12, 16, 4, (5, 6), 3),
]
WINDOWS = [None, 64, 129]


def scene(case: tuple[Any, ...]) -> tuple[Anchors, torch.Tensor, torch.Tensor]:
    """(anchors of which the last are invalid, lens_D, doc_T)."""
    tokens, blocks, _, _, lens, invalid = case
    lens_D = torch.tensor([*lens, 0])
    doc_T = documents(lens_D, torch.tensor(sum(lens)), tokens)
    valid_T = valid_anchors(torch.ones(tokens, dtype=torch.bool), doc_T)
    keys_T = hash_keys(1, 2, 3, tokens, doc_T.device)
    anchors = sample_anchors(keys_T, valid_T, doc_T, blocks)
    ok_A = anchors.valid_A & (torch.arange(blocks) < blocks - invalid)
    return Anchors(anchors.position_A, ok_A, torch.where(ok_A, anchors.doc_A, -1)), lens_D, doc_T


def ranges_of(case: tuple[Any, ...], window: int | None, causal: bool, device: str) -> Ranges:
    anchors, lens_D, doc_T = scene(case)
    anchors = Anchors(*(x.to(device) for x in anchors))
    low_A, high_A = context_range(anchors, lens_D.to(device))
    seen_C4 = seen_by(low_A, high_A, anchors.valid_A, window, case[2], len(doc_T))
    return Ranges(low_A, high_A, seen_C4, window, causal)


def dense_of(case: tuple[Any, ...], window: int | None, causal: bool) -> torch.Tensor:
    anchors, _, doc_T = scene(case)
    return dense_mask(doc_T, anchors.position_A, anchors.doc_A, case[2], (window, causal))


def tensors(case: tuple[Any, ...], size: int, **options: Any) -> list[torch.Tensor]:
    """Queries, the context's keys and values, the blocks' own."""
    tokens, blocks, block, heads, *_ = case
    rows = blocks * block
    shapes = [(rows, 2 * heads), *[(tokens, 2)] * 2, *[(rows, 2)] * 2]
    torch.manual_seed(0)
    return [torch.randn(*shape, size, **options).requires_grad_() for shape in shapes]


def out_and_grads(leaves: list[torch.Tensor], mask: Any) -> list[torch.Tensor]:
    q_QNE, k, v, own_k, own_v = leaves
    out_QNE = attend(q_QNE, (k, v), (own_k, own_v), mask)
    torch.manual_seed(1)
    weight_QNE = torch.randn(out_QNE.shape).to(out_QNE)
    grads = torch.autograd.grad((out_QNE * weight_QNE).sum(), leaves)
    return [out_QNE.detach(), *grads]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("window", WINDOWS)
def test_of_a_tile_of_keys_all_that_see_it_are_named_and_those_that_see_all_exactly(
    case: tuple[Any, ...], window: int | None
) -> None:
    tokens, blocks, block, *_ = case
    seen_AKT = dense_of(case, window, False)[:, :tokens].view(blocks, block, tokens)
    for c, (first, whole, after, last) in enumerate(ranges_of(case, window, False, "cpu").seen_C4):
        tile_AKT = seen_AKT[:, :, c * TILE : (c + 1) * TILE]
        some_A, every_A = tile_AKT.any(2).any(1), tile_AKT.all(2).all(1)
        number_A = torch.arange(blocks)
        assert not some_A[(number_A < first) | (number_A >= last)].any()
        if tile_AKT.shape[2] == TILE:
            assert torch.equal(every_A, (number_A >= whole) & (number_A < after))
        else:
            assert whole >= after, "a tile that ends beyond the tokens is asked about"
        assert first <= whole <= after <= max(first, last)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("causal", [False, True])
def test_the_attention_is_sdpas_under_the_dense_mask(
    case: tuple[Any, ...], window: int | None, causal: bool
) -> None:
    leaves = tensors(case, 8)
    dense = out_and_grads(leaves, dense_of(case, window, causal))
    ours = out_and_grads(leaves, ranges_of(case, window, causal, "cpu"))
    for a, b in zip(ours, dense, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_three_steps_of_compiled_pieces_are_three_eager_ones_to_the_bit(
    loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float32, fullgraph, traced forward and backward (aot_eager: no kernels are generated), with
    the ranges that a GPU uses. Against the CPU's own masks, to rounding."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    step._compiled.cache_clear()
    eager, pieces, own = (make_state(loss=loss) for _ in range(3))
    section = pieces.config.step.model_copy(update={"mode": "compiled"})
    pieces.config = pieces.config.model_copy(update={"step": section})
    pieces.drafter.compile_pieces(backend="aot_eager")

    def steps(state: step.TrainState) -> list[torch.Tensor]:
        return [step.train_step(state, make_batch(), seq=s, pass_idx=0) for s in range(3)]

    def on_a_gpu(state: step.TrainState, lens_D: torch.Tensor, drawn: step.Drawn) -> Any:
        arch = state.drafter.arch
        shape = (arch.block_size, len(drawn.doc_T))
        return state.piece(step.ranges)(lens_D, drawn.anchors, layer_kinds(arch), *shape)

    grouped = steps(own)
    monkeypatch.setattr(step, "masks", on_a_gpu)
    want, got = steps(eager), steps(pieces)
    step._compiled.cache_clear()
    for a, b, c in zip(want, got, grouped, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-5)
    assert torch.equal(eager.optimizer.weights, pieces.optimizer.weights)
