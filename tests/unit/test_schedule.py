from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_dist.config import load_config
from dflash_dist.data.batching import pack
from dflash_dist.data.schedule import Schedule, share_out, shuffled
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


def log_normal_lengths(count: int, seed: int = 0) -> np.ndarray:
    """Median 1,500 tokens, 90 % under 4,200, cut at 8,192."""
    drawn = np.random.default_rng(seed).lognormal(np.log(1500), np.log(4200 / 1500) / 1.2816, count)
    return np.clip(drawn, 16, 8192).astype(np.int64)


def rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    ranks = [np.argsort(np.argsort(values, kind="stable"), kind="stable") for values in (x, y)]
    return float(np.corrcoef(*ranks)[0, 1])


def test_batches_are_full_and_a_documents_place_does_not_depend_on_its_length() -> None:
    lengths = log_normal_lengths(40_000)
    order = shuffled(np.arange(len(lengths)), seed=1, epoch=1)
    batches = [order[places] for places in pack(lengths[order], 65536, 1024)]
    fills = np.array([lengths[batch].sum() for batch in batches]) / 65536
    assert fills.max() <= 1 and fills[:-1].mean() >= 0.99
    place = np.empty(len(lengths))
    place[np.concatenate(batches)] = np.repeat(np.arange(len(batches)), [len(batch) for batch in batches])
    assert abs(rank_correlation(lengths, place)) < 0.02
    squares = np.array([(lengths[batch].astype(float) ** 2).sum() for batch in batches])
    assert squares.std() < 0.1 * squares.mean(), "every batch has a like mix of lengths"
    assert (shuffled(np.arange(50), 1, 1) != shuffled(np.arange(50), 1, 2)).any()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 100), max_size=200), st.integers(1, 9))
def test_packing_holds_every_document_once_within_both_limits(lengths: list[int], max_documents: int) -> None:
    batches = pack(np.array(lengths, np.int64), 100, max_documents)
    assert sorted(place for batch in batches for place in batch.tolist()) == list(range(len(lengths)))
    for batch in batches:
        assert 1 <= len(batch) <= max_documents and sum(lengths[i] for i in batch) <= 100


@given(st.lists(st.floats(0, 100), max_size=40), st.integers(1, 6), st.booleans())
def test_sharing_out_is_even(weights: list[float], parts: int, equal_counts: bool) -> None:
    loads = [0.0] * parts
    part_of, load_at = share_out(weights, loads, equal_counts=equal_counts)
    for part in range(parts):
        mine = [i for i in range(len(weights)) if part_of[i] == part]
        assert loads[part] == pytest.approx(sum(weights[i] for i in mine))
        assert max((load_at[i] for i in mine), default=0.0) == loads[part]
    counts = Counter(part_of)
    if equal_counts:
        assert max(counts.values(), default=0) <= -(-len(weights) // parts)
    else:
        assert max(loads) <= sum(weights) / parts + max(weights, default=0) + 1e-9


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
        pack(np.array([101]), 100, 5)
