"""Loss masks of real tokenizers and templates, and the choice of the mask token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from chatty import (
    ANSWER,
    CLOSE,
    DROPS_THINKING,
    END,
    MARKED,
    MARKED_SHORT,
    PAD,
    PLAIN,
    SPARE,
    START,
    chatml,
    make_tokenizer,
    may_think,
    talk,
)

from dflash.arch import TargetArch
from dflash.chat import check_kwargs, pick_mask_token, prompt_ids, render
from dflash.config import ConfigError

ONE = talk("what is it?", "the answer is 42")
TWO = [
    {"role": "system", "content": "be brief"},
    *talk("what is it?", "the answer is 42", "sure? <b>", "yes\n\nthe answer is 42."),
]


def trained(tokenizer: Any, ids: np.ndarray, mask: np.ndarray) -> list[str]:
    """The trained stretches, decoded."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    return [tokenizer.decode(ids[a:b]) for a, b in edges.reshape(-1, 2)]


def rendered(template: str, messages: list[dict[str, str]]) -> tuple[Any, np.ndarray, np.ndarray]:
    tokenizer = make_tokenizer(template)
    return tokenizer, *render(tokenizer, messages, [tokenizer.eos_token_id], {})


@pytest.mark.parametrize("template", [PLAIN, MARKED, MARKED_SHORT])
def test_answers_are_trained_up_to_their_stop_token(template: str) -> None:
    tokenizer, ids, mask = rendered(template, TWO)
    assert trained(tokenizer, ids, mask) == [
        "the answer is 42" + END,
        "yes\n\nthe answer is 42." + END,
    ]
    assert ids.dtype == np.int32 and mask.dtype == bool and ids.shape == mask.shape


@pytest.mark.parametrize("template", [PLAIN, MARKED, MARKED_SHORT])
def test_the_newline_after_the_stop_token_is_not_trained(template: str) -> None:
    tokenizer, ids, mask = rendered(template, ONE)
    assert tokenizer.decode(ids[-1:]) == "\n"
    assert not mask[-1]
    assert mask[-2] and ids[-2] == tokenizer.eos_token_id


@pytest.mark.parametrize("template", [PLAIN, MARKED, MARKED_SHORT])
def test_the_text_is_what_the_template_serves(template: str) -> None:
    tokenizer, ids, mask = rendered(template, TWO)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(TWO, tokenize=False)
    served = tokenizer.apply_chat_template(TWO[:-1], tokenize=False, add_generation_prompt=True)
    last = int(np.flatnonzero(np.diff(mask))[-2]) + 1  # where the last trained stretch begins
    assert tokenizer.decode(ids[:last]) == served
    assert np.array_equal(ids[:last], prompt_ids(tokenizer, TWO[:-1], {}))


@pytest.mark.parametrize("mark", ["", "{% generation %}"])
@pytest.mark.parametrize("thinks", [True, False])
def test_the_template_is_told_what_the_config_says(mark: str, thinks: bool) -> None:
    kwargs = {"enable_thinking": thinks}
    tokenizer = make_tokenizer(may_think(mark))
    ids, mask = render(tokenizer, ONE, [tokenizer.eos_token_id], kwargs)
    assert trained(tokenizer, ids, mask) == ["the answer is 42" + END]
    served = tokenizer.apply_chat_template(
        ONE[:-1], tokenize=False, add_generation_prompt=True, enable_thinking=thinks
    )
    assert served.endswith("</think>\n") == (not thinks)
    assert tokenizer.decode(ids[: int(np.argmax(mask))]) == served
    assert tokenizer.decode(prompt_ids(tokenizer, ONE[:-1], kwargs)) == served


