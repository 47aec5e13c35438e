"""`bench drafter --slot`: a slot that a writer has published in a real ring, copied while the ring
lives, is the batch; and what is no such slot is refused in one line."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from rings import new_path
from tiny_step import DOCS, HIDDEN, TAPS, TOKENS, VOCAB, make_arch, make_config

from benchmarks.recorded import recorded_slot, to_device
from benchmarks.shapes import Case
from dflash.config import ConfigError
from dflash.slot import slot_views, write_documents
from launcher.slot import slot_fields
from shm_ring import RingWriter, create, destroy

LENS = (30, 21)


def case_of(loss: str, **ring: int) -> Case:
    config = make_config(loss=loss)
    config = config.model_copy(update={"ring": config.ring.model_copy(update=ring)})
    return Case("tiny", config, make_arch(), TOKENS, tied=False)


@pytest.fixture
def copied(tmp_path: Path) -> Iterator[Path]:
    """Of the slot of a run with train.loss kl; the one beside it was never written."""
    case, path = case_of("kl"), new_path()
    create(path, slot_fields(case.config, case.arch), 4, end_seq=9, run_name="test")
    writer = RingWriter(path, "target_0", fields=slot_fields(case.config, case.arch))
    lease = writer.claim()
    assert lease is not None
    views = slot_views(lease.buffer, case.config, case.arch)
    for states in (views.all_TF, views.vlh_TH):
        assert states is not None
        states.copy_(torch.arange(states.numel()).view_as(states) % 251)
    docs = [(np.arange(n, dtype=np.int32), np.arange(n) % 3 > 0) for n in LENS]
    writer.publish(lease, total_tok=write_documents(views, docs))
    del views
    for slot in ("slot_0000", "slot_0001"):
        shutil.copytree(path / slot, tmp_path / slot)
    writer.leave()
    destroy(path, force=True)
    yield tmp_path / "slot_0000"


def test_a_recorded_slot_is_the_batch(copied: Path) -> None:
    slot = to_device(recorded_slot(case_of("kl"), copied), "cpu")
    width = TAPS * HIDDEN
    expected_TF = torch.arange(TOKENS * width).view(TOKENS, width) % 251
    assert torch.equal(slot.all_TF, expected_TF.bfloat16())
    assert slot.vlh_TH is not None and slot.vlh_TH[1].tolist() == list(range(HIDDEN, 2 * HIDDEN))
    assert slot.ids_T[:51].tolist() == slot.pos_T[:51].tolist() == [*range(30), *range(21)]
    assert slot.lm_T[:4].tolist() == [False, True, True, False]
    assert slot.lens_D.tolist() == [*LENS, *[0] * (DOCS - 2)] and int(slot.total_tok) == 51
    before = (copied / "all.bin").read_bytes()
    slot.all_TF.zero_()  # a step's batch is nobody's page
    assert (copied / "all.bin").read_bytes() == before


def test_ce_reads_no_last_hidden_states(copied: Path) -> None:
    (copied / "vlh.bin").unlink()
    assert recorded_slot(case_of("ce"), copied).vlh_TH is None
    with pytest.raises(ConfigError, match=r"slot_0000/vlh\.bin: no such file: .* give --loss ce$"):
        recorded_slot(case_of("kl"), copied)


def test_a_slot_of_another_config_is_refused_with_both_sizes(copied: Path) -> None:
    size = 2 * TOKENS * TAPS * HIDDEN
    with pytest.raises(
        ConfigError,
        match=rf"slot_0000/all\.bin has {size:,} bytes, and all bf16 \[1, 192, 48\] has "
        rf"{2 * size:,}: give the config",
    ):
        recorded_slot(case_of("kl", max_tokens=2 * TOKENS), copied)
    (copied / "pos.bin").unlink()
    with pytest.raises(ConfigError, match=r"pos\.bin: no such file: give the config"):
        recorded_slot(case_of("kl"), copied)


def test_an_empty_slot_is_refused(copied: Path) -> None:
    with pytest.raises(ConfigError, match=r"slot_0001 is empty, its total_tok is 0: copy one that"):
        recorded_slot(case_of("kl"), copied.with_name("slot_0001"))


@pytest.mark.parametrize(
    ("file", "value", "words"),
    [
        ("total_tok", 50, "its total_tok is 50 and its documents have 51 tokens: copy one"),
        ("total_tok", -51, "its total_tok is -51"),
        ("ids", VOCAB, f"token ids from 0 to {VOCAB}, and - has {VOCAB} tokens"),
        ("ids", -1, "token ids from -1 to 29"),
    ],
)
def test_a_slot_that_would_fail_on_the_device_is_refused(
    file: str, value: int, words: str, copied: Path
) -> None:
    """A copy that its writer overtook, or tokens of another target."""
    with (copied / f"{file}.bin").open("r+b") as raw:
        raw.write(np.int64(value).tobytes())
    with pytest.raises(ConfigError) as refused:
        recorded_slot(case_of("kl"), copied)
    assert words in str(refused.value) and "\n" not in str(refused.value)
