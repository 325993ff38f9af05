"""What the stream beside each rank's trace says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_profiling.analysis import RankAnalysis
from dflash_profiling.compiles import Compiles, compiles_of
from dflash_profiling.kineto import Trace
from dflash_profiling.stream_facts import facts_of, number, read_stream, stream_path


@dataclass(frozen=True)
class GilShares:
    """Who held the GIL in the seconds in which it was looked at."""

    by_thread: dict[str, float]
    """Of all samples, by the thread's name, the greatest first; the rest is nobody's."""
    samplings: int
    """How often it was looked at, for ten seconds each."""
    unknown: str | None
    """Why it was not, where the stream says so."""


@dataclass(frozen=True)
class RankStream:
    """One rank's stream, over its whole file."""

    rows: list[dict[str, Any]]
    window_s: tuple[float, float] | None
    """When the trace was recorded, by the same clock; None where the trace has none."""
    facts: dict[str, tuple[float, str]]
    """Numbers, each with its unit."""
    gil: GilShares
    compiles: Compiles


def read_streams(traces: Sequence[Trace], ranks: Sequence[RankAnalysis]) -> list[RankStream | None]:
    """Each rank's; None where no stream lies beside its trace."""
    return [_read(trace, rank) for trace, rank in zip(traces, ranks, strict=True)]


def _read(trace: Trace, rank: RankAnalysis) -> RankStream | None:
    rows = [] if rank.rank is None else read_stream(stream_path(trace.path.parent, rank.rank))
    if not rows:
        return None
    window_s = None
    if trace.base_ns:
        start_s = rank.window_start_ns / 1e9
        window_s = start_s, start_s + rank.split.window_ns / 1e9
    return RankStream(rows, window_s, facts_of(rows), gil_shares(rows), compiles_of(rows, window_s))


def gil_shares(rows: Sequence[dict[str, Any]]) -> GilShares:
    """The mean of all samplings; a thread that one lacks did not hold the GIL in it."""
    samplings = [row["gil_share"] for row in rows if isinstance(row.get("gil_share"), dict)]
    threads = {thread for sampling in samplings for thread in sampling}
    means = {t: float(np.nansum([number(s.get(t)) for s in samplings])) / len(samplings) for t in threads}
    unknown = next((row["gil_unknown"] for row in reversed(rows) if isinstance(row.get("gil_unknown"), str)), None)
    shares = {t: s for t, s in sorted(means.items(), key=lambda item: (-item[1], item[0])) if s}
    return GilShares(shares, len(samplings), unknown)
