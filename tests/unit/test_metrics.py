"""Both taus and every logged figure against hand-worked cases."""

from __future__ import annotations

import math

import pytest
import torch

from dflash.metrics import Layout, Metrics, count_correct, tau_walk

CPU = torch.device("cpu")


def sums_of(rank: list[list[int]], mask: list[list[bool]], valid: list[bool]) -> torch.Tensor:
    """One step's vector with the other scalars as given below."""
    values = count_correct(torch.tensor(rank), torch.tensor(mask), torch.tensor(valid))
    scalars = {
        "steps": 1.0,
        "skipped": 0.0,
        "loss": 6.0,
        "weight": 4.0,
        "grad_norm": 0.5,
        "tokens": 100.0,
        "supervised": 60.0,
        "anchors_asked": 3.0,
    }
    values |= {name: torch.tensor(value) for name, value in scalars.items()}
    return Layout(4).pack(values)


# Three blocks of three slots. Block 0: right, right, 5th best. Block 1: 2nd best, right, masked.
# Block 2 is padding: its ranks mean nothing.
RANK = [[0, 0, 4], [1, 0, 0], [0, 0, 0]]
MASK = [[True, True, True], [True, True, False], [False, False, False]]
VALID = [True, True, False]


def test_a_hand_worked_step() -> None:
    metrics = Metrics(4, CPU)
    metrics.add(sums_of(RANK, MASK, VALID))
    figures = metrics.read()
    assert figures["tau_anchor"] == (3 + 1) / 2  # 1 + two leading hits; 1 + none
    assert figures["accuracy"] == 3 / 5
    assert [figures[f"accuracy_{k}"] for k in (1, 2, 3)] == [1 / 2, 2 / 2, 0 / 1]
    assert figures["recall@4"] == 4 / 5 and figures["recall@8"] == 5 / 5
    assert figures["oracle_len@4"] == (3 + 3) / 2 and figures["oracle_len@8"] == (4 + 3) / 2
    assert figures["loss"] == 1.5 and figures["grad_norm"] == 0.5
    assert figures["labels"] == 5 and figures["supervised"] == 60 and figures["tokens"] == 100
    assert figures["anchors_valid"] == 2 and figures["anchors_asked"] == 3
    assert figures["steps"] == 1 and figures["skipped"] == 0


def test_means_are_pooled_over_the_interval_not_averaged_over_steps() -> None:
    metrics = Metrics(4, CPU)
    metrics.add(sums_of(RANK, MASK, VALID))
    metrics.add(sums_of([[0, 0, 0]] * 3, [[True] * 3] * 3, [True] * 3))
    figures = metrics.read()
    assert figures["tau_anchor"] == (4 + 12) / 5
    assert figures["accuracy"] == (3 + 9) / 14
    assert figures["anchors_asked"] == 6 and figures["steps"] == 2
    assert all(type(value) is float for value in figures.values())


def test_reading_starts_a_new_interval_and_a_mean_over_nothing_is_nan() -> None:
    metrics = Metrics(4, CPU)
    metrics.add(sums_of(RANK, MASK, VALID))
    metrics.read()
    figures = metrics.read()
    assert figures["steps"] == 0
    assert all(math.isnan(figures[name]) for name in ("loss", "tau_anchor", "accuracy_3"))


def test_pack_refuses_a_missing_or_unknown_name() -> None:
    with pytest.raises(AssertionError):
        Layout(4).pack({"loss": torch.zeros(())})


def test_sums_of_many_steps_keep_every_count() -> None:
    """float32 would stop counting at 16.7 million tokens."""
    metrics = Metrics(4, CPU)
    metrics.sums += 2.0**24
    metrics.add(sums_of(RANK, MASK, VALID))
    assert metrics.read()["steps"] == 2**24 + 1


# ---- tau_walk ---------------------------------------------------------------------------------


def test_a_drafter_that_is_never_right_gives_one_token_a_round() -> None:
    assert tau_walk([[False] * 3] * 5) == (1.0, [0] * 5)


def test_a_drafter_that_is_always_right_gives_whole_blocks() -> None:
    right = [[p + 1 + j < 9 for j in range(3)] for p in range(8)]
    assert tau_walk(right) == (4.0, [3, 3])


def test_a_hand_worked_walk() -> None:
    """Rounds start at 0, 3 and 4: what is right elsewhere, or after a miss, does not count."""
    right = [
        [True, True, False],  # start 0: two accepted and the bonus token -> 3
        [True, True, True],  # never visited
        [False, False, False],
        [False, True, True],  # start 3: a miss first -> only the bonus token
        [True, False, True],  # start 4: one accepted -> 6, the end
        [True, True, True],
    ]
    assert tau_walk(right) == ((3 + 1 + 2) / 3, [2, 0, 1])


def test_walk_differs_from_the_mean_over_anchors() -> None:
    """Why the two taus are never mixed up: long runs skip positions."""
    right = [
        [True, True],
        [False, False],
        [False, False],
        [True, True],
        [False, False],
        [False, False],
    ]
    mean_over_anchors = sum(1 + sum(row) for row in right) / 6
    assert (tau_walk(right)[0], mean_over_anchors) == (3.0, 10 / 6)


def test_an_empty_continuation_has_no_tau() -> None:
    tau, accepted = tau_walk([])
    assert math.isnan(tau) and accepted == []
