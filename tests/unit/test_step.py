"""The whole step on a tiny drafter: exactness, stale tails, no host sync, learning."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tiny_step import BLOCK, HIDDEN, MASK_TOKEN, TOKENS, VOCAB, make_arch, make_batch, make_state
from torch.utils._python_dispatch import TorchDispatchMode

from dflash.anchors import documents, hash_keys, sample_anchors, valid_anchors
from dflash.loss import default_gamma
from dflash.mask import decode_masks
from dflash.model import FrozenEnds, layer_kinds
from dflash.step import Batch, TrainState, run_step, train_step, warm_up


def train(state: TrainState, batch: Batch, steps: int = 3) -> list[torch.Tensor]:
    return [train_step(state, batch, seq=4, pass_idx=p) for p in range(steps)]


# ---- exactness --------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_steps_repeat_bit_for_bit(loss: str) -> None:
    one, two = make_state(loss=loss), make_state(loss=loss)
    for a, b in zip(train(one, make_batch()), train(two, make_batch()), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(one.optimizer.weights, two.optimizer.weights)
    assert torch.equal(one.optimizer.exp_avg_sq, two.optimizer.exp_avg_sq)


@pytest.mark.parametrize("weights", ["decay", "dpace"])
@pytest.mark.parametrize("loss", ["ce", "kl"])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_the_fast_step_equals_the_plain_one(loss: str, weights: str, cap: float | None) -> None:
    """Grouped attention and the chunked head against dense masks and autograd over all logits."""
    arch = make_arch(logit_softcap=cap)
    fast, plain = (make_state(arch, loss=loss, position_weights=weights) for _ in "fp")
    plain.plain = True
    for a, b in zip(train(fast, make_batch()), train(plain, make_batch()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        fast.optimizer.weights, plain.optimizer.weights, rtol=1e-3, atol=1e-4
    )


def test_anchors_depend_on_seed_seq_and_pass_and_nothing_else() -> None:
    """The same (seq, pass) at another step draws the same blocks: equal counts at lr 0."""

    def counts(seq: int, pass_idx: int, after: int = 0, seed: int = 5) -> torch.Tensor:
        state = make_state(lr=1e-30)
        state.config = state.config.model_copy(
            update={"run": state.config.run.model_copy(update={"seed": seed})}
        )
        for _ in range(after):
            train_step(state, make_batch(), seq=99, pass_idx=0)
        return train_step(state, make_batch(), seq=seq, pass_idx=pass_idx)

    base = counts(3, 1)
    assert torch.equal(base, counts(3, 1, after=2))
    for other in (counts(4, 1), counts(3, 2), counts(3, 1, seed=6)):
        assert not torch.equal(base, other)


# ---- stale rows -------------------------------------------------------------------------------


def poison(batch: Batch) -> Batch:
    """The tail as a previous, longer slot and hardware garbage may leave it."""
    total = int(batch.total_tok)
    batch.all_TF[total:] = torch.nan
    batch.vlh_TH[total:] = torch.inf
    batch.ids_T[total:] = 2**40
    batch.lm_T[total:] = True
    batch.pos_T[total:] = -(2**62)
    return batch


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_stale_rows_change_no_bit(loss: str, plain: bool) -> None:
    clean, dirty = make_state(loss=loss), make_state(loss=loss)
    clean.plain = dirty.plain = plain
    for a, b in zip(train(clean, make_batch()), train(dirty, poison(make_batch())), strict=True):
        assert b.isfinite().all() and torch.equal(a, b)
    assert dirty.optimizer.weights.isfinite().all()
    assert torch.equal(clean.optimizer.weights, dirty.optimizer.weights)


def test_a_short_slot_in_a_long_slots_buffer_trains_on_itself_alone() -> None:
    """Two documents of 10 over a full slot: no anchor, label or count comes from beyond."""
    long, short = make_batch((90,)), make_batch((10, 10), seed=3)
    for old, new in (
        (long.ids_T, short.ids_T),
        (long.lm_T, short.lm_T),
        (long.all_TF, short.all_TF),
    ):
        new[20:] = old[20:]
    state, alone = make_state(), make_state()
    figures = []
    for each, batch in ((state, short), (alone, make_batch((10, 10), seed=3))):
        train_step(each, batch, seq=0, pass_idx=0)
        figures.append(each.metrics.read())
    assert figures[0] == figures[1]
    assert 0 < figures[0]["anchors_valid"] <= 18 and figures[0]["tokens"] == 20
    assert torch.equal(state.optimizer.weights, alone.optimizer.weights)


def test_warming_up_on_an_empty_slot_changes_nothing() -> None:
    state, batch = make_state(loss="kl"), make_batch()
    for x in vars(batch).values():
        x.zero_()
    before = {key: x.clone() for key, x in vars(state.optimizer).items() if torch.is_tensor(x)}
    warm_up(state, batch)
    for key in ("weights", "masters", "exp_avg", "exp_avg_sq", "count"):
        assert torch.equal(before[key], getattr(state.optimizer, key)), key
    assert state.metrics.sums.abs().sum() == 0 and not state.dry and state.step == 0


def test_a_slot_without_an_anchor_leaves_the_drafter_alone_and_is_counted() -> None:
    state, batch = make_state(), make_batch()
    train_step(state, batch, seq=0, pass_idx=0)
    before = state.optimizer.weights.clone()
    state.metrics.read()
    batch.lm_T[:] = False
    train_step(state, batch, seq=1, pass_idx=0)
    figures = state.metrics.read()
    assert torch.equal(before, state.optimizer.weights)
    assert figures["skipped"] == 1 and figures["anchors_valid"] == 0
    assert math.isnan(figures["loss"])


def test_a_nan_inside_the_slot_is_skipped_counted_and_kept_out_of_the_means() -> None:
    state, bad = make_state(), make_batch()
    before = state.optimizer.weights.clone()
    bad.all_TF[0] = torch.nan  # seen by every anchor of the first document
    train_step(state, bad, seq=0, pass_idx=0)
    assert torch.equal(before, state.optimizer.weights)
    train_step(state, make_batch(), seq=1, pass_idx=0)
    figures = state.metrics.read()
    assert figures["skipped"] == 1 and figures["steps"] == 2
    assert not torch.equal(before, state.optimizer.weights)
    alone = make_state()
    train_step(alone, make_batch(), seq=1, pass_idx=0)
    counts = ("skipped", "steps", "tokens", "supervised", "anchors_asked")
    for name, value in alone.metrics.read().items():
        assert math.isfinite(value) and (name in counts or figures[name] == value), name


def test_a_drafter_that_has_diverged_is_right_about_nothing() -> None:
    state = make_state(lr=1e30)
    for seq in range(3):
        train_step(state, make_batch(), seq=seq, pass_idx=0)
    state.metrics.read()
    train_step(state, make_batch(), seq=3, pass_idx=0)
    figures = state.metrics.read()
    assert figures["skipped"] == 1
    assert all(math.isnan(figures[name]) for name in ("loss", "accuracy", "tau_anchor"))


# ---- what is trained is what is served -------------------------------------------------------


def test_the_loss_is_that_of_serving_every_block_on_its_own() -> None:
    """Each drawn anchor again as decoding would meet it: a cache of the tokens before it in its
    document, one block of [token, MASK, MASK, MASK], and slot k asked for the token at a+k."""
    state, batch = make_state(lr=1e-30), make_batch()
    drafter, ends = state.drafter, state.ends
    doc_T = documents(batch.lens_D, batch.total_tok, TOKENS)
    valid_T = valid_anchors(batch.lm_T, doc_T)
    keys = hash_keys(5, 4, 0, TOKENS, torch.device("cpu"))
    drawn = sample_anchors(keys, valid_T, doc_T, state.config.num_anchors).position_A.tolist()
    top, bottom, lengths, hits = 0.0, 0.0, [], []
    for a in drawn:
        start = a - int(batch.pos_T[a])
        context = drafter.context(batch.all_TF[start:a])
        cache = drafter.context_kv(context, torch.arange(a - start))
        masks = decode_masks(a - start, BLOCK, layer_kinds(drafter.arch), torch.device("cpu"))
        ids = torch.tensor([int(batch.ids_T[a]), MASK_TOKEN, MASK_TOKEN, MASK_TOKEN])
        place = torch.arange(a - start, a - start + BLOCK)
        logits_KV = ends.logits(drafter(ends.embed(ids), place, cache, masks))
        run, alive = 0, True
        for k in range(1, BLOCK):
            if a + k >= TOKENS or doc_T[a + k] != doc_T[a] or not batch.lm_T[a + k]:
                break
            weight, token = math.exp(-(k - 1) / default_gamma(BLOCK)), int(batch.ids_T[a + k])
            top -= weight * float(logits_KV[k].detach().log_softmax(-1)[token])
            bottom += weight
            hits.append(int(logits_KV[k].argmax()) == token)
            alive = alive and hits[-1]
            run += alive
        lengths.append(1 + run)
    train_step(state, batch, seq=4, pass_idx=0)
    figures = state.metrics.read()
    assert figures["loss"] == pytest.approx(top / bottom, rel=1e-5)
    assert figures["tau_anchor"] == sum(lengths) / len(lengths)
    assert figures["accuracy"] == sum(hits) / len(hits)
    assert figures["labels"] == len(hits) and figures["anchors_valid"] == len(drawn)


# ---- the target's distribution ----------------------------------------------------------------


def test_kl_compares_slot_k_with_the_targets_state_one_position_earlier() -> None:
    """A target that is sure of token t at position t-1: then KL and CE on data tokens agree."""
    batch = make_batch()
    head_VH = torch.eye(VOCAB, HIDDEN) * 40  # one-hot logits for the first HIDDEN tokens
    batch.ids_T.remainder_(HIDDEN)
    batch.vlh_TH[:-1] = torch.eye(HIDDEN)[batch.ids_T[1:]]
    losses = []
    for loss in ("ce", "kl"):
        state = make_state(loss=loss)
        state.ends = FrozenEnds(state.ends.embed_VH, head_VH)
        train_step(state, batch, seq=0, pass_idx=0)
        losses.append(state.metrics.read()["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0] > 1


# ---- the step as a graph needs it --------------------------------------------------------------


class ForbidSync(TorchDispatchMode):
    """What would read a tensor's value on the host, or make a shape out of data."""

    BANNED = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique", "equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in self.BANNED, f"{func} reads a tensor"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_the_step_reads_no_tensor_and_makes_no_shape_from_data(loss: str) -> None:
    state, batch = make_state(loss=loss), make_batch()
    state.plain = True  # the masks that a GPU uses
    with ForbidSync():
        train_step(state, batch, seq=1, pass_idx=0)
    assert state.metrics.read()["steps"] == 1


