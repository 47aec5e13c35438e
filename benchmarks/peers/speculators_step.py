"""The training step of `speculators` 0.9.0 (vLLM's trainer) beside ours, on one GPU.

    python -m benchmarks.peers.speculators_step --shapes 27b 8b smollm2 --json FILE
    python -m benchmarks.peers.speculators_step --tiny

Theirs is `Trainer.train_epoch` itself, over a loader that gives one batch already on the GPU: its
compiled forward, autocast, fused KL, clip and AdamW. What this file changes of theirs:

- STUBS are packages that it imports and the step never calls; they stand in only where missing.
- The fused KL is wrapped in `torch.compiler.disable`: torch 2.11 can't trace its autotuned kernels.
- Its `create_block_mask` is compiled with "triton.persistent_reductions" off: the sort of the tiles
  goes to the library. The Triton sort that inductor makes of it otherwise compiles for minutes at
  8b and smollm2; a sort of that size runs for microseconds either way.
- No progress bar (`trainer.rank = 1`), and nothing logged after the first step (`log_freq`).

Precision of theirs: `float32` is what `speculators train` does: float32 weights, which are the
masters, float32 moments, bfloat16 by autocast. `bfloat16` casts the model before training: weights
and moments in bfloat16, no masters: less than ours keep.

Not the same: its loss divides by the number of rows, ours by the sum of their weights (`loss` here
is over the weights, for both); its window is counted from the anchor, ours from the row.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from dflash.arch import DrafterArch
from dflash.loss import decay_weights, default_gamma
from dflash.speculators import Verifier, to_config
from dflash.step import DTYPES, Batch

from .. import keep
from ..drafter import random_weights
from ..shapes import SHAPES, Case
from . import sides

STUBS = ("aiohttp", "datasets", "hs_connectors", "httpx", "loguru", "openai")
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


DIFFERS = [
    "theirs: fused KL outside of torch.compile; tiles sorted by the library; no progress bar",
    "its loss is over the number of rows (loss_value: over the weights, as ours)",
    "its window is counted from the anchor, ours from the row",
    "its teacher's norm is in the step, ours before it",
]


class Stubs(MetaPathFinder, Loader):
    """Last on sys.meta_path: empty modules whose every name is an empty class."""

    used: set[str]

    def __init__(self) -> None:
        self.used = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package = name.partition(".")[0]
        if package not in STUBS:
            return None
        self.used.add(package)
        return ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        def attribute(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

        vars(module)["__getattr__"] = attribute


class Loop:
    """A loader in their sense: the same batch, so often."""

    batch_sampler = None

    def __init__(self, batch: dict[str, Any], begun: Callable[[], None]) -> None:
        self.batch, self.begun, self.steps = batch, begun, 0

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.begun()
        for _ in range(self.steps):
            yield dict(self.batch)


class Heard(logging.Handler):
    """The metrics of the last step that it logged."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.msg, dict):
            self.metrics = record.msg.get("train", {})


@functools.cache
def their_modules() -> tuple[Any, Any, Stubs]:
    """(models.dflash.core, train.trainer, what was stubbed)."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    stubs = Stubs()
    sys.meta_path.append(stubs)
    core: Any = importlib.import_module("speculators.models.dflash.core")
    trainer: Any = importlib.import_module("speculators.train.trainer")
    core._compiled_create_block_mask = torch.compile(
        create_block_mask, options={"triton.persistent_reductions": False}
    )
    metrics = logging.getLogger("speculators.metrics")
    metrics.setLevel(logging.INFO)
    metrics.propagate = False
    if not torch.cuda.is_available():  # they ask for an accelerator
        trainer.get_local_rank = lambda: "cpu"
        vars(torch.accelerator)["synchronize"] = lambda: None
    return core, trainer, stubs


def model_config(arch: DrafterArch, attention: str) -> Any:
    """Their config of our drafter. The layout's export refuses sliding layers that are causal
    beside full ones, for vLLM's sake; their trainer knows them."""
    from speculators.models.dflash import DFlashSpeculatorConfig

    keys = to_config(replace(arch, is_causal=False), Verifier("", "Qwen3ForCausalLM"))
    keys["sliding_window_non_causal"] = arch.is_causal is False
    config = DFlashSpeculatorConfig(**keys)
    config.transformer_layer_config._attn_implementation = attention
    return config


def build_model(case: Case, dtype: torch.dtype, attention: str) -> Any:
    from speculators.models.dflash import DFlashDraftModel

    with torch.device(case.config.drafter.device):
        model = DFlashDraftModel(model_config(case.arch, attention))
    drafter, ends = random_weights(case)
    absent, strange = model.load_state_dict(drafter.state_dict(), strict=False)
    assert not strange and all(n.startswith(("embed_", "lm_", "verifier_")) for n in absent)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(ends.embed_VH)
        model.lm_head.weight.copy_(ends.head_VH)
        model.verifier_lm_head.weight.copy_(ends.head_VH)
        model.verifier_norm.weight.fill_(1.0)
    return model.to(dtype)


