"""One rank of a run, from process start to its end: groups, roles, warm-up, loop."""

from __future__ import annotations

import datetime
import os
import signal
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from dflash_dist.channel import ReceiveChannel, SendChannel, WaitClock, open_pair_groups, ring
from dflash_dist.config import Config
from dflash_dist.drafter.model import DFlashDrafter
from dflash_dist.errors import UserError
from dflash_dist.export.plain import load_drafter
from dflash_dist.target.capture import TargetForward
from dflash_dist.target.load import load_ends
from dflash_dist.topology import Topology
from dflash_dist.train.checkpoint import newest_checkpoint
from dflash_dist.train.context import RankContext
from dflash_dist.train.control import Control
from dflash_dist.train.drafter_loop import drafter_loop, warm_up
from dflash_dist.train.inputs import resolve_inputs
from dflash_dist.train.metrics import MetricsWriter
from dflash_dist.train.optimizer import Optimizer
from dflash_dist.train.report import StepReports
from dflash_dist.train.sources import ChannelSource, FeatureSource, LocalSource
from dflash_dist.train.target_loop import load_documents, message_sizes, target_loop
from dflash_profiling.record import TraceWindow

FLEX_MIN_HEAD_DIM = 16
"""Compiled flex attention takes no smaller heads."""
START_TIMEOUT = datetime.timedelta(minutes=30)
"""The other ranks may wait this long for a target of tens of GiB to be read."""


def run_rank(
    config: Config,
    topology: Topology,
    device_type: str,
    run_folder: Path,
    signals: tuple[signal.Signals, ...],
    begin: Callable[[], None],
) -> int:
    """Plays this process's part in a world that torchrun started, until the run is over or stopped; returns its rank.

    Each of `signals` asks for a checkpoint and an orderly end. Rank 0 calls `begin` before the others go on.
    """
    device = _device(device_type)
    store, rank, world_size = next(rendezvous("env://", timeout=START_TIMEOUT))
    if world_size != topology.world_size:
        raise UserError(f"topology {topology} has {topology.world_size} ranks, but torchrun started {world_size}")
    control = Control(dist.PrefixStore("control", store), rank, topology)
    control.listen(signals)
    if rank == 0:
        begin()
    control.agree_on("begin", "")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=dist.PrefixStore("groups", store), rank=rank, world_size=world_size, timeout=START_TIMEOUT
    )
    context = _context(config, topology, rank, device, run_folder, control)
    control.agree_on("schedule", context.schedule.fingerprint())
    clock = WaitClock(device)
    try:
        if topology.drafter_of(rank) is None:
            _run_target(context, clock)
        else:
            _run_drafter(context, clock)
    finally:
        context.trace.close()
    dist.barrier()
    dist.destroy_process_group()
    return rank


