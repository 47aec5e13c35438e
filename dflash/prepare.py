"""The child process that launch.py runs before anything else: target, documents, mask token.

    python -m dflash.prepare CONFIG_YAML OUT_JSON

Resolves (and converts) the target, tokenises the conversations or finds them in the cache, chooses
the mask token, checks the drafter's shape against the target, and writes a `Prepared` as JSON. Its
log shows one document with the trained part marked, which is the first thing to look at when a
drafter learns nothing. A user's mistake is one line on stderr and exit code 2.
"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .arch import DrafterArch, TargetArch
from .chat import check_kwargs, pick_mask_token
from .config import Config, ConfigError, load_config
from .data import DataOptions, Dataset, prepare_dataset, prepare_random
from .plan import Plan

AUDIT_CHARACTERS = 700
QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
BARS = " ▁▂▃▄▅▆▇█"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
    "spiece.model", "tekken.json",
)  # fmt: skip


@dataclass(frozen=True)
class Prepared:
    """What the halves and the launcher need to know about target and data."""

    target_dir: str
    dataset: str
    """The .npz file of dflash.data.Dataset."""
    fingerprint: str
    mask_token_id: int
    num_documents: int
    num_heldout: int
    tokens: int
    supervised_tokens: int
    dropped: int
    truncated: int
    length_quantiles: tuple[int, ...]
    """Tokens of a document at QUANTILES."""
    slots_per_pass: int
    fill: float
    """Mean share of a slot that the plan fills."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Prepared:
        raw = json.loads(text)
        return cls(**{**raw, "length_quantiles": tuple(raw["length_quantiles"])})


def prepare(config: Config) -> Prepared:
    """Everything before the first process starts. Prints a short log. Raises ConfigError."""
    from .target_files import resolve_config, resolve_target, tensor_files

    if config.target.random_weights:
        print(random_weights_warning(config), flush=True)
        target_dir = resolve_config(config.target.model)
    else:
        target_dir = resolve_target(config.target.model)
    target = TargetArch.read(target_dir)
    # The mask token is chosen last, but bad taps must not wait for the tokeniser.
    DrafterArch.build(config, target, mask_token_id=0)
    if not config.target.random_weights:
        tensor_files(target_dir)  # nor must missing or cut-off weights
    options = DataOptions(
        max_tokens=min(config.ring.max_tokens, target.max_position_embeddings),
        heldout=config.data.heldout,
        min_supervised_tokens=config.data.min_supervised_tokens,
        template_kwargs=config.data.template_kwargs,
    )
    tokenizer = None
    if config.data.random is not None:
        path, dataset = prepare_random(config.data.random, target.vocab_size, options)
        mask_token_id = target.vocab_size - 1  # none of them has it
    else:
        tokenizer = _tokenizer(config, target_dir)
        check_kwargs(tokenizer, config.data.template_kwargs)
        stops = stop_ids(target, tokenizer)
        path, dataset = prepare_dataset(config.data.path, tokenizer, stops=stops, options=options)
        used = dataset.used_ids()
        if used[-1] >= target.vocab_size:
            raise ConfigError(
                f"target.model: {target_dir}: its tokenizer makes id {used[-1]}, its vocab_size is "
                f"{target.vocab_size}: tokenizer and weights belong to different models"
            )
        mask_token_id = pick_mask_token(tokenizer, config.drafter.mask_token, target, used)
    plan = Plan(
        dataset.lengths,
        seed=config.run.seed,
        max_tokens=config.ring.max_tokens,
        max_docs=config.ring.max_docs,
    )
    prepared = summarise(target_dir, path, dataset, mask_token_id, plan)
    print(report(prepared, dataset, tokenizer), flush=True)
    return prepared


def random_weights_warning(config: Config) -> str:
    return (
        f"RANDOM WEIGHTS (target.random_weights): a benchmark in the shapes of "
        f"{config.target.model}; the drafter will be worth nothing"
    )


def _tokenizer(config: Config, target_dir: Path) -> Any:
    try:
        return load_tokenizer(target_dir)
    except ConfigError as error:
        cure = ", or give data.path=random:COUNTxTOKENS" if config.target.random_weights else ""
        raise ConfigError(f"{error}{cure}") from None


