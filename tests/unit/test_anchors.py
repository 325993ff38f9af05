import numpy as np
import pytest

from dflash_dist.drafter.anchors import Blocks, default_gamma, draw_blocks
from tests.random_models import MASK, documents, reordered

LENGTHS = [30, 7, 2, 50, 1]


def draw(pack, **changes) -> Blocks:
    arguments = dict(
        block_size=4,
        mask_token_id=MASK,
        anchors_per_document=5,
        max_anchors=1000,
        gamma=2.0,
        seed=3,
        epoch=0,
        pad_to=8,
    )
    return draw_blocks(pack, **{**arguments, **changes})


def chosen(pack, blocks: Blocks) -> set[tuple[int, int]]:
    """Each anchor as (document key, position in the document)."""
    starts = np.cumsum(pack.lengths_N) - pack.lengths_N
    document = np.searchsorted(starts, blocks.anchors_A[blocks.keep_A], side="right") - 1
    return {
        (int(pack.keys_N[d]), int(a - starts[d]))
        for d, a in zip(document, blocks.anchors_A[blocks.keep_A], strict=True)
    }


def candidates(pack) -> set[tuple[int, int]]:
    found, start = set(), 0
    for key, length in zip(pack.keys_N.tolist(), pack.lengths_N.tolist(), strict=True):
        for position in range(length - 1):
            if pack.supervised_T[start + position] and pack.supervised_T[start + position + 1]:
                found.add((key, position))
        start += length
    return found


def test_blocks_hold_what_the_definition_says_token_for_token():
    pack = documents(LENGTHS)
    blocks = draw(pack, anchors_per_document=1000)
    assert chosen(pack, blocks) == candidates(pack)
    starts = np.cumsum(pack.lengths_N) - pack.lengths_N
    ends = np.cumsum(pack.lengths_N)
    for row in range(len(blocks.anchors_A)):
        if not blocks.keep_A[row]:
            continue
        anchor = int(blocks.anchors_A[row])
        document = int(np.searchsorted(ends, anchor, side="right"))
        assert blocks.ids_AB[row].tolist() == [pack.tokens_T[anchor], MASK, MASK, MASK]
        in_run = True
        for offset in range(4):
            assert blocks.positions_AB[row, offset] == anchor - starts[document] + offset
            index = anchor + offset
            in_run = in_run and index < ends[document] and bool(pack.supervised_T[index])
            valid = in_run and offset > 0
            assert blocks.valid_AB[row, offset] == valid
            assert blocks.labels_AB[row, offset] == (pack.tokens_T[index] if valid else 0)
            weight = np.exp(-(offset - 1) / 2.0) if valid else 0.0
            assert blocks.weights_AB[row, offset] == pytest.approx(weight, rel=1e-6)


def test_labels_are_the_tokens_at_the_same_positions():
    pack = documents([40], supervised_share=1.1)
    blocks = draw(pack)
    for anchor, labels in zip(blocks.anchors_A[blocks.keep_A], blocks.labels_AB[blocks.keep_A], strict=True):
        for offset in range(1, min(4, 40 - anchor)):
            assert labels[offset] == pack.tokens_T[anchor + offset]


def test_a_document_draws_the_same_anchors_in_any_pack():
    pack = documents(LENGTHS)
    everything = chosen(pack, draw(pack))
    assert max(np.bincount([key - 1000 for key, _ in everything])) == 5
    for order in ([3, 1, 0], [4, 3, 2, 1, 0], [0], [3]):
        part = reordered(pack, order)
        keys = set(part.keys_N.tolist())
        assert chosen(part, draw(part)) == {pair for pair in everything if pair[0] in keys}


def test_the_draw_changes_with_epoch_and_seed_and_leaves_the_global_streams_alone():
    pack = documents([200])
    np.random.seed(0)
    before = np.random.get_state()[1].copy()
    first = chosen(pack, draw(pack))
    assert chosen(pack, draw(pack)) == first
    assert chosen(pack, draw(pack, epoch=1)) != first
    assert chosen(pack, draw(pack, seed=4)) != first
    assert chosen(pack, draw(pack, seed=4, epoch=0)) != chosen(pack, draw(pack, seed=3, epoch=1))
    assert (np.random.get_state()[1] == before).all()


def test_the_draw_is_uniform_over_positions_and_epochs():
    pack = documents([41], supervised_share=1.1)
    counts = np.zeros(41)
    for epoch in range(400):
        blocks = draw(pack, epoch=epoch, anchors_per_document=10)
        counts[blocks.anchors_A[blocks.keep_A]] += 1
    # Each of the 40 candidates is drawn with p = 1/4: 100 times, with a deviation of 8.7.
    assert counts[40] == 0
    assert abs(counts[:40] - 100).max() < 40


def test_the_cap_keeps_a_part_of_what_would_be_drawn_without_it():
    pack = documents(LENGTHS)
    without = chosen(pack, draw(pack))
    capped = chosen(pack, draw(pack, max_anchors=6))
    assert len(capped) == 6
    assert capped < without
    shuffled = reordered(pack, [3, 1, 0, 4, 2])
    assert chosen(shuffled, draw(shuffled, max_anchors=6)) == capped


def test_padding_is_whole_multiples_and_carries_nothing():
    for lengths in (LENGTHS, [1], [2, 1]):
        pack = documents(lengths)
        blocks = draw(pack, pad_to=8)
        kept = int(blocks.keep_A.sum())
        assert len(blocks.keep_A) == max(8, -(-kept // 8) * 8)
        assert blocks.keep_A[:kept].all()
        assert (np.diff(blocks.anchors_A[:kept]) > 0).all()
        padding = ~blocks.keep_A
        assert not blocks.anchors_A[padding].any()
        assert not blocks.valid_AB[padding].any()
        assert not blocks.weights_AB[padding].any()
        assert not blocks.labels_AB[padding].any()


def test_types_and_tensors():
    blocks = draw(documents(LENGTHS))
    tensors = blocks.to("cpu")
    for name in ("anchors_A", "ids_AB", "positions_AB", "labels_AB"):
        assert getattr(blocks, name).dtype == np.int64
    assert (blocks.keep_A.dtype, blocks.valid_AB.dtype, blocks.weights_AB.dtype) == (bool, bool, np.float32)
    for name, tensor in tensors._asdict().items():
        assert (tensor.numpy() == getattr(blocks, name)).all()


def test_published_gammas():
    assert [default_gamma(size) for size in (16, 10, 8, 32)] == [7.0, 5.0, 4.0, 14.0]
