"""Sets of half-open intervals of time, in nanoseconds: two int64 arrays, sorted and disjoint once they are a union.

Shape suffixes: I intervals of one set, J of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Times = np.ndarray
"""int64 nanoseconds."""


class Intervals(NamedTuple):
    """Sorted, disjoint and not touching; none is empty."""

    start_I: Times
    end_I: Times

    @property
    def total_ns(self) -> int:
        """The time that they cover."""
        return int((self.end_I - self.start_I).sum())


def union(start_I: Times, end_I: Times) -> Intervals:
    """Of intervals in any order, which may overlap or be empty."""
    keep = end_I > start_I
    start_I, end_I = start_I[keep].astype(np.int64), end_I[keep].astype(np.int64)
    order = np.argsort(start_I, kind="stable")
    start_I, reach_I = start_I[order], np.maximum.accumulate(end_I[order])
    opens_I = np.ones(len(start_I), bool)
    opens_I[1:] = start_I[1:] > reach_I[:-1]
    closes_I = np.append(opens_I[1:], True)[: len(start_I)]
    return Intervals(start_I[opens_I], reach_I[closes_I])


def intersection(first: Intervals, second: Intervals) -> Intervals:
    """The time in both."""
    if len(first.start_I) > len(second.start_I):  # the fewer are looked up among the more
        first, second = second, first
    # An interval meets those of the other set from the first that ends after its start to the last before its end.
    low_I = np.searchsorted(second.end_I, first.start_I, side="right")
    high_I = np.searchsorted(second.start_I, first.end_I, side="left")
    count_I = np.maximum(high_I - low_I, 0)
    mine = np.repeat(np.arange(len(first.start_I)), count_I)
    other = np.arange(count_I.sum()) - np.repeat(np.cumsum(count_I) - count_I, count_I) + np.repeat(low_I, count_I)
    return Intervals(
        np.maximum(first.start_I[mine], second.start_I[other]), np.minimum(first.end_I[mine], second.end_I[other])
    )


def difference(first: Intervals, second: Intervals) -> Intervals:
    """The time in the first alone."""
    if not len(first.start_I) or not len(second.start_I):
        return first
    low, high = first.start_I[0], first.end_I[-1]
    gaps = Intervals(np.append(low, second.end_I), np.append(second.start_I, max(high, low)))
    keep = gaps.end_I > gaps.start_I
    return intersection(first, Intervals(gaps.start_I[keep], gaps.end_I[keep]))


def joined(sets: Sequence[Intervals]) -> Intervals:
    """What lies in any of the sets."""
    starts, ends = ([getattr(s, name) for s in sets] for name in ("start_I", "end_I"))
    return union(np.concatenate([*starts, np.empty(0, np.int64)]), np.concatenate([*ends, np.empty(0, np.int64)]))
