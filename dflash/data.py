"""JSONL conversations -> tokenised documents and held-out prompts, cached in one .npz file.

    dataset_path, dataset = prepare_dataset(path, tokenizer, stops=..., options=DataOptions(...))
    dataset = Dataset.load(dataset_path)      needs numpy only
    ids, lm = dataset.document(i)             int32 [n], bool [n]: which tokens are trained

A line is {"messages": [{"role": "user", "content": "..."}, ...]}; every mistake in it is refused
with its line number. Whether a conversation is held out hangs on a hash of its first user message,
so a prompt is never on both sides, whatever else the file holds. Drafters want answers that the
target itself wrote: data/demo/make_conversations.py shows how.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from .chat import Ids, Mask, Messages, TemplateKwargs, first_answer, prompt_ids, render
from .config import ConfigError, cache_dir
from .random_documents import RandomDocuments

RECIPE = 1
"""Part of every fingerprint: raise it when the same input would give other documents."""
ROLES = ("system", "user", "assistant", "tool")
SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class DataOptions:
    max_tokens: int
    """Longer documents are cut there: a slot's size, or the target's context if that is less."""
    heldout: float
    min_supervised_tokens: int
    template_kwargs: TemplateKwargs = field(default_factory=dict, repr=False)
    """Not in the repr, which is part of every fingerprint: none keeps the older ones."""


@dataclass(frozen=True)
class Counts:
    """What became of the conversations of a file."""

    conversations: int
    truncated: int
    too_few_supervised: int
    """Dropped: fewer trained tokens than data.min_supervised_tokens."""
    heldout_repeats: int
    """Held-out conversations whose prompt another held-out one, or the training side, has."""

    @property
    def dropped(self) -> int:
        return self.too_few_supervised + self.heldout_repeats


@dataclass(frozen=True)
class Dataset:
    ids_S: Ids
    """Every document's tokens, one after the other."""
    lm_S: Mask
    starts_N1: NDArray[np.int64]
    """Where each document starts in them, and the end."""
    heldout: list[tuple[Ids, Ids]]
    """(prompt with the generation prompt, the answer the file has for it) of every held-out one."""
    counts: Counts

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document, int64 [N]."""
        return np.diff(self.starts_N1)

    def document(self, index: int) -> tuple[Ids, Mask]:
        """ids int32 [n] and loss mask bool [n] of one document (views)."""
        here = slice(self.starts_N1[index], self.starts_N1[index + 1])
        return self.ids_S[here], self.lm_S[here]

    def used_ids(self) -> NDArray[np.int64]:
        """Every token id that occurs anywhere in it, held-out part included, rising."""
        parts = [self.ids_S, *(part for pair in self.heldout for part in pair)]
        used_V = np.zeros(1 + max(int(part.max(initial=0)) for part in parts), bool)
        for part in parts:  # marking is linear; sorting a billion tokens is not
            used_V[part] = True
        return np.flatnonzero(used_V)

    def save(self, path: Path) -> None:
        """Atomic: a reader finds the whole file or none."""
        path.parent.mkdir(parents=True, exist_ok=True)
        prompts, answers = [p for p, _ in self.heldout], [a for _, a in self.heldout]
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
            np.savez(
                file,
                ids=self.ids_S,
                lm=self.lm_S,
                starts=self.starts_N1,
                prompts=_joined(prompts, np.int32),
                prompt_starts=_starts(prompts),
                answers=_joined(answers, np.int32),
                answer_starts=_starts(answers),
                counts=np.frombuffer(json.dumps(asdict(self.counts)).encode(), np.uint8),
            )
            file.flush()
            os.fsync(file.fileno())
        Path(file.name).replace(path)

    @classmethod
    def load(cls, path: str | Path) -> Dataset:
        """Raises ConfigError where the file is damaged: a zip archive has a sum of each array."""
        try:
            return cls._read(path)
        except (ValueError, LookupError, TypeError, EOFError, BadZipFile, zlib.error) as error:
            raise ConfigError(
                f"{path}: the tokenised data is damaged ({error}): delete it"
            ) from None

    @classmethod
    def _read(cls, path: str | Path) -> Dataset:
        with np.load(path, allow_pickle=False) as arrays:
            prompts = np.split(arrays["prompts"], arrays["prompt_starts"][1:-1])
            answers = np.split(arrays["answers"], arrays["answer_starts"][1:-1])
            some = len(arrays["prompt_starts"]) > 1
            return cls(
                ids_S=arrays["ids"],
                lm_S=arrays["lm"],
                starts_N1=arrays["starts"],
                heldout=list(zip(prompts, answers, strict=True)) if some else [],
                counts=Counts(**json.loads(arrays["counts"].tobytes())),
            )


def _joined(parts: list[Any], dtype: Any) -> Any:
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def _starts(parts: list[Any]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum([len(part) for part in parts], dtype=np.int64)])


# --- reading --------------------------------------------------------------------------------------


def read_conversations(path: str | Path) -> Iterator[tuple[int, Messages]]:
    """(line number from 1, messages up to the last answer) of every line. Raises ConfigError."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"data.path: {path}: no such file")
    found = False
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                found = True
                yield number, _parse_line(line, f"{path}:{number}")
    if not found:
        raise ConfigError(f"data.path: {path}: the file is empty")


