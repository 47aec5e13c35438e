"""Held-out texts for the trainer: the target's own greedy answers and their states, made once.

The trainer has no target, so target worker 0 decodes `eval.prompts` held-out prompts before it is
READY and leaves texts and tapped states in the cache; every `eval.every` steps the trainer walks
them (walk.py) and gets the tau_walk that `launch.py eval` would print for that checkpoint. Neither
weights nor any random state are touched, so the run's bits are those of a run without it.

Runs share the cache, so nobody knows whose file is whose: of the files in cache/heldout, the KEPT
that were used last stay when a new one is made.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from .arch import DrafterArch
from .config import Config, ConfigError, cache_dir
from .data import Dataset
from .decode import plain_greedy
from .measure import choose_prompts, walked_means
from .model import DFlashDrafter, FrozenEnds
from .prepare import Prepared, load_tokenizer, stop_ids
from .target import Target
from .walk import text_states, walk

log = logging.getLogger("target")

RECIPE = 2
"""Part of every file's name: raise it when the same settings would give other contents."""
KEPT = 8
"""Files in the cache: 0.3 GB each for 16 prompts of a 27B target."""


def heldout_file(config: Config, prepared: Prepared, arch: DrafterArch) -> Path:
    """Where this run's texts are: named after everything that they depend on."""
    files = sorted(Path(prepared.target_dir).iterdir())
    target = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    wanted = config.eval.prompts, config.eval.max_new_tokens, arch.block_size
    how = arch.taps, config.target.dtype, config.target.device, version("transformers")
    text = repr((RECIPE, prepared.target_dir, target, prepared.fingerprint, wanted, how))
    return cache_dir() / "heldout" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.safetensors"


@dataclass(frozen=True)
class Text:
    prompt: list[int]
    tokens: list[int]
    """The target's greedy continuation."""
    states_TF: Tensor
    """Of both, in the target's dtype."""


def leave_texts(
    path: Path,
    target: Target,
    config: Config,
    dataset: Dataset,
    before_each: Callable[[], None] = lambda: None,
) -> str:
    """Decode, capture and save, unless it was done before and is sound. Returns one line about it;
    raises ConfigError. `before_each` prompt may raise: nothing is left then."""
    if path.exists():
        try:
            load_texts(path)
        except ConfigError as error:
            log.warning("%s", error)
        else:
            path.touch()
            return f"held-out texts are in {path}"
    limit = config.eval.max_new_tokens
    room = target.arch.max_position_embeddings - limit - config.drafter.block_size
    prompts = choose_prompts((p.tolist() for p, _ in dataset.heldout), room, config.eval.prompts)
    if not prompts:
        raise ConfigError(
            f"eval.every {config.eval.every}: no held-out prompt leaves room for {limit} new "
            "tokens: lower eval.max_new_tokens, or raise data.heldout"
        )
    stop = stop_ids(target.arch, load_tokenizer(target.directory))
    texts, began = [], time.monotonic()
    for prompt in prompts:
        before_each()
        tokens = plain_greedy(target, prompt, limit, stop).tokens
        texts.append(Text(prompt, tokens, text_states(target, [*prompt, *tokens])))
    save_texts(path, texts)
    _sweep(path.parent)
    return f"decoded {len(texts)} held-out prompts in {time.monotonic() - began:.1f} s: {path}"


def save_texts(path: Path, texts: Sequence[Text]) -> None:
    """Atomic: a reader finds the whole file or none. Its checksum stands in its header."""
    from safetensors.torch import save_file

    tensors = {}
    for index, text in enumerate(texts):
        tensors[f"{index}.prompt"] = torch.tensor(text.prompt)
        tensors[f"{index}.tokens"] = torch.tensor(text.tokens)
        tensors[f"{index}.states"] = text.states_TF.cpu()
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temp = tempfile.mkstemp(dir=path.parent, suffix=".safetensors.tmp")
    os.close(descriptor)
    save_file(tensors, temp, metadata={"crc32": _checksum(tensors)})
    Path(temp).replace(path)


def load_texts(path: Path) -> list[Text]:
    """Raises ConfigError where the file is not what was saved."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            names, crc = file.keys(), (file.metadata() or {}).get("crc32")
            tensors = {name: file.get_tensor(name) for name in names}
        if crc != _checksum(tensors):
            raise LookupError("not the bytes that were saved, by their checksum")
        return [
            Text(
                tensors[f"{index}.prompt"].tolist(),
                tensors[f"{index}.tokens"].tolist(),
                tensors[f"{index}.states"],
            )
            for index in range(len(tensors) // 3)
        ]
    except (SafetensorError, LookupError) as error:
        raise ConfigError(
            f"{path}: damaged ({error}): target worker 0 makes it again as the run starts"
        ) from None


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """8 hex digits: the crc32 of all names, dtypes, shapes and bytes."""
    crc = 0
    for name, x in sorted(tensors.items()):
        crc = zlib.crc32(f"{name} {x.dtype} {tuple(x.shape)}".encode(), crc)
        crc = zlib.crc32(x.view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"


def _sweep(directory: Path) -> None:
    """Leaves the KEPT youngest; what killed saves left goes with the others."""
    with contextlib.suppress(FileNotFoundError):  # another run sweeps too
        files = sorted(directory.glob("*.safetensors*"), key=lambda file: file.stat().st_mtime_ns)
        for old in files[:-KEPT]:
            old.unlink()


def measure_texts(
    drafter: DFlashDrafter,
    ends: FrozenEnds,
    texts: Sequence[Text],
    beat: Callable[[], None] = lambda: None,
) -> dict[str, float | None]:
    """tau_walk and ddtree_len@N of the drafter as it is now, over all texts."""
    walks = []
    for text in texts:
        beat()
        walks.append(walk(drafter, ends, text.states_TF, text.prompt, text.tokens))
    return walked_means(walks)
