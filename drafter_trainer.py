"""Half B: slot -> step -> log -> checkpoint. Maps the ring's pages and trains the drafter on them.

    python drafter_trainer.py RUN_DIR

Started by launch.py. Step s is pass s % k of slot s // k (k = train.passes_per_slot), and nothing
else decides what it computes: a run that is killed and started again gives the same bits.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dflash import checkpoint
from dflash.arch import DrafterArch, TargetArch
from dflash.config import Config, ConfigError, load_config
from dflash.feed import Feed
from dflash.heldout import Text, heldout_file, load_texts, measure_texts
from dflash.prepare import Prepared
from dflash.slot import slot_shapes, slot_views
from dflash.spans import Spans
from dflash.step import DTYPES, SWITCH_INTERVAL_S, Batch, TrainState, train_step, warm_up
from dflash.target import load_ends
from launcher import child
from launcher.rundir import RunDir
from launcher.slot import slot_fields
from shm_ring import ReadLease, RingError, RingReader, Stopped, snapshot
from shm_ring.pin import pin

log = logging.getLogger("trainer")


def run(run_dir: Path) -> int:
    config = load_config(run_dir / "run.yaml")
    prepared = Prepared.from_json((run_dir / "prepared.json").read_text())
    torch.set_num_threads(config.drafter.threads)
    state = fresh_state(config, prepared)
    checkpoints = run_dir / "checkpoints"
    saved = checkpoint.latest(checkpoints)
    if saved is not None:
        checkpoint.restore(state, checkpoint.load(saved), prepared.fingerprint)

    arch, steps = state.drafter.arch, config.train.steps
    # Named once, as target worker 0 does: the name changes with the target's directory.
    texts_file, texts = heldout_file(config, prepared, arch), list[Text]()
    fields = slot_fields(config, arch)
    on_gpu = config.drafter.device == "cuda"
    verify = config.ring.verify and not on_gpu  # there the copy is summed, on the device
    ring = RingReader(config.ring.path, "trainer_0", fields=fields, verify=verify)
    ring.rewind(state.slot)  # first of all: from now on the target workers fill what we will take
    trace = RunDir(run_dir).traces / "trainer_0.json" if config.run.trace else None
    spans = Spans(trace, config.drafter.device)
    feed = Feed(slot_shapes(config, arch), "cuda", spans) if on_gpu else None
    if feed is not None:
        log.info("compiling and capturing the step: a minute at shapes that are new here")
        with ring.beating():
            warm_up(state, feed.batch)
        child.check_stop()
    slots: CopiedSlots | PageSlots = (
        PageSlots(ring, config, arch, spans)
        if feed is None
        else CopiedSlots(ring, config, arch, spans, feed)
    )
    journal = Journal(run_dir / "metrics.jsonl", ring, config, state.step)
    child.ready(f"step {state.step} of {steps}, {arch.num_parameters:,} parameters")

    def save() -> int:
        since_s = time.monotonic()
        whole = checkpoint.snapshot(state, seq=state.slot, data_fingerprint=prepared.fingerprint)
        checkpoint.save(checkpoints, whole, keep=config.train.keep_checkpoints)
        spans.waited("save", since_s)
        return state.step

    def walk_heldout() -> dict[str, float | None]:
        """Texts come from target worker 0, and another one may have been READY before it. They are
        read once: other runs may sweep the cache."""
        while not texts and not texts_file.exists():
            child.check_stop()
            ring.beat()
            time.sleep(0.1)
        began = time.monotonic()
        if not texts:
            texts.extend(load_texts(texts_file))
        figures = measure_texts(state.drafter, state.ends, texts, ring.beat)
        return figures | {"eval_s": time.monotonic() - began}

    saved_step = state.step
    while state.step < steps and not child.stop_requested():
        seq, pass_idx = state.slot, state.pass_idx
        try:
            ring.beat()
            batch = slots.batch(seq)
        except Stopped:
            break
        except RingError:  # poisoned, or removed: no more slots come, but these steps are done
            journal.write_posted()
            if state.step > saved_step:
                save()
            raise
        mark = spans.begin("step")
        train_step(state, batch, seq=seq, pass_idx=pass_idx)
        spans.end(mark, seq)
        since_s = time.monotonic()
        journal.write_posted()
        spans.waited("metrics", since_s)
        if state.step % config.train.log_every == 0 or state.step == steps:
            journal.post(state)
        if state.slot != seq or state.step == steps:
            slots.finished(state.slot)
        if config.eval.every and (state.step % config.eval.every == 0 or state.step == steps):
            with contextlib.suppress(Stopped):
                journal.add(walk_heldout())
        if state.step % config.train.checkpoint_every == 0 or state.step == steps:
            journal.write_posted()
            saved_step = save()

    slots.give_back()
    journal.write_posted()
    if state.step > saved_step:
        save()
    if state.step == steps:
        ring.close_run()  # the last act: target workers leave when they see it
    ring.leave()
    spans.close()
    log.info("step %d of %d is saved", state.step, steps)
    return child.DONE if state.step == steps else child.STOPPED


class PageSlots:
    """On a CPU: a step reads the ring's own pages."""

    def __init__(self, ring: RingReader, config: Config, arch: DrafterArch, spans: Spans) -> None:
        self.ring, self.config, self.arch, self.spans = ring, config, arch, spans
        self.lease: ReadLease | None = None

    def batch(self, seq: int) -> Batch:
        """The slot `seq`, for the step about to run. Blocks; raises Stopped."""
        if self.lease is None:
            since_s = time.monotonic()
            self.lease = self.ring.take(seq, stop=child.stop_requested)
            self.spans.waited("ready slot", since_s, seq)
            self.views = slot_views(self.lease.buffer, self.config, self.arch)
        return self.views

    def finished(self, next_seq: int) -> None:
        """The last step on the slot has been launched; `next_seq` comes next, if it exists."""
        assert self.lease is not None
        self.ring.done(self.lease)
        self.lease = None

    def give_back(self) -> None:
        if self.lease is not None:
            self.ring.give_back(self.lease)