def test_what_the_template_never_reads_is_refused() -> None:
    check_kwargs(make_tokenizer(may_think()), {"enable_thinking": True})
    with pytest.raises(ConfigError, match=r"template_kwargs: enable_thinkin: .* no such variable"):
        check_kwargs(make_tokenizer(may_think()), {"enable_thinkin": True})


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_what_stands_after_the_last_answer_is_not_trained(template: str) -> None:
    tokenizer, ids, mask = rendered(template, [*ONE, {"role": "user", "content": "thanks"}])
    assert trained(tokenizer, ids, mask) == ["the answer is 42" + END]


def test_a_template_that_drops_earlier_thinking_is_refused_by_name_of_the_turn() -> None:
    thinking = talk("what is it?", "<think>hm</think>the answer", "sure?", "<think>ok</think>yes")
    with pytest.raises(ConfigError, match=r"message 2: the chat template rewrites it.*split"):
        rendered(DROPS_THINKING, thinking)


def test_such_a_template_trains_conversations_of_one_turn() -> None:
    tokenizer, ids, mask = rendered(DROPS_THINKING, talk("what?", "<think>hm</think>the answer"))
    assert trained(tokenizer, ids, mask) == ["<think>hm</think>the answer" + END]


def test_a_generation_mark_settles_what_prefixes_cannot() -> None:
    """Earlier thinking is dropped, and only the last answer is marked."""
    template = chatml(
        "{% if loop.last %}{% generation %}"
        + ANSWER
        + CLOSE
        + "{% endgeneration %}{% else %}{{ message['content'].split('</think>')[-1] }}"
        + CLOSE
        + "{% endif %}"
    )
    thinking = talk("what is it?", "<think>hm</think>the answer", "sure?", "<think>ok</think>yes")
    tokenizer, ids, mask = rendered(template, thinking)
    assert trained(tokenizer, ids, mask) == ["<think>ok</think>yes" + END]
    assert "hm" not in tokenizer.decode(ids)


def test_an_answer_that_merges_with_the_prompt_is_refused() -> None:
    """The prompt's line end and the answer's own become one token, which serving never sees."""
    with pytest.raises(ConfigError, match=r"message 2: .*generation prompt.*leading blanks"):
        rendered(PLAIN, talk("what?", "\n\nthe answer"))


def test_a_generation_prompt_that_training_never_shows_is_refused() -> None:
    """As reasoning templates do: the prompt opens a thought that the stored answer has not."""
    opened = chatml("{% generation %}" + ANSWER + CLOSE + "{% endgeneration %}", prompt="<think>")
    with pytest.raises(ConfigError, match="training would not match serving"):
        rendered(opened, ONE)
    with pytest.raises(ConfigError, match="message 2: the answer does not follow"):
        rendered(chatml(prompt="<think>"), ONE)


def test_a_mark_that_covers_the_header_is_refused() -> None:
    template = PLAIN.replace(
        "{{ '<|im_start|>' + message['role'] + '\n' }}",
        "{% generation %}{{ '<|im_start|>' + message['role'] + '\n' }}{% endgeneration %}",
    )
    with pytest.raises(ConfigError, match="generation"):
        rendered(template, ONE)


@pytest.mark.parametrize("mark", [False, True])
def test_a_template_without_a_stop_token_is_refused(mark: bool) -> None:
    answer = "{% generation %}" + ANSWER + "{% endgeneration %}" if mark else ANSWER
    with pytest.raises(ConfigError, match=r"without a stop token.*im_end.*generation_config"):
        rendered(chatml(answer), ONE)


def test_a_stop_token_of_the_target_alone_ends_the_turn() -> None:
    """The tokenizer's eos is another one, as with Llama 3: generation_config names the real one."""
    tokenizer = make_tokenizer(chatml(ANSWER + "{{ '<|spare|>' }}"))
    spare = tokenizer.convert_tokens_to_ids(SPARE)
    ids, mask = render(tokenizer, ONE, [tokenizer.eos_token_id, spare], {})
    assert trained(tokenizer, ids, mask) == ["the answer is 42" + SPARE]


def test_a_tokenizer_without_a_template_is_refused() -> None:
    with pytest.raises(ConfigError, match="no chat template: use an instruction-tuned target"):
        render(make_tokenizer(None), ONE, [2], {})


