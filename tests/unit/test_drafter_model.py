import pytest
import torch

from dflash_dist.drafter.anchors import draw_blocks
from dflash_dist.drafter.model import DFlashDrafter
from dflash_dist.evaluate.speculate import block_logits, extend_context
from tests.random_models import (
    MASK,
    VOCAB,
    documents,
    drafter_config,
    ends_of,
    hybrid_config,
    llama_config,
    random_drafter,
    random_target,
)
from tests.reference import drafter_block

MIXED = dict(layer_types=("sliding_attention", "full_attention"), sliding_window=6)
CAUSAL = dict(is_causal=True)
LENGTHS = [20, 6, 14]


def packed(lengths: list[int], padding: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and documents of each token of a pack."""
    positions = torch.cat([torch.arange(n) for n in lengths] + [torch.zeros(padding, dtype=torch.int64)])
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return positions, torch.cat([numbers, torch.full((padding,), -1)])


def drawn(lengths: list[int], block_size: int = 4):
    return draw_blocks(
        documents(lengths),
        block_size=block_size,
        mask_token_id=MASK,
        anchors_per_document=4,
        max_anchors=100,
        gamma=2.0,
        seed=0,
        epoch=0,
        pad_to=8,
    ).to("cpu")


def training_output(drafter, features, positions, blocks, embeddings):
    context = drafter.context(features, positions)
    masks = drafter.masks(blocks, len(positions))
    return drafter.blocks(embeddings, blocks.positions_AB, context, masks)


def inputs(config, lengths: list[int], dtype=torch.float32, padding: int = 0):
    generator = torch.Generator().manual_seed(5)
    positions, numbers = packed(lengths, padding)
    blocks = drawn(lengths, config.block_size)
    width = len(config.target_layer_ids) * config.hidden_size
    features = torch.randn(len(positions), width, generator=generator, dtype=dtype)
    table = torch.randn(VOCAB, config.hidden_size, generator=generator, dtype=dtype)
    return features, positions, numbers, blocks, table[blocks.ids_AB]


@pytest.mark.parametrize("changes", [{}, MIXED, CAUSAL], ids=["full", "mixed", "causal"])
def test_output_equals_the_float64_definition(changes):
    config = drafter_config(llama_config(hidden_size=16, num_attention_heads=4, num_key_value_heads=2), **changes)
    drafter = random_drafter(config).double()
    features, positions, numbers, blocks, embeddings = inputs(config, LENGTHS, torch.float64)
    with torch.no_grad():
        out = training_output(drafter, features, positions, blocks, embeddings)
        weights = dict(drafter.state_dict())
        for row in range(0, int(blocks.keep_A.sum()), 3):
            anchor = int(blocks.anchors_A[row])
            document = features[numbers == numbers[anchor]]
            expected = drafter_block(config.to_json(), weights, document, embeddings[row], int(positions[anchor]))
            torch.testing.assert_close(out[row], expected[1:], rtol=1e-11, atol=1e-12)


def test_padding_blocks_see_nothing_and_padding_tokens_are_not_seen():
    config = drafter_config(llama_config(), **MIXED)
    drafter = random_drafter(config)
    features, positions, numbers, blocks, embeddings = inputs(config, LENGTHS, padding=9)
    out = training_output(drafter, features, positions, blocks, embeddings)
    changed = torch.where((numbers < 0)[:, None], 1e3 * torch.randn_like(features), features)
    again = training_output(drafter, changed, positions, blocks, embeddings)
    torch.testing.assert_close(again[blocks.keep_A], out[blocks.keep_A], rtol=0, atol=1e-6)
    assert torch.isfinite(out).all()
    # With nothing to attend to, a padding block is its embedding passed through the MLPs alone.
    alone = embeddings[~blocks.keep_A]
    for layer in drafter.layers:
        alone = layer.mlp(alone, layer.post_attention_layernorm)
    assert (~blocks.keep_A).any()
    torch.testing.assert_close(out[~blocks.keep_A], drafter.norm(alone)[:, 1:])


@pytest.mark.parametrize("changes", [{}, MIXED, CAUSAL], ids=["full", "mixed", "causal"])
def test_nothing_leaks_from_the_anchor_on_from_other_documents_or_other_blocks(changes):
    config = drafter_config(llama_config(), **changes)
    drafter = random_drafter(config)
    features, positions, numbers, blocks, embeddings = inputs(config, LENGTHS)
    out = training_output(drafter, features, positions, blocks, embeddings)
    for row in range(int(blocks.keep_A.sum())):
        anchor = int(blocks.anchors_A[row])
        hidden = (numbers != numbers[anchor]) | (torch.arange(len(numbers)) >= anchor)
        other_features = torch.where(hidden[:, None], torch.randn_like(features) * 50, features)
        other_embeddings = embeddings.clone()  # offsets but the first hold the mask token everywhere
        other_embeddings[:, 0] = torch.randn_like(embeddings[:, 0])
        other_embeddings[row] = embeddings[row]
        again = training_output(drafter, other_features, positions, blocks, other_embeddings)
        torch.testing.assert_close(again[row], out[row], rtol=0, atol=1e-6)
        if anchor and numbers[anchor - 1] == numbers[anchor]:
            # The last context token before the anchor is seen: the comparison above can fail.
            seen = features.clone()
            seen[anchor - 1] += 1
            assert (training_output(drafter, seen, positions, blocks, embeddings)[row] - out[row]).abs().max() > 1e-3


def test_offsets_see_later_ones_exactly_where_not_causal():
    for changes, causal in (({}, False), (CAUSAL, True)):
        config = drafter_config(llama_config(), **changes)
        drafter = random_drafter(config)
        features, positions, _, blocks, embeddings = inputs(config, LENGTHS)
        out = training_output(drafter, features, positions, blocks, embeddings)
        moved_AB = blocks.positions_AB.clone()  # all masked offsets hold one token; they differ in where they stand
        moved_AB[:, 3] += 7
        again = training_output(drafter, features, positions, blocks._replace(positions_AB=moved_AB), embeddings)
        same = (again[:, :2] - out[:, :2]).abs().amax((1, 2)) < 1e-6
        assert bool(same[blocks.keep_A].all()) == causal
        assert bool(same[blocks.keep_A].any()) == causal


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("changes", [{}, MIXED, CAUSAL], ids=["full", "mixed", "causal"])
def test_flex_equals_dense(changes):
    config = drafter_config(llama_config(), **changes)
    dense, flex = random_drafter(config), random_drafter(config, attention="flex")
    features, positions, _, blocks, embeddings = inputs(config, LENGTHS, padding=5)
    with torch.no_grad():
        expected = training_output(dense, features, positions, blocks, embeddings)
        out = training_output(flex, features, positions, blocks, embeddings)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make_target", [llama_config, hybrid_config], ids=["llama", "hybrid"])
@pytest.mark.parametrize("changes", [{}, MIXED, CAUSAL], ids=["full", "mixed", "causal"])
def test_training_logits_equal_step_by_step_inference(make_target, changes):
    target = random_target(make_target())
    ends = ends_of(target)
    config = drafter_config(target.config, **changes)
    drafter = random_drafter(config)
    pack = documents(LENGTHS)
    blocks = drawn(LENGTHS)
    positions, numbers = packed(LENGTHS)
    rows = []
    with torch.no_grad():
        for number in range(len(LENGTHS)):
            ids = torch.from_numpy(pack.tokens_T)[numbers == number]
            states = target(ids[None], output_hidden_states=True).hidden_states
            rows.append(torch.cat([states[layer + 1][0] for layer in config.target_layer_ids], dim=-1))
        features = torch.cat(rows)
        out = training_output(drafter, features, positions, blocks, ends.embed(blocks.ids_AB))
        for row in range(int(blocks.keep_A.sum())):
            anchor = int(blocks.anchors_A[row])
            position = int(positions[anchor])
            if position == 0:
                continue
            document = features[anchor - position : anchor]
            context = []
            for part in document.split([1, *[3] * ((position - 1) // 3), (position - 1) % 3]):
                context = extend_context(drafter, context, part)
            cached = block_logits(drafter, ends, context, int(blocks.ids_AB[row, 0]), config.block_size)
            torch.testing.assert_close(ends.logits(out[row]), cached, rtol=1e-4, atol=1e-4)


def test_initial_weights_follow_the_seed_alone():
    config = drafter_config(llama_config())
    first, second, other = DFlashDrafter(config), DFlashDrafter(config), DFlashDrafter(config)
    state = torch.get_rng_state()
    first.init_weights(7)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    second.init_weights(7)
    other.init_weights(8)
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, second.state_dict()[name])
        if weight.dim() == 1:
            assert (weight == 1).all()
        else:
            assert not torch.equal(weight, other.state_dict()[name])
            assert weight.std() == pytest.approx(config.initializer_range, rel=0.05)


def test_bf16_autocast_stays_near_fp32():
    config = drafter_config(llama_config())
    drafter = random_drafter(config)
    features, positions, _, blocks, embeddings = inputs(config, LENGTHS)
    with torch.no_grad():
        expected = training_output(drafter, features, positions, blocks, embeddings)
        with torch.autocast("cpu", torch.bfloat16):
            out = training_output(drafter, features.bfloat16(), positions, blocks, embeddings.bfloat16())
    assert out.dtype == torch.bfloat16
    assert (out - expected).square().mean() < 0.01 * expected.square().mean()
