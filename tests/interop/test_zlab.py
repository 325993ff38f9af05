"""z-lab's own package loads our export, and decodes as we do."""

import pytest
import torch

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
