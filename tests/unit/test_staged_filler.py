"""The target worker's loop on a GPU, with copies that arrive late: what is published, and when.

The outbox is a fake on the CPU: a copy stays under way until the test lets it land, and takes what
its buffer holds then, so a buffer that is filled again too early shows in the slot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rings import new_path
from tiny_step import make_arch, make_config

import target_worker
from dflash.arch import DrafterArch
from dflash.config import Config
from dflash.feed import byte_sum
from dflash.slot import slot_views
from dflash.spans import Spans
from dflash.step import Batch
from launcher.slot import slot_fields
from shm_ring import Poisoned, RingReader, RingWriter, Stopped, create, destroy, snapshot
from shm_ring.pin import PinReport
from target_worker import StagedFiller, WriteLease

SLOTS, NAN_TOKEN = 4, 49


@dataclass
class LateCopy:
    land: Callable[[], list[torch.Tensor]]
    queries_left: int | None
    """Lands by itself at the query after so many; None: only by hand."""
    states: list[torch.Tensor] = field(default_factory=list)

    def arrived(self) -> bool:
        if not self.states and self.queries_left is not None:
            self.queries_left -= 1
            if self.queries_left < 0:
                self.states = self.land()
        return bool(self.states)

    @property
    def sums(self) -> list[int]:
        assert self.states, "read before it arrived"
        return [int(byte_sum(state)) % 2**64 for state in self.states]

    @property
    def finite(self) -> bool:
        assert self.states, "read before it arrived"
        return all(bool(state.isfinite().all()) for state in self.states)


class LateOutbox:
    """As outbox.Outbox. `queries` is for the copies to come."""

    queries: int | None = 5
    sent: list[LateCopy]

    def __init__(self, like: Batch, device: Any, spans: Any) -> None:
        assert like.vlh_TH is not None
        pair = (like.all_TF, like.vlh_TH)
        self.buffers = [[torch.zeros_like(x) for x in pair] for _ in range(2)]
        LateOutbox.sent = []

    def states(self) -> tuple[torch.Tensor, torch.Tensor]:
        all_TF, vlh_TH = self.buffers[len(self.sent) % 2]
        return all_TF, vlh_TH

    def send(self, slot: Batch, total_tok: int, seq: int) -> LateCopy:
        buffers = self.buffers[len(self.sent) % 2]

        def land() -> list[torch.Tensor]:
            assert slot.vlh_TH is not None
            valid = [x[:total_tok] for x in buffers]
            for page, state in zip((slot.all_TF, slot.vlh_TH), valid, strict=True):
                page[:total_tok].copy_(state)
            return [state.clone() for state in valid]

        assert all(copy.states for copy in self.sent), "two copies under way"
        self.sent.append(LateCopy(land, LateOutbox.queries))
        return self.sent[-1]


@dataclass
class Worker:
    ring: RingWriter
    reader: RingReader
    config: Config
    arch: DrafterArch
    filler: StagedFiller
    stop: bool = False
    until_s: float = field(default_factory=lambda: time.monotonic() + 10)
    """Then the worker is told to stop, so that a slot which never comes fails the test."""
    in_forward: bool = False
    during_forward: Callable[[], None] = lambda: None

    def fill(self, lease: WriteLease | None, *, nan: bool = False) -> None:
        assert lease is not None
        ids = np.full(20 + lease.seq, NAN_TOKEN if nan else 2 + lease.seq, np.int32)
        self.filler.fill(lease, [lease.seq], [(ids, np.ones(len(ids), bool))])

    def stopping(self) -> bool:
        return self.stop or time.monotonic() > self.until_s

    def states(self) -> dict[int, str]:
        """{seq: state}."""
        view = snapshot(self.config.ring.path)
        return {slot.seq: slot.state for slot in view.slots if slot.seq is not None}

    def take(self, seq: int) -> None:
        """It is READY, whole, and its sums fit (the reader checks them)."""
        assert self.states()[seq] == "READY"
        lease = self.reader.take(seq, stop=lambda: self.states().get(seq) != "READY")
        assert len(lease.sums) == len(self.ring.fields)
        slot = slot_views(lease.buffer, self.config, self.arch)
        assert slot.vlh_TH is not None and lease.total_tok == 20 + seq
        for states in (slot.all_TF, slot.vlh_TH):
            assert (states[: lease.total_tok] == 2 + seq).all()
        self.reader.done(lease)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    config, arch, path = make_config(loss="kl"), make_arch(), new_path()
    config = config.model_copy(
        update={
            "target": config.target.model_copy(update={"dtype": "float32"}),
            "ring": config.ring.model_copy(update={"path": path}),
        }
    )
    fields = slot_fields(config, arch)
    create(path, fields, SLOTS, end_seq=100, run_name="test", quarantine_s=0.05)
    writer = RingWriter(path, "target_0", fields=fields)
    reader = RingReader(path, "trainer_0", fields=fields)
    reader.rewind(0)

    def capture(ids: list[np.ndarray], all_TF: Any, vlh_TH: Any, beat: Callable[[], None]) -> None:
        made.in_forward = True
        made.during_forward()
        for states in (all_TF, vlh_TH):
            beat()
            states[: len(ids[0])] = torch.nan if ids[0][0] == NAN_TOKEN else float(ids[0][0])
        made.in_forward = False

    target: Any = SimpleNamespace(device="cpu", capture=capture)
    monkeypatch.setattr(target_worker, "Outbox", LateOutbox)
    monkeypatch.setattr(target_worker, "pin", lambda ring: PinReport(0, 0.0, "why"))
    monkeypatch.setattr(LateOutbox, "queries", 5)
    monkeypatch.setattr(target_worker.child, "stop_requested", lambda: made.stopping())
    filler = StagedFiller(writer, target, config, arch, Spans(None, "cpu"))
    made: Worker = Worker(writer, reader, config, arch, filler)
    yield made
    writer.leave()
    reader.leave()
    destroy(path, force=True)


def test_slots_come_in_order_and_whole_each_after_its_own_copy(worker: Worker) -> None:
    for seq in range(6):
        worker.fill(worker.filler.claim())
        assert worker.states()[seq] == "WRITING"
        if seq:
            worker.take(seq - 1)
    worker.filler.finish()
    worker.take(5)


def test_a_copy_that_lands_under_the_next_forward_is_published_there(worker: Worker) -> None:
    LateOutbox.queries = None
    worker.fill(worker.filler.claim())
    lease = worker.filler.claim()
    copy = LateOutbox.sent[0]

    def land() -> None:
        assert worker.states() == {0: "WRITING", 1: "WRITING"}
        copy.states = copy.land()
        LateOutbox.queries = 0

    worker.during_forward = land
    seen: list[bool] = []
    publish = worker.ring.publish

    def note(*args: Any, **kwargs: Any) -> bool:
        seen.append(worker.in_forward)
        return publish(*args, **kwargs)

    worker.ring.publish = note  # type: ignore[method-assign]
    worker.fill(lease)
    assert seen == [True]
    worker.take(0)


def test_a_copy_that_lands_during_the_wait_for_a_free_slot_is_published(worker: Worker) -> None:
    """The ring is full: three READY, and the one that leaves."""
    for _ in range(SLOTS):
        worker.fill(worker.filler.claim())
    assert worker.states() == {0: "READY", 1: "READY", 2: "READY", 3: "WRITING"}
    asked = []

    def stop() -> bool:
        asked.append(worker.states()[3])
        return asked[-1] == "READY" or len(asked) > 50

    target_worker.child.stop_requested = stop
    with pytest.raises(Stopped):
        worker.filler.claim()
    assert asked[0] == "WRITING" and asked[-1] == "READY"
    for seq in range(SLOTS):
        worker.take(seq)


def test_a_stop_waits_for_the_copy_and_leaves_its_slot_whole(worker: Worker) -> None:
    worker.fill(worker.filler.claim())
    worker.stop = True
    with pytest.raises(Stopped):
        worker.filler.claim()
    assert worker.states() == {0: "WRITING"}
    worker.filler.finish()
    worker.take(0)
    worker.filler.finish()  # nothing more to do


def test_a_slot_of_before_a_rewind_is_given_up_once_its_copy_has_landed(worker: Worker) -> None:
    worker.fill(worker.filler.claim())
    worker.fill(worker.filler.claim())
    worker.reader.rewind(0)
    old = [slot for slot in snapshot(worker.config.ring.path).slots if slot.state == "WRITING"]
    again = worker.filler.claim()
    assert again is not None and again.seq == 0
    assert [slot.seq for slot in old] == [1] and again.slot != old[0].index
    worker.fill(again)
    worker.fill(worker.filler.claim())
    worker.take(0)
    worker.filler.finish()
    worker.take(1)
    assert worker.states() == {}


def test_states_that_are_not_finite_are_made_again_and_the_third_time_poison(
    worker: Worker,
) -> None:
    worker.fill(worker.filler.claim())
    worker.fill(worker.filler.claim(), nan=True)
    for _ in range(2):
        lease = worker.filler.claim()
        assert lease is not None
        worker.fill(lease, nan=lease.seq == 1)
    worker.take(0)
    with pytest.raises(Poisoned, match="seq 1"):
        for _ in range(6):
            lease = worker.filler.claim()
            assert lease is not None
            worker.fill(lease, nan=lease.seq == 1)
    worker.filler.finish()
    assert "WRITING" not in worker.states().values()
    assert worker.states()[2] == "READY"


@pytest.mark.parametrize("waits_in", ["claim", "finish"])
def test_a_gpu_that_hangs_ends_the_worker_by_name(
    worker: Worker, waits_in: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In a full ring, where it would wait for ever and show signs of life."""
    for _ in range(SLOTS - 1):
        worker.fill(worker.filler.claim())
    lease = worker.filler.claim()
    LateOutbox.queries = None
    worker.fill(lease)
    worker.filler.stall_s = 0.02
    with pytest.raises(SystemExit) as ended:
        getattr(worker.filler, waits_in)()
    assert ended.value.code == 1 and "slot 3: not out of the GPU after 0.02 s" in caplog.text
    worker.filler.finish()  # does not wait again
    assert worker.states()[3] == "WRITING"


def test_a_failing_forward_still_leaves_the_slot_before_it_whole(worker: Worker) -> None:
    """As target_worker.run does: `finish` whatever happens."""
    worker.fill(worker.filler.claim())

    def out_of_memory() -> None:
        raise torch.OutOfMemoryError

    worker.during_forward = out_of_memory
    with pytest.raises(torch.OutOfMemoryError):
        worker.fill(worker.filler.claim())
    worker.filler.finish()
    worker.take(0)
    assert worker.states() == {1: "WRITING"}  # its maker dies; the ring makes it again
