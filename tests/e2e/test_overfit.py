"""One document, repeated: the drafter must learn it by heart, and real decoding must show it."""

from __future__ import annotations

import json
import string
from pathlib import Path

import torch
from whole_run import launch, losses, write_config

from dflash.arch import TargetArch
from dflash.decode import plain_greedy
from dflash.prepare import load_tokenizer
from dflash.target import Target

NEW_TOKENS, BLOCK = 48, 4


def own_answer(directory: Path, question: str) -> str:
    """What the target itself says: on any other text a drafter could not be right."""
    path = directory / "target"
    target = Target.load(path, TargetArch.read(path), (0, 2), dtype=torch.float32)
    tokenizer = load_tokenizer(path)
    # A random model says random bytes, which are no text: let it say only A to Z and 0 to 9.
    mute = torch.ones(target.arch.vocab_size, dtype=torch.bool)
    mute[tokenizer.convert_tokens_to_ids([*string.ascii_uppercase, *string.digits])] = False
    target.model.lm_head.weight[mute] = 0
    target.model.lm_head.weight.mul_(25)  # an untrained head is too flat to be sure of anything
    target.model.save_pretrained(path)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    tokens = plain_greedy(target, prompt, NEW_TOKENS).tokens
    text = tokenizer.decode(tokens)
    again = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert again == tokens, "the answer must survive the way through text"
    return str(text)


def test_tau_of_real_decoding_reaches_the_block_size(tmp_path: Path) -> None:
    train = {"steps": 200, "lr": 2e-3, "passes_per_slot": 10, "log_every": 20}
    config = write_config(
        tmp_path, "overfit", data={"heldout": 0}, train=train, drafter={"block_size": BLOCK}
    )
    question = "what is the question"
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": own_answer(tmp_path, question)},
    ]
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    launch(tmp_path, "run", config)
    assert losses(tmp_path, "overfit")[-1][1] < 0.3, "all but the stop token, which is mute"

    run, out = tmp_path / "runs/overfit", tmp_path / "eval.json"
    arguments = ["--data", tmp_path / "data.jsonl", "--max-new-tokens", NEW_TOKENS, "--json", out]
    launch(tmp_path, "eval", run, *arguments)
    result = json.loads(out.read_text())
    accepted = result["per_prompt"][0]["accepted"]
    assert accepted[:-1] == [BLOCK - 1] * (len(accepted) - 1), "every whole block is accepted"
    assert result["lossless"] == {"identical": 1, "tie": 0, "different": 0}
    assert result["walk_equal"] == 1 and result["tau_walk"] == result["tau"]