def _device(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def _context(
    config: Config, topology: Topology, rank: int, device: torch.device, run_folder: Path, control: Control
) -> RankContext:
    inputs = resolve_inputs(config, topology)
    checkpoint = newest_checkpoint(run_folder / "checkpoints")
    control.agree_on("resumed step", str(checkpoint.step if checkpoint else 0))
    drafter_ranks = sorted({topology.drafter_rank(d) for d in range(topology.drafters)})
    return RankContext(
        config=config,
        topology=topology,
        rank=rank,
        device=device,
        run_folder=run_folder,
        target_folder=inputs.target_folder,
        store=inputs.store,
        schedule=inputs.schedule,
        drafter=inputs.drafter,
        control=control,
        trace=TraceWindow(
            run_folder / "profile",
            rank=rank,
            role=topology.role(rank),
            start_step=config.profile.start_step,
            steps=config.profile.steps,
            metadata={"topology": str(topology), "pairs": topology.pairs(), "schedule": inputs.schedule.fingerprint()},
        ),
        drafter_group=_connected_group(drafter_ranks, rank, device) if topology.drafters > 1 else None,
        pair_groups=open_pair_groups(topology, rank, device),
        start_step=checkpoint.step if checkpoint else 0,
    )


def _connected_group(ranks: list[int], rank: int, device: torch.device) -> dist.ProcessGroup:
    """A group whose communicator is set up already: later it would have to be while receives wait on the device."""
    group = dist.new_group(ranks)
    assert group is not None
    if rank in ranks:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        if device.type == "cuda":
            torch.cuda.synchronize()  # sync: start-up only
    return group


def _run_target(context: RankContext, clock: WaitClock) -> None:
    forward = _target_forward(context)
    settings = context.config.schedule
    channels = {}
    for drafter in range(context.topology.drafters):
        peer = context.topology.drafter_rank(drafter)
        slots = ring(settings.ring_slots, settings.token_budget, forward.features, forward.dtype, context.device)
        channels[drafter] = SendChannel(peer, context.pair_groups[context.rank, peer], slots, clock)
    if context.device.type == "cuda":
        _warm_up_target(context, forward, channels)
    dist.barrier()
    target_loop(context, forward, channels, clock)


def _target_forward(context: RankContext) -> TargetForward:
    return TargetForward(
        context.target_folder,
        context.config.target,
        context.drafter.target_layer_ids,
        context.device,
        last_state=context.objective.needs_last_state,
    )


def _warm_up_target(context: RankContext, forward: TargetForward, channels: dict[int, SendChannel]) -> None:
    """Compiles and tunes the target's kernels on the first batch, before the first message."""
    work = next((w for w in context.schedule.work(context.start_step) if w.target == context.rank), None)
    if work is not None:
        slot_MF = next(iter(channels.values())).acquire()
        forward.capture(*load_documents(context.store, work), slot_MF[: work.tokens])


def _run_drafter(context: RankContext, clock: WaitClock) -> None:
    config, device = context.config, context.device
    checkpoint = newest_checkpoint(context.run_folder / "checkpoints")
    model = _model(context, fresh=checkpoint is None)
    ends = load_ends(context.target_folder, config.target, device)
    optimizer = Optimizer(model, config.train, context.schedule.total_steps, context.drafter_group)
    if device.type == "cuda":
        warm_up(context, model, ends)
        optimizer.warm_up()
    if checkpoint:
        checkpoint.load_weights(model)
        optimizer.load_state_dict(checkpoint.load_moments())
    forward = None
    if context.topology.shared:
        forward = _target_forward(context)
    dist.barrier()
    source: FeatureSource = (
        LocalSource(forward, config.schedule.token_budget, device)
        if forward
        else ChannelSource(_receive_channels(context, ends.head_weight.dtype, clock))
    )
    writer = None
    if context.leads:
        writer = MetricsWriter(context.run_folder, context.schedule.total_steps)
        writer.truncate_after(context.start_step)
    reports = StepReports(context, model, optimizer, source, clock, writer)
    try:
        drafter_loop(context, source, model, ends, optimizer, reports)
    finally:
        if writer:
            writer.close()
    if isinstance(source, ChannelSource):
        _drain(context, source)


def _model(context: RankContext, fresh: bool) -> DFlashDrafter:
    """The drafter on its device; the weights of a run that goes on come from its checkpoint."""
    settings = context.config.train
    attention = settings.attention
    if attention == "auto":
        flex = context.device.type == "cuda" and context.drafter.head_dim >= FLEX_MIN_HEAD_DIM
        attention = "flex" if flex else "dense"
    model = DFlashDrafter(context.drafter, attention=attention)
    if settings.init_from is not None and fresh:
        model.load_state_dict(load_drafter(Path(settings.init_from)).state_dict())
    else:
        model.init_weights(settings.seed)
    return model.to(context.device)


def _receive_channels(context: RankContext, dtype: torch.dtype, clock: WaitClock) -> dict[int, ReceiveChannel]:
    settings, drafter = context.config.schedule, context.topology.drafter_of(context.rank)
    assert drafter is not None
    features = context.drafter.hidden_size * context.objective.captured_states(context.drafter)
    channels = {}
    for target in range(context.topology.targets):
        peer = context.topology.target_rank(target)
        sizes = message_sizes(context, target, drafter)
        slots = ring(settings.ring_slots, settings.token_budget, features, dtype, context.device)
        channels[target] = ReceiveChannel(peer, context.pair_groups[peer, context.rank], slots, clock, sizes)
    return channels


def _drain(context: RankContext, source: ChannelSource) -> None:
    """Takes what target ranks had sent ahead when the run was stopped, until the last of them knows and has ended."""
    drafter = context.topology.drafter_of(context.rank)
    while True:
        done = context.control.targets_done()  # read first: what is sent before it is counted below
        for target, channel in source.channels.items():
            progress = context.control.progress(context.topology.target_rank(target))
            while channel.received < progress.get(f"sent/{drafter}", 0):
                channel.receive()
                channel.release()
        if done:
            for channel in source.channels.values():
                channel.finish()
            return
        context.control.pause()
