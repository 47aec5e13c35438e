"""Checkpoints of a drafter in training: whole or not there at all, and bit-exact.

    save(run / "checkpoints", snapshot(state, seq=..., data_fingerprint=...), keep=2)
    restore(state, load(latest(run / "checkpoints")))

    step_00000320/
      model.safetensors   the float32 master weights, by the names of the export
      state.pt            optimizer, metrics sums: whatever else must continue exactly
      arch.json           DrafterArch
      meta.json           step, seq, pass, data fingerprint, versions
      run.yaml            the resolved config
      COMPLETE            written last: size and checksum of every other file

A save writes into a temporary directory beside it, forces it to disk, and renames. Whatever a
killed save leaves has another name or no valid COMPLETE, and the next save sweeps it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from .arch import DrafterArch
from .complete import MARKER, complete_checkpoints, damaged_files, is_complete, write_marker
from .config import ConfigError, dump_config
from .step import TrainState

VERSIONS = ("torch", "transformers")
TEMP = ".tmp-"


@dataclass(frozen=True)
class Checkpoint:
    """The resumable state of a trainer and what is needed to understand it."""

    arch: DrafterArch
    step: int
    """Optimizer steps done."""
    seq: int
    """The slot to take next (or again, when pass_idx > 0)."""
    pass_idx: int
    """The pass over that slot to do next."""
    weights: dict[str, torch.Tensor]
    """Float32 masters by parameter name."""
    state: dict[str, Any]
    """Optimizer and metrics state: nested dicts and lists of tensors and numbers."""
    config_yaml: str
    data_fingerprint: str
    versions: dict[str, str] = field(default_factory=dict)


def snapshot(state: TrainState, *, seq: int, data_fingerprint: str) -> Checkpoint:
    """The state as it is now (tensors are views, not copies: save it before the next step).
    `seq`: the slot that the next step reads."""
    optimizer = state.optimizer.state_dict()
    return Checkpoint(
        arch=state.drafter.arch,
        step=state.step,
        seq=seq,
        pass_idx=state.pass_idx,
        weights=optimizer.pop("masters"),
        state={"optimizer": optimizer, "metrics": state.metrics.sums},
        config_yaml=dump_config(state.config),
        data_fingerprint=data_fingerprint,
        versions={name: version(name) for name in VERSIONS},
    )


def restore(state: TrainState, checkpoint: Checkpoint, data_fingerprint: str) -> None:
    """Make `state` what was saved, bit for bit.

    Raises ConfigError where the checkpoint is of another drafter or of other data.
    """
    ours, theirs = state.drafter.arch.to_json(), checkpoint.arch.to_json()
    changed = [f"{k}: {theirs[k]} -> {ours[k]}" for k in ours if ours[k] != theirs[k]]
    if checkpoint.data_fingerprint != data_fingerprint:
        changed.append(f"data: {checkpoint.data_fingerprint} -> {data_fingerprint}")
    if changed:
        raise ConfigError(
            f"the run's checkpoint (step {checkpoint.step}) can't be continued: "
            f"{'; '.join(changed)}: choose another run.name"
        )
    state.optimizer.load_state_dict(
        {"masters": checkpoint.weights, **checkpoint.state["optimizer"]}
    )
    state.metrics.sums.copy_(checkpoint.state["metrics"])
    state.step = checkpoint.step


def save(directory: str | Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write `directory/step_XXXXXXXX`, delete all but the newest `keep`. Returns its path.

    One process at a time may save into a directory.
    """
    from safetensors.torch import save_file

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    _sweep(directory)
    temp = Path(tempfile.mkdtemp(dir=directory, prefix=TEMP))
    save_file(
        {k: w.contiguous() for k, w in checkpoint.weights.items()}, temp / "model.safetensors"
    )
    torch.save(checkpoint.state, temp / "state.pt")
    (temp / "arch.json").write_text(json.dumps(checkpoint.arch.to_json(), indent=2))
    (temp / "meta.json").write_text(json.dumps(_meta(checkpoint), indent=2))
    (temp / "run.yaml").write_text(checkpoint.config_yaml)
    for file in temp.iterdir():
        _fsync(file)
    _fsync(write_marker(temp))
    _fsync(temp)
    final = directory / f"step_{checkpoint.step:08d}"
    if final.exists():  # the same step again, after a resume from an earlier one
        final.rename(directory / f"{TEMP}replaced-{final.name}")
    temp.rename(final)
    _fsync(directory)
    for old in complete_checkpoints(directory)[:-keep]:
        old.rename(directory / f"{TEMP}old-{old.name}")  # so that a half-deleted one is nobody's
    _sweep(directory)
    return final


def load(path: str | Path) -> Checkpoint:
    """Raises ConfigError for what is no complete checkpoint, and for one with other bytes than were
    saved."""
    from safetensors.torch import load_file

    path = Path(path)
    if not is_complete(path):
        raise ConfigError(f"{path}: not a complete checkpoint (no valid {MARKER} file)")
    if damaged := damaged_files(path):
        raise ConfigError(
            f"{path}: {', '.join(damaged)}: not the bytes that were saved (by the checksums in "
            f"{MARKER}): move the checkpoint away, and the one before it is the newest"
        )
    meta = json.loads((path / "meta.json").read_text())
    return Checkpoint(
        arch=DrafterArch.from_json(json.loads((path / "arch.json").read_text())),
        weights=load_file(path / "model.safetensors"),
        state=torch.load(path / "state.pt", weights_only=True),
        config_yaml=(path / "run.yaml").read_text(),
        **meta,
    )


def latest(directory: str | Path) -> Path | None:
    """The complete checkpoint of the highest step, or None."""
    return next(reversed(complete_checkpoints(directory)), None)


def find_checkpoint(path: str | Path) -> Path:
    """A checkpoint's own path, or the newest of a run. Raises ConfigError."""
    path = Path(path)
    if is_complete(path):
        return path
    newest = latest(path / "checkpoints") or latest(path)
    if newest is None:
        raise ConfigError(f"{path}: no complete checkpoint here (a run, or its checkpoints/step_*)")
    return newest


def weights_digest(path: Path) -> str:
    """Of the weights in a checkpoint or an export: which drafter a measurement belongs to."""
    with (path / "model.safetensors").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _meta(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        name: getattr(checkpoint, name)
        for name in ("step", "seq", "pass_idx", "data_fingerprint", "versions")
    }


def _sweep(directory: Path) -> None:
    for leftover in directory.glob(f"{TEMP}*"):
        shutil.rmtree(leftover)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
