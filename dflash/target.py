"""The frozen target: any Hugging Face causal LM, run over documents for its hidden states.

    target = Target.load(resolve_target(model), arch, taps, dtype=torch.bfloat16)
    target.self_test()
    target.capture(documents, slot.all_TF, slot.vlh_TH)

`capture` writes the output of every tapped decoder layer of every document to its packed rows, in
place. Documents never see each other: they run as right-padded, length-sorted micro-batches
[b, L], causally, with neither attention mask nor cache. A padded tail can't reach back, so this is
exact for dense and for recurrent (hybrid) targets. On a GPU the layers of known families are
fast_layers.py's; the stock ones, watched by hooks, are the reference, and run everywhere else.
Decoding with a cache is decode.py's work.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from .arch import TargetArch, has_fla
from .config import ConfigError
from .fast_layers import FastLayers
from .model import FrozenEnds
from .random_target import random_model
from .target_files import STRICT, hub_name, load_ends, one_line, refuse_incomplete, resolve_target

__all__ = ["CaptureError", "MicroBatch", "Target", "load_ends", "micro_batches", "resolve_target"]

log = logging.getLogger("target")

CALL_SHARE, FAST_CALL_SHARE = 48, 8
"""What one forward call costs beside its tokens: a 48th of a full one, in padding an 8th of one
where fast_layers.py pads only what mixes tokens. Weighs padding against more calls."""


class CaptureError(Exception):
    """The self-test found hidden states that are not the model's. The text names layer and size."""


class _LastTapReached(Exception):
    """Raised in the last tap's hook: the layers above it are not needed."""


@dataclass(frozen=True)
class MicroBatch:
    documents: tuple[int, ...]
    """Indices of the documents, one a row: b of them."""
    length: int
    """L: every row is padded on the right to it."""


