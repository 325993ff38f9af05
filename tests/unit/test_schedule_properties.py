"""What holds for every schedule: any mix of lengths, any topology, tails and fewer documents than ranks among them."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflash_dist.config import load_config
from dflash_dist.data.schedule import Schedule, Work
from dflash_dist.topology import Topology

BUDGET = 100
BASE = load_config("configs/smollm2.yaml", [f"schedule.token_budget={BUDGET}", "train.max_steps=null"])


@dataclass
class Lengths:
    """What the schedule reads of a store."""

    lengths: np.ndarray
    supervised_counts: np.ndarray
    held_out: np.ndarray


@dataclass(frozen=True)
class World:
    """All that a schedule is a function of."""

    documents: tuple[tuple[int, int, bool], ...]
    """(tokens, supervised tokens, held out) of each."""
    topology: Topology
    batches_each: int
    """Batches a step of each drafter."""
    max_documents: int = 6
    costs_us: tuple[int, int, float] = (5, 1, 0.25)
    """Of a batch, a token and a token squared: sums of them are exact, in whatever order they are added."""
    epochs: int = 2
    validate_every: int = 3
    validation_batches: int = 4
    seed: int = 0

    def schedule(self, topology: Topology | None = None, max_steps: int | None = None) -> Schedule:
        """The schedule as one more rank would build it: nothing is shared with those built before."""
        lengths, supervised, held_out = (np.array(column) for column in zip(*self.documents, strict=True))
        store = Lengths(lengths.astype(np.int64), supervised.astype(np.int64), held_out.astype(bool))
        fixed, token, squared = map(float, self.costs_us)
        schedule = replace(
            BASE.schedule,
            batches_per_step=self.batches_per_step,
            max_documents=self.max_documents,
            cost_fixed_us=fixed,
            cost_token_us=token,
            cost_token_squared_us=squared,
        )
        train = replace(
            BASE.train,
            epochs=self.epochs,
            max_steps=max_steps,
            validate_every=self.validate_every,
            validation_batches=self.validation_batches,
            seed=self.seed,
        )
        config = replace(BASE, schedule=schedule, train=train)
        return Schedule(store, config, topology or self.topology)  # type: ignore[arg-type]

    @property
    def batches_per_step(self) -> int:
        return self.batches_each * self.topology.num_drafters

    def cost_us(self, work: Work) -> float:
        """Predicted microseconds on a target."""
        if work.is_filler:
            return 0.0
        fixed, token, squared = self.costs_us
        lengths = [self.documents[i][0] for i in work.documents]
        return fixed + sum(token * n + squared * n**2 for n in lengths)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    targets, nodes = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    drafters = draw(st.sampled_from([None, 1, 2, 3, 4]))
    return Topology(targets, drafters or targets, shared=drafters is None, nodes=nodes)


@st.composite
def documents(draw: st.DrawFn) -> tuple[tuple[int, int, bool], ...]:
    """Of any lengths, of two lengths, or of one; one at least is trained on."""
    any_length = st.integers(1, BUDGET)
    few = draw(st.lists(any_length, min_size=1, max_size=2))
    length = draw(st.sampled_from([any_length, st.integers(1, 5), st.sampled_from(few)]))
    held_out = st.sampled_from([False] * draw(st.integers(1, 9)) + [True] * draw(st.integers(0, 2)))
    lengths = draw(st.lists(length, min_size=1, max_size=90))
    rest = [(n, draw(st.integers(0, n)), draw(held_out)) for n in lengths[1:]]
    return ((lengths[0], lengths[0] // 2, False), *rest)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    return World(
        draw(documents()),
        draw(topologies()),
        batches_each=draw(st.integers(1, 3)),
        max_documents=draw(st.sampled_from([1, 2, 6, 1024])),
        costs_us=draw(st.sampled_from([(0, 1, 0.0), (5, 1, 0.25), (100, 0, 0.0), (0, 0, 1.0)])),
        epochs=draw(st.integers(1, 3)),
        validate_every=draw(st.sampled_from([0, 1, 3])),
        validation_batches=draw(st.integers(1, 5)),
        seed=draw(st.integers(0, 5)),
    )


ONE_DOCUMENT_FOR_TWELVE_DRAFTERS = World(((7, 3, False),), Topology(4, 4, shared=False, nodes=3), batches_each=2)
TAIL_OF_ONE = World(((BUDGET, 9, False),) * 13, Topology(3, 2, False, nodes=2), batches_each=3, max_documents=1)
every_world = given(worlds())
bounded = settings(max_examples=200, deadline=None, derandomize=True)


def rounds(schedule: Schedule, after_step: int = 0) -> dict[tuple[int, str], list[Work]]:
    """The work of each step's training and validation, in order."""
    found: dict[tuple[int, str], list[Work]] = defaultdict(list)
    for work in schedule.work(after_step):
        found[work.step, work.kind].append(work)
    return found


def facts(work: Work) -> tuple[object, ...]:
    """All of one piece of work, comparable."""
    return (*content(work), work.target, work.drafter)


def content(work: Work) -> tuple[object, ...]:
    """What of one piece of work may not depend on the topology."""
    return work.step, work.kind, work.index, work.epoch, tuple(work.documents.tolist()), work.tokens


@bounded
@every_world
@example(ONE_DOCUMENT_FOR_TWELVE_DRAFTERS)
@example(TAIL_OF_ONE)
def test_an_epoch_holds_each_training_document_once(world: World) -> None:
    seen: dict[int, Counter[int]] = defaultdict(Counter)
    for work in world.schedule().work():
        if work.kind == "train":
            seen[work.epoch].update(work.documents.tolist())
    expected = Counter(i for i, (_, _, held_out) in enumerate(world.documents) if not held_out)
    assert dict(seen) == {epoch: expected for epoch in range(1, world.epochs + 1)}