class Speculators:
    keeps_a_pool = False

    def __init__(self, case: Case, precision: str) -> None:
        core, trainer, _ = their_modules()
        on_gpu = torch.cuda.is_available()
        batch = sides.common_batch(case)
        assert batch.vlh_TH is not None, "it needs the target's last hidden state, for any loss"
        self.name, self.case, self.core = f"speculators, {precision}", case, core
        self.documents, self.epoch = len(batch.lens_D), 0
        self.drawn = sides.first_draw(case, batch)
        self.clock, self.heard = sides.Clock(), Heard()
        attention = "simple_flex_attention" if on_gpu else "sdpa"
        model = build_model(case, PRECISIONS[precision] if on_gpu else torch.float32, attention)
        self.loop = Loop(as_theirs(batch), self.clock.mark)
        config = trainer.TrainerConfig(
            lr=1e-4,
            num_epochs=1,
            save_path=f"{tempfile.gettempdir()}/no-checkpoints",
            max_steps=10**6,
            log_freq=10**9,
            train_call_kwargs={
                "loss_config": their_loss(on_gpu),
                "gamma": gamma(case),
                "max_anchors": case.config.num_anchors,
            },
            hidden_states_dtype=DTYPES[case.config.target.dtype],
        )
        self.trainer = trainer.Trainer(model, config, self.loop)
        self.trainer.rank = 1
        self.trainer.device_type = case.config.drafter.device

    def run(self, steps: int) -> list[float]:
        self.clock.marks.clear()
        if self.epoch == 0:
            self._first_step()
            self.clock.marks.clear()
            steps -= 1
        self._epoch(steps)
        return self.clock.seconds()

    def _first_step(self) -> None:
        """With our anchors, and heard."""
        anchors, select = self.drawn.anchors, self.core.select_anchors
        self.core.select_anchors = lambda *_: (anchors.position_A, anchors.valid_A)
        logger = logging.getLogger("speculators.metrics")
        logger.addHandler(self.heard)
        self._epoch(1)
        logger.removeHandler(self.heard)
        self.core.select_anchors = select

    def _epoch(self, steps: int) -> None:
        self.loop.steps = steps
        self.trainer.train_epoch(self.epoch, step_callback=self.clock.mark)
        self.epoch += 1

    def loss(self) -> float:
        """Theirs is a weighted sum over the number of rows."""
        mask_AJ = self.drawn.mask_AJ
        weight_J = decay_weights(self.case.arch.block_size, gamma(self.case), mask_AJ.device)
        weights = torch.where(mask_AJ, weight_J, 0.0).sum()
        return float(self.heard.metrics["loss"] * mask_AJ.sum() / weights)

    def holds(self) -> str:
        weight: Tensor = self.trainer.model.fc.weight
        return sides.theirs_hold(weight, self.trainer.optimizers[0])


def gamma(case: Case) -> float:
    return case.config.train.gamma or default_gamma(case.arch.block_size)


def their_loss(fused: bool) -> dict[str, Any]:
    from speculators.losses import resolve_loss_config

    config = resolve_loss_config("kl_div", "fused" if fused else "eager")
    return {name: (torch.compiler.disable(loss), share) for name, (loss, share) in config.items()}


def as_theirs(batch: Batch) -> dict[str, Any]:
    assert batch.vlh_TH is not None
    return {
        "hidden_states": batch.all_TF[None],
        "verifier_last_hidden_states": batch.vlh_TH[None],
        "input_ids": batch.ids_T[None],
        "loss_mask": batch.lm_T[None],
        "position_ids": batch.pos_T[None],
        "document_ids": sides.first_documents(batch)[None],
        "error_records": 0,
    }


def main() -> None:
    assert __doc__ is not None
    parser = sides.options(__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["27b", "8b", "smollm2"])
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=["float32"])
    args = sides.parse(parser)
    *_, stubs = their_modules()
    print(f"speculators {version('speculators')}; stubbed: {sorted(stubs.used) or 'nothing'}")
    found = []
    for name in ["tiny"] if args.tiny else args.shapes:
        case = SHAPES[name].case(name, "kl", "graph") if not args.tiny else sides.tiny_case("kl")
        facts = {
            "peer": f"speculators {version('speculators')}",
            "stubbed": sorted(stubs.used),
            "shapes": name,
            "loss": "kl",
            "tokens": case.config.ring.max_tokens,
            "anchors": case.config.num_anchors,
            "block": case.arch.block_size,
            "differs": DIFFERS,
        }
        theirs = {
            f"speculators, {precision}": functools.partial(Speculators, case, precision)
            for precision in args.precision
        }
        ours = {"ours": functools.partial(sides.Ours, case)}
        found += sides.compare(ours, theirs, args, facts)
        keep(found, args.json)


if __name__ == "__main__":
    main()
