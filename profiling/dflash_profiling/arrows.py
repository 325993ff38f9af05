"""Where a rank's slices are drawn in a trace of all ranks, and the arrows between them."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dflash_profiling.columns import identity
from dflash_profiling.kineto import Event, Trace
from dflash_profiling.tracks import Numbering, Track, devices_of, lanes_of, tracks_of


class End(NamedTuple):
    """One end of an arrow, on the rank's clock."""

    track: tuple[int, int]
    """Process and thread to write."""
    time_ns: int
    end_ns: int
    """Of the slice that begins at `time_ns`; `time_ns` itself where none does."""


class Arrow(NamedTuple):
    """From a slice to another."""

    category: str
    name: str
    tail: End
    head: End


@dataclass(frozen=True)
class _Places:
    """The slices of one track that are in lane 0, in order of start."""

    starts: list[int]
    ends: list[int]
    reach: list[int]
    """The last end so far."""


class RankMap:
    """Where the slices of a rank are drawn."""

    def __init__(self, trace: Trace, place: int, numbers: Iterator[int]) -> None:
        self.trace, self.place = trace, place
        self.numbering = Numbering(trace, place, numbers)
        self.devices = devices_of(trace)
        self._tracks, self._track = tracks_of(trace, self.devices)
        self._lane = lanes_of(trace, self._track)
        self._known = set(self._tracks)
        self._moved: dict[tuple[Track, int, int, str], list[int]] = defaultdict(list)
        """Lanes of the slices that are not in lane 0, by track, start, end and name."""
        self._moved_starts: dict[tuple[Track, int], tuple[int, int]] = {}
        """Lane and end of the last that begins then."""
        self._crossed: set[Track] = set()
        self._places: dict[Track, _Places] = {}
        slices = trace.slices
        for index in np.flatnonzero(self._lane).tolist():
            track, lane = self._tracks[self._track[index]], int(self._lane[index])
            start_ns, end_ns = int(slices.start_ns[index]), int(slices.end_ns[index])
            self._moved[track, start_ns, end_ns, trace.names[slices.name[index]]].append(lane)
            self._moved_starts[track, start_ns] = (lane, end_ns)
            self._crossed.add(track)

    def lane(self, event: Event, on_gpu: bool, start_ns: int, end_ns: int) -> int:
        """Of a complete event; each is to be asked for once."""
        if not self._crossed:
            return 0
        track = _track(event, on_gpu)
        if track not in self._crossed:
            return 0
        lanes = self._moved.get((track, start_ns, end_ns, event["name"]))
        return lanes.pop() if lanes else 0

    def on_gpu(self, event: Event) -> bool:
        """Whether an event that is no slice is on a track of the GPU: where no track of the host has its numbers."""
        return _track(event, False) not in self._known and _track(event, True) in self._known

    def end(self, index: int) -> End:
        """The end of an arrow at a slice, by its index."""
        slices = self.trace.slices
        track = self.numbering.of_track(self._tracks[self._track[index]], int(self._lane[index]))
        return End(track, int(slices.start_ns[index]), int(slices.end_ns[index]))

    def locate(self, event: Event, time_ns: int) -> End | None:
        """The end of an arrow at a moment: at the slice that begins then, else within one that goes on."""
        within = None
        for track in (_track(event, True), _track(event, False)):
            if track not in self._known:
                continue
            places = self._places.get(track) or self._place(track)
            last = bisect_right(places.starts, time_ns) - 1
            if last >= 0 and places.starts[last] == time_ns:
                return End(self.numbering.of_track(track, 0), time_ns, places.ends[last])
            moved = self._moved_starts.get((track, time_ns))
            if moved:
                return End(self.numbering.of_track(track, moved[0]), time_ns, moved[1])
            if last >= 0 and places.reach[last] > time_ns:
                within = End(self.numbering.of_track(track, 0), time_ns, time_ns)
        return within

    def forget_places(self) -> None:
        """Frees what only `lane` and `locate` need."""
        self._places.clear()
        self._moved.clear()

    def _place(self, track: Track) -> _Places:
        slices = self.trace.slices
        rows = np.flatnonzero((self._track == self._tracks.index(track)) & (self._lane == 0))
        ends = slices.end_ns[rows]
        reach = np.maximum.accumulate(ends)
        self._places[track] = _Places(slices.start_ns[rows].tolist(), ends.tolist(), reach.tolist())
        return self._places[track]


class Arrows:
    """The two ends of each arrow of a rank, as its trace has them: launches, and the way from forward to backward."""

    def __init__(self) -> None:
        self._ends: dict[tuple[str, str, str], tuple[list[tuple[int, Event]], list[tuple[int, Event]]]] = {}

    def add(self, event: Event, time_ns: int) -> None:
        """Keeps an "s" or "f" event."""
        key = str(event.get("cat")), str(event.get("name")), str(event.get("id"))
        self._ends.setdefault(key, ([], []))[event["ph"] == "f"].append((time_ns, event))

    def pairs(self, rank_map: RankMap) -> tuple[list[Arrow], int]:
        """The arrows of which both ends lie in slices, and the number of those of which one does not.

        Tails or heads alone are no arrows: kineto gives one to each call that brings nothing to the GPU. A graph is
        launched once and has many kernels: each has an arrow of its own, as a viewer ends one at its first head.
        """
        arrows, loose = [], 0
        for (category, name, _), (tails, heads) in self._ends.items():
            located_tails = [rank_map.locate(event, time_ns) for time_ns, event in tails]
            found_tails = sorted((end for end in located_tails if end is not None), key=lambda end: end.time_ns)
            times = [end.time_ns for end in found_tails]
            for time_ns, event in heads:
                head = rank_map.locate(event, time_ns) if found_tails else None
                if head is None:
                    loose += bool(tails)
                    continue
                tail = max(bisect_right(times, time_ns) - 1, 0)  # the launch of before, or later by another clock
                arrows.append(Arrow(category, name, found_tails[tail], head))
        return arrows, loose


def _track(event: Event, on_gpu: bool) -> Track:
    return Track(identity(event.get("pid")), on_gpu, identity(event.get("tid")))
