"""The target's head over the drafter's output, and the loss over the vocabulary, without keeping logits.

A chunk's gradient is taken as soon as its logits exist, in their memory: the head is frozen, so nothing else needs
them, and no logits are kept or computed again for the backward pass.

Shape suffixes: A blocks, C blocks of a chunk, M = B - 1 masked offsets of blocks of B, R = C * M rows, T tokens of the
pack, H hidden size, V vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_dist.drafter import head_reference

if TYPE_CHECKING:
    from dflash_dist.target.load import TargetEnds


class Outcome(NamedTuple):
    """What became of some masked offsets."""

    loss_CM: Tensor
    """float: unweighted, in nats; it means something where the offset is valid."""
    prediction_CM: Tensor
    """int64: the drafter's most likely token."""
    label_CM: Tensor
    """int64: the token that it should have been."""
    likelihood_CM: Tensor
    """float: the probability that the drafter gives the label."""


@dataclass(frozen=True)
class Head:
    """The head with what an offset's loss is: cross-entropy on `labels`, on the target's own choice, or KL."""

    ends: TargetEnds
    kind: str
    """`tokens`, `argmax` or `kl`, see `Objective`."""
    last_TH: Tensor | None
    """The target's last hidden states after its final norm, for the last two."""

    def outcome(
        self,
        hidden_CMH: Tensor,
        anchors_C: Tensor,
        labels_CM: Tensor,
        weights_of: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Outcome, Tensor | None]:
        """The outcome of a chunk, and the gradient [C, M, H] of the weighted sum of its losses where that is asked for.

        `weights_of`: from `likelihood_CM` to the weights [C, M], which count as constants; None for no gradient.
        """
        shape, ops = labels_CM.shape, _operations(hidden_CMH)
        weight_VH, cap = self.ends.head_weight.to(hidden_CMH.dtype), self.ends.softcap or 0.0
        teacher = None
        labels_R = labels_CM.flatten()
        if self.kind != "tokens":
            teacher_RV = F.linear(self._teacher_states(anchors_C, shape[1]), weight_VH)
            teacher_sum_R, labels_R, _ = ops.row_statistics(teacher_RV, labels_R, cap)
            teacher = teacher_RV, teacher_sum_R
        logits_RV = F.linear(hidden_CMH.flatten(0, 1), weight_VH)
        sum_R, prediction_R, label_logit_R = ops.row_statistics(logits_RV, labels_R, cap)
        loss_R = sum_R - label_logit_R
        likelihood_CM = (-loss_R).exp().view(shape)
        weight_R = None if weights_of is None else weights_of(likelihood_CM).flatten().to(loss_R.dtype)
        if self.kind == "kl" and teacher is not None:
            loss_R = ops.divergence_(logits_RV, sum_R, *teacher, weight_R, cap)
        elif weight_R is not None:
            ops.cross_entropy_gradient_(logits_RV, sum_R, labels_R, weight_R, cap)
        outcome = Outcome(loss_R.view(shape), prediction_R.view(shape), labels_R.view(shape), likelihood_CM)
        # From here on `logits_RV` holds the gradient of the logits.
        return outcome, None if weight_R is None else (logits_RV @ weight_VH).unflatten(0, shape)

    def _teacher_states(self, anchors_C: Tensor, offsets: int) -> Tensor:
        """[R, H]: the token at offset k is predicted by the target's state one place before it."""
        assert self.last_TH is not None, f"the objective {self.kind} needs the target's last states"
        rows_CM = anchors_C[:, None] + torch.arange(offsets, device=anchors_C.device)
        return self.last_TH[rows_CM.clamp_max(len(self.last_TH) - 1)].flatten(0, 1)


def _operations(hidden: Tensor) -> ModuleType:
    """What computes on the logits."""
    if hidden.is_cuda:
        from dflash_dist.drafter import head_kernels  # here, as there may be no Triton where there is no GPU

        return head_kernels
    return head_reference


class WithGradient(torch.autograd.Function):
    """Gives a result whose gradient is known already: that of its first entry with respect to one input."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, sums: Tensor, gradient: Tensor) -> Tensor:
        """`sums`, with `gradient`, of the shape of `hidden`, for its first entry; the other entries have none."""
        ctx.save_for_backward(gradient)
        return sums.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """The chain rule."""
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(gradients[0][0]), None, None  # in place: nobody reads it again
