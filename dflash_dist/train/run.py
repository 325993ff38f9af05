"""One rank of a run, from process start to its end: groups, roles, warm-up, loop."""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dflash_dist.channel import ReceiveChannel, SendChannel, WaitClock, open_pair_groups, ring
from dflash_dist.config import Config, config_lines
from dflash_dist.drafter.model import DFlashDrafter
from dflash_dist.errors import UserError
from dflash_dist.export.plain import load_drafter
from dflash_dist.installed import version_of
from dflash_dist.target.capture import TargetForward
from dflash_dist.target.load import load_ends
from dflash_dist.topology import Topology
from dflash_dist.train.checkpoint import Checkpoint, drafter_tensors, newest_checkpoint
from dflash_dist.train.checkpoint_writer import CheckpointWriter
from dflash_dist.train.context import RankContext
from dflash_dist.train.control import Control
from dflash_dist.train.drafter_loop import drafter_loop, warm_up, zero_source
from dflash_dist.train.gradients import shard_drafter
from dflash_dist.train.inputs import resolve_inputs
from dflash_dist.train.liveness import Watch
from dflash_dist.train.metrics import MetricsWriter
from dflash_dist.train.optimizer import Optimizer
from dflash_dist.train.rendezvous import START_TIMEOUT, World, join_world
from dflash_dist.train.report import StepReports
from dflash_dist.train.sources import ChannelSource, FeatureSource, FilledSource, LocalSource
from dflash_dist.train.target_loop import load_documents, message_sizes, target_loop
from dflash_dist.wire import Unpacker, WireFormat
from dflash_profiling.record import TraceWindow
from dflash_profiling.stream import Stream

FLEX_MIN_HEAD_DIM = 16
"""Compiled flex attention takes no smaller heads."""


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
    parent = os.getppid()
    world = join_world(topology)
    watch = Watch(world.watch_store, world.rank, topology, parent)
    control = Control(dist.PrefixStore("control", world.store), world.rank)
    control.publish()
    control.listen(signals)
    watch.start(orphaned=control.ask_stop)
    try:
        control.agree_on_command([f"--run: {run_folder.name}", *config_lines(config)])
        if world.rank == 0:
            begin()
        control.agree_on("begin", "")
        _init_process_group(world, topology, device)
        context = _context(config, topology, world.rank, device, run_folder, control, watch)
        control.agree_on("schedule", context.schedule.fingerprint())
        _play(context)
    except Exception as error:
        watch.failed(error)
        raise
    watch.stop()
    return world.rank


def _device(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def _init_process_group(world: World, topology: Topology, device: torch.device) -> None:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("groups", world.store),
        rank=world.rank,
        world_size=topology.world_size,
        timeout=START_TIMEOUT,
    )


def _play(context: RankContext) -> None:
    """This rank's role, to the end of the run."""
    clock = WaitClock(context.device)
    stream = _stream(context, clock)
    try:
        if context.topology.drafter_of(context.rank) is None:
            _run_target(context, clock)
        else:
            _run_drafter(context, clock)
    except Exception as error:
        context.watch.failed(error)
        raise
    finally:
        context.trace.close()
        if stream is not None:
            stream.close()
    dist.barrier()
    dist.destroy_process_group()


def _trace_facts(config: Config, topology: Topology, device: torch.device) -> dict[str, Any]:
    """What each trace says of the run and the machine; nothing that names either."""
    packages = ("torch", "triton", "transformers", "flash-linear-attention", "causal-conv1d", "flash-attn-4")
    return {
        "topology": str(topology),
        "pairs": topology.pairs(),
        "node": int(os.environ.get("GROUP_RANK", 0)),
        "token_budget": config.schedule.token_budget,
        "batches_per_step": config.schedule.batches_per_step,
        "versions": {name: version_of(name) for name in packages} | {"cuda": torch.version.cuda},
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }


def _stream(context: RankContext, clock: WaitClock) -> Stream | None:
    """What this rank's process and GPU are like, a line a second in the run's folder, where the config asks for it."""
    if not context.config.profile.stream:
        return None
    path = context.run_folder / "profile" / "stream" / f"rank{context.rank}.jsonl"
    device = context.device.index if context.device.type == "cuda" else None
    stream = Stream(path, device, facts=_StreamFacts(context.control, clock, context.trace))
    stream.start()
    return stream


def _collect_as_usual() -> None:
    """After start-up, whose objects stay and need not be looked at again; cycles of the loop may hold tensors."""
    gc.freeze()
    gc.set_threshold(2_000)


