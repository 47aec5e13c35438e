"""metrics.jsonl across a resume: what is kept of it, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash.config import ConfigError
from drafter_trainer import lines_until


def test_steps_that_are_done_again_and_a_line_cut_by_a_kill_go(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert lines_until(path, 20) == []
    path.write_text('{"step": 10}\n{"step": 20}\n{"step": 30}\n{"st')
    assert lines_until(path, 20) == ['{"step": 10}\n', '{"step": 20}\n']


@pytest.mark.parametrize("line", [b"hello", b"\xff\xfe", b"[1]", b'{"loss": 1}'])
def test_foreign_lines_are_one_line_of_error(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line + b'\n{"step": 10}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: holds lines that are no metrics"):
        lines_until(path, 20)
