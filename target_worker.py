"""Half A: plan -> forward -> slot. Runs the frozen target over documents and fills the ring.

    python target_worker.py RUN_DIR --rank I

Started by launch.py, N times; the workers share nothing but the ring. `plan.slot(seq)` says which
documents fill a slot, so it does not matter which worker makes it, nor when, nor how often.
A worker has no state to save: kill it anywhere, and its slot is made again.
"""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from dflash.arch import DrafterArch, TargetArch
from dflash.config import Config, load_config
from dflash.data import Dataset
from dflash.heldout import heldout_file, leave_texts
from dflash.outbox import Leaving, Outbox
from dflash.plan import Plan
from dflash.prepare import Prepared
from dflash.slot import slot_views, write_documents
from dflash.spans import Spans
from dflash.step import DTYPES
from dflash.target import CaptureError, Target
from launcher import child
from launcher.rundir import RunDir
from launcher.slot import slot_fields
from shm_ring import RingWriter, Stopped, WriteLease
from shm_ring.pin import pin
from shm_ring.sums import prefix_sum

log = logging.getLogger("target")


def run(run_dir: Path, rank: int) -> None:
    config = load_config(run_dir / "run.yaml")
    prepared = Prepared.from_json((run_dir / "prepared.json").read_text())
    torch.set_num_threads(config.target.threads)
    torch.set_grad_enabled(False)
    arch = DrafterArch.build(config, TargetArch.read(prepared.target_dir), prepared.mask_token_id)
    dataset = Dataset.load(prepared.dataset)
    plan = Plan(
        dataset.lengths,
        seed=config.run.seed,
        max_tokens=config.ring.max_tokens,
        max_docs=config.ring.max_docs,
    )
    target = load_target(config, prepared, arch)
    try:
        target.self_test([dataset.document(int(doc))[0] for doc in plan.slot(0)[:3]])
    except CaptureError as error:
        child.fail(error)
    if rank == 0 and config.eval.every:
        texts = heldout_file(config, prepared, arch)
        log.info("%s", leave_texts(texts, target, config, dataset, child.check_stop))

    ring = RingWriter(
        config.ring.path,
        f"target_{rank}",
        fields=slot_fields(config, arch),
        verify=config.ring.verify,
    )
    trace = RunDir(run_dir).traces / f"target_{rank}.json" if config.run.trace else None
    spans = Spans(trace, config.target.device)
    filler = (StagedFiller if target.device.type == "cuda" else PageFiller)(
        ring, target, config, arch, spans
    )
    random = "RANDOM WEIGHTS, " if config.target.random_weights else ""
    where = f"{config.target.dtype} on {config.target.device}"
    child.ready(f"{random}{where}, capture self-test passed")
    try:
        while (lease := filler.claim()) is not None:
            names = plan.slot(lease.seq).tolist()
            filler.fill(lease, names, [dataset.document(name) for name in names])
    finally:
        filler.finish()
        spans.close()
    ring.leave()
    log.info("the run is over; waited %.1f s for free slots", ring.waited_s)


def load_target(config: Config, prepared: Prepared, arch: DrafterArch) -> Target:
    return Target.load(
        prepared.target_dir,
        TargetArch.read(prepared.target_dir),
        taps=arch.taps,
        dtype=DTYPES[config.target.dtype],
        device=config.target.device,
        micro_batch_tokens=config.target.micro_batch_tokens,
        random_weights=config.target.random_weights,
    )


Documents = list[tuple[np.ndarray, np.ndarray]]
"""(token ids, loss mask) of each."""


class PageFiller:
    """On a CPU: the forward writes into the ring's own pages."""

    def __init__(
        self, ring: RingWriter, target: Target, config: Config, arch: DrafterArch, spans: Spans
    ) -> None:
        self.ring, self.target, self.config, self.arch = ring, target, config, arch
        self.spans = spans

    def claim(self) -> WriteLease | None:
        """The next slot to fill; None when the run is over. Blocks; raises Stopped."""
        since_s = time.monotonic()
        lease = self.ring.claim(stop=child.stop_requested)
        self.spans.waited("free slot", since_s, None if lease is None else lease.seq)
        return lease

    def fill(self, lease: WriteLease, names: list[int], documents: Documents) -> None:
        slot = slot_views(lease.buffer, self.config, self.arch)
        total_tok = write_documents(slot, documents)
        ids = [ids for ids, _ in documents]
        mark = self.spans.begin("forward")
        self.target.capture(ids, slot.all_TF, slot.vlh_TH, beat=self.ring.beat)
        self.spans.end(mark, lease.seq)
        states = (slot.all_TF,) if slot.vlh_TH is None else (slot.all_TF, slot.vlh_TH)
        finite = all(bool(state[:total_tok].isfinite().all()) for state in states)
        publish(self.ring, lease, names, total_tok, finite=finite)

    def finish(self) -> None:
        """Before the process may end."""


