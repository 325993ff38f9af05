"""Which rank plays which role. Pure standard library, so that the Makefile can ask before anything is installed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dflash_dist.errors import UserError

MOST_CPU_RANKS = 64
"""Ranks that one machine's CPU may be asked for: more is a slip of the pen, and would take all of its memory."""
FORMS = (
    "T-D such as 3-1 (3 target ranks, 1 drafter rank), or xN such as x2 (2 ranks that are both), with @nodes behind it "
    "where that is to run on each of several nodes, such as 3-1@4"
)


@dataclass(frozen=True)
class Topology:
    """The rank grid. On each node target ranks come first, then drafter ranks; with `xN` every rank is both.

    Targets and drafters are numbered through all nodes, as ranks are. Hidden states never leave a node.
    """

    targets: int
    """Target ranks of a node."""
    drafters: int
    """Drafter ranks of a node."""
    shared: bool
    """Every rank is target and drafter both (`xN`); hidden states never leave the rank."""
    nodes: int = 1

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on each node."""
        return self.targets if self.shared else self.targets + self.drafters

    @property
    def world_size(self) -> int:
        """Number of ranks on all nodes."""
        return self.ranks_per_node * self.nodes

    @property
    def num_targets(self) -> int:
        """Number of target ranks on all nodes."""
        return self.targets * self.nodes

    @property
    def num_drafters(self) -> int:
        """Number of drafter ranks on all nodes."""
        return self.drafters * self.nodes

    def target_rank(self, target: int) -> int:
        """The rank of target number `target`."""
        node, place = divmod(target, self.targets)
        return node * self.ranks_per_node + place

    def drafter_rank(self, drafter: int) -> int:
        """The rank of drafter number `drafter`."""
        node, place = divmod(drafter, self.drafters)
        return node * self.ranks_per_node + place + (0 if self.shared else self.targets)

    def target_of(self, rank: int) -> int | None:
        """The target number of a rank, or None where it is a drafter alone."""
        node, place = divmod(rank, self.ranks_per_node)
        return node * self.targets + place if place < self.targets else None

    def drafter_of(self, rank: int) -> int | None:
        """The drafter number of a rank, or None where it is a target alone."""
        node, place = divmod(rank, self.ranks_per_node)
        place -= 0 if self.shared else self.targets
        return node * self.drafters + place if place >= 0 else None

    def role(self, rank: int) -> str:
        """The role of a rank in words."""
        if self.shared:
            return "target+drafter"
        return "drafter" if self.target_of(rank) is None else "target"

    def pairs(self) -> list[tuple[int, int]]:
        """Each channel as (target rank, drafter rank), in the one order in which every rank opens them."""
        if self.shared:
            return []
        return [
            (self.target_rank(target), self.drafter_rank(drafter))
            for target in range(self.num_targets)
            for drafter in self.drafters_beside(target)
        ]

    def drafters_beside(self, target: int) -> range:
        """The drafters that a target sends to: those of its node."""
        first = target // self.targets * self.drafters
        return range(first, first + self.drafters)

    def targets_beside(self, drafter: int) -> range:
        """The targets that a drafter receives from: those of its node."""
        first = drafter // self.drafters * self.targets
        return range(first, first + self.targets)

    def __str__(self) -> str:
        node = f"x{self.targets}" if self.shared else f"{self.targets}-{self.drafters}"
        return node if self.nodes == 1 else f"{node}@{self.nodes}"


def parse_topology(text: str) -> Topology:
    """The topology written as `T-D` or `xN`, with `@nodes` or without; UserError for anything else."""
    match = re.fullmatch(
        r"(?:x(?P<both>[0-9]{1,6})|(?P<t>[0-9]{1,6})-(?P<d>[0-9]{1,6}))(?:@(?P<nodes>[0-9]{1,6}))?", text
    )
    if not match:
        raise UserError(f"topology {text!r} is not one; write {FORMS}")
    shared = match["both"] is not None
    targets, drafters, nodes = (
        int(n) for n in (match["both"] or match["t"], match["both"] or match["d"], match["nodes"] or 1)
    )
    for count, what in ((targets, "rank" if shared else "target rank"), (drafters, "drafter rank"), (nodes, "node")):
        if count < 1:
            raise UserError(f"topology {text!r} has no {what}; write {FORMS}")
    return Topology(targets, drafters, shared, nodes)


def check_devices(topology: Topology, gpus: int, device: str) -> str:
    """The device type to run on, `cpu` or `cuda`, for `--device` cpu, cuda or auto and `gpus` visible GPUs.

    UserError where a node needs more GPUs than there are, or more ranks than a CPU is to bear.
    """
    ranks = topology.ranks_per_node
    if device == "cpu" or (device == "auto" and gpus == 0):
        if ranks > MOST_CPU_RANKS:
            raise UserError(
                f"topology {topology} has {ranks} ranks, but at most {MOST_CPU_RANKS} run on a machine's CPU; "
                "take fewer"
            )
        return "cpu"
    if ranks > gpus:
        fitting = ["x1"] if gpus else []
        fitting += [f"{gpus - 1}-1", f"x{gpus}"] if gpus > 1 else []
        use = f"use {' or '.join(fitting)}, or " if fitting else ""
        raise UserError(
            f"topology {topology} needs {ranks} GPUs{' a node' if topology.nodes > 1 else ''}, one a rank, but {gpus} "
            f"{'is' if gpus == 1 else 'are'} visible; {use}run on the CPU with --device cpu"
        )
    return "cuda"


def check_batches_per_step(topology: Topology, batches_per_step: int) -> None:
    """UserError where the batches of a step cannot be shared equally by the drafter ranks."""
    drafters = topology.num_drafters
    if batches_per_step % drafters:
        below, above = batches_per_step // drafters * drafters, -(-batches_per_step // drafters) * drafters
        nearest = below if below and batches_per_step - below < above - batches_per_step else above
        raise UserError(
            f"schedule.batches_per_step is {batches_per_step}, but topology {topology} has {drafters} drafter ranks "
            f"and each takes equally many batches; set schedule.batches_per_step={nearest}"
        )
