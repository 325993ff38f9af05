"""Puts the traces of several ranks on one clock, and finds what each of their messages waited for.

A rank's clock shows the true time plus its skew. A message bounds the skews of its two ends against each other, since
it cannot arrive before it is sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_profiling.communication import Communication
from dflash_profiling.kineto import Trace
from dflash_profiling.pairing import SAME_HOST_NS, Match, Pairing, RankPair, pair_ends

OTHER_WINDOW = "it is of another window"
"""In the reason why a trace is not aligned."""
FARTHEST_AHEAD, FARTHEST_AHEAD_NS = 10, 60 * 10**9
"""Windows of the same steps that lie apart by so many of their lengths, and so long, are of two runs."""
RENDEZVOUS_BYTES = 128 * 2**20
"""A larger message does not fit into NCCL's buffers, so its send cannot end before its receive has begun."""


@dataclass(frozen=True)
class SkewBound:
    """What the messages between two ranks say of the skew of `rank_b`'s clock, less that of `rank_a`'s."""

    rank_a: int
    rank_b: int
    low_ns: int | None
    high_ns: int | None
    """None: no message bounds it on this side."""
    messages: int


@dataclass(frozen=True)
class Alignment:
    """What brings the traces of several ranks onto one clock, that of the lowest rank."""

    offsets_ns: dict[int, int]
    """To be added to a rank's times; 0 for all ranks unless messages or hosts say otherwise."""
    unaligned: dict[str, str]
    """Why a trace is not on the common clock, by its file's name."""
    bounds: list[SkewBound]
    """One for each pair of ranks with messages between them, from these alone."""
    uncertainty_ns: int | None
    """By how much messages and hosts leave the clocks of two such ranks free; None where they leave a side open."""
    violation_ns: int
    """By how much the bounds had to be widened to be fulfilled at once: 0 where they agree."""
    unpaired: dict[RankPair, int]
    """By source and destination, messages whose two ends cannot be told from those of their neighbours: they bound
    nothing and are none of `match_p2p`."""

    def offset_ns(self, trace: Trace) -> int:
        """To be added to the trace's times; 0 where it could not be aligned."""
        return 0 if trace.rank is None else self.offsets_ns.get(trace.rank, 0)


@dataclass(frozen=True)
class Message:
    """A send and the receive that took it, on the common clock."""

    source: int
    destination: int
    group: str
    sequence: int | None
    """The sender's count."""
    bytes: int | None
    send_slice: int
    receive_slice: int
    """Indices into the slices of their traces."""
    send_start_ns: int
    send_end_ns: int
    receive_start_ns: int
    receive_end_ns: int
    waiting_ns: int
    """The part of the receive before the send began."""
    transfer_ns: int
    """The rest of the receive."""


def align(traces: Sequence[Trace]) -> Alignment:
    """Offsets of all traces whose clock is known, from their bases, hosts and messages."""
    aligned, unaligned = _on_one_clock(traces)
    paired = _paired(aligned)
    ranks = sorted(aligned)
    place = {rank: index for index, rank in enumerate(ranks)}
    most_ns = np.full((len(ranks), len(ranks)), np.inf)
    """[a, b]: upper bound of the skew of b less that of a; the lower bound is -[b, a]."""
    counts: dict[RankPair, int] = defaultdict(int)
    for (source, destination), pairs in paired.matches.items():
        _bound(most_ns, place[source], place[destination], pairs)
        counts[min(source, destination), max(source, destination)] += len(pairs)
    bounds = [
        SkewBound(a, b, _whole(-most_ns[place[b], place[a]]), _whole(most_ns[place[a], place[b]]), count)
        for (a, b), count in sorted(counts.items())
    ]
    for a, b in _same_host(aligned):
        most_ns[place[a], place[b]] = min(most_ns[place[a], place[b]], SAME_HOST_NS)
    free_ns = max((most_ns[place[a], place[b]] + most_ns[place[b], place[a]] for a, b in counts), default=np.inf)
    skews_ns, violation_ns = _skews(most_ns)
    return Alignment(
        offsets_ns={rank: -skews_ns[place[rank]] for rank in ranks},
        unaligned=unaligned,
        bounds=bounds,
        uncertainty_ns=round(max(free_ns, violation_ns)) if np.isfinite(free_ns) else None,
        violation_ns=violation_ns,
        unpaired=paired.unpaired,
    )


