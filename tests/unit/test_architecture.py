"""The rules of docs/architecture.md that a machine can hold."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash.arch import default_taps

ROOT = Path(__file__).parents[2]
PROGRAMS = [ROOT / name for name in ("launch.py", "target_worker.py", "drafter_trainer.py")]
PACKAGES = {name: sorted((ROOT / name).glob("*.py")) for name in ("shm_ring", "dflash", "launcher")}
FILES = [*PROGRAMS, *(file for files in PACKAGES.values() for file in files)]


def imported(file: Path) -> Iterator[str]:
    """Top-level names of absolute imports anywhere in the file."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("shm_ring", {"dflash", "launcher"}),
        ("dflash", {"shm_ring", "launcher"}),
        ("launcher", {"torch", "transformers"}),
    ],
)
def test_packages_do_not_know_each_other(package: str, forbidden: set[str]) -> None:
    for file in PACKAGES[package]:
        assert not forbidden & set(imported(file)), file


def test_torch_enters_the_ring_in_one_file_at_most() -> None:
    assert {file.name for file in PACKAGES["shm_ring"] if "torch" in imported(file)} <= {"pin.py"}


def test_no_file_is_over_400_lines() -> None:
    tests = sorted((ROOT / "tests").rglob("*.py"))
    long = {
        file.name: n for file in FILES + tests if (n := len(file.read_text().splitlines())) > 400
    }
    assert not long


def test_every_file_is_in_the_architecture_page() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    missing = [file.name for file in FILES if f"`{file.name}`" not in page]
    assert [name for name in missing if name != "__init__.py"] == []


@pytest.mark.parametrize(
    ("layers", "taps", "want"),
    [
        (24, 5, (1, 6, 11, 16, 21)),
        (32, 5, (1, 8, 15, 22, 29)),
        (36, 5, (1, 9, 17, 25, 33)),
        (40, 5, (1, 10, 19, 28, 37)),
        (64, 5, (1, 16, 31, 46, 61)),
        (36, 1, (18,)),
    ],
)
def test_default_taps_are_those_of_published_drafters(
    layers: int, taps: int, want: tuple[int, ...]
) -> None:
    assert default_taps(layers, taps) == want


def test_every_test_that_the_traps_page_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs/traps.md").read_text()))
    written = "".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 12
    assert not {name for name in named if f"def {name}(" not in written}
