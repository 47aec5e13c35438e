"""The ring of a run, from the launcher's side: made or taken over at the start, gone at the end."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from dflash.config import Config
from shm_ring import (
    Field,
    RingBusy,
    RingError,
    RingMissing,
    RingSnapshot,
    clear_closed,
    create,
    destroy,
    snapshot,
)

from .screen import size

DYING_S = 20.0
"""How long the halves of a killed launcher may take to go: the kernel kills them, but a process
with gigabytes of page-locked memory takes seconds to end."""
LIVING = ("alive", "suspect")
IN_MEMORY = ("tmpfs", "ramfs")
"""File systems that never write a page to a disk (tmpfs: but to swap)."""


def disk_below(path: Path) -> str | None:
    """The type of the file system that holds `path`, existing or not; None if it is memory, or not
    to be found out."""
    # Of two mounts at one place, the later one is seen, and the dict keeps it.
    mounts = {Path(at.mountpoint): at.fstype for at in psutil.disk_partitions(all=True)}
    real = path.resolve()
    kind = next((mounts[at] for at in (real, *real.parents) if at in mounts), None)
    return None if kind in IN_MEMORY else kind


def open_ring(config: Config, fields: tuple[Field, ...], previous: Config | None) -> str:
    """Make the ring ready for this run; returns the line that says how.

    `previous` is the config of the run's last attempt, whose ring is taken over when a kill left
    it and nothing about it changed. Any other dead ring at ring.path is replaced.
    Raises RingBusy (who lives there), NoSpace, RingError.
    """
    ring, name = config.ring, config.run.name
    left = _left_by(name, config)
    if left is not None and previous is not None and _fits(left, previous, config, fields):
        clear_closed(ring.path, config.end_seq)
        return f"ring {ring.path}: taken over from the last attempt, which was killed"
    create(
        ring.path,
        fields,
        ring.slots,
        end_seq=config.end_seq,
        run_name=name,
        quarantine_s=ring.quarantine_s,
    )
    slot = sum(field.nbytes for field in fields)
    return f"ring {ring.path}: {ring.slots} slots x {size(slot)}"


def close_ring(config: Config) -> str | None:
    """Remove it; returns a line about what could not be removed."""
    try:
        destroy(config.ring.path)
    except RingMissing:
        return None  # somebody's `ring destroy --force` ended this run
    except RingError as error:
        return f"the ring stays: {error}"
    return None


def user_of(path: Path) -> str | None:
    """The run whose launcher lives and owns the ring at `path`, or None."""
    try:
        view = snapshot(path)
    except RingError:
        return None
    return view.run_name if view.owner_alive else None


def refuse_used(path: Path) -> None:
    """RingBusy where another run has the ring: better before the data is prepared than after."""
    if (user := user_of(path)) is not None:
        raise RingBusy(
            f"ring.path: {path} is in use by run {user!r}: stop it, or set another ring.path"
        )


def _left_by(run_name: str, config: Config) -> RingSnapshot | None:
    """The dead ring of this run, or None. Waits for halves that the kernel is killing just now."""
    deadline = time.monotonic() + DYING_S
    while True:
        try:
            view = snapshot(config.ring.path)
        except RingError:
            return None  # none, or nothing of use: `create` replaces it or says why not
        if not any(party.status in LIVING for party in view.parties):
            return view if view.run_name == run_name else None
        if view.owner_alive or time.monotonic() > deadline:
            return None  # `create` names the living
        time.sleep(0.1)


def _fits(left: RingSnapshot, previous: Config, config: Config, fields: tuple[Field, ...]) -> bool:
    return (
        previous.ring == config.ring
        and left.slot_count == config.ring.slots
        and left.slot_bytes == sum(field.nbytes for field in fields)
    )