def test_everything_that_changes_between_steps_is_a_tensor() -> None:
    """What a replayed graph does: the same run_step after other inputs gives another step."""
    state, batch = make_state(), make_batch()
    address = [x.data_ptr() for x in (state.inputs, state.optimizer.lr, state.optimizer.weights)]
    state.set_inputs(7, 3)
    rate = 0.01 / 16  # the first of 16 warm-up steps
    assert state.inputs.tolist() == [5, 7, 3, rate]
    one = run_step(state, batch)
    assert not torch.equal(one, train_step(state, batch, seq=8, pass_idx=3))
    after = [x.data_ptr() for x in (state.inputs, state.optimizer.lr, state.optimizer.weights)]
    assert address == after and state.optimizer.lr == torch.tensor(rate)
    grads = [p.grad for p in state.drafter.parameters()]
    flat = state.optimizer.grads.untyped_storage().data_ptr()
    assert all(g is not None and g.untyped_storage().data_ptr() == flat for g in grads)


class Writes(TorchDispatchMode):
    """Names of the operations that change a tensor in place: a launch each, on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_the_host_writes_a_steps_inputs_at_once() -> None:
    state = make_state()
    with Writes() as writes:
        state.set_inputs(7, 3)
    assert writes.names == ["copy_"]


def test_slot_and_pass_follow_from_the_step() -> None:
    state = make_state(passes_per_slot=3)
    seen = []
    for _ in range(7):
        seen.append((state.slot, state.pass_idx))
        train_step(state, make_batch(), seq=state.slot, pass_idx=state.pass_idx)
    assert seen == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]


# ---- learning -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "dtype"), [("ce", "float32"), ("ce", "bfloat16"), ("kl", "float32")]
)
def test_it_learns_one_batch_by_heart(loss: str, dtype: str) -> None:
    state, batch = make_state(loss=loss, dtype=dtype, steps=150), make_batch()
    batch.lm_T[: int(batch.total_tok)] = True
    figures = []
    for step in range(150):
        train_step(state, batch, seq=0, pass_idx=step)
        if step % 50 in (4, 49):
            figures.append(state.metrics.read())
    assert figures[-1]["loss"] < 0.2 * figures[0]["loss"]
    assert figures[-1]["steps"] == 45 and figures[-1]["skipped"] == 0
    if loss == "ce":
        assert figures[-1]["tau_anchor"] > 3 > 1.5 > figures[0]["tau_anchor"]
        assert figures[-1]["accuracy"] > 0.9
