"""What decoding with a drafter gives, prompt by prompt, and the figures of many prompts.

Figures are pooled over rounds and seconds, never averaged over prompts.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from .decode import (
    GREEDY,
    Decoded,
    Method,
    Round,
    Verdict,
    VerdictKind,
    compare,
    plain,
    speculative,
)
from .model import DFlashDrafter, FrozenEnds
from .target import Target
from .walk import TREE_SIZES, mean_length, text_states, walk


@dataclass(frozen=True)
class PromptResult:
    prompt_tokens: int
    plain: Decoded
    drafted: Decoded
    walked: dict[str, list[int]]
    """Accepted tokens by kind of draft (walk.walk). Empty for sampled text, as is the verdict."""
    verdict: Verdict | None
    drafted_as: str = "tau_walk"
    """The kind that was decoded for real."""

    @property
    def accepted(self) -> list[int]:
        return [round_.accepted for round_ in self.drafted.rounds]

    @property
    def walk_equal(self) -> bool:
        return self.walked.get(self.drafted_as) == self.accepted

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": len(self.drafted.tokens),
            "tau": None if math.isnan(self.drafted.tau) else self.drafted.tau,
            "accepted": self.accepted,
            "walked": self.walked.get(self.drafted_as),
            "plain_s": self.plain.decode_s,
            "drafted_s": self.drafted.decode_s,
            "verdict": None if self.verdict is None else vars(self.verdict),
        }


def choose_prompts(prompts: Iterable[Sequence[int]], room: int, count: int) -> list[list[int]]:
    """The first `count` prompts of at most `room` tokens."""
    return [list(ids) for ids in prompts if len(ids) <= room][:count]


def decode_prompts(
    target: Target,
    drafter: DFlashDrafter,
    ends: FrozenEnds,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop: tuple[int, ...],
    method: Method = GREEDY,
    on_prompt: Callable[[int, PromptResult], None] = lambda index, result: None,
) -> list[PromptResult]:
    """Decode every prompt without and with the drafter. `on_prompt` sees each as it is done.

    Sampled, prompt i uses seed + i. Raises ConfigError where the target can't judge trees.
    """
    # Not measured: first calls allocate, and load kernels.
    plain(target, prompts[0], 2, stop, method)
    speculative(target, drafter, ends, prompts[0], 4, stop, method)
    results = []
    for index, prompt in enumerate(prompts):
        own = dataclasses.replace(method, seed=method.seed + index)
        alone = plain(target, prompt, max_new_tokens, stop, own)
        drafted = speculative(target, drafter, ends, prompt, max_new_tokens, stop, own)
        result = PromptResult(len(prompt), alone, drafted, {}, None)
        if method.greedy:
            result = _judged(target, drafter, ends, prompt, result, method.tree)
        results.append(result)
        on_prompt(index, result)
    return results


def _judged(
    target: Target,
    drafter: DFlashDrafter,
    ends: FrozenEnds,
    prompt: Sequence[int],
    result: PromptResult,
    tree: int | None,
) -> PromptResult:
    """With the walk over the drafted text and the verdict: what only greedy text can have."""
    tokens = result.drafted.tokens
    sizes = sorted({*TREE_SIZES, *([] if tree is None else [tree])})
    states_TF = text_states(target, [*prompt, *tokens])
    return dataclasses.replace(
        result,
        walked=walk(drafter, ends, states_TF, prompt, tokens, sizes),
        verdict=compare(target, prompt, result.plain.tokens, tokens),
        drafted_as="tau_walk" if tree is None else f"ddtree_len@{tree}",
    )


def summarise(results: Sequence[PromptResult], block_size: int) -> dict[str, Any]:
    rounds = [round_ for result in results for round_ in result.drafted.rounds]
    plain_speed, drafted_speed = (
        sum(len(d.tokens) - 1 for d in side) / max(1e-9, sum(d.decode_s for d in side))
        for side in ([r.plain for r in results], [r.drafted for r in results])
    )
    kinds = Counter(result.verdict.kind for result in results if result.verdict is not None)
    sampled = any(result.verdict is None for result in results)
    return {
        "num_prompts": len(results),
        "new_tokens": sum(len(result.drafted.tokens) for result in results),
        "rounds": len(rounds),
        "tau": mean_length([round_.accepted for round_ in rounds]),
        **walked_means([result.walked for result in results]),
        "walk_equal": None if sampled else sum(result.walk_equal for result in results),
        "acceptance": acceptance_by_position(rounds, block_size),
        "plain_tok_per_s": plain_speed,
        "drafted_tok_per_s": drafted_speed,
        "speedup": drafted_speed / plain_speed if plain_speed else None,
        "lossless": None if sampled else {kind: kinds[kind] for kind in get_args(VerdictKind)},
        "per_prompt": [result.to_json() for result in results],
    }


def walked_means(walks: Sequence[dict[str, list[int]]]) -> dict[str, float | None]:
    """Tokens per round by kind of draft, over all rounds of all texts."""
    return {
        name: mean_length([accepted for walked in walks for accepted in walked[name]])
        for name in (walks[0] if walks else {})
    }


def acceptance_by_position(rounds: Sequence[Round], block_size: int) -> list[float | None]:
    """Of slots 1..K-1: the share of the rounds that could accept it (judged >= slot) and did."""
    shares: list[float | None] = []
    for slot in range(1, block_size):
        asked = [round_ for round_ in rounds if round_.judged >= slot]
        hits = sum(round_.accepted >= slot for round_ in asked)
        shares.append(hits / len(asked) if asked else None)
    return shares
