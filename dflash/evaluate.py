"""How good is a drafter? It decodes held-out prompts for real, beside plain decoding, in one run.

    python -m dflash.evaluate RUN|CHECKPOINT|EXPORT [--data FILE ...] [--prompts N]
        [--max-new-tokens N] [--tree N] [--temperature T] [--seed N] [--target MODEL]
        [--json FILE] [--again]

Prints, for each prompt, each prompt set and together: tau (tokens per target call, bonus included),
acceptance by position, tokens per second of both and their ratio, and whether the drafted text is
the target's own. tau_walk (with --tree N, ddtree_len@N), computed from the same text the way
training sees it, stands beside tau: in float32 they are equal round by round, so a gap means that
training and decoding disagree. Sampled text (--temperature) has neither: the two runs draw other
texts, of the same distribution. The result goes to runs/<name>/eval/step_N.json (with a suffix for
trees and temperatures; an export's to its own eval.json); the same question is not computed twice.
Exit code 1: some drafted text differs and no tie explains it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from .arch import TargetArch
from .checkpoint import weights_digest
from .config import ConfigError, EvalConfig
from .decode import Method
from .export import build_drafter
from .measure import PromptResult, choose_prompts, decode_prompts, summarise
from .prepare import load_tokenizer, stop_ids
from .report import print_header, print_prompt, print_summary
from .step import DTYPES
from .subject import PromptSet, Subject, load_prompts, open_subject
from .target import Target, load_ends, resolve_target


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dflash.evaluate", description="Decode held-out prompts with target and drafter."
    )
    add = parser.add_argument
    add("subject", help="a run (its newest checkpoint), a checkpoint, or an exported directory")
    add(
        "--data",
        action="append",
        help="JSONL conversations; their first prompts, instead of the run's held-out ones; may be "
        "given several times: one row each and a total",
    )
    add("--prompts", type=int, help="how many prompts of each set (default: eval.prompts)")
    add("--max-new-tokens", type=int, help="per prompt (default: eval.max_new_tokens of the run)")
    add("--tree", type=int, metavar="N", help="draft trees of N nodes (default: a chain)")
    add("--temperature", type=float, default=0.0, help="sample (default: 0, greedy)")
    add("--seed", type=int, default=0, help="of the sampled tokens")
    add("--target", help="the target model (default: the run's)")
    add("--json", type=Path, help="write the result here as well")
    add("--again", action="store_true", help="measure again what is already measured")
    args = parser.parse_args(argv)
    for name in ("prompts", "max_new_tokens", "tree"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: {value}: must be at least 1")
    if not 0 <= args.temperature < float("inf"):
        raise ConfigError(f"--temperature: {args.temperature}: must be 0 (greedy) or more")
    if args.seed < 0:
        raise ConfigError(f"--seed: {args.seed}: must not be negative")
    if args.seed and args.temperature == 0:
        raise ConfigError("--seed has no effect at temperature 0: give --temperature too")
    return args


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The whole command: the stored or the new result, printed. Raises ConfigError."""
    subject = open_subject(args.subject)
    options = subject.config.eval if subject.config else EvalConfig()
    model = args.target or (subject.config and subject.config.target.model)
    if not model:
        raise ConfigError(f"{subject.path}: which target is it for? Say it with --target MODEL")
    directory = resolve_target(model)
    target_arch = TargetArch.read(directory)
    _check_fits(subject, target_arch, model)
    tokenizer = load_tokenizer(directory)
    limit = args.max_new_tokens or options.max_new_tokens
    room = target_arch.max_position_embeddings - limit - subject.arch.block_size
    sets = [
        _chosen(found, room, args.prompts or options.prompts, limit)
        for found in load_prompts(subject, args.data, tokenizer)
    ]
    method = Method(args.tree, args.temperature, args.seed)
    record = subject.record.with_name(f"{subject.record.stem}{_suffix(method)}.json")
    section = subject.config
    settings = {
        "weights": weights_digest(subject.path),
        "target": model,
        "dtype": options.dtype or (section.target.dtype if section else "bfloat16"),
        "drafter_dtype": options.dtype or (section.drafter.dtype if section else "bfloat16"),
        "device": section.target.device if section else _any_device(),
        "threads": options.threads,
        "data": ", ".join(found.name for found in sets),
        "data_fingerprint": ", ".join(found.fingerprint for found in sets),
        "prompts": sum(len(found.prompts) for found in sets),
        "max_new_tokens": limit,
        "tree": method.tree,
        "temperature": method.temperature,
        "seed": method.seed,
    }
    stored = None if args.again else _stored(record, settings)
    print_header(subject.path, subject.step, settings)
    if stored is not None:
        print(f"already measured with these settings ({record}); --again repeats it")
        print_summary(stored)
        return stored
    torch.set_num_threads(options.threads)
    target = Target.load(
        directory,
        target_arch,
        subject.arch.taps,
        dtype=DTYPES[str(settings["dtype"])],
        device=str(settings["device"]),
    )
    dtype = DTYPES[str(settings["drafter_dtype"])]
    drafter = build_drafter(subject.arch, subject.weights, dtype, target.device)
    ends = dataclasses.replace(
        load_ends(directory, target_arch, dtype, target.device),
        # As the drafter's own config has it: somebody else's may not scale as the target does.
        embed_scale=subject.arch.embed_scale,
        logit_softcap=subject.arch.logit_softcap,
    )
    stop = stop_ids(target_arch, tokenizer)
    found = []
    for prompt_set in sets:
        prompts, name = prompt_set.prompts, prompt_set.name
        print(f"\n{name}:" if len(sets) > 1 else "")
        found.append(
            decode_prompts(target, drafter, ends, prompts, limit, stop, method, print_prompt)
        )
    result = {
        "step": subject.step,
        "block_size": subject.arch.block_size,
        "trained_on": subject.data_fingerprint,
        "measured": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **settings,
        **_figures(sets, found, subject.arch.block_size),
    }
    write_json(record, result)
    print_summary(result)
    print(f"kept in {record}")
    return result


