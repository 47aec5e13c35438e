"""What `plan` and `run` work out before anything starts, and what they refuse."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash.arch import DrafterArch, TargetArch, shipped_config
from dflash.config import Config, ConfigError, load_config, parse_config
from dflash.prepare import Prepared
from launcher import preflight, rings
from launcher.describe import plan_text
from launcher.gpus import CONTEXT_BYTES, Gpu, drafter_need, parse_gpus, visible
from launcher.preflight import Facts, check_early, refuse_early
from launcher.rundir import ROOT
from shm_ring import RingWriter, destroy, ring_bytes

TARGET = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 6,
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "tie_word_embeddings": True,
}  # fmt: skip
PREPARED = Prepared(
    target_dir="t", dataset="d.npz", fingerprint="ab", mask_token_id=7, num_documents=40,
    num_heldout=3, tokens=1600, supervised_tokens=900, dropped=1, truncated=2,
    length_quantiles=(4, 8), slots_per_pass=14, fill=0.95,
)  # fmt: skip
MIB = 1 << 20
H200 = Gpu(0, "GPU-a", "NVIDIA H200", 140 << 30, 0)


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "list_gpus", list)


@pytest.fixture
def target_dir(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(TARGET))
    return tmp_path / "target"


def config_of(tmp_path: Path, **sections: Any) -> Config:
    raw: dict[str, Any] = {
        "run": {"name": "r"},
        "data": {"path": str(tmp_path / "data.jsonl")},
        "target": {"model": str(tmp_path / "target"), "num_taps": 2, "dtype": "float32"},
        "drafter": {"num_layers": 1, "block_size": 4},
        "ring": {"path": str(tmp_path / "ring"), "max_tokens": 128, "slots": 6, "max_docs": 4},
        "train": {"steps": 20, "passes_per_slot": 2},
    }
    for name, value in sections.items():
        raw[name] = raw.get(name, {}) | value if isinstance(value, dict) else value
    return parse_config(raw, "test")


def facts_of(config: Config, target_dir: Path) -> Facts:
    return Facts.gather(config, target_dir, PREPARED)


def test_a_slot_costs_what_its_pages_cost(tmp_path: Path, target_dir: Path) -> None:
    facts = facts_of(config_of(tmp_path), target_dir)
    pages = {"ready": 1, "all": 8, "ids": 1, "lm": 1, "lens": 1, "pos": 1, "total_tok": 1}
    assert facts.slot_bytes == 4096 * sum(pages.values())  # all: 128 * 2 * 32 * 4 bytes
    assert facts.ring_bytes == ring_bytes(facts.fields, 6)


def test_kl_adds_the_last_state(tmp_path: Path, target_dir: Path) -> None:
    facts = facts_of(config_of(tmp_path, train={"loss": "kl"}), target_dir)
    assert [field.name for field in facts.fields][:2] == ["all", "vlh"]


def test_the_ring_that_fits_is_not_refused(tmp_path: Path, target_dir: Path) -> None:
    facts = facts_of(config_of(tmp_path), target_dir)
    replace(facts, free_tmpfs=facts.ring_bytes, free_cgroup=None, free_memory=1 << 40).refuse()


@pytest.mark.parametrize("which", ["free_tmpfs", "free_cgroup"])
def test_too_large_a_ring_is_refused_with_the_slots_that_fit(
    tmp_path: Path, target_dir: Path, which: str
) -> None:
    facts = facts_of(config_of(tmp_path, ring={"slots": 4096}), target_dir)
    room = dict.fromkeys(("free_tmpfs", "free_cgroup", "free_memory"), 1 << 40) | {which: 2 * MIB}
    with pytest.raises(ConfigError) as error:
        replace(facts, **room).refuse()
    text = str(error.value)
    assert "\n" not in text and text.startswith("ring.slots: 4096 slots")
    fitting = int(text.split("set ring.slots to at most ")[1].split(",")[0])
    assert ring_bytes(facts.fields, fitting) <= 2 * MIB < ring_bytes(facts.fields, fitting + 1)


def test_a_ring_beyond_the_memory_that_the_kernel_reports_is_a_warning(
    tmp_path: Path, target_dir: Path
) -> None:
    facts = facts_of(config_of(tmp_path, ring={"slots": 64}), target_dir)
    free = dict.fromkeys(("free_tmpfs", "free_cgroup", "free_memory"), 1 << 40)
    short = replace(facts, **free | {"free_memory": 2 * MIB})
    short.refuse()
    [line] = set(short.warnings()) - set(replace(facts, **free).warnings())
    assert line.startswith("ring.slots: the ring takes") and "at most" in line


def test_where_even_the_fewest_slots_do_not_fit_max_tokens_is_named(
    tmp_path: Path, target_dir: Path
) -> None:
    config = config_of(tmp_path, ring={"slots": 4, "max_tokens": 65536})
    room = 8 * MIB
    with pytest.raises(ConfigError) as error:
        replace(facts_of(config, target_dir), free_tmpfs=room, free_cgroup=None).refuse()
    tokens = int(str(error.value).split("ring.max_tokens to at most ")[1].split(",")[0])
    smaller = config_of(tmp_path, ring={"slots": 4, "max_tokens": tokens})
    assert room / 2 < facts_of(smaller, target_dir).ring_bytes <= room


def test_taps_outside_the_target_are_refused_early(tmp_path: Path, target_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"target\.taps.*from 0 to 5"):
        refuse_early(config_of(tmp_path, target={"taps": [1, 6]}))


def test_a_block_longer_than_a_slot_and_too_few_slots_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set ring\.max_tokens to at least 64"):
        config_of(tmp_path, drafter={"block_size": 32}, ring={"max_tokens": 32})
    with pytest.raises(ConfigError, match=r"set ring\.slots to at least 8"):
        config_of(tmp_path, targets=3)


def test_a_missing_data_file_or_ring_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.path: .*data\.jsonl: no such file"):
        check_early(config_of(tmp_path))
    (tmp_path / "data.jsonl").touch()
    check_early(config_of(tmp_path))
    with pytest.raises(ConfigError, match=r"ring\.path: .*nowhere: no such directory"):
        check_early(config_of(tmp_path, ring={"path": str(tmp_path / "nowhere" / "ring")}))
    for foreign in (tmp_path, tmp_path / "data.jsonl"):
        with pytest.raises(ConfigError, match=r"ring\.path: .* is no ring: name a new directory"):
            check_early(config_of(tmp_path, ring={"path": str(foreign)}))
    with pytest.raises(ConfigError, match=r"ring\.path: /dev/shm is a file system of its own"):
        check_early(config_of(tmp_path, ring={"path": "/dev/shm"}))


def test_cuda_without_a_gpu_is_refused(tmp_path: Path, target_dir: Path) -> None:
    config = config_of(tmp_path, target={"device": "cuda"})
    with pytest.raises(ConfigError, match=r"nvidia-smi shows no GPU.*set target\.device=cpu"):
        facts_of(config, target_dir).refuse()


def test_the_trainer_has_the_last_gpu_for_itself(
    tmp_path: Path, target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [replace(H200, index=i, uuid=f"GPU-{i}") for i in range(3)]
    monkeypatch.setattr(preflight, "list_gpus", lambda: gpus)
    cuda = {"device": "cuda"}
    config = config_of(tmp_path, target=cuda, drafter=cuda, targets=3, ring={"slots": 8})
    places = facts_of(config, target_dir).places
    assert [p.gpu.index for p in places if p.gpu] == [0, 1, 0, 2]


def test_of_two_gpus_the_target_has_the_first(
    tmp_path: Path, target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [replace(H200, index=i, uuid=f"GPU-{i}") for i in range(2)]
    monkeypatch.setattr(preflight, "list_gpus", lambda: gpus)
    config = config_of(tmp_path, target={"device": "cuda"}, drafter={"device": "cuda"})
    target, trainer = facts_of(config, target_dir).places
    assert target.gpu is gpus[0] and trainer.gpu is gpus[1]
    assert target.need is not None and trainer.need is not None


def test_a_gpu_that_is_too_small_is_refused_with_the_number_that_fits(
    tmp_path: Path, target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(H200, total_bytes=2 << 30)
    monkeypatch.setattr(preflight, "list_gpus", lambda: [small])

    def config(tokens: int) -> Config:
        return config_of(tmp_path, drafter={"device": "cuda"}, ring={"max_tokens": tokens})

    with pytest.raises(ConfigError, match="GPU 0") as error:
        facts_of(config(1 << 21), target_dir).refuse()
    tokens = int(str(error.value).split("ring.max_tokens to at most ")[1])
    facts = facts_of(config(tokens), target_dir)
    need = facts.places[-1].need
    assert need is not None and 0.7 * small.total_bytes < need.total <= small.total_bytes


def test_the_estimate_for_the_27b_shapes_is_near_the_worked_example() -> None:
    """By hand: states 31 GB, ends 5.1 GB, activations 31 GB, slots 6 GB, about 85 GB."""
    shapes = TARGET | {
        "num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 17408,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 248320, "tie_word_embeddings": False,
    }  # fmt: skip
    target = TargetArch.from_config(shapes, shapes)
    config = parse_config(
        {
            "run": {"name": "r"},
            "data": {"path": "d"},
            "target": {"model": "m"},
            "drafter": {"block_size": 32},
            "ring": {"max_tokens": 49152},
            "train": {"steps": 1, "loss": "kl", "anchor_density": 1024 / 49.152},
        },
        "test",
    )
    arch = DrafterArch.build(config, target, 0)
    assert config.num_anchors == 1024
    need = drafter_need(config, target, arch, slot_bytes=3 * 10**9)
    assert 25e9 < need.weights < 35e9
    assert 4.5e9 < need.ends < 5.5e9
    step = config.step.model_copy(update={"head_float8": True})
    more = drafter_need(config.model_copy(update={"step": step}), target, arch, 3 * 10**9)
    assert more.ends - need.ends == 248320 * 5120
    assert 60e9 < need.total < 95e9


GPU_CONFIGS = ["qwen36_27b_2gpu", "qwen3_8b_2gpu"]
RANDOM = ["target.random_weights=true", "data.path=random:99x550"]


def shipped_facts(name: str, *overrides: str) -> Facts:
    config = load_config(ROOT / f"configs/{name}.yaml", [*RANDOM, *overrides])
    directory = shipped_config(config.target.model)
    assert directory is not None
    return Facts.gather(config, directory, None)


@pytest.mark.parametrize(
    ("name", "parameters"), list(zip(GPU_CONFIGS, (26.896e9, 8.191e9), strict=True))
)
def test_the_shipped_targets_need_their_weights_and_two_slots(name: str, parameters: float) -> None:
    """Published sizes in bfloat16; taps and last state: 6 states a token."""
    facts = shipped_facts(name)
    need, hidden = facts.places[0].need, facts.target.hidden_size
    assert need is not None
    assert need.weights == pytest.approx(2 * parameters, rel=1e-3)
    assert need.slots == pytest.approx(2 * 49152 * 6 * hidden * 2, rel=0.01)
    assert facts.config.num_anchors == 1024


def test_the_drafter_of_the_shipped_27b_config_needs_what_was_measured() -> None:
    """benchmarks/results/drafter_h200_27b.json: 69.3 GiB, with one copy of the slot, not two."""
    facts = shipped_facts("qwen36_27b_2gpu")
    need = facts.places[1].need
    assert need is not None
    once = need.total - need.slots / 2 - CONTEXT_BYTES
    assert once == pytest.approx(69.3 * 2**30, rel=0.05)


def test_a_document_longer_than_the_micro_batch_counts(tmp_path: Path, target_dir: Path) -> None:
    cuda = config_of(tmp_path, target={"device": "cuda", "micro_batch_tokens": 100})
    longer = replace(PREPARED, length_quantiles=(4, 3000))
    short, long = (Facts.gather(cuda, target_dir, p).places[0].need for p in (PREPARED, longer))
    assert short is not None and long is not None
    width = 4 * 32 + 3 * 64  # H and FFN of TARGET
    assert long.activations == 3000 * width * 4 and short.activations == 100 * width * 4


@pytest.mark.parametrize("name", GPU_CONFIGS)
def test_a_machine_without_gpus_is_refused_before_a_download(name: str) -> None:
    config = load_config(ROOT / f"configs/{name}.yaml")
    with pytest.raises(ConfigError, match=r"target\.device: cuda, but nvidia-smi shows no GPU"):
        refuse_early(config)


def test_the_plan_shows_the_gpu_memory_without_a_gpu() -> None:
    text = plan_text(shipped_facts("qwen36_27b_2gpu"))
    assert re.search(
        r"target_0 +cuda: no GPU here +4 +6\d\.\d GiB: weights and states 50\.1 GiB", text
    )
    assert "26.90 B parameters" in text and "8 slots x 2.8 GiB = 22.5 GiB" in text
    assert "RANDOM WEIGHTS" in text.split("warnings")[1]


@pytest.mark.parametrize("there", [True, False])
def test_packages_that_a_gpu_target_wants_are_named(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "find_spec", lambda name: object() if there else None)
    monkeypatch.setattr(preflight, "has_fla", lambda: there)
    warnings = "\n".join(shipped_facts("qwen36_27b_2gpu").warnings())
    assert ("48 layers of the target are Gated DeltaNet and run many times" in warnings) != there
    assert "DeltaNet" not in "\n".join(shipped_facts("qwen3_8b_2gpu").warnings())
    (tmp_path / "data.jsonl").touch()
    real = config_of(tmp_path, target={"device": "cuda"})
    if there:
        check_early(real)
    else:
        with pytest.raises(ConfigError, match=r"needs `accelerate`: pip install"):
            check_early(real)
    check_early(load_config(ROOT / "configs/qwen36_27b_2gpu.yaml", RANDOM))


def test_a_ring_of_97_gb_is_held_against_what_is_free() -> None:
    facts = shipped_facts("qwen36_27b_2gpu", "ring.slots=32")
    assert facts.ring_bytes == pytest.approx(97e9, rel=0.01)
    with pytest.raises(ConfigError) as error:
        replace(
            facts, places=(), free_tmpfs=64 << 30, free_cgroup=None, free_memory=1 << 40
        ).refuse()
    assert "32 slots of 2.8 GiB take 90.0 GiB" in str(error.value)
    assert "has 64.0 GiB: set ring.slots to at most 22, or enlarge" in str(error.value)


def test_gpus_are_read_from_nvidia_smi_and_filtered_as_cuda_does() -> None:
    csv = "0, GPU-a, NVIDIA H200, 143771, 10\n1, GPU-b, NVIDIA H200, 143771, 0\ngarbage\n"
    gpus = parse_gpus(csv)
    assert [(g.index, g.name, g.total_bytes, g.used_bytes) for g in gpus] == [
        (0, "NVIDIA H200", 143771 * MIB, 10 * MIB),
        (1, "NVIDIA H200", 143771 * MIB, 0),
    ]
    assert [g.index for g in visible(gpus, None)] == [0, 1]
    assert [g.index for g in visible(gpus, "1,GPU-a")] == [1, 0]
    assert visible(gpus, "") == []


def test_a_dead_ring_counts_as_room_and_a_live_one_does_not(
    tmp_path: Path, target_dir: Path
) -> None:
    config = config_of(tmp_path)
    fields = facts_of(config, target_dir).fields
    code = f"from shm_ring import *; create({str(config.ring.path)!r}, {fields!r}, 6, "
    code += "end_seq=1, run_name='old')"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    files = [file for file in config.ring.path.rglob("*") if file.is_file()]
    assert preflight._ring_there(config.ring.path) == sum(file.stat().st_size for file in files) > 0
    party = RingWriter(config.ring.path, "target_0")
    assert preflight._ring_there(config.ring.path) == 0
    party.leave()
    destroy(config.ring.path)
    assert preflight._ring_there(config.ring.path) == 0


def test_warnings_name_what_is_perhaps_not_meant(tmp_path: Path, target_dir: Path) -> None:
    config = config_of(tmp_path, target={"threads": 1024}, eval={"prompts": 9})
    warnings = facts_of(config, target_dir).warnings()
    assert warnings[0].startswith("1025 threads on ")
    assert warnings[1].startswith("eval.prompts 9: only 3 conversations are held out")


def test_a_ring_on_a_disk_is_a_warning_with_its_file_system(
    tmp_path: Path, target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted = [("/", "overlay"), (str(tmp_path), "tmpfs"), (str(tmp_path), "xfs")]
    mounted.append((str(tmp_path / "memory"), "tmpfs"))
    mounts = [SimpleNamespace(mountpoint=at, fstype=kind) for at, kind in mounted]
    monkeypatch.setattr(rings.psutil, "disk_partitions", lambda all: mounts)
    (tmp_path / "memory").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "memory")
    for inside, warned in (("ring", ["xfs"]), ("memory/ring", []), ("link/ring", [])):
        config = config_of(tmp_path, ring={"path": str(tmp_path / inside)})
        warnings = facts_of(config, target_dir).warnings()
        found = [line.partition(" is on ")[2] for line in warnings if " is on " in line]
        assert [line.partition(",")[0] for line in found] == warned


def test_the_plan_shows_the_figures(tmp_path: Path, target_dir: Path) -> None:
    text = plan_text(facts_of(config_of(tmp_path), target_dir))
    for line in (
        "20 steps: 10 slots x 2 passes",
        "8 anchors x block 4 = 32 query positions",
        "40 conversations, 1,600 tokens, 900 of them trained; 3 held out",
        "all.bin        f32    [1, 128, 64]  32,768",
        "taps 1, 3 (0-based layers)",
        "mask token 7",
        "name: r",
    ):
        assert line in text
