"""What grew from one window of traces to another, in time a step, and what that did to the speed.

Times are exact fractions of nanoseconds a step: what adds up in a window still does beside one of another length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from dflash_profiling.analysis import COMMUNICATION_KERNEL, SPAN_PARTS, RankAnalysis
from dflash_profiling.throughput import Throughput
from dflash_profiling.trace_file import TraceError

WAITS = ("p2p_starved", "p2p_backpressured", "collective_wait", "p2p")
"""Parts that another rank may cause. `p2p` is those messages of which the other end was not traced."""
CAUSES = {"p2p_starved": ("drafter", "target"), "p2p_backpressured": ("target", "drafter")}
"""By the part: which role waits, and for which."""
NOTEWORTHY = Fraction(1, 100)
"""Of a step: a change that is less is no finding."""


@dataclass(frozen=True)
class Item:
    """One thing that takes time, in A and in B, in ns a step."""

    kind: str
    name: str
    before_ns: Fraction
    after_ns: Fraction
    runs_before: Fraction | None = None
    runs_after: Fraction | None = None
    """Of a kernel, a step."""

    @property
    def change_ns(self) -> Fraction:
        """Above 0 where it grew."""
        return self.after_ns - self.before_ns

    @property
    def waits(self) -> bool:
        """Whether it is time that another rank may cause: a consequence, of which no what-if is told."""
        part = {"parts": self.name, "spans": SPAN_PARTS.get(self.name)}.get(self.kind)
        return part in WAITS


@dataclass(frozen=True)
class Pair:
    """One rank in A and in B, or the mean over the ranks of a role."""

    rank: int | None
    """None: a mean."""
    role: str | None
    ranks_before: tuple[int | None, ...]
    ranks_after: tuple[int | None, ...]
    steps_before: int
    steps_after: int
    """In the window; of several ranks the most."""
    step_before_ns: Fraction
    step_after_ns: Fraction
    items: dict[str, list[Item]]
    """By kind, that of the greatest change first."""
    waiting_before: Fraction
    waiting_after: Fraction
    """Share of the step."""

    @property
    def change_ns(self) -> Fraction:
        """Of the step."""
        return self.step_after_ns - self.step_before_ns

    def share(self, item: Item) -> Fraction | None:
        """Of the step's change that the item accounts for; None where the step hardly changed."""
        noteworthy = abs(self.change_ns) >= NOTEWORTHY * self.step_before_ns
        return item.change_ns / self.change_ns if noteworthy and self.change_ns else None


@dataclass(frozen=True)
class WhatIf:
    """The step of B with one item of its bottleneck as in A."""

    item: Item
    step_ns: Fraction
    ktok_s: float | None
    """None where B's speed is not known."""
    limited_by: str | None
    """The role whose own work takes as long, so that the step would not be shorter still."""


@dataclass(frozen=True)
class Wait:
    """A rank that waits longer in B, and the rank of the other role of which a part grew."""

    waiting: Pair
    part: Item
    cause: Pair
    grown: Item


@dataclass(frozen=True)
class Comparison:
    """All that `compare` found."""

    pairs: list[Pair]
    roles: list[Pair]
    """The means over the paired ranks of each role that has several."""
    bottleneck: Pair
    """Of B: of the role that waits least its rank that does."""
    bottleneck_before: str | None
    """The role that waits least in A."""
    what_ifs: list[WhatIf]
    waits: list[Wait]
    throughput_before: Throughput | None
    throughput_after: Throughput | None
    notes: list[str]


