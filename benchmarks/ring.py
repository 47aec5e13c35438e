"""The ring: cost of a hand-off, payload against a plain copy, wake-ups, reclaim after a kill.

    python launch.py bench ring --json FILE        (or python -m benchmarks.ring)

Needs no GPU. Goals: handoff_us < 100; ratio_to_memcpy >= 0.95 with sums off; p99_ms < 5;
reclaim_s < 1, beyond the quarantine. Both copies of a payload are made by one process, so that the
ring and the plain copy do the same work on the same pages, one slot after the other.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import random
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np

from shm_ring import Field, RingReader, RingWriter, create, destroy, hidden_state_fields
from shm_ring import layout as at

from . import commit, count, keep, new_file

Figures = dict[str, Any]
SMALL = (Field("ids", "i64", (1, 64), per_token=True),)
SPAWN = multiprocessing.get_context("spawn")
SHM = Path("/dev/shm")
QUARANTINE_S = 0.1


@contextmanager
def ring(fields: tuple[Field, ...], slots: int, *, end_seq: int = 10**9) -> Iterator[Path]:
    path = SHM / f"bench_ring_{os.getpid()}_{secrets.token_hex(4)}"
    create(path, fields, slots, end_seq=end_seq, run_name="bench", quarantine_s=QUARANTINE_S)
    try:
        yield path
    finally:
        destroy(path, force=True)


def handoff(slots: int, count: int) -> Figures:
    """claim + publish + take + done of a slot without payload, writer and reader in one process."""
    with ring(SMALL, slots) as path:
        writer, reader = RingWriter(path, "w", verify=False), RingReader(path, "r", verify=False)
        for ahead in range(slots // 2):  # a half full ring
            publish(writer, 1, ahead)
        times_ns = []
        for seq in range(count):
            start = time.perf_counter_ns()
            publish(writer, 1, seq + slots // 2)
            reader.done(reader.take(seq))
            times_ns.append(time.perf_counter_ns() - start)
        writer.leave()
        reader.leave()
    quantiles = statistics.quantiles(times_ns, n=100)
    return {
        "bench": "ring",
        "mode": "handoff",
        "slots": slots,
        "handoff_us": statistics.median(times_ns) / 1e3,
        "p99_us": quantiles[98] / 1e3,
    }


def publish(writer: RingWriter, total_tok: int, seq: int) -> None:
    lease = writer.claim()
    assert lease is not None and lease.seq == seq
    assert writer.publish(lease, total_tok=total_tok)


def payload(tokens: int, slots: int, rounds: int, *, verify: bool) -> Figures:
    """A slot of hidden states in and out through the ring, and the same two copies without it."""
    fields = hidden_state_fields(
        max_tokens=tokens, max_docs=64, taps_width=5 * 1024, hidden=1024, dtype="bf16", vlh=True
    )
    size = fields[0].nbytes
    source = np.random.default_rng(0).integers(0, 255, size, dtype=np.uint8)
    sink = np.empty_like(source)
    through_ns, plain_ns = [], []
    with ring(fields, slots) as path:
        writer, reader = RingWriter(path, "w", verify=verify), RingReader(path, "r", verify=verify)
        for seq in range(rounds + slots):
            start = time.perf_counter_ns()
            lease = writer.claim()
            assert lease is not None
            page = np.frombuffer(lease.buffer("all"), np.uint8)
            np.copyto(page, source)
            writer.publish(lease, total_tok=tokens)
            taken = reader.take(seq)
            np.copyto(sink, np.frombuffer(taken.buffer("all"), np.uint8))
            reader.done(taken)
            middle = time.perf_counter_ns()
            np.copyto(page, source)  # the slot is free, and nobody else is here
            np.copyto(sink, page)
            end = time.perf_counter_ns()
            if seq >= slots:  # the first round touches new mappings
                through_ns.append(middle - start)
                plain_ns.append(end - middle)
        writer.leave()
        reader.leave()
    ratio = statistics.median(p / t for p, t in zip(plain_ns, through_ns, strict=True))
    through_s, plain_s = statistics.median(through_ns) / 1e9, statistics.median(plain_ns) / 1e9
    return {
        "bench": "ring",
        "mode": "payload, sums " + ("on" if verify else "off"),
        "slots": slots,
        "slot_bytes": at.slot_size(fields),
        "gb_per_s": 2 * size / through_s / 1e9,
        "memcpy_gb_per_s": 2 * size / plain_s / 1e9,
        "ratio_to_memcpy": ratio,
        "sums_ms": (through_s - plain_s) * 1e3 if verify else 0.0,
    }


def _wait_and_time(path: Path, count: int, found: Any) -> None:
    """In a process: how long after each publish its take returned."""
    reader = RingReader(path, "r", verify=False)
    late_ns = []
    for seq in range(count):
        lease = reader.take(seq)
        now = time.monotonic_ns()
        late_ns.append(now - int(reader._view.slots[lease.slot][at.PUBLISHED_NS]))
        reader.done(lease)
    reader.leave()
    found.put(late_ns)


def wake_up(count: int) -> Figures:
    """From a publish to the return of a take that has waited for it, in another process."""
    rng = random.Random(0)
    with ring(SMALL, 8) as path:
        found = SPAWN.Queue()
        process = SPAWN.Process(target=_wait_and_time, args=(path, count, found))
        process.start()
        writer = RingWriter(path, "w", verify=False)
        publish(writer, 1, 0)
        while writer._view.meta[at.TAIL] < 1:
            time.sleep(0.01)  # it is there
        for seq in range(1, count):
            time.sleep(0.002 + rng.random() * 0.03)
            publish(writer, 1, seq)
        late_ns = found.get()[1:]
        process.join()
        writer.leave()
    quantiles = statistics.quantiles(late_ns, n=100)
    return {
        "bench": "ring",
        "mode": "wake-up",
        "count": len(late_ns),
        "p50_ms": quantiles[49] / 1e6,
        "p99_ms": quantiles[98] / 1e6,
        "max_ms": max(late_ns) / 1e6,
    }


def _hold(path: Path, name: str, held: Event) -> None:
    writer = RingWriter(path, name)
    assert writer.claim() is not None
    held.set()
    time.sleep(3600)


def reclaim(count: int) -> Figures:
    """From the SIGKILL of a writer that holds a slot to its seq in another's hands."""
    beyond_s = []
    with ring(SMALL, 2) as path:
        writer, reader = RingWriter(path, "w"), RingReader(path, "r")
        for kill in range(count):
            held = SPAWN.Event()
            process = SPAWN.Process(target=_hold, args=(path, f"dying_{kill}", held))
            process.start()
            held.wait()
            publish(writer, 1, 2 * kill + 1)  # now the ring is full: the next claim waits
            process.kill()
            start = time.monotonic()
            lease = writer.claim()
            beyond_s.append(time.monotonic() - start - QUARANTINE_S)
            assert lease is not None and lease.seq == 2 * kill
            writer.publish(lease, total_tok=1)
            for seq in (2 * kill, 2 * kill + 1):
                reader.done(reader.take(seq))
            process.join()
        writer.leave()
        reader.leave()
    return {
        "bench": "ring",
        "mode": "reclaim",
        "count": count,
        "quarantine_s": QUARANTINE_S,
        "reclaim_s": statistics.median(beyond_s),
        "max_s": max(beyond_s),
    }


