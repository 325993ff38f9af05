"""Which rank plays which role. Pure standard library, so that the Makefile can ask before anything is installed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dflash_dist.errors import UserError

MOST_CPU_RANKS = 64
"""Ranks that one machine's CPU may be asked for: more is a slip of the pen, and would take all of its memory."""
FORMS = "T-D such as 3-1 (3 target ranks, 1 drafter rank), or xN such as x2 (2 ranks that are both)"


@dataclass(frozen=True)
class Topology:
    """The rank grid of one node: target ranks come first, then drafter ranks; with `xN` every rank is both."""

    targets: int
    drafters: int
    shared: bool
    """Every rank is target and drafter both (`xN`); hidden states never leave the rank."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.targets if self.shared else self.targets + self.drafters

    def target_rank(self, target: int) -> int:
        """The global rank of target number `target`."""
        return target

    def drafter_rank(self, drafter: int) -> int:
        """The global rank of drafter number `drafter`."""
        return drafter if self.shared else self.targets + drafter

    def drafter_of(self, rank: int) -> int | None:
        """The drafter number of a global rank, or None where the rank is a target alone."""
        if self.shared:
            return rank
        return rank - self.targets if rank >= self.targets else None

    def role(self, rank: int) -> str:
        """The role of a rank in words."""
        if self.shared:
            return "target+drafter"
        return "target" if rank < self.targets else "drafter"

    def pairs(self) -> list[tuple[int, int]]:
        """Each channel as (target rank, drafter rank), in the one order in which every rank opens them."""
        if self.shared:
            return []
        return [(t, self.targets + d) for t in range(self.targets) for d in range(self.drafters)]

    def __str__(self) -> str:
        return f"x{self.targets}" if self.shared else f"{self.targets}-{self.drafters}"


def parse_topology(text: str) -> Topology:
    """The topology written as `T-D` or `xN`; UserError for anything else."""
    if match := re.fullmatch(r"x([0-9]{1,6})", text):
        count = int(match[1])
        if count < 1:
            raise UserError(f"topology {text!r} has no rank; write {FORMS}")
        return Topology(count, count, shared=True)
    match = re.fullmatch(r"([0-9]{1,6})-([0-9]{1,6})", text)
    if not match:
        raise UserError(f"topology {text!r} is not one; write {FORMS}")
    targets, drafters = int(match[1]), int(match[2])
    if targets < 1 or drafters < 1:
        missing = "target" if targets < 1 else "drafter"
        raise UserError(f"topology {text!r} has no {missing} rank; write {FORMS}")
    return Topology(targets, drafters, shared=False)


def check_devices(topology: Topology, gpus: int, device: str) -> str:
    """The device type to run on, `cpu` or `cuda`, for `--device` cpu, cuda or auto and `gpus` visible GPUs.

    UserError where the topology needs more GPUs than there are, or more ranks than a CPU is to bear.
    """
    if device == "cpu" or (device == "auto" and gpus == 0):
        if topology.world_size > MOST_CPU_RANKS:
            raise UserError(
                f"topology {topology} has {topology.world_size} ranks, but at most {MOST_CPU_RANKS} run on a machine's "
                "CPU; take fewer"
            )
        return "cpu"
    if topology.world_size > gpus:
        fitting = ["x1"] if gpus else []
        fitting += [f"{gpus - 1}-1", f"x{gpus}"] if gpus > 1 else []
        use = f"use {' or '.join(fitting)}, or " if fitting else ""
        raise UserError(
            f"topology {topology} needs {topology.world_size} GPUs, one a rank, but {gpus} "
            f"{'is' if gpus == 1 else 'are'} visible; {use}run on the CPU with --device cpu"
        )
    return "cuda"


def check_batches_per_step(topology: Topology, batches_per_step: int) -> None:
    """UserError where the batches of a step cannot be shared equally by the drafter ranks."""
    drafters = topology.drafters
    if batches_per_step % drafters:
        below, above = batches_per_step // drafters * drafters, -(-batches_per_step // drafters) * drafters
        nearest = below if below and batches_per_step - below < above - batches_per_step else above
        raise UserError(
            f"schedule.batches_per_step is {batches_per_step}, but topology {topology} has {drafters} drafter ranks "
            f"and each takes equally many batches; set schedule.batches_per_step={nearest}"
        )