def compare(
    before: Sequence[RankAnalysis],
    after: Sequence[RankAnalysis],
    throughput_before: Throughput | None = None,
    throughput_after: Throughput | None = None,
) -> Comparison:
    """What changed from A to B; TraceError where no rank of the one can be set against one of the other."""
    notes = _topologies(before, after)
    groups = _matched(before, after, notes)
    pairs = [pair for group in groups if (pair := _pair(*group, notes))]
    if not pairs:
        raise TraceError("the two cannot be compared: " + "; ".join(notes))
    roles = _means(groups, pairs)
    bottleneck = _bottleneck(pairs, after)
    items = [item for of_kind in bottleneck.items.values() for item in of_kind if item.change_ns and not item.waits]
    what_ifs = [_what_if(item, bottleneck, pairs, throughput_after) for item in items]
    notes += _of_speed(bottleneck, throughput_before, throughput_after)
    return Comparison(
        pairs=pairs,
        roles=roles,
        bottleneck=bottleneck,
        bottleneck_before=_least_waiting_role(before),
        what_ifs=what_ifs,
        waits=[wait for pair in pairs for wait in _waits_of(pair, pairs)],
        throughput_before=throughput_before,
        throughput_after=throughput_after,
        notes=notes,
    )


def steps_of(rank: RankAnalysis) -> int:
    """From its first recorded step to its last, with those that it had no part in; 1 where steps have no names."""
    if rank.first_step is None or rank.last_step is None:
        return 1
    return rank.last_step - rank.first_step + 1


def waiting_share(rank: RankAnalysis) -> Fraction:
    """Of its window."""
    return Fraction(sum(rank.split.parts_ns[part] for part in WAITS), rank.split.window_ns or 1)


_Group = tuple[list[RankAnalysis], list[RankAnalysis], bool]
"""Ranks of A, ranks of B, and whether they are the same one rank."""


def _topologies(before: Sequence[RankAnalysis], after: Sequence[RankAnalysis]) -> list[str]:
    shapes = [{(rank.rank, rank.role) for rank in ranks} for ranks in (before, after)]
    if shapes[0] == shapes[1]:
        return []
    return [f"the topologies differ: A has {_shape(before)}, B has {_shape(after)}"]


def _shape(ranks: Sequence[RankAnalysis]) -> str:
    by_role: dict[str, list[RankAnalysis]] = {}
    for rank in ranks:
        by_role.setdefault(rank.role or "", []).append(rank)
    return " and ".join(f"{role} {named(r.rank for r in some)}".strip() for role, some in by_role.items())


def named(ranks: Iterable[int | None]) -> str:
    """As a sentence names them."""
    numbers = list(ranks)
    text = ", ".join("?" if number is None else str(number) for number in numbers)
    return f"rank{'s' * (len(numbers) > 1)} {text}"


def _mean(ranks: Sequence[RankAnalysis]) -> str:
    return "the mean of " * (len(ranks) > 1) + named(rank.rank for rank in ranks)


def _matched(before: Sequence[RankAnalysis], after: Sequence[RankAnalysis], notes: list[str]) -> list[_Group]:
    """The ranks that both have in one role; the mean of the role where none of it is in both."""
    groups: list[_Group] = []
    for role in dict.fromkeys(rank.role for rank in (*before, *after)):
        here, there = ([rank for rank in ranks if rank.role == role] for ranks in (before, after))
        title = f"the {role}s" if role else "the ranks without a role"
        if not here or not there:
            notes.append(f"{title} are in {'B' if there else 'A'} alone, so nothing is said of them")
            continue
        both = {rank.rank for rank in here} & {rank.rank for rank in there} - {None}
        if not both:
            notes.append(f"{title} have no rank in common: {_mean(here)} of A is compared with {_mean(there)} of B")
            groups.append((here, there, False))
            continue
        for side, ranks in (("A", here), ("B", there)):
            if alone := [rank.rank for rank in ranks if rank.rank not in both]:
                notes.append(f"{named(alone)} ({role or 'no role'}) left out, in {side} alone")
        by_rank = [{rank.rank: rank for rank in ranks} for ranks in (here, there)]
        groups += [([by_rank[0][rank]], [by_rank[1][rank]], True) for rank in sorted(r for r in both if r is not None)]
    return groups


