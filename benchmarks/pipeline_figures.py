"""The numbers of `bench pipeline`, from what its phases have left behind, and the short text."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash.spans import COMPUTE, COPY, Span, busy_s, read_trace
from launcher.preflight import Facts
from launcher.rundir import PACKAGES, RunDir
from launcher.screen import percent, seconds, size

from . import commit
from .watch import SMI_COLUMNS, Rate, Window

if TYPE_CHECKING:
    from .pipeline import Measured

KERNELS = ("triton", "flash-linear-attention", "causal-conv1d", "liger-kernel")
SIDES = {"target": "target alone", "both": "both", "drafter": "drafter alone"}
METHOD = (
    "one life of the processes: target alone while the trainer, warm, waits for a seq that the "
    "bench holds; then both; then the trainer alone, the bench publishing freed slots again at "
    "once, unchanged. Rates run from hand-over to hand-over; tok_per_s is the slower side's"
)


def figures(found: Measured, facts: Facts, run: RunDir, attempt: Path) -> dict[str, Any]:
    config, prepared = facts.config, facts.prepared
    assert prepared is not None
    targets = [place.name for place in facts.places if place.name != "trainer_0"]
    both, drafter = found.windows["both"], found.windows["drafter"]
    rates = {
        "target_alone": found.target_rate,
        "drafter_alone": found.watch.rate(["trainer_0"], drafter),
        "made": found.watch.rate(targets, both),
        "trained": found.watch.rate(["trainer_0"], both),
    }
    tok_per_s = {name: rate.tok_per_s if rate else None for name, rate in rates.items()}
    together = least(tok_per_s["made"], tok_per_s["trained"])
    slower = least(tok_per_s["target_alone"], tok_per_s["drafter_alone"])
    docs = prepared.num_documents / prepared.tokens
    gpus = {place.name: place.gpu for place in facts.places}
    named = [gpu.name for gpu in gpus.values() if gpu is not None]
    metrics = run.last_metrics() or {}
    traced = _of_traces(found, run, list(gpus))
    return {
        "bench": "pipeline",
        "gpu": named[0] if named else None,
        "gpus": {name: f"{gpu.index}: {gpu.name}" if gpu else None for name, gpu in gpus.items()},
        **{name.replace("-", "_"): _version(name) for name in (*PACKAGES, *KERNELS)},
        "commit": commit(),
        "loss": config.train.loss,
        "mode": config.step_mode,
        "passes_per_slot": config.train.passes_per_slot,
        "targets": config.targets,
        "slots": config.ring.slots,
        "max_tokens": config.ring.max_tokens,
        "slot_bytes": facts.slot_bytes,
        "method": METHOD,
        "tok_per_s": together,
        "ratio_to_slower_half": together / slower if together and slower else None,
        **{f"{name}_tok_per_s": value for name, value in tok_per_s.items()},
        "seconds": {SIDES[name]: window.seconds for name, window in found.windows.items()},
        "slots_counted": {name: rate.slots if rate else 0 for name, rate in rates.items()},
        "samples_per_s_per_target_gpu": _per(together, docs, config.targets),
        "samples_per_s_per_trainer_gpu": _per(together, docs, 1),
        "target_alone_samples_per_s_per_gpu": _per(tok_per_s["target_alone"], docs, config.targets),
        "drafter_alone_samples_per_s_per_gpu": _per(tok_per_s["drafter_alone"], docs, 1),
        "wait_s": found.waited_s,
        "wait_share": _shares(found.waited_s, both),
        **traced,
        "lasting_busy_share": lasting(
            {name: shares["both"] for name, shares in traced["busy_share"].items()}, tok_per_s
        ),
        "nvidia_smi": {
            name: {
                SIDES[phase]: _smi(found.smi.means(gpu.uuid, window))
                for phase, window in found.windows.items()
            }
            if gpu is not None
            else None
            for name, gpu in gpus.items()
        },
        "gb_per_s": _gb_per_s(rates["made"], facts),
        "cpu_cores": _shares(found.cpu_s, both),
        "ring_create_s": found.ring_s,
        "page_locked": {name: _pin_line(attempt / f"{name}.log") for name in gpus},
        "warm_up_s": found.warm_s,
        "loss_value": metrics.get("loss"),
    }


def least(*values: float | None) -> float | None:
    """None where one of them is."""
    known = [value for value in values if value is not None]
    return min(known) if len(known) == len(values) else None


def lasting(busy: dict[str, float], tok_per_s: dict[str, float | None]) -> dict[str, float]:
    """Shares of the window, without what a side did on the backlog that it used up or made: once
    the ring is empty, or full, it waits for the other."""
    made, trained = tok_per_s["made"], tok_per_s["trained"]
    if not made or not trained:
        return {}
    return {
        name: share * min(1.0, made / trained if name == "trainer_0" else trained / made)
        for name, share in busy.items()
    }


def _of_traces(found: Measured, run: RunDir, names: list[str]) -> dict[str, Any]:
    """From the spans that both halves wrote: who computed how long, and what the copies took."""
    traces = {}
    for name in names:
        path = run.traces / f"{name}.json"
        traces[name] = read_trace(path) if path.exists() else []
    return {
        "busy_share": {
            name: {
                SIDES[phase]: busy_s(_row(trace, COMPUTE), window.start_s, window.end_s)
                / window.seconds
                for phase, window in found.windows.items()
            }
            for name, trace in traces.items()
        },
        "copy_s_per_slot": {
            name: _mean_copy_s(trace, found.windows["both"]) for name, trace in traces.items()
        },
    }


def _row(trace: list[Span], row: str) -> list[Span]:
    return [span for span in trace if span.row == row]


def _mean_copy_s(trace: list[Span], window: Window) -> dict[str, float]:
    """{"h2d": seconds} by name: the mean of the copies that began in the window."""
    found: dict[str, list[float]] = {}
    for span in _row(trace, COPY):
        if span.start_s in window:
            found.setdefault(span.name, []).append(span.end_s - span.start_s)
    return {name: sum(times) / len(times) for name, times in found.items()}


def _smi(means: dict[str, float] | None) -> dict[str, float] | None:
    """nvidia-smi's names with their units."""
    if means is None:
        return None
    return {f"{name.replace('.', '_')}_{SMI_COLUMNS[name]}": mean for name, mean in means.items()}


