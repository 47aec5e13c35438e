"""A whole run in seconds: a tiny random float32 target, a few conversations, the real programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import torch
import yaml
from chatty import make_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch.py"


def save_target(directory: Path) -> Path:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 8,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def write_conversations(path: Path, count: int = 60) -> Path:
    rows = []
    for number in range(count):
        question = f"what is the question number {number}" + " and again" * (number % 7)
        answer = f"the answer is {number * 37 % 101}" + " the answer" * (number % 5)
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
        rows.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(rows) + "\n")
    return path


def write_config(directory: Path, name: str = "tiny", **sections: dict[str, Any]) -> Path:
    """A config whose run, ring and data live in `directory` (and /dev/shm)."""
    if not (directory / "target").exists():
        save_target(directory / "target")
        write_conversations(directory / "data.jsonl")
    raw: dict[str, Any] = {
        "run": {"name": name, "dir": str(directory / "runs"), "seed": 3},
        "data": {"path": str(directory / "data.jsonl"), "heldout": 0.1},
        "target": {"model": str(directory / "target"), "dtype": "float32", "taps": [0, 2]},
        "drafter": {"dtype": "float32", "num_layers": 2, "block_size": 4},
        "ring": {
            "path": f"/dev/shm/hs_ring_test_{uuid.uuid4().hex[:12]}",
            "slots": 8,
            "max_tokens": 256,
            "max_docs": 16,
            "quarantine_s": 0.05,
        },
        "train": {
            "steps": 24,
            "lr": 3e-3,
            "passes_per_slot": 2,
            "log_every": 1,
            "checkpoint_every": 8,
        },
        "eval": {"prompts": 2, "max_new_tokens": 12, "threads": 1},
    }
    for section, values in sections.items():
        raw[section] = values if not isinstance(values, dict) else raw.get(section, {}) | values
    path = directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def environment(directory: Path) -> dict[str, str]:
    return os.environ | {"DFLASH_RING_CACHE": str(directory / "cache"), "OMP_NUM_THREADS": "1"}


def start(directory: Path, *arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(LAUNCH), *map(str, arguments)],
        env=environment(directory),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def launch(directory: Path, *arguments: str | Path, code: int = 0) -> str:
    """Run launch.py to its end; its output. Fails the test on another exit code."""
    process = start(directory, *arguments)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == code, f"exit code {process.returncode}\n{output}"
    return output


def losses(directory: Path, name: str = "tiny") -> list[tuple[int, float, float]]:
    """(step, loss, grad norm) of every step, as written: equal lists are equal bits."""
    lines = (directory / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [(row["step"], row["loss"], row["grad_norm"]) for row in map(json.loads, lines)]
