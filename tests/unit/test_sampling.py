"""Sampled speculative decoding keeps the target's distribution: chi-square tests, which broken rules fail."""

import itertools

import pytest
import torch

from dflash_dist.config import EvaluateConfig
from dflash_dist.evaluate.sampling import Greedy, Sampled, choice_of
from dflash_dist.evaluate.speculate import plain_decode, speculative_decode
from tests.random_models import drafter_config, ends_of, hybrid_config, llama_config, random_drafter, random_target

VOCAB = 8
KEPT, BROKEN = 1e-3, 1e-9
"""p-values: above the first the distribution passes, below the second it is another one."""


class AlwaysAccepts(Sampled):
    """A broken rule: the drafter's distribution comes out."""

    def verify(self, drafted_M, drafter_odds, target_odds):
        return [*drafted_M.tolist(), int(self.draw(target_odds[-1:]))]


class RedrawsFromTarget(Sampled):
    """A subtler one: what replaces a rejected draft is drawn from p, not from what p has more of than q."""

    def verify(self, drafted_M, drafter_odds, target_odds):
        *accepted, last = super().verify(drafted_M, drafter_odds, target_odds)
        if len(accepted) < len(drafted_M):
            last = int(self.draw(target_odds[len(accepted)][None]))
        return [*accepted, last]


def p_value(counts: torch.Tensor, odds: torch.Tensor) -> float:
    """Of the chi-square test of counts against probabilities; cells that expect fewer than 5 are taken together."""
    expected = counts.sum() * odds.double()
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]]).double()
    expected = torch.cat([expected[~rare], expected[rare].sum()[None].clamp_min(1e-9)])
    statistic = ((observed - expected) ** 2 / expected).sum()
    cells = len(expected) - 1 - int(not rare.any())
    return float(torch.special.gammaincc(torch.tensor(cells / 2.0).double(), statistic / 2))


def random_odds(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)).mul(1.5).softmax(-1)


@pytest.mark.parametrize(
    ("kind", "kept"),
    [(Sampled, True), (AlwaysAccepts, False), (RedrawsFromTarget, False)],
    ids=["kept", "always accepts", "redraws from target"],
)
def test_every_verified_token_is_distributed_by_the_target(kind, kept):
    drafter, target, choice = random_odds(2, 1), random_odds(3, 2), kind(temperature=1.0, seed=5)
    counts = torch.zeros(3, VOCAB, dtype=torch.int64)
    for _ in range(6000):
        for place, token in enumerate(choice.verify(choice.draw(drafter), drafter, target)):
            counts[place, token] += 1
    values = [p_value(count, odds) for count, odds in zip(counts, target, strict=True)]
    assert min(values) > KEPT if kept else values[0] < BROKEN


def joint_odds(target, prompt: list[int]) -> torch.Tensor:
    """[VOCAB ** 3]: the target's own probability of each triple of next tokens."""
    triples = torch.tensor(list(itertools.product(range(VOCAB), repeat=3)))
    ids = torch.cat([torch.tensor(prompt).expand(len(triples), -1), triples], dim=1)
    with torch.no_grad():
        odds = target(ids).logits[:, len(prompt) - 1 : -1].softmax(-1)
    return odds.gather(-1, triples[..., None])[..., 0].prod(-1)


SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("make_config", "kind", "kept"),
    [
        (llama_config, Sampled, True),
        (llama_config, AlwaysAccepts, False),
        pytest.param(hybrid_config, Sampled, True, marks=pytest.mark.full),
    ],
    ids=["kept", "broken", "hybrid"],
)
def test_speculative_sampling_keeps_the_joint_distribution_of_three_tokens(make_config, kind, kept):
    layers = {"layer_types": ["linear_attention", "full_attention"]} if make_config is hybrid_config else {}
    target = random_target(make_config(**SMALL, **layers))
    config = drafter_config(target.config, num_layers=1, block_size=3, target_layer_ids=(0,), mask_token_id=7)
    drafter, prompt = random_drafter(config), [1, 4, 2]
    ends, choice = ends_of(target), kind(temperature=1.0, seed=9)
    counts, cycles = torch.zeros(VOCAB**3, dtype=torch.int64), set()
    for _ in range(1200 if kept else 300):
        generation = speculative_decode(target, drafter, ends, prompt, 3, (), choice)
        a, b, c = generation.ids
        counts[(a * VOCAB + b) * VOCAB + c] += 1
        cycles.add(tuple(generation.cycles))
    value = p_value(counts, joint_odds(target, prompt))
    assert value > KEPT if kept else value < BROKEN
    assert cycles == ({(1, 1), (2,)} if kept else {(2,)})


def test_plain_sampling_draws_from_the_same_distribution():
    target, choice = random_target(llama_config(**SMALL)), Sampled(temperature=1.0, seed=2)
    counts = torch.zeros(VOCAB**3, dtype=torch.int64)
    for _ in range(600):
        a, b, c = plain_decode(target, [1, 4, 2], 3, (), choice).ids
        counts[(a * VOCAB + b) * VOCAB + c] += 1
    assert p_value(counts, joint_odds(target, [1, 4, 2])) > KEPT


def test_odds_follow_temperature_top_k_and_top_p():
    logits = torch.tensor([[0.4, 0.1, 0.3, 0.2]]).log()
    torch.testing.assert_close(Sampled(1.0).odds(logits), logits.exp())
    torch.testing.assert_close(Sampled(0.5).odds(logits), torch.tensor([[16, 1, 9, 4.0]]) / 30)
    torch.testing.assert_close(Sampled(1.0, top_k=2).odds(logits), torch.tensor([[4, 0, 3, 0.0]]) / 7)
    # 0.4 and 0.3 fall short of 0.75; 0.2 is the token that makes it up.
    torch.testing.assert_close(Sampled(1.0, top_p=0.75).odds(logits), torch.tensor([[4, 0, 3, 2.0]]) / 9)
    torch.testing.assert_close(Sampled(1.0, top_p=0.01).odds(logits), torch.tensor([[1.0, 0, 0, 0]]))
    tied = torch.zeros(1, 4)
    assert (Sampled(1.0, top_k=2).odds(tied) > 0).sum() == 2


def test_equal_distributions_accept_every_draft_and_disjoint_ones_none():
    choice, odds = Sampled(1.0), random_odds(4, 3)
    for _ in range(50):
        drafted = choice.draw(odds[:3])
        assert choice.verify(drafted, odds[:3], odds)[:3] == drafted.tolist()
    low, high = torch.eye(VOCAB)[:1], torch.eye(VOCAB)[[1, 2]]
    assert choice.verify(choice.draw(low), low, high) == [1]


def test_the_random_stream_is_keyed_by_seed_and_prompt():
    cpu, odds = torch.device("cpu"), random_odds(200, 4)

    def drawn(seed: int, prompt: int) -> list[int]:
        choice = choice_of(EvaluateConfig(temperature=1.0, seed=seed), prompt, cpu)
        return choice.draw(odds).tolist()

    assert drawn(0, 1) == drawn(0, 1)
    assert len({tuple(drawn(*key)) for key in ((0, 1), (1, 0), (0, 0), (1, 1))}) == 4
    assert isinstance(choice_of(EvaluateConfig(), 0, cpu), Greedy)
