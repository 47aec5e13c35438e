"""Shapes, read from JSON, without torch: what a target is, and the drafter a config asks for.

`TargetArch.read(directory)` takes the text part of a Hugging Face config.json.
`DrafterArch.build(config, target, ...)` is the drafter's whole description: the model, the
checkpoint and the export are all made from it.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from .config import Config, ConfigError
from .target_size import count_delta_layers, count_parameters, layer_width

# Families whose RMSNorm multiplies by (1 + w): a drafter norm copied from theirs must add the 1.
ZERO_CENTRED_NORMS = ("gemma", "qwen3_5", "qwen3_next")
FLA_VERSION = (0, 6)
PLAIN_NORMS = ("gemma3n", "gemma4")
"""Gemmas that no longer do."""
CAUSAL_LMS = ("ForCausalLM", "LMHeadModel", "ModelWithLMHead", "ForConditionalGeneration")
"""How transformers' classes of them end; those that also see or hear end in the last."""
SHIPPED = Path(__file__).parents[1] / "configs" / "targets"


def shipped_config(model: str) -> Path | None:
    """The directory in configs/targets/ that holds the config.json of a hub name, if one does."""
    directory = SHIPPED / model.replace("/", "--")
    return directory if (directory / "config.json").is_file() else None


@dataclass(frozen=True)
class TargetArch:
    model_type: str
    architecture: str
    """Class name that serves the model, e.g. LlamaForCausalLM."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    embed_scale: float
    """Gemma multiplies its embeddings by sqrt(H); 1.0 elsewhere."""
    logit_softcap: float | None
    """Gemma 2: logits = cap * tanh(logits / cap)."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    num_parameters: int
    """Of the causal LM, all experts included."""
    delta_layers: int
    """How many of the layers are Gated DeltaNet, not attention."""
    layer_width: int
    """Numbers that one token holds in the widest part of a layer's forward."""

    @property
    def zero_centred_norm(self) -> bool:
        plain = self.model_type.startswith(PLAIN_NORMS)
        return not plain and self.model_type.startswith(ZERO_CENTRED_NORMS)

    @classmethod
    def read(cls, directory: str | Path) -> TargetArch:
        """From `<directory>/config.json`; stop tokens also from generation_config.json.

        Raises ConfigError.
        """
        path = Path(directory) / "config.json"
        if not path.exists():
            raise ConfigError(f"target.model: {directory} has no config.json")
        outer = _object(path)
        text = outer.get("text_config") or outer
        generation = path.with_name("generation_config.json")
        stops = _object(generation).get("eos_token_id") if generation.exists() else None
        return cls.from_config(text, outer, stops)

    @classmethod
    def from_config(
        cls, text: dict[str, Any], outer: dict[str, Any], stops: Any = None
    ) -> TargetArch:
        def need(key: str) -> Any:
            if text.get(key) is None:
                raise ConfigError(
                    f"target.model: its config.json has no {key}: not a known causal LM"
                )
            return count(key, text[key])

        def count(key: str, value: Any) -> Any:
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(
                    f"target.model: its config.json has {key} {value!r}: must be a count"
                )
            return value

        names = outer.get("architectures")
        architecture = str(names[0]) if isinstance(names, list) and names else "?"
        refuse_no_causal_lm(architecture, text)
        heads, hidden = need("num_attention_heads"), need("hidden_size")
        model_type = str(text.get("model_type") or outer.get("model_type"))
        tied = bool(text.get("tie_word_embeddings", outer.get("tie_word_embeddings", True)))
        try:
            parameters, width = count_parameters(text, tied), layer_width(text)
            delta_layers = count_delta_layers(text)
            eos = _ids(text.get("eos_token_id", outer.get("eos_token_id"))) + _ids(stops)
            rope_theta = _rope_theta(text)
            ffn = text.get("intermediate_size")
            ffn = max(ffn) if isinstance(ffn, list) else ffn  # one a layer (Gemma 3n)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise ConfigError(
                f"target.model: its config.json does not fit together: {error!r}"
            ) from None
        return cls(
            model_type=model_type,
            architecture=architecture,
            num_layers=need("num_hidden_layers"),
            hidden_size=hidden,
            intermediate_size=count("intermediate_size", ffn)
            or (3 if text.get("moe_intermediate_size") else 4) * hidden,
            num_attention_heads=heads,
            num_key_value_heads=count("num_key_value_heads", text.get("num_key_value_heads"))
            or heads,
            head_dim=count("head_dim", text.get("head_dim")) or hidden // heads,
            vocab_size=need("vocab_size"),
            rms_norm_eps=text.get("rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            max_position_embeddings=text.get("max_position_embeddings", 32768),
            tie_word_embeddings=tied,
            embed_scale=math.sqrt(hidden) if model_type.startswith("gemma") else 1.0,
            logit_softcap=text.get("final_logit_softcapping"),
            bos_token_id=text.get("bos_token_id", outer.get("bos_token_id")),
            eos_token_ids=tuple(dict.fromkeys(eos)),
            pad_token_id=text.get("pad_token_id", outer.get("pad_token_id")),
            num_parameters=parameters,
            delta_layers=delta_layers,
            layer_width=width,
        )


def refuse_no_causal_lm(architecture: str, text: dict[str, Any]) -> None:
    """ConfigError where a config.json names a model of another task, or lets tokens see later
    ones. One that names none ("?") may pass."""
    if architecture != "?" and not architecture.endswith(CAUSAL_LMS):
        raise ConfigError(
            f"target.model: its config.json says {architecture}: not a causal LM, and no other "
            "kind of model can be drafted for"
        )
    both_ways = text.get("use_bidirectional_attention") in (True, "all")
    if both_ways or text.get("is_causal") is False:
        raise ConfigError(
            "target.model: by its config.json its tokens attend to later ones: not a causal LM, "
            "and no other kind of model can be drafted for"
        )


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"target.model: {path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"target.model: {path} must hold an object, not {type(found).__name__}")
    return found


def _ids(value: Any) -> list[int]:
    several = value if isinstance(value, list | tuple) else [] if value is None else [value]
    return [int(one) for one in several]


def _rope_theta(text: dict[str, Any]) -> float:
    """transformers 5: in rope_parameters (per layer type in Gemma 3); before: at the top."""
    rope = text.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    return float(rope.get("rope_theta") or text.get("rope_theta") or 10000.0)


def has_fla() -> bool:
    """Whether Gated DeltaNet layers have their kernel on a GPU: flash-linear-attention, in a
    version that knows gate and beta. An older one ignores them without a word. (Its kernels are in
    fla-core.)"""
    try:
        major, minor = metadata.version("fla-core").split(".")[:2]
    except metadata.PackageNotFoundError:
        return False
    return (int(major), int(minor)) >= FLA_VERSION


def default_taps(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """DFlash's spacing (z-lab/dflash model.py): round(1 + i*(L-4)/(n-1)), 0-based, banker's."""
    if num_taps == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + i * (num_target_layers - 4) / (num_taps - 1)) for i in range(num_taps))


