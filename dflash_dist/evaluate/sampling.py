"""How tokens are chosen: greedily, or sampled so that drafting leaves the target's distribution as it is.

Shape suffixes: T rows of logits, M drafted tokens, B = M + 1 rows of the target for a block, V vocabulary rows.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dflash_dist.config import EvaluateConfig


class Choice(Protocol):
    """One way of choosing tokens. What it makes of logits, its `odds`, is for its own other methods alone."""

    def odds(self, logits_TV: Tensor) -> Tensor:
        """[T, ...]: what each row of logits says about the next token."""

    def draw(self, odds: Tensor) -> Tensor:
        """int64 [T]: a token of each row."""

    def verify(self, drafted_M: Tensor, drafter_odds: Tensor, target_odds: Tensor) -> list[int]:
        """The accepted ones of the M drafted tokens, and one more from the target, whose odds have B rows."""


class Greedy:
    """The likeliest token always: the odds are that token, int64 [T]."""

    def odds(self, logits_TV: Tensor) -> Tensor:
        """int64 [T]: the token of the largest logit."""
        return logits_TV.argmax(-1)

    def draw(self, odds: Tensor) -> Tensor:
        """The odds themselves."""
        return odds

    def verify(self, drafted_M: Tensor, drafter_odds: Tensor, target_odds: Tensor) -> list[int]:
        """The drafted tokens before the first that the target would not choose, and the target's choice there."""
        drafted, chosen = drafted_M.tolist(), target_odds.tolist()
        accepted = next((i for i, token in enumerate(drafted) if token != chosen[i]), len(drafted))
        return chosen[: accepted + 1]


class Sampled:
    """A token at random: the odds are probabilities, fp32 [T, V]. All randomness comes from `seed`, in order."""

    def __init__(
        self, temperature: float, top_p: float = 1.0, top_k: int = 0, seed: int = 0, device: torch.device | str = "cpu"
    ) -> None:
        self._temperature, self._top_p, self._top_k = temperature, top_p, top_k
        self._generator = torch.Generator(device).manual_seed(seed)

    def odds(self, logits_TV: Tensor) -> Tensor:
        """Probabilities at the temperature, of the `top_k` likeliest tokens and of the fewest that make up `top_p`."""
        logits_TV = logits_TV.float() / self._temperature
        if 0 < self._top_k < logits_TV.shape[-1]:
            likeliest = logits_TV.topk(self._top_k, dim=-1)
            logits_TV = torch.full_like(logits_TV, -torch.inf).scatter(-1, likeliest.indices, likeliest.values)
        odds_TV = logits_TV.softmax(-1)
        if self._top_p < 1:
            sorted_TV, order_TV = odds_TV.sort(dim=-1, descending=True)
            # A token stays while those before it are still short of `top_p`: the likeliest one always does.
            sorted_TV = sorted_TV.where(sorted_TV.cumsum(-1) - sorted_TV < self._top_p, 0.0)
            odds_TV = torch.zeros_like(odds_TV).scatter(-1, order_TV, sorted_TV)
            odds_TV = odds_TV / odds_TV.sum(-1, keepdim=True)
        return odds_TV

    def draw(self, odds: Tensor) -> Tensor:
        """A token of each row, by its probabilities."""
        return torch.multinomial(odds, 1, generator=self._generator)[:, 0]

    def verify(self, drafted_M: Tensor, drafter_odds: Tensor, target_odds: Tensor) -> list[int]:
        """Rejection sampling: every token that comes out is distributed by the target's odds alone.

        A draft of probability q is accepted with probability min(1, p / q), where p is the target's. The first rejected
        one is replaced by a token drawn from the excess max(p - q, 0); after the last draft, one is drawn from p.
        """
        drafts = len(drafted_M)
        p_M = target_odds[:drafts].gather(-1, drafted_M[:, None])[:, 0]
        q_M = drafter_odds.gather(-1, drafted_M[:, None])[:, 0]
        chance_M = torch.rand(drafts, generator=self._generator, device=q_M.device)
        accepted = int((chance_M * q_M < p_M).cumprod(0).sum())
        last_V = target_odds[accepted]
        if accepted < drafts:
            excess_V = (last_V - drafter_odds[accepted]).clamp_min(0)
            # Rounding can leave no excess where the two distributions are all but equal.
            last_V = excess_V.where(excess_V.sum() > 0, last_V)
        return [*drafted_M[:accepted].tolist(), int(self.draw(last_V[None]))]


def choice_of(settings: EvaluateConfig, prompt: int, device: torch.device) -> Choice:
    """How the tokens after prompt number `prompt` are chosen; its randomness is keyed by the seed and that number."""
    if settings.temperature == 0:
        return Greedy()
    seed = int(np.random.SeedSequence([settings.seed, prompt]).generate_state(1)[0])
    return Sampled(settings.temperature, settings.top_p, settings.top_k, seed, device)
