"""Optional noise on the captured features in training. It depends on the document and the epoch alone, not on the pack.

Shape suffixes: T tokens of the pack, N documents, F = K * H features of K taps, L tokens of one document.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_dist.config import NoiseConfig


def noise_scale(settings: NoiseConfig, step: int, total_steps: int) -> float:
    """The scale at `step`, from 1: `scale` at the first step, `end_scale` at the last."""
    if settings.kind == "none":
        return 0.0
    done = (step - 1) / max(1, total_steps - 1)
    if settings.schedule == "cosine":
        done = (1 - math.cos(math.pi * done)) / 2
    return settings.scale + (settings.end_scale - settings.scale) * done


def add_noise_(
    features_TF: Tensor,
    settings: NoiseConfig,
    scale: float,
    lengths_N: Sequence[int],
    seeds_N: Sequence[int],
    taps: int,
) -> None:
    """Adds noise to the packed features in place; rows past the documents stay as they are.

    `scale`: in units of the root mean square of each token's state in each tap. `seeds_N`: one whole number a document,
    from which all of its noise is drawn.
    """
    generator = torch.Generator(features_TF.device)
    begin = 0
    for length, seed in zip(lengths_N, seeds_N, strict=True):
        state_LKH = features_TF[begin : begin + length].unflatten(1, (taps, -1))
        generator.manual_seed(seed)
        noise_LKH = torch.empty(state_LKH.shape, dtype=torch.float32, device=features_TF.device)
        if settings.kind == "uniform":
            noise_LKH.uniform_(-1.0, 1.0, generator=generator)
        else:
            noise_LKH.normal_(generator=generator)
        size_LK1 = state_LKH.float().square().mean(-1, keepdim=True).sqrt()
        state_LKH += (scale * size_LK1 * noise_LKH).to(state_LKH.dtype)
        begin += length
