"""What every loop is given: the run's facts as one rank sees them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from dflash_dist.config import Config
from dflash_dist.data.schedule import Schedule
from dflash_dist.data.store import TokenStore
from dflash_dist.drafter.config import DrafterConfig
from dflash_dist.drafter.loss import Objective
from dflash_dist.topology import Topology
from dflash_dist.train.control import Control
from dflash_dist.train.liveness import Watch
from dflash_profiling.record import TraceWindow


@dataclass(frozen=True)
class RankContext:
    """One rank of a running world."""

    config: Config
    topology: Topology
    rank: int
    device: torch.device
    run_folder: Path
    target_folder: Path | str
    store: TokenStore
    schedule: Schedule
    drafter: DrafterConfig
    control: Control
    watch: Watch
    trace: TraceWindow
    drafter_group: dist.ProcessGroup | None
    """The drafter ranks of all nodes, where there are several."""
    host_group: dist.ProcessGroup | None
    """The same ranks over gloo, for what does not touch a device."""
    pair_groups: dict[tuple[int, int], dist.ProcessGroup]
    start_step: int
    """Steps that are done already."""

    @property
    def objective(self) -> Objective:
        """What the drafter is trained on."""
        return Objective.of(self.config.objective)

    @property
    def target_number(self) -> int:
        """The number of this target rank among the targets of all nodes."""
        number = self.topology.target_of(self.rank)
        assert number is not None
        return number

    @property
    def drafter_number(self) -> int:
        """The number of this drafter rank among the drafters of all nodes."""
        number = self.topology.drafter_of(self.rank)
        assert number is not None
        return number

    def advance_trace(self, step: int) -> None:
        """Called as each step or batch begins: opens, goes on with or writes this rank's trace, where one is wanted."""
        if (window := self.control.window()) is not None:
            self.trace.move(*window)
        with self.watch.pausing():  # the end of a trace is written here
            self.trace.advance(step)

    def end_trace(self) -> None:
        """Called as the last step ends: what follows, such as waiting for the last messages to go out, is no step."""
        with self.watch.pausing():
            self.trace.close()

    @property
    def leads(self) -> bool:
        """Whether this is the first drafter rank, which writes metrics and checkpoints."""
        return self.topology.drafter_of(self.rank) == 0
