"""The loop of a drafter rank: load, receive, draft, backward, and once a step all-reduce and update."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dflash_dist.data.schedule import Work
from dflash_dist.drafter.anchors import BlockTensors
from dflash_dist.drafter.loss import SUMS, backward_in_groups, sums_in_groups
from dflash_dist.drafter.model import DFlashDrafter
from dflash_dist.drafter.noise import add_noise_, noise_scale
from dflash_dist.target.load import TargetEnds, torch_dtype
from dflash_dist.train.batches import BatchLoader, DrafterBatch, anchors_per_group
from dflash_dist.train.context import RankContext
from dflash_dist.train.optimizer import Optimizer
from dflash_dist.train.prefetch import prefetch
from dflash_dist.train.report import StepReports
from dflash_dist.train.sources import FeatureSource, ZeroSource
from dflash_profiling.record import span

Batches = Iterator[tuple[Work, DrafterBatch]]
HEAD_CHUNK_ROWS = 1024
"""Rows of logits that exist at once: as fast as any more on an H200, whose products come in tiles of 128 rows."""


def drafter_loop(
    context: RankContext,
    source: FeatureSource,
    model: DFlashDrafter,
    ends: TargetEnds,
    optimizer: Optimizer,
    reports: StepReports,
) -> int:
    """Trains until the last step, or the step at which a stop was asked for; returns that step."""
    drafter, schedule, control = context.drafter_number, context.schedule, context.control
    works = (work for work in schedule.work(context.start_step) if work.drafter == drafter)
    loader = BatchLoader(context.store, context.config, context.drafter, context.device)
    batches = Lookahead(prefetch(works, loader.load, depth=2))
    step = context.start_step
    for step in range(context.start_step + 1, schedule.total_steps + 1):
        context.advance_trace(step)
        optimizer.zero_grad()
        noise = noise_scale(context.config.noise, step, schedule.total_steps)
        stats = torch.zeros(context.config.schedule.batches_per_step, len(SUMS) + 1, device=context.device)
        share = -(-schedule.batches_of(step) // context.topology.num_drafters)  # fillers included: alike on all ranks
        for turn, (work, batch) in enumerate(batches.take(step, "train"), start=1):
            context.watch.at(work.place)
            inputs = receive(context, source, model, work, batch, noise)
            sums = train_batch(context, model, ends, inputs, optimizer, last=turn == share)
            source.release(work)
            with span("check_gradient"):
                stats[work.index] = torch.cat([sums, optimizer.gradient_is_finite()[None]])
        with span("all_reduce"):
            optimizer.reduce()
            all_reduce(stats, context.drafter_group)
        with span("optimizer"):
            outcome = optimizer.step(step, stats, stats[:, SUMS.index("weight")].sum())
        with span("report"):
            reports.add(step, stats, outcome)
        if schedule.validates(step):
            reports.add_validation(step, validation_sums(context, source, model, ends, batches, step))
        stop_step = control.stop_step()
        last = step == schedule.total_steps or step == stop_step
        if last or step % context.config.train.checkpoint_every == 0:
            reports.checkpoint(step)
        if last:
            break
        reports.lead_stop(step)
        reports.lead_window(step)
    context.end_trace()
    return step


def warm_up(context: RankContext, model: DFlashDrafter, ends: TargetEnds) -> None:
    """Compiles what a step and a validation run, before the first message, with states of zero.

    On the first batch and, where there is one, on the first filler, whose shape is another. Whosever they are: the
    ranks of a sharded drafter must all run the same number of batches.
    """
    loader = BatchLoader(context.store, context.config, context.drafter, context.device)
    source = zero_source(context, ends)
    for of_fillers in (False, True):
        works = context.schedule.work(context.start_step)
        work = next((w for w in works if w.is_filler == of_fillers), None)
        if work is None:
            continue
        inputs = receive(context, source, model, work, loader.load(work))
        train_batch(context, model, ends, inputs)
        validate_batch(context, model, ends, inputs)


def zero_source(context: RankContext, ends: TargetEnds) -> ZeroSource:
    """Features of zero in the shape and type of the target's."""
    features = context.drafter.hidden_size * context.objective.captured_states(context.drafter)
    return ZeroSource(features, ends.head_weight.dtype, context.device)


