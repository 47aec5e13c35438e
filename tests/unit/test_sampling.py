"""Sampling with a drafter: the text is distributed as the target alone would write it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from test_decode import NEVER, prompt_ids
from tiny import drafter_arch, load_tiny, random_drafter, tiny_config

from dflash.arch import TargetArch
from dflash.decode import Method, plain, plain_greedy, speculative
from dflash.sampling import Sampler
from dflash.target import Target

Chances = dict[tuple[int, ...], float]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_tiny(tmp_path_factory.mktemp("target"), "llama")


def chi_square(counts: dict[tuple[int, ...], int], chances: Chances, draws: int) -> float:
    """Per degree of freedom: about 1 where the counts are drawn from the chances. Cells that expect
    fewer than 5 are one cell."""
    cells = [(counts.get(key, 0), draws * chance) for key, chance in chances.items()]
    rare = [cell for cell in cells if cell[1] < 5]
    cells = [cell for cell in cells if cell[1] >= 5]
    cells.append((sum(c[0] for c in rare), max(1e-9, sum(c[1] for c in rare))))
    return sum((seen - wanted) ** 2 / wanted for seen, wanted in cells) / (len(cells) - 1)


# --- the rule -------------------------------------------------------------------------------------


def test_the_accepted_and_the_corrected_tokens_follow_the_targets_distribution() -> None:
    """Three tokens, a chain of two, every outcome enumerated: q is another distribution than p."""
    vocab, draws = 3, 4000
    first_V = torch.tensor([0.5, 0.3, 0.2])
    second_VV = torch.tensor([[0.6, 0.3, 0.1], [0.1, 0.1, 0.8], [0.3, 0.4, 0.3]])
    third_V = torch.tensor([0.2, 0.2, 0.6])
    q_JV = torch.tensor([[0.1, 0.6, 0.3], [0.7, 0.2, 0.1]])
    sampler = Sampler(1.0, seed=0)
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(draws):
        draft_J = sampler.draw(q_JV)
        p_KV = torch.stack((first_V, second_VV[draft_J[0]], third_V))
        accepted, own = (int(x) for x in sampler.accept(draft_J, q_JV, p_KV))
        text = [*draft_J[:accepted].tolist(), own]
        if len(text) == 1:  # the second token comes from the next round: from p as it is
            text.append(int(sampler.draw(second_VV[own][None])[0]))
        counts[tuple(text[:2])] = counts.get(tuple(text[:2]), 0) + 1
    chances = {
        (a, b): float(first_V[a] * second_VV[a, b])
        for a, b in itertools.product(range(vocab), repeat=2)
    }
    assert chi_square(counts, chances, draws) < 2.0
    wrong = {(a, b): float(q_JV[0, a] * q_JV[1, b]) for a, b in chances}
    assert chi_square(counts, wrong, draws) > 20, "the test would see the drafter's distribution"


def test_a_drafter_with_the_targets_distribution_is_always_accepted() -> None:
    p_KV = torch.rand(5, 7).softmax(-1)
    sampler = Sampler(0.5, seed=1)
    for _ in range(50):
        draft_J = sampler.draw(p_KV[:4])
        assert sampler.accept(draft_J, p_KV[:4], p_KV)[0] == 4


def test_a_token_that_the_target_never_says_is_never_accepted() -> None:
    q_JV = torch.tensor([[1.0, 0.0, 0.0]])
    p_KV = torch.tensor([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]])
    sampler = Sampler(1.0)
    owns = {int(sampler.accept(torch.tensor([0]), q_JV, p_KV)[1]) for _ in range(30)}
    assert owns == {1, 2}


def test_the_temperature_divides_the_logits() -> None:
    logits_LV = torch.tensor([[1.0, 3.0, 2.0]])
    wanted = torch.softmax(torch.tensor([[2.0, 6.0, 4.0]]), -1)
    torch.testing.assert_close(Sampler(0.5).probabilities(logits_LV), wanted)
    assert Sampler(0.0).pick(logits_LV).tolist() == [1]


# --- decoding -------------------------------------------------------------------------------------


def few_words(directory: Path, vocab: int = 4) -> Target:
    """A target whose every text of three tokens can be enumerated."""
    from transformers import AutoModelForCausalLM

    config = tiny_config("llama")
    config.vocab_size = vocab
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5)
    model.save_pretrained(directory)
    return Target.load(directory, TargetArch.read(directory), (0, 2), dtype=torch.float32)


@torch.inference_mode()
def text_chances(target: Target, prompt: list[int], length: int, temperature: float) -> Chances:
    chances: Chances = {}
    for text in itertools.product(range(target.arch.vocab_size), repeat=length):
        ids_1L = torch.tensor([[*prompt, *text]])
        logits_LV = target.model(input_ids=ids_1L, use_cache=False).logits[0, len(prompt) - 1 : -1]
        p_LV = torch.softmax(logits_LV / temperature, -1)
        chances[text] = float(p_LV[range(length), list(text)].prod())
    return chances


@pytest.mark.parametrize("tree", [None, 6])
def test_sampled_texts_are_distributed_as_the_targets_own(tree: int | None, tmp_path: Path) -> None:
    """Whole decoding, caches and rounds, against exact chances. Seeds are fixed: it can't flake."""
    target = few_words(tmp_path)
    drafter = random_drafter(drafter_arch(target, block_size=3, mask_token_id=3))
    ends, prompt, draws, temperature = target.ends(), [0, 1, 2, 1], 320, 1.5
    counts: dict[tuple[int, ...], int] = {}
    accepted = 0
    for seed in range(draws):
        method = Method(tree, temperature, seed)
        drafted = speculative(target, drafter, ends, prompt, 3, NEVER, method)
        text = tuple(drafted.tokens)
        counts[text] = counts.get(text, 0) + 1
        accepted += sum(round_.accepted for round_ in drafted.rounds)
    assert draws / 5 < accepted < 2 * draws, "some drafted tokens are kept, some are not"
    chances = text_chances(target, prompt, 3, temperature)
    assert sum(chances.values()) == pytest.approx(1)
    assert chi_square(counts, chances, draws) < 1.6
    colder = text_chances(target, prompt, 3, 0.6)
    assert chi_square(counts, colder, draws) > 5, "the test would see another temperature"


def test_a_seed_is_a_text_and_temperature_zero_is_greedy(target: Target) -> None:
    prompt = prompt_ids(2)
    drafter, ends = random_drafter(drafter_arch(target)), target.ends()

    def drafted(method: Method) -> list[int]:
        return speculative(target, drafter, ends, prompt, 20, NEVER, method).tokens

    hot = Method(temperature=2.0, seed=4)
    assert drafted(hot) == drafted(hot) != drafted(Method(temperature=2.0, seed=5))
    assert drafted(Method(seed=5)) == plain_greedy(target, prompt, 20, NEVER).tokens
    texts = {tuple(plain(target, prompt, 20, NEVER, Method(None, 2.0, s)).tokens) for s in (1, 2)}
    assert len(texts) == 2
