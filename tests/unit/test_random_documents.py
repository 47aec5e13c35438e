"""Random documents for benchmarks: what the path says, and what `prepare` makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dflash.config import Config, ConfigError, parse_config
from dflash.data import Dataset
from dflash.prepare import Prepared, prepare
from dflash.random_documents import RandomDocuments

SHAPES = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 6,
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 100,
    "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_RING_CACHE", str(tmp_path / "cache"))


def config_of(tmp_path: Path, path: str, min_supervised_tokens: int = 4) -> Config:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES))
    raw = {
        "run": {"name": "r"},
        "data": {"path": path, "min_supervised_tokens": min_supervised_tokens},
        "target": {"model": str(tmp_path), "taps": [1, 3], "random_weights": True},
        "ring": {"max_tokens": 256},
        "train": {"steps": 1},
    }
    return parse_config(raw, "test")


def prepared(tmp_path: Path, path: str) -> tuple[Prepared, Dataset]:
    found = prepare(config_of(tmp_path, path))
    return found, Dataset.load(found.dataset)


def test_the_two_forms_and_files() -> None:
    assert RandomDocuments.parse("random:4096x550") == RandomDocuments(4096, 275, 825)
    assert RandomDocuments.parse("random:4096x=550") == RandomDocuments(4096, 550, 550)
    assert RandomDocuments.parse("data/random.jsonl") is None
    for form in ("random:40x2", "random:40x7", "random:40x550", "random:40x=1", "random:40x=4096"):
        assert str(RandomDocuments.parse(form)) == form
    for wrong in ("random:", "random:0x5", "random:5x0", "random:5x-3", "random:5x5x5", "random:5"):
        with pytest.raises(ValueError, match="are written random:COUNTxTOKENS"):
            RandomDocuments.parse(wrong)


def test_lengths_spread_evenly_and_the_prompt_is_an_eighth() -> None:
    drawn = list(RandomDocuments(4000, 20, 60).draw(100))
    lengths = [len(ids) for ids, _ in drawn]
    assert min(lengths) == 20 and max(lengths) == 60 and 39 < np.mean(lengths) < 41
    for ids, mask in drawn[:50]:
        assert mask.tolist() == [False] * (len(ids) // 8) + [True] * (len(ids) - len(ids) // 8)
    counts = np.bincount(np.concatenate([ids for ids, _ in drawn]), minlength=100)
    assert counts[99] == 0 and counts[:99].min() > 1000  # the last id is the mask token


def test_prepare_needs_no_tokenizer_and_keeps_the_last_id_free(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, dataset = prepared(tmp_path, "random:50x40")
    assert found.num_documents == 50 and found.num_heldout == 0 and found.dropped == 0
    assert found.mask_token_id == 99 and dataset.used_ids()[-1] < 99
    assert found.target_dir == str(tmp_path)
    log = capsys.readouterr().out
    assert log.startswith("RANDOM WEIGHTS (target.random_weights)")
    assert "mask token 99, the vocabulary's last" in log


def test_they_are_cut_at_the_targets_context_as_all_documents_are(tmp_path: Path) -> None:
    found, dataset = prepared(tmp_path, "random:9x=80")
    assert found.truncated == 9 and set(dataset.lengths) == {64}


def test_the_same_path_gives_the_same_documents_and_another_others(tmp_path: Path) -> None:
    first, dataset = prepared(tmp_path, "random:50x40")
    Path(first.dataset).unlink()  # not from the cache
    again, same = prepared(tmp_path, "random:50x40")
    assert again.fingerprint == first.fingerprint
    assert np.array_equal(dataset.ids_S, same.ids_S) and np.array_equal(dataset.lm_S, same.lm_S)
    assert prepared(tmp_path, "random:51x40")[0].fingerprint != first.fingerprint


def test_documents_without_enough_trained_tokens_are_refused_as_real_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none of 9 conversations is left to train on"):
        prepare(config_of(tmp_path, "random:9x=8", min_supervised_tokens=8))


def test_those_whose_prompt_fills_a_slot_are_refused_by_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        prepare(config_of(tmp_path, "random:9x=4096"))
    assert str(error.value) == (
        "data.path: random:9x=4096: none of 9 conversations is left to train on (9 have fewer than "
        "4 trained tokens in the 64 that a slot or the target's context holds, 0 are held out): "
        "give shorter ones, raise ring.max_tokens, or lower data.min_supervised_tokens or "
        "data.heldout"
    )
