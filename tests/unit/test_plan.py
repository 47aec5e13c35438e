"""The plan: pure, every document once a pass, full slots, each with the data's mix of lengths."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.plan import Plan

T, D = 4096, 256


def lengths_of(kind: str, count: int = 3000) -> np.ndarray:
    rng = np.random.default_rng(7)
    drawn = {
        "chat": rng.lognormal(np.log(120), 0.6, count),
        "heavy tail": rng.lognormal(np.log(300), 1.1, count),
        "two kinds": np.where(
            rng.random(count) < 0.9, rng.integers(30, 150, count), rng.integers(900, 2000, count)
        ),
    }[kind]
    return np.clip(drawn, 8, T).astype(np.int64)


KINDS = ("chat", "heavy tail", "two kinds")


def make(lengths: np.ndarray, seed: int = 3, max_tokens: int = T, max_docs: int = D) -> Plan:
    return Plan(lengths, seed=seed, max_tokens=max_tokens, max_docs=max_docs)


def data_pass(plan: Plan, number: int) -> list[np.ndarray]:
    first = number * plan.slots_per_pass
    return [plan.slot(seq) for seq in range(first, first + plan.slots_per_pass)]


def random_packing(lengths: np.ndarray, max_tokens: int = T) -> list[np.ndarray]:
    """What the plan is measured against: shuffle, then a new slot when the next does not fit."""
    slots: list[list[int]] = [[]]
    fill = 0
    for doc in np.random.default_rng(0).permutation(len(lengths)):
        if fill + lengths[doc] > max_tokens:
            slots.append([])
            fill = 0
        slots[-1].append(int(doc))
        fill += lengths[doc]
    return [np.array(slot) for slot in slots]


def mix_distance(slots: list[np.ndarray], lengths: np.ndarray) -> float:
    """Mean over slots of the Kolmogorov-Smirnov distance of their lengths to the data's."""
    everything = np.sort(lengths)
    data_cdf = np.searchsorted(everything, everything, "right") / len(everything)

    def distance(slot: np.ndarray) -> float:
        mine = np.sort(lengths[slot])
        return float(
            np.abs(np.searchsorted(mine, everything, "right") / len(mine) - data_cdf).max()
        )

    return float(np.mean([distance(slot) for slot in slots]))


@pytest.mark.parametrize("kind", KINDS)
def test_slots_are_at_least_90_percent_full(kind: str) -> None:
    lengths = lengths_of(kind)
    plan = make(lengths)
    for number in range(3):
        tokens = [lengths[slot].sum() for slot in data_pass(plan, number)]
        assert np.mean(tokens) / T >= 0.9
        assert np.mean(tokens) / T == pytest.approx(plan.fill)


@pytest.mark.parametrize("kind", KINDS)
def test_no_slot_exceeds_its_tokens_or_documents(kind: str) -> None:
    lengths = lengths_of(kind)
    for slot in data_pass(make(lengths), 0):
        assert 1 <= len(slot) <= D
        assert lengths[slot].sum() <= T


@pytest.mark.parametrize("kind", KINDS)
def test_each_pass_uses_each_document_once(kind: str) -> None:
    lengths = lengths_of(kind)
    plan = make(lengths)
    for number in range(3):
        used = np.concatenate(data_pass(plan, number))
        assert np.array_equal(np.sort(used), np.arange(len(lengths)))


def test_each_slot_has_the_datas_mix_of_lengths() -> None:
    """Against random packing, the distance of a slot's lengths to the data's is less than half."""
    lengths = lengths_of("chat")
    planned, random = data_pass(make(lengths), 0), random_packing(lengths)
    assert mix_distance(planned, lengths) < 0.5 * mix_distance(random, lengths)

    def spread(slots: list[np.ndarray], of: str, q: float = 0.5) -> float:
        values = [
            np.mean(lengths[s]) if of == "mean" else np.quantile(lengths[s], q) for s in slots
        ]
        return float(np.std(values))

    assert spread(planned, "mean") < 0.5 * spread(random, "mean")
    assert spread(planned, "quantile", 0.5) < 0.5 * spread(random, "quantile", 0.5)
    assert spread(planned, "quantile", 0.9) < 0.5 * spread(random, "quantile", 0.9)


@pytest.mark.parametrize("kind", ["heavy tail", "two kinds"])
def test_the_mix_beats_random_packing_where_one_document_can_fill_half_a_slot(kind: str) -> None:
    lengths = lengths_of(kind)
    planned, random = data_pass(make(lengths), 0), random_packing(lengths)
    assert mix_distance(planned, lengths) < mix_distance(random, lengths)