def _parse_line(line: bytes, where: str) -> Messages:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # of JSON, or of UTF-8; nested too deep
        raise ConfigError(f"{where}: not JSON: {error}") from None
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f'{where}: needs a list "messages" with at least one message')
    if row.get("tools"):
        raise ConfigError(
            f'{where}: "tools" are not supported: render them into the system message'
        )
    for n, message in enumerate(messages, 1):
        problem = _message_problem(message)
        if problem:
            raise ConfigError(f"{where}: message {n}: {problem}")
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise ConfigError(f"{where}: no assistant message: there is nothing to train on")
    if "user" not in roles[: roles.index("assistant")]:
        raise ConfigError(f"{where}: no user message before the first answer")
    last = len(roles) - roles[::-1].index("assistant")
    return messages[:last]


def _message_problem(message: Any) -> str:
    if not isinstance(message, dict):
        return f"must be an object with role and content, not {type(message).__name__}"
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        return f"role {role!r} is none of {', '.join(ROLES)}"
    if not isinstance(content, str):
        return f"content must be a text, not {type(content).__name__}"
    if SURROGATE.search(content):
        return "content has half a surrogate pair (\\ud800 to \\udfff), which is no character"
    return f"the {role} message is empty" if not content.strip() else ""


# --- building -------------------------------------------------------------------------------------


