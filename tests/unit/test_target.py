"""Capture: micro-batches, taps, early stop, the self-test, and the files of a target."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import FAMILIES, HIDDEN, LAYERS, VOCAB, load_tiny, save_tiny

from dflash.arch import TargetArch
from dflash.config import ConfigError
from dflash.target import (
    CALL_SHARE,
    CaptureError,
    Target,
    micro_batches,
    padded_length,
)


def documents(*lengths: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, n).astype(np.int32) for n in lengths]


def capture(
    target: Target, docs: list[np.ndarray], *, vlh: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = sum(map(len, docs)) + 3
    all_TF = torch.full((rows, len(target.taps) * HIDDEN), -7.0, dtype=target.dtype)
    vlh_TH = torch.full((rows, HIDDEN), -7.0, dtype=target.dtype)
    target.capture(docs, all_TF, vlh_TH if vlh else None)
    return all_TF, vlh_TH


# --- micro-batches --------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 700), max_size=60), st.sampled_from([64, 512, 2048]))
def test_every_document_is_in_exactly_one_row_of_a_fixed_shape(
    lengths: list[int], budget: int
) -> None:
    batches = micro_batches(lengths, budget)
    assert sorted(d for b in batches for d in b.documents) == list(range(len(lengths)))
    for batch in batches:
        rows = len(batch.documents)
        longest = max(lengths[d] for d in batch.documents)
        assert batch.length == padded_length(longest) >= longest
        assert rows == 1 or rows * batch.length <= budget


def test_the_list_of_lengths_is_short_and_none_wastes_much() -> None:
    shapes = {padded_length(n) for n in range(1, 4097)}
    assert len(shapes) == 8 + 62 and max(shapes) == 4096
    assert all(padded_length(n) < n + 64 for n in range(1, 4097))


def test_the_cut_has_the_least_padding() -> None:
    """Against every cut there is."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        lengths = rng.integers(1, 600, 9).tolist()
        ordered = sorted(lengths, reverse=True)
        costs = []
        for ends in itertools.product((False, True), repeat=8):
            edges = [0, *(i + 1 for i, end in enumerate(ends) if end), 9]
            rows = [(b - a, padded_length(ordered[a])) for a, b in itertools.pairwise(edges)]
            if all(n == 1 or n * length <= 1500 for n, length in rows):
                costs.append(sum(n * length + 1500 / CALL_SHARE for n, length in rows))
        found = micro_batches(lengths, 1500)
        cost = sum(len(b.documents) * b.length + 1500 / CALL_SHARE for b in found)
        assert cost == pytest.approx(min(costs))


def test_micro_batches_put_equal_lengths_together_and_do_not_pad_past_the_model() -> None:
    batches = micro_batches([100, 20, 100, 20, 100, 20, 100, 20], 4 * 112)
    assert [(set(b.documents), b.length) for b in batches] == [
        ({0, 2, 4, 6}, 112),
        ({1, 3, 5, 7}, 32),
    ]
    assert micro_batches([65], 2048, max_length=70)[0].length == 70


