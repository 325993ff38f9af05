import numpy as np
import pytest
import torch

from dflash_dist.config import TargetConfig
from dflash_dist.drafter.anchors import draw_blocks
from dflash_dist.drafter.model import DFlashDrafter
from dflash_dist.errors import UserError
from dflash_dist.evaluate.sampling import Sampled
from dflash_dist.evaluate.speculate import (
    Generation,
    TargetDecoder,
    block_logits,
    extend_context,
    plain_decode,
    speculative_decode,
)
from dflash_dist.target.capture import TargetForward
from dflash_dist.target.load import load_ends, load_full
from tests.random_models import (
    documents,
    drafter_config,
    ends_of,
    hybrid_config,
    llama_config,
    qwen3_config,
    random_drafter,
    random_target,
)
from tests.tiny import TAPS, make_target


def sliding_config(**changes):
    """A target whose own sliding window is soon full, so that its cache cannot be cropped."""
    return qwen3_config(
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        **changes,
    )


TARGETS = {"llama": llama_config, "qwen3": qwen3_config, "hybrid": hybrid_config, "sliding": sliding_config}
PROMPT = [5, 17, 80, 3, 41, 9, 66]
CPU = torch.device("cpu")


class Oracle(DFlashDrafter):
    """Knows the whole continuation, and drafts it but for the positions where it is told to be wrong."""

    def __init__(self, config, prompt_tokens: int, continuation: list[int], wrong: set[int]) -> None:
        super().__init__(config)
        self.init_weights(0)
        self.prompt_tokens, self.continuation, self.wrong = prompt_tokens, continuation, wrong

    def blocks(self, embeddings_ABH, positions_AB, context, masks):
        return positions_AB[:, 1:, None].float()

    def logits(self, hidden_BH):
        rows = torch.zeros(len(hidden_BH), self.config.vocab_size)
        for row, position in zip(rows, hidden_BH[:, 0].long().tolist(), strict=True):
            index = position - self.prompt_tokens
            token = self.continuation[index] if index < len(self.continuation) else 0
            row[(token + 1) % len(row) if index in self.wrong else token] = 1
        return rows

    def embed(self, ids):
        return torch.zeros(*ids.shape, self.config.hidden_size)


def expected_cycles(length: int, block_size: int, wrong: set[int]) -> list[int]:
    """Tokens a cycle commits: up to and with the first wrong one, whose place the target's own choice takes."""
    cycles, done = [], 1
    while done < length:
        run = 0
        while run < block_size - 1 and done + run not in wrong:
            run += 1
        cycles.append(min(run + 1, length - done))
        done += cycles[-1]
    return cycles


@pytest.mark.parametrize("name", TARGETS)
def test_an_untrained_drafter_changes_no_token(name):
    target = random_target(TARGETS[name]())
    ends = ends_of(target)
    layouts = ({}, {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5})
    for changes in layouts:
        drafter = random_drafter(drafter_config(target.config, **changes))
        for prompt in (PROMPT, [1]):
            greedy = plain_decode(target, prompt, 24, ())
            drafted = speculative_decode(target, drafter, ends, prompt, 24, ())
            assert drafted.ids == greedy.ids
            assert len(greedy.ids) == 24
            with torch.no_grad():
                uncached = target(torch.tensor([prompt + greedy.ids])).logits[0].argmax(-1)
            assert uncached[len(prompt) - 1 : -1].tolist() == greedy.ids
            assert sum(drafted.cycles) == 23


@pytest.mark.parametrize("seed", range(6))
def test_a_hybrid_target_rolls_its_recurrent_states_back_whatever_the_weights(seed):
    target = random_target(hybrid_config(), seed)
    greedy = plain_decode(target, PROMPT, 24, ())
    wrong = set(np.random.default_rng(seed).choice(24, 8, replace=False).tolist())
    oracle = Oracle(drafter_config(target.config), len(PROMPT), greedy.ids, wrong)
    drafted = speculative_decode(target, oracle, oracle, PROMPT, 24, ())
    assert drafted.ids == greedy.ids
    assert drafted.cycles == expected_cycles(24, 4, wrong)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("wrong", [set(), {1}, {3, 4, 9}, {2, 5, 8, 11, 14, 17, 20, 23}])
def test_an_oracle_commits_what_it_gets_right_and_one_more(name, wrong):
    target = random_target(TARGETS[name]())
    greedy = plain_decode(target, PROMPT, 25, ())
    oracle = Oracle(drafter_config(target.config), len(PROMPT), greedy.ids, wrong)
    drafted = speculative_decode(target, oracle, oracle, PROMPT, 25, ())
    assert drafted.ids == greedy.ids
    assert drafted.cycles == expected_cycles(25, 4, wrong)
    assert max(drafted.cycles) == (4 if len(wrong) < 8 else 3)


@pytest.mark.parametrize("name", TARGETS)
def test_the_drafter_gets_the_states_of_exactly_the_committed_tokens(name):
    target = random_target(TARGETS[name]())
    config = drafter_config(target.config)
    greedy = plain_decode(target, PROMPT, 20, ())
    oracle = Oracle(config, len(PROMPT), greedy.ids, {3, 4, 9})
    features, positions = [], []
    original = oracle.context

    def record(features_TF, positions_T):
        features.append(features_TF)
        positions.append(positions_T)
        return original(features_TF, positions_T)

    oracle.context = record
    drafted = speculative_decode(target, oracle, oracle, PROMPT, 20, ())
    seen = torch.cat(features)
    with torch.no_grad():
        states = target(torch.tensor([PROMPT + drafted.ids]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[layer + 1][0] for layer in config.target_layer_ids], dim=-1)
    assert torch.cat(positions).tolist() == list(range(len(seen)))
    assert len(seen) > len(PROMPT) + 10
    torch.testing.assert_close(seen, expected[: len(seen)], rtol=1e-4, atol=1e-4)


