"""The norms' backward passes on CUDA, against autograd in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dflash_dist.drafter import fused
from dflash_dist.drafter.fused import RMSNorm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: run `make test-gpu` on a GPU machine"),
]
EPS = 1e-6


def assert_near(ours: Tensor, exact: Tensor) -> None:
    """Not further away than the rounding of its type."""
    limit = 2.5e-3 if ours.dtype == torch.bfloat16 else 1e-6
    assert (ours.double() - exact).norm() <= limit * exact.norm(), float((ours.double() - exact).norm() / exact.norm())


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(2000, 5120), (3, 7, 96), (1, 64)], ids=str)
@pytest.mark.parametrize("with_residual", [True, False])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, with_residual: bool) -> None:
    x, gradient, residual = (random(*shape, dtype=dtype, seed=seed) for seed in range(3))
    weight = random(shape[-1], seed=3)
    gradient_x, gradient_weight, normed = fused.rms_norm_backward(
        x, weight, EPS, gradient, residual if with_residual else None
    )
    exact_x, exact_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    exact = torch.nn.functional.rms_norm(exact_x, shape[-1:], exact_weight, EPS)
    exact.backward(gradient.double())
    assert exact_x.grad is not None and exact_weight.grad is not None
    assert_near(normed, exact.detach())
    assert_near(gradient_x, exact_x.grad + residual.double() if with_residual else exact_x.grad)
    assert_near(gradient_weight, exact_weight.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("positions", "heads", "size"), [(3000, 8, 128), (37, 3, 16), (50, 2, 96)])
def test_norm_and_rotation(positions: int, heads: int, size: int, dtype: torch.dtype) -> None:
    """A head of 96 is none of the kernel's."""
    norm = RMSNorm(size, EPS).cuda()
    with torch.no_grad():
        norm.weight.copy_(random(size, seed=3))
    x = random(positions, heads, size, dtype=dtype).requires_grad_()
    angles = random(positions, size // 2, seed=1)
    gradient = random(positions, heads, size, dtype=dtype, seed=2)
    norm.rotated(x, (angles.cos(), angles.sin())).backward(gradient)
    exact_x, exact_weight = (t.detach().double().requires_grad_() for t in (x, norm.weight))
    fused.norm_rotate.__wrapped__(  # type: ignore[attr-defined]
        exact_x, exact_weight, EPS, angles.cos().double(), angles.sin().double()
    ).backward(gradient.double())
    for ours, exact in ((x.grad, exact_x.grad), (norm.weight.grad, exact_weight.grad)):
        assert ours is not None and exact is not None
        assert_near(ours, exact)
