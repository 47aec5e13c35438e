"""What `evaluate` prints: a line a prompt while it works, then the figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .evaluate import PromptResult


def print_header(path: Path, step: int | None, settings: dict[str, Any]) -> None:
    at = "" if step is None else f" (step {step})"
    print(f"drafter   {path}{at}")
    print(
        f"target    {settings['target']}, {settings['dtype']} on {settings['device']}"
        + (f", {settings['threads']} threads" if settings["device"] == "cpu" else "")
    )
    print(
        f"prompts   {settings['prompts']} {settings['data']}, greedy, "
        f"up to {settings['max_new_tokens']} new tokens each",
        flush=True,  # the first prompt takes a while
    )


def print_prompt(index: int, result: PromptResult) -> None:
    """One line when a prompt is done; a table head before the first."""
    if index == 0:
        print("\n prompt  tokens  new  rounds    tau  plain tok/s  drafted tok/s  text")
    plain, drafted, verdict = result.plain, result.drafted, result.verdict
    speeds = [(len(d.tokens) - 1) / max(1e-9, d.decode_s) for d in (plain, drafted)]
    text: str = verdict.kind
    if verdict.position is not None:
        text += f" at new token {verdict.position}"
        if verdict.gap is not None:
            text += f" (logits {verdict.gap:.3g} apart, one rounding step is {verdict.ulp:.3g})"
    print(
        f"{index + 1:7d}{result.prompt_tokens:8d}{len(drafted.tokens):5d}{len(drafted.rounds):8d}"
        f"{drafted.tau:7.2f}{speeds[0]:13.1f}{speeds[1]:15.1f}  {text}",
        flush=True,
    )


def print_summary(result: dict[str, Any]) -> None:
    verdicts, shares = result["lossless"], result["acceptance"]
    print(
        f"\ntau       {_number(result['tau'])} tokens per target call, bonus token included "
        f"({result['new_tokens']} tokens, {result['rounds']} rounds)"
    )
    print(
        f"tau_walk  {_number(result['tau_walk'])} on the same text, as training computes it; round "
        f"by round equal for {result['walk_equal']} of {result['num_prompts']} prompts"
    )
    print("accepted  " + "  ".join(f"{slot}:{_percent(s)}" for slot, s in enumerate(shares, 1)))
    print(
        f"speed     {result['plain_tok_per_s']:.1f} tok/s plain, "
        f"{result['drafted_tok_per_s']:.1f} tok/s with the drafter: "
        f"{_number(result['speedup'])} times (batch 1, prefill not counted)"
    )
    print(
        f"lossless  {verdicts['identical']} identical to plain decoding, {verdicts['tie']} "
        f"explained by ties, {verdicts['different']} NOT explained"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}%"
