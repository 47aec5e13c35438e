"""A slot's way from a ring's page-locked pages to the GPU, and a whole run that trains there."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rings import new_path
from tiny_step import make_arch, make_batch, make_config
from whole_run import launch, losses, write_config

from dflash.feed import Feed
from dflash.slot import slot_views
from dflash.step import Batch
from launcher.slot import slot_fields
from shm_ring import RingReader, RingWriter, create, destroy
from shm_ring.pin import pin, unpin

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NAMES = [field.name for field in dataclasses.fields(Batch)]


@pytest.fixture
def ring() -> Iterator[tuple[RingWriter, RingReader]]:
    config, arch, path = make_config(loss="kl"), make_arch(), new_path()
    config = config.model_copy(
        update={"target": config.target.model_copy(update={"dtype": "float32"})}
    )
    fields = slot_fields(config, arch)
    create(path, fields, 4, end_seq=100, run_name="test")
    writer = RingWriter(path, "target_0", fields=fields)
    reader = RingReader(path, "trainer_0", fields=fields, verify=False)
    reader.rewind(0)
    yield writer, reader
    reader.leave()
    writer.leave()
    destroy(path, force=True)


def test_slots_arrive_whole_with_the_writers_sums(ring: tuple[RingWriter, RingReader]) -> None:
    """Three slots one after the other, the second shorter: rows beyond it are the first's."""
    config, arch = make_config(loss="kl"), make_arch()
    config = config.model_copy(
        update={"target": config.target.model_copy(update={"dtype": "float32"})}
    )
    writer, reader = ring
    report = pin(reader)
    assert report.refused is None, report.refused
    feed = None
    for seq, lens in enumerate([(30, 21, 9, 1, 17), (11, 2), (40, 33)]):
        want = make_batch(lens, seed=seq)
        lease = writer.claim()
        assert lease is not None
        views = slot_views(lease.buffer, config, arch)
        for name in NAMES:
            getattr(views, name).copy_(getattr(want, name))
        writer.publish(lease, total_tok=sum(lens))
        taken = reader.take(seq)
        pages = slot_views(taken.buffer, config, arch)
        assert pages.all_TF.is_pinned()
        feed = feed or Feed(pages, "cuda")
        feed.start(pages, taken.total_tok)
        assert feed.wait() == list(taken.sums)
        reader.done(taken)
        batch = feed.load()
        for name in NAMES:
            there, here = getattr(batch, name).cpu(), getattr(want, name)
            valid = slice(0, sum(lens)) if name not in ("lens_D", "total_tok") else ...
            assert torch.equal(there[valid], here[valid]), name
    unpin(reader)
    torch.zeros(1, device="cuda").add_(1).cpu()  # no error is left for the next launch


def test_a_refused_page_lock_leaves_no_error(ring: tuple[RingWriter, RingReader]) -> None:
    _, reader = ring
    assert pin(reader).refused is None
    again = pin(reader)  # locked already
    assert again.refused is not None and "all.bin" in again.refused
    torch.zeros(1, device="cuda").add_(1).cpu()


def test_a_whole_run_trains_on_the_gpu_as_on_the_cpu(tmp_path: Path) -> None:
    """The real programs; float32, so the curves agree to rounding. The last run measures itself on
    held-out texts meanwhile."""
    cuda = {"head_dim": 16, "device": "cuda"}
    every = {"prompts": 2, "max_new_tokens": 12, "threads": 1, "every": 6}
    runs: dict[str, dict[str, dict[str, Any]]] = {
        "cpu": {"drafter": {"head_dim": 16}},
        "eager": {"drafter": cuda, "step": {"mode": "eager"}},
        "graph": {"drafter": cuda, "step": {"mode": "graph"}},
        "walks": {"drafter": cuda, "step": {"mode": "graph"}, "eval": every},
    }
    for name, sections in runs.items():
        launch(tmp_path, "run", write_config(tmp_path, name, train={"steps": 12}, **sections))
    want = losses(tmp_path, "cpu")
    for name in ("eager", "graph", "walks"):
        for (step_a, *a), (step_b, *b) in zip(losses(tmp_path, name), want, strict=True):
            assert step_a == step_b
            assert all(math.isclose(x, y, rel_tol=1e-2) for x, y in zip(a, b, strict=True)), name
    lines = (tmp_path / "runs/walks/metrics.jsonl").read_text().splitlines()
    walks = {row["step"]: row["tau_walk"] for row in map(json.loads, lines) if "tau_walk" in row}
    assert [*walks] == [6, 12] and all(1 <= tau <= 4 for tau in walks.values())
