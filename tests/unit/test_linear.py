"""The rule of casts: which changes of a weight a kept copy in the compute type follows, and when one is kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dflash_dist.drafter.linear import Linear, casting_once


def product(keep_cast: bool = True) -> Linear:
    """Of random weights."""
    product = Linear(8, 4)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        nn.init.normal_(product.weight)
    product.keep_cast = keep_cast
    return product


def cast_of(product: Linear, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The weight that a product under autocast takes."""
    with torch.autocast("cpu", dtype):
        return product.cast_weight()


def load(product: Linear) -> None:
    product.load_state_dict({"weight": product.weight.detach() + 1})


def load_another(product: Linear) -> None:
    product.load_state_dict({"weight": product.weight.detach() + 1}, assign=True)


def move(product: Linear) -> None:
    """As `product.to` does where the device or type is another."""
    product.weight.data = product.weight.detach() + 1


def in_inference(product: Linear) -> None:
    with torch.inference_mode():
        product.weight.mul_(2)


def step(product: Linear) -> None:
    product.weight.grad = torch.ones(4, 8)
    torch.optim.AdamW(product.parameters(), lr=0.1, foreach=True).step()


@pytest.mark.parametrize("change", [load, load_another, move, in_inference, step], ids=lambda change: change.__name__)
def test_a_weight_that_was_changed_or_replaced_is_cast_anew(change: Callable[[Linear], None]) -> None:
    changed = product()
    before = cast_of(changed)
    assert cast_of(changed) is before, "the copy is kept"
    for _ in range(2):  # a new parameter's count may be that of the one before
        change(changed)
        after = cast_of(changed)
        assert torch.equal(after, changed.weight.detach().bfloat16()) and not torch.equal(after, before)


def test_a_weight_that_is_changed_with_its_copy_is_not_cast_anew() -> None:
    changed = product()
    cast_OI = cast_of(changed)
    changed.weight.detach().numpy()[:] += 1.0  # past autograd's count, as a kernel of our own does
    cast_OI.copy_(changed.weight.detach())
    assert cast_of(changed) is cast_OI and torch.equal(cast_OI, changed.weight.detach().bfloat16())


def test_another_compute_type_gets_another_copy() -> None:
    kept = product()
    cast_of(kept)
    assert torch.equal(cast_of(kept, torch.float16), kept.weight.detach().half())
    assert torch.equal(cast_of(kept), kept.weight.detach().bfloat16())
    assert torch.equal(kept.cast_weight(), kept.weight.detach()), "outside autocast there is none"


def test_inference_mode_leaves_no_copy_that_training_could_not_use() -> None:
    kept = product()
    with torch.inference_mode():
        cast_of(kept)
    assert kept.cast is None
    training = cast_of(kept)
    with torch.inference_mode():
        assert cast_of(kept) is training
        cast_of(kept, torch.float16)
    assert kept.cast is training and not training.is_inference()


def test_casting_once_ends_with_its_context_and_leaves_the_optimizers_copies_alone() -> None:
    model = nn.ModuleList([product(), product(keep_cast=False)])
    kept, passing = model
    assert isinstance(kept, Linear) and isinstance(passing, Linear)
    cast_OI = cast_of(kept)
    assert cast_of(passing) is not cast_of(passing)
    with casting_once(model):
        assert cast_of(passing) is cast_of(passing)
        assert cast_of(kept) is cast_OI
    assert passing.cast is None and not passing.keep_cast
    assert cast_of(kept) is cast_OI and kept.keep_cast
