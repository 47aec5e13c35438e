"""Draft a tree instead of a chain: the N most probable continuations under the drafter's slots.

DDTree (arXiv 2604.12989): one DFlash pass gives a distribution for each of the next K-1 tokens, and
they are independent of one another, so the probability of a prefix is a product. `build_tree` finds
the N most probable prefixes, best first; the target judges all of them in one call, each node
seeing its own ancestors; the walk goes down from the root as long as the target's token is a child.

The tree is a function of the text, not of chance, so taking the target's own (greedy or sampled)
token at every node is lossless as it stands. In a round, more nodes never accept less.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tree:
    """Node 0 is the root, the last token of the text; a parent stands before its children."""

    token: list[int] = field(default_factory=lambda: [-1])
    """Of the root: -1, it is not the tree's."""
    parent: list[int] = field(default_factory=lambda: [-1])
    depth: list[int] = field(default_factory=lambda: [0])
    child: dict[tuple[int, int], int] = field(default_factory=dict)
    """(node, token) -> the node's child with that token."""

    def add(self, parent: int, token: int) -> int:
        node = len(self.token)
        self.token.append(token)
        self.parent.append(parent)
        self.depth.append(self.depth[parent] + 1)
        self.child[parent, token] = node
        return node

    def descend(self, answer: Callable[[int], int]) -> list[int]:
        """The path from the root while the answer at a node is one of its children."""
        path = [0]
        while (child := self.child.get((path[-1], answer(path[-1])))) is not None:
            path.append(child)
        return path

    def sees(self) -> Tensor:
        """bool [N+1, N+1]: itself and its ancestors."""
        sees_NN = torch.eye(len(self.token), dtype=torch.bool)
        for node, parent in enumerate(self.parent[1:], 1):
            sees_NN[node] |= sees_NN[parent]
        return sees_NN


def best_tokens(logits_JV: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """Of each slot the tokens that a tree of `nodes` may use, best first, and their log-probs:
    (logp_JM float32, token_JM int64), M = min(nodes, V). Takes more leading dimensions as well."""
    logits_JV = logits_JV.float()
    top = logits_JV.topk(min(nodes, logits_JV.shape[-1]), dim=-1)
    return top.values - logits_JV.logsumexp(dim=-1, keepdim=True), top.indices


def build_tree(
    logp_JM: Sequence[Sequence[float]], token_JM: Sequence[Sequence[int]], nodes: int
) -> Tree:
    """The `nodes` most probable prefixes (fewer if there are no more), best first.

    The heap holds candidates (-log-prob, parent, rank). A taken one is replaced by its next sibling
    and its own first child: both are at most as probable as it, so nothing better comes later.
    """
    tree, total = Tree(), [0.0]
    heap: list[tuple[float, int, int]] = []

    def offer(parent: int, rank: int) -> None:
        slot = tree.depth[parent]
        if slot < len(logp_JM) and rank < len(logp_JM[slot]):
            heapq.heappush(heap, (-(total[parent] + logp_JM[slot][rank]), parent, rank))

    offer(0, 0)
    while heap and len(tree.token) <= nodes:
        cost, parent, rank = heapq.heappop(heap)
        node = tree.add(parent, token_JM[tree.depth[parent]][rank])
        total.append(-cost)
        offer(parent, rank + 1)
        offer(node, 0)
    return tree


def walk_tree(logp_PJM: Tensor, token_PJM: Tensor, tokens: Sequence[int], nodes: int) -> list[int]:
    """Accepted tokens of each round over a known greedy continuation: what decoding with trees of
    `nodes` accepts. Row p holds `best_tokens` of the block that starts at tokens[p]."""
    accepted, start = [], 0
    while start < len(logp_PJM):
        tree = build_tree(logp_PJM[start].tolist(), token_PJM[start].tolist(), nodes)
        ahead = [*tokens[start + 1 :], -1]  # -1: the text ends, and no child has that token
        path = tree.descend(lambda node, t=tree, a=ahead: a[t.depth[node]])  # type: ignore[misc]
        accepted.append(len(path) - 1)
        start += len(path)
    return accepted
