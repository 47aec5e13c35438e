"""Which checkpoints are whole. Not in checkpoint.py, because the launcher asks without torch."""

from __future__ import annotations

import json
from pathlib import Path

MARKER = "COMPLETE"
"""The file that checkpoint.py writes last: the size of every other file of the checkpoint."""


def complete_checkpoints(directory: str | Path) -> list[Path]:
    """By rising step."""
    steps = sorted(Path(directory).glob("step_" + 8 * "[0-9]"))
    return [path for path in steps if is_complete(path)]


def is_complete(path: Path) -> bool:
    """Whether the marker is there and every file it names has the size it had."""
    marker = path / MARKER
    if not marker.is_file():
        return False
    try:
        sizes = json.loads(marker.read_text())
    except ValueError:  # the marker itself is cut off
        return False
    return isinstance(sizes, dict) and all(
        (path / name).is_file() and (path / name).stat().st_size == size
        for name, size in sizes.items()
    )
