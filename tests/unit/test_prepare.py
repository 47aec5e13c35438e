"""`python -m dflash.prepare`: what it writes, what it shows, what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from chatty import DROPS_THINKING, END, make_tokenizer, may_think, talk, write_jsonl, write_target

from dflash.config import load_config
from dflash.data import Dataset
from dflash.plan import Plan
from dflash.prepare import Prepared, audit, histogram, main
from dflash.subject import load_prompts

CONVERSATIONS = [
    talk(f"question {n}?", f"the answer to question {n} is {n * n}") for n in range(80)
]


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_RING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def write_config(path: Path, **changes: dict[str, object]) -> Path:
    """A config beside its target and data; `changes` are whole sections merged in."""
    (path / "target").mkdir(exist_ok=True)
    if not (path / "target" / "config.json").exists():
        write_target(path / "target")
    sections: dict[str, dict[str, object]] = {
        "run": {"name": "test"},
        "data": {
            "path": str(write_jsonl(path / "data.jsonl", CONVERSATIONS)),
            "heldout": 0.2,
        },
        "target": {"model": str(path / "target"), "taps": [1, 3]},
        "drafter": {"block_size": 4},
        "ring": {"max_tokens": 256, "max_docs": 8},
        "train": {"steps": 10},
    }
    for name, section in changes.items():
        sections[name] = sections.get(name, {}) | section
    (path / "config.yaml").write_text(yaml.safe_dump(sections))
    return path / "config.yaml"


def prepared(path: Path, **changes: dict[str, object]) -> Prepared:
    out = path / "prepared.json"
    assert main([str(write_config(path, **changes)), str(out)]) == 0
    return Prepared.from_json(out.read_text())


def test_it_writes_what_the_halves_need(tmp_path: Path) -> None:
    p = prepared(tmp_path)
    dataset = Dataset.load(p.dataset)
    assert Path(p.target_dir) == tmp_path / "target"
    assert p.num_documents == len(dataset.lengths) and p.num_heldout == len(dataset.heldout)
    assert p.num_documents + p.num_heldout == len(CONVERSATIONS)
    assert p.tokens == dataset.lengths.sum() and p.supervised_tokens == dataset.lm_S.sum()
    assert p.length_quantiles[0] == dataset.lengths.min()
    assert p.length_quantiles[-1] == dataset.lengths.max()
    assert Path(p.dataset).stem == p.fingerprint
    plan = Plan(dataset.lengths, seed=0, max_tokens=256, max_docs=8)
    assert (p.slots_per_pass, p.fill) == (plan.slots_per_pass, round(plan.fill, 4))
    # The target's vocabulary is larger than its tokenizer: the first id past it is free.
    assert p.mask_token_id == len(make_tokenizer())
    assert Prepared.from_json(p.to_json()) == p


def test_training_and_eval_tell_the_template_the_same(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    write_target(tmp_path / "target", may_think())
    told = {"template_kwargs": {"enable_thinking": False}}
    p, config = prepared(tmp_path, data=told), load_config(tmp_path / "config.yaml")
    prompts = [ids.tolist() for ids, _ in Dataset.load(p.dataset).heldout]
    tokenizer, subject = make_tokenizer(may_think()), SimpleNamespace(config=config)
    assert tokenizer.decode(prompts[0]).endswith("</think>\n")
    [asked] = load_prompts(subject, [str(config.data.path)], tokenizer)
    assert all(prompt in asked.prompts for prompt in prompts)
    assert prepared(tmp_path).fingerprint != p.fingerprint
    assert main([str(write_config(tmp_path, data={"template_kwargs": {"typo": 1}})), "x"]) == 2


def test_documents_are_cut_at_the_targets_context(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    write_target(tmp_path / "target", max_position_embeddings=36)
    p = prepared(tmp_path)
    assert p.length_quantiles[-1] == 36
    assert p.truncated > 0


def test_the_log_shows_one_document_with_its_trained_part_and_the_lengths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    p = prepared(tmp_path)
    log = capsys.readouterr().out
    assert f"documents {p.num_documents} of 80 conversations" in log
    assert "<|im_start|>assistant\\n[[the answer to question " in log
    assert END + "]]\\n" in log
    low, high = p.length_quantiles[0], p.length_quantiles[-1]
    assert f"lengths {low} to {high}, median {p.length_quantiles[3]} |" in log


def test_a_second_run_gives_the_same_file(tmp_path: Path) -> None:
    first = prepared(tmp_path)
    written = Path(first.dataset).stat().st_mtime_ns
    assert prepared(tmp_path) == first
    assert Path(first.dataset).stat().st_mtime_ns == written


def test_a_named_mask_token_is_used(tmp_path: Path) -> None:
    spare = make_tokenizer().convert_tokens_to_ids("<|spare|>")
    assert prepared(tmp_path, drafter={"mask_token": "<|spare|>"}).mask_token_id == spare


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"target": {"taps": [1, 6]}}, "target.taps: [1, 6]: must be distinct, rising layer ids"),
        ({"target": {"model": "nowhere/at/all"}}, "target.model: nowhere/at/all: "),
        ({"data": {"path": "none.jsonl"}}, "data.path: none.jsonl: no such file"),
        ({"drafter": {"mask_token": END}}, "drafter.mask_token: '<|im_end|>' is a stop token"),
        ({"drafter": {"mask_token": 9999}}, "drafter.mask_token: 9999 is outside the vocabulary"),
        ({"data": {"min_supervised_tokens": 500}}, "none of 80 conversations is left to train on"),
        (
            {"target": {"num_taps": 3}},
            "target: num_taps 3 beside the 2 of taps: say one of the two",
        ),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, dict[str, object]],
    line: str,
) -> None:
    config = write_config(tmp_path, **changes)
    assert main([str(config), str(tmp_path / "out.json")]) == 2
    error = capsys.readouterr().err
    assert line in error and error.count("\n") == 1
    assert not (tmp_path / "out.json").exists()


def test_a_target_without_a_tokenizer_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path)
    for file in (tmp_path / "target").iterdir():
        if file.suffix != ".safetensors" and file.name != "config.json":
            file.unlink()
    assert main([str(config), str(tmp_path / "out.json")]) == 2
    line = capsys.readouterr().err
    assert "no usable tokenizer: it has no files of one: fetch the whole repository" in line


@pytest.mark.parametrize(
    ("file", "content", "line"),
    [
        ("model.safetensors", None, "has no *.safetensors files"),
        ("model.safetensors", b"\x50" + 90 * b"\0", "no usable weights"),
        ("config.json", b"[1]", "must hold an object, not list"),
        ("config.json", b'{"num_attention_heads": "4"}', "num_attention_heads '4'"),
        ("generation_config.json", b"{", "generation_config.json cannot be read"),
        ("tokenizer.json", b"{}", "no usable tokenizer"),
        ("generation_config.json", b'{"eos_token_id": "x"}', "does not fit together: ValueError"),
    ],
)
def test_a_damaged_target_is_refused_in_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    file: str,
    content: bytes | None,
    line: str,
) -> None:
    config = write_config(tmp_path)
    path = tmp_path / "target" / file
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content)
    assert main([str(config), str(tmp_path / "out.json")]) == 2
    error = capsys.readouterr().err
    assert line in error and error.count("\n") == 1


def test_weights_and_tokenizer_of_different_models_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "target").mkdir()
    write_target(tmp_path / "target", vocab_size=64)
    assert main([str(write_config(tmp_path)), str(tmp_path / "out.json")]) == 2
    assert "its vocab_size is 64" in capsys.readouterr().err


def test_a_template_that_cannot_be_masked_is_refused_with_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "target").mkdir()
    write_target(tmp_path / "target", DROPS_THINKING)
    config = write_config(tmp_path)
    thinking = talk("what is it?", "<think>hm</think>the answer", "sure?", "<think>ok</think>yes")
    write_jsonl(tmp_path / "data.jsonl", [*CONVERSATIONS, thinking])
    assert main([str(config), str(tmp_path / "out.json")]) == 2
    assert "data.jsonl:81: message 2: the chat template rewrites it" in capsys.readouterr().err


def test_as_a_process_it_exits_with_0_or_2(tmp_path: Path) -> None:
    config, out = write_config(tmp_path), tmp_path / "out.json"
    command = [sys.executable, "-m", "dflash.prepare", str(config), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text())["num_documents"] > 0
    assert "[[the answer" in done.stdout
    usage = subprocess.run(command[:-1], capture_output=True, text=True, check=False)
    assert usage.returncode == 2 and usage.stderr.startswith("usage:")


def test_the_audit_marks_every_trained_stretch() -> None:
    tokenizer = make_tokenizer()
    ids = np.array(tokenizer("abcdefg")["input_ids"])
    assert len(ids) == 7
    lm = np.array([False, True, True, False, False, True, True])
    assert audit(tokenizer, ids, lm) == "a[[bc]]de[[fg]]"
    assert audit(tokenizer, ids, np.ones(7, bool)) == "[[abcdefg]]"


def test_the_histogram_is_one_line_with_a_bar_for_each_stretch() -> None:
    line = histogram(np.array([10, 10, 10, 10, 39]), bins=4)
    assert line == "10 to 39, median 10 | █ ▂|"
