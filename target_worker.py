"""Half A: plan -> forward -> slot. Runs the frozen target over documents and fills the ring.

    python target_worker.py RUN_DIR --rank I

Started by launch.py, N times; the workers share nothing but the ring. `plan.slot(seq)` says which
documents fill a slot, so it does not matter which worker makes it, nor when, nor how often.
A worker has no state to save: kill it anywhere, and its slot is made again.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch

from dflash.arch import DrafterArch, TargetArch
from dflash.config import load_config
from dflash.data import Dataset
from dflash.heldout import heldout_file, leave_texts
from dflash.plan import Plan
from dflash.prepare import Prepared
from dflash.slot import slot_views, write_documents
from dflash.step import DTYPES
from dflash.target import CaptureError, Target
from launcher import child
from launcher.slot import slot_fields
from shm_ring import RingWriter

log = logging.getLogger("target")


def run(run_dir: Path, rank: int) -> None:
    config = load_config(run_dir / "run.yaml")
    prepared = Prepared.from_json((run_dir / "prepared.json").read_text())
    torch.set_num_threads(config.target.threads)
    torch.set_grad_enabled(False)
    target_arch = TargetArch.read(prepared.target_dir)
    arch = DrafterArch.build(config, target_arch, prepared.mask_token_id)
    dataset = Dataset.load(prepared.dataset)
    plan = Plan(
        dataset.lengths,
        seed=config.run.seed,
        max_tokens=config.ring.max_tokens,
        max_docs=config.ring.max_docs,
    )
    target = Target.load(
        prepared.target_dir,
        target_arch,
        taps=arch.taps,
        dtype=DTYPES[config.target.dtype],
        device=config.target.device,
        micro_batch_tokens=config.target.micro_batch_tokens,
    )
    try:
        target.self_test([dataset.document(int(doc))[0] for doc in plan.slot(0)[:3]])
    except CaptureError as error:
        child.fail(error)
    if rank == 0 and config.eval.every:
        texts = heldout_file(config, prepared, arch)
        log.info("%s", leave_texts(texts, target, config, dataset, child.check_stop))

    fields = slot_fields(config, arch)
    ring = RingWriter(config.ring.path, f"target_{rank}", fields=fields, verify=config.ring.verify)
    child.ready(f"{config.target.dtype} on {config.target.device}, capture self-test passed")
    while (lease := ring.claim(stop=child.stop_requested)) is not None:
        names = plan.slot(lease.seq)
        documents = [dataset.document(int(name)) for name in names]
        slot = slot_views(lease.buffer, config, arch)
        total_tok = write_documents(slot, documents)
        target.capture([ids for ids, _ in documents], slot.all_TF, slot.vlh_TH, beat=ring.beat)
        states = (slot.all_TF,) if slot.vlh_TH is None else (slot.all_TF, slot.vlh_TH)
        if all(bool(state[:total_tok].isfinite().all()) for state in states):
            ring.publish(lease, total_tok=total_tok)
        else:
            log.error("slot %d: states are not finite, documents %s", lease.seq, names.tolist())
            ring.abort(lease)
    ring.leave()
    log.info("the run is over; waited %.1f s for free slots", ring.waited_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--rank", type=int, default=0)
    args = parser.parse_args()
    child.run("target", args.rank, lambda: run(args.run_dir, args.rank))


if __name__ == "__main__":
    main()
