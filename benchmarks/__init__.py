"""Measurements that `launch.py bench` runs. Kept results are in results/."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def commit() -> str | None:
    """`-dirty` where the files differ from it. None without git."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or None


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
