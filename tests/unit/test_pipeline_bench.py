"""The parts of `bench pipeline`: rates from counters, the bench's place in the ring, its halves."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rings import new_path
from tiny_step import make_arch, make_config

from benchmarks.halves import BenchFailed, Halves
from benchmarks.pipeline_figures import lasting, least
from benchmarks.stand_in import StandIn
from benchmarks.watch import Rate, Seen, Smi, Watch, Window
from dflash.data import DataOptions, prepare_random
from dflash.random_documents import RandomDocuments
from launcher.process import Program, StopSignals
from launcher.slot import slot_fields
from shm_ring import RingReader, RingWriter, create, destroy
from shm_ring import layout as at

SLOTS = 4


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A ring, and what the preflight would know of its run."""
    monkeypatch.setenv("DFLASH_RING_CACHE", str(tmp_path))
    config, arch = make_config(loss="kl"), make_arch()
    config = config.model_copy(update={"ring": config.ring.model_copy(update={"path": new_path()})})
    random = RandomDocuments.parse("random:40x20")
    assert random is not None
    options = DataOptions(max_tokens=96, heldout=0.0, min_supervised_tokens=1)
    dataset, _ = prepare_random(random, arch.vocab_size, options)
    fields = slot_fields(config, arch)
    create(config.ring.path, fields, SLOTS, end_seq=10**6, run_name="test")
    yield SimpleNamespace(
        config=config, arch=arch, fields=fields, prepared=SimpleNamespace(dataset=str(dataset))
    )
    destroy(config.ring.path, force=True)


@pytest.fixture
def stand_in(place: Any) -> Iterator[StandIn]:
    stand_in = StandIn(place.config, place)
    yield stand_in
    stand_in.writer.leave()


@pytest.fixture
def reader(place: Any) -> Iterator[RingReader]:
    reader = RingReader(place.config.ring.path, "trainer_0", fields=place.fields)
    yield reader
    reader.leave()


def test_filled_slots_hold_the_plan_s_documents_and_finite_states(
    stand_in: StandIn, reader: RingReader
) -> None:
    stand_in.fill(2)
    lengths = set()
    for seq in range(2):
        lease = reader.take(seq)  # its sums fit
        lens = lease.array("lens")
        assert lens.sum() == lease.total_tok > 80
        states = lease.array("all").astype(np.uint32) << 16
        assert 0.9 < states.view(np.float32).std() < 1.1
        lengths.add(tuple(lens))
        reader.done(lease)
    assert len(lengths) == 2


def test_a_held_seq_keeps_the_trainer_waiting_until_it_is_let_go(
    stand_in: StandIn, reader: RingReader
) -> None:
    stand_in.fill(1)
    assert stand_in.hold() == 1
    stand_in.fill(1)
    reader.done(reader.take(0))
    watch, polls = Watch(stand_in.writer), []

    def look() -> bool:
        """Asked at each wake-up of the waiting reader."""
        polls.append(watch.waits_for_slots("trainer_0"))
        if len(polls) == 3:
            stand_in.let_go()
        return False

    reader.done(reader.take(1, stop=look))
    assert polls[:3] == [False, True, True]  # it asks once before it waits
    assert reader.take(2).seq == 2


def test_feeding_gives_every_slot_again_as_it_was_and_fills_what_never_was(
    stand_in: StandIn, reader: RingReader, place: Any
) -> None:
    """Of four slots one has an honest writer's bytes, one was given up half written, two are new.
    The reader checks all sums; the honest bytes come around every four seqs."""
    target = RingWriter(place.config.ring.path, "target_0", fields=place.fields)
    lease = target.claim()
    assert lease is not None
    lease.array("ids")[0, :5] = 7, 8, 9, 10, 11
    target.publish(lease, total_tok=5)
    reader.done(reader.take(0))
    given_up = target.claim()
    assert given_up is not None
    given_up.array("ids")[0, :5] = -1
    target.leave()

    with stand_in.feeding():
        found = []
        for seq in range(1, 10):
            taken = reader.take(seq)
            found.append((taken.slot, taken.total_tok, taken.array("ids")[0, :5].tolist()))
            reader.done(taken)
    assert stand_in.fed_all
    honest = [(tokens, ids) for slot, tokens, ids in found if slot == lease.slot]
    assert len(honest) >= 2 and set(map(str, honest)) == {str((5, [7, 8, 9, 10, 11]))}
    others = {slot: tokens for slot, tokens, _ in found if slot != lease.slot}
    assert set(others) == {1, 2, 3} and min(others.values()) > 5
    assert all(-1 not in ids for _, _, ids in found)


def test_rates_run_from_the_first_hand_over_in_the_window_to_the_last(stand_in: StandIn) -> None:
    watch = Watch(stand_in.writer)
    watch.history["target_0"] = [Seen(10.0 + 2 * i, i, 100 * i) for i in range(9)]
    watch.history["target_1"] = [Seen(10.0 + 4 * i, i, 100 * i) for i in range(5)]
    window = Window(11.0, 25.0)  # 12, 14, ... 24 of the one; 14, 18, 22 of the other
    assert watch.rate(["target_0"], window) == Rate(6, 50.0, 0.5)
    assert watch.rate(["target_0", "target_1"], window) == Rate(8, 75.0, 0.75)
    assert watch.rate(["target_1"], Window(11.0, 17.0)) is None
    assert watch.rate(["target_2"], window) is None


