"""flex.py: tiles against create_block_mask, mask against mask.py, attention against SDPA,
and a step made of compiled pieces against the eager one."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tiny_step import HIDDEN, make_batch, make_state
from torch.nn.attention.flex_attention import create_block_mask

from dflash import flex, step
from dflash.anchors import Anchors, documents, hash_keys, sample_anchors, valid_anchors
from dflash.mask import attend, decode_masks, dense_mask
from dflash.model import layer_kinds

EXACT = [  # tokens, blocks, block size, folded heads, documents, invalid blocks
    (512, 16, 32, 4, (200, 150, 100), 2),
    (512, 16, 16, 4, (512,), 0),
    (640, 8, 8, 1, (640,), 0),
    (300, 16, 16, 8, (120, 100, 60), 16),
]
RAGGED = [(500, 13, 16, 3, (100, 250, 120), 3), (333, 7, 5, 3, (40, 250), 1)]


def scene(case: tuple[Any, ...]) -> tuple[flex.Grid, Anchors, torch.Tensor, torch.Tensor]:
    """(grid, anchors of which the last are invalid, lens_D, doc_T)."""
    tokens, blocks, block, heads, lens, invalid = case
    lens_D = torch.tensor([*lens, 0])
    doc_T = documents(lens_D, torch.tensor(sum(lens)), tokens)
    valid_T = valid_anchors(torch.ones(tokens, dtype=torch.bool), doc_T)
    keys_T = hash_keys(1, 2, 3, tokens, doc_T.device)
    anchors = sample_anchors(keys_T, valid_T, doc_T, blocks)
    ok_A = anchors.valid_A & (torch.arange(blocks) < blocks - invalid)
    anchors = Anchors(anchors.position_A, ok_A, torch.where(ok_A, anchors.doc_A, -1))
    return flex.Grid(tokens, blocks, block, heads), anchors, lens_D, doc_T


def mask_of(case: tuple[Any, ...], window: int | None, causal: bool) -> Any:
    grid, anchors, lens_D, _ = scene(case)
    low_A, high_A = flex.context_range(anchors, lens_D)
    tiles = flex.find_tiles(*flex.tile_flags(low_A, high_A, window, grid))
    return flex.block_mask_of(tiles, low_A, high_A, window, causal, grid)


@pytest.mark.parametrize("case", EXACT)
@pytest.mark.parametrize("window", [None, 64, 129])
def test_tiles_are_those_of_create_block_mask(case: tuple[Any, ...], window: int | None) -> None:
    for causal in (False, True):
        ours = mask_of(case, window, causal)
        theirs = create_block_mask(ours.mask_mod, None, None, *ours.seq_lengths, device="cpu")
        for side in ("kv", "full_kv", "q", "full_q"):
            for what in ("num_blocks", "indices"):
                name = f"{side}_{what}"
                assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
                assert getattr(ours, name).is_contiguous(), name


@pytest.mark.parametrize("case", RAGGED)
@pytest.mark.parametrize("window", [None, 64, 129])
def test_tiles_that_split_a_block_keep_all_that_is_visible(
    case: tuple[Any, ...], window: int | None
) -> None:
    ours = mask_of(case, window, True)
    theirs = create_block_mask(ours.mask_mod, None, None, *ours.seq_lengths, device="cpu")

    def flags(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        taken = torch.arange(indices.shape[-1]) < counts[0, 0][:, None]
        return torch.zeros_like(taken).scatter(1, indices[0, 0].long(), taken)

    full = flags(ours.full_kv_num_blocks, ours.full_kv_indices)
    assert (full <= flags(theirs.full_kv_num_blocks, theirs.full_kv_indices)).all()
    part = flags(ours.kv_num_blocks, ours.kv_indices)
    assert not (part & full).any()
    seen = flags(theirs.kv_num_blocks, theirs.kv_indices)
    assert (seen <= (part | full)).all()


@pytest.mark.parametrize("case", [*EXACT, *RAGGED])
@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("causal", [False, True])
def test_the_mask_is_mask_pys_and_the_attention_sdpas(
    case: tuple[Any, ...], window: int | None, causal: bool
) -> None:
    grid, anchors, _, doc_T = scene(case)
    block = grid.block_size
    flexed = mask_of(case, window, causal)
    dense_QS = dense_mask(doc_T, anchors.position_A, anchors.doc_A, block, (window, causal))
    row_R = torch.arange(grid.rows)
    offset_R = row_R // grid.block_rows * block + row_R % block
    ours_RS = flexed.mask_mod(0, 0, row_R[:, None], torch.arange(grid.keys))
    assert torch.equal(ours_RS, dense_QS[offset_R])

    torch.manual_seed(0)
    q_QNE = torch.randn(grid.num_blocks * block, 2 * grid.heads, 8)
    ctx, own = ((torch.randn(n, 2, 8), torch.randn(n, 2, 8)) for n in (grid.num_tokens, len(q_QNE)))
    out = flex.flex_attend(q_QNE, ctx, own, flex.FlexMask(flexed, grid.heads, block))
    torch.testing.assert_close(out, attend(q_QNE, ctx, own, dense_QS), rtol=1e-5, atol=1e-5)


def test_folding_is_undone_by_unfolding() -> None:
    x_QNE = torch.randn(6 * 4, 2 * 3, 5)
    folded = flex.fold(x_QNE, 3, 4)
    assert folded.shape == (1, 2, 6 * 3 * 4, 5)
    assert torch.equal(flex.unfold(folded, 3, 4), x_QNE)
    assert torch.equal(folded[0, 1, 5 * 12 + 2 * 4 + 3], x_QNE[5 * 4 + 3, 3 + 2])


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_a_step_of_compiled_pieces_equals_the_eager_one(
    loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fullgraph, traced forward and backward (aot_eager: no kernels are generated), with the flex
    masks that a GPU uses. flex_attention has no backward on a CPU but by its plain formula."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    step._compiled.cache_clear()
    eager, pieces = make_state(loss=loss), make_state(loss=loss)
    section = pieces.config.step.model_copy(update={"mode": "compiled"})
    pieces.config = pieces.config.model_copy(update={"step": section})
    pieces.drafter.compile_pieces(backend="aot_eager")
    want = [step.train_step(eager, make_batch(), seq=s, pass_idx=0) for s in range(3)]

    def on_a_gpu(state: step.TrainState, lens_D: torch.Tensor, drawn: step.Drawn) -> Any:
        arch, anchors = state.drafter.arch, drawn.anchors
        grid = flex.Grid(len(drawn.doc_T), len(anchors.valid_A), arch.block_size, 2)
        return step.flex_masks(state, lens_D, anchors, grid, layer_kinds(arch))

    monkeypatch.setattr(step, "masks", on_a_gpu)
    got = [step.train_step(pieces, make_batch(), seq=s, pass_idx=0) for s in range(3)]
    step._compiled.cache_clear()
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pieces.optimizer.weights, eager.optimizer.weights)


def test_decoding_of_any_length_compiles_nothing() -> None:
    """The trainer walks held-out texts with the drafter that it trains compiled."""

    def never(*_: Any) -> Any:
        raise AssertionError("compiled")

    drafter = make_state().drafter
    drafter.compile_pieces(backend=never)
    for length in range(1, 13):
        pos_S = torch.arange(length + 4)
        ctx_kv = drafter.context_kv(torch.randn(length, HIDDEN), pos_S[:length])
        masks = decode_masks(length, 4, layer_kinds(drafter.arch), pos_S.device)
        out_QH = drafter(torch.randn(4, HIDDEN), pos_S[length:], ctx_kv, masks)
        assert out_QH.isfinite().all()
