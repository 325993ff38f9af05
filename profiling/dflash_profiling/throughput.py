"""How fast a run was beside the steps that were traced, from its metrics.jsonl."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

METRICS_FILE = "metrics.jsonl"
MAX_SLOWDOWN = 1.15
"""Of a step by the profiler; above it the window's times are no longer those of the run."""
MIN_SLOWDOWN = 0.85
"""Below it the steps before the window were slower for another reason."""
NEAREST = 10
"""Lines on either side of the traced window that count."""


@dataclass(frozen=True)
class Throughput:
    """Of some lines of metrics.jsonl."""

    ktok_s: float
    step_ms: float
    tokens_per_step: float
    steps: int
    outside_window: bool
    """Whether none of those steps was traced, which makes steps longer."""


@dataclass(frozen=True)
class _Line:
    first_step: int
    last_step: int
    tokens: float
    seconds: float


def find_throughput(folder: Path, first_step: int | None, last_step: int | None) -> Throughput | None:
    """That of the run in whose folder this is; None where no line of metrics tells.

    `first_step`, `last_step`: of the traced window. The lines nearest to it count, but not those that hold one of its
    steps, the one before, which is profiled too, or the one after, which begins when the trace has been written. Nor
    does the first line, which compiles. Where that leaves none, the lines of the window are taken.
    """
    folder = folder.absolute()
    places = [place / METRICS_FILE for place in (folder, folder.parent, folder.parent.parent)]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        return None
    lines = _lines(_rows(path))
    if first_step is None or last_step is None:
        return _total(lines[1:] or lines, bool(lines))
    before = [line for line in lines[1:] if line.last_step < first_step - 1]
    after = [line for line in lines[1:] if line.first_step > last_step + 1]
    if beside := before[-NEAREST:] + after[:NEAREST]:
        return _total(beside, True)
    return _total([line for line in lines if line.first_step <= last_step and line.last_step >= first_step], False)


def slowdown_warning(slowdown: float) -> str | None:
    """Why such a figure of `step_slowdown` is no measure of what the profiler costs, or that it costs too much."""
    if slowdown > MAX_SLOWDOWN:
        return (
            f"a step took {slowdown:.2f} of those before the window, which is above {MAX_SLOWDOWN}: the window's times "
            "are stretched by the profiler, unless its steps had more to do or the host was busier"
        )
    if slowdown < MIN_SLOWDOWN:
        return (
            f"a step took {slowdown:.2f} of those before the window, which were slower for another reason, as a run's "
            "first steps are: what the profiler costs is not known; a window of a run that goes on tells"
        )
    return None


def step_slowdown(metadata: dict[str, Any]) -> float | None:
    """The median step of a window over the median step before it, by a trace of `record.TraceWindow`.

    None where the trace does not say, or its window began before a step was over.
    """
    lists = [metadata.get(key) for key in ("step_ms", "step_ms_before")]
    inside, before = ([ms for ms in some if _is_number(ms)] if isinstance(some, list) else [] for some in lists)
    return median(inside) / median(before) if inside and before and median(before) > 0 else None


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    for text in path.read_bytes().splitlines():
        try:
            row = json.loads(text)
        except (ValueError, RecursionError):
            continue  # the last line of a run that goes on may be cut
        if isinstance(row, dict) and all(_is_number(row.get(key)) for key in ("step", "tokens")):
            rows.append(row)
    return rows


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e18


def _lines(rows: Sequence[dict[str, Any]]) -> list[_Line]:
    """What each row tells of the steps since the row before."""
    lines = []
    step, tokens = 0, 0.0
    for row in rows:
        rate = row.get("ktok_s") if _is_number(row.get("ktok_s")) else 0
        if row["step"] > step and row["tokens"] > tokens and rate:
            new = row["tokens"] - tokens
            lines.append(_Line(step + 1, int(row["step"]), new, new / rate / 1000))
        step, tokens = int(row["step"]), row["tokens"]
    return lines


def _total(lines: Sequence[_Line], outside: bool) -> Throughput | None:
    if not lines:
        return None
    tokens, seconds = sum(line.tokens for line in lines), sum(line.seconds for line in lines)
    steps = sum(line.last_step - line.first_step + 1 for line in lines)
    return Throughput(tokens / seconds / 1000, 1000 * seconds / steps, tokens / steps, steps, outside)