def load_tokenizer(target_dir: Path) -> Any:
    from transformers import AutoTokenizer

    from .target_files import hub_name, one_line

    if not any((target_dir / name).exists() for name in TOKENIZER_FILES):
        # transformers would make an empty one of the model's type
        raise ConfigError(
            f"target.model: {hub_name(target_dir)}: no usable tokenizer: it has no files of one: "
            "fetch the whole repository, or copy tokenizer.json and tokenizer_config.json there"
        )
    with one_line(f"{hub_name(target_dir)}: no usable tokenizer"):
        return AutoTokenizer.from_pretrained(target_dir, trust_remote_code=False)


def stop_ids(target: TargetArch, tokenizer: Any) -> tuple[int, ...]:
    """What ends generation: the target's stop tokens and the tokenizer's own."""
    own = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
    return tuple(dict.fromkeys((*target.eos_token_ids, *own)))


def summarise(
    target_dir: Path, path: Path, dataset: Dataset, mask_token_id: int, plan: Plan
) -> Prepared:
    return Prepared(
        target_dir=str(target_dir.resolve()),
        dataset=str(path.resolve()),
        fingerprint=path.stem,
        mask_token_id=mask_token_id,
        num_documents=len(dataset.lengths),
        num_heldout=len(dataset.heldout),
        tokens=int(dataset.lengths.sum()),
        supervised_tokens=int(dataset.lm_S.sum()),
        dropped=dataset.counts.dropped,
        truncated=dataset.counts.truncated,
        length_quantiles=tuple(int(q) for q in np.quantile(dataset.lengths, QUANTILES)),
        slots_per_pass=plan.slots_per_pass,
        fill=round(plan.fill, 4),
    )


# --- what the log shows ---------------------------------------------------------------------------


def report(prepared: Prepared, dataset: Dataset, tokenizer: Any | None) -> str:
    """`tokenizer` None: the ids are random, and there is no text to show."""
    p, counts = prepared, dataset.counts
    lines = [
        f"documents {p.num_documents} of {counts.conversations} conversations, held-out "
        f"prompts {p.num_heldout}, truncated {p.truncated}, dropped {p.dropped} "
        f"({counts.too_few_supervised} with too few trained tokens, "
        f"{counts.heldout_repeats} repeated held-out prompts)",
        f"tokens {p.tokens}, of them trained {p.supervised_tokens}; a data pass is "
        f"{p.slots_per_pass} slots, {p.fill:.1%} full",
        f"lengths {histogram(dataset.lengths)}",
    ]
    if tokenizer is None:
        return "\n".join([*lines, f"mask token {p.mask_token_id}, the vocabulary's last"])
    median = int(np.argsort(dataset.lengths, kind="stable")[p.num_documents // 2])
    name = tokenizer.convert_ids_to_tokens(p.mask_token_id) or "past the tokenizer's last token"
    return "\n".join(
        [
            *lines,
            f"mask token {p.mask_token_id} ({name})",
            f"document {median}, the trained part in [[ ]]:",
            audit(tokenizer, *dataset.document(median)),
        ]
    )


def histogram(lengths: np.ndarray[Any, np.dtype[np.int64]], bins: int = 24) -> str:
    """One line: `min p50 max |bars|`, a bar for every equal stretch from 0 to the longest."""
    counts, _ = np.histogram(lengths, bins=bins, range=(0, int(lengths.max()) + 1))
    heights = np.ceil(counts / counts.max() * (len(BARS) - 1)).astype(int)
    low, middle, high = (int(q) for q in np.quantile(lengths, (0, 0.5, 1)))
    return f"{low} to {high}, median {middle} |{''.join(BARS[h] for h in heights)}|"


def audit(tokenizer: Any, ids: Any, lm: Any) -> str:
    """The document decoded, its trained stretches in [[ ]], line ends as \\n, cut in the middle."""
    edges = [0, *(np.flatnonzero(np.diff(lm)) + 1).tolist(), len(ids)]
    text = ""
    for start, end in itertools.pairwise(edges):
        part = tokenizer.decode(ids[start:end], clean_up_tokenization_spaces=False)
        text += f"[[{part}]]" if lm[start] else part
    text = text.replace("\n", "\\n")
    half = AUDIT_CHARACTERS // 2
    return text if len(text) <= AUDIT_CHARACTERS else f"{text[:half]} ... {text[-half:]}"


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print("usage: python -m dflash.prepare CONFIG_YAML OUT_JSON", file=sys.stderr)
        return 2
    config_path, out = arguments[0], Path(arguments[1])
    try:
        prepared = prepare(load_config(config_path))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    temporary = out.with_name(f"{out.name}.tmp")
    temporary.write_text(prepared.to_json())
    temporary.replace(out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
