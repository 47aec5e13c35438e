"""Conversations to token ids and the mask of what is trained; and the drafter's mask token.

`render` trains exactly what the target would generate when served: every answer, from the first
token after the generation prompt to the stop token that ends the turn. Where the chat template
marks answers with {% generation %}, the mark decides; else the difference between renderings of
the conversation's prefixes does. What neither can do is refused in one line, never guessed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError
from numpy.typing import NDArray

from .arch import TargetArch
from .config import ConfigError

Messages = list[dict[str, Any]]
Ids = NDArray[np.int32]
Mask = NDArray[np.bool_]
TemplateKwargs = Mapping[str, Any]
"""data.template_kwargs: variables of the target's chat template."""

GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
RESERVED = re.compile(r"reserved|unused|dummy|placeholder|mask", re.IGNORECASE)


def render(
    tokenizer: Any, messages: Messages, stops: Iterable[int], kwargs: TemplateKwargs
) -> tuple[Ids, Mask]:
    """The whole conversation as the target's template renders it: ids [n], and which are trained.

    `stops`: the ids that end a turn when the target generates. Raises ConfigError where the
    template can't be masked, or trains no stop token.
    """
    marked = bool(GENERATION.search(_template(tokenizer)))
    by_rule = _by_generation_mark if marked else _by_prefixes
    ids, mask = by_rule(tokenizer, messages, set(stops), kwargs)
    if not mask.any():
        raise ConfigError("nothing of this conversation would be trained: its answers are empty")
    return ids, mask


def prompt_ids(tokenizer: Any, messages: Messages, kwargs: TemplateKwargs) -> Ids:
    """`messages` and the generation prompt: what a server feeds the target for the next answer."""
    return _ids(tokenizer, messages, kwargs, add_generation_prompt=True)


def check_kwargs(tokenizer: Any, kwargs: TemplateKwargs) -> None:
    """Raises ConfigError for one that the template never reads: it would do nothing."""
    for name in kwargs:
        if not re.search(rf"\b{re.escape(name)}\b", _template(tokenizer)):
            raise ConfigError(
                f"data.template_kwargs: {name}: the target's chat template has no such variable"
            )


def first_answer(messages: Messages) -> int:
    """Index of the first assistant message."""
    return next(n for n, message in enumerate(messages) if message["role"] == "assistant")


def _template(tokenizer: Any) -> str:
    try:
        return str(tokenizer.get_chat_template())
    except ValueError:
        raise ConfigError(
            "target.model: its tokenizer has no chat template: use an instruction-tuned target, "
            "or put a chat_template.jinja into its directory"
        ) from None


def _render(tokenizer: Any, messages: Messages, kwargs: TemplateKwargs, **options: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(messages, return_dict=True, **options, **kwargs)
    except TemplateError as error:
        raise ConfigError(f"the chat template refuses this conversation: {error}") from None


def _ids(tokenizer: Any, messages: Messages, kwargs: TemplateKwargs, **options: Any) -> Ids:
    return np.array(_render(tokenizer, messages, kwargs, **options)["input_ids"], np.int32)


def _starts_with(ids: Ids, prefix: Ids) -> bool:
    return len(prefix) <= len(ids) and np.array_equal(ids[: len(prefix)], prefix)


def _by_generation_mark(
    tokenizer: Any, messages: Messages, stops: set[int], kwargs: TemplateKwargs
) -> tuple[Ids, Mask]:
    out = _render(tokenizer, messages, kwargs, return_assistant_tokens_mask=True)
    ids, mask = np.array(out["input_ids"], np.int32), np.array(out["assistant_masks"], bool)
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    for end in edges[1::2]:
        if end < len(ids) and ids[end] in stops and ids[end - 1] not in stops:
            mask[end] = True  # the mark closes before the stop token
        elif ids[end - 1] not in stops:
            raise _no_stop(tokenizer, stops)
    last = max(n for n, message in enumerate(messages) if message["role"] == "assistant")
    before = prompt_ids(tokenizer, messages[:last], kwargs)
    if len(edges) and not (_starts_with(ids, before) and edges[-2] >= len(before)):
        raise ConfigError(
            "the chat template's {% generation %} part is not what follows its generation prompt: "
            "training would not match serving; open the mark right after the prompt"
        )
    return ids, mask


def _by_prefixes(
    tokenizer: Any, messages: Messages, stops: set[int], kwargs: TemplateKwargs
) -> tuple[Ids, Mask]:
    ids = _ids(tokenizer, messages, kwargs)
    mask = np.zeros(len(ids), bool)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = prompt_ids(tokenizer, messages[:turn], kwargs)
        last = turn + 1 == len(messages)
        through = ids if last else _ids(tokenizer, messages[: turn + 1], kwargs)
        if not _starts_with(through, before):
            raise ConfigError(
                f"message {turn + 1}: the answer does not follow the template's generation prompt "
                "token by token: strip its leading blanks (or, for a reasoning target, keep its "
                "thinking), or mark answers with {% generation %} in the template"
            )
        if not _starts_with(ids, through):
            raise ConfigError(
                f"message {turn + 1}: the chat template rewrites it once later turns follow (as "
                "those do that drop earlier thinking): split the conversation so that it ends "
                "there, or mark answers with {% generation %} in the template"
            )
        ends = np.flatnonzero(np.isin(through[len(before) :], list(stops)))
        if not len(ends):
            raise _no_stop(tokenizer, stops)
        mask[len(before) : len(before) + ends[-1] + 1] = True
    return ids, mask


def _no_stop(tokenizer: Any, stops: set[int]) -> ConfigError:
    names = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(sorted(stops)))) or "none"
    return ConfigError(
        f"the chat template ends an answer without a stop token (known ones: {names}): add the "
        "token that ends a turn to eos_token_id in the target's generation_config.json"
    )


