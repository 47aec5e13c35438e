"""`launch.py plan` in text: the resolved config and what follows from it on this machine."""

from __future__ import annotations

import tempfile
from pathlib import Path

from dflash.config import Config, dump_config
from dflash.prepare import Prepared

from .preflight import Facts, Place, check_early
from .process import StopSignals
from .screen import Screen, size, table
from .session import prepare_program, run_prepare


def plan_command(config: Config) -> int:
    """Print the plan. ConfigError, after it, where `run` would refuse."""
    check_early(config)
    with tempfile.TemporaryDirectory(prefix="dflash-plan-") as temp, StopSignals() as signals:
        resolved, out = Path(temp, "run.yaml"), Path(temp, "prepared.json")
        resolved.write_text(dump_config(config))
        program = prepare_program(resolved, out, Path(temp))
        if code := run_prepare(program, Screen(), signals):
            return code
        prepared = Prepared.from_json(out.read_text())
    facts = Facts.gather(config, Path(prepared.target_dir), prepared)
    print(plan_text(facts))
    facts.refuse()
    return 0


def plan_text(facts: Facts) -> str:
    sections = (
        ("config", dump_config(facts.config).splitlines()),
        ("target", _target(facts)),
        ("drafter", _drafter(facts)),
        ("data", _data(facts)),
        ("steps", _steps(facts)),
        ("ring", _ring(facts)),
        ("processes", _processes(facts)),
        ("warnings", facts.warnings()),
    )
    blocks = [
        "\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections if lines
    ]
    return "\n\n".join(blocks)


def _target(facts: Facts) -> list[str]:
    target = facts.target
    delta = f" ({target.delta_layers} of them Gated DeltaNet)" if target.delta_layers else ""
    return [
        f"{target.architecture}: {target.num_layers} layers{delta}, hidden {target.hidden_size}, "
        f"vocabulary {target.vocab_size:,}, {target.num_parameters / 1e9:.2f} B parameters",
        f"taps {', '.join(map(str, facts.arch.taps))} (0-based layers)",
    ]


def _drafter(facts: Facts) -> list[str]:
    arch = facts.arch
    lines = [
        f"{arch.num_layers} layers, {arch.num_parameters / 1e6:.1f}M parameters, "
        f"{arch.num_attention_heads}/{arch.num_key_value_heads} heads of {arch.head_dim}, "
        f"block {arch.block_size}"
    ]
    if facts.prepared is not None:
        lines.append(f"mask token {arch.mask_token_id}")
    return lines


def _data(facts: Facts) -> list[str]:
    data = facts.prepared
    if data is None:
        return []
    passes = facts.config.end_seq * facts.config.ring.max_tokens / max(data.tokens, 1)
    return [
        f"{data.num_documents:,} conversations, {data.tokens:,} tokens, "
        f"{data.supervised_tokens:,} of them trained; {data.num_heldout:,} held out",
        f"{data.dropped:,} dropped, {data.truncated:,} truncated",
        f"the run goes over the data about {passes:.1f} times",
    ]


def _steps(facts: Facts) -> list[str]:
    config, anchors, block = facts.config, facts.config.num_anchors, facts.arch.block_size
    passes = config.train.passes_per_slot
    return [
        f"{config.train.steps:,} steps: {config.end_seq:,} slots x {passes} "
        f"pass{'es' if passes > 1 else ''}",
        f"a step: up to {config.ring.max_tokens:,} tokens, {anchors:,} anchors x block {block} = "
        f"{anchors * block:,} query positions",
    ]


def _ring(facts: Facts) -> list[str]:
    ring = facts.config.ring
    limit = "" if facts.free_cgroup is None else f", memory limit leaves {size(facts.free_cgroup)}"
    rows = [["file", "dtype", "shape", "bytes"]]
    rows += [[f"{f.name}.bin", f.dtype, str(list(f.shape)), f"{f.nbytes:,}"] for f in facts.fields]
    return [
        f"{ring.path}: {ring.slots} slots x {size(facts.slot_bytes)} = {size(facts.ring_bytes)}; "
        f"{size(facts.free_tmpfs)} free{limit}",
        *table(rows, indent=""),
    ]


def _processes(facts: Facts) -> list[str]:
    rows = [["process", "device", "threads", "GPU memory (estimate)"]]
    rows += [
        [place.name, _device(place), str(place.threads), _need(place)] for place in facts.places
    ]
    if not any(place.need for place in facts.places):
        rows = [row[:-1] for row in rows]
    return table(rows, indent="")


def _device(place: Place) -> str:
    if place.gpu is not None:
        return f"GPU {place.gpu.index} ({place.gpu.name})"
    return "cpu" if place.need is None else "cuda: no GPU here"


def _need(place: Place) -> str:
    if place.need is None:
        return "-"
    need = place.need
    return (
        f"{size(need.total)}: weights and states {size(need.weights)}, ends {size(need.ends)}, "
        f"slots {size(need.slots)}, activations {size(need.activations)}"
    )
