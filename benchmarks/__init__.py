"""Measurements that `launch.py bench` runs. Kept results are in results/."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def commit() -> str | None:
    """This checkout's, with `-dirty` where the files differ from it. None outside a checkout."""
    if not (ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def line(result: Mapping[str, Any], columns: Mapping[str, str]) -> str:
    """A result to read: the named figures in their formats, `-` where there is none."""
    return " ".join(
        f"{name}={'-' if result[name] is None else how.format(result[name])}"
        for name, how in columns.items()
    )


def keep(results: Sequence[dict[str, Any]], path: Path | None) -> None:
    """Write them all to --json's file, if there is one. After each result: a later one may fail."""
    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n")


def new_file(text: str) -> Path:
    """An option's value: one that can't be written is refused before anything is measured."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: no file in a directory that exists")
    return path


def positive(text: str) -> float:
    """An option's value."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be more than 0")
    return value


def count(text: str) -> int:
    """An option's value."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return value
