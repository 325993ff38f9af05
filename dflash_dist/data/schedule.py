"""Which batch runs when and where: a pure function of document lengths, topology, budget, cost model, seed and epoch.

Every rank computes the same schedule, so messages need no headers and a resumed run goes on exactly where it stopped.
Packing documents into batches and batches into steps does not know the topology; giving batches to ranks comes second.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dflash_dist.config import Config, ScheduleConfig
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
    drafter: int


@dataclass(frozen=True)
class _Batch:
    documents: np.ndarray
    tokens: int
    supervised: int
    cost_us: float


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

    def work(self, after_step: int = 0) -> Iterator[Work]:
        """All work after step `after_step`, in the global order."""
        loads_us = [0.0] * self._topology.targets
        for step, (epoch, batches) in enumerate(self._steps, start=1):
            rounds: list[tuple[Literal["train", "validate"], int, list[_Batch]]] = [("train", epoch, batches)]
            if self.validates(step):
                rounds.append(("validate", VALIDATION_EPOCH, self._validation))
            for kind, key_epoch, some in rounds:
                placed = self._place(some, loads_us)
                if step > after_step:
                    for index, target, drafter in placed:
                        batch = some[index]
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
        """Documents in the given order, cut into batches within the budget."""
        settings, lengths = self._config.schedule, self._store.lengths
        cuts = batch_cuts(lengths[documents], settings.token_budget, settings.max_documents)
        batches = []
        for some in np.split(documents, cuts):
            if len(some):
                tokens = int(lengths[some].sum())
                supervised = int(self._store.supervised_counts[some].sum())
                batches.append(_Batch(some, tokens, supervised, predicted_cost_us(lengths[some], settings)))
        return batches

    def _place(self, batches: list[_Batch], loads_us: list[float]) -> list[tuple[int, int, int]]:
        """(batch, target, drafter) in order of predicted completion; the targets' loads go on from step to step."""
        targets, drafters = self._topology.targets, self._topology.drafters
        by_cost = sorted(range(len(batches)), key=lambda i: (-batches[i].cost_us, i))
        finish_us: dict[int, float] = {}
        target_of: dict[int, int] = {}
        room = [-(-len(batches) // targets) if self._topology.shared else len(batches)] * targets
        for i in by_cost:
            target = min((t for t in range(targets) if room[t]), key=lambda t: (loads_us[t], t))
            room[target] -= 1
            loads_us[target] += batches[i].cost_us
            finish_us[i], target_of[i] = loads_us[target], target
        shared = self._topology.shared
        drafter_of = target_of if shared else _share_out([b.supervised for b in batches], drafters)
        order = sorted(finish_us, key=lambda i: (finish_us[i], target_of[i]))
        return [(i, target_of[i], drafter_of[i]) for i in order]


def shuffled(documents: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """`documents` in an order that depends on (seed, epoch) alone, not on lengths."""
    return np.random.default_rng([seed, epoch]).permutation(documents)


def batch_cuts(lengths: np.ndarray, token_budget: int, max_documents: int) -> list[int]:
    """Where to cut a sequence of documents so that each piece holds at most the budget's tokens and documents."""
    cuts, tokens, start = [], 0, 0
    for i, length in enumerate(lengths.tolist()):
        assert length <= token_budget, f"document of {length} tokens in a budget of {token_budget}: prepare cuts them"
        if i > start and (tokens + length > token_budget or i - start == max_documents):
            cuts.append(i)
            tokens, start = 0, i
        tokens += length
    return cuts


def predicted_cost_us(lengths: np.ndarray, settings: ScheduleConfig) -> float:
    """Predicted microseconds of one target forward: fixed, per token, and per squared token of each document."""
    squared = float((lengths.astype(np.float64) ** 2).sum())
    return (
        settings.cost_fixed_us
        + settings.cost_token_us * float(lengths.sum())
        + settings.cost_token_squared_us * squared
    )


def _share_out(weights: list[int], parts: int) -> dict[int, int]:
    """Item -> part: equally many items to each part (within one), near the same weight, heaviest items first."""
    loads, room = [0] * parts, [-(-len(weights) // parts)] * parts
    part_of = {}
    for i in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        part = min((p for p in range(parts) if room[p]), key=lambda p: (loads[p], p))
        loads[part] += weights[i]
        room[part] -= 1
        part_of[i] = part
    return part_of