def _chosen(found: PromptSet, room: int, count: int, limit: int) -> PromptSet:
    prompts = choose_prompts(found.prompts, room, count)
    if not prompts:
        raise ConfigError(f"{found.name}: no prompt leaves room for {limit} new tokens")
    return PromptSet(found.name, found.fingerprint, prompts)


def _suffix(method: Method) -> str:
    """Of a record's name: trees and samples are kept beside the greedy chain, not over it."""
    tree = "" if method.tree is None else f"-tree{method.tree}"
    return tree if method.greedy else f"{tree}-t{method.temperature:g}"


def _figures(
    sets: list[PromptSet], results: list[list[PromptResult]], block_size: int
) -> dict[str, Any]:
    """Of all prompts together, and of each set under "sets"."""
    together = summarise([result for some in results for result in some], block_size)
    rows = []
    for prompt_set, some in zip(sets, results, strict=True):
        row = summarise(some, block_size)
        del row["per_prompt"]  # they stand in the total, in the order of the sets
        rows.append({"data": prompt_set.name, **row})
    return {**together, "sets": rows}


def _any_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _check_fits(subject: Subject, target: TargetArch, model: str) -> None:
    arch = subject.arch
    pairs = {
        "hidden_size": (arch.hidden_size, target.hidden_size),
        "vocab_size": (arch.vocab_size, target.vocab_size),
        "num_target_layers": (arch.num_target_layers, target.num_layers),
    }
    wrong = [
        f"{key} {ours} and {theirs}" for key, (ours, theirs) in pairs.items() if ours != theirs
    ]
    if wrong:
        raise ConfigError(f"{subject.path}: not a drafter for {model}: {'; '.join(wrong)}")


def _stored(record: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    if not record.exists():
        return None
    known = json.loads(record.read_text())
    return known if all(known.get(key) == value for key, value in settings.items()) else None


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(f"{path.name}.new")
    temp.write_text(json.dumps(value, indent=2) + "\n")
    temp.replace(path)


def main(argv: list[str] | None = None) -> int:
    try:
        args = parse_arguments(argv)
        result = run(args)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if args.json is not None:
        write_json(args.json, result)
    return 1 if result["lossless"] and result["lossless"]["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
