"""How good is a drafter? It decodes held-out prompts for real, beside plain decoding, in one run.

    python -m dflash.evaluate RUN|CHECKPOINT|EXPORT [--data FILE] [--prompts N]
                              [--max-new-tokens N] [--target MODEL] [--json FILE] [--again]

Prints, for each prompt and together: tau (tokens per target call, bonus included), acceptance by
position, tokens per second of both and their ratio, and whether the drafted text is the target's
own. tau_walk, computed from the same text the way training sees it, stands beside tau: in float32
they are equal round by round, so a gap means that training and decoding disagree. The result goes
to runs/<name>/eval/step_N.json (an export's to its own eval.json); the same question is not
computed twice. Exit code 1: some drafted text differs and no tie explains it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .arch import TargetArch
from .checkpoint import weights_digest
from .config import ConfigError, EvalConfig
from .decode import Decoded, Round, Verdict, compare, plain_greedy, speculative_greedy
from .export import build_drafter
from .model import DFlashDrafter, FrozenEnds
from .prepare import load_tokenizer, stop_ids
from .report import print_header, print_prompt, print_summary
from .subject import Subject, load_prompts, open_subject
from .target import Target, load_ends, resolve_target
from .walk import walk, walk_proposals

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


# --- one prompt, and all --------------------------------------------------------------------------


@dataclass(frozen=True)
class PromptResult:
    prompt_tokens: int
    plain: Decoded
    drafted: Decoded
    walked: list[int]
    verdict: Verdict

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": len(self.drafted.tokens),
            "tau": _finite(self.drafted.tau),
            "accepted": [round_.accepted for round_ in self.drafted.rounds],
            "walked": self.walked,
            "plain_s": self.plain.decode_s,
            "drafted_s": self.drafted.decode_s,
            "verdict": vars(self.verdict),
        }


def evaluate(
    target: Target,
    drafter: DFlashDrafter,
    ends: FrozenEnds,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop: tuple[int, ...],
    on_prompt: Callable[[int, PromptResult], None] = lambda index, result: None,
) -> dict[str, Any]:
    """Decode every prompt both ways. Returns the figures; `on_prompt` sees each as it is done."""
    # Not measured: first calls allocate, and load kernels.
    plain_greedy(target, prompts[0], 2, stop)
    speculative_greedy(target, drafter, ends, prompts[0], 4, stop)
    results = []
    for index, prompt in enumerate(prompts):
        plain = plain_greedy(target, prompt, max_new_tokens, stop)
        drafted = speculative_greedy(target, drafter, ends, prompt, max_new_tokens, stop)
        proposals_PJ = walk_proposals(target, drafter, ends, prompt, drafted.tokens)
        result = PromptResult(
            len(prompt),
            plain,
            drafted,
            walk(proposals_PJ, drafted.tokens),
            compare(target, prompt, plain.tokens, drafted.tokens),
        )
        results.append(result)
        on_prompt(index, result)
    return summarise(results, drafter.arch.block_size)


def summarise(results: Sequence[PromptResult], block_size: int) -> dict[str, Any]:
    rounds = [round_ for result in results for round_ in result.drafted.rounds]
    walked = [accepted for result in results for accepted in result.walked]
    same = [result.walked == [r.accepted for r in result.drafted.rounds] for result in results]
    plain, drafted = (
        sum(len(d.tokens) - 1 for d in side) / max(1e-9, sum(d.decode_s for d in side))
        for side in ([r.plain for r in results], [r.drafted for r in results])
    )
    kinds = Counter(result.verdict.kind for result in results)
    return {
        "num_prompts": len(results),
        "new_tokens": sum(len(result.drafted.tokens) for result in results),
        "rounds": len(rounds),
        "tau": _tau([round_.accepted for round_ in rounds]),
        "tau_walk": _tau(walked),
        "walk_equal": sum(same),
        "acceptance": acceptance_by_position(rounds, block_size),
        "plain_tok_per_s": plain,
        "drafted_tok_per_s": drafted,
        "speedup": drafted / plain if plain else None,
        "lossless": {kind: kinds[kind] for kind in ("identical", "tie", "different")},
        "per_prompt": [result.to_json() for result in results],
    }


def acceptance_by_position(rounds: Sequence[Round], block_size: int) -> list[float | None]:
    """Of slots 1..K-1: the share of the rounds that could accept it (judged >= slot) and did."""
    shares: list[float | None] = []
    for slot in range(1, block_size):
        asked = [round_ for round_ in rounds if round_.judged >= slot]
        hits = sum(round_.accepted >= slot for round_ in asked)
        shares.append(hits / len(asked) if asked else None)
    return shares


def _tau(accepted: Sequence[int]) -> float | None:
    return sum(n + 1 for n in accepted) / len(accepted) if accepted else None


def _finite(value: float) -> float | None:
    return None if math.isnan(value) else value


# --- the command ----------------------------------------------------------------------------------


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dflash.evaluate", description="Decode held-out prompts with target and drafter."
    )
    add = parser.add_argument
    add("subject", help="a run (its newest checkpoint), a checkpoint, or an exported directory")
    add(
        "--data",
        help="JSONL conversations; their first prompts, instead of the run's held-out ones",
    )
    add("--prompts", type=int, help="how many prompts (default: eval.prompts of the run)")
    add("--max-new-tokens", type=int, help="per prompt (default: eval.max_new_tokens of the run)")
    add("--target", help="the target model (default: the run's)")
    add("--json", type=Path, help="write the result here as well")
    add("--again", action="store_true", help="measure again what is already measured")
    args = parser.parse_args(argv)
    for name in ("prompts", "max_new_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: {value}: must be at least 1")
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
    prompt_set = load_prompts(subject, args.data, tokenizer)
    limit = args.max_new_tokens or options.max_new_tokens
    room = target_arch.max_position_embeddings - limit - subject.arch.block_size
    prompts = [ids for ids in prompt_set.prompts if len(ids) <= room]
    prompts = prompts[: args.prompts or options.prompts]
    if not prompts:
        raise ConfigError(f"{prompt_set.name}: no prompt leaves room for {limit} new tokens")
    section = subject.config
    settings = {
        "weights": weights_digest(subject.path),
        "target": model,
        "dtype": section.target.dtype if section else "bfloat16",
        "drafter_dtype": section.drafter.dtype if section else "bfloat16",
        "device": section.target.device if section else _any_device(),
        "threads": options.threads,
        "data": prompt_set.name,
        "data_fingerprint": prompt_set.fingerprint,
        "prompts": len(prompts),
        "max_new_tokens": limit,
    }
    stored = None if args.again else _stored(subject.record, settings)
    print_header(subject.path, subject.step, settings)
    if stored is not None:
        print(f"already measured with these settings ({subject.record}); --again repeats it")
        print_summary(stored)
        return stored
    torch.set_num_threads(options.threads)
    target = Target.load(
        directory,
        target_arch,
        subject.arch.taps,
        dtype=TORCH_DTYPES[str(settings["dtype"])],
        device=str(settings["device"]),
    )
    dtype = TORCH_DTYPES[str(settings["drafter_dtype"])]
    drafter = build_drafter(subject.arch, subject.weights, dtype, target.device)
    ends = load_ends(directory, target_arch, dtype, target.device)
    stop = stop_ids(target_arch, tokenizer)
    figures = evaluate(target, drafter, ends, prompts, limit, stop, print_prompt)
    result = {
        "step": subject.step,
        "block_size": subject.arch.block_size,
        "trained_on": subject.data_fingerprint,
        "measured": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **settings,
        **figures,
    }
    write_json(subject.record, result)
    print_summary(result)
    print(f"kept in {subject.record}")
    return result


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
    return 1 if result["lossless"]["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
