"""AdamW on CUDA in Triton, where torch's fused one writes the gradient back, too, and works in small launches."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256
"""On an H200 with a cast beside it 4.15 TB/s; of 1024 with 8 warps 3.8, of 2048 2.3."""


@torch.no_grad()
def adamw_(
    parameters: Sequence[Tensor],
    averages: Sequence[Tensor],
    squares: Sequence[Tensor],
    casts: Sequence[Tensor | None],
    count: Tensor,
    *,
    divisor: Tensor,
    skip: Tensor,
    rate: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
) -> None:
    """Steps fp32 parameters by `.grad` / `divisor`; `averages` and `squares` are the first and second moments.

    `casts`: a copy of each parameter in another type, to be changed with it, or None. `count`, `divisor`, `skip`: fp32
    scalars on the device. `count` is of the steps with this one; where `skip` is not 0, nothing changes.
    """
    correction = torch.stack([1 - beta ** count.double() for beta in betas])
    for parameter, average, square, cast in zip(parameters, averages, squares, casts, strict=True):
        assert parameter.grad is not None
        size = parameter.numel()
        _adamw_kernel[triton.cdiv(size, BLOCK),](
            parameter,
            parameter.grad,
            average,
            square,
            parameter if cast is None else cast,
            correction,
            divisor,
            skip,
            size,
            rate,
            betas[0],
            betas[1],
            eps,
            decay,
            WITH_CAST=cast is not None,
            BLOCK=BLOCK,
            num_warps=4,
        )


@triton.jit(do_not_specialize=["size"])
def _adamw_kernel(
    parameters,
    gradients,
    averages,
    squares,
    casts,
    correction,
    divisor,
    skip,
    size,
    rate,
    beta_1,
    beta_2,
    eps,
    decay,
    WITH_CAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < tl.where(tl.load(skip) == 0, size, 0)
    gradient = tl.load(gradients + place, mask=inside, other=0.0) / tl.load(divisor)
    average = tl.load(averages + place, mask=inside, other=0.0)
    average += (1 - beta_1) * (gradient - average)
    square = beta_2 * tl.load(squares + place, mask=inside, other=0.0) + (1 - beta_2) * gradient * gradient
    parameter = tl.load(parameters + place, mask=inside, other=0.0) * (1 - rate * decay)
    step = rate / tl.load(correction).to(tl.float32)
    deviation = tl.sqrt(square) / tl.sqrt(tl.load(correction + 1).to(tl.float32)) + eps
    parameter -= step * average / deviation
    tl.store(parameters + place, parameter, mask=inside)
    if WITH_CAST:
        tl.store(casts + place, parameter.to(casts.dtype.element_ty), mask=inside)
    tl.store(averages + place, average, mask=inside)
    tl.store(squares + place, square, mask=inside)
