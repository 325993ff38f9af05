"""Which receive took which send: told by a label or a number that both ends carry, else by what one order alone fits.

Shape suffix: P pairs of one order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_profiling.communication import Communication

SAME_HOST_NS = 20_000
"""Ranks of one host share its clock, to what the GPUs' clocks are translated by."""
_CLOCK_SLACK_NS = 10_000_000
"""Clocks that are set by NTP differ by less; a message that seems to arrive earlier than that is another one."""
_MAX_SHIFT = 64
_MIN_ENDS = 3
"""Fewer on either side show no order."""
_COMMON_NUMBERS = 0.8
"""Of the sequence numbers that both ends should hold, the share that both must hold to be trusted."""
_MARGIN = 4.0
"""How much worse than the best order all others must fit."""

Match = tuple[Communication, Communication]
RankPair = tuple[int, int]
"""Source and destination."""


@dataclass(frozen=True)
class Pairing:
    """The ends of all messages between ranks of which both were traced."""

    matches: dict[RankPair, list[Match]]
    unpaired: dict[RankPair, int]
    """Messages of pairs of ranks with ends on both sides of which none can be told from its neighbours."""


def pair_ends(ends_of: Mapping[int, Sequence[Communication]], hosts: Mapping[int, object]) -> Pairing:
    """`ends_of`, `hosts`: by rank, what each trace holds of communication and where it was written, if it says so."""
    matches: dict[RankPair, list[Match]] = {}
    unpaired: dict[RankPair, int] = {}
    for (source, destination), (all_sends, all_receives) in sorted(_by_pair(ends_of).items()):
        here, there = hosts.get(source), hosts.get(destination)
        slack_ns = SAME_HOST_NS if here and here == there else _CLOCK_SLACK_NS
        found: list[Match] = []
        left = 0
        for sends, receives in _alike(all_sends, all_receives):
            some = _pair_up(sends, receives, slack_ns)
            found += some
            left += 0 if some else max(len(sends), len(receives))
        if found:
            matches[source, destination] = found
        if left:
            unpaired[source, destination] = left
    return Pairing(matches, unpaired)


_Ends = tuple[list[Communication], list[Communication]]


def _by_pair(ends_of: Mapping[int, Sequence[Communication]]) -> dict[RankPair, _Ends]:
    ends: dict[RankPair, _Ends] = defaultdict(lambda: ([], []))
    for communication in ends_of.values():
        for end in communication:
            if end.kind != "call" and end.direction and end.source is not None and end.destination is not None:
                ends[end.source, end.destination][end.direction == "receive"].append(end)
    return ends


def _alike(sends: list[Communication], receives: list[Communication]) -> Iterator[_Ends]:
    """The ends that may belong together: of one kind, the one that says most of the two ranks' time, and one group."""
    kinds = {end.kind for end in (*sends, *receives)}
    kind = next(kind for kind in ("kernel", "span", "gloo") if kind in kinds)
    groups: dict[str, _Ends] = defaultdict(lambda: ([], []))
    for side, ends in enumerate((sends, receives)):
        for end in ends:
            if end.kind == kind:
                groups[end.group][side].append(end)
    return (both for _, both in sorted(groups.items()) if both[0] and both[1])


def _pair_up(sends: list[Communication], receives: list[Communication], slack_ns: int) -> list[Match]:
    if sends[0].kind == "span":
        send_of, receive_of = _by_label(sends), _by_label(receives)
        return [(send, receive_of[label]) for label, send in send_of.items() if label in receive_of]
    numbered = _by_number(sends, receives)
    if numbered and all(_same_bytes(*match) for match in numbered):
        return numbered
    return _by_order(sends, receives, slack_ns)


def _by_label(ends: list[Communication]) -> dict[str, Communication]:
    """Without those whose label another has too."""
    found: dict[str, list[Communication]] = defaultdict(list)
    for end in ends:
        found[end.label].append(end)
    return {label: same[0] for label, same in found.items() if len(same) == 1}


def _by_number(sends: list[Communication], receives: list[Communication]) -> list[Match]:
    """By NCCL's sequence number; nothing where the two ends do not count alike.

    In a group of more than two, the ends count other messages too.
    """
    send_of = {send.sequence: send for send in sends if send.sequence is not None}
    receive_of = {receive.sequence: receive for receive in receives if receive.sequence is not None}
    if len(send_of) < len(sends) or len(receive_of) < len(receives):
        return []
    first, last = max(min(send_of), min(receive_of)), min(max(send_of), max(receive_of))
    common = sorted(send_of.keys() & receive_of.keys())
    either = [number for number in send_of.keys() | receive_of.keys() if first <= number <= last]
    enough = common and len(common) >= _COMMON_NUMBERS * len(either)
    return [(send_of[number], receive_of[number]) for number in common] if enough else []


def _by_order(sends: list[Communication], receives: list[Communication], slack_ns: int) -> list[Match]:
    """The one order that sizes and times allow; nothing where there are several, or none.

    A message may be under way as a window begins, so the first receive need not have taken the first send. An order
    that leaves more than half of the ends alone is not considered.
    """
    fewer = min(len(sends), len(receives))
    if fewer < _MIN_ENDS:
        return []
    fits: list[tuple[float, list[Match]]] = []
    for shift in range(max(-len(sends) + 1, -_MAX_SHIFT), min(len(receives), _MAX_SHIFT + 1)):
        matches = list(zip(sends[max(0, -shift) :], receives[max(0, shift) :], strict=False))
        if len(matches) < (fewer + 1) // 2 or not all(_same_bytes(*match) for match in matches):
            continue
        if all(receive.end_ns >= send.start_ns - slack_ns for send, receive in matches):
            fits.append((_misfit_ns(matches, slack_ns), matches))
    fits.sort(key=lambda fit: fit[0])
    if not fits or (len(fits) > 1 and fits[1][0] < _MARGIN * max(fits[0][0], 1.0)):
        return []
    return fits[0][1]


def _same_bytes(send: Communication, receive: Communication) -> bool:
    return send.bytes is None or receive.bytes is None or send.bytes == receive.bytes


def _misfit_ns(matches: list[Match], slack_ns: int) -> float:
    """How far on average a receive ends from when it should, whatever the skew of the two clocks within `slack_ns`.

    The kernels of both ends end together; any other receive ends soon after both ends have begun.
    """
    ended_P = np.array([receive.end_ns for _, receive in matches])
    due_P = np.array([
        send.end_ns if send.kind == "kernel" else max(send.start_ns, receive.start_ns) for send, receive in matches
    ])  # fmt: skip
    late_P = (ended_P - due_P).astype(np.float64)
    return float(np.abs(late_P - np.clip(np.median(late_P), -slack_ns, slack_ns)).mean())
