"""Reads the trace files that torch.profiler writes: kineto's JSON, of any version, whole or not at all."""

from __future__ import annotations

import gc
import multiprocessing
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from dflash_profiling.columns import identity, integers, nanoseconds, numbers, translated
from dflash_profiling.communication import Communication, find_communication
from dflash_profiling.slices import CATEGORIES, GPU_WORK, Category, Slices
from dflash_profiling.trace_file import MAX_BYTES, RECORD_SOME, TraceError, events_of, load, no_folder

_MAX_MALFORMED = 0.01
_MAX_METADATA_CHARACTERS = 1 << 16
MAX_US = 4e15
MAX_DURATION_US = 1e15
_MAX_BASE_NS = 3 * 10**18
"""With these three every time is an int64."""
_PROCESSES = 2
_ALONE_BYTES = 4 * 2**20
"""Files of this size together are read without further processes."""

Event = dict[str, Any]
_FIELDS = ("ts", "dur", "name", "cat", "pid", "tid", "args")
_FIELDS_OF = itemgetter(*_FIELDS)


@dataclass(frozen=True)
class MemoryEvents:
    """Columns over the allocator's events, ordered by time; all int64."""

    time_ns: np.ndarray
    bytes: np.ndarray
    """Negative where memory was freed."""
    allocated: np.ndarray
    reserved: np.ndarray
    """Total of the device after the event; -1 where the trace does not say."""
    device: np.ndarray
    """-1 on the host."""


@dataclass(frozen=True)
class Trace:
    """One rank's trace."""

    path: Path
    rank: int | None
    world_size: int | None
    role: str | None
    metadata: dict[str, Any]
    """The file's top-level keys but its events, and but those of great size."""
    base_ns: int | None
    names: list[str]
    slices: Slices
    communication: list[Communication]
    memory: MemoryEvents
    threads: dict[tuple[int, int], str]
    """Names by (process, thread)."""
    window_ns: tuple[int, int] | None
    """When the profiler began and ended to record, where the trace says so."""
    skipped_events: int
    """Malformed ones."""
    negative_durations: int
    """Slices that ended before they began; they are read as of no length."""
    max_launch_skew_ns: int
    """The most by which something ran on the GPU before it was launched, which only clocks that differ can do."""

    @property
    def has_gpu_rows(self) -> bool:
        """Whether anything on a GPU was recorded. If not, it is unknown how busy the GPU was."""
        return bool(np.isin(self.slices.category, GPU_WORK).any())


@dataclass(frozen=True)
class LaunchDelays:
    """From the start of each launch to the start on the GPU of what it launched: one row for each on the GPU."""

    gpu: np.ndarray
    launch: np.ndarray
    """Indices into the slices."""
    delay_ns: np.ndarray
    """int64; 0 where it was negative."""
    negative: int
    worst_ns: int
    """How many were negative, and the most by which one was."""


def launch_delays_ns(trace: Trace) -> LaunchDelays:
    """Delays of all GPU work whose launch is in the trace; a graph's launch is that of all its kernels."""
    return _launch_delays(trace.slices)


def _launch_delays(slices: Slices) -> LaunchDelays:
    gpu = np.flatnonzero(np.isin(slices.category, GPU_WORK) & (slices.correlation >= 0))
    launch = np.flatnonzero((slices.category == Category.RUNTIME) & (slices.correlation >= 0))
    launch = launch[np.argsort(slices.correlation[launch], kind="stable")]
    place = np.searchsorted(slices.correlation[launch], slices.correlation[gpu])
    inside = place < len(launch)
    gpu, launch = gpu[inside], launch[place[inside]]
    linked = slices.correlation[gpu] == slices.correlation[launch]
    gpu, launch = gpu[linked], launch[linked]
    delay_ns = slices.start_ns[gpu] - slices.start_ns[launch]
    worst_ns = max(0, -int(delay_ns.min(initial=0)))
    return LaunchDelays(gpu, launch, np.maximum(delay_ns, 0), int((delay_ns < 0).sum()), worst_ns)


def read_folder(folder: Path | str) -> list[Trace]:
    """The traces of all ranks in a folder, ordered by rank: each rank's newest, where it has several.

    Larger ones are read by processes of their own, so a script needs its `if __name__ == "__main__":`.
    """
    folder = Path(folder)
    paths = _newest(folder)
    try:
        if len(paths) == 1 or sum(path.stat().st_size for path in paths) < _ALONE_BYTES:
            traces = [read_trace(path) for path in paths]
        else:
            with ProcessPoolExecutor(_PROCESSES, multiprocessing.get_context("spawn")) as pool:
                traces = list(pool.map(read_trace, paths))
    except BrokenProcessPool:
        raise TraceError(
            f"{folder} could not be read, as a process that read a trace of it died: trace fewer steps if memory is "
            'short, and call this below `if __name__ == "__main__":` in a script'
        ) from None
    except TraceError as error:
        if len(paths) == 1:
            raise
        raise TraceError(f"{error}, or take it out of the folder to read the other {len(paths) - 1}") from None
    of_rank: dict[int | Path, Trace] = {}
    for trace in sorted(traces, key=lambda trace: _stamp(trace.path)):
        of_rank[trace.path if trace.rank is None else trace.rank] = trace
    return sorted(of_rank.values(), key=lambda trace: (trace.rank is None, trace.rank or 0, trace.path))


