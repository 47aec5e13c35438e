"""Spans on a GPU: where the device's work really was, without the host ever waiting for it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from dflash.spans import COMPUTE, COPY, Spans, read_trace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CYCLES = 200_000_000
"""About 0.1 s of a GPU at 1 to 2 GHz."""


def test_a_span_is_the_device_s_time_on_the_host_s_clock(tmp_path: Path) -> None:
    path = tmp_path / "target_0.json"
    spans = Spans(path, "cuda")
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    for seq in range(3):
        before_s = time.monotonic()
        mark = spans.begin("forward")
        torch.cuda._sleep(CYCLES)
        spans.end(mark, seq)
        launched_s = time.monotonic()
        torch.cuda.synchronize()
        after_s = time.monotonic()
        assert launched_s - before_s < (after_s - before_s) / 2  # the host did not wait
    spans.close()
    found = read_trace(path)
    assert [(span.name, span.row, span.seq) for span in found] == [
        ("forward", COMPUTE, seq) for seq in range(3)
    ]
    last = found[-1]
    assert before_s - 1e-3 < last.start_s < last.end_s < after_s + 1e-3
    assert last.end_s - last.start_s > 0.9 * (after_s - before_s)


def test_work_of_two_streams_overlaps_in_the_trace_as_it_does_on_the_device(
    tmp_path: Path,
) -> None:
    path = tmp_path / "trainer_0.json"
    spans, copies = Spans(path, "cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    outer = spans.begin("step")
    torch.cuda._sleep(CYCLES)
    with torch.cuda.stream(copies):
        inner = spans.begin("h2d", COPY)
        torch.cuda._sleep(CYCLES // 10)
        spans.end(inner, 8)
    spans.end(outer, 7)
    torch.cuda.synchronize()
    spans.close()
    step, copy = read_trace(path)
    assert (step.row, copy.row) == (COMPUTE, COPY)
    assert step.start_s < copy.start_s < copy.end_s < step.end_s


def test_nothing_synchronises_and_what_has_not_passed_is_written_later(tmp_path: Path) -> None:
    path = tmp_path / "trainer_0.json"
    spans = Spans(path, "cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for seq in range(2):
            mark = spans.begin("step")
            torch.cuda._sleep(CYCLES)
            spans.end(mark, seq)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert read_trace(path) == []
    torch.cuda.synchronize()
    spans.end(spans.begin("step"), 2)  # the next span notices
    assert [span.seq for span in read_trace(path)][:2] == [0, 1]
    spans.close()
