"""The one schema of a run: YAML file + `section.key=value` overrides -> a frozen `Config`.

    config = load_config("configs/smollm2_cpu.yaml", ["train.lr=1e-3", "ring.slots=16"])

Every mistake is a `ConfigError` whose text has one line a mistake: key, value, rule, nearest valid
name. A default is written once, here. No torch: the launcher reads this. What depends on the
target's own config.json is in arch.py.
"""

from __future__ import annotations

import difflib
import hashlib
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from .config_errors import explain
from .random_documents import RandomDocuments


class ConfigError(Exception):
    """A user's mistake: the text is what the user sees; the program exits with code 2."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


Dtype = Literal["float32", "bfloat16"]
LayerType = Literal["full_attention", "sliding_attention"]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Threads = Annotated[int, Field(ge=1, le=1024)]
Share = Annotated[float, Field(ge=0, lt=1)]


OWN_TEMPLATE_KWARGS = (
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation",
    "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs",
)  # fmt: skip
"""Of apply_chat_template itself: what they are is not for a config to say."""


class RunConfig(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]
    dir: Path = Path("runs")
    """The run lives in `<dir>/<name>`."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    trace: bool = False
    """Write when each half did what to the run's trace/attempt_*/*.json: for ui.perfetto.dev."""

    @property
    def path(self) -> Path:
        return self.dir / self.name


class DataConfig(Section):
    path: Path
    """JSONL, one conversation a line: {"messages": [{"role": ..., "content": ...}, ...]}.
    For benchmarks with target.random_weights also random:COUNTxTOKENS: see random_documents.py."""
    heldout: Share = 0.05
    """Share of the conversations kept for evaluation, by a hash of the first user message."""
    min_supervised_tokens: Count = 4
    """Conversations with fewer trained tokens are dropped, and counted."""
    template_kwargs: dict[str, JsonValue] = {}
    """What the target's chat template is told, as {enable_thinking: false}: in training and `eval`
    alike. Serve it with the same."""

    @model_validator(mode="after")
    def _form(self) -> DataConfig:
        if RandomDocuments.parse(self.path) is not None and self.template_kwargs:
            raise ValueError("template_kwargs mean nothing with random documents: leave them out")
        if own := [key for key in self.template_kwargs if key in OWN_TEMPLATE_KWARGS]:
            raise ValueError(f"template_kwargs: {', '.join(own)}: not a variable of chat templates")
        return self

    @property
    def random(self) -> RandomDocuments | None:
        return RandomDocuments.parse(self.path)


class TargetConfig(Section):
    model: str
    """A directory, a hub name, a .gguf file, or `package:NAME/FILE.gguf` for a package's file."""
    dtype: Dtype = "bfloat16"
    device: Literal["cpu", "cuda"] = "cpu"
    threads: Threads = 1
    """CPU threads of one target worker."""
    taps: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] | None = None
    """0-based ids of the captured layers; None: `num_taps` of them by DFlash's spacing."""
    num_taps: Count = 5
    micro_batch_tokens: Count = 2048
    """Padded tokens of one forward call: b * L of every micro-batch shape."""
    random_weights: bool = False
    """For benchmarks only: random weights in the model's shapes, so that its config.json is all
    that is needed of it. The drafter is worth nothing."""

    @model_validator(mode="after")
    def _one_of_two(self) -> TargetConfig:
        default = type(self).model_fields["num_taps"].default  # a run's own run.yaml has it
        if self.taps is not None and self.num_taps not in (len(self.taps), default):
            raise ValueError(
                f"num_taps {self.num_taps} beside the {len(self.taps)} of taps: say one of the two"
            )
        return self


class DrafterConfig(Section):
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Dtype = "bfloat16"
    """Of the forward and backward; the optimizer's masters are always float32."""
    threads: Threads = 1
    num_layers: Count = 5
    block_size: Annotated[int, Field(ge=2, le=64)] = 16
    """The anchor and block_size - 1 masked positions."""
    mask_token: int | str | None = None
    """A token id, a token, or None: an unused or reserved id of the tokenizer."""
    num_attention_heads: Count | None = None
    num_key_value_heads: Count | None = None
    head_dim: Annotated[int, Field(ge=2, le=256, multiple_of=2)] | None = None
    intermediate_size: Annotated[int, Field(ge=1, le=2**20)] | None = None
    """None in these four: as the target's (head_dim at most 128; where it has experts alone, no
    FFN, 3 * hidden_size, as published drafters for such targets)."""
    attention_bias: bool = False
    layer_types: tuple[LayerType, ...] | None = None
    """One entry a layer; None: all full_attention."""
    sliding_window: Annotated[int, Field(ge=1, le=2**30)] | None = None
    """At most what a GPU's attention can add to a token's number in int32."""
    is_causal: bool | None = None
    """In-block causality of every layer; None: sliding layers causal, full layers bidirectional."""

    @model_validator(mode="after")
    def _layers(self) -> DrafterConfig:
        if self.layer_types is not None and len(self.layer_types) != self.num_layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries, num_layers is {self.num_layers}"
            )
        slides = self.layer_types is not None and "sliding_attention" in self.layer_types
        if slides and self.sliding_window is None:
            raise ValueError("layer_types has sliding_attention, so sliding_window must be set")
        if self.sliding_window is not None and not slides:
            raise ValueError(
                "sliding_window has no effect without a sliding_attention entry in layer_types"
            )
        if slides and self.sliding_window is not None and self.sliding_window < self.block_size:
            raise ValueError(
                f"sliding_window {self.sliding_window} must be at least "
                f"block_size {self.block_size}"
            )
        return self


