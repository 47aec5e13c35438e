"""The picture of both halves: what is drawn where, from traces written by hand."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks.timeline import LEFT, RIGHT, RING_HEIGHT, WIDTH, choose, draw, merged
from benchmarks.watch import Window
from dflash.spans import ROWS, Span, read_trace

SVG = "{http://www.w3.org/2000/svg}"
LANE = WIDTH - LEFT - RIGHT


def write_trace(path: Path, *spans: tuple[str, str, float, float, int | None]) -> Path:
    """(row, name, start and end in seconds, seq) of each."""
    lines = ["["]
    for row, name, start_s, end_s, seq in spans:
        event = {"name": name, "ph": "X", "ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6}
        event |= {"pid": 1, "tid": ROWS.index(row)}
        lines.append(json.dumps(event | ({} if seq is None else {"args": {"seq": seq}})) + ",")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def traces(tmp_path: Path) -> list[Path]:
    """Slots of 2 s: the target works half of each, the trainer makes two steps on each."""
    target, trainer = [], []
    for seq in range(20):
        at_s = 100.0 + 2 * seq
        target.append(("compute", "forward", at_s, at_s + 1, seq + 3))
        target.append(("host", "free slot", at_s + 1, at_s + 2, seq + 4))
        trainer += [("compute", "step", at_s + i, at_s + i + 0.9, seq) for i in range(2)]
    return [
        write_trace(tmp_path / "target_0.json", *target),
        write_trace(tmp_path / "trainer_0.json", *trainer),
    ]


def bars(svg: str, name: str) -> list[tuple[float, float]]:
    """(left, width) of the bars whose tooltip begins with the name, by their left edge."""
    found = []
    for rect in ET.fromstring(svg).iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        if title is not None and str(title.text).startswith(name):
            found.append((float(rect.get("x", "")), float(rect.get("width", ""))))
    return sorted(found)


def test_five_whole_slots_from_the_middle_are_shown(traces: list[Path]) -> None:
    """20 slots start in the window: from the start of one to that of the fifth after it."""
    spans = [span for path in traces for span in read_trace(path)]
    shown = choose(spans, Window(100, 140))
    assert shown == Window(114, 124)


def test_a_window_without_steps_is_shown_whole() -> None:
    assert choose([], Window(3, 5)) == Window(3, 5)
    one = [Span("trainer_0", "compute", "step", 3.5, 4.0, 7)]
    assert choose(one, Window(3, 5)) == Window(3, 5)


def test_bars_stand_where_their_spans_are(traces: list[Path]) -> None:
    svg = draw(traces, [(90.0, 4)], 8, Window(100, 140))
    second = LANE / 10
    forwards = [(LEFT + 2 * second * i, second) for i in range(5)]
    steps = [(LEFT + second * i, 0.9 * second) for i in range(10)]
    # The svg rounds to a tenth of a pixel.
    assert bars(svg, "forward") == [pytest.approx(bar, abs=0.06) for bar in forwards]
    assert bars(svg, "step") == [pytest.approx(bar, abs=0.06) for bar in steps]
    assert len(bars(svg, "free slot")) == 5


def test_rows_are_labelled_and_copies_only_drawn_where_there_are_any(
    traces: list[Path], tmp_path: Path
) -> None:
    def texts(svg: str) -> list[str | None]:
        return [text.text for text in ET.fromstring(svg).iter(f"{SVG}text")]

    window = Window(100, 140)
    found = texts(draw(traces, [(90.0, 4)], 8, window))
    assert {"target_0", "forward", "host waits", "ring", "trainer_0", "steps"} <= set(found)
    assert not any("copy" in str(text) for text in found)
    copying = write_trace(tmp_path / "target_1.json", ("copy", "d2h", 115.0, 115.1, 3))
    assert "copy to the ring" in texts(draw([*traces, copying], [(90.0, 4)], 8, window))


def test_the_ring_s_line_is_as_high_as_its_share_of_ready_slots(traces: list[Path]) -> None:
    """2 of 8 before the picture begins, 6 of 8 from its middle on."""
    svg = draw(traces, [(90.0, 2), (119.0, 6), (139.0, 8)], 8, Window(100, 140))
    (path,) = ET.fromstring(svg).iter(f"{SVG}path")
    commands = str(path.get("d")).split()
    bottom = float(commands[0].partition(",")[2])
    assert commands[1:5] == [
        f"H{LEFT:.1f}",
        f"V{bottom - RING_HEIGHT / 4:.1f}",
        f"H{LEFT + LANE / 2:.1f}",
        f"V{bottom - RING_HEIGHT * 3 / 4:.1f}",
    ]
    assert "READY: 2 to 6" in svg


def test_merged_traces_are_json_with_every_event_and_the_ring(traces: list[Path]) -> None:
    with traces[1].open("a") as file:
        file.write('{"name": "cut off by a kill"')
    events = json.loads(merged(traces, [(1.5, 2)]))
    assert sum(e["ph"] == "X" for e in events) == 80
    assert [e for e in events if e["ph"] == "C"] == [
        {"name": "READY slots", "ph": "C", "pid": 0, "ts": 1.5e6, "args": {"slots": 2}}
    ]
