"""From a step's sums on the device to a line of metrics, one step late, so that the host never waits for the GPU."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_dist.channel import WaitClock
from dflash_dist.config import config_text
from dflash_dist.drafter.loss import SUMS
from dflash_dist.errors import RunFailed
from dflash_dist.train.checkpoint_writer import CheckpointWriter
from dflash_dist.train.context import RankContext
from dflash_dist.train.memory import used_memory_gib
from dflash_dist.train.metrics import GpuMeter, MetricsWriter, read_metrics
from dflash_dist.train.optimizer import Optimizer
from dflash_dist.train.run_folder import ENVIRONMENT
from dflash_dist.train.sources import ChannelSource, FeatureSource
from dflash_dist.train.window import Requests, steps_ahead
from dflash_profiling.record import span

LAG_STEPS = 1
"""A step's numbers are read when this many later steps are queued."""


class HostCopy:
    """A tensor on its way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        else:
            self._host = tensor.clone()
        self._made_s = time.perf_counter()

    def get(self) -> Tensor:
        """The values, once they have arrived."""
        if self._event is not None:
            self._event.synchronize()  # sync: of a step that is behind; the GPU has the next one queued
        return self._host

    def seconds_since(self, earlier: HostCopy) -> float:
        """Seconds from an earlier copy to this one, both arrived, in the device's time."""
        if self._event is not None and earlier._event is not None:
            return earlier._event.elapsed_time(self._event) / 1000
        return self._made_s - earlier._made_s


@dataclass
class _Pending:
    step: int
    wait_mark: float
    stats: HostCopy
    outcome: HostCopy
    validation: HostCopy | None = None
    checkpoint: bool = False
    """Whether the state after this step was copied, to be written as soon as the step is known to be sound."""