class RingConfig(Section):
    path: Path = Path("/dev/shm/hs_ring")
    slots: Annotated[int, Field(ge=2, le=4096)] = 8
    max_tokens: Annotated[int, Field(ge=16, le=2**21)] = 4096
    """Packed tokens of a slot (T)."""
    max_docs: Annotated[int, Field(ge=1, le=65536)] = 64
    """Documents of a slot (D)."""
    verify: bool = True
    """Sums of every slot's valid prefix, checked by the trainer."""
    quarantine_s: Annotated[float, Field(ge=0, le=3600)] = 2.0
    """How long the slot of a dead target worker is left alone: a copy may still be landing."""


class TrainConfig(Section):
    steps: Annotated[int, Field(ge=1, lt=2**31)]
    """Optimizer steps of the whole run."""
    loss: Literal["ce", "kl"] = "ce"
    position_weights: Literal["decay", "dpace"] = "decay"
    gamma: Positive | None = None
    """Of `decay`: w_k = exp(-(k-1)/gamma). None: DFlash's for the block (16: 7, 10: 5, 8: 4)."""
    dpace_alpha: Annotated[float, Field(gt=0, le=1)] = 0.5
    anchor_density: Annotated[float, Field(gt=0, le=1000)] = 64.0
    """Anchors per 1,000 tokens of a slot: with ring.max_tokens it fixes the anchors of a step."""
    passes_per_slot: Count = 1
    """Optimizer steps on one slot, each with fresh anchors."""
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 6e-4
    warmup: Share = 0.04
    """Share of the steps; then a cosine to zero."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    betas: tuple[Share, Share] = (0.9, 0.95)
    clip: Positive = 1.0
    log_every: Count = 10
    checkpoint_every: Count = 200
    keep_checkpoints: Count = 2


class StepConfig(Section):
    mode: Literal["eager", "compiled", "graph"] | None = None
    """How a training step runs: piece by piece, with its pieces compiled, or these replayed as one
    CUDA graph. None: graph on cuda, eager on cpu. The numbers agree within rounding."""
    head_float8: bool = False
    """Take the loss's gradient back through the target's frozen head in float8: faster on GPUs that
    can (Ada and later); a byte a head weight more. Loss and figures stay exact; the gradient moves
    by about a twentieth of its length (dflash/head.py)."""


class EvalConfig(Section):
    prompts: Count = 16
    """Held-out prompts decoded by `eval`."""
    max_new_tokens: Count = 128
    dtype: Dtype | None = None
    """Of target and drafter in `eval`; None: each its own. float32 decodes without ties, and on
    most CPUs faster than bfloat16."""
    threads: Threads = 2
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between two measurements of tau_walk and ddtree_len@N in the run itself, on the
    target's own answers to these prompts; 0: never. A multiple of train.log_every."""


class SuperviseConfig(Section):
    ready_s: Positive = 600.0
    """A half that isn't READY (loaded, tested, its step compiled) by then has failed."""
    stop_s: Positive = 60.0
    """After a stop request: how long the halves may take to save before they are killed."""
    stall_s: Positive = 900.0
    """A half that shows no sign of life for so long is named and killed."""


