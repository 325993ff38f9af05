"""What the timeline shows: for each rank its lanes, and the messages between the ranks, on one clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflash_profiling.analysis import STEP, RankAnalysis, RankTime, part_of_kernels, times_of_ranks
from dflash_profiling.clock import Alignment, Message, align, match_p2p
from dflash_profiling.kineto import Category, Trace
from dflash_profiling.report.levels import Lane, levels, packed
from dflash_profiling.report.text import duration, label, shortened
from dflash_profiling.timeline import PARTS

SPAN_KIND, STEP_KIND = 254, 253
"""Colours of a span and of a step; any other kind is the place of a part in `PARTS`."""
MAX_SEGMENTS = 400_000
"""Of all lanes together, at the finest level."""
MAX_MESSAGES = 20_000
MAX_STREAMS = 4
MAX_DEPTH = 3
MAX_NAMES = 60_000
MAX_FULL_RANKS = 16
"""Of more ranks each has only the lane of its parts."""
_UINT32 = 2**32 - 1


@dataclass
class _Names:
    """The names on the page, each once."""

    places: dict[str, int] = field(default_factory=dict)

    def place(self, name: str) -> int:
        name = shortened(name, 160)
        if name not in self.places and len(self.places) >= MAX_NAMES:
            name = "(one of too many names)"
        return self.places.setdefault(name, len(self.places))


@dataclass(frozen=True)
class Timeline:
    """The timeline's numbers, and what is to be said about it."""

    payload: dict[str, Any]
    notes: list[str]


def timeline(traces: Sequence[Trace], ranks: Sequence[RankAnalysis]) -> Timeline:
    """All ranks from the first window's begin to the last one's end."""
    alignment = align(traces)
    messages = match_p2p(traces, alignment)
    times = times_of_ranks(traces, alignment, messages)
    begin_ns, end_ns, shifts = _extent(traces, times, alignment)
    names = _Names()
    lanes = [
        _lanes(trace, time, shift, end_ns - begin_ns, names)
        for trace, time, shift in zip(traces, times, shifts, strict=True)
    ]
    crowded = len(ranks) > MAX_FULL_RANKS
    if crowded:
        lanes = [of_rank[:1] for of_rank in lanes]
    total_ns = max(end_ns - begin_ns, 1)
    unit_ns = total_ns // _UINT32 + 1
    most = _fair_share([len(lane) for of_rank in lanes for _, lane in of_rank], MAX_SEGMENTS)
    notes, rows = _notes(alignment, len(traces) == 1), []
    if crowded:
        notes.append(f"The timeline of {len(ranks)} ranks shows only what their time counts as, not each event.")
    merged_ns: dict[str, float] = {}
    for rank, of_rank in zip(ranks, lanes, strict=True):
        row: dict[str, Any] = {"rank": "?" if rank.rank is None else str(rank.rank), "lanes": []}
        row["role"] = shortened(rank.role or "", 24)
        row["host"] = not rank.has_gpu_rows
        for title, lane in of_rank:
            found = levels(lane, total_ns, most)
            if found[-1].bin_ns:
                merged_ns[row["rank"]] = max(merged_ns.get(row["rank"], 0), found[-1].bin_ns)
            row["lanes"].append({"title": title, "levels": [packed(level, unit_ns) for level in found]})
        rows.append(row)
    if merged_ns:
        notes.append(
            f"There are more events than the page holds: at the finest zoom those shorter than "
            f"{duration(max(merged_ns.values()))} are merged with their neighbours, in rank "
            f"{', '.join(merged_ns)}. A merged run tells how many events it holds."
        )
    arrows = _arrows(ranks, messages, begin_ns, total_ns, unit_ns)
    if len(messages) > MAX_MESSAGES:
        notes.append(f"Of {len(messages)} messages the {MAX_MESSAGES} with the longest waits are drawn.")
    payload = {"total": total_ns / unit_ns, "unit": unit_ns, "names": list(names.places), "rows": rows, "parts": PARTS}
    return Timeline({**payload, "messages": arrows}, notes)


