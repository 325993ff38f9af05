from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_dist.config import load_config
from dflash_dist.data.schedule import Schedule, batch_cuts, shuffled
from dflash_dist.topology import parse_topology


class Lengths:
    """What the schedule reads of a store."""

    def __init__(self, lengths: list[int], held_out_every: int = 5) -> None:
        self.lengths = np.array(lengths, np.int64)
        self.supervised_counts = self.lengths // 2
        self.held_out = np.arange(len(lengths)) % held_out_every == 0


def make(lengths: list[int], topo: str, per_step: int = 4, **train: object) -> Schedule:
    overrides = ["schedule.token_budget=100", f"schedule.batches_per_step={per_step}", "schedule.max_documents=6"]
    overrides += [
        f"train.{k}={v}" for k, v in ({"max_steps": "null", "epochs": 2, "validate_every": 3} | train).items()
    ]
    return Schedule(Lengths(lengths), load_config("configs/smollm2.yaml", overrides), parse_topology(topo))  # type: ignore[arg-type]


lengths_strategy = st.lists(st.integers(1, 100), min_size=2, max_size=80)
topologies = st.sampled_from(["1-1", "3-1", "2-2", "5-4", "1-2", "x1", "x2", "x4"])


@settings(max_examples=60, deadline=None)
@given(lengths_strategy, topologies)
def test_each_training_document_runs_once_an_epoch_within_budget(lengths: list[int], topo: str) -> None:
    schedule = make(lengths, topo)
    seen: dict[int, Counter[int]] = {1: Counter(), 2: Counter()}
    for work in schedule.work():
        assert work.tokens == sum(lengths[i] for i in work.documents) <= 100
        assert len(work.documents) <= 6
        if work.kind == "train":
            seen[work.epoch].update(work.documents.tolist())
    training = [i for i in range(len(lengths)) if i % 5]
    assert seen[1] == seen[2] == Counter(training)


@settings(max_examples=60, deadline=None)
@given(lengths_strategy, topologies)
def test_steps_do_not_depend_on_the_topology(lengths: list[int], topo: str) -> None:
    def steps(schedule: Schedule) -> list[tuple[int, str, int, list[int]]]:
        return sorted((w.step, w.kind, w.index, w.documents.tolist()) for w in schedule.work())

    assert steps(make(lengths, topo)) == steps(make(lengths, "1-1"))


@settings(max_examples=60, deadline=None)
@given(lengths_strategy, topologies)
def test_drafters_share_every_whole_step_equally(lengths: list[int], topo: str) -> None:
    schedule, drafters = make(lengths, topo), parse_topology(topo).drafters
    counts = Counter((w.step, w.drafter) for w in schedule.work() if w.kind == "train")
    for step in range(1, schedule.total_steps + 1):
        if schedule.batches_of(step) == 4:
            assert {counts[step, d] for d in range(drafters)} == {4 // drafters}


@settings(max_examples=40, deadline=None)
@given(lengths_strategy, topologies, st.integers(0, 5))
def test_resumed_work_is_the_rest_of_the_whole(lengths: list[int], topo: str, done: int) -> None:
    schedule = make(lengths, topo)
    rest = [(w.step, w.index, w.target, w.drafter) for w in schedule.work() if w.step > done]
    assert [(w.step, w.index, w.target, w.drafter) for w in schedule.work(done)] == rest


@settings(max_examples=60, deadline=None)
@given(lengths_strategy, topologies, st.integers(1, 3))
def test_no_ring_size_can_deadlock(lengths: list[int], topo: str, slots: int) -> None:
    """A target that waits for a free slot and a drafter that waits for a message always leave someone who can go on."""
    schedule, topology = make(lengths, topo), parse_topology(topo)
    if topology.shared:
        return
    work = list(schedule.work())
    sends = [[w for w in work if w.target == t] for t in range(topology.targets)]
    takes = [[w for w in work if w.drafter == d] for d in range(topology.drafters)]
    flying: Counter[tuple[int, int]] = Counter()
    while any(sends) or any(takes):
        moved = False
        for queue in sends:
            while queue and flying[queue[0].target, queue[0].drafter] < slots:
                flying[queue[0].target, queue[0].drafter] += 1
                queue.pop(0)
                moved = True
        for queue in takes:
            while queue and flying[queue[0].target, queue[0].drafter]:
                flying[queue[0].target, queue[0].drafter] -= 1
                queue.pop(0)
                moved = True
        assert moved, "deadlock"


def test_place_in_the_epoch_does_not_depend_on_length() -> None:
    lengths = np.sort(np.random.default_rng(0).lognormal(7.3, 0.8, 20000))
    place = np.argsort(shuffled(np.arange(len(lengths)), seed=1, epoch=1))
    rank_correlation = np.corrcoef(place, np.arange(len(lengths)))[0, 1]
    assert abs(rank_correlation) < 0.02
    assert (shuffled(np.arange(50), 1, 1) != shuffled(np.arange(50), 1, 2)).any()


def test_targets_are_loaded_evenly() -> None:
    lengths = np.random.default_rng(0).integers(5, 100, 3000).tolist()
    schedule = make(lengths, "3-1", validate_every=0)
    loads: Counter[int] = Counter()
    for work in schedule.work():
        loads[work.target] += work.tokens
    assert max(loads.values()) / min(loads.values()) < 1.01


def test_the_hash_tells_schedules_apart() -> None:
    lengths = list(range(1, 60))
    assert make(lengths, "3-1").fingerprint() == make(lengths, "3-1").fingerprint()
    assert make(lengths, "3-1").fingerprint() != make(lengths, "2-1").fingerprint()
    assert make(lengths, "3-1").fingerprint() != make(lengths, "3-1", seed=1).fingerprint()


def test_a_document_over_the_budget_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="budget"):
        batch_cuts(np.array([101]), 100, 5)
