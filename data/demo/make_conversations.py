"""Answers the demo's prompts with the target itself: drafters learn from what their target says.

    python data/demo/make_conversations.py --target DIR [--out FILE] [--limit N]

Greedy decoding in bfloat16, in left-padded batches of a fixed order: the same machine gives the
same file again (another CPU, --batch or --threads may round a near-tie the other way). An answer
that hits --max-new-tokens has no stop token to train on and is mostly a repetition loop: its
conversation is dropped and counted, never cut. One JSON object a line, `messages` only.
The file in the repository: 1315 prompts to SmolLM2-135M-Instruct, 169 dropped, half an hour on a
busy two-core machine.
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
STRETCH = 64
"""Tokens between two looks at which answers have stopped: half of them are shorter than this, and
a finished row that stays in the batch costs as much as a live one."""


@torch.inference_mode()
def extend(model: Any, tokenizer: Any, rows: list[list[int]], new: int) -> list[list[int]]:
    """The next `new` tokens of every row, greedily; fewer where a stop token comes first."""
    batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    out = model.generate(**batch, max_new_tokens=new, do_sample=False)
    stop = tokenizer.eos_token_id
    added = [row.tolist() for row in out[:, batch["input_ids"].shape[1] :]]
    return [row[: row.index(stop) + 1] if stop in row else row for row in added]


def answer(
    model: Any, tokenizer: Any, chats: list[Messages], max_new: int, batch: int
) -> list[str | None]:
    """The next assistant message of each chat; None where it did not stop in `max_new` tokens."""
    prompts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
        for chat in chats
    ]
    rows = [list(prompt["input_ids"]) for prompt in prompts]
    answers: list[list[int]] = [[] for _ in rows]
    live, start = list(range(len(rows))), time.monotonic()
    for done in range(0, max_new, STRETCH):
        live.sort(key=lambda n: len(rows[n]))  # little padding
        for first in range(0, len(live), batch):
            chunk = live[first : first + batch]
            added = extend(
                model,
                tokenizer,
                [rows[n] + answers[n] for n in chunk],
                min(STRETCH, max_new - done),
            )
            for n, tokens in zip(chunk, added, strict=True):
                answers[n] += tokens
        live = [n for n in live if answers[n][-1] != tokenizer.eos_token_id]
        print(
            f"{len(rows) - len(live)} of {len(rows)} answers within {done + STRETCH} tokens, "
            f"{time.monotonic() - start:.0f} s",
            flush=True,
        )
    unfinished = set(live)
    return [
        None if n in unfinished else tokenizer.decode(tokens, skip_special_tokens=True)
        for n, tokens in enumerate(answers)
    ]


def converse(
    model: Any, tokenizer: Any, turns: list[tuple[str, ...]], max_new: int, batch: int
) -> list[Messages]:
    """Plays every turn; conversations with an unfinished or empty answer are left out."""
    chats: dict[int, Messages] = {n: [] for n in range(len(turns))}
    for turn in range(max(map(len, turns))):
        asking = [n for n in chats if len(turns[n]) > turn]
        for n in asking:
            chats[n] = [*chats[n], {"role": "user", "content": turns[n][turn]}]
        answers = answer(model, tokenizer, [chats[n] for n in asking], max_new, batch)
        for n, text in zip(asking, answers, strict=True):
            if text and text.strip():
                chats[n] = [*chats[n], {"role": "assistant", "content": text}]
            else:
                del chats[n]
    return list(chats.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--target", required=True, help="Hugging Face directory or hub name")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("conversations.jsonl"))
    parser.add_argument("--limit", type=int, help="only the first N prompts")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=320)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.target, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.bfloat16).eval()
    turns = conversations()[: args.limit]
    chats = converse(model, tokenizer, turns, args.max_new_tokens, args.batch)
    print(f"{len(chats)} conversations kept, {len(turns) - len(chats)} dropped")
    lines = [json.dumps({"messages": chat}, ensure_ascii=False) + "\n" for chat in chats]
    args.out.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