class Inputs(NamedTuple):
    """A batch as the loss takes it, on the device."""

    features_TF: Tensor
    positions_T: Tensor
    blocks: BlockTensors
    last_TH: Tensor | None


def receive(
    context: RankContext,
    source: FeatureSource,
    model: DFlashDrafter,
    work: Work,
    batch: DrafterBatch,
    noise: float = 0.0,
) -> Inputs:
    """The batch with its captured states; `noise`: the scale of the noise on the features."""
    with span("receive"):
        features_TF = source.receive(work, batch)
    taps = len(context.drafter.target_layer_ids)
    last_TH = features_TF[:, model.fc.in_features :] if context.objective.needs_last_state else None
    features_TF = features_TF[:, : model.fc.in_features]
    if noise:
        add_noise_(features_TF, context.config.noise, noise, batch.lengths_N.tolist(), batch.noise_seeds, taps)
    return Inputs(features_TF, *batch.to(context.device), last_TH)


def train_batch(
    context: RankContext,
    model: DFlashDrafter,
    ends: TargetEnds,
    inputs: Inputs,
    optimizer: Optimizer | None = None,
    last: bool = False,
) -> Tensor:
    """The sums of `drafter.loss.SUMS` over one batch, fp32; its gradient is added to the parameters' own.

    `last`: of this rank's batches in the step, whose last backward call the optimizer's sums over ranks overlap.
    """

    @contextlib.contextmanager
    def backward(last_group: bool) -> Iterator[None]:
        with span("backward"), optimizer.overlap(last and last_group) if optimizer else contextlib.nullcontext():
            yield

    return backward_in_groups(
        model,
        ends,
        inputs.features_TF,
        inputs.positions_T,
        inputs.blocks,
        anchors_per_group(context.config),
        blocks_per_chunk(model),
        context.objective,
        inputs.last_TH,
        forward=lambda: drafting(context),
        backward=backward,
    )


def validate_batch(context: RankContext, model: DFlashDrafter, ends: TargetEnds, inputs: Inputs) -> Tensor:
    """The sums of `drafter.loss.SUMS` over one batch, fp32."""
    with drafting(context):
        return sums_in_groups(
            model,
            ends,
            inputs.features_TF,
            inputs.positions_T,
            inputs.blocks,
            anchors_per_group(context.config),
            blocks_per_chunk(model),
            context.objective,
            inputs.last_TH,
        )


def blocks_per_chunk(model: DFlashDrafter) -> int:
    """Blocks whose logits exist at once, which have a row for each masked offset."""
    return max(1, HEAD_CHUNK_ROWS // (model.config.block_size - 1))


@contextlib.contextmanager
def drafting(context: RankContext) -> Iterator[None]:
    """For the drafter's forward pass: its span, and its compute type."""
    dtype = torch_dtype(context.config.train.dtype, context.device)
    with (
        span("draft_forward"),
        torch.autocast(context.device.type, dtype, enabled=dtype != torch.float32),
    ):
        yield


@torch.no_grad()
def validation_sums(
    context: RankContext, source: FeatureSource, model: DFlashDrafter, ends: TargetEnds, batches: Lookahead, step: int
) -> Tensor:
    """The sums over all validation batches of all drafter ranks."""
    total = torch.zeros(len(SUMS), device=context.device)
    with span("validation"):
        for work, batch in batches.take(step, "validate"):
            context.watch.at(work.place)
            total += validate_batch(context, model, ends, receive(context, source, model, work, batch))
            source.release(work)
        all_reduce(total, context.drafter_group)
    return total


def all_reduce(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    """Sums `tensor` over the drafter ranks in place; nothing to do where there is one."""
    if group is not None:
        dist.all_reduce(tensor, group=group)


class Lookahead:
    """Batches in the global order, handed out a step at a time."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._next = next(batches, None)

    def take(self, step: int, kind: str) -> Batches:
        """This rank's batches of one step and kind; there may be none."""
        while self._next is not None and (self._next[0].step, self._next[0].kind) == (step, kind):
            yield self._next
            self._next = next(self._batches, None)
