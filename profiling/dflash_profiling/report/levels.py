"""A lane of the timeline at several levels of detail, each of a bounded number of segments.

Shape suffixes: E events of a lane, G segments of a level, B bins with events in them.
"""

from __future__ import annotations

import base64
import bisect
from dataclasses import dataclass
from typing import Any

import numpy as np

LEVEL_BINS = (2_048, 16_384)
"""Of the levels that are drawn before one zooms in; a bin is no wider than a pixel there."""
MOST_BINS_LOG2 = 24


@dataclass(frozen=True)
class Lane:
    """Events in a line of the timeline, in order of start; times in ns since the timeline's begin."""

    start_E: np.ndarray
    end_E: np.ndarray
    kind_E: np.ndarray
    """uint8: what colours it."""
    name_E: np.ndarray
    """int64: place in the page's names."""

    def __len__(self) -> int:
        return len(self.start_E)


@dataclass(frozen=True)
class Level:
    """Segments: an event each, or those of one kind that lie together in a bin."""

    bin_ns: float
    """Events shorter than this are merged; 0: none is."""
    start_G: np.ndarray
    end_G: np.ndarray
    kind_G: np.ndarray
    name_G: np.ndarray
    """Of merged events that of the longest."""
    count_G: np.ndarray
    busy_G: np.ndarray
    """ns of the segment in which its events go on, were none at the same time as another."""

    def __len__(self) -> int:
        return len(self.start_G)


def levels(lane: Lane, total_ns: int, most: int) -> list[Level]:
    """From the coarsest to the finest; this one has all events if they are no more than `most`."""
    finest = merged(lane, 0.0)
    if len(finest) > most:  # the narrowest bins in which they fit: each twice as wide holds no more segments
        widths_ns = [total_ns / 2**log2 for log2 in range(MOST_BINS_LOG2, 0, -1)]
        fits = bisect.bisect_left(widths_ns[:-1], True, key=lambda bin_ns: len(merged(lane, bin_ns)) <= most)
        finest = merged(lane, widths_ns[fits])
    found = [merged(lane, total_ns / bins) for bins in LEVEL_BINS if total_ns / bins > finest.bin_ns]
    return [level for level in found if 2 * len(level) < len(finest)] + [finest]


def merged(lane: Lane, bin_ns: float) -> Level:
    """Events as long as a bin or longer stay as they are; the others of a kind that begin in one bin become one."""
    length_E = lane.end_E - lane.start_E
    short_E = length_E < bin_ns
    if not short_E.any():
        once = np.ones(len(lane), np.int64)
        return Level(bin_ns, lane.start_E, lane.end_E, lane.kind_E, lane.name_E, once, length_E)
    key = (lane.start_E[short_E] / bin_ns).astype(np.int64) * 256 + lane.kind_E[short_E]
    order = np.argsort(key, kind="stable")  # they are in order but for the kinds: this sort is made for that
    key = key[order]
    start, end, kind, name, length = (
        column[short_E][order] for column in (lane.start_E, lane.end_E, lane.kind_E, lane.name_E, length_E)
    )
    first_B = np.flatnonzero(np.diff(key, prepend=-1))
    sizes_B = np.diff(first_B, append=len(start))
    longest = np.flatnonzero(length == np.repeat(np.maximum.reduceat(length, first_B), sizes_B))
    longest_B = longest[np.searchsorted(longest, first_B)]  # the first of equals
    columns = [
        (lane.start_E, np.minimum.reduceat(start, first_B)),
        (lane.end_E, np.maximum.reduceat(end, first_B)),
        (lane.kind_E, kind[first_B]),
        (lane.name_E, name[longest_B]),
        (np.ones(len(lane), np.int64), sizes_B),
        (length_E, np.add.reduceat(length, first_B)),
    ]
    joined = [np.concatenate([whole[~short_E], of_bins]) for whole, of_bins in columns]
    order = np.argsort(joined[0], kind="stable")
    return Level(bin_ns, *(column[order] for column in joined))


def packed(level: Level, unit_ns: int) -> dict[str, Any]:
    """For the page: numbers as base64 of little-endian columns, times in `unit_ns`."""
    start_G = np.rint(level.start_G / unit_ns)
    end_G = np.rint(level.end_G / unit_ns)
    plain = bool((level.count_G == 1).all())
    columns = {
        "s": _base64(start_G, "<u4"),
        "d": _base64(end_G - start_G, "<u4"),
        "k": _base64(level.kind_G, "<u1"),
        "n": _base64(level.name_G, "<u2"),
    }
    if not plain:
        columns["c"] = _base64(level.count_G, "<u4")
        columns["b"] = _base64(np.rint(level.busy_G / unit_ns), "<u4")
    return {"bin": level.bin_ns / unit_ns, "size": len(level), **columns}


def _base64(column: np.ndarray, dtype: str) -> str:
    limit = np.iinfo(np.dtype(dtype)).max
    return base64.b64encode(np.clip(column, 0, limit).astype(dtype).tobytes()).decode("ascii")
