"""The trainer's loop on a GPU: which slot it holds when, and what becomes of it. On a CPU, with the
streams' stand-ins, over a real ring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from rings import new_path
from streams import Race
from tiny_step import make_arch, make_batch, make_config

import drafter_trainer
from dflash.feed import Feed
from dflash.slot import slot_shapes, slot_views
from dflash.spans import Spans
from dflash.step import Batch
from drafter_trainer import CopiedSlots
from launcher.slot import slot_fields
from shm_ring import Poisoned, RingReader, RingWriter, Stopped, create, destroy, snapshot
from shm_ring.pin import PinReport

SLOTS, SEQS, LENS = 4, 6, (30, 21, 9)


@dataclass
class Trainer:
    writer: RingWriter
    slots: CopiedSlots
    race: Race
    stop: bool = False

    def make(self, seq: int, *, broken: bool = False) -> None:
        """Its states are all `seq`; broken: not those that were summed."""
        lease = self.writer.claim()
        assert lease is not None and lease.seq == seq
        with self.race.host():
            views, batch = self.views(lease), make_batch(LENS)
            for name in ("ids_T", "lm_T", "lens_D", "pos_T", "total_tok"):
                getattr(views, name).copy_(getattr(batch, name))
            views.all_TF.fill_(seq)
        self.writer.publish(lease, total_tok=sum(LENS))
        if broken:
            views.all_TF[3, 1] += 1

    def views(self, lease: Any) -> Batch:
        return slot_views(lease.buffer, self.slots.config, self.slots.arch)

    def step(self, seq: int) -> None:
        batch = self.slots.batch(seq)
        assert (batch.all_TF[: sum(LENS)] + 0 == seq).all()

    def states(self) -> dict[int, str]:
        view = snapshot(self.slots.config.ring.path)
        return {slot.seq: slot.state for slot in view.slots if slot.seq is not None}


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainer]:
    config, arch, path = make_config(), make_arch(), new_path()
    config = config.model_copy(
        update={
            "target": config.target.model_copy(update={"dtype": "float32"}),
            "ring": config.ring.model_copy(update={"path": path}),
        }
    )
    fields = slot_fields(config, arch)
    create(path, fields, SLOTS, end_seq=SEQS, run_name="test", quarantine_s=0.05)
    writer = RingWriter(path, "target_0", fields=fields)
    reader = RingReader(path, "trainer_0", fields=fields, verify=False)
    reader.rewind(0)
    monkeypatch.setattr(drafter_trainer, "pin", lambda ring: PinReport(0, 0.0, "why"))
    monkeypatch.setattr(drafter_trainer.child, "stop_requested", lambda: made.stop)
    with Race() as race:
        spans = Spans(None, "cpu")
        feed = Feed(slot_shapes(config, arch), "cpu", spans)
        slots = CopiedSlots(reader, config, arch, spans, feed)
        made: Trainer = Trainer(writer, slots, race)
        yield made
    reader.leave()
    writer.leave()
    destroy(path, force=True)


def test_a_slot_is_free_before_its_steps_end_and_the_next_is_on_its_way(trainer: Trainer) -> None:
    for seq in range(3):
        trainer.make(seq)
    for seq in range(SEQS):
        trainer.step(seq)
        assert seq not in trainer.states()  # free for the target workers
        if seq + 3 < SEQS:
            trainer.make(seq + 3)
        trainer.step(seq)  # another pass on it: nothing more is taken
        trainer.slots.finished(seq)
        assert "READING" not in trainer.states().values()
        trainer.slots.finished(seq + 1)
        assert trainer.states().get(seq + 1) == ("READING" if seq + 1 < SEQS else None)
    trainer.slots.give_back()
    assert trainer.race.found == []


def test_bytes_that_are_not_those_sealed_are_made_again(trainer: Trainer) -> None:
    trainer.make(0, broken=True)
    made_again = []
    take = trainer.slots.ring.take

    def make_then_take(seq: int, **options: Any) -> Any:
        if trainer.states() == {0: "REDO"}:
            made_again.append(seq)
            trainer.make(0)
        return take(seq, **options)

    trainer.slots.ring.take = make_then_take  # type: ignore[method-assign]
    trainer.step(0)
    assert made_again == [0] and trainer.states() == {}


def test_the_third_time_it_is_poison_and_the_steps_before_it_stand(trainer: Trainer) -> None:
    trainer.make(0)
    trainer.make(1, broken=True)
    trainer.step(0)
    trainer.slots.finished(1)
    take, made = trainer.slots.ring.take, []

    def break_then_take(seq: int, **options: Any) -> Any:
        if trainer.states() == {1: "REDO"}:
            made.append(seq)
            trainer.make(1, broken=True)
        return take(seq, **options)

    trainer.slots.ring.take = break_then_take  # type: ignore[method-assign]
    with pytest.raises(Poisoned, match="seq 1"):
        trainer.step(1)
    assert made == [1, 1]
    trainer.slots.give_back()  # nothing is held


def test_a_stop_gives_back_the_slot_that_was_on_its_way(trainer: Trainer) -> None:
    trainer.make(0)
    trainer.make(1)
    trainer.step(0)
    trainer.slots.finished(1)
    feed, seen = trainer.slots.feed, []
    assert feed is not None
    wait = feed.wait

    def note_then_wait() -> list[int]:
        seen.append(trainer.states()[1])
        return wait()

    feed.wait = note_then_wait  # type: ignore[method-assign]
    trainer.stop = True
    trainer.slots.give_back()
    assert seen == ["READING"]  # until its copy has ended
    assert trainer.states() == {1: "READY"}
    assert trainer.race.found == []


def test_after_a_stop_no_slot_is_taken(trainer: Trainer) -> None:
    trainer.make(0)
    trainer.step(0)
    trainer.stop = True
    trainer.slots.finished(1)  # does not wait for one that nobody makes
    with pytest.raises(Stopped):
        trainer.slots.batch(1)
    trainer.slots.give_back()
    assert torch.equal(trainer.slots.batch(0).total_tok, torch.tensor(sum(LENS)))


def test_the_step_is_compiled_for_the_shapes_that_slots_have(trainer: Trainer) -> None:
    """Before there is a slot: the captured step's batch is what the feed fills."""
    lease = trainer.writer.claim()
    assert lease is not None
    views, batch = vars(trainer.views(lease)), vars(trainer.slots.feed.batch)
    assert views.keys() == batch.keys()
    for name, view in views.items():
        if view is None:
            assert batch[name] is None
        else:
            assert (batch[name].shape, batch[name].dtype) == (view.shape, view.dtype)
            assert not batch[name].any()


def test_pages_that_are_not_locked_are_a_warning(
    trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    """Which the launcher shows: copies are then an eighth as fast."""
    slots = trainer.slots
    CopiedSlots(slots.ring, slots.config, slots.arch, slots.spans, slots.feed)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("trainer", "WARNING")
    assert "copies are slow: why" in record.getMessage()