class CopiedSlots:
    """On a GPU: the next slot is copied from page-locked pages while the step before it runs, its
    sums are checked on the device, and it is free again before that step ends."""

    def __init__(
        self, ring: RingReader, config: Config, arch: DrafterArch, spans: Spans, feed: Feed
    ) -> None:
        self.ring, self.config, self.arch, self.spans = ring, config, arch, spans
        self.feed = feed
        locked = pin(ring)
        log.log(locked.level, "%s", locked)
        self.coming: ReadLease | None = None
        self.here = -1
        """The slot that the feed's batch holds."""

    def batch(self, seq: int) -> Batch:
        """The slot `seq`, for the step about to run. Blocks; raises Stopped."""
        if self.here != seq:
            if self.coming is None:
                self._start(seq)
            while not self._arrived():
                self._start(seq)
            mark = self.spans.begin("load")
            self.feed.load()
            self.spans.end(mark, seq)
            self.here = seq
        return self.feed.batch

    def _start(self, seq: int) -> None:
        since_s = time.monotonic()
        self.coming = self.ring.take(seq, stop=child.stop_requested)
        self.spans.waited("ready slot", since_s, seq)
        views = slot_views(self.coming.buffer, self.config, self.arch)
        self.feed.start(views, self.coming.total_tok, seq)

    def _arrived(self) -> bool:
        """Waits for the copy and lets go of the slot. False: not the bytes that were sealed."""
        assert self.coming is not None
        since_s = time.monotonic()
        sums, lease, self.coming = self.feed.wait(), self.coming, None
        self.spans.waited("copy", since_s, lease.seq)
        if self.config.ring.verify and lease.sums and sums != list(lease.sums):
            self.ring.reject(lease)
            return False
        self.ring.done(lease)
        return True

    def finished(self, next_seq: int) -> None:
        """The last step on the slot has been launched: begin to copy the next one under it."""
        if self.here != next_seq < self.ring.end_seq and not child.stop_requested():
            with contextlib.suppress(RingError):  # `batch` will raise it
                self._start(next_seq)

    def give_back(self) -> None:
        if self.coming is not None:
            self.feed.wait()
            self.ring.give_back(self.coming)


