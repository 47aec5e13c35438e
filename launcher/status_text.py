"""A `Status` as text: the whole page, and one line for a pipe."""

from __future__ import annotations

import time

from shm_ring import RingSnapshot, SlotView

from .screen import figure, percent, seconds, size, table
from .status import LEVELS, Flow, Status

MAX_SLOTS_SHOWN = 40


def status_text(status: Status) -> str:
    ring = status.ring
    blocks = [
        _heading(status),
        _flow(status),
        _table("slots", _slot_rows(status)),
        _table("parties", _party_rows(status)),
        _table("anomalies", _anomaly_rows(ring)) if ring.anomalies else "",
    ]
    return "\n\n".join(block for block in blocks if block)


def brief_line(status: Status) -> str:
    ring = status.ring
    return (
        f"{time.strftime('%H:%M:%S')} {LEVELS[status.level]}{_step(status)}"
        f"  head {ring.head} tail {ring.tail} of {ring.end_seq}"
        f"  ring {ring.backlog}/{ring.slot_count} ready"
        f"  target {status.target.tok_per_s:,.0f} tok/s"
        f"  trainer {status.trainer.tok_per_s:,.0f} tok/s"
        f"  {status.waits}" + "".join(f"  ! {problem}" for problem in status.problems)
    )


def _heading(status: Status) -> str:
    ring = status.ring
    holder = status.holder
    launcher = "" if holder is None else f", launcher {holder.state} (pid {holder.pid})"
    lines = [
        f"run {ring.run_name}: {LEVELS[status.level]}{_step(status)}{launcher}",
        *(f"  ! {problem}" for problem in status.problems),
        f"ring {ring.path}: {ring.slot_count} slots x {size(ring.slot_bytes)}, "
        f"epoch {ring.epoch}, {seconds(ring.age_s)} old",
    ]
    return "\n".join(lines)


def _step(status: Status) -> str:
    row = status.metrics
    if row is None:
        return ""
    return (
        f", step {row['step']} of {row['steps']}, loss {figure(row['loss'], '.4f')}, "
        f"tau_anchor {figure(row['tau_anchor'], '.3f')}, ETA {seconds(row['eta_s'])}"
    )


def _flow(status: Status) -> str:
    ring = status.ring
    states: dict[str, int] = {}
    for slot in ring.slots:
        states[slot.state] = states.get(slot.state, 0) + 1
    oldest = ring.oldest_ready_s
    lines = [
        f"flow: head {ring.head}, tail {ring.tail} of {ring.end_seq} slots; "
        + ", ".join(f"{count} {state.lower()}" for state, count in sorted(states.items()))
        + ("" if oldest is None else f"; oldest ready {seconds(oldest)}"),
        f"  {status.waits}",
        *table(
            [
                ["", "slots/s", "tok/s", "mean tok/s", "GB/s", "waits"],
                _flow_row("target", status.target),
                _flow_row("trainer", status.trainer),
            ]
        ),
    ]
    if any(ring.occupancy):
        lines.append(f"  ready slots over time: {_occupancy(ring)}")
    if ring.lengths:
        parts = (f"up to {bound}: {count}" for bound, count in ring.lengths.items())
        lines.append(f"  documents in ready slots, by tokens: {', '.join(parts)}")
    return "\n".join(lines)


def _flow_row(name: str, flow: Flow) -> list[str]:
    return [
        name,
        f"{flow.slots_per_s:.2f}",
        f"{flow.tok_per_s:,.0f}",
        f"{flow.mean_tok_per_s:,.0f}",
        f"{flow.gb_per_s:.3f}",
        percent(flow.waiting),
    ]


def _occupancy(ring: RingSnapshot) -> str:
    """Shares of the time by how full: none, eighths, all."""
    last = len(ring.occupancy) - 1
    names = ["none", *(f"{i}/{last}" for i in range(1, last)), "all"]
    pairs = zip(names, ring.occupancy, strict=True)
    return ", ".join(f"{name} {percent(share)}" for name, share in pairs if share >= 0.005)


def _table(title: str, rows: list[list[str]]) -> str:
    return "\n".join([title, *table(rows)]) if len(rows) > 1 else ""


def _slot_rows(status: Status) -> list[list[str]]:
    names = {party.id: party.name for party in status.ring.parties}
    rows = [["slot", "state", "seq", "tokens", "generation", "owner", "for"]]
    rows += [_slot_row(slot, names) for slot in status.ring.slots[:MAX_SLOTS_SHOWN]]
    more = status.ring.slot_count - MAX_SLOTS_SHOWN
    return rows if more <= 0 else [*rows, ["...", f"{more} more", "", "", "", "", ""]]


def _slot_row(slot: SlotView, names: dict[int, str]) -> list[str]:
    return [
        str(slot.index),
        slot.state,
        "" if slot.seq is None else str(slot.seq),
        "" if slot.total_tok is None else f"{slot.total_tok:,}",
        str(slot.generation),
        "" if slot.owner is None else names.get(slot.owner, str(slot.owner)),
        seconds(slot.age_s),
    ]


def _party_rows(status: Status) -> list[list[str]]:
    rows = [["party", "pid", "status", "heartbeat", "slots", "tokens", "waited", "waits for"]]
    for party in status.parties:
        rows.append(
            [
                party.name,
                str(party.pid),
                party.status,
                f"{seconds(party.heartbeat_age_s)} ago",
                f"{party.items:,}",
                f"{party.tokens:,}",
                seconds(party.waited_s),
                party.waits_for,
            ]
        )
    return rows


def _anomaly_rows(ring: RingSnapshot) -> list[list[str]]:
    rows = [["anomaly", "count", "first", "last"]]
    for name, (count, first_s, last_s) in ring.anomalies.items():
        rows.append([name, f"{count:,}", f"{seconds(first_s)} ago", f"{seconds(last_s)} ago"])
    return rows