@dataclass(frozen=True)
class DrafterArch:
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    attention_bias: bool
    layer_types: tuple[str, ...]
    sliding_window: int | None
    is_causal: bool | None
    block_size: int
    mask_token_id: int
    taps: tuple[int, ...]
    num_target_layers: int
    vocab_size: int
    embed_scale: float = 1.0
    logit_softcap: float | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_taps(self) -> int:
        return len(self.taps)

    @property
    def num_parameters(self) -> int:
        """Trainable ones; the embedding and the head belong to the target."""
        h, e = self.hidden_size, self.head_dim
        q, kv = self.num_attention_heads * e, self.num_key_value_heads * e
        bias = (q + 2 * kv + h) if self.attention_bias else 0
        layer = 2 * q * h + 2 * kv * h + 3 * self.intermediate_size * h + 2 * h + 2 * e + bias
        return self.num_layers * layer + self.num_taps * h * h + 2 * h

    def layer_causal(self, layer: int) -> bool:
        """In-block causality of a layer: an explicit is_causal wins, else sliding is causal."""
        return (
            self.is_causal
            if self.is_causal is not None
            else self.layer_types[layer] == "sliding_attention"
        )

    def layer_window(self, layer: int) -> int | None:
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    @classmethod
    def build(cls, config: Config, target: TargetArch, mask_token_id: int) -> DrafterArch:
        """What `config` asks for over `target`. Raises ConfigError: taps outside the target."""
        wanted = config.drafter
        taps = config.target.taps or default_taps(target.num_layers, config.target.num_taps)
        bad = [tap for tap in taps if not 0 <= tap < target.num_layers]
        if config.target.taps is None and (bad or len(set(taps)) != len(taps)):
            raise ConfigError(
                f"target.num_taps: {len(taps)} are too many for the {target.num_layers} layers of "
                "this target: lower it, or name layers in target.taps"
            )
        if bad or len(set(taps)) != len(taps) or list(taps) != sorted(taps):
            raise ConfigError(
                f"target.taps: {list(taps)}: must be distinct, rising layer ids "
                f"from 0 to {target.num_layers - 1} (the target has {target.num_layers} layers)"
            )
        heads = wanted.num_attention_heads or target.num_attention_heads
        kv_heads = wanted.num_key_value_heads or target.num_key_value_heads
        if heads % kv_heads:
            raise ConfigError(
                f"drafter.num_attention_heads {heads} must be a multiple of "
                f"num_key_value_heads {kv_heads}"
            )
        return cls(
            num_layers=wanted.num_layers,
            hidden_size=target.hidden_size,
            intermediate_size=wanted.intermediate_size or target.intermediate_size,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=wanted.head_dim or min(target.head_dim, 128),
            rms_norm_eps=target.rms_norm_eps,
            rope_theta=target.rope_theta,
            max_position_embeddings=target.max_position_embeddings,
            attention_bias=wanted.attention_bias,
            layer_types=wanted.layer_types or ("full_attention",) * wanted.num_layers,
            sliding_window=wanted.sliding_window,
            is_causal=wanted.is_causal,
            block_size=wanted.block_size,
            mask_token_id=mask_token_id,
            taps=taps,
            num_target_layers=target.num_layers,
            vocab_size=target.vocab_size,
            embed_scale=target.embed_scale,
            logit_softcap=target.logit_softcap,
            bos_token_id=target.bos_token_id,
            eos_token_ids=target.eos_token_ids,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> DrafterArch:
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}
        return cls(**fields)
