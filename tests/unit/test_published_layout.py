"""Qwen3.5 and 3.6 are published as vision-language models in many files: their text part loads."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from tiny import tiny_config

from dflash.arch import TargetArch
from dflash.target import Target


def test_the_text_part_of_a_sharded_vision_language_checkpoint(tmp_path: Path) -> None:
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    config = transformers.Qwen3_5Config(
        text_config=tiny_config("qwen3_5").to_dict(),
        vision_config=vision | {"out_hidden_size": 32},
    )
    whole = transformers.Qwen3_5ForConditionalGeneration(config)
    whole.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2

    arch = TargetArch.read(tmp_path)
    target = Target.load(tmp_path, arch, (0, 2), dtype=torch.float32)
    theirs = {
        name.removeprefix("model.language_model."): parameter
        for name, parameter in whole.named_parameters()
    }
    ours = dict(target.model.named_parameters())
    for name, parameter in ours.items():
        assert torch.equal(parameter, theirs[name.removeprefix("model.")]), name
    counted = sum(parameter.numel() for parameter in ours.values())
    assert abs(arch.num_parameters / counted - 1) < 0.01
    target.self_test()
