"""Documents of random ids, for benchmarks: `data.path: random:COUNTxTOKENS`.

    RandomDocuments.parse("random:4096x550")     lengths of 275 to 825, each as likely
    RandomDocuments.parse("random:4096x=550")    all of 550

Each begins with an untrained prompt of an eighth. No tokenizer knows them; the last id of the
vocabulary never occurs, so that it can be the mask token.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

FORM = re.compile(r"random:([1-9]\d*)x(=?)([1-9]\d*)")
SEED = 0


@dataclass(frozen=True)
class RandomDocuments:
    count: int
    shortest: int
    longest: int

    def __str__(self) -> str:
        """As `parse` reads it."""
        if self.shortest == self.longest:
            return f"random:{self.count}x={self.longest}"
        return f"random:{self.count}x{2 * self.shortest - (self.longest < 3 * self.shortest)}"

    @classmethod
    def parse(cls, path: str | Path) -> RandomDocuments | None:
        """None where `path` names a file. Raises ValueError for another form of `random:`."""
        text = str(path)
        if not text.startswith("random:"):
            return None
        found = FORM.fullmatch(text)
        if found is None:
            raise ValueError(
                f"path {text}: random documents are written random:COUNTxTOKENS, "
                "or random:COUNTx=TOKENS for equally long ones"
            )
        count, tokens = int(found[1]), int(found[3])
        equal = found[2] == "="
        return cls(
            count, tokens if equal else -(-tokens // 2), tokens if equal else tokens * 3 // 2
        )

    def draw(self, vocab_size: int) -> Iterator[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
        """ids and loss mask of each document: the same ones at every call."""
        rng = np.random.Generator(np.random.PCG64(SEED))
        lengths = rng.integers(self.shortest, self.longest + 1, self.count)
        for length in lengths.tolist():
            ids = rng.integers(0, vocab_size - 1, length, dtype=np.int32)
            yield ids, np.arange(length) >= length // 8
