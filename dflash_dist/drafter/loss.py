"""The training objective: weighted losses of the drafted tokens, as sums that add up over batches and ranks.

Shape suffixes: A blocks, B block size, C blocks of a chunk, M = B - 1 masked offsets, T tokens of the pack,
H hidden size, F features, V vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dflash_dist.drafter.anchors import BlockTensors
from dflash_dist.drafter.model import DFlashDrafter

if TYPE_CHECKING:
    from dflash_dist.config import ObjectiveConfig
    from dflash_dist.drafter.config import DrafterConfig
    from dflash_dist.target.load import TargetEnds

SUMS = ("loss", "weight", "correct", "valid", "accepted", "blocks")
"""Order of what `block_sums` returns. loss / weight is the loss, correct / valid the accuracy, and
1 + accepted / blocks the estimate of tau."""


@dataclass(frozen=True)
class Objective:
    """What an offset's loss is, and how the offsets of a block are weighted."""

    kind: Literal["tokens", "argmax", "kl"] = "tokens"
    """Cross-entropy on the data's token, on the target's most likely one, or KL(target || drafter)."""
    weights: Literal["decay", "dpace"] = "decay"
    """decay: exp(-(offset - 1) / gamma), over the sum of weights; dpace: `dpace_weights`, over the valid offsets."""
    alpha: float = 0.5
    """D-PACE's smoothing."""

    @classmethod
    def of(cls, settings: ObjectiveConfig) -> Objective:
        """The objective that a run's configuration names."""
        return cls(settings.kind, settings.weights, settings.dpace_alpha)

    @property
    def needs_last_state(self) -> bool:
        """Whether the target's own distribution is needed: its last hidden state, after its final norm."""
        return self.kind != "tokens"

    def captured_states(self, drafter: DrafterConfig) -> int:
        """States of H values that are captured for each token: the taps, and the last one where it is needed."""
        return len(drafter.target_layer_ids) + self.needs_last_state


class OffsetOutcomes(NamedTuple):
    """What became of every masked offset of every block."""

    loss_AM: Tensor
    """float: unweighted, in nats; it means something where the offset is valid."""
    prediction_AM: Tensor
    """int64: the drafter's most likely token."""
    label_AM: Tensor
    """int64: the token that it should have been."""


def block_sums(
    model: DFlashDrafter,
    ends: TargetEnds,
    features_TF: Tensor,
    positions_T: Tensor,
    documents_T: Tensor,
    blocks: BlockTensors,
    chunk: int,
    objective: Objective = Objective(),
    last_TH: Tensor | None = None,
) -> Tensor:
    """The sums named in `SUMS` over one batch, [6] fp32; only the first carries a gradient.

    `features_TF`: the target's tapped states, finite in padding rows too. `positions_T`: int64 positions within the
    document. `documents_T`: int64 document of each token, -1 for padding. `chunk`: blocks whose logits exist at once.
    `last_TH`: the target's last hidden states after its final norm, for the objectives that need them.
    """
    hidden_ABH = _hidden(model, ends, features_TF, positions_T, documents_T, blocks)
    chunks = _chunks(hidden_ABH, blocks, chunk)
    if len(blocks.anchors_A) <= chunk:
        sums = [_chunk_sums(ends, objective, last_TH, *parts) for parts in chunks]
    else:
        # Logits are recomputed in the backward pass: those of all blocks would not fit.
        sums = [
            checkpoint(_chunk_sums, ends, objective, last_TH, *parts, use_reentrant=False, preserve_rng_state=False)
            for parts in chunks
        ]
    blocks_sum = blocks.keep_A.sum().to(sums[0].dtype)[None]
    return torch.cat([torch.stack(sums).sum(0), blocks_sum])


@torch.no_grad()
def offset_outcomes(
    model: DFlashDrafter,
    ends: TargetEnds,
    features_TF: Tensor,
    positions_T: Tensor,
    documents_T: Tensor,
    blocks: BlockTensors,
    chunk: int,
    objective: Objective = Objective(),
    last_TH: Tensor | None = None,
) -> OffsetOutcomes:
    """The outcome of every offset by itself, computed as `block_sums` does; to look at, not to train on."""
    hidden_ABH = _hidden(model, ends, features_TF, positions_T, documents_T, blocks)
    outcomes = []
    for hidden_CMH, anchors_C, labels_CM, _, _ in _chunks(hidden_ABH, blocks, chunk):
        logits_CMV = _logits(ends, hidden_CMH)
        loss_CM, labels_CM = _offset_losses(ends, objective, last_TH, logits_CMV, anchors_C, labels_CM)
        outcomes.append((loss_CM, logits_CMV.argmax(-1), labels_CM))
    return OffsetOutcomes(*(torch.cat(parts) for parts in zip(*outcomes, strict=True)))


