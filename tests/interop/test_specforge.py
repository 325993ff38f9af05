"""SpecForge's training step has our loss and our gradients, for `tokens` with `decay`.

Shape suffixes: N documents, S tokens of the longest, W most blocks of a document, A blocks, B block size,
T tokens of the pack, F features, H hidden size, V vocabulary rows.
"""

import dataclasses
import warnings

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3Config

from dflash_dist.drafter.loss import SUMS, block_sums
from dflash_dist.target.load import TargetEnds
from tests.interop.answers import (
    ANCHORS,
    ANSWERS,
    BLOCK_SIZE,
    DOCUMENTS_T,
    GAMMA,
    LENGTHS,
    POSITIONS_T,
    answer_blocks,
    answer_pack,
)
from tests.random_models import MASK, VOCAB, drafter_config, llama_config, random_drafter

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it says that flash_attn is absent, which nothing here needs
    training = pytest.importorskip(
        "specforge.algorithms.common.dflash_family_model",
        reason="install the specforge package without its requirements: make setup",
    )
    from specforge.modeling.draft.dflash import DFlashDraftModel

INTERRUPTED = [[(12, 17), (19, 36)], [(5, 9), (10, 23)], [(9, 12), (13, 28)]]
"""The answers with gaps shorter than a block, as between two turns."""
LAYOUTS = {
    "full": {},
    "sliding": {"layer_types": ("sliding_attention",) * 2, "sliding_window": 9},
    "mixed": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 9},
}


class Batch:
    """Documents with random features, embedding and head: one pack for us, right-padded rows for SpecForge."""

    def __init__(self, layout, answers=ANSWERS):
        self.config = drafter_config(llama_config(), block_size=BLOCK_SIZE, **LAYOUTS[layout])
        self.drafter = random_drafter(self.config)
        self.pack = answer_pack(answers)
        generator = torch.Generator().manual_seed(3)
        self.features_TF = torch.randn(sum(LENGTHS), 2 * self.config.hidden_size, generator=generator)
        self.table_VH, self.head_VH = torch.randn(2, VOCAB, self.config.hidden_size, generator=generator)

    def ours(self, blocks):
        """Our sums by name: scalar tensors, the loss with its gradient."""
        ends = TargetEnds(torch.nn.Embedding.from_pretrained(self.table_VH), self.head_VH, None)
        inputs = (self.features_TF, POSITIONS_T, blocks.to("cpu"))
        return dict(zip(SUMS, block_sums(self.drafter, ends, *inputs, chunk=5).unbind(), strict=True))

    def theirs(self, attention):
        """SpecForge's loss, its count of supervised offsets, and its drafter, which has our drafter's weights."""
        draft = DFlashDraftModel(Qwen3Config(**self.config.to_json(), attn_implementation=attention))
        draft.load_state_dict(self.drafter.state_dict())
        head = torch.nn.Linear(*self.head_VH.T.shape, bias=False).requires_grad_(False)
        head.weight.copy_(self.head_VH)
        model = training.OnlineDFlashModel(
            draft_model=draft,
            target_lm_head=head,
            target_embed_tokens=torch.nn.Embedding.from_pretrained(self.table_VH),
            mask_token_id=MASK,
            block_size=BLOCK_SIZE,
            attention_backend=attention,
            loss_decay_gamma=GAMMA,
        )
        anchors_NW = pad_sequence([torch.tensor(places) for places in ANCHORS], batch_first=True)
        keep_NW = pad_sequence([torch.ones(len(places), dtype=torch.bool) for places in ANCHORS], batch_first=True)
        model._sample_anchor_positions = lambda length, mask, device: (anchors_NW, keep_NW)
        inputs = (torch.from_numpy(self.pack.tokens_T), self.features_TF, torch.from_numpy(self.pack.supervised_T))
        ids_NS, features_NSF, supervised_NS = (pad_sequence(x.split(LENGTHS), batch_first=True) for x in inputs)
        loss, _, metrics = model(ids_NS, features_NSF, supervised_NS.float())
        return loss, metrics["accuracy_denom"].item(), draft


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients_agree(layout, attention):
    batch = Batch(layout)
    sums = batch.ours(answer_blocks(batch.pack))
    loss = sums["loss"] / sums["weight"]
    loss.backward()
    expected, valid, draft = batch.theirs(attention)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert sums["valid"].item() == valid
    gradients = {name: parameter.grad for name, parameter in draft.named_parameters()}
    assert gradients.keys() == dict(batch.drafter.named_parameters()).keys()
    for name, parameter in batch.drafter.named_parameters():
        assert gradients[name].norm() > 0, name
        assert (parameter.grad - gradients[name]).norm() <= 1e-4 * gradients[name].norm(), name


@torch.no_grad()
def test_a_block_that_leaves_the_answer_stays_unsupervised_only_with_us():
    """The specification (2.4) multiplies by the running product of the mask; SpecForge's plain DFlash does not."""
    batch = Batch("mixed", INTERRUPTED)
    blocks = answer_blocks(batch.pack)
    sums = batch.ours(blocks)
    expected, their_valid, _ = batch.theirs("sdpa")

    valid = 0
    for row, anchors in zip(np.split(batch.pack.supervised_T, np.cumsum(LENGTHS)[:-1]), ANCHORS, strict=True):
        for anchor in anchors:
            inside = row[anchor + 1 : anchor + BLOCK_SIZE]
            valid += len(inside) if inside.all() else int(inside.argmin())
    assert sums["valid"].item() == valid

    # With the offsets after the gaps put back, our loss is theirs.
    offsets_B = np.arange(BLOCK_SIZE)
    end_A = np.cumsum(LENGTHS)[DOCUMENTS_T.numpy()[blocks.anchors_A]]
    place_AB = blocks.anchors_A[:, None] + offsets_B
    inside_AB = (place_AB < end_A[:, None]) & blocks.keep_A[:, None] & (offsets_B > 0)
    place_AB = np.minimum(place_AB, sum(LENGTHS) - 1)
    valid_AB = inside_AB & batch.pack.supervised_T[place_AB]
    straddling = dataclasses.replace(
        blocks,
        valid_AB=valid_AB,
        labels_AB=np.where(valid_AB, batch.pack.tokens_T[place_AB], 0),
        weights_AB=np.where(valid_AB, np.exp(-(offsets_B - 1) / GAMMA), 0).astype(np.float32),
    )
    same = batch.ours(straddling)
    assert same["valid"].item() == their_valid == valid + 20
    assert (same["loss"] / same["weight"]).item() == pytest.approx(expected.item(), rel=1e-5)
    assert abs((sums["loss"] / sums["weight"] / expected).item() - 1) > 1e-3
