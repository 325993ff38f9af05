"""A step's gradients on the drafter ranks, and how the ranks' sums come together.

Both forms keep what a rank holds of the gradient in one flat fp32 buffer: one norm, one scaling, no allocation.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from dflash_dist.drafter.model import DFlashDrafter

BUCKET_BYTES = 64 * 2**20
"""A bucket is closed when it has reached this size: large enough to use the links, small enough to start early."""
# torch 2.13 warns of the older name.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Gradients(Protocol):
    """What the optimizer needs of a step's gradients."""

    flat: Tensor
    """fp32 [n]: what this rank holds of the gradient."""
    masters: list[Tensor]
    """fp32: what this rank holds of each parameter, with its part of `flat` as `.grad`."""

    def zero(self) -> None:
        """Begins a step."""

    def overlap(self, last: bool) -> Any:
        """A context for a backward call; `last`: the last of this rank in the step."""

    def own_is_finite(self) -> Tensor:
        """fp32 scalar on the device: 1 where what this rank's batches of the step have given so far is finite."""

    def reduce(self) -> None:
        """Ends the sum over ranks. Every rank must call it once a step, at the same place among its collectives."""

    def norm(self) -> Tensor:
        """fp32 scalar: the norm of the whole gradient, alike on all ranks."""


class Bucket(NamedTuple):
    """Gradients that are summed over ranks together."""

    part: Tensor
    """Of the flat gradient."""
    masters: list[Tensor]


class ReplicatedGradients:
    """The whole gradient on every rank, summed by all-reduces that overlap the backward pass of the last batch.

    `flat` is cut into buckets in the order in which a backward pass completes the parameters. All ranks reduce the
    buckets in this order, whatever their own batches gave, so no rank waits for one that another has not begun.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.masters: list[Tensor] = list(parameters)
        self.flat = flat_gradient(self.masters)
        self._matrices = [master for master in self.masters if master.dim() > 1]
        self._vector_gradients = [m.grad for m in self.masters if m.dim() == 1 and m.grad is not None]
        for master in self._matrices:
            master.gradient_place = master.grad  # type: ignore[attr-defined]
        self._buckets: list[Bucket] = []
        self._nodes: list[Any] = []
        if group is not None:
            self._cut_buckets(parameters)
        self._overlapping = False
        self._begin()

    def _cut_buckets(self, parameters: Sequence[nn.Parameter]) -> None:
        begin = end = first = 0
        for number, parameter in enumerate(parameters, 1):
            # The node behind the parameter, since a product may have added to the gradient by itself: autograd comes
            # here when all have run, and brings none. Kept, or the next graph would have another.
            node: Any = parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            node.register_hook(functools.partial(self._complete, len(self._buckets)))
            self._nodes.append(node)
            end += parameter.numel()
            if (end - begin) * self.flat.itemsize >= BUCKET_BYTES or end == len(self.flat):
                self._buckets.append(Bucket(self.flat[begin:end], self.masters[first:number]))
                begin, first = end, number

    def zero(self) -> None:
        """See Gradients. A matrix's place keeps what it holds until the step's first product overwrites it."""
        for master in self._matrices:
            master.grad = None
        torch._foreach_zero_(self._vector_gradients)
        self._begin()

    def _begin(self) -> None:
        self._missing = [len(bucket.masters) for bucket in self._buckets]
        self._own_sums: list[Tensor] = []
        self._works: list[Any] = []

    @contextmanager
    def overlap(self, last: bool) -> Iterator[None]:
        """See Gradients. Within that of the last batch there must be one backward call, with every parameter.

        Gradients of earlier calls would be added to buckets that are being summed already.
        """
        self._overlapping = last
        try:
            yield
        finally:
            self._overlapping = False
        if last:
            self._start_rest()

    def own_is_finite(self) -> Tensor:
        """See Gradients."""
        self._settle(self.masters)
        own_sum = torch.stack(self._own_sums).sum() if self._own_sums else self.flat.sum()
        return own_sum.isfinite().float()

    def reduce(self) -> None:
        """See Gradients."""
        self._start_rest()
        for work in self._works:
            work.wait()  # on NCCL the stream waits, not the host

    def norm(self) -> Tensor:
        """See Gradients."""
        self._settle(self.masters)
        return torch.linalg.vector_norm(self.flat)

    def _settle(self, masters: Sequence[Tensor]) -> None:
        """Puts in its place what autograd put elsewhere, and 0 where the step gave nothing."""
        for master in masters:
            place: Any = getattr(master, "gradient_place", master.grad)
            if master.grad is None:
                place.zero_()
            elif master.grad is not place:
                place.copy_(master.grad)
            master.grad = place

    def _complete(self, bucket: int, *gradients: Any) -> None:
        """Takes note that a backward pass has given one more gradient of a bucket."""
        if self._overlapping:
            self._missing[bucket] -= 1
            while len(self._works) < len(self._buckets) and not self._missing[len(self._works)]:
                self._start_next()

    def _start_rest(self) -> None:
        while len(self._works) < len(self._buckets):
            self._start_next()

    def _start_next(self) -> None:
        part, masters = self._buckets[len(self._works)]
        self._settle(masters)
        self._own_sums.append(part.sum())  # before the other ranks' gradients come in
        self._works.append(dist.all_reduce(part, group=self._group, async_op=True))


class ShardedGradients:
    """A shard of every gradient on each rank: FSDP sums and scatters them as each batch's backward pass goes on.

    That keeps no whole gradient from batch to batch, for one reduce-scatter more a batch.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[DTensor]) -> None:
        self._group = parameters[0].device_mesh.get_group()
        self.masters = [parameter.to_local().detach().requires_grad_() for parameter in parameters]
        self.flat = flat_gradient(self.masters)
        for parameter, master in zip(parameters, self.masters, strict=True):
            assert master.grad is not None
            parameter.grad = as_sharded(master.grad, parameter)  # FSDP adds to it in place
        self._scatter = _SummingReduceScatter(self.flat.device)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(self._scatter)  # type: ignore[arg-type]  # its class is not public

    def zero(self) -> None:
        """See Gradients."""
        self.flat.zero_()
        self._scatter.own_sum.zero_()

    @contextmanager
    def overlap(self, last: bool) -> Iterator[None]:
        """See Gradients."""
        yield

    def own_is_finite(self) -> Tensor:
        """See Gradients."""
        return self._scatter.own_sum.isfinite().float()

    def reduce(self) -> None:
        """See Gradients."""

    def norm(self) -> Tensor:
        """See Gradients."""
        square = torch.linalg.vector_norm(self.flat).square()
        dist.all_reduce(square, group=self._group)
        return square.sqrt()


