"""A trained drafter in a layout that other programs serve: z-lab's, or that of speculators.

    python -m dflash.export RUN|CHECKPOINT --to DIR [--format z-lab|speculators]

DIR then holds config.json and model.safetensors (bfloat16), which z-lab's package, vLLM and SGLang
read (the other layout: speculators and vLLM); README.md, the model card with the commands that
serve it; and export.json, where it came from. Every key and every tensor is checked against a table
before the directory appears, because a wrong name is ignored in silence by some of the servers;
what was written is read back and its logits are compared. `read_export` loads such a directory,
ours or one published by others.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml

from . import speculators, zlab
from .arch import DrafterArch, TargetArch
from .checkpoint import Checkpoint, find_checkpoint, load
from .config import ConfigError, parse_config
from .mask import decode_masks
from .model import DFlashDrafter, FrozenEnds, layer_kinds
from .model_card import model_card, serving_name
from .target_files import load_ends, resolve_target

PROVENANCE = "export.json"
FORMATS = ("z-lab", "speculators")
"""Each a module with to_config, check_config and from_config; the tensors are the same."""


# --- reading --------------------------------------------------------------------------------------


def is_export(path: str | Path) -> bool:
    return (Path(path) / "config.json").is_file() and (Path(path) / "model.safetensors").is_file()


def read_export(path: str | Path) -> tuple[DrafterArch, dict[str, torch.Tensor], dict[str, Any]]:
    """(arch, bfloat16 weights, provenance or {}) of a drafter directory in either layout.

    Raises ConfigError where keys or tensors are not those of a DFlash drafter.
    """
    from safetensors.torch import load_file

    path = Path(path)
    if not is_export(path):
        raise ConfigError(f"{path}: no config.json and model.safetensors: not an exported drafter")
    raw = json.loads((path / "config.json").read_text())
    layout = speculators if "speculators_model_type" in raw else zlab
    arch = layout.from_config(raw)
    weights = load_file(path / "model.safetensors")
    zlab.check_tensors(weights, arch, str(path))
    provenance = path / PROVENANCE
    return arch, weights, json.loads(provenance.read_text()) if provenance.exists() else {}


def build_drafter(
    arch: DrafterArch,
    weights: dict[str, torch.Tensor],
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
) -> DFlashDrafter:
    """The drafter with these weights, ready to decode."""
    drafter = DFlashDrafter(arch)
    drafter.load_state_dict(weights, strict=True)
    return drafter.to(device=device, dtype=dtype).eval().requires_grad_(False)


# --- writing --------------------------------------------------------------------------------------


def export(checkpoint_path: str | Path, to: str | Path, format_name: str = "z-lab") -> list[str]:
    """Export a checkpoint (or a run's newest). Returns what to tell the user, line by line.

    Raises ConfigError; `to` is then untouched.
    """
    if format_name not in FORMATS:
        raise ConfigError(f"--format: {format_name!r} is none of {', '.join(FORMATS)}")
    to = Path(to)
    if to.exists() and (not to.is_dir() or any(to.iterdir())) and not (to / PROVENANCE).exists():
        raise ConfigError(f"--to: {to}: not empty and not an earlier export: choose another place")
    path = find_checkpoint(checkpoint_path)
    checkpoint = load(path)
    config = parse_config(yaml.safe_load(checkpoint.config_yaml), str(path / "run.yaml"))
    config.refuse_untrained(path)
    target_dir = resolve_target(config.target.model)
    target = TargetArch.read(target_dir)
    verifier = speculators.Verifier(serving_name(config, target_dir), target.architecture)
    raw = checked_config(format_name, checkpoint.arch, verifier)
    ends = load_ends(target_dir, target, torch.float32, "cpu")
    card = model_card(checkpoint, config, path, to.name, target_dir, format_name)

    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        for leftover in to.parent.glob(f".{to.name}.tmp-*"):  # of an export that was killed
            shutil.rmtree(leftover)
        temp = Path(tempfile.mkdtemp(dir=to.parent, prefix=f".{to.name}.tmp-"))
    except OSError as error:
        raise ConfigError(
            f"--to: {to.parent} cannot be written: {error.strerror}: choose another place"
        ) from None
    try:
        rounded = _write(format_name, raw, checkpoint, temp)
        drift = _verify(temp, checkpoint, rounded, ends)
        (temp / "README.md").write_text(card)
        temp.chmod(0o755)  # mkdtemp's 0700 is for nobody else
        _put(temp, to)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return [
        f"exported step {checkpoint.step} of {config.run.name} to {to} ({format_name}, bfloat16)",
        f"{len(rounded)} tensors and every config key checked; read back: logits equal those of "
        f"the rounded weights, and differ by {drift:.1e} of their size from the float32 ones",
        f"how to serve it: {to / 'README.md'}",
    ]


def checked_config(
    format_name: str, arch: DrafterArch, verifier: speculators.Verifier
) -> dict[str, Any]:
    """config.json, held against its layout's table. z-lab's does not name the target."""
    if format_name == "z-lab":
        raw = zlab.to_config(arch)
        zlab.check_config(raw, arch)
    else:
        raw = speculators.to_config(arch, verifier)
        speculators.check_config(raw, arch)
    return raw


def _write(
    format_name: str, raw: dict[str, Any], checkpoint: Checkpoint, directory: Path
) -> dict[str, torch.Tensor]:
    """config.json, model.safetensors, export.json. Returns the rounded weights."""
    from safetensors.torch import save_file

    rounded = {name: w.to(torch.bfloat16).contiguous() for name, w in checkpoint.weights.items()}
    zlab.check_tensors(rounded, checkpoint.arch, "export")
    save_file(rounded, directory / "model.safetensors", metadata={"format": "pt"})
    provenance = {
        "format": format_name,
        "step": checkpoint.step,
        "data_fingerprint": checkpoint.data_fingerprint,
        "config": yaml.safe_load(checkpoint.config_yaml),
    }
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    (directory / PROVENANCE).write_text(json.dumps(provenance, indent=2) + "\n")
    return rounded


def _verify(
    directory: Path, checkpoint: Checkpoint, rounded: dict[str, torch.Tensor], ends: FrozenEnds
) -> float:
    """Read the directory back and draft with it, in float32. Returns how far rounding moved the
    logits. Raises ConfigError where they are not those of the weights that were to be written."""
    arch, weights, _ = read_export(directory)
    written, wanted, exact = (
        sample_logits(build_drafter(arch, some, torch.float32), ends)
        for some in (weights, rounded, checkpoint.weights)
    )
    if not torch.equal(written, wanted):
        raise ConfigError("export: what was read back drafts other logits than what was written")
    return float((written - exact).norm() / exact.norm())


@torch.inference_mode()
def sample_logits(drafter: DFlashDrafter, ends: FrozenEnds) -> torch.Tensor:
    """logits [K-1, V] of one block after a context of fixed random features."""
    arch, tokens = drafter.arch, 24
    generator = torch.Generator().manual_seed(0)
    feat_TF = torch.randn(tokens, arch.num_taps * arch.hidden_size, generator=generator)
    ctx_kv = drafter.context_kv(drafter.context(feat_TF), torch.arange(tokens))
    ids_K = torch.full((arch.block_size,), arch.mask_token_id)
    pos_K = torch.arange(tokens, tokens + arch.block_size)
    masks = decode_masks(tokens, arch.block_size, layer_kinds(arch), ids_K.device)
    return ends.logits(drafter(ends.embed(ids_K), pos_K, ctx_kv, masks)[1:])


def _put(temp: Path, to: Path) -> None:
    """Move the finished directory to its place, over an earlier export."""
    if to.exists():
        old = temp.with_name(f"{temp.name}-old")
        to.rename(old)
        temp.rename(to)
        shutil.rmtree(old)
    else:
        temp.rename(to)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="dflash.export", description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", help="a checkpoint, or a run (its newest checkpoint)")
    parser.add_argument("--to", required=True, help="the directory to make")
    parser.add_argument("--format", default="z-lab", help=f"one of: {', '.join(FORMATS)}")
    args = parser.parse_args(argv)
    try:
        print(*export(args.checkpoint, args.to, args.format), sep="\n")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