class Underway(NamedTuple):
    """A slot whose copy has been queued."""

    lease: WriteLease
    names: list[int]
    total_tok: int
    host_sums: list[int]
    copy: Leaving
    sent_s: float


class StagedFiller:
    """On a GPU: the host queues the forward of a slot while the one before it is computed and
    copied to its page-locked pages, and waits only for a free slot and for a finished copy."""

    def __init__(
        self, ring: RingWriter, target: Target, config: Config, arch: DrafterArch, spans: Spans
    ) -> None:
        self.ring, self.target, self.config, self.arch = ring, target, config, arch
        self.spans = spans
        locked = pin(ring)
        log.log(locked.level, "%s", locked)
        self.stall_s = config.supervise.stall_s
        self.outbox: Outbox | None = None
        self.leaving: Underway | None = None

    def claim(self) -> WriteLease | None:
        """As PageFiller's. A slot that arrives meanwhile is published."""
        while True:
            since_s = time.monotonic()
            try:
                lease = self.ring.claim(stop=lambda: child.stop_requested() or self._arrived())
            except Stopped:
                self.spans.waited("free slot", since_s)
                if child.stop_requested():
                    raise
                self._publish()
            else:
                self.spans.waited("free slot", since_s, None if lease is None else lease.seq)
                return lease

    def fill(self, lease: WriteLease, names: list[int], documents: Documents) -> None:
        slot = slot_views(lease.buffer, self.config, self.arch)
        total_tok = write_documents(slot, documents)
        sums = self._host_sums(lease, total_tok)
        self.outbox = self.outbox or Outbox(slot, self.target.device, self.spans)
        ids = [ids for ids, _ in documents]
        states = self.outbox.states()
        mark = self.spans.begin("forward")
        self.target.capture(ids, *states, beat=self._beat)
        self.spans.end(mark, lease.seq)
        self._publish()
        copy = self.outbox.send(slot, total_tok, lease.seq)
        self.leaving = Underway(lease, names, total_tok, sums, copy, time.monotonic())

    def finish(self) -> None:
        """Before the process may end: no copy is under way."""
        self._publish()

    def _beat(self) -> None:
        self.ring.beat()
        if self._arrived():
            self._publish()

    def _arrived(self) -> bool:
        """Ends the process where a GPU hangs: a host that waits for it shows signs of life."""
        if self.leaving is None:
            return False
        lease, sent_s, limit_s = self.leaving.lease, self.leaving.sent_s, self.stall_s
        if self.leaving.copy.arrived():
            return True
        if time.monotonic() - sent_s > limit_s:
            self.leaving = None
            why = f"not out of the GPU after {limit_s:g} s (supervise.stall_s): does it hang?"
            child.fail(TimeoutError(f"slot {lease.seq}: {why}"))
        return False

    def _publish(self) -> None:
        """The slot that is leaving, if any: waits until it has arrived."""
        if self.leaving is None:
            return
        since_s = time.monotonic()
        while not self._arrived():
            self.ring.beat()
            time.sleep(0.001)
        (lease, names, total_tok, host_sums, copy, _), self.leaving = self.leaving, None
        self.spans.waited("copy", since_s, lease.seq)
        sums = [*copy.sums, *host_sums] if self.config.ring.verify else None
        publish(self.ring, lease, names, total_tok, finite=copy.finite, sums=sums)

    def _host_sums(self, lease: WriteLease, total_tok: int) -> list[int]:
        """Of what the host wrote: the fields after the states, in the ring's order."""
        return [
            prefix_sum(lease.buffer(field.name), field.valid_bytes(total_tok))
            for field in self.ring.fields
            if field.name not in ("all", "vlh")
        ]


def publish(
    ring: RingWriter,
    lease: WriteLease,
    names: list[int],
    total_tok: int,
    *,
    finite: bool,
    sums: list[int] | None = None,
) -> None:
    if finite:
        ring.publish(lease, total_tok=total_tok, sums=sums)
    else:
        log.error("slot %d: states are not finite, documents %s", lease.seq, names)
        ring.abort(lease)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--rank", type=int, default=0)
    args = parser.parse_args()
    child.run("target", args.rank, lambda: run(args.run_dir, args.rank))


if __name__ == "__main__":
    main()