def _pair(before: list[RankAnalysis], after: list[RankAnalysis], same: bool, notes: list[str]) -> Pair | None:
    who = named(rank.rank for rank in after)
    has_steps = {rank.first_step is not None for rank in (*before, *after)}
    if len(has_steps) > 1:
        notes.append(
            f"{who}: steps have names (ProfilerStep#) on one side alone, so their times a step cannot be compared"
        )
        return None
    if has_steps == {False}:
        notes.append(f"{who}: steps have no names (ProfilerStep#), so each window counts as one step")
    gpu = [{rank.has_gpu_rows for rank in ranks} for ranks in (before, after)]
    kinds: dict[str, Callable[[RankAnalysis], Mapping[str, int]]] = {"spans": lambda rank: rank.host_by_span_ns}
    if gpu[0] == gpu[1] and len(gpu[0]) == 1:
        kinds = {
            "parts": lambda rank: rank.split.parts_ns,
            **kinds,
            "compute_by_span": lambda rank: rank.compute_by_span_ns,
        }
        if gpu[0] == {True}:
            kinds["families"] = lambda rank: rank.compute_by_family_ns
    else:
        without = " and ".join(side for side, found in zip("AB", gpu, strict=True) if False in found)
        notes.append(
            f"{who}: no GPU rows in {without}, so neither its parts nor its kernels are compared, only the time that "
            "the host spent in each span"
        )
    items = {
        kind: _sorted(_items(kind, _per_step(before, times), _per_step(after, times))) for kind, times in kinds.items()
    }
    if "families" in items:
        items["kernels"] = _sorted(_kernels(before, after))
    windows = [_per_step(ranks, lambda rank: {"": rank.split.window_ns})[""] for ranks in (before, after)]
    waiting = [sum((waiting_share(rank) for rank in ranks), Fraction(0)) / len(ranks) for ranks in (before, after)]
    return Pair(
        rank=after[0].rank if same else None,
        role=after[0].role,
        ranks_before=tuple(rank.rank for rank in before),
        ranks_after=tuple(rank.rank for rank in after),
        steps_before=max(map(steps_of, before)),
        steps_after=max(map(steps_of, after)),
        step_before_ns=windows[0],
        step_after_ns=windows[1],
        items=items,
        waiting_before=waiting[0],
        waiting_after=waiting[1],
    )


def _per_step(ranks: Sequence[RankAnalysis], times: Callable[[RankAnalysis], Mapping[str, int]]) -> dict[str, Fraction]:
    """Means over the ranks."""
    totals: dict[str, Fraction] = {}
    for rank in ranks:
        for name, ns in times(rank).items():
            totals[name] = totals.get(name, Fraction(0)) + Fraction(ns, steps_of(rank) * len(ranks))
    return totals


def _items(kind: str, before: Mapping[str, Fraction], after: Mapping[str, Fraction]) -> list[Item]:
    names = dict.fromkeys((*before, *after))
    return [Item(kind, name, before.get(name, Fraction(0)), after.get(name, Fraction(0))) for name in names]


def _kernels(before: Sequence[RankAnalysis], after: Sequence[RankAnalysis]) -> list[Item]:
    """Those that compute: how long one runs that sends depends on who it waits for, of which the parts tell."""

    def totals(rank: RankAnalysis) -> dict[str, int]:
        return {k.name: k.total_ns for k in rank.kernels if not COMMUNICATION_KERNEL.search(k.name)}

    def counts(rank: RankAnalysis) -> dict[str, int]:
        return {kernel.name: kernel.count for kernel in rank.kernels}

    runs = [_per_step(ranks, counts) for ranks in (before, after)]
    items = _items("kernels", _per_step(before, totals), _per_step(after, totals))
    none = Fraction(0)
    return [replace(i, runs_before=runs[0].get(i.name, none), runs_after=runs[1].get(i.name, none)) for i in items]


def _sorted(items: Iterable[Item]) -> list[Item]:
    return sorted(items, key=lambda item: (-abs(item.change_ns), -item.after_ns, item.name))


