"""A soak of the ring: 3 writers x 3 readers on 12 slots, killed, stopped and rewound at random.

    python tests/unit/ring_soak.py [KILLS] [SEED]         (`make soak`: 500 kills)

Writers are killed (SIGKILL) and stopped alone; readers are a trainer: when one is killed all are,
and a new group rewinds to somewhere up to 8 slots back. Each process also aborts, gives back and
seals wrong sums now and then. What every process did stands in its own log, a line at a time:
"took" before and "acked" after each acknowledgement. `judge` reads them.

Processes are forked from this one, which is no party, so 500 of them cost a minute.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

from rings import FIELDS, fill, holds_payload, new_path, new_ring

from shm_ring import (
    Poisoned,
    RingReader,
    RingWriter,
    StaleLease,
    clear_closed,
    destroy,
    leftovers,
    snapshot,
)

WRITERS, READERS, SLOTS = 3, 3, 12
LAST_SLOTS = 60
"""Of the quiet run at the end, which must go through."""
FORK = multiprocessing.get_context("fork")


class Log:
    """Lines "word epoch seq", each in one write, so that a kill loses at most the next one."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self, word: str, epoch: int, seq: int) -> None:
        os.write(self._fd, f"{word} {epoch} {seq}\n".encode())


def dawdle(rng: random.Random) -> None:
    """So that kills and stops meet held slots, a full ring and an empty one."""
    if rng.random() < 0.1:
        time.sleep(rng.random() * 0.03)


def write(path: Path, name: str, log: Log, rng: random.Random) -> None:
    """Until the run is over. After a POISON it waits for the rewind: here nobody ends it."""
    writer = RingWriter(path, name, fields=FIELDS)
    while True:
        try:
            lease = writer.claim()
        except Poisoned:
            time.sleep(0.05)
            continue
        if lease is None:
            break
        total_tok = fill(lease)
        dawdle(rng)
        fate = rng.random()
        if fate < 0.01:
            writer.abort(lease)
            continue
        wrong = [1] * len(FIELDS) if fate < 0.02 else None
        ok = writer.publish(lease, total_tok=total_tok, sums=wrong)
        log("published" if ok else "refused", lease.epoch, lease.seq)
    writer.leave()


def read(path: Path, name: str, log: Log, rng: random.Random, epoch: int, first: int) -> None:
    """Every READERS-th seq from `first` on, in this epoch only, to the run's end."""
    reader = RingReader(path, name, fields=FIELDS)
    reader.follow(epoch)
    seq = first
    while seq < reader.end_seq:
        try:
            lease = reader.take(seq)
        except Poisoned:
            log("poison", epoch, seq)
            return
        except StaleLease:
            return
        log("took", lease.epoch, seq)
        dawdle(rng)
        if not holds_payload(lease):
            log("torn", lease.epoch, seq)
        if rng.random() < 0.02:
            reader.give_back(lease)
            log("gave_back", lease.epoch, seq)
            continue
        if not reader.done(lease):
            log("refused", lease.epoch, seq)
            return
        log("acked", lease.epoch, seq)
        seq += READERS
    reader.leave()


def rewind(path: Path, name: str, log: Log, rng: random.Random, base: int) -> None:
    reader = RingReader(path, name, fields=FIELDS)
    log("rewound", reader.rewind(base), base)
    reader.leave()


@dataclass
class Soak:
    path: Path
    logs: Path
    rng: random.Random
    writers: list[BaseProcess] = field(default_factory=list)
    readers: list[BaseProcess] = field(default_factory=list)
    stopped: dict[int, float] = field(default_factory=dict)
    """pid: when it goes on."""
    killed: set[str] = field(default_factory=set)
    did: Counter[str] = field(default_factory=Counter)
    all: list[BaseProcess] = field(default_factory=list)

    def start(self, body: Callable[..., None], *argv: object) -> BaseProcess:
        """Names are new each time: the log of a name is of one process."""
        name = f"{body.__name__}_{len(self.all)}"
        log, rng = Log(self.logs / name), random.Random(self.rng.random())
        process = FORK.Process(target=body, name=name, args=(self.path, name, log, rng, *argv))
        process.start()
        self.all.append(process)
        os.close(log._fd)
        return process

    def start_writer(self) -> None:
        self.writers.append(self.start(write))

    def start_readers(self) -> None:
        """A trainer of READERS ranks, after a rewind to somewhere up to 8 slots back."""
        base = max(0, snapshot(self.path).tail - self.rng.randrange(9))
        rewinder = self.start(rewind, base)
        while rewinder.is_alive():  # it may wait for a process that was stopped in CTRL
            self.wake()
            time.sleep(0.001)
        assert rewinder.exitcode == 0
        epoch = snapshot(self.path).epoch
        self.readers = [self.start(read, epoch, base + rank) for rank in range(READERS)]

    def kill(self, process: BaseProcess) -> None:
        if process.is_alive():
            self.killed.add(process.name)
            self.did["kills"] += 1
        process.kill()
        process.join()

    def kill_writer(self) -> None:
        self.kill(self.writers.pop(self.rng.randrange(WRITERS)))
        self.start_writer()

    def kill_readers(self) -> None:
        for process in self.readers:
            self.kill(process)
        self.start_readers()

    def stop_one(self) -> None:
        process = self.rng.choice(self.writers + self.readers)
        with suppress(ProcessLookupError):
            assert process.pid is not None
            os.kill(process.pid, signal.SIGSTOP)
            self.stopped[process.pid] = time.monotonic() + self.rng.random() * 0.4
            self.did["stops"] += 1

    def wake(self, all_of_them: bool = False) -> None:
        for pid, when in list(self.stopped.items()):
            if all_of_them or time.monotonic() > when:
                del self.stopped[pid]
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def disturb(self, kills: int) -> None:
        actions = [self.kill_writer, self.kill_writer, self.kill_readers, self.stop_one]
        while self.did["kills"] < kills:
            time.sleep(self.rng.random() * 0.12)
            self.wake()
            self.rng.choice(actions)()
            if not any(process.is_alive() for process in self.readers):
                self.did["ended by poison"] += 1
                self.start_readers()

    def die_whole(self) -> None:
        self.wake(all_of_them=True)
        for process in self.writers + self.readers:
            self.kill(process)
        self.writers = []

    def finish(self) -> None:
        """A new run on this ring, undisturbed: it must go through and end by itself."""
        clear_closed(self.path, snapshot(self.path).tail + LAST_SLOTS)
        for _ in range(WRITERS):
            self.start_writer()
        self.start_readers()
        for process in self.readers:
            process.join()
        if snapshot(self.path).tail == snapshot(self.path).end_seq:
            closer = RingReader(self.path, "closer", fields=FIELDS)
            closer.follow(snapshot(self.path).epoch)
            closer.close_run()
            closer.leave()
        for process in self.writers:
            process.join(timeout=60)