class Config(Section):
    run: RunConfig
    data: DataConfig
    target: TargetConfig
    targets: Annotated[int, Field(ge=1, le=30)] = 1
    """Target workers. The ring has 32 party records."""
    drafter: DrafterConfig = DrafterConfig()
    ring: RingConfig = RingConfig()
    train: TrainConfig
    step: StepConfig = StepConfig()
    eval: EvalConfig = EvalConfig()
    supervise: SuperviseConfig = SuperviseConfig()

    @model_validator(mode="after")
    def _benchmark(self) -> Config:
        if self.target.random_weights and self.target.device != self.drafter.device:
            raise ValueError(
                "target.random_weights: a CPU and a GPU draw different weights: set target.device "
                "and drafter.device alike"
            )
        if self.data.random is None:
            return self
        if not self.target.random_weights:
            raise ValueError(
                f"data.path {self.data.path}: random documents are for benchmarks: "
                "set target.random_weights=true too, or give real data"
            )
        if self.eval.every or self.drafter.mask_token is not None:
            key = "eval.every" if self.eval.every else "drafter.mask_token"
            raise ValueError(
                f"{key} means nothing with random documents ({self.data.path}): leave it out"
            )
        return self

    @model_validator(mode="after")
    def _across(self) -> Config:
        if self.drafter.block_size > self.ring.max_tokens // 2:
            raise ValueError(
                f"drafter.block_size {self.drafter.block_size} does not fit a slot of "
                f"{self.ring.max_tokens} tokens: "
                f"set ring.max_tokens to at least {2 * self.drafter.block_size}"
            )
        needed = 2 * self.targets + 2
        if self.ring.slots < needed:
            raise ValueError(
                f"ring.slots {self.ring.slots} is too few for {self.targets} target worker(s) "
                f"and one trainer: "
                f"set ring.slots to at least {needed}"
            )
        if self.eval.every and self.data.heldout == 0:
            raise ValueError(
                f"eval.every {self.eval.every} measures on held-out prompts, and data.heldout is "
                "0: raise data.heldout, or set eval.every to 0"
            )
        if self.eval.every % self.train.log_every:
            raise ValueError(
                f"eval.every {self.eval.every} must be a multiple of train.log_every "
                f"{self.train.log_every}: its figures stand in that step's line"
            )
        if self.drafter.device == "cpu" and self.step.mode not in (None, "eager"):
            raise ValueError(
                f"step.mode {self.step.mode} needs drafter.device cuda: leave it out, or set eager"
            )
        return self

    @property
    def step_mode(self) -> Literal["eager", "compiled", "graph"]:
        return self.step.mode or ("graph" if self.drafter.device == "cuda" else "eager")

    @property
    def end_seq(self) -> int:
        """Slots of the whole run: every seq below it is made and trained on."""
        return -(-self.train.steps // self.train.passes_per_slot)

    @property
    def num_anchors(self) -> int:
        """A: anchors of one step, a static number."""
        return max(1, round(self.train.anchor_density * self.ring.max_tokens / 1000))

    @property
    def wants_vlh(self) -> bool:
        """Whether the loss needs the target's last hidden state in the slot."""
        return self.train.loss == "kl"

    def refuse_untrained(self, what: str | Path) -> None:
        """ConfigError where `what` comes from a benchmark: a drafter of no model."""
        if self.target.random_weights:
            raise ConfigError(
                f"{what}: its target had random weights (target.random_weights): a benchmark's "
                f"drafter, worth nothing for {self.target.model} or any other model"
            )

    def fingerprint(self, *sections: str) -> str:
        """A short hash of the named sections."""
        text = self.model_dump_json(include=set(sections))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def cache_dir() -> Path:
    """Where converted targets and tokenised data are kept between runs."""
    own = os.environ.get("DFLASH_RING_CACHE")
    shared = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(own) if own else Path(shared) / "dflash-ring"


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Read a YAML file, apply `section.key=value` (value parsed as YAML), validate.

    Raises ConfigError.
    """
    path = Path(path)
    try:
        text = path.read_text()
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], 1)
        raise ConfigError(
            f"{path}: no such file" + (f"; did you mean {path.parent / near[0]}?" if near else "")
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    try:
        raw = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that no calendar has
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise ConfigError(
            f"{path}: must be a mapping of sections ({', '.join(Config.model_fields)})"
        )
    for override in overrides:
        _apply(raw, override)
    return parse_config(raw, str(path))


def parse_config(raw: dict[str, Any], source: str) -> Config:
    """Validate a plain mapping. `source` begins every line of an error."""
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(Config, e, source) for e in error.errors())) from None


def dump_config(config: Config) -> str:
    """The resolved config as YAML: `load_config` of it gives an equal Config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key written twice: the second would silently win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for n, (key, (at, _)) in enumerate(zip(keys, node.value, strict=True)):
            if key in keys[:n]:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} is set twice", at.start_mark
                )
        return super().construct_mapping(node, deep)


def _apply(raw: dict[str, Any], override: str) -> None:
    key, eq, value = override.partition("=")
    if not eq or not key:
        raise ConfigError(f"{override!r}: an override is written section.key=value")
    *parents, last = key.split(".")
    node = raw
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"{override!r}: {parent} is not a section")
    try:
        node[last] = yaml.load(value, _Loader)
    except (yaml.YAMLError, ValueError):
        raise ConfigError(f"{override!r}: the value is not YAML") from None
