"""The training objective: weighted cross-entropy of the drafted tokens, as sums that add up over batches and ranks.

Shape suffixes: A blocks, B block size, C blocks of a chunk, M = B - 1 masked offsets, T tokens of the pack,
H hidden size, F features, V vocabulary rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dflash_dist.drafter.anchors import BlockTensors
from dflash_dist.drafter.model import DFlashDrafter

if TYPE_CHECKING:
    from dflash_dist.target.load import TargetEnds

SUMS = ("loss", "weight", "correct", "valid", "accepted", "blocks")
"""Order of what `block_sums` returns. loss / weight is the loss, correct / valid the accuracy, and
1 + accepted / blocks the estimate of tau."""


def block_sums(
    model: DFlashDrafter,
    ends: TargetEnds,
    features_TF: Tensor,
    positions_T: Tensor,
    documents_T: Tensor,
    blocks: BlockTensors,
    chunk: int,
) -> Tensor:
    """The sums named in `SUMS` over one batch, [6] fp32; only the first carries a gradient.

    `features_TF`: the target's tapped states, finite in padding rows too. `positions_T`: int64 positions within the
    document. `documents_T`: int64 document of each token, -1 for padding. `chunk`: blocks whose logits exist at once.
    """
    context = model.context(features_TF, positions_T)
    masks = model.masks(blocks.anchors_A, blocks.keep_A, documents_T)
    hidden_ABH = model.blocks(ends.embed(blocks.ids_AB), blocks.positions_AB, context, masks)
    labelled = (hidden_ABH, blocks.labels_AB, blocks.valid_AB, blocks.weights_AB)
    chunks = zip(*(x_AB[:, 1:].split(chunk) for x_AB in labelled), strict=True)
    if len(blocks.anchors_A) <= chunk:
        sums = [_chunk_sums(ends, *parts) for parts in chunks]
    else:
        # Logits are recomputed in the backward pass: those of all blocks would not fit.
        sums = [checkpoint(_chunk_sums, ends, *x, use_reentrant=False, preserve_rng_state=False) for x in chunks]
    blocks_sum = blocks.keep_A.sum().to(sums[0].dtype)[None]
    return torch.cat([torch.stack(sums).sum(0), blocks_sum])


def _chunk_sums(
    ends: TargetEnds, hidden_CMH: Tensor, labels_CM: Tensor, valid_CM: Tensor, weights_CM: Tensor
) -> Tensor:
    """[5]: `SUMS` without the last, for some of the blocks."""
    logits_CMV = ends.logits(hidden_CMH.flatten(0, 1)).unflatten(0, labels_CM.shape)
    wide_CMV = logits_CMV.to(torch.promote_types(logits_CMV.dtype, torch.float32))
    entropy_CM = F.cross_entropy(wide_CMV.flatten(0, 1), labels_CM.flatten(), reduction="none").view_as(labels_CM)
    loss = (weights_CM * entropy_CM).sum()
    with torch.no_grad():
        correct_CM = (logits_CMV.argmax(-1) == labels_CM) & valid_CM
        # The run ends at the first offset that is wrong or not valid, as acceptance does.
        run_CM = correct_CM.cumprod(-1)
        counts = [x.sum().to(loss.dtype) for x in (weights_CM, correct_CM, valid_CM, run_CM)]
    return torch.stack([loss, *counts])
