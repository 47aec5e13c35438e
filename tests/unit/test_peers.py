"""benchmarks/peers, as far as it can be seen without the peers."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from benchmarks.peers import sides, specforge_step, speculators_step


def test_no_block_of_the_common_batch_reaches_a_documents_end() -> None:
    """There the peers' rules differ: so all train the same rows."""
    case = sides.tiny_case("kl")
    batch = sides.common_batch(case)
    drawn = sides.first_draw(case, batch)
    assert drawn.anchors.valid_A.all()
    end_A = batch.lens_D.cumsum(0)[drawn.anchors.doc_A]
    assert (drawn.anchors.position_A + case.arch.block_size < end_A).all()
    # Theirs supervise what loss_mask says, block by block, with no rule of their own.
    slot_J = torch.arange(1, case.arch.block_size)
    assert torch.equal(drawn.mask_AJ, batch.lm_T[drawn.anchors.position_A[:, None] + slot_J])


def test_anchors_go_to_their_documents() -> None:
    case = sides.tiny_case("ce")
    batch = sides.common_batch(case)
    anchors = sides.first_draw(case, batch).anchors
    tokens, documents = case.document_tokens, len(batch.lens_D)
    position, there = specforge_step.anchors_by_document(anchors, documents, tokens)
    found = [
        index * tokens + int(at)
        for index in range(documents)
        for at in position[index][there[index]]
    ]
    assert found == anchors.position_A.tolist()


class Metronome:
    keeps_a_pool = False

    def __init__(self, name: str, step_s: float, documents: int, loss: float) -> None:
        self.name, self.step_s, self.documents, self.value = name, step_s, documents, loss

    def run(self, steps: int) -> list[float]:
        return [self.step_s] * steps

    def loss(self) -> float:
        return self.value

    def holds(self) -> str:
        return "nothing"


def test_the_ratio_is_time_a_document() -> None:
    args = Namespace(steps=3, rounds=2)
    (found,) = sides.compare(
        {"ours": lambda: Metronome("ours", 0.2, 8, 2.0)},
        {"theirs": lambda: Metronome("theirs", 0.1, 2, 2.1)},
        args,
        {"shapes": "none"},
    )
    assert found["ratio_per_document"] == pytest.approx(2.0)  # 50 ms a document against 25
    assert found["loss_differs_by"] == pytest.approx(0.05)
    assert found["theirs"]["steps_s"] == [0.1] * 6


def test_a_peer_that_cannot_run_is_a_result() -> None:
    def broken() -> Metronome:
        raise RuntimeError("no kernel")

    args = Namespace(steps=1, rounds=2)
    (found,) = sides.compare(
        {"ours": lambda: Metronome("ours", 0.2, 8, 2.0)}, {"theirs": broken}, args, {"shapes": "-"}
    )
    assert found["theirs"] == {"name": "theirs", "failed": "RuntimeError: no kernel"}


def test_stubs_stand_in_for_named_packages_alone() -> None:
    stubs = speculators_step.Stubs()
    assert stubs.find_spec("numpy") is None and stubs.used == set()
    assert stubs.find_spec("openai.types.chat") is not None and stubs.used == {"openai"}
