"""The drafter's element-wise work, each function one kernel forward and one or two backward where it runs on CUDA.

Everything is computed in fp32 at least and returned in the type of its first argument.

Shape suffixes: P positions of any shape, n heads of d values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional as F

Function = TypeVar("Function", bound=Callable[..., Any])


def fused(function: Function) -> Function:
    """`function`, compiled where its first argument is on CUDA: once for all numbers of positions."""
    compiled = functools.cache(lambda: torch.compile(function))  # the compiler takes long to import

    @functools.wraps(function)
    def call(x: Tensor, *others: Any) -> Any:
        if not x.is_cuda:
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


@fused
def norm_rotate(x_Pnd: Tensor, weight_d: Tensor, eps: float, cos_Pd: Tensor, sin_Pd: Tensor) -> Tensor:
    """`rms_norm` of every head, then its two halves rotated against each other; the angles' tables are [P, d / 2]."""
    first, second = (_normed(x_Pnd, eps) * weight_d).chunk(2, dim=-1)
    cos, sin = cos_Pd[..., None, :], sin_Pd[..., None, :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_Pnd.dtype)


@fused
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return (F.silu(_wide(gate)) * up).to(gate.dtype)


@fused
def swiglu_backward(gate: Tensor, up: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `gate` and `up` for that of `swiglu`, and `swiglu` once more."""
    wide, up_wide, gradient_wide = _wide(gate), _wide(up), _wide(gradient)
    sigmoid = wide.sigmoid()
    silu = wide * sigmoid
    gradient_gate = gradient_wide * up_wide * sigmoid * (1 + wide - silu)
    return tuple(y.to(gate.dtype) for y in (gradient_gate, gradient_wide * silu, silu * up_wide))  # type: ignore[return-value]


def _normed(x: Tensor, eps: float) -> Tensor:
    wide = _wide(x)
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
