import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from dflash_dist.drafter.mask import BlockLayout, LayerKind, build_masks, dense_mask, flex_mask, inference_masks
from tests.random_models import drafter_config, llama_config
from tests.reference import sees

# Three documents and two tokens of padding; anchors at a start, in the middle, at an end, and overlapping ones.
DOCUMENTS = [0] * 9 + [1] * 3 + [2] * 12 + [-1] * 2
ANCHORS = [0, 4, 5, 8, 9, 11, 13, 22, 23, 0]
KEEP = [True] * 9 + [False]

SHAPES = {
    "full": dict(layer_types=("full_attention",) * 2),
    "sliding": dict(layer_types=("sliding_attention", "full_attention"), sliding_window=6),
    "narrow": dict(layer_types=("sliding_attention",) * 2, sliding_window=4),
    "sliding bidirectional": dict(layer_types=("sliding_attention",) * 2, sliding_window=5, is_causal=False),
    "causal": dict(layer_types=("full_attention", "sliding_attention"), sliding_window=5, is_causal=True),
}


def layout() -> BlockLayout:
    starts = [DOCUMENTS.index(DOCUMENTS[anchor]) for anchor in ANCHORS]
    return BlockLayout(4, *map(torch.tensor, (ANCHORS, KEEP, starts)), len(DOCUMENTS))


@pytest.mark.parametrize("shape", SHAPES)
def test_dense_mask_equals_the_definition_for_every_pair(shape):
    config = drafter_config(llama_config(), **SHAPES[shape])
    masks = build_masks(config, "dense", layout())
    for layer, mask in enumerate(masks):
        visible = (mask.visible_QS & ~mask.padding_Q[:, None]).tolist()
        for query in range(len(ANCHORS) * 4):
            for key in range(len(DOCUMENTS) + len(ANCHORS) * 4):
                expected = sees(config.to_json(), layer, query, key, ANCHORS, KEEP, DOCUMENTS)
                assert visible[query][key] == expected, (layer, query, key)


@pytest.mark.parametrize("shape", SHAPES)
def test_flex_rule_equals_the_definition_for_every_pair(shape):
    config = drafter_config(llama_config(), **SHAPES[shape])
    queries, keys = len(ANCHORS) * 4, len(DOCUMENTS) + len(ANCHORS) * 4
    for layer, mask in enumerate(build_masks(config, "flex", layout())):
        assert mask.blocks.seq_lengths == (queries, keys)
        zero = torch.zeros(1, 1, dtype=torch.int64)
        visible = mask.blocks.mask_mod(zero, zero, torch.arange(queries)[:, None], torch.arange(keys)[None]).tolist()
        for query in range(queries):
            for key in range(keys):
                expected = sees(config.to_json(), layer, query, key, ANCHORS, KEEP, DOCUMENTS)
                assert visible[query][key] == expected, (layer, query, key)


@given(
    kind=st.sampled_from([LayerKind(c, w) for c in (False, True) for w in (None, 40, 300)]),
    block_size=st.sampled_from([4, 8, 10, 16]),
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=6),
    padding=st.integers(0, 150),
    blocks=st.integers(1, 60),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_flex_tiles_are_those_in_which_some_pair_or_every_pair_is_visible(
    kind, block_size, lengths, padding, blocks, seed
):
    """torch finds them by looking at all pairs."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.tensor(lengths).cumsum(0)
    anchors = torch.randint(0, int(ends[-1]), (blocks,), generator=generator)
    anchors = anchors.sort()[0] if seed % 4 else anchors  # in any order
    starts = (ends - torch.tensor(lengths))[torch.searchsorted(ends, anchors, right=True)]
    keep = torch.rand(blocks, generator=generator) < 0.9
    layout = BlockLayout(block_size, anchors, keep, starts, int(ends[-1]) + padding)
    queries = blocks * block_size
    ours, spans_2Q = flex_mask(kind, layout)
    begin_2Q1, end_2Q1 = (spans_2Q & (2**32 - 1))[..., None], ((spans_2Q & (2**32 - 1)) + (spans_2Q >> 32))[..., None]
    key_S = torch.arange(layout.context + queries)
    within_QS = ((key_S >= begin_2Q1) & (key_S < end_2Q1)).any(0)
    exact = dense_mask(kind, layout)
    assert torch.equal(within_QS, exact.visible_QS & ~exact.padding_Q[:, None])
    assert (spans_2Q >= 0).all()  # the kernels take what is below 0 for very many keys
    theirs = create_block_mask(ours.mask_mod, None, None, queries, layout.context + queries, device="cpu")
    for name in ("kv", "full_kv", "q", "full_q"):
        numbers, places = (
            [getattr(mask, f"{name}_{what}")[0, 0] for mask in (ours, theirs)] for what in ("num_blocks", "indices")
        )
        assert torch.equal(*numbers), name
        for mine, other, count in zip(*places, numbers[0].tolist(), strict=True):
            assert torch.equal(mine[:count], other[:count]), name


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [4, 2])
def test_inference_sees_what_training_sees(shape, size):
    config = drafter_config(llama_config(), **SHAPES[shape])
    context = 11
    for layer, mask in enumerate(inference_masks(config, context, size, torch.device("cpu"))):
        for offset in range(size):
            for key in range(context + size):
                # In training the document goes on past the anchor; the block's keys come after all of it.
                place = key if key < context else key + 1
                expected = sees(config.to_json(), layer, offset, place, [context], [True], [0] * (context + 1))
                assert (True if mask is None else bool(mask.visible_QS[offset, key])) == expected


def test_layers_of_one_kind_share_a_mask():
    config = drafter_config(
        llama_config(),
        num_layers=4,
        layer_types=("sliding_attention", "full_attention") * 2,
        sliding_window=6,
    )
    first, second, third, fourth = build_masks(config, "dense", layout())
    assert first is third
    assert second is fourth
    assert first is not second
