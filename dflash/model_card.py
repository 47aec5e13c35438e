"""The README.md of an exported drafter: what it is, what was measured, how it is served."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from .arch import DrafterArch
from .checkpoint import Checkpoint, weights_digest
from .config import Config

CARD = """\
---
tags: [dflash, speculative-decoding]
{base_model}---
# {name}: a DFlash drafter for {target}

A block-diffusion drafter: in one forward pass it proposes the next {proposals} tokens, and the
target keeps those it would have written itself. It is of use with this target only.

| | |
|---|---|
{facts}

## Acceptance
{acceptance}

## Serving

`DRAFTER` is this directory. Temperature 0 gives the target's own text, token for token up to ties.
{serving}
The measurement above, again, on this directory:
```
python launch.py eval DRAFTER
```
"""


def model_card(
    checkpoint: Checkpoint,
    config: Config,
    path: Path,
    name: str,
    target_dir: Path,
    format_name: str,
) -> str:
    arch = checkpoint.arch
    target = serving_name(config, target_dir)
    on_hub = target == config.target.model and not Path(target).exists()
    return CARD.format(
        base_model=f"base_model: {target}\n" if on_hub else "",
        name=name,
        target=config.target.model,
        proposals=arch.block_size - 1,
        facts="\n".join(f"| {key} | {value} |" for key, value in facts(checkpoint, config).items()),
        acceptance=acceptance(checkpoint, path),
        serving=serving(arch, target, format_name, on_hub),
    )


VLLM = """
vLLM:
```
{command}
```
"""
VLLM_ALONE = """
or, since this layout names its target, `vllm serve DRAFTER`.
"""
SGLANG = """
SGLang (its class for the target must be able to capture layers for DFlash):
```
{command}
```
"""
NO_SGLANG = """
SGLang reads z-lab's layout only: `python launch.py export RUN --to DIR`.
"""
UNSCALED = """
This target multiplies its embeddings by {scale:g}, and so did the training. z-lab's package does as
well (`input_embedding_scale`), SGLang calls the target's own embedding; vLLM 0.33.0 does not, and
will accept less than was measured.
"""


def serving(arch: DrafterArch, target: str, format_name: str, on_hub: bool) -> str:
    parts = [VLLM.format(command=vllm_command(arch, target))]
    if format_name == "speculators":
        parts += [VLLM_ALONE] * on_hub + [NO_SGLANG]
    else:
        parts.append(SGLANG.format(command=sglang_command(arch, target)))
    if arch.embed_scale != 1.0:
        parts.append(UNSCALED.format(scale=arch.embed_scale))
    return "".join(parts)


def serving_name(config: Config, target_dir: Path) -> str:
    """What a server is told to load: a file inside a package is no model to it."""
    model = config.target.model
    return str(target_dir) if model.endswith(".gguf") else model


def facts(checkpoint: Checkpoint, config: Config) -> dict[str, Any]:
    arch, train = checkpoint.arch, config.train
    told = json.dumps(config.data.template_kwargs)
    window = f", window {arch.sliding_window}" if arch.sliding_window else ""
    return {
        "target": f"{config.target.model} ({arch.num_target_layers} layers)",
        "captured layers": ", ".join(map(str, arch.taps)) + " (0-based, their outputs)",
        "block size": f"{arch.block_size} (the last token and {arch.block_size - 1} proposals)",
        "drafter": f"{arch.num_layers} layers, {arch.num_parameters / 1e6:.1f} M parameters",
        "attention": ", ".join(dict.fromkeys(arch.layer_types)) + window,
        "mask token": arch.mask_token_id,
        "training": f"{checkpoint.step} of {train.steps} steps, loss {train.loss}, lr {train.lr:g}",
        "data": f"fingerprint {checkpoint.data_fingerprint}",
        **({"chat template": f"told `{told}`: ask with the same"} if told != "{}" else {}),
        "trained with": ", ".join(f"{k} {v}" for k, v in sorted(checkpoint.versions.items())),
    }


def acceptance(checkpoint: Checkpoint, path: Path) -> str:
    """The table of the checkpoint's own evaluation, where there is one."""
    record = path.parent.parent / "eval" / f"step_{checkpoint.step}.json"
    measured = json.loads(record.read_text()) if record.exists() else None
    if measured is None or measured["weights"] != weights_digest(path):
        return "\nNot measured before this export: `python launch.py eval DRAFTER` does it."
    verdicts = measured["lossless"]
    rows = [
        f"| {measured['data']} | {measured['num_prompts']} | {measured['tau']:.2f} | "
        f"{measured['speedup']:.2f} | {verdicts['identical']} identical, {verdicts['tie']} "
        f"explained by ties, {verdicts['different']} not |"
    ]
    return "\n".join(
        [
            f"\nReal greedy decoding with the target ({measured['dtype']}), up to "
            f"{measured['max_new_tokens']} new tokens. tau: tokens per target call, bonus token "
            "included. Speed: against plain decoding in the same run on "
            f"{measured['device']}, batch 1.",
            "",
            "| prompts | number | tau | speed | against plain decoding |",
            "|---|---|---|---|---|",
            *rows,
        ]
    )


def vllm_command(arch: DrafterArch, target: str) -> str:
    speculative = {
        "method": "dflash",
        "model": "DRAFTER",
        "num_speculative_tokens": arch.block_size - 1,
    }
    mixed = "VLLM_USE_V2_MODEL_RUNNER=1 " if len(set(arch.layer_types)) > 1 else ""
    return (
        f"{mixed}vllm serve {shlex.quote(target)} --speculative-config '{json.dumps(speculative)}'"
    )


def sglang_command(arch: DrafterArch, target: str) -> str:
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} "
        "--speculative-algorithm DFLASH --speculative-draft-model-path DRAFTER "
        f"--speculative-num-draft-tokens {arch.block_size}"
    )
