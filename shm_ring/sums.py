"""Checksums: the int64 sum (mod 2**64) of a field's valid prefix, zero-extended to 8 bytes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

CHUNK_WORDS = 1 << 22  # 32 MiB, a few milliseconds


def prefix_sum(buffer: memoryview, nbytes: int, tick: Callable[[], None] | None = None) -> int:
    """Of the first `nbytes` of a field, as u64. Copies nothing; calls `tick` after each 32 MiB."""
    whole = nbytes // 8
    total = int.from_bytes(buffer[whole * 8 : nbytes], "little")
    for start in range(0, whole, CHUNK_WORDS):
        words = np.frombuffer(
            buffer, "<i8", count=min(CHUNK_WORDS, whole - start), offset=start * 8
        )
        total += int(words.sum())
        if tick is not None:
            tick()
    return total % 2**64