_FILE_NAME = re.compile(r"(?P<worker>.+?)(?:\.(?P<stamp>\d{1,20}))?\.pt\.trace\.json(?:\.gz)?")

_OTHER_FILE_NAME = re.compile(r".*(trace|rank).*\.json(\.gz)?", re.IGNORECASE)
"""As `export_chrome_trace` may be told to name a file."""


def _stamp(path: Path) -> int:
    match = _FILE_NAME.fullmatch(path.name)
    return int(match["stamp"] or 0) if match else 0


def _newest(folder: Path) -> list[Path]:
    """The newest trace of each worker, by its file's name."""
    if not folder.is_dir():
        raise TraceError(no_folder(folder))
    newest: dict[str, Path] = {}
    for path in sorted(folder.iterdir(), key=lambda path: (_stamp(path), path.name)):
        if match := _FILE_NAME.fullmatch(path.name):
            newest[match["worker"]] = path
    if not newest and (folder / "profile").is_dir():  # of a run
        return _newest(folder / "profile")
    if not newest:
        newest = {path.name: path for path in sorted(folder.iterdir()) if _OTHER_FILE_NAME.fullmatch(path.name)}
    if not newest:
        beside = [path for path in sorted(folder.glob("*/*.pt.trace.json*")) if _FILE_NAME.fullmatch(path.name)]
        mend = f"give {beside[0].parent}" if beside else RECORD_SOME
        raise TraceError(f"{folder} holds no trace (*.pt.trace.json or *.pt.trace.json.gz): {mend}")
    return list(newest.values())


def read_trace(path: Path | str, max_bytes: int = MAX_BYTES) -> Trace:
    """Reads one file of kineto's JSON, compressed or not; TraceError for any other.

    `max_bytes`: more JSON than this is refused, before it fills the memory.
    """
    path = Path(path)
    with no_garbage_collection():
        try:
            return _parse(path, *events_of(path, load(path, max_bytes)))
        except RecursionError:
            raise TraceError(
                f"{path} is JSON of great depth, not a trace: give a file that torch.profiler wrote"
            ) from None
        except MemoryError:
            raise TraceError(f"{path} does not fit into the memory: trace fewer steps, or leave out stacks") from None


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Millions of small objects are made, none of them garbage: looking for it would take half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _parse(path: Path, events: list[Any], top: dict[str, Any]) -> Trace:
    metadata = {key: value for key, value in top.items() if len(repr(value)) <= _MAX_METADATA_CHARACTERS}
    base = top.get("baseTimeNanoseconds")
    base_ns = base if type(base) is int and 0 <= base <= _MAX_BASE_NS else None
    good = events if set(map(type, events)) <= {dict} else [event for event in events if type(event) is dict]
    phases = [event.get("ph") for event in good]
    complete = [event for event, phase in zip(good, phases, strict=True) if phase == "X"]
    others = [event for event, phase in zip(good, phases, strict=True) if phase == "i" or phase == "M"]
    if not complete:
        raise TraceError(f"{path} holds no events: record it again, with the steps to trace inside the window")
    names, slices, args, negative = _slices(complete, base_ns or 0)
    skipped = len(events) - list(map(type, phases)).count(str) + len(complete) - len(slices)
    if not len(slices) or skipped > _MAX_MALFORMED * len(events):
        raise TraceError(
            f"{path} is damaged, {skipped} of its {len(events)} events are malformed: record the trace or copy the "
            "file again"
        )
    rank, world_size = _place(path, metadata)
    role = metadata.get("role")
    return Trace(
        path=path,
        rank=rank,
        world_size=world_size,
        role=role if isinstance(role, str) else None,
        metadata=metadata,
        base_ns=base_ns,
        names=names,
        slices=slices,
        communication=find_communication(slices, names, args, rank),
        memory=_memory(others, base_ns or 0),
        threads=_thread_names(others),
        window_ns=_window(others, base_ns or 0),
        skipped_events=skipped,
        negative_durations=negative,
        max_launch_skew_ns=_launch_delays(slices).worst_ns,
    )


