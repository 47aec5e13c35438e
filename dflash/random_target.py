"""A target with random weights, for benchmarks only: a model's cost without its download.

    model = random_model(directory, torch.bfloat16, "cuda")    # directory: a config.json is enough
    ends = random_ends(arch, torch.bfloat16, "cuda")           # equal to that model's, anywhere

Every matrix is drawn on the device by a generator that its own name seeds, so that processes which
share nothing but a config.json hold the same weights. A drafter trained on such a target is worth
nothing, and `export` refuses it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from .arch import TargetArch
from .model import FrozenEnds
from .target_files import hub_name, one_line

SEED = 0
"""Of what a family draws for itself beside its matrices (decay rates of recurrent layers)."""
TO_RESIDUAL = ("o_proj", "out_proj", "down_proj")
"""What writes to the residual stream. Two a layer, each scaled by 1/sqrt(2 * layers): together they
add as much as the embedding brings, so rounding is carried through the layers and not amplified."""
CHUNK = 1 << 26
"""Numbers drawn at once: 256 MiB beside an embedding of gigabytes."""
OWN_START = ("bias", "A_log")
"""Not matrices, however many dimensions they have."""


def random_model(directory: str | Path, dtype: torch.dtype, device: str | torch.device) -> Any:
    """The causal LM that `<directory>/config.json` describes, in eval mode on `device`. Vectors
    (norms, decay rates) and buffers are as the family starts them. Raises ConfigError."""
    from transformers import AutoConfig, AutoModelForCausalLM

    arch = TargetArch.read(directory)
    with one_line(f"{hub_name(directory)}: not a causal LM that transformers knows"):
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        with torch.random.fork_rng(), torch.device(device):
            torch.manual_seed(SEED)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    ends = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    for name, parameter in model.named_parameters():
        own = parameter.ndim < 2 or name.endswith(OWN_START)
        if not own and all(parameter is not end for end in ends):
            _fill(parameter.data, name, _std(name, parameter, arch.num_layers))
    _fill_ends(ends[0].data, ends[1].data, arch)
    return model.eval().requires_grad_(False)


def random_ends(arch: TargetArch, dtype: torch.dtype, device: str | torch.device) -> FrozenEnds:
    """The embedding, head and final norm of `random_model`, without the rest of it."""
    embed_VH = torch.empty(arch.vocab_size, arch.hidden_size, dtype=dtype, device=device)
    head_VH = embed_VH if arch.tie_word_embeddings else torch.empty_like(embed_VH)
    _fill_ends(embed_VH, head_VH, arch)
    start = 0.0 if arch.zero_centred_norm else 1.0
    norm_H = torch.full((arch.hidden_size,), start, dtype=dtype, device=device)
    return FrozenEnds(embed_VH, head_VH, norm_H, arch.embed_scale, arch.logit_softcap)


def _fill_ends(embed_VH: torch.Tensor, head_VH: torch.Tensor, arch: TargetArch) -> None:
    """Logits of size one. So are the embeddings, unless they are the head too."""
    logit_std = arch.hidden_size**-0.5
    if arch.tie_word_embeddings:
        _fill(embed_VH, "embedding", logit_std)
    else:
        _fill(embed_VH, "embedding", 1.0)
        _fill(head_VH, "head", logit_std)


def _std(name: str, parameter: torch.Tensor, layers: int) -> float:
    """Inputs of size one give outputs of size one (the last dimension is summed over)."""
    residual = any(part in TO_RESIDUAL for part in name.split(".")[-2:])
    return float(parameter.shape[-1] ** -0.5 * ((2 * layers) ** -0.5 if residual else 1.0))


def _fill(tensor: torch.Tensor, name: str, std: float) -> None:
    """Normal numbers that are a function of name, shape and device; drawn in float32, so that
    another dtype holds the same ones rounded."""
    digest = hashlib.sha256(name.encode()).digest()
    generator = torch.Generator(tensor.device).manual_seed(int.from_bytes(digest[:7], "big"))
    for part in tensor.view(-1).split(CHUNK):
        drawn = torch.empty_like(part, dtype=torch.float32)
        part.copy_(drawn.normal_(0.0, std, generator=generator))