def dpace_weights(probability_CM: Tensor, valid_CM: Tensor, alpha: float) -> Tensor:
    """[C, M] D-PACE weights (arXiv 2605.18810) from the probability that the drafter gives each label.

    s_k = (1 - alpha) p_k + alpha where valid and 1 elsewhere; P_k = s_1 ... s_k; w_j = sum of P_m over valid m >= j.
    """
    smooth_CM = torch.where(valid_CM, (1 - alpha) * probability_CM + alpha, 1.0)
    reach_CM = smooth_CM.cumprod(-1) * valid_CM
    return reach_CM.flip(-1).cumsum(-1).flip(-1) * valid_CM


def _hidden(
    model: DFlashDrafter,
    ends: TargetEnds,
    features_TF: Tensor,
    positions_T: Tensor,
    documents_T: Tensor,
    blocks: BlockTensors,
) -> Tensor:
    """[A, B, H]: the drafter's normed output for every block."""
    masks = model.masks(blocks.anchors_A, blocks.keep_A, documents_T)
    return model(features_TF, positions_T, ends.embed(blocks.ids_AB), blocks.positions_AB, masks)


def _chunks(hidden_ABH: Tensor, blocks: BlockTensors, chunk: int) -> Iterator[tuple[Tensor, ...]]:
    """(hidden_CMH, anchors_C, labels_CM, valid_CM, weights_CM) of `chunk` blocks after another."""
    masked = [x_AB[:, 1:] for x_AB in (hidden_ABH, blocks.labels_AB, blocks.valid_AB, blocks.weights_AB)]
    masked.insert(1, blocks.anchors_A)
    return zip(*(x.split(chunk) for x in masked), strict=True)


def _chunk_sums(
    ends: TargetEnds,
    objective: Objective,
    last_TH: Tensor | None,
    hidden_CMH: Tensor,
    anchors_C: Tensor,
    labels_CM: Tensor,
    valid_CM: Tensor,
    weights_CM: Tensor,
) -> Tensor:
    """[5]: `SUMS` without the last, for some of the blocks."""
    logits_CMV = _logits(ends, hidden_CMH)
    loss_CM, labels_CM = _offset_losses(ends, objective, last_TH, logits_CMV, anchors_C, labels_CM)
    with torch.no_grad():
        norm_CM = weights_CM
        if objective.weights == "dpace":
            probability_CM = torch.exp(-_cross_entropy(logits_CMV, labels_CM) if objective.kind == "kl" else -loss_CM)
            weights_CM, norm_CM = dpace_weights(probability_CM, valid_CM, objective.alpha), valid_CM
        correct_CM = (logits_CMV.argmax(-1) == labels_CM) & valid_CM
        # The run ends at the first offset that is wrong or not valid, as acceptance does.
        run_CM = correct_CM.cumprod(-1)
        counts = [x.sum().to(loss_CM.dtype) for x in (norm_CM, correct_CM, valid_CM, run_CM)]
    # Not a product alone: where the weight is 0 the loss may be infinite (KL to a label past the document).
    loss = (weights_CM * loss_CM.masked_fill(~valid_CM, 0.0)).sum()
    return torch.stack([loss, *counts])


def _offset_losses(
    ends: TargetEnds,
    objective: Objective,
    last_TH: Tensor | None,
    logits_CMV: Tensor,
    anchors_C: Tensor,
    labels_CM: Tensor,
) -> tuple[Tensor, Tensor]:
    """Unweighted losses [C, M] in nats, and the labels [C, M]: the data's, or the target's most likely tokens."""
    if not objective.needs_last_state:
        return _cross_entropy(logits_CMV, labels_CM), labels_CM
    assert last_TH is not None, f"the objective {objective.kind} needs the target's last states"
    with torch.no_grad():
        # The token at offset k is predicted by the target's state one place before it.
        offsets_M = torch.arange(labels_CM.shape[1], device=anchors_C.device)
        rows_CM = (anchors_C[:, None] + offsets_M).clamp_max(last_TH.shape[0] - 1)
        teacher_CMV = _logits(ends, last_TH[rows_CM])
        labels_CM = teacher_CMV.argmax(-1)
    if objective.kind == "argmax":
        return _cross_entropy(logits_CMV, labels_CM), labels_CM
    log_p_CMV, log_q_CMV = teacher_CMV.log_softmax(-1), logits_CMV.log_softmax(-1)
    return (log_p_CMV.exp() * (log_p_CMV - log_q_CMV)).sum(-1), labels_CM


def _logits(ends: TargetEnds, hidden_CMH: Tensor) -> Tensor:
    """[C, M, V] logits in fp32 at least."""
    logits_CMV = ends.logits(hidden_CMH.flatten(0, 1)).unflatten(0, hidden_CMH.shape[:2])
    return logits_CMV.to(torch.promote_types(logits_CMV.dtype, torch.float32))


def _cross_entropy(logits_CMV: Tensor, labels_CM: Tensor) -> Tensor:
    return F.cross_entropy(logits_CMV.flatten(0, 1), labels_CM.flatten(), reduction="none").view_as(labels_CM)
