"""A slot of a run's ring as the drafter's bench reads it: `--slot DIRECTORY`.

The directory is a slot_NNNN of a ring, or a copy of one (`cp -r` while the run lives), with the
fields that the run's config gives it: all.bin, vlh.bin, ids.bin and so on, as docs/ring.md has it.
"""

from __future__ import annotations

import mmap
from dataclasses import fields, replace
from pathlib import Path

from dflash.config import ConfigError
from dflash.slot import slot_views
from dflash.step import Batch
from launcher.slot import slot_fields
from shm_ring import Field

from .shapes import Case

STATES = ("all_TF", "vlh_TH")


def recorded_slot(case: Case, directory: Path) -> Batch:
    """On the CPU; its states are the files' own pages, read-only. Raises ConfigError, one line.

    The rest is a copy, and checked: a bad token id or length would be an error on the device, and a
    live ring's pages may change after the check.
    """
    if not directory.is_dir():
        raise ConfigError(f"--slot {directory}: no such directory: give a slot_NNNN of a ring")
    pages = {field.name: _map(directory, field) for field in slot_fields(case.config, case.arch)}
    views = slot_views(lambda name: memoryview(pages[name]), case.config, case.arch)
    small = [field.name for field in fields(Batch) if field.name not in STATES]
    slot = replace(views, **{name: getattr(views, name).clone() for name in small})
    _check(slot, case, directory)
    return slot


def to_device(slot: Batch, device: str) -> Batch:
    """A copy of all of it, stale rows too."""

    def copied(name: str) -> object:
        tensor = getattr(slot, name)
        return None if tensor is None else tensor.to(device, copy=True)

    return Batch(**{field.name: copied(field.name) for field in fields(Batch)})  # type: ignore[arg-type]


def _map(directory: Path, field: Field) -> mmap.mmap:
    path = directory / f"{field.name}.bin"
    cure = "give the config and the overrides of the run that wrote it"
    try:
        with path.open("rb") as file:
            if (size := path.stat().st_size) != field.nbytes:
                raise ConfigError(
                    f"--slot: {path} has {size:,} bytes, and {field} has {field.nbytes:,}: {cure}"
                )
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        if field.name == "vlh":
            cure = "its run had train.loss ce: give --loss ce"
        raise ConfigError(f"--slot: {path}: no such file: {cure}") from None
    except OSError as error:
        raise ConfigError(f"--slot: {path}: cannot be read: {error.strerror}") from None


def _check(slot: Batch, case: Case, directory: Path) -> None:
    total, ring = int(slot.total_tok), case.config.ring
    again = "copy one that is READY (launch.py status shows them)"
    if total == 0:
        raise ConfigError(f"--slot: {directory} is empty, its total_tok is 0: {again}")
    lens = int(slot.lens_D.sum())
    if total != lens or not 0 < total <= ring.max_tokens or int(slot.lens_D.min()) < 0:
        raise ConfigError(
            f"--slot: {directory} was copied while it was written, its total_tok is {total} and "
            f"its documents have {lens} tokens: {again}"
        )
    ids, vocab = slot.ids_T[:total], case.arch.vocab_size
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise ConfigError(
            f"--slot: {directory}/ids.bin has token ids from {int(ids.min())} to {int(ids.max())}, "
            f"and {case.config.target.model} has {vocab} tokens: give the config of its own run"
        )