# --- the mask token -------------------------------------------------------------------------------


def pick_mask_token(
    tokenizer: Any, wanted: int | str | None, arch: TargetArch, used_ids: Iterable[int]
) -> int:
    """The id for a block's masked positions: `drafter.mask_token`, or for None an id past the
    tokenizer's last, a reserved token, or a special one that neither data nor template use.

    Raises ConfigError for pad, bos, a stop token, an id outside the vocabulary or one in the data.
    """
    used = {int(token) for token in used_ids}
    if wanted is not None:
        token = _token_id(tokenizer, wanted)
        problem = _why_not(token, tokenizer, arch, used)
        if problem:
            raise ConfigError(
                f"drafter.mask_token: {wanted!r} {problem}: set it to an unused or reserved token, "
                "or leave it out and one is chosen"
            )
        return token
    for token in _candidates(tokenizer, arch):
        if not _why_not(token, tokenizer, arch, used):
            return token
    raise ConfigError(
        "drafter.mask_token: this tokenizer has no unused or reserved token: set it to a token "
        "that is not in the data and is not pad, bos or a stop token"
    )


def _token_id(tokenizer: Any, wanted: int | str) -> int:
    if isinstance(wanted, int):
        return wanted
    vocab = tokenizer.get_vocab()
    if wanted not in vocab:
        special = [str(token) for token in tokenizer.added_tokens_decoder.values()]
        near = difflib.get_close_matches(wanted, special, 3, 0.3) or special[-3:]
        raise ConfigError(
            f"drafter.mask_token: {wanted!r} is not a token of the target's tokenizer"
            + (f"; near: {', '.join(near)}" if near else "")
        )
    return int(vocab[wanted])


def _why_not(token: int, tokenizer: Any, arch: TargetArch, used: set[int]) -> str:
    """What forbids this id as mask token; empty if nothing does."""
    if not 0 <= token < arch.vocab_size:
        return f"is outside the vocabulary (0 to {arch.vocab_size - 1})"
    if token in arch.eos_token_ids or token == tokenizer.eos_token_id:
        return "is a stop token"
    if token in (arch.pad_token_id, tokenizer.pad_token_id):
        return "is the padding token"
    if token in (arch.bos_token_id, tokenizer.bos_token_id):
        return "is the bos token"
    return "occurs in the data" if token in used else ""


def _candidates(tokenizer: Any, arch: TargetArch) -> list[int]:
    """Best first: ids that no token has, reserved names, special tokens without a known role."""
    unnamed = range(max(tokenizer.get_vocab().values()) + 1, arch.vocab_size)
    template = _template(tokenizer)
    special = {
        token: str(added)
        for token, added in tokenizer.added_tokens_decoder.items()
        if added.special and str(added) not in template
    }
    reserved = [token for token, name in special.items() if RESERVED.search(name)]
    roles = set(tokenizer.all_special_ids)
    return [*unnamed[:1], *reserved, *(token for token in special if token not in roles)]
