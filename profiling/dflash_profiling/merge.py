"""Writes the traces of all ranks as one trace on one clock, with an arrow from each send to its receive."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeGuard

from dflash_profiling import kineto
from dflash_profiling.arrows import Arrow, Arrows, RankMap
from dflash_profiling.clock import align, match_p2p
from dflash_profiling.kineto import MAX_DURATION_US, MAX_US, Event, Trace
from dflash_profiling.trace_file import TraceError, events_of, load
from dflash_profiling.tracks import is_on_gpu

FILE_NAME = "merged.json.gz"
"""Beside the traces that it is of; no reader takes it for one of them."""
_CHUNK = 10_000
_SECOND_NS = 10**9
_LINKS = ("correlation", "External id", "external id", "wait_on_cuda_event_record_corr_id")
_RANK_BITS = 32


@dataclass(frozen=True)
class Merged:
    """What was written."""

    path: Path
    ranks: int
    messages: int
    """Of which both ends are in the traces, each with an arrow."""
    unaligned: dict[str, str]
    """Why a trace is not on the common clock but at its start, by the file's name."""
    violation_ns: int
    """By how much the messages contradict each other's clocks, see `Alignment`."""
    unpaired: int
    """Messages without an arrow, as their two ends cannot be told from those of others."""
    left_out: int
    """Events that are malformed, or far from all slices of their rank."""
    loose_arrows: int
    """Within a rank, of which an end lies in no slice: they are left out."""

    def warnings(self) -> list[str]:
        """A line for each thing to know before believing the picture."""
        lines = [f"{name} is put at the start, on no common clock: {why}" for name, why in self.unaligned.items()]
        if self.violation_ns:
            lines.append(f"the messages contradict the clocks by {self.violation_ns / 1000:.6g} us; arrows may go back")
        if self.unpaired:
            lines.append(f"{self.unpaired} messages could not be paired with their other ends and have no arrow")
        if self.left_out:
            lines.append(f"{self.left_out} events are left out: malformed, or more than 1 s away from all others")
        if self.loose_arrows:
            lines.append(
                f"{self.loose_arrows} arrows within ranks are left out: the tail is missing, or an end lies in no slice"
            )
        return lines


def merge_folder(folder: Path | str, out: Path | str | None = None, overwrite: bool = False) -> Merged:
    """Writes the newest trace of each rank in `folder` to `out`, by default `merged.json.gz` in that folder.

    One rank's events are in memory at a time. The file appears whole or not at all.
    """
    folder = Path(folder)
    out = folder / FILE_NAME if out is None else Path(out)
    if not out.name.endswith(".gz") or ".pt.trace.json" in out.name:
        raise TraceError(
            f"{out} cannot be the merged trace's name: it must end in .gz, and not be that of one rank's trace as "
            f"*.pt.trace.json.gz is; give another, as {FILE_NAME}"
        )
    _refuse_existing(out, overwrite)
    traces = kineto.read_folder(folder)
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        with gzip.open(part, "wt", encoding="ascii", compresslevel=4) as file:
            merged = _Merge(traces, file).write(out)
        _publish(part, out, overwrite)
    except OSError as error:
        raise TraceError(f"{out} cannot be written ({error.strerror or error}): give another file with --out") from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
    return merged


def _refuse_existing(out: Path, overwrite: bool) -> None:
    if out.is_dir() or (os.path.lexists(out) and not overwrite):
        mend = "give another --out" if out.is_dir() else "give --overwrite, or another --out"
        raise TraceError(f"{out} exists already: {mend}")


def _publish(part: Path, out: Path, overwrite: bool) -> None:
    """Gives the whole file its name; one that came to be meanwhile is kept, where the file system has hard links."""
    if not overwrite:
        try:
            os.link(part, out)
            return
        except FileExistsError:
            _refuse_existing(out, overwrite)
        except OSError:
            _refuse_existing(out, overwrite)
    os.replace(part, out)