def _shares(of: dict[str, float], window: Window) -> dict[str, float]:
    return {name: value / window.seconds for name, value in of.items()}


def _per(tok_per_s: float | None, docs_per_token: float, gpus: int) -> float | None:
    return None if tok_per_s is None else tok_per_s * docs_per_token / gpus


def _gb_per_s(rate: Rate | None, facts: Facts) -> float | None:
    """Bytes that the target workers put into the ring."""
    if rate is None:
        return None
    per_slot = sum(field.nbytes for field in facts.fields if not field.per_token)
    per_token = sum(field.valid_bytes(1) for field in facts.fields if field.per_token)
    return (rate.tok_per_s * per_token + rate.slots_per_s * per_slot) / 1e9


def _pin_line(log: Path) -> str | None:
    """What the half said about page-locking the ring; None where it did not."""
    lines = [line for line in log.read_text().splitlines() if "page-locked" in line]
    return lines[-1].partition(": ")[2] if lines else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def summary(row: dict[str, Any]) -> str:
    """A few lines for the terminal."""
    slower = "target" if _slower_is_target(row) else "drafter"
    lines = [
        "",
        f"pipeline       {_tok(row['tok_per_s'])}  {_ratio(row)} of its slower half, the {slower} "
        f"(passes_per_slot {row['passes_per_slot']}, {seconds(row['seconds']['both'])})",
        f"target alone   {_tok(row['target_alone_tok_per_s'])}  "
        f"{row['slots_counted']['target_alone']} slots counted",
        f"drafter alone  {_tok(row['drafter_alone_tok_per_s'])}  "
        f"{row['slots_counted']['drafter_alone']} slots counted",
    ]
    for name, waits in row["wait_share"].items():
        smi = (row["nvidia_smi"][name] or {}).get("both")
        seen = f", nvidia-smi {smi['utilization_gpu_percent']:.0f}%" if smi else ""
        share = row["lasting_busy_share"].get(name)
        lasts = f" ({percent(share)} without its backlog)" if share is not None else ""
        cores = row["cpu_cores"].get(name)
        used = f", {cores:.2f} CPU cores" if cores is not None else ""
        lines.append(
            f"{name:13}  computes {percent(row['busy_share'][name]['both'])}{lasts}{seen}, "
            f"waits for slots {percent(waits)}{used}"
        )
    gb_per_s = "no" if row["gb_per_s"] is None else f"{row['gb_per_s']:.2f}"
    lines.append(
        f"ring           {row['slots']} slots x {size(row['slot_bytes'])}, {gb_per_s} GB/s, made "
        f"in {seconds(row['ring_create_s'])}; warm after {seconds(row['warm_up_s'])}"
    )
    return "\n".join(lines)


def _slower_is_target(row: dict[str, Any]) -> bool:
    target, drafter = row["target_alone_tok_per_s"], row["drafter_alone_tok_per_s"]
    return target is not None and drafter is not None and target < drafter


def _tok(value: float | None) -> str:
    return f"{value:10,.0f} tok/s" if value is not None else "  too short to measure"


def _ratio(row: dict[str, Any]) -> str:
    ratio = row["ratio_to_slower_half"]
    return f"{ratio:.3f}" if ratio is not None else "unknown share"
