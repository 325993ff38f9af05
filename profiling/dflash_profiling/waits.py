"""What each rank's communication waited for, and for which rank."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from dflash_profiling.clock import Alignment, Message
from dflash_profiling.intervals import Intervals, union
from dflash_profiling.kineto import Trace

_Collective = tuple[str, str, int]
"""Group, name and number in the group."""
_Times = list[tuple[int, int]]


@dataclass(frozen=True)
class Waits:
    """What a rank's communication is made of, by the clock of its own trace."""

    parts: dict[str, Intervals] = field(default_factory=dict)
    """Of messages, and of collectives until their last rank has come."""
    messages: frozenset[int] = frozenset()
    """The slices of those messages whose both ends are known."""
    unpaired: int = 0
    """How many messages of the rank are with ranks that were traced, but have no known other end."""
    of_ranks: dict[int, Intervals] = field(default_factory=dict)
    """When something of the rank waited for another one, by that one."""
    sends: tuple[tuple[int, int], ...] = ()
    """Start and destination of each message that the program names, in order."""

    def next_peer(self, time_ns: int) -> int | None:
        """To whom the next message goes that the program names."""
        place = bisect_left(self.sends, (time_ns, -1))
        return self.sends[place][1] if place < len(self.sends) else None


def find_waits(traces: Sequence[Trace], alignment: Alignment, messages: Sequence[Message]) -> list[Waits]:
    """Those of each trace."""
    arrivals = _last_arrivals(traces, alignment)
    return [_waits(trace, messages, arrivals, alignment) for trace in traces]


def _waits(
    trace: Trace, messages: Sequence[Message], arrivals: dict[_Collective, tuple[int, int]], alignment: Alignment
) -> Waits:
    offset_ns = alignment.offset_ns(trace)
    parts: dict[str, _Times] = {"p2p_transfer": [], "p2p_starved": [], "p2p_backpressured": [], "collective_wait": []}
    of_ranks: dict[int, _Times] = defaultdict(list)
    slices = set()

    def waited(part: str, peer: int, start_ns: int, end_ns: int) -> None:
        parts[part].append((start_ns, end_ns))
        if end_ns > start_ns:
            of_ranks[peer].append((start_ns, end_ns))

    for message in messages:
        met_ns = max(message.send_start_ns, message.receive_start_ns)
        if message.source == trace.rank:
            slices.add(message.send_slice)
            end_ns = message.send_end_ns
            waited("p2p_backpressured", message.destination, message.send_start_ns, min(met_ns, end_ns))
            parts["p2p_transfer"].append((met_ns, end_ns))
        if message.destination == trace.rank:
            slices.add(message.receive_slice)
            end_ns = message.receive_end_ns
            waited("p2p_starved", message.source, message.receive_start_ns, min(met_ns, end_ns))
            parts["p2p_transfer"].append((met_ns, end_ns))
    aligned = trace.path.name not in alignment.unaligned
    for key, start_ns, end_ns in _collectives(trace, offset_ns) if aligned else ():
        if key in arrivals:
            arrival_ns, last = arrivals[key]
            waited("collective_wait", last, start_ns, min(arrival_ns, end_ns))
    return Waits(
        {name: _shifted(times, -offset_ns) for name, times in parts.items()},
        frozenset(slices),
        sum(count for ranks, count in alignment.unpaired.items() if trace.rank in ranks),
        {peer: _shifted(times, -offset_ns) for peer, times in of_ranks.items()},
        tuple(
            (c.start_ns, c.destination)
            for c in trace.communication
            if c.kind == "span" and c.direction == "send" and c.destination is not None
        ),
    )


def _shifted(times: _Times, shift_ns: int) -> Intervals:
    return union(*(np.array(times, np.int64).reshape(-1, 2).T + shift_ns))


def _last_arrivals(traces: Sequence[Trace], alignment: Alignment) -> dict[_Collective, tuple[int, int]]:
    """When the last rank began each collective, by the common clock, and which; of those with several ranks' traces."""
    starts: dict[_Collective, _Times] = defaultdict(list)
    for trace in traces:
        if trace.rank is not None and trace.path.name not in alignment.unaligned:
            for key, start_ns, _ in _collectives(trace, alignment.offset_ns(trace)):
                starts[key].append((start_ns, trace.rank))
    return {key: max(times) for key, times in starts.items() if len(times) > 1}


def _collectives(trace: Trace, offset_ns: int) -> Iterator[tuple[_Collective, int, int]]:
    """Each collective on the GPU: what it is called alike on all its ranks, start and end by the common clock."""
    for c in trace.communication:
        if c.kind == "kernel" and c.is_collective and c.sequence is not None:
            yield (c.group, c.name, c.sequence), c.start_ns + offset_ns, c.end_ns + offset_ns
