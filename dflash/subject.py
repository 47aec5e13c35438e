"""What `evaluate` is asked about: the drafter of a run, a checkpoint or an export; and prompts."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from .arch import DrafterArch
from .chat import TemplateKwargs, first_answer, prompt_ids
from .checkpoint import find_checkpoint, load
from .config import Config, ConfigError, parse_config
from .data import Dataset, read_conversations
from .export import is_export, read_export


@dataclass(frozen=True)
class Subject:
    """The drafter to evaluate, and what is known about where it comes from."""

    path: Path
    arch: DrafterArch
    weights: dict[str, torch.Tensor]
    config: Config | None
    """Of the run that trained it; None for somebody else's drafter."""
    step: int | None
    data_fingerprint: str | None
    record: Path
    """Where its result is kept."""

    @property
    def run(self) -> Path | None:
        return None if self.config is None else self.config.run.path


def open_subject(path: str | Path) -> Subject:
    """A run (its newest checkpoint), a checkpoint or an exported directory. Raises ConfigError."""
    path = Path(path)
    if not path.is_dir():
        raise ConfigError(f"{path}: no such directory (a run, a checkpoint or an export)")
    if is_export(path) and not (path / "meta.json").exists():
        arch, weights, origin = read_export(path)
        config = parse_config(origin["config"], str(path)) if origin else None
        step, data = origin.get("step"), origin.get("data_fingerprint")
        return Subject(path, arch, weights, config, step, data, path / "eval.json")
    path = find_checkpoint(path)
    saved = load(path)
    config = parse_config(yaml.safe_load(saved.config_yaml), str(path / "run.yaml"))
    config.refuse_untrained(path)
    # The run may have been moved since its config was written.
    run = path.absolute().parent.parent
    config = config.model_copy(
        update={"run": config.run.model_copy(update={"dir": run.parent, "name": run.name})}
    )
    record = run / "eval" / f"step_{saved.step}.json"
    return Subject(
        path, saved.arch, saved.weights, config, saved.step, saved.data_fingerprint, record
    )


# --- the prompts ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PromptSet:
    name: str
    fingerprint: str
    prompts: list[list[int]]


def load_prompts(subject: Subject, data: list[str] | None, tokenizer: Any) -> list[PromptSet]:
    """The first prompts of every conversation of each JSONL file, or the held-out ones of the
    run. Raises ConfigError."""
    if data:
        kwargs = subject.config.data.template_kwargs if subject.config else {}
        return [_prompts_of_file(Path(path), tokenizer, kwargs) for path in data]
    return [_heldout_prompts(subject)]


def _heldout_prompts(subject: Subject) -> PromptSet:
    prepared = None if subject.run is None else subject.run / "prepared.json"
    if prepared is None or not prepared.exists():
        raise ConfigError(
            f"{subject.path}: its run is not here: say which prompts with --data FILE"
        )
    known = json.loads(prepared.read_text())
    if not Path(known["dataset"]).exists():
        raise ConfigError(
            f"{known['dataset']}: the run's tokenised data is gone: say which prompts with "
            "--data FILE"
        )
    heldout = Dataset.load(known["dataset"]).heldout
    if not heldout:
        raise ConfigError(
            f"{subject.path}: the run held no prompts out: give some with --data FILE"
        )
    return PromptSet("held-out", known["fingerprint"], [ids.tolist() for ids, _ in heldout])


def _prompts_of_file(path: Path, tokenizer: Any, kwargs: TemplateKwargs) -> PromptSet:
    prompts = [
        tuple(prompt_ids(tokenizer, messages[: first_answer(messages)], kwargs).tolist())
        for _, messages in read_conversations(path)
    ]
    unique = list(dict.fromkeys(prompts))
    return PromptSet(path.name, _digest(unique), [list(ids) for ids in unique])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