class _Merge:
    def __init__(self, traces: Sequence[Trace], file: TextIO) -> None:
        self.traces, self.file = traces, file
        self.alignment = align(traces)
        aligned = [trace for trace in traces if trace.path.name not in self.alignment.unaligned]
        starts_ns = [_start_ns(trace) + self.alignment.offset_ns(trace) for trace in aligned]
        self.dated = any(trace.base_ns is not None for trace in aligned)
        first_ns = min(starts_ns, default=_SECOND_NS)
        self.base_ns = first_ns // _SECOND_NS * _SECOND_NS - _SECOND_NS
        """Of the times that are written, which so are short and positive."""
        self.shifts_ns = [
            self.alignment.offset_ns(trace) - self.base_ns
            if trace.path.name not in self.alignment.unaligned
            else first_ns - self.base_ns - _start_ns(trace)
            for trace in traces
        ]
        """To be added to the times of each trace's columns to have those that are written."""
        self.numbers = itertools.count(1)
        self.left_out = self.loose_arrows = 0
        self._empty = True

    def write(self, out: Path) -> Merged:
        self.file.write(json.dumps(_top_level(self))[:-1] + ', "traceEvents": [\n')
        maps = [RankMap(trace, place, self.numbers) for place, trace in enumerate(self.traces)]
        for rank_map, shift_ns in zip(maps, self.shifts_ns, strict=True):
            self._write_rank(rank_map, shift_ns)
        messages = self._write_messages(maps)
        self.file.write("\n]}\n")
        return Merged(
            path=out,
            ranks=len(self.traces),
            messages=messages,
            unaligned=self.alignment.unaligned,
            violation_ns=self.alignment.violation_ns,
            unpaired=sum(self.alignment.unpaired.values()),
            left_out=self.left_out,
            loose_arrows=self.loose_arrows,
        )

    def _write_rank(self, rank_map: RankMap, shift_ns: int) -> None:
        trace = rank_map.trace
        arrows = Arrows()
        with kineto.no_garbage_collection():
            events, _ = events_of(trace.path, load(trace.path, kineto.MAX_BYTES))
            rewrite = _Rewrite(rank_map, shift_ns, arrows)
            for first in range(0, len(events), _CHUNK):
                chunk = events[first : first + _CHUNK]
                events[first : first + _CHUNK] = [None] * len(chunk)  # so that they go as new ones come
                rewritten = [rewrite(event) for event in chunk]
                self.left_out += rewrite.take_left_out()
                self._put([event for event in rewritten if event is not None])
            pairs, loose = arrows.pairs(rank_map)
            self.loose_arrows += loose
            for some in _chunks(pairs):
                self._put([end for arrow in some for end in self._ends(arrow, shift_ns, shift_ns)])
            self._put(rank_map.numbering.metadata())
        rank_map.forget_places()

    def _write_messages(self, maps: list[RankMap]) -> int:
        unaligned = self.alignment.unaligned
        place_of = {trace.rank: place for place, trace in enumerate(self.traces) if trace.path.name not in unaligned}
        messages = match_p2p(self.traces, self.alignment)
        for some in _chunks(messages):
            events = []
            for message in some:
                here, there = place_of[message.source], place_of[message.destination]
                send, receive = maps[here].end(message.send_slice), maps[there].end(message.receive_slice)
                arrow = Arrow("message", f"rank {message.source} to rank {message.destination}", send, receive)
                ends = self._ends(arrow, self.shifts_ns[here], self.shifts_ns[there])
                ends[0]["args"] = {"bytes": message.bytes, "waiting_us": message.waiting_ns / 1000}
                events += ends
            self._put(events)
        return len(messages)

    def _ends(self, arrow: Arrow, here_ns: int, there_ns: int) -> list[Event]:
        """An arrow's two events. Viewers want its head no earlier than its tail, and in the slice that it points to."""
        (tail_track, tail_ns, _), (head_track, head_ns, head_end_ns) = arrow.tail, arrow.head
        from_ns, to_ns = tail_ns + here_ns, head_ns + there_ns
        to_ns = max(to_ns, min(from_ns, head_end_ns + there_ns - 1))
        common = {"cat": arrow.category, "name": arrow.name, "id": next(self.numbers)}
        return [
            {"ph": "s", **common, "pid": tail_track[0], "tid": tail_track[1], "ts": from_ns / 1000},
            {"ph": "f", **common, "pid": head_track[0], "tid": head_track[1], "ts": to_ns / 1000, "bp": "e"},
        ]

    def _put(self, events: list[Event]) -> None:
        if not events:
            return
        try:
            text = json.dumps(events, allow_nan=False)
        except ValueError:  # browsers take no NaN, which kineto writes and Python reads
            text = json.dumps(_finite(events), allow_nan=False)
        self.file.write(text[1:-1] if self._empty else ",\n" + text[1:-1])
        self._empty = False


