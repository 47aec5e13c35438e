"""The bench's own place in the ring: it stands in for the target workers, and holds the trainer up.

stand_in.fill(2)         # two slots of random states: the trainer warms up on them
stand_in.hold()          # the next seq stays in our hands: the trainer waits for it
stand_in.let_go()        # now it comes
with stand_in.feeding(): # every free slot becomes READY at once, with what it holds already
    ...
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dflash.config import Config
from dflash.data import Dataset
from dflash.plan import Plan
from dflash.slot import slot_views, write_documents
from launcher.preflight import Facts
from shm_ring import RingWriter, Stopped, WriteLease
from shm_ring import layout as at

NAME = "bench"
RANDOM_ROWS = 1024


class StandIn:
    def __init__(self, config: Config, facts: Facts) -> None:
        assert facts.prepared is not None
        self._config, self._arch, self._prepared = config, facts.arch, facts.prepared
        verify = config.ring.verify
        self.writer = RingWriter(config.ring.path, NAME, fields=facts.fields, verify=verify)
        self._held: WriteLease | None = None
        self._held_tok = 0
        self.fed_all = False
        """Feeding has come around the whole ring once: from now on nothing is written."""

    def fill(self, count: int) -> None:
        """The next `count` seqs."""
        for _ in range(count):
            lease = self._claim()
            self.writer.publish(lease, total_tok=self._write(lease))

    def hold(self) -> int:
        """Claims the next seq, whose documents are written; returns it."""
        self._held = self._claim()
        self._held_tok = self._write(self._held)
        return self._held.seq

    def let_go(self) -> None:
        assert self._held is not None
        self.writer.publish(self._held, total_tok=self._held_tok)
        self._held = None

    @contextmanager
    def feeding(self) -> Iterator[None]:
        over = threading.Event()
        thread = threading.Thread(target=self._feed, args=(over,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _feed(self, over: threading.Event) -> None:
        view, fed = self.writer._view, set[int]()
        while True:
            try:
                lease = self.writer.claim(stop=over.is_set)
            except Stopped:
                return
            assert lease is not None, "the bench's run has no end"
            words = view.slots[lease.slot]
            if words[at.SEAL_GENERATION] == lease.token.generation - 1 > 0:
                # As its last writer sealed it: nobody has claimed it since. 0: a new slot.
                sums = words[at.SUMS : at.SUMS + words[at.SUM_COUNT]].tolist()
                self.writer.publish(lease, total_tok=int(words[at.TOTAL_TOK]), sums=sums)
            else:
                self.writer.publish(lease, total_tok=self._write(lease))
            fed.add(lease.slot)
            self.fed_all = len(fed) == len(view.slots)

    def _claim(self) -> WriteLease:
        lease = self.writer.claim()
        assert lease is not None, "the bench's run has no end"
        return lease

    def _write(self, lease: WriteLease) -> int:
        """The plan's documents under random states; returns their tokens."""
        dataset = Dataset.load(self._prepared.dataset)
        ring = self._config.ring
        plan = Plan(
            dataset.lengths,
            seed=self._config.run.seed,
            max_tokens=ring.max_tokens,
            max_docs=ring.max_docs,
        )
        slot = slot_views(lease.buffer, self._config, self._arch)
        for states in (slot.all_TF, slot.vlh_TH):
            if states is not None:
                random = torch.randn(min(RANDOM_ROWS, len(states)), states.shape[1]).to(states)
                for part in states.split(len(random)):
                    part.copy_(random[: len(part)])
                    self.writer.beat()
        return write_documents(slot, [dataset.document(int(i)) for i in plan.slot(lease.seq)])