class StepReports:
    """Checks every step's numbers on all drafter ranks alike; on the first one also writes them, and checkpoints."""

    def __init__(
        self,
        context: RankContext,
        optimizer: Optimizer,
        source: FeatureSource,
        clock: WaitClock,
        writer: MetricsWriter | None,
        checkpoints: CheckpointWriter | None,
    ) -> None:
        """`writer`: on the first drafter rank. `checkpoints`: where this rank holds what no other one writes."""
        self._context, self._optimizer = context, optimizer
        self._writer, self._checkpoints = writer, checkpoints
        self._clock = clock
        self._meter = Meter(context, source, HostCopy(torch.zeros(1, device=context.device)))
        self._channels = source.channels if isinstance(source, ChannelSource) else {}
        self._pending: deque[_Pending] = deque()
        self._sums = torch.zeros(len(SUMS))
        ahead = steps_ahead(context.config, context.topology, LAG_STEPS)
        steps, ranks = context.schedule.total_steps, context.topology.world_size
        self._requests = Requests(context.run_folder, ahead, steps, ranks, context.rank)
        self._begun_with = {
            "drafter": context.drafter.to_json(),
            "config": config_text(context.config),
            "environment": json.loads((context.run_folder / ENVIRONMENT).read_text(encoding="utf-8")),
        }

    def add(self, step: int, stats: Tensor, outcome: Tensor) -> None:
        """Takes a step's [batches, sums + finite flag] and [gradient norm, 1 if skipped]."""
        if self._checkpoints:
            self._checkpoints.poll()
        self._pending.append(_Pending(step, self._clock.mark(), HostCopy(stats), HostCopy(outcome)))
        while len(self._pending) > LAG_STEPS:
            self._finish(self._pending.popleft())

    def add_validation(self, step: int, sums: Tensor) -> None:
        """Takes the sums over the validation batches measured after `step`."""
        assert self._pending[-1].step == step
        self._pending[-1].validation = HostCopy(sums)

    def lead_stop(self, step: int) -> None:
        """Passes a stop request on, if this rank leads."""
        if self._context.leads:
            self._context.control.lead_stop(step, LAG_STEPS)

    def lead_window(self, step: int) -> None:
        """Passes a request for a trace on, if this rank leads and there is one."""
        if self._context.leads and (window := self._requests.take(step)) is not None:
            start_step, request = window
            self._context.control.lead_window(start_step, request.steps, request.stack_steps)

    def checkpoint(self, step: int) -> None:
        """Has the state after `step`, as it is now, written once it is known that every step up to it was sound."""
        assert self._pending[-1].step == step
        self._pending[-1].checkpoint = True
        if self._checkpoints:
            with span("checkpoint"), self._context.watch.pausing():  # the one before may still be on its way
                self._checkpoints.copy()

    def finish(self) -> None:
        """Ends the last step's checks and the last checkpoint."""
        while self._pending:
            self._finish(self._pending.popleft())
        if self._checkpoints:
            with self._context.watch.pausing():
                self._checkpoints.wait()

    def _finish(self, pending: _Pending) -> None:
        """Checks a step's numbers, and writes the row and the checkpoint that are due: a row before each checkpoint.

        So each row covers the steps since the row before it, also where the run was killed between two of them.
        """
        stats, (grad_norm, skipped) = pending.stats.get(), pending.outcome.get().tolist()
        wait_s = self._clock.seconds_at(pending.wait_mark)  # on every rank and step, or its events would pile up
        self._note_ring_depths()
        if skipped:
            self._refuse(pending.step, stats)
        else:
            self._sums += stats[:, : len(SUMS)].sum(0)
        val_loss = means(pending.validation.get())["loss"] if pending.validation else None
        if val_loss is not None and not math.isfinite(val_loss):
            self._refuse_validation(pending.step)
        log_every = self._context.config.train.log_every
        if self._writer is None:
            self._context.control.publish(memory_gib=used_memory_gib(self._context.device))
        elif pending.checkpoint or pending.validation is not None or pending.step % log_every == 0:
            self._write_row(self._writer, pending, val_loss, grad_norm, wait_s)
        if pending.checkpoint and self._checkpoints:
            self._checkpoints.write(self._run_state(pending.step, val_loss))

    def _note_ring_depths(self) -> None:
        """Has the stream say how many messages wait from each target rank."""
        control, topology = self._context.control, self._context.topology
        depths = {}
        for target, channel in self._channels.items():
            rank = topology.target_rank(target)
            on_gloo = self._context.device.type == "cpu"  # NCCL's receives know by themselves
            sent = control.progress(rank).get(f"sent/{self._context.drafter_number}", 0.0) if on_gloo else 0.0
            depths[rank] = channel.depth(sent)
        if depths:
            control.noted = {"ring_depth": sum(depths.values()) / len(depths), "ring_depth_of_rank": depths}

    def _write_row(
        self, writer: MetricsWriter, pending: _Pending, val_loss: float | None, grad_norm: float, wait_s: float
    ) -> None:
        """Writes the line of metrics since the one before."""
        row = {"step": pending.step, **means(self._sums)}
        if pending.validation is not None:
            row["val_loss"] = val_loss
        row |= self._meter.row(pending.step, pending.outcome, wait_s)
        row["learning_rate"] = self._optimizer.learning_rate(pending.step)
        row["grad_norm"] = grad_norm if math.isfinite(grad_norm) else None
        writer.write(row)
        self._sums.zero_()

    def _run_state(self, step: int, val_loss: float | None) -> dict[str, Any]:
        """Where the run stands after `step`, as a checkpoint tells it beside its tensors."""
        schedule, seed = self._context.schedule, self._context.config.train.seed
        epoch = schedule.epoch_of(step)
        return {
            "step": step,
            "val_loss": val_loss if val_loss is not None and math.isfinite(val_loss) else None,
            "scheduler": {
                "kind": "cosine",
                "learning_rate": self._optimizer.learning_rate(step),
                "total_steps": schedule.total_steps,
            },
            "schedule": {
                "epoch": epoch,
                "step": step,
                "batches": int(schedule.batches_after[step]),
                "tokens": int(schedule.tokens_after[step]),
            },
            "keys": {"seed": seed, "epoch": epoch},
            **self._begun_with,
        }

    def _refuse(self, step: int, stats: Tensor) -> None:
        """Names what was not finite; stops the run unless the config says to go on without the step."""
        schedule = self._context.schedule
        loss_bad = ~stats[:, SUMS.index("loss")].isfinite()
        count = schedule.batches_of(step)
        # The flag of a batch tells of the sum so far on its rank: those after the culprit are named with it.
        gradient_bad = stats[:, -1] == 0
        bad = [i for i in range(count) if loss_bad[i]] or [i for i in range(count) if gradient_bad[i]]
        what = "loss" if loss_bad[:count].any() else "gradient"
        where = "; ".join(f"batch {i} (documents {_some(schedule.documents_of(step, i))})" for i in bad) or "all-reduce"
        self._stop_or_warn(
            f"step {step}: the {what} is not finite in {where}",
            "Nothing of that step went into the weights, and no later checkpoint was written",
            "the step was skipped",
        )

    def _refuse_validation(self, step: int) -> None:
        works = [w for w in self._context.schedule.work(step - 1) if (w.step, w.kind) == (step, "validate")]
        works.sort(key=lambda w: w.index)
        where = "; ".join(f"batch {w.index} (documents {_some(w.documents)})" for w in works)
        self._stop_or_warn(
            f"step {step}: the validation loss is not finite over {where}",
            "No later checkpoint was written",
            "it is left out",
        )

    def _stop_or_warn(self, message: str, stopped: str, skipped: str) -> None:
        """Stops the run, or warns of what was skipped, as the config says."""
        if self._context.config.train.not_finite == "stop":
            raise RunFailed(
                f"{message}. {stopped}; lower train.learning_rate, remove the documents, or set train.not_finite=skip"
            )
        if self._context.leads:
            print(f"warning: {message}; {skipped}", file=sys.stderr)


