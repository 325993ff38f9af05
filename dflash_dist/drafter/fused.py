"""The drafter's element-wise work, each function one kernel forward and one or two backward where it runs on CUDA.

Everything is computed in fp32 at least and returned in the type of its first argument.

Shape suffixes: P positions of any shape, n heads of d values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Function = TypeVar("Function", bound=Callable[..., Any])


def compile_once(function: Function, **options: Any) -> Function:
    """`function` compiled, with room for each of the shapes and modes in which it is used.

    By itself torch gives a function up after 8: attention alone has as many, as masks of two kinds, in training and in
    validation, of batches and of fillers.
    """
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return cast(Function, torch.compile(function, **options))


def fused(function: Function) -> Function:
    """`function`, compiled where its first argument is on CUDA: once for all numbers of positions but 1.

    torch.compile takes a size of 1 for a constant; training never has one.
    """
    compiled = functools.cache(lambda: compile_once(function))  # the compiler takes long to import

    @functools.wraps(function)
    def call(x: Tensor, *others: Any) -> Any:
        if not x.is_cuda or len(x) == 1:
            return function(x, *others)
        for argument in (x, *others):
            if isinstance(argument, Tensor) and argument.dim() > 1:
                torch._dynamo.maybe_mark_dynamic(argument, 0)
        return compiled()(x, *others)

    return cast(Function, call)


@fused
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` over its root mean square in the last dimension, times `weight`."""
    return (_normed(x, eps) * weight).to(x.dtype)


def rms_norm_backward(
    x: Tensor, weight: Tensor, eps: float, gradient: Tensor, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `x` and `weight` for that of `rms_norm`, and `rms_norm` once more in the gradient's type.

    `residual`: what else belongs to the gradient of `x`.
    """
    if _has_kernel(x):
        from dflash_dist.drafter import norm_kernels  # here, as there may be no Triton where there is no GPU

        return norm_kernels.rms_norm_backward(x, weight, eps, gradient, residual)
    wide, gradient_wide = _wide(x), _wide(gradient)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    unit, gradient_unit = wide * scale, gradient_wide * weight
    gradient_x = scale * (gradient_unit - unit * (gradient_unit * unit).mean(-1, keepdim=True))
    gradient_weight = (gradient_wide * unit).flatten(0, -2).sum(0)
    if residual is not None:
        gradient_x = gradient_x + residual
    return gradient_x.to(x.dtype), gradient_weight, (unit * weight).to(gradient.dtype)


@fused
def norm_rotate(x_Pnd: Tensor, weight_d: Tensor, eps: float, cos_Pd: Tensor, sin_Pd: Tensor) -> Tensor:
    """`rms_norm` of every head, then its two halves rotated against each other; the angles' tables are [P, d / 2]."""
    first, second = (_normed(x_Pnd, eps) * weight_d).chunk(2, dim=-1)
    cos, sin = cos_Pd[..., None, :], sin_Pd[..., None, :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_Pnd.dtype)


@fused
def inner_product(x: Tensor, y: Tensor) -> Tensor:
    """The inner products over the last dimension, in fp32 at least."""
    return (_wide(x) * _wide(y)).sum(-1)


@fused
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return (F.silu(_wide(gate)) * up).to(gate.dtype)


@fused
def swiglu_backward_(gate: Tensor, up: Tensor, gradient: Tensor) -> None:
    """For the gradient of `swiglu`: puts in the place of its inputs their gradients, and in its own `swiglu` again."""
    wide, up_wide, gradient_wide = _wide(gate), _wide(up), _wide(gradient)
    sigmoid = wide.sigmoid()
    silu = wide * sigmoid
    results = gradient_wide * up_wide * sigmoid * (1 + wide - silu), gradient_wide * silu, silu * up_wide
    for place, result in zip((gate, up, gradient), results, strict=True):  # all are computed before one is overwritten
        place.copy_(result)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in fp32 at least, with a plain gain."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """`x` normed and scaled, in its own dtype."""
        return rms_norm(x, self.weight, self.eps)

    def rotated(self, x_Pnd: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """`x` normed in each head, then rotated by a table of cosines and one of sines, in its own dtype."""
        size = x_Pnd.shape[-1]
        if _has_kernel(x_Pnd) and size & (size - 1) == 0 and torch.is_grad_enabled():
            return _NormRotate.apply(x_Pnd, self.weight, self.eps, *rope)
        return norm_rotate(x_Pnd, self.weight, self.eps, *rope)


class _NormRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_Pnd: Tensor, weight_d: Tensor, eps: float, cos_Pd: Tensor, sin_Pd: Tensor) -> Tensor:
        ctx.eps = eps
        ctx.save_for_backward(x_Pnd, weight_d, cos_Pd, sin_Pd)
        return norm_rotate(x_Pnd.detach(), weight_d.detach(), eps, cos_Pd, sin_Pd)  # as in validation: one graph

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from dflash_dist.drafter.norm_kernels import norm_rotate_backward

        x_Pnd, weight_d, cos_Pd, sin_Pd = ctx.saved_tensors
        return *norm_rotate_backward(x_Pnd, weight_d, ctx.eps, cos_Pd, sin_Pd, gradients[0]), None, None, None


def _normed(x: Tensor, eps: float) -> Tensor:
    wide = _wide(x)
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def _has_kernel(x: Tensor) -> bool:
    """Whether the kernels of `norm_kernels`, which compute in fp32, are for it."""
    return x.is_cuda and x.dtype != torch.float64


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