@bounded
@every_world
def test_no_batch_is_over_a_budget(world: World) -> None:
    for work in world.schedule().work():
        assert work.tokens == sum(world.documents[i][0] for i in work.documents) <= BUDGET
        assert len(work.documents) <= world.max_documents
        assert work.is_filler == (len(work.documents) == 0)


@bounded
@every_world
@example(ONE_DOCUMENT_FOR_TWELVE_DRAFTERS)
@example(TAIL_OF_ONE)
def test_every_drafter_has_the_same_number_of_batches_a_step(world: World) -> None:
    schedule, drafters = world.schedule(), world.topology.num_drafters
    for (step, kind), works in rounds(schedule).items():
        counts = Counter(work.drafter for work in works)
        assert {counts[d] for d in range(drafters)} == {len(works) // drafters}
        real = sum(not work.is_filler for work in works)
        assert len(works) - real < drafters, "no drafter gets a filler more than it takes"
        assert sorted(work.index for work in works) == list(range(len(works)))
        assert [work.index >= real for work in works] == [work.is_filler for work in works]
        if kind == "train":
            assert real == schedule.batches_of(step)


@bounded
@every_world
@example(TAIL_OF_ONE)
def test_only_the_last_step_of_an_epoch_is_short(world: World) -> None:
    schedule, per_step = world.schedule(), world.batches_per_step
    steps_of: dict[int, set[int]] = defaultdict(set)
    for (step, kind), works in rounds(schedule).items():
        if kind == "train":
            (epoch,) = {work.epoch for work in works}
            steps_of[epoch].add(step)
    ends = {max(steps) for steps in steps_of.values()}
    assert sorted(step for steps in steps_of.values() for step in steps) == list(range(1, schedule.total_steps + 1))
    for step in range(1, schedule.total_steps + 1):
        assert 0 < schedule.batches_of(step) <= per_step
        assert schedule.batches_of(step) == per_step or step in ends


@bounded
@given(worlds(), topologies())
def test_the_documents_of_a_step_do_not_depend_on_the_topology(world: World, other: Topology) -> None:
    here, there = (
        sorted(content(work) for work in world.schedule(topology).work() if not work.is_filler)
        for topology in (world.topology, other)
    )
    assert here == there


@bounded
@given(worlds(), st.integers(0, 8))
def test_every_rank_has_the_same_hash_and_a_resumed_one_the_rest(world: World, done: int) -> None:
    first, second = world.schedule(), world.schedule()
    assert first.fingerprint() == second.fingerprint()
    assert [facts(work) for work in second.work(done)] == [facts(w) for w in first.work() if w.step > done]


@bounded
@given(worlds(), st.integers(1, 6))
def test_a_run_of_fewer_steps_is_the_start_of_a_longer_one(world: World, steps: int) -> None:
    whole, cut = world.schedule(), world.schedule(max_steps=steps)
    assert cut.total_steps == min(steps, whole.total_steps)
    expected = [facts(work) for work in whole.work() if work.kind == "train" and work.step <= steps]
    assert [facts(work) for work in cut.work() if work.kind == "train"] == expected


@bounded
@given(worlds(), st.integers(0, 5))
def test_both_ends_of_a_channel_see_one_order(world: World, done: int) -> None:
    topology = world.topology
    sent: dict[tuple[int, int], list[tuple[object, ...]]] = defaultdict(list)
    received: dict[tuple[int, int], list[tuple[object, ...]]] = defaultdict(list)
    for rank in range(topology.world_size):
        target, drafter = topology.target_of(rank), topology.drafter_of(rank)
        for work in world.schedule().work(done):
            if not work.is_filler and work.target == target:
                sent[rank, topology.drafter_rank(work.drafter)].append(facts(work))
            if not work.is_filler and work.drafter == drafter:
                received[topology.target_rank(work.target), rank].append(facts(work))
    assert sent == received
    pairs = [(rank, rank) for rank in range(topology.world_size)] if topology.shared else topology.pairs()
    assert sent.keys() <= set(pairs), "no message leaves its node"


@bounded
@every_world
def test_batches_come_from_targets_of_the_drafters_node(world: World) -> None:
    topology = world.topology
    for work in world.schedule().work():
        assert 0 <= work.target < topology.num_targets and 0 <= work.drafter < topology.num_drafters
        assert work.target // topology.targets == work.drafter // topology.drafters
        if topology.shared:
            assert work.target == work.drafter


@bounded
@every_world
@example(TAIL_OF_ONE)
def test_messages_are_ordered_by_predicted_completion(world: World) -> None:
    """Each target runs its batches in the order of the schedule, so this is when it will have run them."""
    loads_us = [0.0] * world.topology.num_targets
    for works in rounds(world.schedule()).values():
        finish_us = []
        for work in works:
            loads_us[work.target] += world.cost_us(work)
            finish_us.append(loads_us[work.target])
        assert finish_us == sorted(finish_us)


@bounded
@every_world
@example(TAIL_OF_ONE)
def test_targets_of_a_node_are_never_further_apart_than_one_batch(world: World) -> None:
    if world.topology.shared:
        return  # there each takes as many batches as the others, whatever they cost
    targets = world.topology.targets
    loads_us, longest_us = np.zeros(world.topology.num_targets), 0.0
    for works in rounds(world.schedule()).values():
        for work in works:
            loads_us[work.target] += world.cost_us(work)
            longest_us = max(longest_us, world.cost_us(work))
        assert np.ptp(loads_us.reshape(-1, targets), axis=1).max() <= longest_us
