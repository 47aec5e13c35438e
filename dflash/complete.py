"""Which checkpoints are whole. Not in checkpoint.py, because the launcher asks without torch.

complete_checkpoints(run / "checkpoints")     by size: free, asked often
damaged_files(checkpoint)                     by checksum: reads everything, asked once a resume
"""

from __future__ import annotations

import json
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MARKER = "COMPLETE"
"""The file that checkpoint.py writes last: size and checksum of every other one. (The first runs
wrote the size alone: such a checkpoint loads unchecked.)"""
CHUNK_BYTES = 16 << 20
THREADS = min(4, os.cpu_count() or 1)
"""A core checks 2.1 to 2.5 GB/s of a file in memory (crc32; sha256 1.7 and blake2b 0.9 without the
reading): a 27B run's 21 GB take 10 s on one core."""


def complete_checkpoints(directory: str | Path) -> list[Path]:
    """By rising step."""
    steps = sorted(Path(directory).glob("step_" + 8 * "[0-9]"))
    return [path for path in steps if is_complete(path)]


def is_complete(path: Path) -> bool:
    """Whether the marker is there and every file it names has the size it had."""
    marked = _marked(path)
    return marked is not None and all(
        (path / name).is_file() and (path / name).stat().st_size == size
        for name, (size, _) in marked.items()
    )


def damaged_files(path: Path) -> list[str]:
    """Of a complete checkpoint: the files whose bytes are not those that were saved."""
    return [
        name
        for name, (_, wanted) in (_marked(path) or {}).items()
        if wanted is not None and checksum(path / name) != wanted
    ]


def set_aside_damaged(directory: Path) -> list[str]:
    """Rename the newest complete checkpoints that are damaged, until one is sound (or none is
    left): `damaged-step_00000320`. Returns a line about each."""
    lines = []
    for path in reversed(complete_checkpoints(directory)):
        damaged = damaged_files(path)
        if not damaged:
            break
        aside = path.with_name(f"damaged-{path.name}")
        while aside.exists():  # the same step, made again and damaged again
            aside = aside.with_name(f"{aside.name}+")
        path.rename(aside)
        lines.append(f"checkpoint {path.name}: {', '.join(damaged)} damaged: kept as {aside}")
    return lines


def write_marker(path: Path) -> Path:
    """Of the files that are in `path` now. Returns the marker."""
    files = sorted(path.iterdir())
    entries = {f.name: {"bytes": f.stat().st_size, "crc32": checksum(f)} for f in files}
    (path / MARKER).write_text(json.dumps(entries))
    return path / MARKER


def checksum(path: Path) -> str:
    """8 hex digits: the crc32 of the crc32s of all chunks of the file."""

    def of_chunk(start: int) -> bytes:
        with path.open("rb", buffering=0) as file:
            return zlib.crc32(os.pread(file.fileno(), CHUNK_BYTES, start)).to_bytes(4, "big")

    with ThreadPoolExecutor(THREADS) as pool:
        chunks = pool.map(of_chunk, range(0, path.stat().st_size, CHUNK_BYTES))
        return f"{zlib.crc32(b''.join(chunks)):08x}"


def _marked(path: Path) -> dict[str, tuple[int, str | None]] | None:
    """Size and checksum by name; None without a readable marker."""
    marker = path / MARKER
    if not marker.is_file():
        return None
    try:
        return {
            name: (entry, None) if isinstance(entry, int) else (entry["bytes"], entry["crc32"])
            for name, entry in json.loads(marker.read_text()).items()
        }
    except (ValueError, LookupError, TypeError, AttributeError):  # itself cut off, or damaged
        return None