def test_slots_that_stand_ready_give_a_rate_by_the_ring_s_own_times(stand_in: StandIn) -> None:
    watch = Watch(stand_in.writer)
    stand_in.fill(SLOTS)
    for slot, (at_s, tokens) in enumerate([(1, 50), (5, 60), (6, 70), (8, 80)]):
        words = stand_in.writer._view.slots[slot]
        words[at.PUBLISHED_NS], words[at.TOTAL_TOK] = at_s * 10**9, tokens
    assert watch.made(-1, skip=1) == (Window(5, 8), Rate(2, 150 / 3, 2 / 3))
    # Never so few that nothing is left to measure.
    assert watch.made(-1, skip=9) == (Window(6, 8), Rate(1, 80 / 2, 1 / 2))
    assert watch.made(1, skip=0) == (Window(6, 8), Rate(1, 80 / 2, 1 / 2))
    assert watch.made(2, skip=0) is None


def test_figures_of_nvidia_smi_are_means_over_the_window_by_its_own_times() -> None:
    """Lines as it prints them; what it can't tell (`[N/A]`) is left out."""
    smi, now_s = Smi(), time.monotonic()
    for ago_s, cells in [
        (9, "50, 300.00, 1500"),
        (5, "90, 600.50, 1980"),
        (4, "100, 699.50, 1900"),
    ]:
        stamp = datetime.now() - timedelta(seconds=ago_s)
        smi.note(f"{stamp:%Y/%m/%d %H:%M:%S.%f}"[:-3] + f", GPU-a, {cells}\n")
    smi.note(f"{datetime.now():%Y/%m/%d %H:%M:%S.%f}"[:-3] + ", GPU-a, [N/A], 600.0, 1900\n")
    window = Window(now_s - 6, now_s + 1)
    want = {"utilization.gpu": 95.0, "power.draw": 650.0, "clocks.sm": 1940.0}
    assert smi.means("GPU-a", window) == want
    assert smi.means("GPU-b", window) is None
    smi.close()


def test_the_pipeline_is_as_fast_as_its_slower_side_and_unknown_without_one() -> None:
    assert least(3.0, 2.0) == 2.0
    assert least(3.0, None) is None


def programs(tmp_path: Path, target: str, trainer: str) -> list[Program]:
    prelude = "import sys, time; from launcher import child\n"
    return [
        Program(name, (sys.executable, "-c", prelude + code), tmp_path / f"{name}.log")
        for name, code in (("target_0", target), ("trainer_0", trainer))
    ]


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_side_that_lived_on_a_backlog_counts_for_what_will_last() -> None:
    """45 slots trained while 40 were made: the trainer would have waited a ninth of the time."""
    shares = lasting({"target_0": 0.9, "trainer_0": 1.0}, {"made": 40.0, "trained": 45.0})
    assert shares == {"target_0": 0.9, "trainer_0": 40 / 45}
    shares = lasting({"target_0": 1.0, "trainer_0": 0.8}, {"made": 50.0, "trained": 40.0})
    assert shares == {"target_0": 0.8, "trainer_0": 0.8}
    assert lasting({"trainer_0": 1.0}, {"made": None, "trained": 40.0}) == {}


def test_target_workers_stand_still_at_ready_until_they_are_released(tmp_path: Path) -> None:
    mark = tmp_path / "went_on"
    slow_to_stop = "import os; k = os.kill; os.kill = lambda p, s: (time.sleep(0.5), k(p, s)); "
    target = f"{slow_to_stop}child.ready(); open({str(mark)!r}, 'w'); time.sleep(60)"
    with StopSignals() as signals:
        halves = Halves(programs(tmp_path, target, "child.ready(); time.sleep(60)"), signals)
        try:
            wait_for(lambda: halves.look() or halves.ready)
            assert not mark.exists()
            halves.release()
            wait_for(mark.exists)
            halves.end_targets()
            assert not halves.targets[0].alive
            halves.look()  # that one's end is no failure
        finally:
            halves.close()
        assert not halves.children[-1].alive


def test_a_half_that_ends_ends_the_bench_with_the_end_of_its_log(tmp_path: Path) -> None:
    code = "print('what went wrong'); sys.exit(1)"
    with StopSignals() as signals:
        halves = Halves(programs(tmp_path, "time.sleep(60)", code), signals)
        try:
            with pytest.raises(BenchFailed, match="trainer_0 exited with code 1") as caught:
                wait_for(lambda: halves.look())
            assert "what went wrong" in str(caught.value) and caught.value.code == 1
        finally:
            halves.close()


def test_a_stop_signal_ends_the_bench(tmp_path: Path) -> None:
    with StopSignals() as signals:
        halves = Halves(programs(tmp_path, "time.sleep(60)", "time.sleep(60)"), signals)
        try:
            halves.look()
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(BenchFailed) as caught:
                halves.look()
            assert caught.value.code == 130
        finally:
            halves.close()
