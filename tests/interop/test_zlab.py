"""z-lab's own package loads our export, and decodes as we do."""

import json

import pytest
import torch
from typer.testing import CliRunner

from dflash_dist.cli import app
from dflash_dist.data.chat import prompt_ids
from dflash_dist.evaluate.acceptance import stop_ids, summarise
from dflash_dist.evaluate.run import bundled_prompts, read_prompts
from dflash_dist.evaluate.speculate import block_logits, extend_context, plain_decode, speculative_decode
from dflash_dist.export.plain import export_plain, load_drafter
from tests.interop import zlab
from tests.random_models import (
    MASK,
    drafter_config,
    ends_of,
    llama_config,
    qwen3_config,
    random_drafter,
    random_target,
)

LAYOUTS = {
    "full": {},
    "mixed": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6},
    "sliding bidirectional": {
        "layer_types": ("sliding_attention",) * 2,
        "sliding_window": 6,
        "is_causal": False,
    },
    "causal": {"is_causal": True},
}
PROMPT = [5, 17, 80, 3, 41, 9, 66, 2, 30, 11]
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


@pytest.fixture(params=LAYOUTS)
def exported(request, tmp_path):
    config = drafter_config(llama_config(), **LAYOUTS[request.param])
    export_plain(random_drafter(config), tmp_path / "drafter")
    return tmp_path / "drafter"


def test_block_outputs_agree(exported):
    theirs, ours = zlab.load(exported), load_drafter(exported)
    target = random_target(llama_config())
    ends = ends_of(target)
    assert list(theirs.target_layer_ids) == list(ours.config.target_layer_ids)
    assert (theirs.block_size, theirs.mask_token_id) == (4, MASK)
    with torch.no_grad():
        states = target(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
        features = zlab.package.extract_context_feature(states, theirs.target_layer_ids)
        positions = torch.arange(len(PROMPT) + 4)[None]
        embeddings = target.get_input_embeddings()(torch.tensor([[7, MASK, MASK, MASK]]))
        hidden = theirs(position_ids=positions, noise_embedding=embeddings, target_hidden=features)
        logits = theirs.compute_logits(hidden[0, 1:], target.lm_head)
        context = extend_context(ours, [], features[0])
        torch.testing.assert_close(block_logits(ours, ends, context, 7, 4), logits, rtol=1e-4, atol=1e-4)


# No hybrid target: transformers 5.24 crops their convolution states but not their recurrent ones, so that z-lab's loop
# leaves the target's own greedy text.
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
@pytest.mark.parametrize("make_config", [llama_config, qwen3_config], ids=["llama", "qwen3"])
def test_generation_and_acceptance_lengths_agree(make_config, exported):
    theirs, ours = zlab.load(exported), load_drafter(exported)
    target = random_target(make_config())
    generation = zlab.generate(theirs, target, PROMPT, 30)
    drafted = speculative_decode(target, ours, ends_of(target), PROMPT, 30, ())
    assert drafted.ids == generation.ids == plain_decode(target, PROMPT, 30, ()).ids
    assert drafted.cycles == generation.cycles


def zlab_figures(target, folder, prompts, new_tokens):
    """Their generations and what we count of them."""
    theirs, stops = zlab.load(folder), stop_ids(target)
    generations = [zlab.generate(theirs, target, ids, new_tokens, stops) for ids in prompts]
    return generations, summarise(generations, generations, theirs.block_size, greedy=True)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
def test_tau_on_twenty_prompts_of_the_real_target_equals_ours(overfitted, overfitted_folder, smollm2_tokenizer):
    target, ours, new_tokens = overfitted.target, load_drafter(overfitted_folder), 24
    chats = [[{"role": "user", "content": text}] for text in NEAR] + read_prompts(bundled_prompts())[::5][:8]
    prompts = overfitted.prompts + [prompt_ids(smollm2_tokenizer, chat, {}) for chat in chats]
    stops = stop_ids(target)
    plain = [plain_decode(target, ids, new_tokens, stops) for ids in prompts]
    drafted = [speculative_decode(target, ours, overfitted.ends, ids, new_tokens, stops) for ids in prompts]
    generations, expected = zlab_figures(target, overfitted_folder, prompts, new_tokens)
    assert [g.ids for g in drafted] == [g.ids for g in generations] == [g.ids for g in plain]
    figures = summarise(plain, drafted, ours.config.block_size, greedy=True)
    assert figures["prompts"] == figures["greedy_equal"] == 20
    assert figures["tau_pooled"] == pytest.approx(expected["tau_pooled"], rel=0.01)
    assert figures["tau_macro"] == pytest.approx(expected["tau_macro"], rel=0.01)
    # Neither all drafts nor none: both sides of acceptance are compared.
    assert figures["tau_macro"] > 1.3
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
    _, expected = zlab_figures(overfitted.target, overfitted_folder, prompts, 16)
    assert figures["prompts"] == figures["greedy_equal"] == len(prompts)
    assert figures["tau_pooled"] == pytest.approx(expected["tau_pooled"], rel=0.01)
    assert figures["tau_macro"] == pytest.approx(expected["tau_macro"], rel=0.01)
