"""A picture of both halves over a few slots: what each GPU, each copy and each host did when.

    svg = draw(traces, ready, slots, window)

`traces`: the files that the halves wrote with run.trace; `ready`: (time, READY slots) at each
change. A slot has its number and one of six colours, from the target's forward to the drafter's
steps on it. Plain SVG with both colour schemes in it, so that a page can show it as an image.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from dflash.spans import COMPUTE, COPY, HOST, Span, read_trace

from .watch import Window

SLOTS_SHOWN = 5
WIDTH, LEFT, RIGHT, TOP = 1000, 160, 16, 46
ROW, GAP, HALF_GAP = 22, 6, 16
RING_HEIGHT = 48
HUES = ("#4e79a7", "#d9730d", "#3f8f46", "#c94a4d", "#2e8f8a", "#96609b")
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #1f2328 }
  .title { font-weight: 600 } .small { font-size: 10px; fill: #59636e }
  .bar { font-size: 10px; fill: #fff } .lane { fill: #818b98; fill-opacity: .12 }
  .wait { fill: #818b98; fill-opacity: .55 } .ring { fill: #818b98; fill-opacity: .45 }
  .axis { stroke: #818b98; stroke-opacity: .5 }
  @media (prefers-color-scheme: dark) { text { fill: #f0f6fc } .small { fill: #9198a1 } }
"""
LABELS = {
    ("target", COMPUTE): "forward",
    ("target", COPY): "copy to the ring",
    ("target", HOST): "host waits",
    ("trainer", COPY): "copy from the ring",
    ("trainer", COMPUTE): "steps",
    ("trainer", HOST): "host waits",
}
"""The rows of a process, from top to bottom; one that stays empty is left out."""


def draw(
    traces: Sequence[Path], ready: Sequence[tuple[float, int]], slots: int, window: Window
) -> str:
    """The SVG of SLOTS_SHOWN slots in the middle of the window."""
    spans = [span for path in traces for span in read_trace(path)]
    shown = choose(spans, window)
    parts, y = [], float(TOP)
    for who in sorted({span.who for span in spans if span.who.startswith("target")}):
        rows, y = _process(who, spans, shown, y)
        parts += rows
    ring, y = _ring(ready, slots, shown, y)
    parts += ring
    for who in sorted({span.who for span in spans if span.who.startswith("trainer")}):
        rows, y = _process(who, spans, shown, y)
        parts += rows
    axis, y = _axis(shown, y)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:.0f}" '
        f'width="{WIDTH}" height="{y:.0f}">'
    )
    title = _text(8, 20, f"Both halves over {shown.seconds:.3g} s", "title")
    note = _text(8, 36, "The number is the slot's; grey is the host at a standstill.", "small")
    return "\n".join([head, f"<style>{STYLE}</style>", title, note, *parts, *axis, "</svg>\n"])