def means(sums: Tensor) -> dict[str, float | None]:
    """Loss, accuracy and estimated tau from the sums of `drafter.loss.SUMS`; None where nothing was counted."""
    loss, weight, correct, valid, accepted, blocks = sums.tolist()
    return {
        "loss": loss / weight if weight else None,
        "accuracy": correct / valid if valid else None,
        "tau_estimate": 1 + accepted / blocks if blocks else None,
    }


class Meter:
    """Rates, waits and memory of the whole world since the last line, as the first drafter rank sees them."""

    def __init__(self, context: RankContext, source: FeatureSource, begin: HostCopy) -> None:
        begin.get()
        self._context, self._last = context, begin
        self._channels = source.channels if isinstance(source, ChannelSource) else {}
        self._gpu = GpuMeter() if context.device.type == "cuda" else None
        rows = read_metrics(context.run_folder)
        self._time_s = rows[-1]["time_s"] if rows else 0.0
        self._last_step, self._last_wait_s = context.start_step, 0.0
        self._last_progress: dict[int, dict[str, float]] = {}
        self._target_wait, self._target_batches_s = 0.0, 0.0

    def row(self, step: int, end: HostCopy, wait_s: float) -> dict[str, Any]:
        """The part of a metrics line that tells of speed and resources.

        `end` was made at the end of the step; `wait_s` are the seconds that this rank has waited until then.
        """
        tokens_after = self._context.schedule.tokens_after
        elapsed_s = max(end.seconds_since(self._last), 1e-9)
        self._time_s += elapsed_s
        tokens = int(tokens_after[step] - tokens_after[self._last_step])
        progress = self._context.control.all_progress(self._context.topology.world_size)
        batches_after = self._context.schedule.batches_after
        batches = int(batches_after[step] - batches_after[self._last_step])
        row = {
            "tokens": int(tokens_after[step]),
            "ktok_s": tokens / elapsed_s / 1000,
            "drafter_wait": (wait_s - self._last_wait_s) / elapsed_s,
            "drafter_batches_s": batches / elapsed_s,
            **self._targets(batches / elapsed_s, progress),
            "memory_gib": self._memory_gib(progress),
            "time_s": self._time_s,
        }
        if self._gpu is not None:
            row |= self._gpu.read()
        self._last, self._last_step, self._last_wait_s = end, step, wait_s
        return row

    def _targets(self, batches_s: float, progress: list[dict[str, float]]) -> dict[str, Any]:
        """What the target ranks published: their waits, their rate, and how many messages wait in the rings."""
        context = self._context
        if context.topology.shared:
            return {"target_wait": 0.0, "ring_depth": 0.0, "target_batches_s": batches_s}
        waits, rates, depths = [], [], []
        for target in range(context.topology.num_targets):
            now = progress[context.topology.target_rank(target)]
            last = self._last_progress.get(target, dict.fromkeys(now, 0.0))
            if now and now["time_s"] > last["time_s"]:
                span_s = now["time_s"] - last["time_s"]
                waits.append((now["wait_s"] - last["wait_s"]) / span_s)
                rates.append((now["batches"] - last["batches"]) / span_s)
            if now:
                self._last_progress[target] = now
            if now and target in self._channels:
                depths.append(self._channels[target].depth(now["sent/0"]))
        if waits:
            self._target_wait, self._target_batches_s = sum(waits) / len(waits), sum(rates)
        return {
            "target_wait": self._target_wait,
            "target_batches_s": self._target_batches_s,
            "ring_depth": sum(depths) / len(depths) if depths else 0.0,
        }

    def _memory_gib(self, progress: list[dict[str, float]]) -> float:
        """The fullest GPU's peak, or on the CPU the memory of all ranks."""
        context = self._context
        published = [facts.get("memory_gib", 0.0) for rank, facts in enumerate(progress) if rank != context.rank]
        every_rank = [used_memory_gib(context.device), *published]
        return max(every_rank) if context.device.type == "cuda" else sum(every_rank)


def _some(documents: Any, most: int = 8) -> str:
    shown = ", ".join(map(str, documents[:most].tolist()))
    return shown + (f" and {len(documents) - most} more" if len(documents) > most else "")
