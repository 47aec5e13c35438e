"""The copies to and from a GPU keep their order, whichever stream is late, and a host that waits
for one sleeps: streams.py looks."""

from __future__ import annotations

import dataclasses
from unittest import mock

import torch
from streams import Race
from tiny_step import make_batch

from dflash.feed import Feed
from dflash.metrics import Metrics
from dflash.outbox import Outbox
from dflash.spans import Spans
from dflash.step import Batch

LENS = ((30, 21, 9, 1, 17), (11, 2), (40, 33), (5,))


def tensors(batch: Batch) -> list[torch.Tensor]:
    found = (getattr(batch, field.name) for field in dataclasses.fields(Batch))
    return [x for x in found if x is not None]


def overwrite(batch: Batch) -> None:
    for x in tensors(batch):
        x.zero_()


def test_what_looks_for_races_finds_them_and_knows_an_order() -> None:
    with Race() as race:
        x, other, event = torch.zeros(3), torch.cuda.Stream(), torch.cuda.Event()
        event.record()
        x.add_(1)
        other.wait_event(event)
        with torch.cuda.stream(other):
            y = x * 2
        assert len(race.found) == 1 and "aten::add_" in race.found[0]  # recorded too early
        torch.cuda.current_stream().wait_stream(other)
        x.mul_(y)
        assert len(race.found) == 1
        with race.host():
            y.clone()
        assert len(race.found) == 2  # nobody waited for it
        event.record()
        event.synchronize()
        with race.host():
            y.zero_()
        assert len(race.found) == 2
        assert race.spins == 1  # CUDA's default: the host keeps its core
        torch.cuda.Event(blocking=True).synchronize()
        assert race.spins == 1


def test_slots_that_arrive_under_a_step_meet_neither_it_nor_their_writer() -> None:
    """As drafter_trainer runs them: the next copy starts under the step; the slot is free again
    once it has arrived."""
    with Race() as race:
        with race.host():
            pages = [make_batch(lens, seed) for seed, lens in enumerate(LENS)]
        feed = Feed(pages[0], "cpu", Spans(None, "cpu"))
        feed.start(pages[0], sum(LENS[0]))
        for seq, page in enumerate(pages):
            feed.wait()
            with race.host():
                overwrite(page)
            batch = feed.load()
            for x in tensors(batch):
                x + 1  # the step
            if seq + 1 < len(pages):
                feed.start(pages[seq + 1], sum(LENS[seq + 1]))
    assert race.found == [] and race.spins == 0


def test_slots_that_leave_under_a_forward_meet_neither_it_nor_their_reader() -> None:
    """As StagedFiller runs them: a slot is read, and filled again, after its copy."""
    with Race() as race:
        with race.host():
            pages = [make_batch(lens, seed) for seed, lens in enumerate(LENS)]
        outbox, sent = Outbox(pages[0], "cpu", Spans(None, "cpu")), None
        for seq, page in enumerate([*pages, *pages]):
            for state in outbox.states():
                assert state is not None
                state.add_(seq)  # the forward
            if sent is not None:
                assert sent[0].arrived()
                with race.host():
                    sent[0].facts.clone()
                    overwrite(sent[1])
            sent = outbox.send(page, 20 + seq, seq), page
    assert race.found == [] and race.spins == 0


def test_a_host_that_waits_for_the_figures_of_an_interval_sleeps() -> None:
    """As Journal reads them: once the next step has been launched."""
    with Race() as race, mock.patch.object(torch.Tensor, "is_cuda", True):
        metrics = Metrics(4, torch.device("cpu"))
        for _ in range(2):
            metrics.add(torch.ones(metrics.layout.size, dtype=torch.float64))
            figures = metrics.post()
            metrics.add(torch.zeros(metrics.layout.size, dtype=torch.float64))
            assert figures()["steps"] == 1
    assert race.found == [] and race.spins == 0