def fresh_state(config: Config, prepared: Prepared) -> TrainState:
    target = TargetArch.read(prepared.target_dir)
    arch = DrafterArch.build(config, target, prepared.mask_token_id)
    dtype = DTYPES[config.drafter.dtype]
    device, random_weights = config.drafter.device, config.target.random_weights
    ends = load_ends(prepared.target_dir, target, dtype, device, random_weights)
    return TrainState.create(config, arch, ends, zero_centred_norm=target.zero_centred_norm)


class Journal:
    """metrics.jsonl: one object a log interval, and nothing of steps that a resume does again."""

    def __init__(self, path: Path, ring: RingReader, config: Config, step: int) -> None:
        self.path, self.ring, self.config = path, ring, config
        new = path.with_suffix(".tmp")
        new.write_text("".join(lines_until(path, step)))
        new.replace(path)
        self.seen = 0.0, 0
        self.posted: tuple[Callable[[], dict[str, float]], dict[str, Any]] | None = None
        self._restart(step)

    def post(self, state: TrainState) -> None:
        """Asks the device for the figures since the last post, without waiting for them."""
        self.write_posted()
        now, steps = time.monotonic(), self.config.train.steps
        interval_s, done = now - self.start_s, state.step - self.start_step
        trainer_wait_s, target_wait_s, ready = self._waits()
        line: dict[str, Any] = {
            "step": state.step,
            "steps": steps,
            "ready_slots": ready,
            "slots": self.config.ring.slots,
            "trainer_wait_s": trainer_wait_s - self.trainer_wait_s,
            "target_wait_s": target_wait_s - self.target_wait_s,
            "interval_s": interval_s,
            "eta_s": (steps - state.step) * interval_s / done,
            "time": time.time(),
        }
        self.posted = state.metrics.post(), line
        self._restart(state.step)

    def add(self, figures: dict[str, float | None]) -> None:
        """More about the step just posted. The time since then belongs to no interval."""
        assert self.posted is not None
        self.posted[1].update(figures)
        self._restart(self.start_step)

    def write_posted(self) -> None:
        """Called once the next step is launched, so that the device has work during the wait."""
        if self.posted is not None:
            (figures, line), self.posted = self.posted, None
            found = figures()
            line["tok_per_s"] = found["tokens"] / line["interval_s"]
            # A mean over nothing is NaN, which is not JSON.
            found_json = {k: None if math.isnan(value) else value for k, value in found.items()}
            with self.path.open("a") as file:
                file.write(json.dumps(found_json | line) + "\n")

    def _restart(self, step: int) -> None:
        self.start_step, self.start_s = step, time.monotonic()
        self.trainer_wait_s, self.target_wait_s, _ = self._waits()

    def _waits(self) -> tuple[float, float, int]:
        """Seconds that the trainer and (on average) a target worker have waited; READY slots."""
        with contextlib.suppress(RingError):  # removed: the next beat says so
            view = snapshot(self.config.ring.path)
            writers = [party for party in view.parties if party.role == "writer"]
            targets = [party.waited_s for party in writers if party.status == "alive"]
            ready = sum(slot.state == "READY" for slot in view.slots)
            self.seen = sum(targets) / max(1, len(targets)), ready
        return self.ring.waited_s, *self.seen


def lines_until(path: Path, step: int) -> list[str]:
    """Of a metrics.jsonl that may not exist. Raises ConfigError."""
    try:
        written = path.read_text().splitlines(keepends=True) if path.exists() else []
        whole = [line for line in written if line.endswith("\n")]  # a kill may cut the last one
        return [line for line in whole if json.loads(line)["step"] <= step]
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{path}: holds lines that are no metrics ({error}): remove them, or the file"
        ) from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    args = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # or a launch may wait 5 ms for another thread
    child.run("trainer", 0, lambda: run(args.run_dir))


if __name__ == "__main__":
    main()