def match_p2p(traces: Sequence[Trace], alignment: Alignment | None = None) -> list[Message]:
    """All messages of which both ends are in the traces and known, ordered by the end of their receive."""
    alignment = alignment or align(traces)
    aligned = {trace.rank: trace for trace in traces if trace.rank in alignment.offsets_ns}
    messages = []
    for (source, destination), pairs in _paired(aligned).matches.items():
        here, there = alignment.offsets_ns[source], alignment.offsets_ns[destination]
        messages += [_message(source, destination, send, receive, here, there) for send, receive in pairs]
    return sorted(messages, key=lambda message: (message.receive_end_ns, message.source, message.destination))


def _message(
    source: int, destination: int, send: Communication, receive: Communication, here: int, there: int
) -> Message:
    duration_ns = receive.end_ns - receive.start_ns
    waiting_ns = min(max(send.start_ns + here - receive.start_ns - there, 0), duration_ns)
    return Message(
        source=source,
        destination=destination,
        group=send.group,
        sequence=send.sequence,
        bytes=send.bytes if send.bytes is not None else receive.bytes,
        send_slice=send.slice,
        receive_slice=receive.slice,
        send_start_ns=send.start_ns + here,
        send_end_ns=send.end_ns + here,
        receive_start_ns=receive.start_ns + there,
        receive_end_ns=receive.end_ns + there,
        waiting_ns=waiting_ns,
        transfer_ns=duration_ns - waiting_ns,
    )


def _on_one_clock(traces: Sequence[Trace]) -> tuple[dict[int, Trace], dict[str, str]]:
    """The traces that share a clock up to its skew, by rank, and why the others do not."""
    aligned: dict[int, Trace] = {}
    unaligned = {}
    newest = max((t for t in traces if t.base_ns is not None), key=lambda t: _extent(t)[0], default=None)
    for trace in traces:
        if trace.rank is None:
            reason = "it does not say which rank it is of"
        elif trace.rank in aligned:
            reason = f"rank {trace.rank} has another trace, {aligned[trace.rank].path.name}"
        elif trace.base_ns is None and len(traces) > 1:
            reason = (
                "it has no baseTimeNanoseconds, as torch wrote none before 2024, so its times are of an unknown clock"
            )
        elif trace.base_ns is not None and newest is not None and (apart := _apart(trace, newest)):
            reason = f"{apart}: {OTHER_WINDOW}"
        else:
            aligned[trace.rank] = trace
            continue
        unaligned[trace.path.name] = reason
    return aligned, unaligned


def _apart(trace: Trace, newest: Trace) -> str | None:
    """Why the trace is not of the window of the newest one.

    By the steps that were asked for, where both say so: a rank that is ahead of another runs the same steps earlier.
    """
    steps, newest_steps = trace.metadata.get("window"), newest.metadata.get("window")
    (start_ns, end_ns), (newest_start_ns, newest_end_ns) = _extent(trace), _extent(newest)
    gap_ns = newest_start_ns - end_ns
    apart = f"it ended {gap_ns / 1e9:.1f} s before another began"
    if steps is None or newest_steps is None:
        return apart if gap_ns > 0 else None
    if steps != newest_steps:
        return f"it is of steps {_range(steps)}, another of {_range(newest_steps)}"
    longest_ns = max(end_ns - start_ns, newest_end_ns - newest_start_ns)
    return apart if gap_ns > max(FARTHEST_AHEAD_NS, FARTHEST_AHEAD * longest_ns) else None


