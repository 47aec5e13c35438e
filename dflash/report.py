"""What `evaluate` prints: a line a prompt while it works, a row a prompt set, then the figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .measure import PromptResult


def print_header(path: Path, step: int | None, settings: dict[str, Any]) -> None:
    at = "" if step is None else f" (step {step})"
    print(f"drafter   {path}{at}")
    print(
        f"target    {settings['target']}, {settings['dtype']} on {settings['device']}"
        + (f", {settings['threads']} threads" if settings["device"] == "cpu" else "")
    )
    print(
        f"prompts   {settings['prompts']} {settings['data']}, {_how(settings)}, "
        f"up to {settings['max_new_tokens']} new tokens each",
        flush=True,  # the first prompt takes a while
    )


def _how(settings: dict[str, Any]) -> str:
    draft = "chains" if settings["tree"] is None else f"trees of {settings['tree']} nodes"
    if settings["temperature"] == 0:
        return f"{draft}, greedy"
    return f"{draft}, sampled at temperature {settings['temperature']:g} (seed {settings['seed']})"


def print_prompt(index: int, result: PromptResult) -> None:
    """One line when a prompt is done; a table head before the first."""
    if index == 0:
        print(" prompt  tokens  new  rounds    tau  plain tok/s  drafted tok/s  text")
    plain, drafted, verdict = result.plain, result.drafted, result.verdict
    speeds = [(len(d.tokens) - 1) / max(1e-9, d.decode_s) for d in (plain, drafted)]
    text: str = "sampled" if verdict is None else verdict.kind
    if verdict is not None and verdict.position is not None:
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
    if len(result["sets"]) > 1:
        print_sets(result)
    print(
        f"\ntau       {_number(result['tau'])} tokens per target call, bonus token included "
        f"({result['new_tokens']} tokens, {result['rounds']} rounds)"
    )
    if verdicts is not None:
        walked = "tau_walk" if result["tree"] is None else f"ddtree_len@{result['tree']}"
        print(
            f"walked    {walked} {_number(result[walked])} on the same text, as training computes "
            f"it; round by round equal for {result['walk_equal']} of {result['num_prompts']} "
            "prompts"
        )
        others = [name for name in result if name.startswith(("tau_walk", "ddtree"))]
        others.remove(walked)
        print("          " + ", ".join(f"{name} {_number(result[name])}" for name in others))
    print("accepted  " + "  ".join(f"{slot}:{_percent(s)}" for slot, s in enumerate(shares, 1)))
    print(
        f"speed     {result['plain_tok_per_s']:.1f} tok/s plain, "
        f"{result['drafted_tok_per_s']:.1f} tok/s with the drafter: "
        f"{_number(result['speedup'])} times (batch 1, prefill not counted)"
    )
    if verdicts is None:
        print("lossless  not compared: sampled texts differ, their distribution is the target's")
    else:
        print(
            f"lossless  {verdicts['identical']} identical to plain decoding, {verdicts['tie']} "
            f"explained by ties, {verdicts['different']} NOT explained"
        )


def print_sets(result: dict[str, Any]) -> None:
    """A row a prompt set, and all together."""
    rows = [*result["sets"], {**result, "data": "together"}]
    width = max(len("prompt set"), *(len(row["data"]) for row in rows))
    head = "prompts    new    tau  plain tok/s  drafted tok/s  times  text"
    print(f"\n {'prompt set':<{width}}  {head}")
    for row in rows:
        verdicts = row["lossless"]
        text = "sampled"
        if verdicts is not None:
            text = ", ".join(f"{count} {kind}" for kind, count in verdicts.items() if count)
        print(
            f" {row['data']:<{width}}{row['num_prompts']:9d}{row['new_tokens']:7d}"
            f"{_number(row['tau']):>7}{row['plain_tok_per_s']:13.1f}"
            f"{row['drafted_tok_per_s']:15.1f}{_number(row['speedup']):>7}  {text}"
        )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}%"
