"""Checkpoints: bit-exact, and whole or not there."""

from __future__ import annotations

import json
import shutil
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from tiny import drafter_arch, load_tiny

from dflash import checkpoint as C
from dflash import complete
from dflash.complete import set_aside_damaged
from dflash.config import ConfigError, parse_config
from dflash.step import Batch, TrainState, train_step
from dflash.target import load_ends

TOKENS = 64


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """(config, arch, ends, slot) of a training run small enough to take steps in a test."""
    target = load_tiny(tmp_path_factory.mktemp("target"), "qwen3")
    dtype = torch.float32 if request.param == "float32" else torch.bfloat16
    raw = {
        "run": {"name": "t"},
        "data": {"path": "x.jsonl"},
        "target": {"model": str(target.directory), "dtype": request.param},
        "drafter": {"num_layers": 2, "block_size": 4, "dtype": request.param},
        "ring": {"max_tokens": TOKENS, "max_docs": 4},
        "train": {"steps": 12, "passes_per_slot": 2, "lr": 1e-2, "anchor_density": 250},
    }
    config = parse_config(raw, "test")
    ends = load_ends(target.directory, target.arch, dtype, "cpu")
    generator = torch.Generator().manual_seed(0)
    slot = Batch(
        all_TF=torch.randn(TOKENS, 64, generator=generator).to(dtype),
        vlh_TH=None,
        ids_T=torch.randint(0, 90, (TOKENS,), generator=generator),
        lm_T=torch.ones(TOKENS, dtype=torch.bool),
        lens_D=torch.tensor([40, 20, 0, 0]),
        pos_T=torch.cat([torch.arange(40), torch.arange(24)]),
        total_tok=torch.tensor(60),
    )
    return config, drafter_arch(target), ends, slot


def steps(state: TrainState, slot: Batch, until: int) -> list[bytes]:
    sums = []
    while state.step < until:
        vector = train_step(state, slot, seq=state.slot, pass_idx=state.pass_idx)
        sums.append(vector.numpy().tobytes())
    return sums


def some_checkpoint(case: tuple, step: int = 3) -> C.Checkpoint:
    config, arch, ends, slot = case
    state = TrainState.create(config, arch, ends)
    steps(state, slot, step)
    return C.snapshot(state, seq=state.slot, data_fingerprint="f00d")


def test_training_goes_on_bit_for_bit_from_a_checkpoint(case: tuple, tmp_path: Path) -> None:
    config, arch, ends, slot = case
    undisturbed = TrainState.create(config, arch, ends)
    whole = steps(undisturbed, slot, 9)

    stopped = TrainState.create(config, arch, ends)
    steps(stopped, slot, 5)
    C.save(tmp_path, C.snapshot(stopped, seq=stopped.slot, data_fingerprint="f"), keep=2)
    loaded = C.load(C.latest(tmp_path))
    assert (loaded.step, loaded.seq, loaded.pass_idx) == (5, 2, 1)

    resumed = TrainState.create(config, arch, ends)
    resumed.optimizer.weights.zero_()  # nothing of it may come from the initialisation
    resumed.optimizer.masters.zero_()
    C.restore(resumed, loaded, "f")
    assert steps(resumed, slot, 9) == whole[5:]
    assert torch.equal(resumed.optimizer.masters, undisturbed.optimizer.masters)
    assert torch.equal(resumed.optimizer.weights, undisturbed.optimizer.weights)
    assert resumed.metrics.sums.tolist() == undisturbed.metrics.sums.tolist()


