"""A random world of target and drafter ranks over a simulated network.

Real are the schedule, both ends of the channel, the loops, the sources, the control and the drain. Stand-ins: a target
writes into its slot which document each row is of, and of which batch; a drafter looks whether that is so, several
times while it holds the slot.

Shape suffixes: T tokens of a batch (padded), F = 2 features of a token.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_dist.channel import SendChannel, WaitClock
from dflash_dist.config import load_config
from dflash_dist.data.schedule import Schedule, Work
from dflash_dist.data.store import Documents
from dflash_dist.drafter.loss import SUMS
from dflash_dist.topology import Topology
from dflash_dist.train import drafter_loop, run, target_loop
from dflash_dist.train.context import RankContext
from dflash_dist.train.control import Control
from dflash_dist.train.report import LAG_STEPS
from dflash_dist.train.sources import ChannelSource, FilledSource, ZeroSource
from dflash_dist.wire import WireFormat
from dflash_profiling.record import TraceWindow
from tests.simulated_network import Baton, ControlStore, Link, Meeting, Violation

BUDGET = 12
BASE = load_config("configs/smollm2.yaml", [f"schedule.token_budget={BUDGET}", "train.max_steps=null"])
CPU = torch.device("cpu")
WIRE = WireFormat("full", states=1, hidden=2, dtype=torch.float32)


class Store:
    """A token store whose tokens are their document's number."""

    def __init__(self, lengths: list[int], held_out: list[bool]) -> None:
        self.lengths = np.array(lengths, np.int64)
        self.supervised_counts = self.lengths // 2
        self.held_out = np.array(held_out, bool)

    def read(self, documents: np.ndarray) -> Documents:
        lengths_N = self.lengths[documents]
        tokens_T = np.repeat(documents, lengths_N)
        return Documents(tokens_T, np.ones(len(tokens_T), bool), lengths_N, documents.astype(np.uint64))


class ListedSchedule(Schedule):
    """The schedule, computed once for all ranks of a world."""

    def __init__(self, store: Store, config: Any, topology: Topology) -> None:
        super().__init__(store, config, topology)  # type: ignore[arg-type]
        self._listed = list(super().work())
        self.number_of = {work.place: number for number, work in enumerate(self._listed)}
        """Of each batch, by its place."""

    def work(self, after_step: int = 0) -> Any:
        return (work for work in self._listed if work.step > after_step)


