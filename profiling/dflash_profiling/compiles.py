"""What was compiled and tuned, as a rank's stream tells it, beside the traced window and the steps of the loop."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dflash_profiling.stream_facts import number

WARM_UP_STEPS = 3
"""So many steps of a process may still compile; after them kernels and shapes should be known."""
MAX_LISTED = 200
"""Entries of a rank that are kept: those in steady state before others, the longest first."""


@dataclass(frozen=True)
class Compile:
    """One kernel or function that was compiled, or tuned for one key."""

    kind: str
    """"compile" or "autotune"."""
    kernel: str
    key: str
    ms: float
    configs: int
    """Those that were timed; 0 of what was not tuned by timing."""
    since_window_s: float | None
    """From the window's begin to its end, to about a second; negative before it. None where no clock tells."""
    when: str
    """"before", "during" or "after" the window, or "" where no clock tells. A line tells of a whole second: what ended
    in one that the window shares is "during"."""
    steady: bool
    """Whether the loop was past its warm-up, which a window is too."""


@dataclass(frozen=True)
class Compiles:
    """Of one rank."""

    count: int
    ms: float
    steady_count: int
    steady_ms: float
    listed: list[Compile]


def compiles_of(rows: Sequence[dict[str, Any]], window_s: tuple[float, float] | None) -> Compiles:
    """What the lines tell of; `window_s` is when the trace was recorded, since 1970."""
    knows_steps = any("step" in row for row in rows)
    found = [entry for line in _lines(rows) for entry in _entries(*line, window_s, knows_steps)]
    steady = [entry for entry in found if entry.steady]
    found.sort(key=lambda entry: (not entry.steady, -entry.ms))
    return Compiles(
        len(found), sum(e.ms for e in found), len(steady), sum(e.ms for e in steady), found[:MAX_LISTED]
    )  # fmt: skip


def _lines(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], float, bool]]:
    """Each line, the time of the one before, and whether the loop was past its warm-up then.

    A line without a step is of a process whose loop has not begun, such as one that has been started anew.
    """
    first = math.nan
    steady = False
    for before, row in pairwise([{"time_s": -math.inf}, *rows]):
        yield row, before["time_s"], steady
        step = number(row.get("step"))
        first = step if math.isnan(first) or math.isnan(step) else first
        steady = step - first >= WARM_UP_STEPS


def _entries(
    row: dict[str, Any],
    before_s: float,
    past_warm_up: bool,
    window_s: tuple[float, float] | None,
    knows_steps: bool,
) -> Iterator[Compile]:
    listed = row.get("compiles")
    when, since_s, steady = "", None, past_warm_up
    if window_s is not None:
        when = "before" if row["time_s"] < window_s[0] else "after" if before_s > window_s[1] else "during"
        since_s = row["time_s"] - window_s[0]
        # After the window a process may have been started anew, whose warm-up only its steps tell.
        steady |= before_s >= window_s[0] and (when == "during" or not knows_steps)
    for entry in listed if isinstance(listed, list) else ():
        if not isinstance(entry, dict) or math.isnan(ms := number(entry.get("ms"))):
            continue
        kind, kernel, key = (str(entry.get(name, ""))[:200] for name in ("kind", "kernel", "key"))
        configs = number(entry.get("configs"))
        count = 0 if math.isnan(configs) else int(configs)
        yield Compile(kind, kernel, key, ms, count, since_s, when, steady)