class _StreamFacts:
    """This rank's step, progress as the loop last told it, and how long it waited for each peer since the last call.

    Called on the stream's thread: it copies what the loop has read already, and asks neither the store nor a device.
    """

    def __init__(self, control: Control, clock: WaitClock, trace: TraceWindow) -> None:
        self._control, self._clock, self._trace = control, clock, trace
        self._last_s: dict[int, float] = {}

    def __call__(self) -> dict[str, Any]:
        seconds = dict(self._clock.seconds_of_peer)
        waits_ms = {peer: round(1000 * (now_s - self._last_s.get(peer, 0.0)), 3) for peer, now_s in seconds.items()}
        self._last_s = seconds
        total_ms = round(sum(waits_ms.values()), 3)
        step = {} if self._trace.step is None else {"step": self._trace.step}
        waits = {"wait_ms": total_ms, "wait_ms_of_rank": waits_ms}
        return {**step, **self._control.published, **self._control.noted, **waits}


def _context(
    config: Config,
    topology: Topology,
    rank: int,
    device: torch.device,
    run_folder: Path,
    control: Control,
    watch: Watch,
) -> RankContext:
    inputs = resolve_inputs(config, topology, device.type, functools.partial(control.from_rank_0, "costs"))
    checkpoint = newest_checkpoint(run_folder / "checkpoints")
    control.agree_on("resumed step", str(checkpoint.step if checkpoint else 0))
    drafter_ranks = [topology.drafter_rank(d) for d in range(topology.num_drafters)]
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
        watch=watch,
        trace=TraceWindow(
            run_folder / "profile",
            rank=rank,
            role=topology.role(rank),
            start_step=config.profile.start_step,
            steps=config.profile.steps,
            stack_steps=config.profile.stack_steps,
            # Messages go over gloo on the CPU, and checkpoints of a sharded drafter are put together over it.
            all_threads=device.type == "cuda" and config.train.shard == "none",
            metadata=_trace_facts(config, topology, device) | {"schedule": inputs.schedule.fingerprint()},
        ),
        drafter_group=_connected_group(drafter_ranks, rank, device),
        host_group=_connected_group(drafter_ranks, rank, torch.device("cpu")),
        pair_groups=open_pair_groups(topology, rank, device, START_TIMEOUT),
        start_step=checkpoint.step if checkpoint else 0,
    )


def _connected_group(ranks: list[int], rank: int, device: torch.device) -> dist.ProcessGroup | None:
    """A group whose communicator is set up already: later it would have to be while receives wait on the device.

    None where there is but one rank.
    """
    if len(ranks) == 1:
        return None
    group = dist.new_group(ranks, START_TIMEOUT, backend="gloo" if device.type == "cpu" else None)
    assert group is not None
    if rank in ranks:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        if device.type == "cuda":
            torch.cuda.synchronize()  # sync: start-up only
    return group


def _run_target(context: RankContext, clock: WaitClock) -> None:
    forward = _target_forward(context)
    channels = {}
    for drafter in context.topology.drafters_beside(context.target_number):
        peer = context.topology.drafter_rank(drafter)
        slots = _ring(context, forward.wire)
        channels[drafter] = SendChannel(peer, context.pair_groups[context.rank, peer], slots, clock)
    if context.device.type == "cuda":
        _warm_up_target(context, forward, channels)
    dist.barrier()
    _collect_as_usual()
    target_loop(context, forward, channels, clock)


def _target_forward(context: RankContext) -> TargetForward:
    forward = TargetForward(
        context.target_folder,
        context.config.target,
        context.drafter.target_layer_ids,
        context.device,
        last_state=context.objective.needs_last_state,
        wire="full" if context.topology.shared else context.config.schedule.wire,
    )
    if forward.not_packed_because and context.target_number == 0:
        print(f"target: documents are padded to rows, since {forward.not_packed_because}", file=sys.stderr)
    return forward


def _warm_up_target(context: RankContext, forward: TargetForward, channels: dict[int, SendChannel]) -> None:
    """Compiles and tunes the target's kernels on the first batch, before the first message."""
    work = next(
        (w for w in context.schedule.work(context.start_step) if w.target == context.target_number and not w.is_filler),
        None,
    )
    if work is not None:
        slot_MF = next(iter(channels.values())).acquire()
        forward.capture(*load_documents(context.store, work), slot_MF[: work.tokens])