@dataclass
class World:
    """A random world; all of it follows from the seed."""

    seed: int
    topology: Topology = field(init=False)
    schedule: ListedSchedule = field(init=False)
    consumed: dict[int, list[tuple[int, str, int]]] = field(init=False)
    """What each drafter trained on or validated with, in order."""
    last_steps: set[int] = field(init=False)
    """The steps after which the drafters ended."""

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        self.topology = Topology(draw.randint(1, 5), draw.randint(1, 4), shared=False, nodes=draw.choice([1, 1, 1, 2]))
        self.eager, self.copies = draw.random() < 0.3, draw.random() < 0.3
        self.slowness = draw.choice([0.0, 1.0, 2.5])
        lengths = draw.choice([range(1, BUDGET + 1), range(1, 4), [1, BUDGET], [BUDGET]])
        documents = draw.randint(1, 90)
        held_out = [i > 0 and draw.random() < 0.2 for i in range(documents)]
        self.store = Store([draw.choice(lengths) for _ in range(documents)], held_out)
        schedule = replace(
            BASE.schedule,
            batches_per_step=draw.choice([1, 2, 3, 6]) * self.topology.num_drafters,
            max_documents=draw.choice([1, 3, 100]),
            ring_slots=draw.randint(1, 4),
            cost_fixed_us=draw.choice([0.0, 10.0]),
            cost_token_squared_us=draw.choice([0.0, 1.0]),
        )
        train = replace(
            BASE.train,
            epochs=draw.randint(1, 2),
            validate_every=draw.choice([0, 1, 3]),
            validation_batches=draw.randint(1, 6),
            shard=draw.choice(["none", "fsdp"]),
        )
        self.config = replace(BASE, schedule=schedule, train=train)
        self.schedule = ListedSchedule(self.store, self.config, self.topology)
        self.start_step = draw.choice([0, 0, draw.randrange(self.schedule.total_steps)])
        batches = sum(work.step > self.start_step for work in self.schedule.work())
        self.stops_after = draw.randrange(batches // 2 + 1) if draw.random() < 0.4 else None
        self.random = draw
        self.consumed, self.last_steps = {d: [] for d in range(self.topology.num_drafters)}, set()

    def run(self) -> None:
        """Runs every rank to its end; Stuck or Violation where the protocol does not hold."""
        baton = Baton(self.seed)
        topology, ring_slots = self.topology, self.config.schedule.ring_slots
        links = {
            (sender, receiver): Link(
                baton, f"from rank {sender} to rank {receiver}", self.weight(), ring_slots, eager=self.eager
            )
            for sender, receiver in topology.pairs()
        }
        drafters = Meeting(baton, topology.num_drafters)
        store = ControlStore(baton)
        controls = [SimulatedControl(baton, store, rank) for rank in range(topology.world_size)]
        self.asked = self.random.choice(controls)
        for rank, control in enumerate(controls):
            is_target = topology.drafter_of(rank) is None
            context = RankContext(
                config=self.config,
                topology=topology,
                rank=rank,
                device=CPU,
                run_folder=Path(),
                target_folder="",
                store=self.store,  # type: ignore[arg-type]
                schedule=self.schedule,
                drafter=SimpleNamespace(target_layer_ids=(0,), hidden_size=2),  # type: ignore[arg-type]
                control=control,
                watch=Watch(),  # type: ignore[arg-type]
                trace=TraceWindow(Path(), rank, "", start_step=0, steps=0, metadata={}),
                drafter_group=drafters,  # type: ignore[arg-type]
                host_group=None,
                pair_groups=links,  # type: ignore[arg-type]
                start_step=self.start_step,
            )
            play = partial(self.play_target if is_target else self.play_drafter, baton, context)
            baton.add(f"{topology.role(rank)} rank {rank}", self.weight(), play)
        baton.run()
        for link in links.values():
            link.check_empty()
        self.check_consumed()

    def weight(self) -> float:
        """How often a rank or a link comes to its turn, beside the others."""
        return 10.0 ** -self.random.uniform(0, self.slowness)

    def play_target(self, baton: Baton, context: RankContext) -> None:
        """As `run._run_target`, but for the model."""
        channels = {}
        clock = WaitClock(CPU)
        for drafter in self.topology.drafters_beside(context.target_number):
            group = context.pair_groups[context.rank, self.topology.drafter_rank(drafter)]
            channels[drafter] = SendChannel(drafter, group, run._ring(context, WIRE), clock)
        target_loop.target_loop(context, Forward(baton, self.schedule, context.watch), channels, clock)  # type: ignore[arg-type]

    def play_drafter(self, baton: Baton, context: RankContext) -> None:
        """As `run._run_drafter`, but for the model."""
        unpacker: Any = Copier() if self.copies else None
        source = ChannelSource(run._receive_channels(context, WIRE, WaitClock(CPU)), unpacker)
        filled = FilledSource(source, ZeroSource(WIRE.features, WIRE.dtype, CPU))
        model: Any = Reader(baton, partial(self.begins, context))
        ends: Any = None
        optimizer: Any = OptimizerOfNothing(context.drafter_group)
        reports: Any = ReportsOfNothing(context)
        self.last_steps.add(drafter_loop.drafter_loop(context, filled, model, ends, optimizer, reports))
        run._drain(context, source)

    def begins(self, context: RankContext, work: Work) -> int:
        """Notes that a drafter begins a batch, with all others if it is sharded; returns the batch's number."""
        if self.config.train.shard == "fsdp":
            context.drafter_group.meet()  # type: ignore[union-attr]
        drafter = context.drafter_number
        if self.stops_after == sum(map(len, self.consumed.values())):
            self.asked.ask_stop()
        self.consumed[drafter].append((work.step, work.kind, work.index))
        return self.schedule.number_of[work.place]

    def check_consumed(self) -> None:
        """Each drafter ran what the schedule gives it, up to the one step where all ended."""
        if len(self.last_steps) != 1:
            raise Violation(f"drafters ended after different steps: {self.last_steps}")
        (last,) = self.last_steps
        if self.stops_after is None and last != self.schedule.total_steps:
            raise Violation(f"the run ended at step {last} of {self.schedule.total_steps}")
        for drafter, consumed in self.consumed.items():
            works = [w for w in self.schedule.work(self.start_step) if w.drafter == drafter and w.step <= last]
            if consumed != [(work.step, work.kind, work.index) for work in works]:
                raise Violation(f"drafter {drafter} ran {consumed}")


class SimulatedControl(Control):
    """The control, whose poll lets others go on."""

    def __init__(self, baton: Baton, store: ControlStore, rank: int) -> None:
        super().__init__(store, rank)  # type: ignore[arg-type]
        self._baton = baton

    def pause(self) -> None:
        self._baton.poll()


class Watch:
    """In place of the watch over ranks: knows which batch a rank is at."""

    place = ""

    def at(self, place: str) -> None:
        self.place = place

    def pausing(self) -> Any:
        return nullcontext()


class Forward:
    """In place of the target: a row says whose document it is of, and which batch it came with."""

    def __init__(self, baton: Baton, schedule: ListedSchedule, watch: Any) -> None:
        self._baton, self._schedule, self._watch = baton, schedule, watch

    def capture(self, tokens_T: Tensor, lengths_N: np.ndarray, slot_TF: Tensor) -> None:
        slot_TF[:, 0] = tokens_T
        self._baton.pause()
        slot_TF[:, 1] = self._schedule.number_of[self._watch.place]


class Copier:
    """In place of the unpacker: the slot is given back as soon as its rows are copied."""

    def __init__(self) -> None:
        self._features_MF = torch.zeros(BUDGET, WIRE.features)

    def __call__(self, received_TF: Tensor) -> Tensor:
        self._features_MF[: len(received_TF)] = received_TF
        return self._features_MF


@dataclass
class Batch:
    """In place of a drafter batch: what the rows must hold."""

    work: Work
    positions_T: Tensor
    """The documents' numbers, which is what the rows hold; behind them as many zeros as there is padding."""
    lengths_N: np.ndarray

    def to(self, device: torch.device) -> tuple[Tensor, Work]:
        return self.positions_T, self.work


class Loader:
    """In place of the drafter's loader."""

    def __init__(self, store: Store, config: Any, drafter: Any, device: torch.device) -> None:
        self._store = store

    def load(self, work: Work) -> Batch:
        documents = self._store.read(work.documents)
        rows = BUDGET if work.step % 2 else max(1, work.tokens)  # padded, or not
        numbers_T = np.pad(documents.tokens_T, (0, rows - len(documents.tokens_T)))
        return Batch(work, torch.from_numpy(numbers_T), documents.lengths_N)


class Reader:
    """In place of the drafter: what it reads must be its batch, and stay so until the backward pass is over."""

    def __init__(self, baton: Baton, begins: Callable[[Work], int]) -> None:
        self.fc = SimpleNamespace(in_features=WIRE.features)
        self.config = SimpleNamespace(block_size=2)
        self.weight = torch.zeros(len(SUMS), requires_grad=True)
        self._baton, self._begins = baton, begins

    def sums(self, features_TF: Tensor, positions_T: Tensor, work: Work) -> Tensor:
        expected_TF = torch.zeros_like(features_TF)
        expected_TF[:, 0] = positions_T
        expected_TF[: work.tokens, 1] = self._begins(work)

        def check() -> None:
            if not torch.equal(features_TF, expected_TF):
                raise Violation(f"{work.place} holds {features_TF.tolist()}, not {expected_TF.tolist()}")

        check()
        self._baton.pause()
        check()
        return ReadAgain.apply(self.weight, self._baton, check)


class ReadAgain(torch.autograd.Function):
    """Sums of zero, whose backward pass reads the features once more."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, baton: Baton, check: Callable[[], None]) -> Tensor:
        ctx.baton, ctx.check = baton, check
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.baton.pause()
        ctx.check()
        return gradients[0], None, None


class OptimizerOfNothing:
    """In place of the optimizer: meets the other drafters where it would sum gradients."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def zero_grad(self) -> None: ...

    def overlap(self, last: bool) -> Any:
        return nullcontext()

    def gradient_is_finite(self) -> Tensor:
        return torch.ones(())

    def reduce(self) -> None:
        self._group.meet()

    def step(self, step: int, stats: Tensor, total_weight: Tensor) -> Tensor:
        return torch.zeros(2)


class ReportsOfNothing:
    """In place of the reports: passes a stop on, as they do."""

    def __init__(self, context: RankContext) -> None:
        self._context = context

    def add(self, step: int, stats: Tensor, outcome: Tensor) -> None: ...

    def add_validation(self, step: int, sums: Tensor) -> None: ...

    def checkpoint(self, step: int) -> None: ...

    def lead_window(self, step: int) -> None: ...

    def lead_stop(self, step: int) -> None:
        if self._context.leads:
            self._context.control.lead_stop(step, LAG_STEPS)