class _Rewrite:
    """Rewrites a rank's events for the merged trace, and keeps its arrows for later."""

    def __init__(self, rank_map: RankMap, shift_ns: int, arrows: Arrows) -> None:
        self.map, self.arrows = rank_map, arrows
        trace = rank_map.trace
        self.base_ns = trace.base_ns or 0
        self.shift_ns = shift_ns
        self.first_ns = _start_ns(trace) - _SECOND_NS
        self.last_ns = int(trace.slices.end_ns.max()) + _SECOND_NS
        self.id_offset = rank_map.place << _RANK_BITS
        self._left_out = 0

    def take_left_out(self) -> int:
        """How many were left out since the last call."""
        count, self._left_out = self._left_out, 0
        return count

    def __call__(self, event: Any) -> Event | None:
        """The event to write; None for one that is left out or comes later."""
        phase = event.get("ph") if type(event) is dict else None
        if phase == "M":
            return None  # all tracks are named anew
        time_ns = self._time_ns(event.get("ts")) if type(phase) is str else None
        if time_ns is None:
            self._left_out += 1
        elif phase == "X":
            return self._slice(event, time_ns)
        elif not self.first_ns <= time_ns <= self.last_ns:
            self._left_out += 1
        elif phase == "s" or phase == "f":
            self.arrows.add(event, time_ns)
        elif phase != "t":
            process, thread = self.map.numbering.of_event(event, self.map.on_gpu(event))
            event.update(pid=process, tid=thread, ts=(time_ns + self.shift_ns) / 1000)
            if "id" in event:
                event["id"] = f"{self.map.place}:{event['id']}"
            return event
        return None

    def _slice(self, event: Event, start_ns: int) -> Event | None:
        duration, name = event.get("dur"), event.get("name")
        if not (_is_number(duration, MAX_DURATION_US) and type(name) is str):
            self._left_out += 1
            return None
        end_ns = start_ns + max(0, _nanoseconds(duration))
        on_gpu = is_on_gpu(event, self.map.devices)
        lane = self.map.lane(event, on_gpu, start_ns, end_ns)
        process, thread = self.map.numbering.of_event(event, on_gpu, lane)
        event.update(pid=process, tid=thread, ts=(start_ns + self.shift_ns) / 1000, dur=(end_ns - start_ns) / 1000)
        args = event.get("args")
        if self.id_offset and type(args) is dict:
            for key in _LINKS:
                value = args.get(key)
                if type(value) is int and 0 <= value < 1 << _RANK_BITS:
                    args[key] = value + self.id_offset
        return event

    def _time_ns(self, time_us: Any) -> int | None:
        """As in the trace's columns."""
        return self.base_ns + _nanoseconds(time_us) if _is_number(time_us, MAX_US) else None


def _is_number(value: Any, most: float) -> TypeGuard[float]:
    return (type(value) is float or type(value) is int) and -most <= value <= most


def _nanoseconds(microseconds: float) -> int:
    """As `columns.nanoseconds`: the whole part apart."""
    whole = math.floor(microseconds)
    return whole * 1000 + round((microseconds - whole) * 1000)


def _start_ns(trace: Trace) -> int:
    return int(trace.slices.start_ns[0])


def _top_level(merge: _Merge) -> dict[str, Any]:
    ranks = [
        {
            "rank": trace.rank,
            "role": trace.role,
            "file": trace.path.name,
            "offset_ns": merge.alignment.offset_ns(trace),
            "unaligned": merge.alignment.unaligned.get(trace.path.name),
        }
        for trace in merge.traces
    ]
    base = {"baseTimeNanoseconds": merge.base_ns} if merge.dated else {}
    return {"schemaVersion": 1, "displayTimeUnit": "ms", **base, "ranks": ranks}


def _chunks(values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (values[first : first + _CHUNK] for first in range(0, len(values), _CHUNK))


def _finite(value: Any) -> Any:
    """With text in place of numbers that JSON does not know."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