def judge(soak: Soak) -> None:
    """Asserts what docs/ring.md promises, from the logs and from what is left of the ring."""
    took: Counter[tuple[int, int]] = Counter()
    acked: Counter[tuple[int, int]] = Counter()
    allowed: Counter[tuple[int, int]] = Counter()
    unsure: set[tuple[int, int]] = set()
    lost: set[tuple[int, int]] = set()
    for log in soak.logs.iterdir():
        lines = [line.split() for line in log.read_text().splitlines()]
        events = [(word, (int(epoch), int(seq))) for word, epoch, seq in lines]
        soak.did.update(word for word, _ in events)
        took.update(what for word, what in events if word == "took")
        acked.update(what for word, what in events if word == "acked")
        allowed.update(what for word, what in events if word == "gave_back")
        if log.name in soak.killed and events and events[-1][0] == "took":
            allowed[events[-1][1]] += 1  # the death of a holder
            unsure.add(events[-1][1])  # acknowledged, or not
    failed = {p.name for p in soak.all if p.exitcode not in (0, -signal.SIGKILL)}
    assert not failed, f"these ended by an error of their own: {failed}"
    assert soak.did["torn"] == 0, "a payload was torn"
    assert max(acked.values()) == 1, "a seq was acknowledged twice in one epoch"
    over = {what: n for what, n in took.items() if n > 1 + allowed[what]}
    assert not over, f"delivered too often: {over}"
    view = snapshot(soak.path)
    for epoch, seq in took:
        before = (epoch, seq - READERS)  # its reader took this one earlier
        if before in took and before not in acked:
            lost.add(before)
    assert lost <= unsure, f"taken, never acknowledged, and passed over: {lost - unsure}"
    whole = range(view.base_seq, view.end_seq)
    assert {seq for epoch, seq in acked if epoch == view.epoch} == set(whole), "a seq is missing"
    assert (view.head, view.tail, view.closed) == (view.end_seq, view.end_seq, True)
    assert {slot.state for slot in view.slots} <= {"EMPTY", "CONSUMED"}
    assert not [party for party in view.parties if party.status in ("alive", "suspect")]


def soak(kills: int, seed: int) -> Counter[str]:
    """Runs one and judges it. What happened, counted."""
    path = new_ring(new_path(), slots=SLOTS, end_seq=10**9)
    with tempfile.TemporaryDirectory() as logs:
        run = Soak(path, Path(logs), random.Random(seed))
        try:
            for _ in range(WRITERS):
                run.start_writer()
            run.start_readers()
            run.disturb(kills)
            run.die_whole()
            # What a killed process held may be in quarantine: nothing to wait for.
            run.finish()
            judge(run)
            counters = snapshot(path).counters
            destroy(path)  # it refuses while a party seems to live
        finally:
            run.wake(all_of_them=True)
            for process in run.writers + run.readers:
                process.kill()
            if path.exists():
                destroy(path, force=True)
    assert not [left for left in leftovers(path.parent) if path.name in left.path.name]
    run.did.update({f"ring: {name}": values[0] for name, values in counters.items()})
    return run.did


if __name__ == "__main__":
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(2**32)
    print(f"seed {seed}", flush=True)
    begin = time.monotonic()
    for what, count in sorted(soak(kills, seed).items()):
        print(f"{count:9,} {what}")
    print(f"passed in {time.monotonic() - begin:.0f} s")
