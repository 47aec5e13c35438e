"""Small real tokenizers with ChatML-like templates, and targets without real weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

START, END, PAD, SPARE = "<|im_start|>", "<|im_end|>", "<|pad|>", "<|spare|>"
ANSWER = "{{ message['content'] }}"
CLOSE = "{{ '<|im_end|>' }}"


def chatml(answer: str = ANSWER + CLOSE, prompt: str = "") -> str:
    """ChatML; `answer` is what stands for an assistant's content and stop token."""
    return (
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\n' }}"
        "{% if message['role'] == 'assistant' %}" + answer + "{% else %}"
        "{{ message['content'] + '<|im_end|>' }}{% endif %}"
        "{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n" + prompt + "' }}{% endif %}"
    )


PLAIN = chatml()
MARKED = chatml("{% generation %}" + ANSWER + CLOSE + "{% endgeneration %}")
MARKED_SHORT = chatml("{% generation %}" + ANSWER + "{% endgeneration %}" + CLOSE)
# As Qwen3's: the thinking of an answer is kept only where no user message follows.
DROPS_THINKING = chatml(
    "{% if loop.last %}{{ message['content'] }}"
    "{% else %}{{ message['content'].split('</think>')[-1] }}{% endif %}" + CLOSE
)


def may_think(mark: str = "") -> str:
    """As Qwen3's: without thinking, an empty thought stands before the answer."""
    thought = "{% if enable_thinking is false %}{{ '<think></think>\n' }}{% endif %}"
    end = "{% endgeneration %}" if mark else ""
    return chatml(thought + mark + ANSWER + CLOSE + end, prompt="' }}" + thought + "{{ '")


def make_tokenizer(template: str | None = PLAIN, extra: tuple[str, ...] = (SPARE,)) -> Any:
    """Byte-level BPE with a few merges (two newlines are one token), and five special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[PAD, START, END, *extra],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the answer is\n\n", "what is the question\n\n"] * 20, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=START,
        eos_token=END,
        pad_token=PAD,
        chat_template=template,
    )


def write_target(directory: Path, template: str | None = PLAIN, **changes: Any) -> Path:
    """config.json and tokenizer of a small Llama; what prepare reads: of weights only headers."""
    tokenizer = make_tokenizer(template)
    tokenizer.save_pretrained(directory)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(tokenizer) + 8,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    (directory / "config.json").write_text(json.dumps(config | changes))
    save_file({"none": np.zeros(1, np.float32)}, directory / "model.safetensors")
    return directory


def talk(*texts: str) -> list[dict[str, str]]:
    """A conversation: user, assistant, user, ..."""
    return [{"role": ("user", "assistant")[n % 2], "content": t} for n, t in enumerate(texts)]


def write_jsonl(path: Path, conversations: list[Any]) -> Path:
    rows = [json.dumps({"messages": messages}) for messages in conversations]
    path.write_text("\n".join(rows) + "\n")
    return path