def is_heldout(messages: Messages, share: float) -> bool:
    """By a hash of the first user message, blanks folded: the same prompt is always on one side."""
    text = next(message["content"] for message in messages if message["role"] == "user")
    digest = hashlib.sha256(f"held out? {' '.join(text.split())}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


@dataclass
class _Builder:
    """Grows line by line; `finish` makes the Dataset."""

    options: DataOptions
    documents: list[tuple[Ids, Mask]] = field(default_factory=list)
    trained_prompts: set[bytes] = field(default_factory=set)
    heldout: dict[bytes, tuple[Ids, Ids]] = field(default_factory=dict)
    conversations: int = 0
    heldout_conversations: int = 0
    truncated: int = 0
    too_few: int = 0

    def add(self, ids: Ids, mask: Mask, prompt: Ids, heldout: bool) -> None:
        self.conversations += 1
        if mask.sum() < self.options.min_supervised_tokens:
            self.too_few += 1
        elif heldout:
            self.heldout_conversations += 1
            end = len(prompt) + int(np.argmin(np.append(mask[len(prompt) :], False)))
            self.heldout.setdefault(prompt.tobytes(), (prompt, ids[len(prompt) : end]))
        else:
            self._add_document(ids, mask, prompt)

    def _add_document(self, ids: Ids, mask: Mask, prompt: Ids) -> None:
        limit = self.options.max_tokens
        self.truncated += len(ids) > limit
        if mask[:limit].sum() < self.options.min_supervised_tokens:
            self.too_few += 1
            return
        self.documents.append((ids[:limit], mask[:limit]))
        self.trained_prompts.add(prompt.tobytes())

    def finish(self, path: str | Path) -> Dataset:
        """Raises ConfigError where a side has nothing."""
        # A template that folds texts (case, say) can make one prompt of two: training keeps it.
        heldout = [pair for key, pair in self.heldout.items() if key not in self.trained_prompts]
        options = self.options
        if not self.documents:
            kept, cure = "", "give more data"
            if self.truncated:
                kept = f" in the {options.max_tokens} that a slot or the target's context holds"
                cure = "give shorter ones, raise ring.max_tokens"
            raise ConfigError(
                f"data.path: {path}: none of {self.conversations} conversations is left to train "
                f"on ({self.too_few} have fewer than {options.min_supervised_tokens} trained "
                f"tokens{kept}, {self.heldout_conversations} are held out): {cure}, or lower "
                "data.min_supervised_tokens or data.heldout"
            )
        if options.heldout > 0 and not heldout:
            raise ConfigError(
                f"data.heldout: {options.heldout}: no prompt of {self.conversations} "
                "conversations is held out: give more data, raise it, or set it to 0"
            )
        return Dataset(
            ids_S=_joined([ids for ids, _ in self.documents], np.int32),
            lm_S=_joined([mask for _, mask in self.documents], bool),
            starts_N1=_starts([ids for ids, _ in self.documents]),
            heldout=heldout,
            counts=Counts(
                conversations=self.conversations,
                truncated=self.truncated,
                too_few_supervised=self.too_few,
                heldout_repeats=self.heldout_conversations - len(heldout),
            ),
        )


def build_dataset(
    path: str | Path,
    tokenizer: Any,
    *,
    stops: tuple[int, ...],
    options: DataOptions,
    progress: Callable[[str], None] = print,
) -> Dataset:
    """Read, render and mask every conversation of a JSONL file, in order. Raises ConfigError."""
    builder = _Builder(options)
    for number, messages in read_conversations(path):
        try:
            ids, mask = render(tokenizer, messages, stops, options.template_kwargs)
            asked = messages[: first_answer(messages)]
            prompt = prompt_ids(tokenizer, asked, options.template_kwargs)
        except ConfigError as error:
            raise ConfigError(f"{path}:{number}: {error}") from None
        builder.add(ids, mask, prompt, is_heldout(messages, options.heldout))
        if builder.conversations % 20_000 == 0:
            progress(f"tokenised {builder.conversations} conversations")
    return builder.finish(path)


# --- the cache ------------------------------------------------------------------------------------


def fingerprint(
    path: str | Path, tokenizer: Any, *, stops: tuple[int, ...], options: DataOptions
) -> str:
    """16 hex digits of all that a dataset hangs on: file, tokenizer, template, stops, options."""
    digest = hashlib.sha256(f"recipe {RECIPE} {sorted(stops)} {options}".encode())
    if options.template_kwargs:
        digest.update(json.dumps(dict(options.template_kwargs), sort_keys=True).encode())
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"data.path: {path}: no such file")
    with path.open("rb") as file:
        digest.update(hashlib.file_digest(file, "sha256").digest())
    vocabulary = (
        tokenizer.backend_tokenizer.to_str()
        if tokenizer.is_fast
        else str(sorted(tokenizer.get_vocab().items()))
    )
    for text in (str(tokenizer.chat_template), vocabulary):
        digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()[:16]


def prepare_dataset(
    path: str | Path, tokenizer: Any, *, stops: tuple[int, ...], options: DataOptions
) -> tuple[Path, Dataset]:
    """The dataset's file in the cache, made where it isn't there. Its name is its fingerprint."""
    name = fingerprint(path, tokenizer, stops=stops, options=options)
    return _cached(name, lambda: build_dataset(path, tokenizer, stops=stops, options=options))


def prepare_random(
    random: RandomDocuments, vocab_size: int, options: DataOptions
) -> tuple[Path, Dataset]:
    """The same for random documents. None is held out."""
    options = replace(options, heldout=0.0)

    def build() -> Dataset:
        builder = _Builder(options)
        for ids, mask in random.draw(vocab_size):
            builder.add(ids, mask, ids[: int(np.argmax(mask))], heldout=False)
        return builder.finish(f"{random}")

    recipe = repr((RECIPE, random, vocab_size, options))
    return _cached(hashlib.sha256(recipe.encode()).hexdigest()[:16], build)


def _cached(name: str, build: Callable[[], Dataset]) -> tuple[Path, Dataset]:
    cached = cache_dir() / "data" / f"{name}.npz"
    if cached.exists():
        try:
            return cached, Dataset.load(cached)
        except ConfigError as error:
            print(f"warning: {error}: done, and it is made again", flush=True)
    dataset = build()
    try:
        dataset.save(cached)
    except OSError as error:
        raise ConfigError(
            f"{cached.parent}: the tokenised data cannot be kept there: {error.strerror}: make "
            "room, or set DFLASH_RING_CACHE to another directory"
        ) from None
    return cached, dataset
