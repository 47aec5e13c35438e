"""What parity is measured on: tiny random drafters of several kinds, and the demo's trained one."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import others
import pytest
import torch
from loguru import logger
from tiny import VOCAB
from tiny_run import make_run

from dflash.arch import DrafterArch, TargetArch
from dflash.config import ConfigError
from dflash.data import Dataset
from dflash.export import build_drafter, export, read_export
from dflash.model import DFlashDrafter, FrozenEnds
from dflash.target import Target, load_ends, resolve_target

logger.disable("speculators")  # it says where it reads each tensor from

FACTS: list[str] = []
"""What was measured, printed at the end."""

RUN = Path(__file__).parent.parent / "runs" / os.environ.get("RUN", "smollm2")

SLIDING = {"layer_types": ("sliding_attention",) * 2, "sliding_window": 8}
MIXED = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 8}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("qwen3", {}),
    "sliding": ("qwen3", SLIDING),
    "sliding-bidirectional": ("llama", SLIDING | {"is_causal": False}),
    "mixed": ("qwen3", MIXED),
    "mixed-bidirectional": ("llama", MIXED | {"is_causal": False}),
    "biases": ("llama", {"attention_bias": True}),
    "gemma": ("gemma3", MIXED),
    "hybrid": ("qwen3_5", {}),
}
"""Name -> (the target's family, what differs in the drafter)."""
NOT_IN_SPECULATORS = {"mixed", "gemma"}


@dataclass
class Subject:
    """One drafter, exported, and its target, both in float32."""

    name: str
    zlab_dir: Path
    speculators_dir: Path | None
    """None where that layout has no words for the drafter."""
    target: Target
    prompts: list[list[int]]
    max_new_tokens: int

    @property
    def arch(self) -> DrafterArch:
        return read_export(self.zlab_dir)[0]

    @property
    def drafter(self) -> DFlashDrafter:
        """From the exported bfloat16 weights, computing in float32."""
        arch, weights, _ = read_export(self.zlab_dir)
        return build_drafter(arch, weights, torch.float32)

    @property
    def ends(self) -> FrozenEnds:
        return load_ends(self.target.directory, self.target.arch, torch.float32, "cpu")


def tiny_subject(name: str, directory: Path) -> Subject:
    """Trained for some steps on one document, so that it proposes what its target says."""
    family, changes = KINDS[name]
    run = make_run(directory, family=family, arch_changes=changes, train_steps=60)
    export(run.path, directory / "z-lab")
    other = None
    if name not in NOT_IN_SPECULATORS:
        other = directory / "speculators"
        export(run.path, other, "speculators")
    trained = [4, 10, 11, 12, 5]
    prompts = [trained, *([4, *range(8 + i, 14 + 2 * i), 5] for i in range(3))]
    assert max(max(prompt) for prompt in prompts) < VOCAB
    return Subject(name, directory / "z-lab", other, run.target, prompts, 40)


def trained_subject(directory: Path) -> Subject:
    if not RUN.is_dir():
        pytest.skip(f"no {RUN.parent.name}/{RUN.name} here: `make demo` trains it (or RUN=NAME)")
    export(RUN, directory / "z-lab")
    other: Path | None = directory / "speculators"
    try:
        export(RUN, directory / "speculators", "speculators")
    except ConfigError:
        other = None
    arch, _, origin = read_export(directory / "z-lab")
    model = origin["config"]["target"]["model"]
    prepared = json.loads((RUN / "prepared.json").read_text())
    where = resolve_target(model)
    target = Target.load(where, TargetArch.read(where), arch.taps, dtype=torch.float32)
    heldout = Dataset.load(prepared["dataset"]).heldout[:6]
    prompts = [ids.tolist() for ids, _ in heldout]
    return Subject(RUN.name, directory / "z-lab", other, target, prompts, 64)


@pytest.fixture(scope="session", params=[*KINDS, "trained"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "trained":
        return trained_subject(directory)
    return tiny_subject(request.param, directory)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def say(fact: str) -> None:
    FACTS.append(fact)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    names = ("torch", "transformers", "speculators")
    versions = [f"{name} {version(name)}" for name in names]
    theirs = [name.replace("==", " ") for name in others.FILES if others.is_here(name)]
    terminalreporter.section(f"parity with {', '.join(versions + theirs)}")
    for fact in FACTS:
        terminalreporter.line(fact)


def need(requirement: str) -> None:
    if not others.is_here(requirement):
        pytest.skip(f"{requirement} could not be fetched: python parity/others.py says why")
