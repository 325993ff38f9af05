"""AdamW on fp32 masters with warm-up and cosine, and gradients that are summed over the drafter ranks."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dflash_dist.config import TrainConfig
from dflash_dist.drafter.linear import Linear
from dflash_dist.drafter.model import DFlashDrafter
from dflash_dist.train.gradients import Gradients, ReplicatedGradients, ShardedGradients, as_sharded


class Optimizer:
    """Steps a drafter whose gradients are unnormalised sums over the batches of all drafter ranks.

    Where the drafter is sharded, each rank steps its shards, with what the ranks agree on: norm, rate, and whether to.
    A gradient that is not finite leaves weights and moments untouched, on the device, without a look from the host.
    """

    def __init__(
        self, model: DFlashDrafter, settings: TrainConfig, total_steps: int, group: dist.ProcessGroup | None
    ) -> None:
        self._settings, self._total_steps = settings, total_steps
        self._parameters = dict(model.parameters_by_backward())
        parameters = list(self._parameters.values())
        shards = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
        self._gradients: Gradients = (
            ShardedGradients(model, shards) if shards else ReplicatedGradients(parameters, group)
        )
        self._adamw = torch.optim.AdamW(
            self._gradients.masters,
            lr=settings.learning_rate,
            betas=(settings.betas[0], settings.betas[1]),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self._products: dict[Tensor, Linear] = {}
        if self._gradients.flat.is_cuda and not shards:
            self._products = {module.weight: module for module in model.modules() if isinstance(module, Linear)}
            for product in self._products.values():
                product.keep_cast = True  # our kernel writes it
        self._update_nothing()

    def learning_rate(self, step: int) -> float:
        """The rate of step `step`, from 1: linear warm-up, then cosine to the least rate at the last step."""
        peak, floor = self._settings.learning_rate, self._settings.min_learning_rate_ratio
        warmup_steps = max(1, round(self._settings.warmup_ratio * self._total_steps))
        if step <= warmup_steps:
            return peak * step / warmup_steps
        share = (step - warmup_steps) / max(1, self._total_steps - warmup_steps)
        return peak * (floor + (1 - floor) * (1 + math.cos(math.pi * share)) / 2)

    def zero_grad(self) -> None:
        """Clears the gradients in place."""
        self._gradients.zero()

    def overlap(self, last: bool) -> AbstractContextManager[None]:
        """A context for a backward call; `last`: the last of this rank in the step.

        Within the last one, the sum over ranks begins with each part of the gradient that is complete.
        """
        return self._gradients.overlap(last)

    def gradient_is_finite(self) -> Tensor:
        """fp32 scalar on the device: 1 where the gradient that this rank has summed so far is finite, else 0."""
        return self._gradients.own_is_finite()

    def reduce(self) -> None:
        """Ends the sum of the gradient over ranks: once a step, on every rank at the same place."""
        self._gradients.reduce()

    def step(self, step: int, stats: Tensor, total_weight: Tensor) -> Tensor:
        """Averages, clips and applies the gradient; returns fp32 [2] on the device: gradient norm, 1 if skipped.

        `total_weight` is the loss's denominator over all ranks. `stats` is what must be finite beside the gradient.
        """
        total_weight = total_weight.clamp_min(1e-12)
        norm = self._gradients.norm() / total_weight
        bad = (~(norm.isfinite() & stats.isfinite().all())).float()
        clip = (self._settings.clip_norm / (norm + 1e-6)).clamp_max(1.0)
        self._update(self.learning_rate(step), total_weight / clip, bad)
        return torch.stack([norm, bad])

    def _update(self, rate: float, divisor: Tensor, skip: Tensor) -> None:
        """AdamW by the gradient / `divisor`; nothing where `skip` is not 0."""
        if not self._gradients.flat.is_cuda or not self._adamw.state:
            for param_group in self._adamw.param_groups:
                param_group["lr"] = rate
            # The fused kernel's own switches for mixed precision.
            self._adamw.grad_scale, self._adamw.found_inf = divisor, skip  # type: ignore[attr-defined]
            self._adamw.step()
            return
        from dflash_dist.train.adamw_kernel import adamw_  # here, as there may be no Triton where there is no GPU

        states = [self._adamw.state[master] for master in self._gradients.masters]
        torch._foreach_add_([state["step"] for state in states], [1 - skip] * len(states))
        adamw_(
            self._gradients.masters,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [self._products[m].cast if m in self._products else None for m in self._gradients.masters],
            states[0]["step"],
            divisor=divisor,
            skip=skip,
            rate=rate,
            betas=(self._settings.betas[0], self._settings.betas[1]),
            eps=self._adamw.defaults["eps"],
            decay=self._settings.weight_decay,
        )

    def state_tensors(self) -> dict[str, Tensor]:
        """AdamW's live state, flat: `exp_avg.<parameter>`, `exp_avg_sq.<parameter>` and `step.<parameter>`, all fp32.

        The first two are of the parameter's shape, and sharded as it is; the third is 0-dim. Writing into them, as
        torch.distributed.checkpoint does in loading, is as good as `load_state_tensors`.
        """
        tensors = {}
        for (name, parameter), master in zip(self._parameters.items(), self._gradients.masters, strict=True):
            for kind, tensor in self._adamw.state[master].items():
                if isinstance(parameter, DTensor) and kind != "step":
                    tensor = as_sharded(tensor, parameter)
                tensors[f"{kind}.{name}"] = tensor
        return tensors

    @torch.no_grad()
    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Copies what `state_tensors` gave, here or in another process, into the state."""
        own = self.state_tensors()
        assert own.keys() == tensors.keys(), f"state of other parameters: {sorted(own.keys() ^ tensors.keys())}"
        for name, tensor in own.items():
            tensor.copy_(tensors[name])

    def _update_nothing(self) -> None:
        """Makes the moments, and launches the update's kernels once: a first launch may have to wait for the device."""
        one = torch.ones((), device=self._gradients.flat.device)
        for _ in range(2):  # torch's, which makes the state, and the kernel
            self._update(0.0, one, one)