# --- capture --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_taps_are_the_layers_outputs_and_vlh_gives_the_logits(family: str, tmp_path: Path) -> None:
    target = load_tiny(tmp_path, family, taps=(0, 1, LAYERS - 1))
    docs = documents(40, 7, 21)
    all_TF, vlh_TH = capture(target, docs)
    ends, start = target.ends(), 0
    for ids in docs:
        seen: list[torch.Tensor] = []
        last = target.layers[LAYERS - 1]
        hook = last.register_forward_hook(
            lambda m, a, out, seen=seen: seen.append(out[0] if isinstance(out, tuple) else out)
        )
        with torch.no_grad():
            stock = target.model(
                input_ids=torch.as_tensor(ids, dtype=torch.int64)[None],
                output_hidden_states=True,
                use_cache=False,
            )
        hook.remove()
        rows = slice(start, start + len(ids))
        wanted = [stock.hidden_states[1], stock.hidden_states[2], seen[0]]
        torch.testing.assert_close(all_TF[rows], torch.cat(wanted, -1)[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(vlh_TH[rows], stock.hidden_states[-1][0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ends.logits(vlh_TH[rows]), stock.logits[0], atol=1e-4, rtol=1e-4)
        # The trap: HF's last hidden_states entry is normed, the last layer's output is not.
        assert not torch.allclose(seen[0], stock.hidden_states[-1], atol=1e-2)
        start += len(ids)
    assert (all_TF[start:] == -7).all() and (vlh_TH[start:] == -7).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_in_a_slot_equals_the_document_alone(family: str, tmp_path: Path) -> None:
    target = load_tiny(tmp_path, family)
    docs = documents(60, 33, 5, 18, 1)
    all_TF, vlh_TH = capture(target, docs)
    start = 0
    for ids in docs:
        alone_TF, alone_TH = capture(target, [ids])
        rows = slice(start, start + len(ids))
        torch.testing.assert_close(all_TF[rows], alone_TF[: len(ids)], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(vlh_TH[rows], alone_TH[: len(ids)], atol=1e-6, rtol=1e-5)
        start += len(ids)


def test_a_short_document_beside_a_longer_one_keeps_longropes_short_factors(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    model = transformers.Phi3ForCausalLM(
        transformers.Phi3Config(
            vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
            original_max_position_embeddings=62, pad_token_id=0,
            rope_parameters={
                "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [2.0, 4.0, 8.0, 16.0], "original_max_position_embeddings": 62,
            },
        )
    )  # fmt: skip
    for parameter in model.parameters():
        parameter.data.mul_(5 if parameter.ndim == 2 else 1)
    model.save_pretrained(tmp_path)
    target = Target.load(tmp_path, TargetArch.read(tmp_path), (0, 2), dtype=torch.float32)
    docs = documents(60, 70, 20)
    assert [(b.documents, b.length) for b in target.micro_batches([60, 70, 20])] == [
        ((1,), 80),
        ((0, 2), 62),
    ]
    all_TF, vlh_TH = capture(target, docs)
    start = 0
    for ids in docs:
        with torch.no_grad():
            stock = model(torch.as_tensor(ids).long()[None], output_hidden_states=True)
        rows = slice(start, start + len(ids))
        alone = [stock.hidden_states[1][0], stock.hidden_states[3][0]]
        torch.testing.assert_close(all_TF[rows], torch.cat(alone, -1), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(vlh_TH[rows], stock.hidden_states[-1][0], atol=1e-5, rtol=1e-4)
        start += len(ids)


def test_without_vlh_the_layers_above_the_last_tap_do_not_run(tmp_path: Path) -> None:
    target = load_tiny(tmp_path, "llama", taps=(0, 1))
    calls = [0] * LAYERS
    for index, layer in enumerate(target.layers):
        layer.register_forward_hook(
            lambda *_, index=index: calls.__setitem__(index, calls[index] + 1)
        )
    docs = documents(20, 9)
    stopped_TF, untouched_TH = capture(target, docs, vlh=False)
    assert calls[2:] == [0, 0] and calls[0] > 0
    assert (untouched_TH == -7).all()
    whole_TF, _ = capture(target, docs)
    assert calls[3] > 0
    assert torch.equal(stopped_TF, whole_TF)


def test_capture_writes_into_the_memory_it_was_given_in_that_memorys_dtype(tmp_path: Path) -> None:
    target = load_tiny(tmp_path, "qwen3", dtype=torch.bfloat16)
    page = bytearray(16 * 2 * HIDDEN * 2)
    all_TF = torch.frombuffer(page, dtype=torch.bfloat16).view(16, 2 * HIDDEN)
    beats = []
    target.capture(documents(10, 3), all_TF, beat=lambda: beats.append(1))
    assert any(page[: 13 * 2 * HIDDEN * 2]) and not any(page[13 * 2 * HIDDEN * 2 :])
    assert len(beats) == len(target.micro_batches([10, 3]))


def test_taps_outside_the_model_are_refused_with_its_size(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"target.taps: \[4\]: the target has 4 layers"):
        load_tiny(tmp_path, "llama", taps=(4,))


# --- self-test ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_the_self_test(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    load_tiny(tmp_path, family, taps=(0, 2, 3), dtype=dtype).self_test(documents(9, 30))


@pytest.mark.parametrize(
    ("family", "warned"),
    [
        ("jamba", "JambaForCausalLM does not go on from its own cache (logits differ by "),
        ("minimax", "MiniMaxForCausalLM can't decode with a cache (target.model: "),
        ("bamba", ""),
        ("falcon_h1", ""),
        ("qwen3_5", ""),
    ],
)
def test_a_target_that_eval_cannot_decode_is_a_warning_at_the_start(
    family: str, warned: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_tiny(tmp_path, family).self_test(documents(9, 30))
    found = [record.getMessage() for record in caplog.records if record.name == "target"]
    assert len(found) == bool(warned) and warned in "".join(found)
    assert "\n" not in "".join(found)


def test_a_tap_that_is_off_by_one_fails_the_self_test_by_its_layer(tmp_path: Path) -> None:
    target = load_tiny(tmp_path, "qwen3", taps=(0, 2))
    capture_right = target.capture

    def capture_wrong(*args: object, **kwargs: object) -> None:
        target.taps = (0, 1)
        capture_right(*args, **kwargs)  # type: ignore[arg-type]
        target.taps = (0, 2)

    target.capture = capture_wrong  # type: ignore[method-assign]
    with pytest.raises(CaptureError, match=r"the tap of layer 2 and a plain forward hook differ"):
        target.self_test()


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        ("nan", "the tap of layer 2: 1 of"),
        ("zero", "the tap of layer 2 is all zero"),
        ("leak", "the tap of layer 0, document 1 in a slot and alone differ"),
        ("norm", "the last hidden state and the model's differ"),
    ],
)
def test_the_self_test_names_what_is_wrong(breakage: str, message: str, tmp_path: Path) -> None:
    target = load_tiny(tmp_path, "llama", taps=(0, 2))
    right = target.capture

    def wrong(docs: list[np.ndarray], all_TF: torch.Tensor, vlh_TH: torch.Tensor) -> None:
        right(docs, all_TF, vlh_TH)
        if breakage == "nan":
            all_TF[3, HIDDEN + 1] = torch.nan
        elif breakage == "zero":
            all_TF[:, HIDDEN:] = 0
        elif breakage == "leak" and len(docs) > 1:
            right([np.concatenate(docs)], all_TF)  # one packed row: document 1 sees document 0
        elif breakage == "norm" and vlh_TH is not None:
            vlh_TH.mul_(1.01)

    target.capture = wrong  # type: ignore[method-assign, assignment]
    with pytest.raises(CaptureError, match=message):
        target.self_test()


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gemma3", {"final_logit_softcapping": None}, "head"),
        ("gemma3", {"model_type": "llama"}, "the embeddings"),
    ],
)
def test_the_self_test_finds_a_forgotten_softcap_or_embedding_scale(
    family: str, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = save_tiny(tmp_path, family)
    config = json.loads((path / "config.json").read_text())
    arch = TargetArch.from_config(config | changes, config)
    target = Target.load(path, arch, (0, 2), dtype=torch.float32)
    with pytest.raises(CaptureError, match=message):
        target.self_test()
