"""The gate: a drafter that has learnt a few answers by heart fills nearly whole blocks when it is served.

A label shift or shifted features train to good figures, and give a tau near 1 here. z-lab's own package measures the
same tau of it.
"""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from dflash_dist.cli import app
from dflash_dist.data.chat import prompt_ids
from dflash_dist.evaluate.acceptance import stop_ids, summarise
from dflash_dist.evaluate.run import bundled_prompts, read_prompts
from dflash_dist.evaluate.speculate import Generation, plain_decode, speculative_decode
from dflash_dist.export.plain import load_drafter
from tests.interop.overfit import BLOCK_SIZE, NEW_TOKENS

LEAST_TAU = 0.9 * BLOCK_SIZE
# Near what the overfitted drafter has learnt, so that it is right at times.
NEAR = (
    "Write me a poem about the sea.",
    "Write a poem about the ocean.",
    "Explain how to boil an egg.",
    "Explain how to boil an egg, in a few steps.",
    "What is 12 times 9?",
    "What is 12 times 8? Explain.",
    "Write a Python function that returns the factorial of a number.",
    "Write a Python function that computes the factorial of n.",
)


def assert_passes(overfitted, generations: list[Generation]) -> None:
    assert [g.ids for g in generations] == [a.ids for a in overfitted.answers]
    figures = summarise(overfitted.answers, generations, BLOCK_SIZE, greedy=True)
    assert figures["tau_pooled"] >= LEAST_TAU, figures
    assert figures["tau_macro"] >= LEAST_TAU, figures


def decode_all(overfitted, drafter) -> list[Generation]:
    target, stops = overfitted.target, stop_ids(overfitted.target)
    return [speculative_decode(target, drafter, overfitted.ends, ids, NEW_TOKENS, stops) for ids in overfitted.prompts]


def test_answers_are_long_enough_to_tell(overfitted):
    assert all(len(answer.ids) > 9 * BLOCK_SIZE for answer in overfitted.answers)


def test_an_overfitted_drafter_fills_its_blocks(overfitted):
    assert_passes(overfitted, decode_all(overfitted, overfitted.drafter))


def test_it_does_after_export_and_reload(overfitted, overfitted_folder):
    assert_passes(overfitted, decode_all(overfitted, load_drafter(overfitted_folder)))


def zlab_generations(target, folder, prompts, new_tokens) -> list[Generation]:
    """What z-lab's package decodes with the drafter; where it is missing, the test is skipped."""
    from tests.interop import zlab

    theirs, stops = zlab.load(folder), stop_ids(target)
    return [zlab.generate(theirs, target, ids, new_tokens, stops) for ids in prompts]


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
def test_it_does_in_zlabs_package(overfitted, overfitted_folder):
    assert_passes(overfitted, zlab_generations(overfitted.target, overfitted_folder, overfitted.prompts, NEW_TOKENS))


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
@pytest.mark.parametrize(("others", "new_tokens"), [(4, 16), pytest.param(16, 24, marks=pytest.mark.full)])
def test_zlabs_tau_on_prompts_of_the_real_target_equals_ours(
    overfitted, overfitted_folder, smollm2_tokenizer, others, new_tokens
):
    """On what the drafter has learnt, and on `others`."""
    target, ours = overfitted.target, load_drafter(overfitted_folder)
    chats = [[{"role": "user", "content": text}] for text in NEAR] + read_prompts(bundled_prompts())[::5][:8]
    chats = chats[:: len(chats) // others]
    prompts = overfitted.prompts + [prompt_ids(smollm2_tokenizer, chat, {}) for chat in chats]
    stops = stop_ids(target)
    plain = [plain_decode(target, ids, new_tokens, stops) for ids in prompts]
    drafted = [speculative_decode(target, ours, overfitted.ends, ids, new_tokens, stops) for ids in prompts]
    generations = zlab_generations(target, overfitted_folder, prompts, new_tokens)
    assert [g.ids for g in drafted] == [g.ids for g in generations] == [g.ids for g in plain]
    figures = summarise(plain, drafted, BLOCK_SIZE, greedy=True)
    expected = summarise(generations, generations, BLOCK_SIZE, greedy=True)
    assert figures["prompts"] == figures["greedy_equal"] == 4 + others
    assert figures["tau_pooled"] == pytest.approx(expected["tau_pooled"], rel=0.01)
    assert figures["tau_macro"] == pytest.approx(expected["tau_macro"], rel=0.01)
    # Neither all drafts nor none: both sides of acceptance are compared.
    assert 1.3 < figures["tau_macro"] < LEAST_TAU
    assert min(figures["histogram"]) > 0


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
def test_the_command_on_all_bundled_prompts_gives_zlabs_tau(
    overfitted, overfitted_folder, smollm2_folder, smollm2_tokenizer
):
    arguments = ["eval", "--drafter", str(overfitted_folder), "--target", str(smollm2_folder), "--device", "cpu"]
    done = CliRunner().invoke(app, [*arguments, "--max-new-tokens", "16", "--json"], catch_exceptions=False)
    figures = json.loads(done.stdout)
    prompts = [prompt_ids(smollm2_tokenizer, chat, {}) for chat in read_prompts(bundled_prompts())]
    generations = zlab_generations(overfitted.target, overfitted_folder, prompts, 16)
    expected = summarise(generations, generations, BLOCK_SIZE, greedy=True)
    assert figures["prompts"] == figures["greedy_equal"] == len(prompts)
    assert figures["tau_pooled"] == pytest.approx(expected["tau_pooled"], rel=0.01)
    assert figures["tau_macro"] == pytest.approx(expected["tau_macro"], rel=0.01)