def _run_drafter(context: RankContext, clock: WaitClock) -> None:
    config, device = context.config, context.device
    checkpoint = newest_checkpoint(context.run_folder / "checkpoints")
    model = _model(context, fresh=checkpoint is None)
    ends = load_ends(context.target_folder, config.target, device)
    optimizer = Optimizer(model, config.train, context.schedule.total_steps, context.drafter_group)
    tensors = drafter_tensors(model) | optimizer.state_tensors()
    if checkpoint:
        _resume(context, checkpoint, tensors)
    checkpoints = _checkpoint_writer(context, tensors)
    if device.type == "cuda":
        warm_up(context, model, ends)
    wire = WireFormat(
        config.schedule.wire,
        context.objective.captured_states(context.drafter),
        context.drafter.hidden_size,
        ends.head_weight.dtype,
    )
    forward = unpacker = None
    if context.topology.shared:
        forward = _target_forward(context)
    elif wire.kind == "fp8":
        unpacker = Unpacker(wire, config.schedule.token_budget, device)
    dist.barrier()
    source: FeatureSource = (
        LocalSource(forward, config.schedule.token_budget, device)
        if forward
        else ChannelSource(_receive_channels(context, wire, clock), unpacker)
    )
    writer = None
    if context.leads:
        writer = MetricsWriter(context.run_folder, context.schedule.total_steps)
        writer.truncate_after(context.start_step)
    reports = StepReports(context, optimizer, source, clock, writer, checkpoints)
    try:
        _collect_as_usual()
        drafter_loop(context, FilledSource(source, zero_source(context, ends)), model, ends, optimizer, reports)
        reports.finish()
    except Exception as error:
        context.watch.failed(error)  # before what follows, which may wait for what the error left behind
        raise
    finally:
        if checkpoints:
            checkpoints.close()
        if writer:
            writer.close()
    if isinstance(source, ChannelSource):
        _drain(context, source)


def _resume(context: RankContext, checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
    """Takes the state from the checkpoint; UserError where the schedule would not go on where it stopped."""
    schedule = context.schedule
    tokens = int(schedule.tokens_after[min(checkpoint.step, schedule.total_steps)])
    if tokens != checkpoint.tokens:
        raise UserError(
            f"checkpoint {checkpoint.folder} was written after {checkpoint.tokens} tokens, but the schedule now has "
            f"{tokens} by that step: another dflash-dist packed the batches; go on with that one, or begin anew with "
            "--run NAME"
        )
    checkpoint.load(tensors)


def _checkpoint_writer(context: RankContext, tensors: dict[str, Tensor]) -> CheckpointWriter | None:
    """On the first drafter rank, or where the drafter is sharded on each of them."""
    sharded = any(isinstance(tensor, DTensor) for tensor in tensors.values())
    if not sharded and not context.leads:
        return None
    keep = context.config.train.keep_checkpoints
    return CheckpointWriter(context.run_folder / "checkpoints", tensors, keep, context.host_group if sharded else None)


def _model(context: RankContext, fresh: bool) -> DFlashDrafter:
    """The drafter on its device; the weights of a run that goes on come from its checkpoint."""
    settings = context.config.train
    attention = settings.attention
    if attention == "auto":
        flex = context.device.type == "cuda" and context.drafter.head_dim >= FLEX_MIN_HEAD_DIM
        attention = "flex" if flex else "dense"
    model = DFlashDrafter(context.drafter, attention=attention)
    model.activation_checkpointing = settings.activation_checkpointing
    if settings.init_from is not None and fresh:
        model.load_state_dict(load_drafter(Path(settings.init_from)).state_dict())
    else:
        model.init_weights(settings.seed)
    if settings.shard == "fsdp" and context.drafter_group is not None:
        shard_drafter(model, context.drafter_group, context.device)
    return model.to(context.device)


def _ring(context: RankContext, wire: WireFormat) -> list[torch.Tensor]:
    settings = context.config.schedule
    return ring(settings.ring_slots, settings.token_budget, wire.row_size, wire.slot_dtype, context.device)


def _receive_channels(context: RankContext, wire: WireFormat, clock: WaitClock) -> dict[int, ReceiveChannel]:
    drafter = context.drafter_number
    channels = {}
    for target in context.topology.targets_beside(drafter):
        peer = context.topology.target_rank(target)
        sizes = message_sizes(context, target, drafter)
        slots = _ring(context, wire)
        channels[target] = ReceiveChannel(peer, context.pair_groups[peer, context.rank], slots, clock, sizes)
    return channels


def _drain(context: RankContext, source: ChannelSource) -> None:
    """Takes what target ranks had sent ahead when the run was stopped, until the last of them knows and has ended."""
    drafter = context.drafter_number
    targets = [context.topology.target_rank(target) for target in source.channels]
    while True:
        done = context.control.are_done(targets)  # read first: what is sent before it is counted below
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
