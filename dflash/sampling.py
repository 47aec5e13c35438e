"""The target's next token, greedy or at a temperature; and what of a drafted chain it accepts.

At a temperature the drafter *samples* its chain too, slot by slot, at the same temperature, and
`accept` is speculative sampling (Leviathan et al. 2023): whatever the drafter's distribution q is,
the tokens that come out are distributed as the target's p. Drafting the most likely token instead
would be as lossless and is accepted with p(that token); sampling is accepted with sum min(p, q).
"""

from __future__ import annotations

import torch
from torch import Tensor


class Sampler:
    """`temperature` 0 is greedy: no randomness. The stream is a function of `seed` and device."""

    def __init__(
        self, temperature: float = 0.0, seed: int = 0, device: str | torch.device = "cpu"
    ) -> None:
        assert temperature >= 0
        self.temperature = temperature
        self.generator = torch.Generator(device).manual_seed(seed)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probabilities(self, logits_LV: Tensor) -> Tensor:
        """p_LV, float32."""
        assert not self.greedy
        return torch.softmax(logits_LV.float() / self.temperature, dim=-1)

    def pick(self, logits_LV: Tensor) -> Tensor:
        """A token for each row: the best, or a sampled one. int64 [L]."""
        if self.greedy:
            return logits_LV.argmax(dim=-1)
        return self.draw(self.probabilities(logits_LV))

    def draw(self, weight_LV: Tensor) -> Tensor:
        """int64 [L], each in proportion to its row's weights."""
        return torch.multinomial(weight_LV, 1, generator=self.generator)[:, 0]

    def judge(
        self, draft_J: Tensor, draft_logits_JV: Tensor, logits_KV: Tensor
    ) -> tuple[Tensor, Tensor]:
        """How many of the drafted tokens are accepted, and the target's own token after them
        (0-d int64 both). logits_KV: the target's, of the last token and of every drafted one."""
        if self.greedy:
            answer_K = logits_KV.argmax(dim=-1)
            accepted = (draft_J == answer_K[:-1]).cumprod(dim=0).sum()
            return accepted, _row(answer_K, accepted)
        p_KV, q_JV = self.probabilities(logits_KV), self.probabilities(draft_logits_JV)
        return self.accept(draft_J, q_JV, p_KV)

    def accept(self, draft_J: Tensor, q_JV: Tensor, p_KV: Tensor) -> tuple[Tensor, Tensor]:
        """Speculative sampling: accept slot j with min(1, p/q) while all before it were; after the
        first rejection draw from max(p - q, 0), normalised; after none from the last p."""
        p_J, q_J = (x[: len(draft_J)].gather(1, draft_J[:, None])[:, 0] for x in (p_KV, q_JV))
        chance_J = torch.rand(len(draft_J), generator=self.generator, device=draft_J.device)
        accepted = (chance_J * q_J < p_J).cumprod(dim=0).sum()
        q_KV = torch.cat((q_JV, torch.zeros_like(p_KV[:1])))
        p_V, q_V = _row(p_KV, accepted), _row(q_KV, accepted)
        rest_V = (p_V - q_V).clamp_min(0)
        # Where p equals q up to rounding, nothing is rejected but by rounding: then p itself.
        rest_V = torch.where(rest_V.sum() > 0, rest_V, p_V)
        return accepted, self.draw(rest_V[None])[0]


def _row(x: Tensor, index: Tensor) -> Tensor:
    """x[index] of a 0-d index, without reading it on the host."""
    return x.index_select(0, index[None])[0]
