"""Answers the demo's prompts with the target itself: drafters learn from what their target says.

    python data/demo/make_conversations.py --target DIR [--out FILE] [--limit N]

Greedy decoding in bfloat16, left-padded batches in a fixed order: the same machine gives the same
file again (another CPU, or another --batch, may round a near-tie the other way). An answer that
hits --max-new-tokens has no stop token to train on and is mostly a repetition loop: its
conversation is dropped and counted, never cut. One JSON object a line, `messages` only.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from make_prompts import conversations
from transformers import AutoModelForCausalLM, AutoTokenizer

Messages = list[dict[str, str]]


@torch.inference_mode()
def answer(model: Any, tokenizer: Any, chats: list[Messages], max_new: int) -> list[str | None]:
    """The next assistant message of each chat; None where it did not stop in `max_new` tokens."""
    batch = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**batch, max_new_tokens=max_new, do_sample=False)
    stop = tokenizer.eos_token_id
    new = [row.tolist() for row in out[:, batch["input_ids"].shape[1] :]]
    return [
        tokenizer.decode(row[: row.index(stop)], skip_special_tokens=True) if stop in row else None
        for row in new
    ]


def converse(
    model: Any, tokenizer: Any, turns: list[tuple[str, ...]], max_new: int
) -> list[Messages | None]:
    """Plays every turn of a batch of conversations; None for those with an unfinished answer."""
    chats: list[Messages | None] = [[] for _ in turns]
    for turn in range(max(map(len, turns))):
        live = [n for n, chat in enumerate(chats) if chat is not None and len(turns[n]) > turn]
        asked = [[*(chats[n] or []), {"role": "user", "content": turns[n][turn]}] for n in live]
        answers = answer(model, tokenizer, asked, max_new)
        for n, chat, text in zip(live, asked, answers, strict=True):
            chats[n] = [*chat, {"role": "assistant", "content": text}] if text else None
    return chats


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--target", required=True, help="Hugging Face directory or hub name")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("conversations.jsonl"))
    parser.add_argument("--limit", type=int, help="only the first N prompts")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=320)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.target, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.bfloat16).eval()
    turns = conversations()[: args.limit]
    kept, start = 0, time.monotonic()
    temporary = args.out.with_suffix(".partial")
    with temporary.open("w") as file:
        for first in range(0, len(turns), args.batch):
            batch = turns[first : first + args.batch]
            for chat in converse(model, tokenizer, batch, args.max_new_tokens):
                if chat is not None:
                    file.write(json.dumps({"messages": chat}, ensure_ascii=False) + "\n")
                    kept += 1
            done = first + len(batch)
            print(
                f"{done}/{len(turns)} prompts, {kept} kept, {time.monotonic() - start:.0f} s",
                flush=True,
            )
    temporary.replace(args.out)


if __name__ == "__main__":
    main()
