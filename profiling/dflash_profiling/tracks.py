"""The rows on which one rank's slices are drawn in a trace of all ranks: their numbers, names and order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from dflash_profiling.columns import identity
from dflash_profiling.kineto import Event, Trace
from dflash_profiling.slices import CATEGORIES, GPU_WORK, Category

_ON_GPU = (*GPU_WORK, Category.GPU_USER_ANNOTATION, Category.SYNC)
_GPU_CATEGORIES = {name for name, category in CATEGORIES.items() if category in _ON_GPU}
_ON_HOST = (Category.CPU_OP, Category.RUNTIME, Category.PYTHON)
_MAX_LANES = 50


class Track(NamedTuple):
    """A thread or stream as the rank numbers it. In a container a host process may have the number of a GPU."""

    process: int
    on_gpu: bool
    thread: int


def title(trace: Trace) -> str:
    """The rank with its role, or the file of a trace that does not say its rank."""
    name = trace.path.name if trace.rank is None else f"rank {trace.rank}"
    return f"{name}, {trace.role}" if trace.role else name


def devices_of(trace: Trace) -> frozenset[int]:
    """The processes that are GPUs alone: whatever is in them is on the GPU, in which category ever."""
    slices = trace.slices
    gpus, hosts = (np.unique(slices.process[np.isin(slices.category, some)]) for some in (_ON_GPU, _ON_HOST))
    return frozenset(np.setdiff1d(gpus, hosts).tolist())


def is_on_gpu(event: Event, devices: frozenset[int]) -> bool:
    """Of a complete event, as in `tracks_of`."""
    return str(event.get("cat")).lower() in _GPU_CATEGORIES or identity(event.get("pid")) in devices


def tracks_of(trace: Trace, devices: frozenset[int]) -> tuple[list[Track], np.ndarray]:
    """All tracks with slices, and each slice's index among them."""
    slices = trace.slices
    on_gpu = np.isin(slices.category, _ON_GPU) | np.isin(slices.process, list(devices))
    rows = np.stack([slices.process, on_gpu.astype(np.int64), slices.thread], axis=1)
    distinct, inverse = np.unique(rows, axis=0, return_inverse=True)
    return [Track(p, bool(gpu), t) for p, gpu, t in distinct.tolist()], inverse.reshape(-1)


def lanes_of(trace: Trace, track: np.ndarray) -> np.ndarray:
    """Each slice's lane in its track: 0, or another where it cuts across a slice that is there.

    Viewers nest the slices of a thread and drop one that does not nest. A receive of gloo lasts until the wait for it,
    across whatever its thread does meanwhile, so receives have lanes of their own (-1, -2, ...) and nothing in them.
    """
    slices = trace.slices
    lane = np.zeros(len(slices), np.int16)
    apart = np.zeros(len(slices), bool)
    apart[_receives(trace)] = True
    for nests in (True, False):
        chosen = np.flatnonzero(apart != nests)
        chosen = chosen[np.argsort(track[chosen], kind="stable")]
        for rows in np.split(chosen, np.flatnonzero(np.diff(track[chosen])) + 1):
            found = np.array(_lanes(slices.start_ns[rows].tolist(), slices.end_ns[rows].tolist(), nests), np.int16)
            lane[rows] = found if nests else -1 - found
    return lane


def _receives(trace: Trace) -> list[int]:
    receives = [end for end in trace.communication if end.kind == "gloo" and end.direction == "receive"]
    return [end.slice for end in receives if trace.slices.category[end.slice] == Category.USER_ANNOTATION]


def _lanes(starts: list[int], ends: list[int], nests: bool) -> list[int]:
    open_ends: list[list[int]] = []
    """Of the slices that go on in each lane, the innermost last."""
    found = []
    for start, end in zip(starts, ends, strict=True):
        number = 0
        while number < len(open_ends):
            stack = open_ends[number]
            while stack and stack[-1] <= start:
                stack.pop()
            if not stack or (nests and end <= stack[-1]) or number == _MAX_LANES - 1:
                break
            number += 1
        else:
            open_ends.append([])
        open_ends[number].append(end)
        found.append(number)
    return found


@dataclass
class Numbering:
    """Gives a rank's tracks numbers that no other rank has, and says their names."""

    trace: Trace
    place: int
    """Among the ranks, from 0."""
    numbers: Iterator[int]
    _processes: dict[tuple[int, bool], tuple[int, Any]] = field(default_factory=dict)
    _threads: dict[tuple[Track, int], tuple[int, int, Any]] = field(default_factory=dict)

    def of_event(self, event: Event, on_gpu: bool, lane: int = 0) -> tuple[int, int]:
        """The process and thread to write."""
        track = Track(identity(event.get("pid")), on_gpu, identity(event.get("tid")))
        return self.of_track(track, lane, event.get("pid"), event.get("tid"))

    def of_track(self, track: Track, lane: int, process: Any = None, thread: Any = None) -> tuple[int, int]:
        """The same; `process` and `thread` are as the trace writes them."""
        known = self._threads.get((track, lane))
        if known is None:
            key = (track.process, track.on_gpu)
            if key not in self._processes:
                self._processes[key] = (next(self.numbers), process)
            known = self._processes[key][0], next(self.numbers), thread
            self._threads[track, lane] = known
        return known[:2]

    def metadata(self) -> list[Event]:
        """The events that name and order all tracks that were asked for: by rank, the host before its GPUs."""
        hosts = {key for key in self._processes if self._is_host(key)}
        events = []
        ordered = sorted(self._processes, key=lambda key: (key not in hosts, not key[1], key))
        for index, key in enumerate(ordered):
            number, raw = self._processes[key]
            name = f"{title(self.trace)}: {self._process_name(key, raw, len(hosts) > 1 and key in hosts)}"
            events.append(_named("process_name", number, 0, name=name))
            events.append(_named("process_sort_index", number, 0, sort_index=1000 * self.place + min(index, 999)))
        for index, (track, lane) in enumerate(sorted(self._threads, key=lambda key: (key[0], abs(key[1]), key[1]))):
            process, thread, raw = self._threads[track, lane]
            events.append(_named("thread_name", process, thread, name=self._thread_name(track, lane, raw)))
            events.append(_named("thread_sort_index", process, thread, sort_index=index))
        return events

    def _is_host(self, key: tuple[int, bool]) -> bool:
        slices = self.trace.slices
        kinds = (*_ON_HOST, Category.USER_ANNOTATION)
        return not key[1] and bool(np.isin(slices.category[slices.process == key[0]], kinds).any())

    def _process_name(self, key: tuple[int, bool], raw: Any, one_of_many: bool) -> str:
        if key[1]:
            return f"GPU {raw}"
        if self._is_host(key):
            return f"host, process {raw}" if one_of_many else "host"
        if raw == -1:
            return "profiler's overhead"
        return f"process {raw}" if not isinstance(raw, str) else raw or "others"

    def _thread_name(self, track: Track, lane: int, raw: Any) -> str:
        name = self.trace.threads.get((track.process, track.thread))
        if track.on_gpu:
            name = name if name and "stream" in name else f"stream {raw}"
        elif not name:
            name = (raw or "others") if isinstance(raw, str) else f"thread {raw}"
        if lane == 0:
            return name
        what = "receives" if lane < 0 else "overlapping"
        return f"{name}, {what}" if abs(lane) == 1 else f"{name}, {what} {abs(lane)}"


def _named(what: str, process: int, thread: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "ts": 0, "args": args}