def choose(spans: Iterable[Span], window: Window) -> Window:
    """From the first step on a slot, about the middle of the window, to that of SLOTS_SHOWN later:
    slots of the side that is behind, which is the one that the trainer steps at."""
    first: dict[int, float] = {}
    for span in sorted(spans, key=lambda span: span.start_s):
        if span.who.startswith("trainer") and span.name == "step" and span.seq is not None:
            first.setdefault(span.seq, span.start_s)
    starts = [at_s for at_s in first.values() if at_s in window]
    if len(starts) < 2:
        return window
    begin = max(0, len(starts) // 2 - SLOTS_SHOWN // 2 - 1)
    return Window(starts[begin], starts[min(begin + SLOTS_SHOWN, len(starts) - 1)])


def _process(who: str, spans: Sequence[Span], shown: Window, y: float) -> tuple[list[str], float]:
    """Its rows, and where the next thing may stand."""
    parts = [_text(8, y + 10, who, "title")]
    y += 16
    side = who.partition("_")[0]
    for row in (row for kind, row in LABELS if kind == side):
        inside = [
            span
            for span in spans
            if span.who == who
            and span.row == row
            and span.end_s > shown.start_s
            and span.start_s < shown.end_s
        ]
        if not inside and row == COPY:
            continue  # on a CPU nothing is copied
        parts.append(_text(16, y + 15, LABELS[side, row]))
        parts.append(_lane(y, ROW))
        parts += [_bar(span, shown, y) for span in inside]
        y += ROW + GAP
    return parts, y + HALF_GAP - GAP


def _bar(span: Span, shown: Window, y: float) -> str:
    left = _x(max(span.start_s, shown.start_s), shown)
    width = max(0.5, _x(min(span.end_s, shown.end_s), shown) - left)
    waits = span.row == HOST
    fill = "" if waits or span.seq is None else f' fill="{HUES[span.seq % len(HUES)]}"'
    kind = ' class="wait"' if not fill else ""
    word = span.name if waits or span.seq is None else str(span.seq)
    seq = "" if span.seq is None else f", slot {span.seq}"
    took_ms = 1e3 * (span.end_s - span.start_s)
    bar = (
        f'<rect x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{ROW}"{fill}{kind}>'
        f"<title>{escape(span.name)}{seq}: {took_ms:.1f} ms</title></rect>"
    )
    if width < 7 * len(word) + 4:
        return bar
    return bar + _text(left + 4, y + 15, word, "small" if waits else "bar")


def _ring(
    ready: Sequence[tuple[float, int]], slots: int, shown: Window, y: float
) -> tuple[list[str], float]:
    """READY slots over time, as a filled step line; full is the lane's height."""
    before = [count for at_s, count in ready if at_s <= shown.start_s]
    steps = [(shown.start_s, before[-1] if before else 0)]
    steps += [(at_s, count) for at_s, count in ready if shown.start_s < at_s < shown.end_s]
    bottom, path = y + RING_HEIGHT, [f"M{LEFT},{y + RING_HEIGHT:.1f}"]
    for at_s, count in steps:
        path.append(f"H{_x(at_s, shown):.1f} V{bottom - RING_HEIGHT * count / slots:.1f}")
    path.append(f"H{WIDTH - RIGHT} V{bottom:.1f} Z")
    counts = [count for _, count in steps]
    low, high = min(counts), max(counts)
    span = f"{low}" if low == high else f"{low} to {high}"
    return [
        _text(8, y + 14, "ring", "title"),
        _text(16, y + 30, f"READY: {span}"),
        _text(16, y + 44, f"of {slots} slots", "small"),
        _lane(y, RING_HEIGHT),
        f'<path class="ring" d="{" ".join(path)}"/>',
    ], bottom + HALF_GAP


def _axis(shown: Window, y: float) -> tuple[list[str], float]:
    """Seconds from the left edge, at 1, 2 or 5 times a power of ten."""
    raw = shown.seconds / 8
    power = 10.0 ** math.floor(math.log10(raw))
    tick_s = next(power * step for step in (1, 2, 5, 10) if power * step >= raw)
    parts = [f'<line class="axis" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>']
    for index in range(int(shown.seconds / tick_s) + 1):
        x = _x(shown.start_s + index * tick_s, shown)
        parts.append(f'<line class="axis" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(x + 2, y + 12, f"{index * tick_s:.4g} s", "small"))
    return parts, y + 20


def _x(time_s: float, shown: Window) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * (time_s - shown.start_s) / shown.seconds


def _lane(y: float, height: float) -> str:
    width = WIDTH - LEFT - RIGHT
    return f'<rect class="lane" x="{LEFT}" y="{y:.1f}" width="{width}" height="{height}"/>'


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    of_kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{of_kind}>{escape(text)}</text>'


def merged(traces: Sequence[Path], ready: Sequence[tuple[float, int]]) -> str:
    """One trace of all processes, with the ring's READY slots as a counter."""
    lines = [line for path in traces for line in path.read_text().splitlines()[1:]]
    counter = {"name": "READY slots", "ph": "C", "pid": 0}
    lines += [
        json.dumps(counter | {"ts": at_s * 1e6, "args": {"slots": count}}) + ","
        for at_s, count in ready
    ]
    whole = [line.rstrip(",") for line in lines if line.endswith(",")]
    return "[\n" + ",\n".join(whole) + "\n]\n"