def _range(steps: Any) -> str:
    return " to ".join(str(step) for step in steps) if isinstance(steps, list) else str(steps)[:40]


def _extent(trace: Trace) -> tuple[int, int]:
    return int(trace.slices.start_ns[0]), int(trace.slices.end_ns.max())


def _same_host(aligned: dict[int, Trace]) -> Iterator[RankPair]:
    hosts = _hosts(aligned)
    for a, host in hosts.items():
        for b, other in hosts.items():
            if a != b and host and host == other:
                yield a, b


def _paired(aligned: dict[int, Trace]) -> Pairing:
    return pair_ends({rank: trace.communication for rank, trace in aligned.items()}, _hosts(aligned))


def _hosts(aligned: dict[int, Trace]) -> dict[int, object]:
    """What torch calls each rank's host, or, as it does since 2.13 only, the number of the trainer's node."""
    facts = {rank: trace.metadata for rank, trace in aligned.items()}
    return {
        rank: fact.get("host_name") or (("node", fact["node"]) if "node" in fact else None)
        for rank, fact in facts.items()
    }


def _bound(most_ns: np.ndarray, source: int, destination: int, pairs: list[Match]) -> None:
    """Tightens the bounds between two ranks by their messages.

    Two kernels need the time of the transfer when both have begun, and each takes at least that long. A receive ends
    last, but for what a kernel takes to end. What the send has left in the buffers as it ends, the receive takes no
    slower than the rest. So both ends are near each other, also where one of them always begins late.
    """
    for send, receive in pairs:
        transfer_ns = 0
        arrival_ns = receive.end_ns - send.start_ns
        if send.kind == "kernel":
            transfer_ns = min(send.end_ns - send.start_ns, receive.end_ns - receive.start_ns)
            arrival_ns = min(arrival_ns - transfer_ns, receive.end_ns - send.end_ns + SAME_HOST_NS)
        most_ns[source, destination] = min(most_ns[source, destination], arrival_ns)
        if send.kind == "kernel" and (send.bytes or 0) >= RENDEZVOUS_BYTES:
            taken_ns = send.end_ns - receive.start_ns - transfer_ns
            if rest_bytes := (send.bytes or 0) - RENDEZVOUS_BYTES:
                buffered_ns = transfer_ns * RENDEZVOUS_BYTES // rest_bytes
                taken_ns = min(taken_ns, send.end_ns - receive.end_ns + buffered_ns)
            most_ns[destination, source] = min(most_ns[destination, source], taken_ns)


def _skews(most_ns: np.ndarray) -> tuple[list[int], int]:
    """A skew for each rank that fulfils all bounds, widened by the number of ns that is returned too.

    In the middle of what the bounds leave, or the nearest to no skew where they leave one side open.
    """
    widened_ns = 0
    closed = _closed(most_ns)
    while (np.diagonal(closed) < 0).any():
        widened_ns = max(1000, 2 * widened_ns)
        closed = _closed(most_ns + widened_ns)
    skews: list[float] = []
    for rank in range(len(closed)):
        low = max((skews[other] - closed[rank, other] for other in range(rank)), default=0.0)
        high = min((skews[other] + closed[other, rank] for other in range(rank)), default=0.0)
        skews.append((low + high) / 2 if np.isfinite(high - low) else min(max(0.0, low), high))
    return [round(skew) for skew in skews], widened_ns


def _closed(most_ns: np.ndarray) -> np.ndarray:
    """The bounds that follow from the bounds: shortest paths between all ranks; negative on the diagonal if none."""
    closed = np.minimum(most_ns, np.where(np.eye(len(most_ns), dtype=bool), 0, np.inf))
    for middle in range(len(closed)):
        closed = np.minimum(closed, closed[:, middle, None] + closed[None, middle, :])
    return closed


def _whole(bound_ns: float) -> int | None:
    return round(bound_ns) if np.isfinite(bound_ns) else None
