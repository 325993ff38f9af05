"""A step's gradients in their places: what products, autograd and nobody gave, in one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_dist.drafter.linear import Linear
from dflash_dist.train.gradients import ReplicatedGradients

ROWS, INPUTS, OUTPUTS = 5, 6, 3


class Model(nn.Module):
    """Two products and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Linear(INPUTS, OUTPUTS), Linear(INPUTS, OUTPUTS)
        self.gain = nn.Parameter(torch.ones(OUTPUTS))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            for product in (self.first, self.second):
                nn.init.normal_(product.weight)

    def by_product(self, x: Tensor) -> Tensor:
        """A loss whose gradients of the matrices a product adds by itself."""
        return (self.gain * (self.first(x) + self.second(x))).square().sum()

    def by_autograd(self, x: Tensor) -> Tensor:
        """The same, whose gradients all go through autograd."""
        return (self.gain * (F.linear(x, self.first.weight) + F.linear(x, self.second.weight))).square().sum()


def batch(number: int) -> Tensor:
    """Inputs that the number alone decides."""
    return torch.randn(ROWS, INPUTS, generator=torch.Generator().manual_seed(number))


def expected(*numbers: int) -> dict[str, Tensor]:
    """The sum of the batches' gradients by autograd alone."""
    model = Model()
    for number in numbers:
        model.by_autograd(batch(number)).backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def assert_gradient(model: Model, gradients: ReplicatedGradients, gradient: dict[str, Tensor]) -> None:
    """That the flat gradient is this, and every parameter's own a part of it."""
    gradients.norm()
    torch.testing.assert_close(gradients.flat, torch.cat([gradient[n].flatten() for n, _ in model.named_parameters()]))
    storage = gradients.flat.untyped_storage().data_ptr()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.untyped_storage().data_ptr() == storage, name
        torch.testing.assert_close(parameter.grad, gradient[name])


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def gradients(model: Model) -> ReplicatedGradients:
    """At the start of a step, with something of an earlier one in the matrices' places."""
    gradients = ReplicatedGradients(list(model.parameters()), None)
    model.by_product(batch(99)).backward()
    gradients.zero()
    return gradients


@pytest.mark.parametrize("ways", ["product", "autograd", "product autograd", "autograd product product"])
def test_a_step_is_the_sum_of_its_batches_whoever_gives_them(
    model: Model, gradients: ReplicatedGradients, ways: str
) -> None:
    for number, way in enumerate(ways.split()):
        loss = model.by_product if way == "product" else model.by_autograd
        loss(batch(number)).backward()
    assert_gradient(model, gradients, expected(*range(len(ways.split()))))


def test_looking_between_batches_changes_nothing(model: Model, gradients: ReplicatedGradients) -> None:
    for number in range(3):
        model.by_product(batch(number)).backward()
        assert gradients.own_is_finite() == 1
    assert_gradient(model, gradients, expected(0, 1, 2))


def test_what_the_step_did_not_use_has_a_gradient_of_zero(model: Model, gradients: ReplicatedGradients) -> None:
    assert_gradient(model, gradients, expected())
    gradients.zero()
    model.first(batch(0)).sum().backward()
    assert_gradient(model, gradients, {
        "first.weight": batch(0).sum(0).expand(OUTPUTS, -1),
        "second.weight": torch.zeros(OUTPUTS, INPUTS),
        "gain": torch.zeros(OUTPUTS),
    })  # fmt: skip


def test_nothing_of_a_step_that_was_not_finite_or_broke_off_is_left(
    model: Model, gradients: ReplicatedGradients
) -> None:
    (model.by_product(batch(0)) * torch.inf).backward()
    assert gradients.own_is_finite() == 0
    gradients.zero()
    model.by_product(batch(1)).backward()

    def fail(gradient: Tensor) -> None:
        raise RuntimeError("in the middle of a backward pass")

    outputs = model.second(batch(2)), model.first(batch(2))  # the backward pass begins with the last
    outputs[0].register_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"), gradients.overlap(last=True):
        (outputs[0] + outputs[1]).sum().backward()
    gradients.zero()
    model.by_product(batch(3)).backward()
    assert_gradient(model, gradients, expected(3))
