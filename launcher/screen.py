"""What a user sees: numbers in words, one log line an interval, a progress bar on a terminal.

`Screen` also keeps everything it says in the attempt's launch.log. A terminal that goes away
(SSH, `| head`) does not end a run: the log goes on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
WAITS_FROM = 0.02
"""Shares of waiting below this are noise."""


def seconds(value: float) -> str:
    """0.25 -> `0.2 s`, 75 -> `1m15s`, 7300 -> `2h01m`."""
    if value < 10:
        return f"{value:.1f} s"
    if value < 60:
        return f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


def size(num_bytes: float) -> str:
    """Bytes with a binary unit: `189 MiB`, `1.4 GiB`."""
    power = 0
    while num_bytes >= 1024 and power < len(UNITS) - 1:
        num_bytes /= 1024
        power += 1
    digits = 0 if num_bytes >= 100 or power == 0 else 1
    return f"{num_bytes:.{digits}f} {UNITS[power]}"


def percent(share: float) -> str:
    return f"{100 * min(share, 1.0):.0f}%"


def who_waits(trainer_share: float, target_share: float, made_all: bool = False) -> str:
    """The bottleneck in words. Shares of the time that each side spent waiting for the other.

    `made_all`: the target has made the run's last slot, so it waits for nothing.
    """
    if made_all:
        return "target is done"
    if max(trainer_share, target_share) < WAITS_FROM:
        return "nobody waits"
    if trainer_share >= target_share:
        return f"trainer waits for the target ({percent(trainer_share)})"
    return f"target waits for the trainer ({percent(target_share)})"


def metrics_line(row: dict[str, Any], made_all: bool = False) -> str:
    """One line of metrics.jsonl for people; `made_all` as in `who_waits`."""
    steps = row["steps"]
    interval_s = max(row["interval_s"], 1e-9)
    shares = row["trainer_wait_s"] / interval_s, row["target_wait_s"] / interval_s
    waits = who_waits(*shares, made_all)
    skipped = f"  skipped {row['skipped']:.0f} of its steps" if row.get("skipped") else ""
    walked = f"  tau_walk {figure(row['tau_walk'], '.3f')}" if "tau_walk" in row else ""
    return (
        f"step {row['step']:{len(str(steps))}d}/{steps}  loss {figure(row['loss'], '.4f')}"
        f"  tau_anchor {figure(row['tau_anchor'], '.3f')}{walked}"
        f"  accuracy {figure(row['accuracy'], '.1%')}{skipped}"
        f"  {row['tok_per_s']:,.0f} tok/s  ring {row['ready_slots']}/{row['slots']} ready"
        f"  {waits}  ETA {seconds(row['eta_s'])}"
    )


def figure(value: float | None, form: str) -> str:
    """A mean over nothing (no anchor in the whole interval) is null in metrics.jsonl."""
    return "none" if value is None else format(value, form)


def table(rows: list[list[str]], indent: str = "  ") -> list[str]:
    """Columns padded to their widest cell; the first row is the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        (indent + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]


class Screen:
    """Lines on stdout, errors on stderr, both also in `log`; a bar under them on a terminal."""

    def __init__(self, log: Path | None = None) -> None:
        self._log: TextIO | None = log.open("a", buffering=1) if log is not None else None
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def line(self, text: str) -> None:
        self._keep(text)
        with self._may_be_gone():
            if self._bar is not None:
                self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                print(text, flush=True)

    def error(self, text: str) -> None:
        self._keep(text)
        with self._may_be_gone():
            self._stop_bar()
            print(text, file=sys.stderr, flush=True)

    def progress(self, step: int, steps: int) -> None:
        """Only a terminal gets the bar: in a pipe it would be noise between the lines."""
        with self._may_be_gone():
            if not sys.stdout.isatty():
                return
            if self._bar is None:
                self._start_bar(steps)
            assert self._bar is not None and self._task is not None
            self._bar.update(self._task, completed=step)
            self._bar.refresh()

    def end_progress(self) -> None:
        """What is said from now on stands below everything else."""
        with self._may_be_gone():
            self._stop_bar()

    def close(self) -> None:
        self.end_progress()
        if self._log is not None:
            self._log.close()
            self._log = None

    def _start_bar(self, steps: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

        # auto_refresh would be a thread, and children are started without threads around.
        self._bar = Progress(
            BarColumn(None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            auto_refresh=False,
            transient=True,
        )
        self._task = self._bar.add_task("", total=steps)
        self._bar.start()

    def _stop_bar(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()

    def _keep(self, text: str) -> None:
        if self._log is not None:
            self._log.write(f"{text}\n")

    @contextmanager
    def _may_be_gone(self) -> Iterator[None]:
        """A closed terminal or pipe is noted once; from then on launch.log has everything."""
        try:
            yield
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            os.close(nowhere)
