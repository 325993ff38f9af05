"""What `head_kernels.py` computes, in plain torch: for the CPU, and as its definition.

Logits are raw: before the target's soft-cap c, z = c tanh(x / c), where `cap` is not 0. Sums are fp32 at least.

Shape suffixes: R rows, V vocabulary rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_statistics(logits_RV: Tensor, labels_R: Tensor, cap: float) -> tuple[Tensor, Tensor, Tensor]:
    """[R] each: the log of the sum of exponentials, the most likely token (int64), and the label's logit."""
    capped_RV = _capped(logits_RV, cap)
    return capped_RV.logsumexp(-1), capped_RV.argmax(-1), capped_RV.gather(-1, labels_R[:, None])[:, 0]


def cross_entropy_gradient_(logits_RV: Tensor, sum_R: Tensor, labels_R: Tensor, weight_R: Tensor, cap: float) -> None:
    """Puts in the logits' place the gradient of the sum over rows of weight times cross-entropy."""
    capped_RV = _capped(logits_RV, cap)
    gradient_RV = (capped_RV - sum_R[:, None]).exp()
    gradient_RV[torch.arange(len(labels_R), device=labels_R.device), labels_R] -= 1
    logits_RV.copy_(gradient_RV * weight_R[:, None] * _slope(capped_RV, cap))


def divergence_(
    logits_RV: Tensor, sum_R: Tensor, teacher_RV: Tensor, teacher_sum_R: Tensor, weight_R: Tensor | None, cap: float
) -> Tensor:
    """KL(teacher || logits) [R]; with weights, the logits give way to the gradient of the weighted sum over rows."""
    capped_RV = _capped(logits_RV, cap)
    log_q_RV, log_p_RV = capped_RV - sum_R[:, None], _capped(teacher_RV, cap) - teacher_sum_R[:, None]
    p_RV = log_p_RV.exp()
    if weight_R is not None:
        logits_RV.copy_((log_q_RV.exp() - p_RV) * weight_R[:, None] * _slope(capped_RV, cap))
    return (p_RV * (log_p_RV - log_q_RV)).sum(-1)


def _capped(logits_RV: Tensor, cap: float) -> Tensor:
    wide_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
    return torch.tanh(wide_RV / cap) * cap if cap else wide_RV


def _slope(capped_RV: Tensor, cap: float) -> Tensor | float:
    """The derivative of the soft-cap."""
    return 1 - (capped_RV / cap).square() if cap else 1.0
