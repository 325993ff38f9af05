"""Which batch runs when and where: a pure function of document lengths, topology, budget, cost model, seed and epoch.

Every rank computes the same schedule, so messages need no headers and a resumed run goes on exactly where it stopped.
Packing documents into batches and batches into steps does not know the topology; giving batches to ranks comes second.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dflash_dist.config import Config
from dflash_dist.data.batching import pack
from dflash_dist.data.store import TokenStore
from dflash_dist.topology import Topology

VALIDATION_EPOCH = 0
"""The epoch that keys the anchors of validation batches: they are the same at every measurement."""


@dataclass(frozen=True)
class Work:
    """One batch on its way: a target rank runs it and sends it to a drafter rank."""

    step: int
    """The optimizer step it belongs to, from 1; a validation batch is measured after this step."""
    kind: Literal["train", "validate"]
    index: int
    """Position among the batches of its step and kind."""
    epoch: int
    documents: np.ndarray
    """int64 row numbers in the token store."""
    tokens: int
    target: int
    """Number of the target through all nodes, as `drafter` is."""
    drafter: int

    @property
    def is_filler(self) -> bool:
        """Whether it only makes up the number: no documents, no target forward, no message, weight 0."""
        return not self.tokens

    @property
    def place(self) -> str:
        """Where in the run the batch stands, in words."""
        return f"step {self.step}, {'validation ' if self.kind == 'validate' else ''}batch {self.index}"


@dataclass(frozen=True)
class _Batch:
    documents: np.ndarray
    tokens: int
    supervised: int
    cost_us: float


_FILLER = _Batch(np.empty(0, np.int64), 0, 0, 0.0)


class Schedule:
    """The whole run's work. Global order: step, then training before validation, then predicted completion.

    Both ends of a channel use this one order, so neither can wait for a message that stands behind its own.
    """

    def __init__(self, store: TokenStore, config: Config, topology: Topology) -> None:
        self._store, self._config, self._topology = store, config, topology
        training = np.flatnonzero(~store.held_out)
        self._epochs = [
            self._pack(shuffled(training, config.train.seed, epoch)) for epoch in range(1, config.train.epochs + 1)
        ]
        self._validation = self._pack(np.flatnonzero(store.held_out))[: config.train.validation_batches]
        per_step = config.schedule.batches_per_step
        self._steps = [
            (epoch, batches[start : start + per_step])
            for epoch, batches in enumerate(self._epochs, start=1)
            for start in range(0, len(batches), per_step)
        ][: config.train.max_steps]
        self.total_steps = len(self._steps)
        """Optimizer steps in the whole run."""
        self.tokens_after = np.cumsum([0, *(sum(b.tokens for b in batches) for _, batches in self._steps)])
        """Training tokens run by the end of each step; index 0 is the start."""
        self.batches_after = np.cumsum([0, *(len(batches) for _, batches in self._steps)])
        """Training batches run by the end of each step; index 0 is the start."""

    def epoch_of(self, step: int) -> int:
        """The epoch that a step belongs to, from 1."""
        return self._steps[step - 1][0]

    def work(self, after_step: int = 0) -> Iterator[Work]:
        """All work after step `after_step`, in the global order."""
        loads_us = [0.0] * self._topology.num_targets
        for step, (epoch, batches) in enumerate(self._steps, start=1):
            rounds: list[tuple[Literal["train", "validate"], int, list[_Batch]]] = [("train", epoch, batches)]
            if self.validates(step):
                rounds.append(("validate", VALIDATION_EPOCH, self._validation))
            for kind, key_epoch, some in rounds:
                placed = self._place(some, loads_us)
                if step > after_step:
                    for index, target, drafter in placed:
                        batch = some[index] if index < len(some) else _FILLER
                        yield Work(step, kind, index, key_epoch, batch.documents, batch.tokens, target, drafter)

    def validates(self, step: int) -> bool:
        """Whether `val_loss` is measured after this step."""
        every = self._config.train.validate_every
        return bool(every and self._validation) and (step % every == 0 or step == self.total_steps)

    def batches_of(self, step: int) -> int:
        """Number of training batches in a step; fewer in the last step of an epoch."""
        return len(self._steps[step - 1][1])

    def documents_of(self, step: int, index: int) -> np.ndarray:
        """int64 row numbers in the store of one training batch."""
        return self._steps[step - 1][1][index].documents

    def fingerprint(self) -> str:
        """Hex digest of every placement; ranks compare it at the start."""
        digest = hashlib.sha256(str(self._topology).encode())
        for work in self.work():
            digest.update(f"{work.step} {work.kind} {work.epoch} {work.tokens} {work.target} {work.drafter} ".encode())
            digest.update(work.documents.tobytes())
        return digest.hexdigest()

    def _pack(self, documents: np.ndarray) -> list[_Batch]:
        """Documents in the given order, packed into batches."""
        settings, store = self._config.schedule, self._store
        groups = pack(store.lengths[documents], settings.token_budget, settings.max_documents)
        if not groups:
            return []
        in_order = documents[np.concatenate(groups)]
        starts = np.cumsum([0, *(len(group) for group in groups)])
        lengths = store.lengths[in_order].astype(np.float64)
        fixed_us, squared_us = settings.cost_fixed_us or 0.0, settings.cost_token_squared_us or 0.0
        token_us = 1.0 if settings.cost_token_us is None else settings.cost_token_us
        costs_us = token_us * lengths + squared_us * lengths**2
        sums = [np.add.reduceat(x, starts[:-1]) for x in (lengths, store.supervised_counts[in_order], costs_us)]
        return [
            _Batch(in_order[begin:end], int(tokens), int(supervised), fixed_us + float(cost_us))
            for begin, end, tokens, supervised, cost_us in zip(starts[:-1], starts[1:], *sums, strict=True)
        ]

    def _place(self, batches: list[_Batch], loads_us: list[float]) -> list[tuple[int, int, int]]:
        """(batch, target, drafter) in the global order; the targets' loads go on from step to step.

        Where the drafters could not share the batches equally, fillers with numbers past the last batch make them even.
        """
        topology = self._topology
        fillers = -len(batches) % topology.num_drafters
        costs_us = [batch.cost_us for batch in batches] + [0.0] * fillers
        supervised = [batch.supervised for batch in batches] + [0] * fillers
        if topology.shared:
            target_of, finish_us = share_out(costs_us, loads_us, equal_counts=True)
            drafter_of = target_of
        else:
            node_of = self._share_out_to_nodes(costs_us, loads_us)
            target_of, finish_us = _share_out_within(node_of, costs_us, loads_us, topology.nodes, equal_counts=False)
            no_load = [0.0] * topology.num_drafters
            drafter_of, _ = _share_out_within(node_of, supervised, no_load, topology.nodes, equal_counts=True)
        order = sorted(range(len(costs_us)), key=lambda i: (finish_us[i], target_of[i]))
        if self._config.train.shard == "fsdp":
            order = _by_rounds(order, drafter_of, topology.num_drafters)
        return [(i, target_of[i], drafter_of[i]) for i in order]

    def _share_out_to_nodes(self, costs_us: list[float], loads_us: list[float]) -> list[int]:
        """The node of each batch: equally many to each, since hidden states do not leave a node."""
        topology = self._topology
        starts = range(0, topology.num_targets, topology.targets)
        node_loads_us = [sum(loads_us[start : start + topology.targets]) for start in starts]
        return share_out(costs_us, node_loads_us, equal_counts=True)[0]


def shuffled(documents: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """`documents` in an order that depends on (seed, epoch) alone, not on lengths."""
    return np.random.default_rng([seed, epoch]).permutation(documents)


def share_out(weights: Sequence[float], loads: list[float], *, equal_counts: bool) -> tuple[list[int], list[float]]:
    """Gives each item to a part: heaviest first, always to the least loaded part. Adds the items to `loads` in place.

    Returns each item's part, and that part's load with the item. `equal_counts`: as many items to each, within one.
    """
    room = [-(-len(weights) // len(loads)) if equal_counts else len(weights)] * len(loads)
    heap = [(load, part) for part, load in enumerate(loads)]
    heapq.heapify(heap)
    part_of, load_at = [0] * len(weights), [0.0] * len(weights)
    for i in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        load, part = heapq.heappop(heap)
        part_of[i], load_at[i] = part, load + weights[i]
        loads[part] = load_at[i]
        room[part] -= 1
        if room[part]:
            heapq.heappush(heap, (load_at[i], part))
    return part_of, load_at


def _by_rounds(order: list[int], drafter_of: list[int], drafters: int) -> list[int]:
    """The same batches so that every drafter has one in each round, in the given order within a round.

    The ranks of a sharded drafter go from batch to batch together: one that waits for a message which stands behind
    later rounds of the others, with their rings full, would wait for ever.
    """
    rounds = [itertools.count() for _ in range(drafters)]
    round_of = {i: next(rounds[drafter_of[i]]) for i in order}
    return sorted(order, key=round_of.__getitem__)


def _share_out_within(
    node_of: list[int], weights: Sequence[float], loads: list[float], nodes: int, *, equal_counts: bool
) -> tuple[list[int], list[float]]:
    """`share_out` on each node by itself; the parts of `loads` lie node after node."""
    parts = len(loads) // nodes
    items_of: list[list[int]] = [[] for _ in range(nodes)]
    for item, node in enumerate(node_of):
        items_of[node].append(item)
    part_of, load_at = [0] * len(weights), [0.0] * len(weights)
    for node, items in enumerate(items_of):
        first, last = node * parts, (node + 1) * parts
        node_loads = loads[first:last]
        chosen, reached = share_out([weights[i] for i in items], node_loads, equal_counts=equal_counts)
        loads[first:last] = node_loads
        for item, part, load in zip(items, chosen, reached, strict=True):
            part_of[item], load_at[item] = first + part, load
    return part_of, load_at