def _means(groups: Sequence[_Group], pairs: Sequence[Pair]) -> list[Pair]:
    compared = {(pair.role, pair.rank) for pair in pairs if pair.rank is not None}
    roles = []
    for role in dict.fromkeys(pair.role for pair in pairs):
        some = [
            group for group in groups if group[2] and (role, group[0][0].rank) in compared and group[0][0].role == role
        ]
        if len(some) > 1:
            mean = _pair([before for (before,), _, _ in some], [after for _, (after,), _ in some], False, [])
            roles += [mean] if mean else []
    return roles


def _least_waiting_role(ranks: Sequence[RankAnalysis]) -> str | None:
    shares: dict[str | None, list[Fraction]] = {}
    for rank in ranks:
        shares.setdefault(rank.role, []).append(waiting_share(rank))
    return min(shares, key=lambda role: sum(shares[role]) / len(shares[role]))


def _bottleneck(pairs: Sequence[Pair], after: Sequence[RankAnalysis]) -> Pair:
    role = _least_waiting_role([rank for rank in after if any(rank.role == pair.role for pair in pairs)])
    return min((pair for pair in pairs if pair.role == role), key=lambda pair: pair.waiting_after)


def _what_if(item: Item, bottleneck: Pair, pairs: Sequence[Pair], throughput: Throughput | None) -> WhatIf:
    """No shorter than what the other roles' ranks themselves do in a step."""
    now_ns = bottleneck.step_after_ns
    own = [((1 - pair.waiting_after) * pair.step_after_ns, pair.role) for pair in pairs if pair.role != bottleneck.role]
    limit_ns, role = max(own, key=lambda work: work[0], default=(Fraction(0), None))
    limit_ns = min(limit_ns, now_ns)
    free_ns = max(now_ns - item.change_ns, Fraction(0))
    step_ns = max(free_ns, limit_ns)
    ktok_s = throughput.ktok_s * float(now_ns / step_ns) if throughput and step_ns else None
    return WhatIf(item, step_ns, ktok_s, role if free_ns < limit_ns else None)


def _waits_of(pair: Pair, pairs: Sequence[Pair]) -> list[Wait]:
    """Waits of the pair that grew, where a part of a rank of the other role grew by at least half of that."""
    waits = []
    for part in pair.items.get("parts", []):
        if part.name not in CAUSES or part.change_ns < NOTEWORTHY * pair.step_before_ns:
            continue
        waiting, other = CAUSES[part.name]
        if waiting != pair.role:
            continue
        grown = [
            (item, cause)
            for cause in pairs
            if cause.role == other
            for item in cause.items.get("parts", [])
            if not item.waits and item.name != "p2p_transfer" and item.change_ns >= part.change_ns / 2
        ]
        if grown:
            item, cause = max(grown, key=lambda found: found[0].change_ns)
            waits.append(Wait(pair, part, cause, item))
    return waits


def _of_speed(bottleneck: Pair, before: Throughput | None, after: Throughput | None) -> list[str]:
    """Where the traces and metrics.jsonl do not tell the same."""
    if before is None or after is None:
        return ["no metrics.jsonl beside " + " and ".join(s for s, t in (("A", before), ("B", after)) if t is None)
                + ", so speed is told in time a step of the traces"]  # fmt: skip
    notes = [
        f"{side} has no line of metrics.jsonl outside of the traced steps: its speed is one with the profiler on"
        for side, throughput in (("A", before), ("B", after))
        if not throughput.outside_window
    ]
    size = after.tokens_per_step / before.tokens_per_step
    if abs(size - 1) > NOTEWORTHY:
        notes.append(
            f"a step of B holds {size:.3g} times the tokens of one of A ({before.tokens_per_step:,.0f} -> "
            f"{after.tokens_per_step:,.0f}): growth in that proportion is more work, not less speed"
        )
    if not bottleneck.step_before_ns:
        return notes
    times = after.step_ms / before.step_ms, float(bottleneck.step_after_ns / bottleneck.step_before_ns)
    if abs(times[0] - times[1]) > 0.1 * max(times):
        notes.append(
            f"by metrics.jsonl a step takes {times[0]:.3g} times as long in B, in the traced windows {times[1]:.3g} "
            "times: they are not typical of their runs, so trace steps that are"
        )
    return notes
