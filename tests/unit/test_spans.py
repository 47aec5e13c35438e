"""A trace: what is written, what is read back, and what covers what."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from dflash.spans import COMPUTE, COPY, HOST, Span, Spans, busy_s, read_trace


def test_a_trace_gives_back_its_spans_in_order(tmp_path: Path) -> None:
    path = tmp_path / "trace" / "target_0.json"
    spans, before_s = Spans(path, "cpu"), time.monotonic()
    outer = spans.begin("forward")
    inner = spans.begin("d2h", COPY)
    spans.end(inner, 7)
    spans.end(outer, 7)
    spans.waited("free slot", before_s - 2.0)
    spans.close()
    after_s = time.monotonic()

    wait, forward, copy = read_trace(path)
    assert (wait.name, wait.row, wait.seq) == ("free slot", HOST, None)
    assert (forward.name, forward.row, forward.seq) == ("forward", COMPUTE, 7)
    assert (copy.name, copy.row, copy.who) == ("d2h", COPY, "target_0")
    assert abs(wait.start_s - (before_s - 2.0)) < 1e-5
    assert before_s - 1e-5 <= forward.start_s <= copy.start_s
    assert copy.end_s <= forward.end_s <= after_s + 1e-5


def test_the_file_is_chrome_s_trace_format(tmp_path: Path) -> None:
    """An array of events with numbers for process and thread, each named by an M event. It may end
    without its bracket: so this closes it before it asks the JSON parser."""
    path = tmp_path / "trainer_0.json"
    spans = Spans(path, "cpu")
    spans.end(spans.begin("step"), 3)
    events = json.loads(path.read_text().rstrip().rstrip(",") + "]")
    assert {e["pid"] for e in events} == {os.getpid()}
    names = {(e["name"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names["process_name", 2] == "trainer_0"
    assert [names["thread_name", tid] for tid in range(3)] == [COMPUTE, COPY, HOST]
    (step,) = (e for e in events if e["ph"] == "X")
    assert step["name"] == "step" and step["tid"] == 0 and step["dur"] >= 0
    assert step["args"] == {"seq": 3}


def test_a_line_that_a_kill_has_cut_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "target_0.json"
    spans = Spans(path, "cpu")
    for seq in range(2):
        spans.end(spans.begin("forward"), seq)
    spans.close()
    path.write_text(path.read_text()[:-5])
    assert [span.seq for span in read_trace(path)] == [0]


def test_without_a_path_nothing_is_written_or_kept(tmp_path: Path) -> None:
    spans = Spans(None, "cuda")  # and no GPU is asked for
    mark = spans.begin("forward")
    spans.end(mark, 1)
    spans.waited("free slot", 0.0)
    spans.close()
    assert mark is None and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("refuses", ["its folder", "its first byte"])
def test_a_trace_that_can_t_be_written_is_a_warning_and_no_more(
    refuses: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace" / "target_0.json"
    if refuses == "its folder":
        (tmp_path / "trace").touch()
        why = "File exists"
    else:
        path.parent.mkdir()
        path.symlink_to("/dev/full")
        why = "No space left on device"
    spans = Spans(path, "cpu")
    spans.end(spans.begin("forward"), 1)
    spans.waited("free slot", 0.0)
    spans.close()
    (told,) = caplog.records
    assert (told.name, told.levelname) == ("target", "WARNING")
    assert told.getMessage() == f"{path}: {why}: the run goes on without a trace"


def test_a_trace_that_fails_under_a_span_is_told_once_and_keeps_its_whole_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A pipe whose reader goes away stands in for a disk that fills up."""
    path = tmp_path / "trainer_0.json"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    spans = Spans(path, "cpu")
    spans.end(spans.begin("step"), 0)
    begun = spans.begin("step")
    kept = os.read(reader, 65536).decode()
    os.close(reader)
    for seq in (1, 2):
        spans.end(begun, seq)
        spans.waited("ready slot", 0.0, seq)
    assert spans.begin("step") is None
    spans.close()
    assert [event.get("args", {}).get("seq") for event in json.loads(kept[:-2] + "]")][-1] == 0
    (told,) = caplog.records
    assert told.getMessage() == f"{path}: Broken pipe: the run goes on without a trace"


def test_waits_too_short_to_matter_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "target_0.json"
    spans = Spans(path, "cpu")
    spans.waited("free slot", time.monotonic())
    assert read_trace(path) == []


def test_covered_seconds_count_overlaps_once_and_nothing_outside() -> None:
    times = [(0.0, 2.0), (1.0, 3.0), (1.5, 2.5), (5.0, 6.0), (9.0, 12.0)]
    spans = [Span("target_0", COMPUTE, "x", a, b, None) for a, b in reversed(times)]
    assert busy_s(spans, 1.0, 10.0) == 2.0 + 1.0 + 1.0
    assert busy_s(spans, 3.0, 5.0) == 0.0