def test_a_checkpoint_holds_the_masters_in_float32_by_the_exports_names(
    case: tuple, tmp_path: Path
) -> None:
    saved = some_checkpoint(case)
    loaded = C.load(C.save(tmp_path, saved, keep=1))
    assert loaded.weights.keys() == saved.weights.keys()
    assert "layers.1.self_attn.k_norm.weight" in loaded.weights
    for name, weight in loaded.weights.items():
        assert weight.dtype == torch.float32 and torch.equal(weight, saved.weights[name])
    assert loaded.arch == saved.arch and loaded.config_yaml == saved.config_yaml
    assert loaded.data_fingerprint == "f00d"
    assert loaded.versions["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert parse_config(yaml.safe_load(loaded.config_yaml), "run.yaml") == case[0]


def test_another_drafter_or_other_data_is_refused_by_what_changed(case: tuple) -> None:
    config, arch, ends, _ = case
    saved = some_checkpoint(case)
    state = TrainState.create(config, arch, ends)
    with pytest.raises(ConfigError, match=r"data: f00d -> beef: choose another run.name"):
        C.restore(state, saved, "beef")
    other = replace(saved, arch=replace(arch, block_size=8, taps=(0, 1)))
    with pytest.raises(ConfigError, match=r"block_size: 8 -> 4; taps: \(0, 1\) -> \(0, 2\)"):
        C.restore(state, other, "f00d")


def test_the_newest_k_are_kept_and_the_same_step_may_be_saved_again(
    case: tuple, tmp_path: Path
) -> None:
    saved = some_checkpoint(case)
    for step in (5, 10, 15, 15, 20):
        C.save(tmp_path, replace(saved, step=step), keep=2)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step_00000015", "step_00000020"]
    assert C.latest(tmp_path) == C.find_checkpoint(tmp_path) == tmp_path / "step_00000020"
    assert C.find_checkpoint(tmp_path / "step_00000015").name == "step_00000015"


@pytest.mark.parametrize("damage", ["no marker", "cut marker", "cut file", "lost file"])
def test_a_damaged_checkpoint_is_never_taken_for_a_whole_one(
    damage: str, case: tuple, tmp_path: Path
) -> None:
    saved = some_checkpoint(case)
    C.save(tmp_path, saved, keep=5)
    newest = C.save(tmp_path, replace(saved, step=99), keep=5)
    if damage == "no marker":
        (newest / C.MARKER).unlink()
    elif damage == "cut marker":
        (newest / C.MARKER).write_text((newest / C.MARKER).read_text()[:20])
    elif damage == "cut file":
        with (newest / "state.pt").open("r+b") as file:
            file.truncate(10)
    else:
        (newest / "arch.json").unlink()
    assert C.latest(tmp_path) == tmp_path / "step_00000003"
    with pytest.raises(ConfigError, match="not a complete checkpoint"):
        C.load(newest)


class Killed(Exception):
    pass


@pytest.mark.parametrize("moment", ["weights", "state", "marker", "rename", "sweep"])
def test_a_save_killed_at_any_moment_leaves_the_older_checkpoint_or_the_whole_new_one(
    moment: str, case: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = some_checkpoint(case)
    C.save(tmp_path, saved, keep=1)

    def killed(*args: object, **kwargs: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        if moment == "weights":
            patch.setattr("safetensors.torch.save_file", killed)
        elif moment == "state":
            patch.setattr(torch, "save", killed)
        elif moment == "marker":
            patch.setattr(C, "_fsync", killed)
        elif moment == "rename":
            patch.setattr(Path, "rename", killed)
        else:  # the new one is in place; deleting the old one is cut short
            patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(Killed):
            C.save(tmp_path, replace(saved, step=8), keep=1)

    survivor = C.latest(tmp_path)
    assert survivor is not None
    assert survivor.name == ("step_00000008" if moment == "sweep" else "step_00000003")
    assert C.load(survivor).step == int(survivor.name[5:])
    assert len(list(tmp_path.iterdir())) == 2  # and a leftover, which the next save sweeps
    C.save(tmp_path, replace(saved, step=9), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000009"]


def test_the_marker_names_every_other_file(case: tuple, tmp_path: Path) -> None:
    path = C.save(tmp_path, some_checkpoint(case), keep=1)
    listed = set(json.loads((path / C.MARKER).read_text()))
    assert listed == {file.name for file in path.iterdir()} - {C.MARKER}
    assert listed == {"model.safetensors", "state.pt", "arch.json", "meta.json", "run.yaml"}


def test_one_flipped_bit_is_found_and_the_checkpoint_before_is_used(
    case: tuple, tmp_path: Path
) -> None:
    saved = some_checkpoint(case)
    older = C.save(tmp_path, saved, keep=5)
    newest = C.save(tmp_path, replace(saved, step=99), keep=5)
    flip_a_bit(newest / "state.pt")
    with pytest.raises(ConfigError, match=r"step_00000099: state\.pt: not the bytes that were sav"):
        C.load(newest)
    lines = set_aside_damaged(tmp_path)
    aside = tmp_path / "damaged-step_00000099"
    assert lines == [f"checkpoint step_00000099: state.pt damaged: kept as {aside}"]
    assert aside.is_dir() and C.latest(tmp_path) == older and C.load(older).step == 3
    assert set_aside_damaged(tmp_path) == []
    shutil.copytree(aside, tmp_path / "step_00000099")  # made again, and damaged again
    again = tmp_path / "damaged-step_00000099+"
    assert set_aside_damaged(tmp_path)[0].endswith(f"kept as {again}")
    assert aside.is_dir() and again.is_dir() and C.latest(tmp_path) == older


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_checkpoint_marked_with_sizes_alone_still_loads(case: tuple, tmp_path: Path) -> None:
    path = C.save(tmp_path, some_checkpoint(case), keep=1)
    marker = path / C.MARKER
    entries = json.loads(marker.read_text())
    marker.write_text(json.dumps({name: entry["bytes"] for name, entry in entries.items()}))
    assert C.load(path).step == 3


def test_the_checksum_is_the_crc32_of_every_chunk_s_crc32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(complete, "CHUNK_BYTES", 9)
    # 0xCBF43926 is the crc32 of "123456789" in every catalogue of them.
    parts = bytes.fromhex("cbf43926cbf43926") + zlib.crc32(b"2").to_bytes(4, "big")
    (tmp_path / "file").write_bytes(b"123456789123456789" + b"2")
    assert complete.checksum(tmp_path / "file") == f"{zlib.crc32(parts):08x}"


def test_a_run_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    assert C.latest(tmp_path / "nowhere") is None
    with pytest.raises(ConfigError, match="no complete checkpoint here"):
        C.find_checkpoint(tmp_path)