class _SummingReduceScatter:
    """FSDP's reduce-scatter, which also adds up what goes into it: this rank's own gradient."""

    def __init__(self, device: torch.device) -> None:
        # Written on FSDP's stream, which waits for ours before and for which ours waits after a backward pass.
        self.own_sum = torch.zeros((), device=device)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer for FSDP."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """Reduces `input_tensor` over the ranks; each gets its part in `output_tensor`."""
        self.own_sum += input_tensor.sum()
        return _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def shard_drafter(model: DFlashDrafter, group: dist.ProcessGroup, device: torch.device) -> None:
    """Leaves each rank of `group` an equal share of every parameter, on `device`; FSDP gathers them for each batch.

    The modules that only the blocks use are a unit in each layer, gathered for that layer alone. The rest is one more
    unit, gathered for the whole batch: the weights of keys and values serve the context and the blocks both, at two
    ends of the forward pass, and a layer that took them along would be gathered twice for it.
    """
    mesh = DeviceMesh.from_group(group, device.type)
    for modules in model.modules_of_blocks():
        fully_shard(modules, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gradients are sums; both, since gloo knows no reduction that divides.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def as_sharded(shard: Tensor, like: DTensor) -> DTensor:
    """This rank's part of something of the parameter `like`'s shape, as the whole of it."""
    return DTensor.from_local(
        shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def flat_gradient(masters: Sequence[Tensor]) -> Tensor:
    """fp32 zeros for the gradients of all `masters`, which become views of it."""
    flat = torch.zeros(sum(m.numel() for m in masters), dtype=torch.float32, device=masters[0].device)
    for master, part in zip(masters, flat.split([m.numel() for m in masters]), strict=True):
        assert master.dtype == torch.float32, "masters are fp32: bf16 ones freeze the norms"
        master.grad = part.view_as(master)
    return flat