def test_a_slot_is_a_function_of_seq_alone() -> None:
    """Any call order, any object, forwards or backwards over pass borders: the same documents."""
    lengths = lengths_of("chat", 500)
    plan = make(lengths)
    count = 5 * plan.slots_per_pass
    forwards = [plan.slot(seq).tolist() for seq in range(count)]
    for seq in np.random.default_rng(1).permutation(count):
        assert plan.slot(int(seq)).tolist() == forwards[seq]
    other = make(lengths.copy())
    for seq in reversed(range(count)):
        assert other.slot(seq).tolist() == forwards[seq]
    assert make(lengths).slot(count - 1).tolist() == forwards[-1]


def test_a_caller_cannot_change_the_plan() -> None:
    plan = make(lengths_of("chat", 100))
    with pytest.raises(ValueError, match="read-only"):
        plan.slot(0)[0] = 5


def test_the_pass_follows_from_seq() -> None:
    plan = make(lengths_of("chat", 300))
    n = plan.slots_per_pass
    assert [plan.data_pass(seq) for seq in (0, n - 1, n, 2 * n - 1, 2 * n)] == [0, 0, 1, 1, 2]


def test_a_document_meets_other_documents_in_each_pass() -> None:
    """Of the pairs that share a slot in pass 0, pass 1 repeats about as few as chance would."""
    lengths = lengths_of("chat", 1000)
    plan = make(lengths)

    def pairs(number: int) -> set[tuple[int, int]]:
        return {
            (int(a), int(b))
            for slot in data_pass(plan, number)
            for a in slot
            for b in slot
            if a < b
        }

    before, after = pairs(0), pairs(1)
    by_chance = len(after) / (len(lengths) * (len(lengths) - 1) / 2)
    assert len(before & after) / len(before) < 1.5 * by_chance


def test_another_seed_deals_other_slots() -> None:
    lengths = lengths_of("chat", 300)
    assert make(lengths, seed=1).slot(0).tolist() != make(lengths, seed=2).slot(0).tolist()


@pytest.mark.parametrize("kind", ["chat", "uniform"])
def test_long_documents_are_not_dealt_first(kind: str) -> None:
    """Over a pass, the mean length does not drift: also where little room leaves little chance."""
    uniform = np.random.default_rng(5).integers(1, T + 1, 2000)
    lengths = uniform if kind == "uniform" else lengths_of("chat")
    longest = [int(lengths[slot].max()) for slot in data_pass(make(lengths), 0)]
    half = len(longest) // 2
    assert np.mean(longest[:half]) == pytest.approx(np.mean(longest[half:]), rel=0.15)


def test_one_document() -> None:
    plan = make(np.array([5]))
    assert plan.slots_per_pass == 1
    assert [plan.slot(seq).tolist() for seq in range(3)] == [[0], [0], [0]]
    assert plan.data_pass(2) == 2


def test_documents_as_long_as_the_slot_stand_alone() -> None:
    plan = make(np.full(7, 64), max_tokens=64)
    assert sorted(slot.tolist() for slot in data_pass(plan, 0)) == [[n] for n in range(7)]


def test_few_documents_a_slot_raise_the_number_of_slots() -> None:
    plan = make(np.full(100, 10), max_tokens=1000, max_docs=8)
    assert plan.slots_per_pass == 13
    assert max(len(slot) for slot in data_pass(plan, 0)) == 8


def test_a_document_longer_than_the_slot_is_a_bug_of_the_caller() -> None:
    with pytest.raises(AssertionError):
        make(np.array([3, 65]), max_tokens=64)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=120),
    max_docs=st.integers(1, 12),
    seed=st.integers(0, 2**31 - 1),
    number=st.integers(0, 10**6),
)
def test_any_lengths_fit_and_none_is_lost(
    lengths: list[int], max_docs: int, seed: int, number: int
) -> None:
    array = np.array(lengths)
    slots = data_pass(make(array, seed, max_tokens=64, max_docs=max_docs), number)
    assert sorted(np.concatenate(slots).tolist()) == list(range(len(lengths)))
    assert all(array[slot].sum() <= 64 and len(slot) <= max_docs for slot in slots)


def test_a_slot_may_be_empty_only_where_there_is_no_document_for_it() -> None:
    """Training needs tokens in every slot."""
    for count in range(1, 60):
        plan = make(np.random.default_rng(count).integers(1, 65, count), max_tokens=64)
        assert all(len(slot) for slot in data_pass(plan, 0))


def test_importing_the_plan_imports_no_torch() -> None:
    code = "import sys, dflash.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
