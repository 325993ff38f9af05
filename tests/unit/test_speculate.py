import pytest
import torch

from dflash_dist.drafter.model import DFlashDrafter
from dflash_dist.errors import UserError
from dflash_dist.evaluate.acceptance import evaluate, stop_ids, summarise
from dflash_dist.evaluate.speculate import Generation, greedy_decode, speculative_decode
from tests.random_models import (
    drafter_config,
    ends_of,
    hybrid_config,
    llama_config,
    qwen3_config,
    random_drafter,
    random_target,
)
from tests.tiny import make_tokenizer


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


class Oracle(DFlashDrafter):
    """Knows the whole continuation, and drafts it but for the positions where it is told to be wrong."""

    def __init__(self, config, prompt_tokens: int, continuation: list[int], wrong: set[int]) -> None:
        super().__init__(config)
        self.init_weights(0)
        self.prompt_tokens, self.continuation, self.wrong = prompt_tokens, continuation, wrong

    def blocks(self, embeddings_ABH, positions_AB, context, masks):
        return positions_AB[..., None].float()

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
            greedy = greedy_decode(target, prompt, 24, ())
            drafted = speculative_decode(target, drafter, ends, prompt, 24, ())
            assert drafted.ids == greedy.ids
            assert len(greedy.ids) == 24
            with torch.no_grad():
                uncached = target(torch.tensor([prompt + greedy.ids])).logits[0].argmax(-1)
            assert uncached[len(prompt) - 1 : -1].tolist() == greedy.ids
            assert sum(drafted.cycles) == 23


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("wrong", [set(), {1}, {3, 4, 9}, {2, 5, 8, 11, 14, 17, 20, 23}])
def test_an_oracle_commits_what_it_gets_right_and_one_more(name, wrong):
    target = random_target(TARGETS[name]())
    greedy = greedy_decode(target, PROMPT, 25, ())
    oracle = Oracle(drafter_config(target.config), len(PROMPT), greedy.ids, wrong)
    drafted = speculative_decode(target, oracle, oracle, PROMPT, 25, ())
    assert drafted.ids == greedy.ids
    assert drafted.cycles == expected_cycles(25, 4, wrong)
    assert max(drafted.cycles) == (4 if len(wrong) < 8 else 3)


@pytest.mark.parametrize("name", TARGETS)
def test_the_drafter_gets_the_states_of_exactly_the_committed_tokens(name):
    target = random_target(TARGETS[name]())
    config = drafter_config(target.config)
    greedy = greedy_decode(target, PROMPT, 20, ())
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


@pytest.mark.parametrize("name", ["llama", "hybrid"])
def test_decoding_ends_with_the_stop_token_and_clips_its_cycle(name):
    target = random_target(TARGETS[name]())
    greedy = greedy_decode(target, PROMPT, 25, ()).ids
    index = next(i for i in range(6, 25) if greedy[i] not in greedy[:i] and i % 4 not in (0, 3))
    stops = {greedy[index]}
    stopped = greedy_decode(target, PROMPT, 25, stops)
    oracle = Oracle(drafter_config(target.config), len(PROMPT), greedy, set())
    drafted = speculative_decode(target, oracle, oracle, PROMPT, 25, stops)
    assert stopped.ids == drafted.ids == greedy[: index + 1]
    assert drafted.cycles == expected_cycles(index + 1, 4, set())
    first = {greedy[0]}
    assert greedy_decode(target, PROMPT, 25, first).ids == greedy[:1]
    assert speculative_decode(target, oracle, oracle, PROMPT, 25, first) == Generation(
        greedy[:1], pytest.approx(0, abs=1)
    )


def test_the_context_ends_the_answer_and_refuses_a_longer_prompt():
    target = random_target(llama_config(max_position_embeddings=16))
    drafter, ends = random_drafter(drafter_config(target.config)), ends_of(target)
    greedy = greedy_decode(target, PROMPT, 25, ())
    assert len(greedy.ids) == 16 - len(PROMPT)
    assert speculative_decode(target, drafter, ends, PROMPT, 25, ()).ids == greedy.ids
    for decode in (
        lambda prompt: greedy_decode(target, prompt, 4, ()),
        lambda prompt: speculative_decode(target, drafter, ends, prompt, 4, ()),
    ):
        with pytest.raises(UserError, match=r"prompt has 16 tokens.*context holds 16"):
            decode([1] * 16)


def test_stop_ids_are_those_of_the_generation_config():
    target = random_target(llama_config())
    for value, expected in ((None, set()), (7, {7}), ([7, 9], {7, 9})):
        target.generation_config.eos_token_id = value
        assert stop_ids(target) == expected


def test_the_summary_counts_by_hand():
    greedy = [Generation([1, 2, 3, 4, 5, 6], 6.0), Generation([1, 2, 3], 2.0), Generation([9], 0.0)]
    drafted = [Generation([1, 2, 3, 4, 5, 6], 1.0, [3, 2]), Generation([1, 2, 4], 1.0, [1, 1]), Generation([9], 0.0)]
    result = summarise(greedy, drafted, 4)
    assert result["tau_pooled"] == 7 / 4
    assert result["tau_macro"] == (2.5 + 1.0) / 2
    assert (result["prompts"], result["greedy_equal"], result["new_tokens"], result["cycles"]) == (3, 2, 10, 4)
    assert result["tokens_per_s"] == 7 / 2
    assert result["speedup"] == pytest.approx((8 / 7) / (2 / 7))
    assert result["histogram"] == [2, 1, 1, 0]
    assert result["acceptance_per_position"] == [2 / 4, 1 / 4, 0.0]
    assert result["acceptance_conditional"] == [2 / 4, 1 / 2, 0.0]
    nothing = summarise([Generation([9])], [Generation([9])], 4)
    assert nothing["tau_pooled"] is None
    assert nothing["speedup"] is None


@pytest.mark.parametrize("make_config", [llama_config, hybrid_config], ids=["llama", "hybrid"])
def test_evaluate_measures_chats(tmp_path, make_config):
    from transformers import AutoTokenizer

    make_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    target = random_target(make_config(vocab_size=288, eos_token_id=258))
    drafter = random_drafter(drafter_config(target.config, mask_token_id=270))
    prompts = [[{"role": "user", "content": text}] for text in ("tea", "rain and stone")]
    done = []
    result = evaluate(
        prompts,
        tokenizer,
        target,
        drafter,
        ends_of(target),
        max_new_tokens=12,
        on_progress=lambda count, total: done.append((count, total)),
    )
    assert (result["prompts"], result["greedy_equal"]) == (2, 2)
    assert 1 <= result["tau_pooled"] <= 4
    assert 1 <= result["tau_macro"] <= 4
    assert result["tokens_per_s"] > 0
    assert result["speedup"] > 0
    assert 2 <= result["new_tokens"] <= 24
    assert len(result["acceptance_per_position"]) == 3
    assert done == [(1, 2), (2, 2)]
    long = [[{"role": "user", "content": "x" * 300}]]
    with pytest.raises(UserError, match="context holds 256"):
        evaluate(long, tokenizer, target, drafter, ends_of(target), max_new_tokens=4)
    with pytest.raises(UserError, match="no prompt"):
        evaluate([], tokenizer, target, drafter, ends_of(target), max_new_tokens=4)