def _slices(complete: list[Event], base_ns: int) -> tuple[list[str], Slices, list[Event], int]:
    """Names, columns and arguments of those with a name and times, in order; how many ended before they began."""
    try:  # in one pass: to reach an event takes longer than to read it
        rows: list[tuple[Any, ...]] = list(map(_FIELDS_OF, complete))
    except KeyError:
        rows = [tuple(map(event.get, _FIELDS)) for event in complete]
    columns = list(zip(*rows, strict=True))
    start_us, duration_us = numbers(columns[0]), numbers(columns[1])
    valid = (np.abs(start_us) <= MAX_US) & (np.abs(duration_us) <= MAX_DURATION_US)  # false for NaN
    valid &= np.fromiter([type(name) is str for name in columns[2]], bool, len(rows))
    if not valid.all():
        columns = [tuple(compress(column, valid.tolist())) for column in columns]
    start_ns = base_ns + nanoseconds(start_us[valid])
    duration_ns = nanoseconds(duration_us[valid])
    end_ns = start_ns + np.maximum(duration_ns, 0)
    order = np.lexsort((-end_ns, start_ns))
    _, _, row_names, row_categories, processes, threads, all_args = columns
    args = [arg if type(arg) is dict else {} for arg in all_args]
    names = list(dict.fromkeys(row_names))
    index_of = {name: index for index, name in enumerate(names)}
    category = translated(row_categories, _category, np.uint8)
    device, stream = _places(args, processes, threads, category)
    correlations = [arg.get("correlation", -1) for arg in args]
    external_ids = [arg.get("External id", arg.get("external id", -1)) for arg in args]  # older writers: small
    slices = Slices(
        start_ns=start_ns[order],
        end_ns=end_ns[order],
        category=category[order],
        name=translated(row_names, index_of.__getitem__, np.int32)[order],
        process=translated(processes, identity)[order],
        thread=translated(threads, identity)[order],
        device=device[order],
        stream=stream[order],
        correlation=integers(correlations, 0, 2**62)[order],
        external_id=integers(external_ids, 0, 2**62)[order],
    )
    return names, slices, [args[index] for index in order.tolist()], int((duration_ns < 0).sum())


def _places(
    args: list[Event], processes: Sequence[Any], threads: Sequence[Any], category: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Device and stream of what is on a GPU, where kineto makes them the process and the thread."""
    device, stream = np.full(len(args), -1, np.int16), np.full(len(args), -1, np.int32)
    on_gpu = np.isin(category, (*GPU_WORK, Category.GPU_USER_ANNOTATION, Category.SYNC))
    rows = np.flatnonzero(on_gpu).tolist()
    device[on_gpu] = integers([args[row].get("device", processes[row]) for row in rows], 0, 2**15 - 1)
    stream[on_gpu] = integers([args[row].get("stream", threads[row]) for row in rows], 0, 2**31 - 1)
    unnamed = [row for row in np.flatnonzero(category == Category.SYNC).tolist() if "stream" not in args[row]]
    stream[unnamed] = -1  # of a wait the thread is shifted
    return device, stream


def _category(name: Any) -> int:
    return CATEGORIES.get(str(name).lower(), Category.OTHER)


_RANK_IN_NAME = re.compile(r"rank[-_]?(\d{1,7})(?!\d)")


def _place(path: Path, metadata: dict[str, Any]) -> tuple[int | None, int | None]:
    """Rank and world size: torch's own word, that of `TraceWindow`, the file's name."""
    info = metadata.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    match = _RANK_IN_NAME.search(path.name)
    candidates = [info.get("rank"), metadata.get("rank"), int(match[1]) if match else None]
    rank, world_size = (
        next((value for value in values if type(value) is int and 0 <= value < 2**31), None)
        for values in (candidates, [info.get("world_size"), metadata.get("world_size")])
    )
    return rank, world_size


def _memory(events: list[Event], base_ns: int) -> MemoryEvents:
    events = [event for event in events if event.get("name") == "[memory]"]
    time_us = numbers([event.get("ts") for event in events])
    valid = np.abs(time_us) <= MAX_US
    time_ns = base_ns + nanoseconds(time_us[valid])
    all_args = [event.get("args") for event in compress(events, valid.tolist())]
    args = [arg if type(arg) is dict else {} for arg in all_args]
    order = np.argsort(time_ns, kind="stable")
    columns = (
        integers([arg.get("Bytes", 0) for arg in args], -(2**62), 2**62),
        integers([arg.get("Total Allocated") for arg in args], 0, 2**62),
        integers([arg.get("Total Reserved") for arg in args], 0, 2**62),
        integers([arg.get("Device Id") if arg.get("Device Type") != 0 else -1 for arg in args], 0, 2**15),
    )
    return MemoryEvents(time_ns[order], *(column[order] for column in columns))


def _window(instants: list[Event], base_ns: int) -> tuple[int, int] | None:
    """From the first "Iteration Start" to the last "Record Window End"."""
    moments = []
    for prefix, choose in (("Iteration Start", min), ("Record Window End", max)):
        times_us = [event.get("ts") for event in instants if str(event.get("name")).startswith(prefix)]
        column = numbers(times_us)
        column = column[np.abs(column) <= MAX_US]
        if not len(column):
            return None
        moments.append(base_ns + int(choose(nanoseconds(column))))
    return (moments[0], moments[1]) if moments[0] <= moments[1] else None


def _thread_names(events: Iterable[Event]) -> dict[tuple[int, int], str]:
    names = {}
    for event in events:
        args = event.get("args")
        if event.get("name") == "thread_name" and type(args) is dict and type(args.get("name")) is str:
            names[identity(event.get("pid")), identity(event.get("tid"))] = args["name"]
    return names
