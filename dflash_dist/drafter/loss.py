"""The training objective: weighted losses of the drafted tokens, as sums that add up over batches and ranks.

Shape suffixes: A blocks, B block size, C blocks of a chunk, M = B - 1 masked offsets, T tokens of the pack,
H hidden size, F features, V vocabulary rows.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from dflash_dist.drafter.anchors import BlockTensors
from dflash_dist.drafter.head import Head, Outcome, WithGradient
from dflash_dist.drafter.linear import casting_once
from dflash_dist.drafter.model import DFlashDrafter, KeyValue
from dflash_profiling.record import span

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


def block_sums(
    model: DFlashDrafter,
    ends: TargetEnds,
    features_TF: Tensor,
    positions_T: Tensor,
    blocks: BlockTensors,
    chunk: int,
    objective: Objective = Objective(),
    last_TH: Tensor | None = None,
) -> Tensor:
    """The sums named in `SUMS` over one batch, [6] fp32; only the first carries a gradient.

    `features_TF`: the target's tapped states, finite in padding rows too. `positions_T`: int64 positions within the
    document. `chunk`: blocks whose logits exist at once. `last_TH`: the target's last hidden states after its final
    norm, for the objectives that need them.
    """
    hidden_AMH = model(features_TF, positions_T, ends.embed(blocks.ids_AB), blocks)
    return head_sums(hidden_AMH, Head(ends, objective.kind, last_TH), blocks, chunk, objective)


def backward_in_groups(
    model: DFlashDrafter,
    ends: TargetEnds,
    features_TF: Tensor,
    positions_T: Tensor,
    blocks: BlockTensors,
    group: int,
    chunk: int,
    objective: Objective = Objective(),
    last_TH: Tensor | None = None,
    forward: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    backward: Callable[[bool], AbstractContextManager[object]] = contextlib.nullcontext,
) -> Tensor:
    """What `block_sums` gives, detached; the gradient is added to the parameters' own, `group` blocks at a time.

    So memory does not grow with the blocks. The context is computed once: what the groups before the last give to its
    keys and values is kept, and goes back with the last group, in whose backward call every parameter takes part.
    `forward`, `backward`: contexts for each part of either pass; the latter is told whether it is the last one's.
    """
    if len(blocks.anchors_A) <= group:
        with forward():
            sums = block_sums(model, ends, features_TF, positions_T, blocks, chunk, objective, last_TH)
        with backward(True):
            sums[0].backward()
        return sums.detach()
    head = Head(ends, objective.kind, last_TH)
    *groups, last_group = _groups(blocks, group)
    total = []
    with casting_once(model):
        with forward():
            context = model.context(features_TF, positions_T)
        leaves = [(key.detach().requires_grad_(), value.detach().requires_grad_()) for key, value in context]
        for part in groups:
            with forward():
                sums = _group_sums(model, head, leaves, len(positions_T), part, chunk, objective)
            with backward(False):
                sums[0].backward()
            total.append(sums.detach())
        with forward():
            sums = _group_sums(model, head, context, len(positions_T), last_group, chunk, objective)
        roots: list[Tensor] = [sums[0]]
        gradients: list[Tensor | None] = [None]
        for pair, own in zip(context, leaves, strict=True):
            for tensor, leaf in zip(pair, own, strict=True):
                roots.append(tensor)
                gradients.append(leaf.grad)
        with backward(True):
            torch.autograd.backward(roots, gradients)
    return torch.stack([*total, sums.detach()]).sum(0)


@torch.no_grad()
def sums_in_groups(
    model: DFlashDrafter,
    ends: TargetEnds,
    features_TF: Tensor,
    positions_T: Tensor,
    blocks: BlockTensors,
    group: int,
    chunk: int,
    objective: Objective = Objective(),
    last_TH: Tensor | None = None,
) -> Tensor:
    """What `block_sums` gives without a gradient, `group` blocks at a time: in training's shapes and memory."""
    if len(blocks.anchors_A) <= group:
        return block_sums(model, ends, features_TF, positions_T, blocks, chunk, objective, last_TH)
    head = Head(ends, objective.kind, last_TH)
    with casting_once(model):
        context = model.context(features_TF, positions_T)
        sums = [
            _group_sums(model, head, context, len(positions_T), part, chunk, objective)
            for part in _groups(blocks, group)
        ]
    return torch.stack(sums).sum(0)


def _groups(blocks: BlockTensors, group: int) -> list[BlockTensors]:
    return [BlockTensors(*parts) for parts in zip(*(x.split(group) for x in blocks), strict=True)]


