"""Half B: slot -> step -> log -> checkpoint. Maps the ring's pages and trains the drafter on them.

    python drafter_trainer.py RUN_DIR

Started by launch.py. Step s is pass s % k of slot s // k (k = train.passes_per_slot), and nothing
else decides what it computes: a run that is killed and started again gives the same bits.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from pathlib import Path
from typing import Any

import torch

from dflash import checkpoint
from dflash.arch import DrafterArch, TargetArch
from dflash.config import Config, load_config
from dflash.prepare import Prepared
from dflash.slot import slot_views
from dflash.step import DTYPES, TrainState, train_step
from dflash.target import load_ends
from launcher import child
from launcher.slot import slot_fields
from shm_ring import ReadLease, RingReader, Stopped, snapshot

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
    fields = slot_fields(config, arch)
    ring = RingReader(config.ring.path, "trainer_0", fields=fields, verify=config.ring.verify)
    ring.rewind(state.slot)
    journal = Journal(run_dir / "metrics.jsonl", ring, config, state.step)
    child.ready(f"step {state.step} of {steps}, {arch.num_parameters:,} parameters")

    def save() -> int:
        whole = checkpoint.snapshot(state, seq=state.slot, data_fingerprint=prepared.fingerprint)
        checkpoint.save(checkpoints, whole, keep=config.train.keep_checkpoints)
        return state.step

    lease: ReadLease | None = None
    saved_step = state.step
    while state.step < steps and not child.stop_requested():
        seq, pass_idx = state.slot, state.pass_idx
        if lease is None:
            try:
                lease = ring.take(seq, stop=child.stop_requested)
            except Stopped:
                break
            batch = slot_views(lease.buffer, config, arch)
        train_step(state, batch, seq=seq, pass_idx=pass_idx)
        if state.slot != seq or state.step == steps:
            ring.done(lease)
            lease = None
        if state.step % config.train.log_every == 0 or state.step == steps:
            journal.write(state)
        if state.step % config.train.checkpoint_every == 0 or state.step == steps:
            saved_step = save()
        ring.beat()

    if lease is not None:
        ring.give_back(lease)
    if state.step > saved_step:
        save()
    if state.step == steps:
        ring.close_run()  # the last act: target workers leave when they see it
    ring.leave()
    log.info("step %d of %d is saved", state.step, steps)
    return child.DONE if state.step == steps else child.STOPPED


def fresh_state(config: Config, prepared: Prepared) -> TrainState:
    target = TargetArch.read(prepared.target_dir)
    arch = DrafterArch.build(config, target, prepared.mask_token_id)
    dtype = DTYPES[config.drafter.dtype]
    ends = load_ends(prepared.target_dir, target, dtype, config.drafter.device)
    return TrainState.create(config, arch, ends, zero_centred_norm=target.zero_centred_norm)


class Journal:
    """metrics.jsonl: one object a log interval, and nothing of steps that a resume does again."""

    def __init__(self, path: Path, ring: RingReader, config: Config, step: int) -> None:
        self.path, self.ring, self.config = path, ring, config
        written = path.read_text().splitlines(keepends=True) if path.exists() else []
        whole = [line for line in written if line.endswith("\n")]  # a kill may cut the last one
        new = path.with_suffix(".tmp")
        new.write_text("".join(line for line in whole if json.loads(line)["step"] <= step))
        new.replace(path)
        self._restart(step)

    def write(self, state: TrainState) -> None:
        now, steps = time.monotonic(), self.config.train.steps
        interval_s, done = now - self.start_s, state.step - self.start_step
        figures = state.metrics.read()
        trainer_wait_s, target_wait_s, ready = self._waits()
        line: dict[str, Any] = {
            # A mean over nothing is NaN, which is not JSON.
            **{name: None if math.isnan(value) else value for name, value in figures.items()},
            "step": state.step,
            "steps": steps,
            "tok_per_s": figures["tokens"] / interval_s,
            "ready_slots": ready,
            "slots": self.config.ring.slots,
            "trainer_wait_s": trainer_wait_s - self.trainer_wait_s,
            "target_wait_s": target_wait_s - self.target_wait_s,
            "interval_s": interval_s,
            "eta_s": (steps - state.step) * interval_s / done,
            "time": time.time(),
        }
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._restart(state.step)

    def _restart(self, step: int) -> None:
        self.start_step, self.start_s = step, time.monotonic()
        self.trainer_wait_s, self.target_wait_s, _ = self._waits()

    def _waits(self) -> tuple[float, float, int]:
        """Seconds that the trainer and (on average) a target worker have waited; READY slots."""
        view = snapshot(self.config.ring.path)
        targets = [p.waited_s for p in view.parties if p.role == "writer" and p.status == "alive"]
        ready = sum(slot.state == "READY" for slot in view.slots)
        return self.ring.waited_s, sum(targets) / max(1, len(targets)), ready


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    args = parser.parse_args()
    child.run("trainer", 0, lambda: run(args.run_dir))


if __name__ == "__main__":
    main()
