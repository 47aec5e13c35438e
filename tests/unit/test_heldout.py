"""The trainer's held-out texts: what is in them, when they are made, and that measuring is all that
measuring does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tiny import random_drafter
from tiny_run import TinyRun, make_run

from dflash import heldout as H
from dflash.config import Config, ConfigError
from dflash.data import Dataset
from dflash.decode import plain_greedy
from dflash.measure import decode_prompts, summarise
from dflash.prepare import Prepared
from dflash.walk import text_states

NAMES = ("tau_walk", "ddtree_len@16", "ddtree_len@64")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_run(tmp_path_factory.mktemp("run"))


def prepared(run: TinyRun) -> Prepared:
    return Prepared.from_json((run.path / "prepared.json").read_text())


def changed(config: Config, section: str, **values: object) -> Config:
    part = getattr(config, section).model_copy(update=values)
    return config.model_copy(update={section: part})


def test_the_texts_are_the_targets_own_answers_with_their_states(
    run: TinyRun, tmp_path: Path
) -> None:
    dataset, path, asked = Dataset.load(prepared(run).dataset), tmp_path / "deep/x.safetensors", []
    told = H.leave_texts(path, run.target, run.config, dataset, lambda: asked.append(1))
    assert told.startswith("decoded 3 held-out prompts") and len(asked) == 3
    texts = H.load_texts(path)
    assert [text.prompt for text in texts] == [ids.tolist() for ids, _ in dataset.heldout[:3]]
    for text in texts:
        assert text.tokens == plain_greedy(run.target, text.prompt, 12).tokens
        assert torch.equal(text.states_TF, text_states(run.target, [*text.prompt, *text.tokens]))
    assert [file.name for file in path.parent.iterdir()] == [path.name]

    written = path.stat().st_ino
    assert "are in" in H.leave_texts(path, run.target, run.config, dataset, lambda: asked.append(1))
    assert len(asked) == 3 and path.stat().st_ino == written


def test_the_trainer_measures_what_eval_measures_and_nothing_else_changes(
    run: TinyRun, tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    H.leave_texts(path, run.target, run.config, Dataset.load(prepared(run).dataset))
    texts, ends = H.load_texts(path), run.target.ends()
    drafter = random_drafter(run.arch, seed=2)
    before = [parameter.clone() for parameter in drafter.parameters()]
    random_state = torch.get_rng_state()
    figures = H.measure_texts(drafter, ends, texts)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(map(torch.equal, drafter.parameters(), before))
    assert all(parameter.requires_grad for parameter in drafter.parameters())

    prompts = [text.prompt for text in texts]
    results = decode_prompts(run.target, drafter, ends, prompts, 12, run.target.arch.eos_token_ids)
    measured = summarise(results, run.arch.block_size)
    assert figures == {name: measured[name] for name in NAMES}
    assert measured["walk_equal"] == 3 and figures["ddtree_len@64"] > 1


def test_other_settings_have_other_texts(run: TinyRun) -> None:
    def name(config: Config) -> str:
        return H.heldout_file(config, prepared(run), run.arch).name

    config = run.config
    same = (changed(config, "train", lr=1.0), changed(config, "eval", every=10))
    other = (
        changed(config, "eval", prompts=2),
        changed(config, "eval", max_new_tokens=7),
        changed(config, "target", dtype="bfloat16"),
    )
    assert {name(some) for some in same} == {name(config)}
    assert len({name(some) for some in (config, *other)}) == 4


def test_prompts_that_leave_no_room_are_a_users_mistake(run: TinyRun, tmp_path: Path) -> None:
    config = changed(run.config, "eval", max_new_tokens=600, every=10)
    dataset = Dataset.load(prepared(run).dataset)
    with pytest.raises(ConfigError, match=r"eval.every 10: .*lower eval.max_new_tokens"):
        H.leave_texts(tmp_path / "x", run.target, config, dataset)


def some_texts() -> list[H.Text]:
    return [H.Text([1, 2], [3], torch.zeros(3, 4))]


def test_the_files_used_last_stay_and_what_a_killed_save_left_goes(
    run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(H, "KEPT", 2)
    dataset, age = Dataset.load(prepared(run).dataset), iter((10, 20, 30))
    for name in ("killed.safetensors.tmp", "used.safetensors", "unused.safetensors"):
        H.save_texts(tmp_path / name, some_texts())
        os.utime(tmp_path / name, 2 * (next(age),))
    H.leave_texts(tmp_path / "used.safetensors", run.target, run.config, dataset)
    H.leave_texts(tmp_path / "new.safetensors", run.target, run.config, dataset)
    assert {file.name for file in tmp_path.iterdir()} == {"used.safetensors", "new.safetensors"}


@pytest.mark.parametrize("damage", ["cut", "no checksum", "a bit of its states"])
def test_a_damaged_file_is_named_and_made_again(
    damage: str, run: TinyRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from safetensors.torch import load_file, save_file

    dataset, path = Dataset.load(prepared(run).dataset), tmp_path / "x.safetensors"
    H.leave_texts(path, run.target, run.config, dataset)
    whole = path.read_bytes()
    if damage == "cut":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "no checksum":
        save_file(load_file(path), path)
    else:
        path.write_bytes(flipped(whole, 8 * (len(whole) - 100)))
    with pytest.raises(ConfigError, match=r"x\.safetensors: damaged \("):
        H.load_texts(path)
    told = H.leave_texts(path, run.target, run.config, dataset)
    assert told.startswith("decoded 3 held-out prompts") and path.read_bytes() == whole
    (warned,) = caplog.records
    assert (warned.name, warned.levelname) == ("target", "WARNING")
    assert warned.getMessage().startswith(f"{path}: damaged (")
    assert "\n" not in warned.getMessage()


def test_each_single_bit_of_a_file_counts(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    H.save_texts(path, some_texts())
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        path.write_bytes(flipped(whole, bit))
        with pytest.raises(ConfigError, match=r"x\.safetensors: damaged \("):
            H.load_texts(path)


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
