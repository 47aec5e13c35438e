"""A finished run over a tiny target, made in the test process: run.yaml, data, one checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tiny import VOCAB, drafter_arch, load_tiny

from dflash.arch import DrafterArch
from dflash.checkpoint import save, snapshot
from dflash.config import Config, dump_config, parse_config
from dflash.decode import plain_greedy
from dflash.prepare import load_tokenizer, prepare
from dflash.step import Batch, TrainState, train_step
from dflash.target import Target

WORDS = [f"w{index}" for index in range(4, VOCAB)]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}w4 {{ m['content'] }} w5 "
    "{% else %}{{ m['content'] }} </s> {% endif %}{% endfor %}"
)
TOKENS = 64


@dataclass
class TinyRun:
    path: Path
    config: Config
    arch: DrafterArch
    target: Target
    checkpoint: Path


def save_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)


def write_conversations(path: Path, count: int = 40) -> Path:
    lines = []
    for index in range(count):
        asked = " ".join(WORDS[2 + (index * 7 + step) % 60] for step in range(3 + index % 5))
        answer = " ".join(WORDS[2 + (index * 3 + step) % 60] for step in range(8))
        messages = [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": answer},
        ]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines) + "\n")
    return path


def overfit_slot(target: Target, prompt: list[int]) -> Batch:
    """One document that fills its slot: a prompt and the target's own greedy answer."""
    answer = plain_greedy(target, prompt, TOKENS - len(prompt), stop=()).tokens
    ids_T = torch.tensor([*prompt, *answer])
    all_TF = torch.empty(TOKENS, 2 * target.arch.hidden_size, dtype=target.dtype)
    target.capture([ids_T], all_TF)
    return Batch(
        all_TF=all_TF,
        vlh_TH=None,
        ids_T=ids_T,
        lm_T=torch.arange(TOKENS) >= len(prompt),
        lens_D=torch.tensor([TOKENS]),
        pos_T=torch.arange(TOKENS),
        total_tok=torch.tensor(TOKENS),
    )


def make_run(
    directory: Path,
    *,
    family: str = "qwen3",
    dtype: str = "float32",
    train_steps: int = 3,
    arch_changes: dict[str, Any] | None = None,
    eval_changes: dict[str, Any] | None = None,
    trained_prompt: list[int] | None = None,
) -> TinyRun:
    torch_dtype = torch.float32 if dtype == "float32" else torch.bfloat16
    target = load_tiny(directory, family, taps=(0, 2), dtype=torch_dtype)
    save_tokenizer(target.directory)
    data = write_conversations(directory / "data.jsonl")
    raw = {
        "run": {"name": "tiny", "dir": str(directory / "runs")},
        "data": {"path": str(data), "heldout": 0.4},
        "target": {"model": str(target.directory), "dtype": dtype, "taps": [0, 2]},
        "drafter": {
            "num_layers": 2,
            "block_size": 4,
            "dtype": dtype,
            "mask_token": f"w{VOCAB - 1}",
        },
        "ring": {"max_tokens": TOKENS, "max_docs": 4},
        "train": {"steps": train_steps, "lr": 1e-2, "anchor_density": 500},
        "eval": {"prompts": 3, "max_new_tokens": 12, "threads": 1} | (eval_changes or {}),
    }
    config = parse_config(raw, "test")
    arch = drafter_arch(target, mask_token_id=VOCAB - 1, **(arch_changes or {}))
    run = config.run.path
    run.mkdir(parents=True)
    (run / "run.yaml").write_text(dump_config(config))
    prepared = prepare(config)
    (run / "prepared.json").write_text(prepared.to_json())

    state = TrainState.create(config, arch, target.ends())
    first = load_tokenizer(target.directory)("w4 w10 w11 w12 w5")["input_ids"]
    slot = overfit_slot(target, trained_prompt or first)
    for _ in range(train_steps):
        train_step(state, slot, seq=state.slot, pass_idx=state.pass_idx)
    saved = snapshot(state, seq=state.slot, data_fingerprint=prepared.fingerprint)
    checkpoint = save(run / "checkpoints", saved, keep=2)
    return TinyRun(run, config, arch, target, checkpoint)
