"""Reading conversations, splitting off held-out prompts, and the cached dataset."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chatty import MARKED, PLAIN, chatml, make_tokenizer, talk, write_jsonl

from dflash.chat import prompt_ids, render
from dflash.config import ConfigError
from dflash.data import (
    DataOptions,
    Dataset,
    build_dataset,
    fingerprint,
    is_heldout,
    prepare_dataset,
    read_conversations,
)

OPTIONS = DataOptions(max_tokens=512, heldout=0.3, min_supervised_tokens=4)
MANY = [talk(f"question {n}?", f"the answer to question {n} is {n * n}") for n in range(60)]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_RING_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


def options(**changes: Any) -> DataOptions:
    return DataOptions(**{**vars(OPTIONS), **changes})


def build(path: Path, conversations: list[Any], tokenizer: Any, **changes: Any) -> Dataset:
    file = write_jsonl(path / "data.jsonl", conversations)
    stops = (tokenizer.eos_token_id,)
    return build_dataset(file, tokenizer, stops=stops, options=options(**changes))


# --- reading --------------------------------------------------------------------------------------

GOOD = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"messages": [', "not JSON"),
        (b"\xff\xfe", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"messages": [{"role": "user", "content": "a\\ud800"}]}', "half a surrogate pair"),
        ('["a"]', 'needs a list "messages"'),
        ('{"text": "a"}', 'needs a list "messages"'),
        ('{"messages": []}', 'needs a list "messages" with at least one message'),
        ('{"messages": ["a"]}', "message 1: must be an object with role and content, not str"),
        (GOOD.replace("user", "human"), "message 1: role 'human' is none of system, user"),
        (GOOD.replace('"b"', "null"), "message 2: content must be a text, not NoneType"),
        (GOOD.replace('"b"', '" "'), "message 2: the assistant message is empty"),
        (GOOD.replace('"a"', '""'), "message 1: the user message is empty"),
        (GOOD.replace("assistant", "user"), "no assistant message"),
        (GOOD.replace('"user"', '"system"'), "no user message before the first answer"),
        (GOOD[:-1] + ', "tools": [{}]}', '"tools" are not supported'),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, line: str | bytes, problem: str) -> None:
    path = tmp_path / "bad.jsonl"
    bad = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(GOOD.encode() + b"\n\n" + bad + b"\n")
    with pytest.raises(ConfigError) as error:
        list(read_conversations(path))
    assert str(error.value).startswith(f"{path}:3: ")
    assert problem in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_is_missing_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data.path: .*none\.jsonl: no such file"):
        list(read_conversations(tmp_path / "none.jsonl"))
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    with pytest.raises(ConfigError, match="the file is empty"):
        list(read_conversations(empty))


def test_messages_after_the_last_answer_are_left_out(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [[*talk("a", "b"), *talk("c")]])
    assert list(read_conversations(path)) == [(1, talk("a", "b"))]


def test_a_rendering_problem_is_named_with_its_line(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"data\.jsonl:2: message 2: the answer does not follow"):
        build(tmp_path, [talk("a", "b"), talk("c", "\n\nd")], tokenizer)


def test_the_demo_conversations_are_answers_to_the_demo_prompts() -> None:
    """In the order of make_prompts.py, none twice; every answer of every turn is there."""
    demo = Path(__file__).parents[2] / "data" / "demo"
    prompts = subprocess.run(
        [sys.executable, str(demo / "make_prompts.py")], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    asked = [
        "\t".join(message["content"] for message in messages[::2])
        for _, messages in read_conversations(demo / "conversations.jsonl")
    ]
    assert len(asked) >= 1000
    assert asked == [prompt for prompt in prompts if prompt in set(asked)]


# --- the split ------------------------------------------------------------------------------------


def test_every_conversation_is_a_document_or_held_out(tmp_path: Path, tokenizer: Any) -> None:
    dataset = build(tmp_path, MANY, tokenizer)
    sides = [is_heldout(messages, OPTIONS.heldout) for messages in MANY]
    assert 0 < sum(sides) < len(MANY)
    assert len(dataset.heldout) == sum(sides)
    assert len(dataset.lengths) == len(MANY) - sum(sides)
    kept = [messages for messages, held in zip(MANY, sides, strict=True) if not held]
    for n, messages in enumerate(kept):  # the file's order
        ids, lm = render(tokenizer, messages, [tokenizer.eos_token_id], {})
        assert np.array_equal(dataset.document(n)[0], ids)
        assert np.array_equal(dataset.document(n)[1], lm)
        assert dataset.lengths[n] == len(ids)


def test_the_held_out_share_is_about_what_was_asked() -> None:
    held = [is_heldout(talk(f"prompt {n}", "x"), 0.2) for n in range(4000)]
    assert np.mean(held) == pytest.approx(0.2, abs=0.02)  # 3 standard deviations: 0.019


def test_a_prompt_stays_on_its_side_whatever_else_the_file_holds(tokenizer: Any) -> None:
    for n in range(50):
        first = is_heldout(talk(f"prompt {n}", "one answer"), 0.5)
        system = [{"role": "system", "content": "be kind"}]
        assert is_heldout([*system, *talk(f" prompt  {n}\n", "other", "more", "x")], 0.5) == first
        assert first <= is_heldout(talk(f"prompt {n}", "one answer"), 0.7)  # a larger share adds


def test_no_prompt_is_on_both_sides(tmp_path: Path, tokenizer: Any) -> None:
    """Asked twice with different answers, and differing in blanks that the template strips."""
    strips = make_tokenizer(PLAIN.replace("message['content']", "message['content'] | trim"))
    again = [talk(m[0]["content"] + "  ", "another answer, longer") for m in MANY]
    dataset = build(tmp_path, MANY + again, strips)
    held = {prompt.tobytes() for prompt, _ in dataset.heldout}
    trained = {prompt_ids(strips, m[:1], {}).tobytes() for m in MANY if not is_heldout(m, 0.3)}
    assert held and trained and not held & trained
    assert dataset.counts.heldout_repeats == len(held)  # each was asked twice


def test_a_template_that_folds_texts_leaks_no_held_out_prompt(tmp_path: Path) -> None:
    lowers = make_tokenizer(PLAIN.replace("message['content']", "message['content'] | lower"))
    shouted = [talk(m[0]["content"].upper(), "an answer to that") for m in MANY]
    dataset = build(tmp_path, MANY + shouted, lowers, heldout=0.5)
    held = {prompt.tobytes() for prompt, _ in dataset.heldout}
    trained = {
        prompt_ids(lowers, m[:1], {}).tobytes() for m in MANY + shouted if not is_heldout(m, 0.5)
    }
    assert held and not held & trained
    assert dataset.counts.heldout_repeats > 0


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_a_held_out_entry_is_the_served_prompt_and_its_first_answer(
    tmp_path: Path, template: str
) -> None:
    tokenizer = make_tokenizer(template)
    conversations = [[*m, *talk("and then?", "nothing more")] for m in MANY]
    dataset = build(tmp_path, conversations, tokenizer)
    first = next(m for m in conversations if is_heldout(m, OPTIONS.heldout))
    prompt, answer = dataset.heldout[0]
    assert tokenizer.decode(prompt) == tokenizer.apply_chat_template(
        first[:1], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(answer) == first[1]["content"] + tokenizer.eos_token


def test_nothing_is_held_out_where_the_share_is_zero(tmp_path: Path, tokenizer: Any) -> None:
    dataset = build(tmp_path, MANY, tokenizer, heldout=0.0)
    assert dataset.heldout == [] and len(dataset.lengths) == len(MANY)


def test_an_empty_side_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    held = next(m for m in MANY if is_heldout(m, 0.3))
    trained = next(m for m in MANY if not is_heldout(m, 0.3))
    with pytest.raises(ConfigError, match="no prompt of 1 conversations is held out: give more"):
        build(tmp_path, [trained], tokenizer)
    with pytest.raises(ConfigError, match=r"none of 1 conversations is left .* 1 are held out"):
        build(tmp_path, [held], tokenizer)
    with pytest.raises(ConfigError, match=r"60 have fewer than 999 trained tokens"):
        build(tmp_path, MANY, tokenizer, min_supervised_tokens=999)


# --- too long, too little -------------------------------------------------------------------------


def test_long_documents_are_cut_and_counted(tmp_path: Path, tokenizer: Any) -> None:
    whole = build(tmp_path, MANY, tokenizer, heldout=0.0)
    limit = int(np.median(whole.lengths))
    cut = build(tmp_path, MANY, tokenizer, heldout=0.0, max_tokens=limit)
    assert cut.lengths.max() == limit
    assert cut.counts.truncated == (whole.lengths > limit).sum() > 0
    assert np.array_equal(cut.document(59)[0], whole.document(59)[0][:limit])
    assert np.array_equal(cut.document(59)[1], whole.document(59)[1][:limit])


def test_documents_with_too_little_to_train_are_dropped_and_counted(
    tmp_path: Path, tokenizer: Any
) -> None:
    """`ok` and the stop token are two or three trained tokens; a cut can leave none."""
    dataset = build(tmp_path, [*MANY, talk("short?", "ok")], tokenizer, heldout=0.0)
    assert dataset.counts.too_few_supervised == dataset.counts.dropped == 1
    assert dataset.counts.conversations == 61 and len(dataset.lengths) == 60
    long_prompt = talk("why " * 200, "because of that")
    dataset = build(tmp_path, [*MANY, long_prompt], tokenizer, heldout=0.0, max_tokens=128)
    assert dataset.counts.too_few_supervised == 1 and len(dataset.lengths) == 60
    assert dataset.lm_S.sum() > 0


# --- the cache ------------------------------------------------------------------------------------


def test_a_saved_dataset_loads_equal(tmp_path: Path, tokenizer: Any) -> None:
    dataset = build(tmp_path, MANY, tokenizer)
    dataset.save(tmp_path / "sub" / "d.npz")
    loaded = Dataset.load(tmp_path / "sub" / "d.npz")
    assert np.array_equal(loaded.ids_S, dataset.ids_S) and loaded.ids_S.dtype == np.int32
    assert np.array_equal(loaded.lm_S, dataset.lm_S) and loaded.lm_S.dtype == bool
    assert np.array_equal(loaded.starts_N1, dataset.starts_N1)
    assert loaded.counts == dataset.counts
    assert len(loaded.heldout) == len(dataset.heldout)
    for mine, theirs in zip(loaded.heldout, dataset.heldout, strict=True):
        assert all(map(np.array_equal, mine, theirs))
    assert set(loaded.used_ids()) == set(dataset.ids_S) | {
        token for pair in dataset.heldout for part in pair for token in part
    }


def test_a_dataset_without_held_out_prompts_loads_equal(tmp_path: Path, tokenizer: Any) -> None:
    build(tmp_path, MANY, tokenizer, heldout=0.0).save(tmp_path / "d.npz")
    assert Dataset.load(tmp_path / "d.npz").heldout == []


def test_loading_needs_numpy_only(tmp_path: Path, tokenizer: Any) -> None:
    build(tmp_path, MANY, tokenizer).save(tmp_path / "d.npz")
    code = (
        "import sys; from dflash.data import Dataset; d = Dataset.load(sys.argv[1]);"
        "assert len(d.document(0)[0]) == d.lengths[0];"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "d.npz")]
    assert subprocess.run(command, check=False).returncode == 0


def test_the_second_preparation_reads_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make_tokenizer()
    file = write_jsonl(tmp_path / "d.jsonl", MANY)
    key = {"stops": (tokenizer.eos_token_id,), "options": OPTIONS}
    path, first = prepare_dataset(file, tokenizer, **key)
    assert path == tmp_path / "cache" / "data" / f"{fingerprint(file, tokenizer, **key)}.npz"

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(tokenizer, "apply_chat_template", never)
    again, second = prepare_dataset(file, tokenizer, **key)
    assert again == path and np.array_equal(second.ids_S, first.ids_S)


@pytest.mark.parametrize("damage", ["cut", "empty", "no archive", "a flipped bit", "lost array"])
def test_a_damaged_dataset_is_named_and_made_again(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, file = make_tokenizer(), write_jsonl(tmp_path / "d.jsonl", MANY)
    key = {"stops": (tokenizer.eos_token_id,), "options": OPTIONS}
    path, first = prepare_dataset(file, tokenizer, **key)
    whole = path.read_bytes()
    if damage == "lost array":
        with np.load(path) as arrays:
            np.savez(path, **{name: arrays[name] for name in arrays if name != "starts"})
    elif damage == "a flipped bit":
        at = whole.index(first.ids_S.tobytes()) + first.ids_S.nbytes // 2
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    else:
        path.write_bytes({"cut": whole[:-300], "empty": b"", "no archive": b"x" * 99}[damage])
    with pytest.raises(ConfigError, match=f"{path.name}: the tokenised data is damaged"):
        Dataset.load(path)
    capsys.readouterr()
    again, second = prepare_dataset(file, tokenizer, **key)
    told = capsys.readouterr().out
    assert told.startswith(f"warning: {path}: the tokenised data is damaged") and again == path
    assert told.count("\n") == 1 and np.array_equal(second.ids_S, first.ids_S)
    assert np.array_equal(Dataset.load(path).ids_S, first.ids_S)


def test_all_that_matters_changes_the_fingerprint(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "d.jsonl", MANY)
    plain, stops = make_tokenizer(), (2,)
    base = fingerprint(file, plain, stops=stops, options=OPTIONS)
    copy = tmp_path / "elsewhere.jsonl"
    copy.write_bytes(file.read_bytes())
    assert fingerprint(copy, make_tokenizer(), stops=stops, options=OPTIONS) == base
    others = [
        fingerprint(write_jsonl(copy, MANY[:-1]), plain, stops=stops, options=OPTIONS),
        fingerprint(file, make_tokenizer(chatml("x")), stops=stops, options=OPTIONS),
        fingerprint(file, make_tokenizer(extra=("<a>",)), stops=stops, options=OPTIONS),
        fingerprint(file, plain, stops=(2, 3), options=OPTIONS),
        fingerprint(file, plain, stops=stops, options=options(heldout=0.31)),
        fingerprint(file, plain, stops=stops, options=options(max_tokens=513)),
        fingerprint(file, plain, stops=stops, options=options(min_supervised_tokens=5)),
        fingerprint(file, plain, stops=stops, options=options(template_kwargs={"x": False})),
        fingerprint(file, plain, stops=stops, options=options(template_kwargs={"x": True})),
    ]
    assert len({base, *others}) == 1 + len(others)


def test_an_interrupted_save_leaves_no_dataset(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(_: int) -> None:
        raise KeyboardInterrupt

    dataset = build(tmp_path, MANY, tokenizer)
    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        dataset.save(tmp_path / "out" / "d.npz")
    assert not (tmp_path / "out" / "d.npz").exists()