def test_what_the_template_itself_refuses_is_passed_on() -> None:
    strict = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ConfigError, match="refuses this conversation: roles must alternate"):
        rendered(strict, ONE)


# --- the mask token -------------------------------------------------------------------------------


def target_arch(tokenizer: Any, unnamed: int = 0, **changes: Any) -> TargetArch:
    shapes = dict.fromkeys(
        ("num_attention_heads", "hidden_size", "num_hidden_layers", "intermediate_size"), 4
    )
    ids = {
        "vocab_size": len(tokenizer) + unnamed,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return TargetArch.from_config(shapes | ids | changes, {})


def test_an_id_past_the_last_token_comes_first() -> None:
    """Where the embedding is larger than the tokenizer: Qwen3's published drafters do so."""
    tokenizer = make_tokenizer()
    arch = target_arch(tokenizer, unnamed=8)
    assert pick_mask_token(tokenizer, None, arch, []) == len(tokenizer)


def test_then_a_reserved_token_then_a_special_one_without_a_role() -> None:
    tokenizer = make_tokenizer(extra=("<repo>", "<|reserved_0|>"))
    arch = target_arch(tokenizer)
    repo, reserved = tokenizer.convert_tokens_to_ids(["<repo>", "<|reserved_0|>"])
    assert pick_mask_token(tokenizer, None, arch, []) == reserved
    assert pick_mask_token(tokenizer, None, arch, [reserved]) == repo
    with pytest.raises(ConfigError, match="no unused or reserved token: set it"):
        pick_mask_token(tokenizer, None, arch, [reserved, repo])


def test_a_token_that_the_template_writes_is_not_chosen() -> None:
    tokenizer = make_tokenizer(PLAIN + "{% if tools %}<repo>{% endif %}", extra=("<repo>",))
    with pytest.raises(ConfigError, match="no unused or reserved token"):
        pick_mask_token(tokenizer, None, target_arch(tokenizer), [])


def test_a_wanted_token_may_be_an_id_or_a_name() -> None:
    tokenizer = make_tokenizer()
    arch, spare = target_arch(tokenizer), tokenizer.convert_tokens_to_ids(SPARE)
    assert pick_mask_token(tokenizer, SPARE, arch, []) == spare
    assert pick_mask_token(tokenizer, spare, arch, []) == spare


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (PAD, "is the padding token"),
        (END, "is a stop token"),
        (START, "is the bos token"),
        (-1, "is outside the vocabulary"),
        (10**6, "is outside the vocabulary"),
        ("<spare>", "is not a token of the target's tokenizer; near: .*spare"),
    ],
)
def test_a_wanted_token_with_a_role_is_refused(wanted: int | str, why: str) -> None:
    tokenizer = make_tokenizer()
    with pytest.raises(ConfigError, match=rf"^drafter\.mask_token: .*{why}") as error:
        pick_mask_token(tokenizer, wanted, target_arch(tokenizer), [])
    assert "\n" not in str(error.value)


def test_every_stop_token_of_the_target_is_refused() -> None:
    tokenizer = make_tokenizer()
    spare = tokenizer.convert_tokens_to_ids(SPARE)
    arch = target_arch(tokenizer, eos_token_id=[tokenizer.eos_token_id, spare])
    with pytest.raises(ConfigError, match="is a stop token"):
        pick_mask_token(tokenizer, SPARE, arch, [])
    with pytest.raises(ConfigError, match="no unused or reserved token"):
        pick_mask_token(tokenizer, None, arch, [])


def test_a_wanted_token_that_the_data_uses_is_refused() -> None:
    tokenizer = make_tokenizer()
    used = np.array([tokenizer.convert_tokens_to_ids(SPARE)], np.int32)
    with pytest.raises(ConfigError, match="occurs in the data"):
        pick_mask_token(tokenizer, SPARE, target_arch(tokenizer), used)
