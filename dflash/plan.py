"""Which documents fill slot number `seq`: a pure function of (lengths, seed, slot size). No torch.

    plan = Plan(lengths_N, seed=0, max_tokens=4096, max_docs=64)
    plan.slot(seq)        document indices of that slot, longest first
    plan.data_pass(seq)   how often the whole data has been used before that slot

Every data pass has the same number of slots and uses each document exactly once, so seq alone
names pass and slot: no state, no queue, any call order, any process. A pass is dealt like cards:
documents sorted by length are cut into strata of one document a slot, so every slot gets its share
of long, middling and short ones. Inside a stratum the longest document goes to the slot that looks
emptiest, and the look errs at random by about one document (`temperature`): that shuffles the
company of every document from pass to pass, while later strata, shorter, level the fills.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

MAX_FILL = 0.98
"""Aimed at by the slot count. The rest is the room that random dealing needs."""
TEMPERATURES = (1.0, 0.5, 0.25, 0.1, 0.03, 0.0)
"""Tried in turn until a pass fits. At 0 it always does: that is how the slot count was found."""
PASSES_KEPT = 2
"""Dealt passes held in memory: workers near a border ask for both sides."""


class Plan:
    def __init__(self, lengths_N: Ints, *, seed: int, max_tokens: int, max_docs: int) -> None:
        assert len(lengths_N) > 0, "a plan needs documents"
        assert lengths_N.min() >= 1 and lengths_N.max() <= max_tokens, "a document exceeds a slot"
        self.seed, self.max_tokens, self.max_docs = seed, max_tokens, max_docs
        self.order_N: Ints = np.argsort(-lengths_N, kind="stable").astype(np.int64)
        self.sorted_N: Ints = lengths_N[self.order_N].astype(np.int64)
        self.slots_per_pass = self._count_slots()
        self._dealt: dict[int, tuple[Ints, Ints]] = {}

    @property
    def fill(self) -> float:
        """Mean share of a slot that holds tokens, the same in every pass."""
        return float(self.sorted_N.sum() / (self.slots_per_pass * self.max_tokens))

    def data_pass(self, seq: int) -> int:
        return seq // self.slots_per_pass

    def slot(self, seq: int) -> Ints:
        """Indices of the documents of slot `seq` in packed order, longest first."""
        assert seq >= 0
        docs_N, starts_S1 = self._pass(self.data_pass(seq))
        index = seq % self.slots_per_pass
        return docs_N[starts_S1[index] : starts_S1[index + 1]]

    def _pass(self, data_pass: int) -> tuple[Ints, Ints]:
        """The pass slot by slot: document indices, and where each slot starts (slots + 1)."""
        if data_pass not in self._dealt:
            while len(self._dealt) >= PASSES_KEPT:
                del self._dealt[min(self._dealt)]
            self._dealt[data_pass] = self._deal_pass(data_pass)
        return self._dealt[data_pass]

    def _deal_pass(self, data_pass: int) -> tuple[Ints, Ints]:
        for attempt, temperature in enumerate(TEMPERATURES):
            rng = np.random.Generator(np.random.PCG64([self.seed, data_pass, attempt]))
            slot_N = self._deal(self.slots_per_pass, temperature, rng)
            if slot_N is not None:
                break
        assert slot_N is not None, "the slot count was chosen so that temperature 0 fits"
        shuffle_S = np.argsort(rng.random(self.slots_per_pass), kind="stable")
        slot_N = shuffle_S[slot_N]
        by_slot_N = np.argsort(slot_N, kind="stable")  # stable: longest first stays
        starts_S1 = np.searchsorted(slot_N[by_slot_N], np.arange(self.slots_per_pass + 1))
        docs_N = self.order_N[by_slot_N]
        docs_N.flags.writeable = False  # slots are views of it
        return docs_N, starts_S1

    def _count_slots(self) -> int:
        """About the fewest slots that hold every document when dealt without randomness."""
        total, docs = int(self.sorted_N.sum()), len(self.sorted_N)
        slots = max(
            -(-total // max(1, int(self.max_tokens * MAX_FILL))),
            -(-docs // self.max_docs),
            int((2 * self.sorted_N > self.max_tokens).sum()),  # no two of these share a slot
        )
        slots = min(slots, docs)
        while self._deal(slots, 0.0, None) is None:
            slots = min(docs, slots + 1 + slots // 128)
        return slots

    def _deal(self, slots: int, temperature: float, rng: np.random.Generator | None) -> Ints | None:
        """Slot of every document (in sorted order); None as soon as one fits nowhere."""
        lengths_N, slot_N = self.sorted_N, np.empty(len(self.sorted_N), np.int64)
        fill_S, docs_S = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
        for first in range(0, len(lengths_N), slots):
            stratum = lengths_N[first : first + slots]
            look_S = fill_S.astype(np.float64)
            if rng is not None:
                look_S += temperature * stratum.mean() * (2 * rng.random(slots) - 1)
            place = np.argsort(look_S, kind="stable")[: len(stratum)]
            fits = (fill_S[place] + stratum <= self.max_tokens) & (docs_S[place] < self.max_docs)
            fill_S[place[fits]] += stratum[fits]
            docs_S[place[fits]] += 1
            if not fits.all():
                misfits = self._place_by_room(stratum[~fits], fill_S, docs_S)
                if misfits is None:
                    return None
                place[~fits] = misfits
            slot_N[first : first + len(stratum)] = place
        return slot_N

    def _place_by_room(self, lengths: Ints, fill_S: Ints, docs_S: Ints) -> Ints | None:
        """Slot of each of these, longest first, always the emptiest; fills grow in place."""
        heap = [
            (int(fill), slot) for slot, fill in enumerate(fill_S) if docs_S[slot] < self.max_docs
        ]
        heapq.heapify(heap)
        places = np.empty(len(lengths), np.int64)
        for n, length in enumerate(lengths.tolist()):
            if not heap or heap[0][0] + length > self.max_tokens:
                return None
            fill, slot = heap[0]
            places[n] = slot
            fill_S[slot] += length
            docs_S[slot] += 1
            if docs_S[slot] < self.max_docs:
                heapq.heapreplace(heap, (fill + length, slot))
            else:
                heapq.heappop(heap)
        return places
