"""AdamW on fp32 masters with warm-up and cosine, and gradients that are summed over drafter ranks once a step."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dflash_dist.config import TrainConfig


class Optimizer:
    """Steps a drafter whose gradients are unnormalised sums over the batches of all drafter ranks.

    All gradients are views of one flat buffer: one all-reduce, one norm, one scaling a step, and no allocation.
    A gradient that is not finite leaves weights and moments untouched, on the device, without a look from the host.
    """

    def __init__(
        self, model: nn.Module, settings: TrainConfig, total_steps: int, group: dist.ProcessGroup | None
    ) -> None:
        self._settings, self._total_steps, self._group = settings, total_steps, group
        parameters = [p for p in model.parameters() if p.requires_grad]
        device = parameters[0].device
        self._flat = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float32, device=device)
        offset = 0
        for parameter in parameters:
            assert parameter.dtype == torch.float32, "masters are fp32: bf16 ones freeze the norms"
            parameter.grad = self._flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
        self._adamw = torch.optim.AdamW(
            parameters,
            lr=settings.learning_rate,
            betas=(settings.betas[0], settings.betas[1]),
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def learning_rate(self, step: int) -> float:
        """The rate of step `step`, from 1: linear warm-up, then cosine to the least rate at the last step."""
        peak, floor = self._settings.learning_rate, self._settings.min_learning_rate_ratio
        warmup_steps = max(1, round(self._settings.warmup_ratio * self._total_steps))
        if step <= warmup_steps:
            return peak * step / warmup_steps
        share = (step - warmup_steps) / max(1, self._total_steps - warmup_steps)
        return peak * (floor + (1 - floor) * (1 + math.cos(math.pi * share)) / 2)

    def warm_up(self) -> None:
        """Launches the update's kernels once without an update: a first launch may have to wait for the device."""
        self._flat.zero_()
        self._adamw.found_inf = torch.ones((), device=self._flat.device)  # type: ignore[attr-defined]
        self._adamw.step()

    def zero_grad(self) -> None:
        """Clears the gradients in place."""
        self._flat.zero_()

    def gradient_is_finite(self) -> Tensor:
        """fp32 scalar on the device: 1 where the gradient summed so far is finite, else 0."""
        return self._flat.sum().isfinite().float()

    def step(self, step: int, stats: Tensor, total_weight: Tensor) -> Tensor:
        """Averages, clips and applies the gradient; returns fp32 [2] on the device: gradient norm, 1 if skipped.

        `total_weight` is the loss's denominator over all ranks. `stats` is what must be finite beside the gradient.
        """
        if self._group is not None:
            dist.all_reduce(self._flat, group=self._group)
        self._flat.div_(total_weight.clamp_min(1e-12))
        norm = torch.linalg.vector_norm(self._flat)
        bad = (~(norm.isfinite() & stats.isfinite().all())).float()
        self._flat.mul_((self._settings.clip_norm / (norm + 1e-6)).clamp_max(1.0))
        for param_group in self._adamw.param_groups:
            param_group["lr"] = self.learning_rate(step)
        # The fused kernel's own switch for mixed precision: a set flag makes the step a no-op on the device.
        self._adamw.found_inf = bad  # type: ignore[attr-defined]
        self._adamw.step()
        return torch.stack([norm, bad])

    def state_dict(self) -> dict[str, Any]:
        """AdamW's moments and step counts."""
        return self._adamw.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` gave."""
        self._adamw.load_state_dict(state)