class Recording(Sampled):
    """Keeps the target's odds of each committed token."""

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self.kept = []

    def verify(self, drafted_M, drafter_odds, target_odds):
        new = super().verify(drafted_M, drafter_odds, target_odds)
        self.kept.append(target_odds[: len(new)])
        return new


@pytest.mark.parametrize("name", TARGETS)
def test_sampled_tokens_are_drawn_from_what_the_target_says_without_a_cache(name):
    target = random_target(TARGETS[name]())
    drafter, ends = random_drafter(drafter_config(target.config)), ends_of(target)
    accepted = 0
    for seed in range(4):
        # Hot, so that some drafts of a random drafter are accepted and others rejected.
        choice = Recording(temperature=8.0, seed=seed)
        drafted = speculative_decode(target, drafter, ends, PROMPT, 24, (), choice)
        assert len(drafted.ids) == 24
        accepted += sum(count > 1 for count in drafted.cycles)
        with torch.no_grad():
            uncached = target(torch.tensor([PROMPT + drafted.ids])).logits[0]
        # The last cycle's bonus token may be more than was wanted.
        odds = torch.cat(choice.kept)[:23]
        torch.testing.assert_close(odds, choice.odds(uncached[len(PROMPT) : -1]), rtol=1e-3, atol=1e-5)
    assert accepted > 4


@pytest.mark.parametrize("changes", [{}, {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6}])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "hybrid"])
def test_training_logits_of_every_anchor_equal_those_of_cached_decoding(tmp_path, kind, changes):
    settings = TargetConfig(model=str(make_target(kind, tmp_path)), dtype="float32")
    target, ends = load_full(tmp_path, settings, CPU), load_ends(tmp_path, settings, CPU)
    config = drafter_config(target.config, target_layer_ids=tuple(TAPS), **changes)
    drafter, pack = random_drafter(config), documents([17, 6, 11], supervised_share=1.0)
    blocks = draw_blocks(
        pack, block_size=4, mask_token_id=config.mask_token_id, anchors_per_document=99, max_anchors=99, gamma=2.0,
        seed=0, epoch=0, pad_to=8,
    ).to(CPU)  # fmt: skip
    forward = TargetForward(tmp_path, settings, tuple(TAPS), CPU)
    tokens, lengths = torch.from_numpy(pack.tokens_T), pack.lengths_N.tolist()
    features = torch.empty(len(tokens), forward.features)
    forward.capture(tokens, pack.lengths_N, features)
    positions = torch.cat([torch.arange(length) for length in lengths])
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    compared = 0
    with torch.no_grad():
        masks = drafter.masks(blocks, len(numbers))
        embeddings, context = ends.embed(blocks.ids_AB), drafter.context(features, positions)
        hidden = drafter.blocks(embeddings, blocks.positions_AB, context, masks)
        trained = {int(a): ends.logits(h) for a, h, k in zip(blocks.anchors_A, hidden, blocks.keep_A, strict=True) if k}
        for number in range(len(lengths)):
            document, places = tokens[numbers == number], (numbers == number).nonzero()[:, 0].tolist()
            # Tokens come to the caches one by one, each before two wrong ones that are rolled back.
            decoder, context = TargetDecoder(target, TAPS), []
            for position in range(1, len(document)):
                snapshot, ran = decoder.snapshot(), torch.cat([document[position - 1 : position], torch.tensor([7, 8])])
                states = decoder.run(ran)[1]
                decoder.roll_back(snapshot, ran, accepted=1)
                context = extend_context(drafter, context, states[:1])
                if places[position] in trained:
                    cached = block_logits(drafter, ends, context, int(document[position]), 4)
                    torch.testing.assert_close(trained[places[position]], cached, rtol=1e-4, atol=1e-4)
                    compared += 1
    assert compared == sum(lengths) - 2 * len(lengths)


@pytest.mark.parametrize("name", ["llama", "hybrid"])
def test_decoding_ends_with_the_stop_token_and_clips_its_cycle(name):
    target = random_target(TARGETS[name]())
    greedy = plain_decode(target, PROMPT, 25, ()).ids
    index = next(i for i in range(6, 25) if greedy[i] not in greedy[:i] and i % 4 not in (0, 3))
    stops = {greedy[index]}
    stopped = plain_decode(target, PROMPT, 25, stops)
    oracle = Oracle(drafter_config(target.config), len(PROMPT), greedy, set())
    drafted = speculative_decode(target, oracle, oracle, PROMPT, 25, stops)
    assert stopped.ids == drafted.ids == greedy[: index + 1]
    assert drafted.cycles == expected_cycles(index + 1, 4, set())
    first = {greedy[0]}
    assert plain_decode(target, PROMPT, 25, first).ids == greedy[:1]
    assert speculative_decode(target, oracle, oracle, PROMPT, 25, first) == Generation(
        greedy[:1], pytest.approx(0, abs=1)
    )


def test_the_context_ends_the_answer_and_refuses_a_longer_prompt():
    target = random_target(llama_config(max_position_embeddings=16))
    drafter, ends = random_drafter(drafter_config(target.config)), ends_of(target)
    greedy = plain_decode(target, PROMPT, 25, ())
    assert len(greedy.ids) == 16 - len(PROMPT)
    assert speculative_decode(target, drafter, ends, PROMPT, 25, ()).ids == greedy.ids
    for decode in (
        lambda prompt: plain_decode(target, prompt, 4, ()),
        lambda prompt: speculative_decode(target, drafter, ends, prompt, 4, ()),
    ):
        with pytest.raises(UserError, match=r"prompt has 16 tokens.*context holds 16"):
            decode([1] * 16)