def _group_sums(
    model: DFlashDrafter,
    head: Head,
    context: Sequence[KeyValue],
    tokens: int,
    part: BlockTensors,
    chunk: int,
    objective: Objective,
) -> Tensor:
    masks = model.masks(part, tokens)
    hidden_AMH = model.blocks(head.ends.embed(part.ids_AB), part.positions_AB, context, masks)
    return head_sums(hidden_AMH, head, part, chunk, objective)


def head_sums(hidden_AMH: Tensor, head: Head, blocks: BlockTensors, chunk: int, objective: Objective) -> Tensor:
    """`block_sums` from the drafter's output."""
    gradient_AMH = torch.empty_like(hidden_AMH) if hidden_AMH.requires_grad else None
    sums = []
    with span("loss"), torch.no_grad():
        for begin in range(0, len(blocks.anchors_A), chunk):
            part = slice(begin, begin + chunk)
            labels_CM, valid_CM, weights_CM = (
                x_AB[part, 1:] for x_AB in (blocks.labels_AB, blocks.valid_AB, blocks.weights_AB)
            )
            weigh = functools.partial(_weights, objective, valid_CM, weights_CM)
            outcome, gradient_CMH = head.outcome(
                hidden_AMH[part], blocks.anchors_A[part], labels_CM, None if gradient_AMH is None else weigh
            )
            sums.append(_sums(outcome, valid_CM, weigh(outcome.likelihood_CM), objective))
            if gradient_AMH is not None and gradient_CMH is not None:
                gradient_AMH[part] = gradient_CMH
        total = torch.stack(sums).sum(0)
        total = torch.cat([total, blocks.keep_A.sum().to(total.dtype)[None]])
    return total if gradient_AMH is None else WithGradient.apply(hidden_AMH, total, gradient_AMH)


@torch.no_grad()
def offset_outcomes(
    model: DFlashDrafter,
    ends: TargetEnds,
    features_TF: Tensor,
    positions_T: Tensor,
    blocks: BlockTensors,
    chunk: int,
    objective: Objective = Objective(),
    last_TH: Tensor | None = None,
) -> Outcome:
    """The outcome of every offset by itself, computed as `block_sums` does; to look at, not to train on."""
    hidden_AMH = model(features_TF, positions_T, ends.embed(blocks.ids_AB), blocks)
    head = Head(ends, objective.kind, last_TH)
    chunks = zip(*(x.split(chunk) for x in (hidden_AMH, blocks.anchors_A, blocks.labels_AB[:, 1:])), strict=True)
    outcomes = [head.outcome(*parts)[0] for parts in chunks]
    return Outcome(*(torch.cat(parts) for parts in zip(*outcomes, strict=True)))


def dpace_weights(probability_CM: Tensor, valid_CM: Tensor, alpha: float) -> Tensor:
    """[C, M] D-PACE weights (arXiv 2605.18810) from the probability that the drafter gives each label.

    s_k = (1 - alpha) p_k + alpha where valid and 1 elsewhere; P_k = s_1 ... s_k; w_j = sum of P_m over valid m >= j.
    """
    smooth_CM = torch.where(valid_CM, (1 - alpha) * probability_CM + alpha, 1.0)
    reach_CM = smooth_CM.cumprod(-1) * valid_CM
    return reach_CM.flip(-1).cumsum(-1).flip(-1) * valid_CM


def _weights(objective: Objective, valid_CM: Tensor, decay_CM: Tensor, likelihood_CM: Tensor) -> Tensor:
    """[C, M]: what each offset's loss counts; 0 where it is not valid."""
    if objective.weights == "dpace":
        return dpace_weights(likelihood_CM, valid_CM, objective.alpha)
    return decay_CM * valid_CM


def _sums(outcome: Outcome, valid_CM: Tensor, weights_CM: Tensor, objective: Objective) -> Tensor:
    """[5]: `SUMS` without the last, for some of the blocks."""
    correct_CM = (outcome.prediction_CM == outcome.label_CM) & valid_CM
    # The run ends at the first offset that is wrong or not valid, as acceptance does.
    run_CM = correct_CM.cumprod(-1)
    norm_CM = valid_CM if objective.weights == "dpace" else weights_CM
    # Not a product alone: where the weight is 0 the loss may be infinite (KL to a label past the document).
    loss_CM = weights_CM * outcome.loss_CM.masked_fill(~valid_CM, 0.0)
    return torch.stack([x.sum().to(loss_CM.dtype) for x in (loss_CM, norm_CM, correct_CM, valid_CM, run_CM)])
