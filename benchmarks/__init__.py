"""Measurements that `launch.py bench` runs. Kept results are in results/."""

from __future__ import annotations

import argparse
from pathlib import Path


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
