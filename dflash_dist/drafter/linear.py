"""Matrix products of fp32 masters in a compute type, whose weight gradients are summed where they belong.

A product's backward pass adds to the master's fp32 `.grad` within the matrix product itself: no gradient is rounded to
the compute type, and none is written only to be read, cast and added. So a hook on the master sees none, and
`torch.autograd.grad` gives none. Where there is no `.grad` yet, the product is written to the master's
`gradient_place`; where it has none either, as with FSDP, it is returned to autograd, in the master's type.

Shape suffixes: P rows, I inputs and O outputs of a product.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_dist.drafter.fused import RMSNorm, rms_norm, rms_norm_backward, swiglu, swiglu_backward_


class Linear(nn.Module):
    """A product without bias, in the type of autocast where that is on, else in the weight's own."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.in_features = inputs
        self.weight = nn.Parameter(torch.empty(outputs, inputs))  # drawn or loaded by the whole model
        self.keep_cast = False
        """Whether `cast` stays from pass to pass.

        Who changes the weight past autograd's count, as our AdamW kernel and torch's fused one do, must change it, too.
        """
        self.cast: Tensor | None = None
        self._cast_of = (0, 0)
        """The place and the count of changes of the weight that was cast."""

    def forward(self, x: Tensor, norm: RMSNorm | None = None, *others: Linear) -> Any:
        """[..., O] for [..., I].

        With a norm: a tuple of `x` itself, then of it and of those of `others`, all of the normed `x`, of which `x`
        alone is kept for the backward pass. What adds to a residual takes this `x`, whose gradient is then added by
        the norm. So a layer's first product is called for all of them; FSDP gathers weights where it is called.
        """
        if norm is None:
            weight_OI = self.cast_weight()
            return _Product.apply(x.to(weight_OI.dtype), self.weight, weight_OI)
        products = (self, *others)
        casts = [product.cast_weight() for product in products]
        return _NormedProducts.apply(x, norm.weight, norm.eps, *[product.weight for product in products], *casts)

    def cast_weight(self) -> Tensor:
        """[O, I]: the weight in the type of the computation."""
        device = self.weight.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.weight.dtype
        if dtype == self.weight.dtype:
            return self.weight.detach()
        if self.cast is not None and self.cast.dtype == dtype and self._cast_of == self._weight_now():
            return self.cast
        cast_OI = self.weight.detach().to(dtype)
        if self.keep_cast and not torch.is_inference_mode_enabled():
            self.cast, self._cast_of = cast_OI, self._weight_now()
        return cast_OI

    def _weight_now(self) -> tuple[int, int]:
        """Other than before where the weight was changed or replaced."""
        return self.weight.data_ptr(), self.weight._version


@contextlib.contextmanager
def casting_once(model: nn.Module) -> Iterator[None]:
    """For passes between which no weight changes, nor is gathered anew: each is cast once."""
    products = [module for module in model.modules() if isinstance(module, Linear) and not module.keep_cast]
    for product in products:
        product.keep_cast = True
    try:
        yield
    finally:
        for product in products:
            product.keep_cast, product.cast = False, None


def gated_product(gate_PI: Tensor, up_PI: Tensor, down: Linear) -> Tensor:
    """[P, O]: `down(silu(gate) * up)`, which keeps gate and up alone for the backward pass."""
    return _GatedProduct.apply(gate_PI, up_PI, down.weight, down.cast_weight())


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, master_OI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        ctx.master_OI = master_OI
        return F.linear(x, weight_OI)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight_OI = ctx.saved_tensors
        wants_x, wants_weight, _ = ctx.needs_input_grad
        gradient_x = gradients[0] @ weight_OI if wants_x else None
        gradient_OI = _add_to_gradient(ctx.master_OI, gradients[0], x) if wants_weight else None
        return gradient_x, gradient_OI, None


class _NormedProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain_I: Tensor, eps: float, *matrices: Tensor) -> tuple[Tensor, ...]:
        count = len(matrices) // 2
        ctx.masters, weights = matrices[:count], matrices[count:]
        ctx.eps = eps
        ctx.save_for_backward(x, gain_I, *weights)
        normed = rms_norm(x, gain_I, eps).to(weights[0].dtype)
        return x, *(F.linear(normed, weight_OI) for weight_OI in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, gain_I, *weights = ctx.saved_tensors
        residual, *of_products = gradients
        first, *others = (gradient.flatten(0, -2) for gradient in of_products)
        gradient_PI = first @ weights[0]
        for gradient_PO, weight_OI in zip(others, weights[1:], strict=True):
            gradient_PI.addmm_(gradient_PO, weight_OI)
        added = residual if ctx.needs_input_grad[0] else None  # the first layer's input needs no gradient
        gradient_x, gradient_gain_I, normed = rms_norm_backward(x, gain_I, ctx.eps, gradient_PI.view_as(x), added)
        wants = ctx.needs_input_grad[3:]
        returned = [
            _add_to_gradient(master_OI, gradient, normed) if wanted else None
            for master_OI, gradient, wanted in zip(ctx.masters, of_products, wants, strict=False)
        ]
        return gradient_x, gradient_gain_I, None, *returned, *[None] * len(weights)


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_PI: Tensor, up_PI: Tensor, master_OI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(gate_PI, up_PI, weight_OI)
        ctx.master_OI = master_OI
        return F.linear(swiglu(gate_PI, up_PI), weight_OI)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        gate_PI, up_PI, weight_OI = ctx.saved_tensors
        product_PI = gradients[0] @ weight_OI
        # In place, for these are the largest of all activations, and nobody reads them again.
        swiglu_backward_(gate_PI, up_PI, product_PI)
        wants_weight = ctx.needs_input_grad[2]
        gradient_OI = _add_to_gradient(ctx.master_OI, gradients[0], product_PI) if wants_weight else None
        return gate_PI, up_PI, gradient_OI, None


def _add_to_gradient(master_OI: Tensor, gradient: Tensor, x: Tensor) -> Tensor | None:
    """Adds to the master's gradient or begins it in its place; without either returns what belongs there."""
    gradient_OP, x_PI = gradient.flatten(0, -2).t(), x.flatten(0, -2)
    wide: Any = {"out_dtype": master_OI.dtype} if gradient.is_cuda and gradient.dtype != master_OI.dtype else {}
    total_OI = master_OI.grad
    place_OI: Any = getattr(master_OI, "gradient_place", None)
    if total_OI is None and place_OI is None:
        return torch.mm(gradient_OP, x_PI, **wide).to(master_OI.dtype)
    if total_OI is None:
        master_OI.grad = place_OI
        if wide or gradient.dtype == master_OI.dtype:
            torch.mm(gradient_OP, x_PI, **wide, out=place_OI)
        else:
            place_OI.copy_(gradient_OP @ x_PI)
    elif wide or gradient.dtype == master_OI.dtype:
        torch.addmm(total_OI, gradient_OP, x_PI, **wide, out=total_OI)
    else:
        total_OI.add_(gradient_OP @ x_PI)
    return None