def idle(seconds: float) -> Figures:
    """CPU of a process whose take waits for nothing."""
    with ring(SMALL, 2) as path:
        reader = RingReader(path, "r")
        end, used = time.monotonic() + seconds, time.process_time()

        def stop() -> bool:
            return time.monotonic() > end

        try:
            reader.take(0, stop=stop)
        except Exception as error:
            assert type(error).__name__ == "Stopped"
        share = (time.process_time() - used) / seconds
        reader.leave()
    return {"bench": "ring", "mode": "idle", "cpu_share": share}


def machine() -> Figures:
    text = Path("/proc/cpuinfo").read_text()
    names = [line.partition(": ")[2] for line in text.splitlines() if line.startswith("model name")]
    return {
        "gpu": None,
        "torch": None,
        "command": " ".join(["python -m benchmarks.ring", *sys.argv[1:]]),
        "commit": commit(),
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="launch.py bench ring", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="a few seconds, rough figures")
    parser.add_argument("--tokens", type=count, default=8192, help="of a payload slot, 10 KiB each")
    parser.add_argument("--json", type=new_file, help="write all measurements there")
    args = parser.parse_args()
    many, few = (200, 3) if args.quick else (5000, 40)
    measures: list[Callable[[], Figures]] = [
        lambda: handoff(12, many),
        lambda: handoff(64, many),
        lambda: payload(args.tokens, 4, few, verify=False),
        lambda: payload(args.tokens, 4, few, verify=True),
        lambda: wake_up(many // 5),
        lambda: reclaim(few // 3 + 1),
        lambda: idle(few / 4),
    ]
    where = machine()
    print(f"{where['cpu']}, {where['cores']} cores, load {where['load']:.1f}")
    found = []
    for measure in measures:
        figures = measure()
        found.append(figures | where)
        cells = (f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in figures.items())
        print("  ".join(cells), flush=True)
        keep(found, args.json)


if __name__ == "__main__":
    main()