def padded_length(length: int) -> int:
    """The next multiple of 16 up to 128, of 64 beyond."""
    step = 16 if length <= 128 else 64
    return -(-length // step) * step


def micro_batches(
    lengths: Sequence[int],
    max_tokens: int,
    max_length: int | None = None,
    call_share: int = CALL_SHARE,
) -> list[MicroBatch]:
    """Cut documents, longest first, into batches [b, L] with b * L <= max_tokens (a single longer
    document excepted), L a `padded_length` (at most `max_length`).

    The cut with the least padding, each call counted as max_tokens / call_share more: the shortest
    path over the sorted documents. No row is ever empty, so every document is in exactly one row.
    """
    assert all(n > 0 for n in lengths), "an empty document"
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    padded = [padded_length(lengths[i]) for i in order]
    if max_length is not None:
        padded = [min(length, max_length) for length in padded]
    count = len(order)
    best = [0.0] * (count + 1)  # best[i]: cost of the first i documents
    cut = [0] * (count + 1)  # cut[i]: rows of the last batch of these
    for end in range(1, count + 1):
        costs = []
        for start in range(end - 1, -1, -1):
            rows, tokens = end - start, (end - start) * padded[start]
            if rows > 1 and tokens > max_tokens:
                break  # more rows, of a length at least as large
            costs.append((best[start] + tokens + max_tokens / call_share, rows))
        best[end], cut[end] = min(costs)
    batches = []
    end = count
    while end:
        start = end - cut[end]
        batches.append(MicroBatch(tuple(order[start:end]), padded[start]))
        end = start
    return batches[::-1]


class Target:
    """A loaded target. `model` is the causal LM, `layers` its decoder layers, `taps` 0-based."""

    def __init__(
        self,
        model: Any,
        arch: TargetArch,
        taps: Sequence[int],
        directory: Path,
        micro_batch_tokens: int = 2048,
        random_weights: bool = False,
    ) -> None:
        assert list(taps) == sorted(set(taps)), "taps must rise"
        self.model, self.arch, self.taps, self.directory = model, arch, tuple(taps), directory
        self.micro_batch_tokens, self.random_weights = micro_batch_tokens, random_weights
        self.backbone = text_backbone(model)
        self.layers = decoder_layers(self.backbone, arch)
        self.cache_name = cache_argument(self.backbone)
        self.short_length = short_length(self.backbone.config)
        bad = [tap for tap in self.taps if not 0 <= tap < len(self.layers)]
        if bad or not self.taps:
            raise ConfigError(
                f"target.taps: {list(taps)}: the target has {len(self.layers)} layers"
            )
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.fast = FastLayers.of(self.backbone, arch) if self.device.type == "cuda" else None
        if self.device.type == "cuda":
            self._say_what_is_slow()

    def _say_what_is_slow(self) -> None:
        if self.fast is None:
            name = type(self.layers[0]).__name__
            log.warning("no fast layers for %s: transformers' own run, which are slower", name)
        elif self.fast.hybrid and not has_fla():
            log.warning(
                "flash-linear-attention is missing, or older than 0.6: the recurrent layers run in "
                "plain torch, many times slower: pip install 'dflash-ring[gpu]'"
            )

    @classmethod
    def load(
        cls,
        directory: str | Path,
        arch: TargetArch,
        taps: Sequence[int],
        *,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        micro_batch_tokens: int = 2048,
        random_weights: bool = False,
    ) -> Target:
        """The model of an HF directory, in eval mode, straight onto `device`. random_weights: its
        config.json alone, for benchmarks.

        Raises ConfigError: not a causal LM that transformers knows, or taps outside it.
        """
        load = random_model if random_weights else load_model
        model = load(directory, dtype, device).eval().requires_grad_(False)
        return cls(model, arch, taps, Path(directory), micro_batch_tokens, random_weights)

    def ends(self) -> FrozenEnds:
        """The embedding, head and norm that the drafter uses, read from the files."""
        return load_ends(self.directory, self.arch, self.dtype, self.device, self.random_weights)

    @torch.inference_mode()
    def capture(
        self,
        documents: Sequence[np.ndarray | torch.Tensor],
        all_TF: torch.Tensor,
        vlh_TH: torch.Tensor | None = None,
        beat: Callable[[], None] | None = None,
    ) -> None:
        """Write the hidden states of `documents` (token ids), packed one after the other.

        all_TF [T, n_taps*H]: tap i's layer output in columns i*H..(i+1)*H. vlh_TH [T, H]: the state
        after the final norm, so that logits = head(vlh); without it the layers above the last tap
        don't run. Rows after the last document are left alone. `beat` is called before each
        forward. On CUDA the writes are queued on the current stream.
        """
        lengths = [len(ids) for ids in documents]
        starts = [0, *itertools.accumulate(lengths)]
        assert starts[-1] <= len(all_TF), "more tokens than rows"
        for batch in self.micro_batches(lengths):
            if beat is not None:
                beat()
            ids = [torch.as_tensor(documents[number]).long() for number in batch.documents]
            spans = [(starts[number], lengths[number]) for number in batch.documents]
            run = self._forward if self.fast is None else self._fast_forward
            run(ids, batch.length, spans, all_TF, vlh_TH)

    def micro_batches(self, lengths: Sequence[int]) -> list[MicroBatch]:
        """How `capture` cuts documents of these lengths."""
        longest = max(self.arch.max_position_embeddings, *lengths)
        share = CALL_SHARE if self.fast is None else FAST_CALL_SHARE
        long = [i for i, length in enumerate(lengths) if length > self.short_length]
        short = [i for i, length in enumerate(lengths) if length <= self.short_length]
        found = []
        for part, limit in ((long, longest), (short, self.short_length)):
            cut = micro_batches([lengths[i] for i in part], self.micro_batch_tokens, limit, share)
            found += [MicroBatch(tuple(part[i] for i in b.documents), b.length) for b in cut]
        return found

    def _forward(
        self,
        documents: Sequence[torch.Tensor],
        length: int,
        spans: Sequence[tuple[int, int]],
        all_TF: torch.Tensor,
        vlh_TH: torch.Tensor | None,
    ) -> None:
        """One micro-batch. `spans`: (first packed row, length) of each document."""
        ids_BL = torch.zeros(len(documents), length, dtype=torch.int64)
        for row, ids in enumerate(documents):
            ids_BL[row, : len(ids)] = ids

        def hook(index: int) -> Callable[..., None]:
            def write(module: nn.Module, args: Any, output: Any) -> None:
                scatter(layer_output(output), spans, self._tap(all_TF, index))
                if vlh_TH is None and index == len(self.taps) - 1:
                    raise _LastTapReached

            return write

        handles = [
            self.layers[tap].register_forward_hook(hook(index))
            for index, tap in enumerate(self.taps)
        ]
        try:
            output = self.backbone(input_ids=ids_BL.to(self.device), use_cache=False)
        except _LastTapReached:
            return
        finally:
            for handle in handles:
                handle.remove()
        assert vlh_TH is not None
        scatter(output.last_hidden_state, spans, vlh_TH)

    def _fast_forward(
        self,
        documents: Sequence[torch.Tensor],
        length: int,
        spans: Sequence[tuple[int, int]],
        all_TF: torch.Tensor,
        vlh_TH: torch.Tensor | None,
    ) -> None:
        """The same by fast_layers.py."""
        assert self.fast is not None
        for layer, state_NH in self.fast(documents, length):
            if layer in self.taps:
                place(state_NH, spans, self._tap(all_TF, self.taps.index(layer)))
            if vlh_TH is None and layer == self.taps[-1]:
                return
        assert vlh_TH is not None
        place(self.fast.final_norm(state_NH), spans, vlh_TH)

    def _tap(self, all_TF: torch.Tensor, index: int) -> torch.Tensor:
        hidden = self.arch.hidden_size
        return all_TF[:, index * hidden : (index + 1) * hidden]

    def self_test(self, documents: Sequence[np.ndarray] | None = None) -> None:
        """Prove on two short documents that `capture` gives the model's own states.

        `documents`: real token ids are best; random ones otherwise. Raises CaptureError.
        """
        from .self_test import self_test

        self_test(self, documents)


def load_model(directory: str | Path, dtype: torch.dtype, device: str | torch.device) -> Any:
    """The causal LM of an HF directory. Raises ConfigError."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # a worker's stderr is a log file
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.init()  # what it says is about the machine, not about the files
    # To a GPU shard by shard, past the host's memory; that needs `accelerate`.
    device_map = None if device.type == "cpu" else {"": device}
    with one_line(f"{hub_name(directory)}: not loadable as a causal LM"):
        # dtype here, not .to(dtype): that would also round the rotary frequencies.
        model, info = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, device_map=device_map, **STRICT
        )
    refuse_incomplete(directory, info)
    if device.type == "cpu":
        _use_torch_functions(model)
    return model


def _use_torch_functions(model: Any) -> None:
    """Where flash-linear-attention or causal-conv1d are installed, transformers calls them by the
    names of its own functions, and they have nothing for a CPU."""
    module = sys.modules[type(model).__module__]
    for name, function in list(vars(module).items()):
        if name.startswith(("torch_", "causal_conv1d_")) and callable(function):
            setattr(module, name, inspect.unwrap(function))


def scatter(
    state_BLH: torch.Tensor, spans: Sequence[tuple[int, int]], out_TH: torch.Tensor
) -> None:
    """Rows of a micro-batch to their packed places, without the padding."""
    for row, (start, length) in enumerate(spans):
        out_TH[start : start + length].copy_(state_BLH[row, :length], non_blocking=True)


def place(state_NH: torch.Tensor, spans: Sequence[tuple[int, int]], out_TH: torch.Tensor) -> None:
    """The same of packed rows, neighbours in one copy."""
    runs: list[tuple[int, int]] = []
    for start, length in spans:
        if runs and start == sum(runs[-1]):
            runs[-1] = runs[-1][0], runs[-1][1] + length
        else:
            runs.append((start, length))
    row = 0
    for start, length in runs:
        out_TH[start : start + length].copy_(state_NH[row : row + length], non_blocking=True)
        row += length


def layer_output(output: Any) -> torch.Tensor:
    """The residual stream after a decoder layer: some families return a tuple."""
    return output[0] if isinstance(output, tuple) else output


def text_backbone(model: Any) -> Any:
    """The decoder without its head; of a vision-language model its text part."""
    backbone = model.get_decoder()
    return getattr(backbone, "language_model", backbone)


def decoder_layers(backbone: nn.Module, arch: TargetArch) -> nn.ModuleList:
    for module in backbone.children():
        if isinstance(module, nn.ModuleList) and len(module) == arch.num_layers:
            return module
    raise ConfigError(
        f"target.model: {type(backbone).__name__} has no list of {arch.num_layers} decoder layers"
    )


def short_length(config: Any) -> int:
    """Tokens up to which a padded row gets LongRoPE's short factors, 0 without LongRoPE. Longer
    rows get others at every position, so a short document must not be padded beyond it."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else rope.values()  # or one for each kind of layer
    lengths = {
        kind["original_max_position_embeddings"]
        for kind in kinds
        if isinstance(kind, dict) and kind.get("rope_type") == "longrope"
    }
    return min(lengths, default=0)


def cache_argument(backbone: nn.Module) -> str:
    """What this transformers calls the cache argument: `cache`, in older ones `past_key_values`."""
    parameters = inspect.signature(type(backbone).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"