def _extent(traces: Sequence[Trace], times: Sequence[RankTime], alignment: Alignment) -> tuple[int, int, list[int]]:
    """Begin and end of the timeline, and what brings each trace's times to its begin.

    A trace that is on no common clock begins with the timeline.
    """
    known = [alignment.offset_ns(t) for t in traces]
    apart = [t.path.name in alignment.unaligned and len(traces) > 1 for t in traces]
    edges = [
        (int(time.window.start_I[0]), int(time.window.end_I[-1])) if len(time.window.start_I) else None
        for time in times
    ]
    begins = [e[0] + offset for e, offset, lone in zip(edges, known, apart, strict=True) if e and not lone]
    begin_ns = min(begins, default=min((e[0] for e in edges if e), default=0))
    shifts, end_ns = [], begin_ns
    for edge, offset, lone in zip(edges, known, apart, strict=True):
        shift = (begin_ns - edge[0] if lone else offset) if edge else offset
        shifts.append(shift - begin_ns)
        end_ns = max(end_ns, edge[1] + shift if edge else end_ns)
    return begin_ns, end_ns, shifts


def _fair_share(sizes: Sequence[int], most: int) -> int:
    """The limit of each for which all together are within `most`."""
    left, open_sizes = most, sorted(sizes)
    while open_sizes and open_sizes[0] * len(open_sizes) <= left:
        left -= open_sizes.pop(0)
    return max(64, left // len(open_sizes)) if open_sizes else most


def _lanes(trace: Trace, time: RankTime, shift_ns: int, total_ns: int, names: _Names) -> list[tuple[str, Lane]]:
    """Parts; work on the GPU by stream, or the host's operations; spans by depth."""
    limits = shift_ns, total_ns
    found = [("where the time goes", _of_parts(time, limits, names, not trace.has_gpu_rows))]
    place_N = np.full(len(trace.names), -1, np.int64)

    def of_slices(chosen_S: np.ndarray, kind_S: np.ndarray) -> Lane:
        places = np.flatnonzero(chosen_S)
        for name in np.unique(trace.slices.name[places]).tolist():
            place_N[name] = names.place(trace.names[name])
        slices = trace.slices
        return _cut(
            slices.start_ns[places], slices.end_ns[places], kind_S[places], place_N[slices.name[places]], *limits
        )

    if trace.has_gpu_rows:
        part_S = part_of_kernels(trace)
        found += [(title, of_slices(chosen_S, part_S)) for title, chosen_S in _streams(trace, part_S != 255)]
    else:
        outer_S = _outermost(trace)
        found.append(("operations of the host", of_slices(outer_S, np.full(len(trace.slices), SPAN_KIND, np.uint8))))
    for depth, level in enumerate(_by_depth(_steps(trace) + time.spans)):
        rows = [(start, end, name) for name, start, end in level]
        kinds = np.array([STEP_KIND if name.startswith(STEP) else SPAN_KIND for _, _, name in rows], np.uint8)
        starts, ends = np.array([row[:2] for row in rows], np.int64).reshape(-1, 2).T
        lane = _cut(starts, ends, kinds, np.array([names.place(row[2]) for row in rows], np.int64), *limits)
        found.append((f"spans, depth {depth + 1}", lane))
    return [(title, lane) for title, lane in found if len(lane)]


def _of_parts(time: RankTime, limits: tuple[int, int], names: _Names, host: bool) -> Lane:
    parts = [(PARTS.index(name), names.place(label(name, host)), share) for name, share in time.parts.items()]
    sizes = [len(share.start_I) for _, _, share in parts]
    start, end = (np.concatenate([column(share) for _, _, share in parts]) for column in (_starts, _ends))
    kind = np.repeat(np.array([kind for kind, _, _ in parts], np.uint8), sizes)
    name = np.repeat(np.array([name for _, name, _ in parts], np.int64), sizes)
    order = np.argsort(start, kind="stable")
    return _cut(start[order], end[order], kind[order], name[order], *limits)


def _starts(share: Any) -> np.ndarray:
    return share.start_I


def _ends(share: Any) -> np.ndarray:
    return share.end_I


def _cut(start: np.ndarray, end: np.ndarray, kind: np.ndarray, name: np.ndarray, shift_ns: int, total_ns: int) -> Lane:
    """What lies within the timeline, by its clock."""
    start, end = np.clip(start + shift_ns, 0, total_ns), np.clip(end + shift_ns, 0, total_ns)
    keep = end > start
    return Lane(start[keep], end[keep], kind[keep], name[keep])


def _streams(trace: Trace, work_S: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """The busiest streams each apart, in the order of their numbers, then all others together."""
    key_S = trace.slices.device.astype(np.int64) * 2**32 + trace.slices.stream + 1
    keys, place = np.unique(key_S[work_S], return_inverse=True)
    busy = np.bincount(place, (trace.slices.end_ns - trace.slices.start_ns)[work_S].astype(float))
    several = len(np.unique(trace.slices.device[work_S])) > 1
    alone = keys if len(keys) <= MAX_STREAMS else np.sort(keys[np.argsort(-busy)[: MAX_STREAMS - 1]])
    found = []
    for key in alone.tolist():
        title = f"stream {key % 2**32 - 1}" if key % 2**32 else "stream ?"
        found.append((f"GPU {key >> 32}, {title}" if several else title, work_S & (key_S == key)))
    rest_S = work_S & ~np.isin(key_S, alone)
    return [*found, (f"{len(keys) - len(alone)} more streams", rest_S)] if rest_S.any() else found


def _outermost(trace: Trace) -> np.ndarray:
    """bool [S]: operations of the host's busiest thread that lie in no other one."""
    slices = trace.slices
    ops = np.flatnonzero(slices.category == Category.CPU_OP)
    chosen_S = np.zeros(len(slices), bool)
    if len(ops):
        threads, count = np.unique(slices.thread[ops], return_counts=True)
        ops = ops[slices.thread[ops] == threads[count.argmax()]]
        before = np.maximum.accumulate(slices.end_ns[ops])
        chosen_S[ops[np.append(True, slices.start_ns[ops][1:] >= before[:-1])]] = True
    return chosen_S


def _steps(trace: Trace) -> list[tuple[str, int, int]]:
    slices = trace.slices
    is_step_N = np.array([name.startswith(STEP) for name in trace.names], bool)
    chosen = np.flatnonzero(is_step_N[slices.name] & (slices.category == Category.USER_ANNOTATION))
    return [(trace.names[slices.name[i]], int(slices.start_ns[i]), int(slices.end_ns[i])) for i in chosen]


def _by_depth(spans: list[tuple[str, int, int]]) -> list[list[tuple[str, int, int]]]:
    """The outermost first; those deeper than `MAX_DEPTH` are left away."""
    found: list[list[tuple[str, int, int]]] = [[] for _ in range(MAX_DEPTH)]
    open_ends: list[int] = []
    for span in sorted(spans, key=lambda span: (span[1], -span[2])):
        while open_ends and open_ends[-1] <= span[1]:
            open_ends.pop()
        if len(open_ends) < MAX_DEPTH:
            found[len(open_ends)].append(span)
        open_ends.append(span[2])
    return found


def _arrows(
    ranks: Sequence[RankAnalysis], messages: Sequence[Message], begin_ns: int, total_ns: int, unit_ns: int
) -> list[list[int]]:
    """Source's and destination's row, start of the send, end of the receive, bytes, ns of waiting; by start."""
    row_of = {rank.rank: row for row, rank in reversed(list(enumerate(ranks)))}
    chosen = sorted(messages, key=lambda message: -message.waiting_ns)[:MAX_MESSAGES]
    found = []
    for message in sorted(chosen, key=lambda message: message.send_start_ns):
        sent, arrived = message.send_start_ns - begin_ns, message.receive_end_ns - begin_ns
        if arrived < 0 or sent > total_ns:
            continue
        rows = [row_of[message.source], row_of[message.destination]]
        size = -1 if message.bytes is None else message.bytes
        found.append([*rows, round(sent / unit_ns), round(arrived / unit_ns), size, message.waiting_ns])
    return found


def _notes(alignment: Alignment, alone: bool) -> list[str]:
    notes = [
        f"{shortened(file, 80)} is not on the common clock and begins with the timeline: {shortened(reason)}."
        for file, reason in alignment.unaligned.items()
        if not alone
    ]
    if alignment.violation_ns:
        notes.append(
            f"No clocks fulfil all messages: they contradict each other by {duration(alignment.violation_ns)}."
        )
    elif alignment.uncertainty_ns is not None:
        fixed = duration(alignment.uncertainty_ns)
        notes.append(f"The messages fix the ranks' clocks against each other to {fixed} or better.")
    return notes
