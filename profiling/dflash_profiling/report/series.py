"""Curves over time: memory by the traces, and what a stream file beside them holds. Static pictures, no script."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash_profiling.analysis import RankAnalysis
from dflash_profiling.kineto import MemoryEvents, Trace
from dflash_profiling.report.text import escaped, rank_name

POINTS = 600
MAX_STREAM_BYTES = 64 * 2**20
MAX_CURVES = 8
KNOWN = {
    "gpu_util": ("GPU utilisation", "%"), "power_w": ("power", "W"), "sm_mhz": ("SM clock", "MHz"),
    "memory_used_bytes": ("GPU memory used", "GiB"), "temperature_c": ("GPU temperature", "°C"),
    "wakeup_max_ms": ("latest wake-up of a millisecond's sleep", "ms"), "cpu_cores": ("the process's cores", "cores"),
    "gc_ms": ("collections of garbage", "ms"),
}  # fmt: skip
"""Titles and units of a stream's keys, in the order in which they are drawn, before any others."""
_NO_CURVES = ("time_s", "step", "rank")
WIDTH, HEIGHT = 600, 120


@dataclass(frozen=True)
class Curve:
    """One picture's worth."""

    title: str
    unit: str
    time_s: np.ndarray
    lines: dict[str, np.ndarray]
    steps: bool = False
    """Whether a value holds until the next."""


def memory_section(traces: Sequence[Trace], ranks: Sequence[RankAnalysis]) -> str:
    """HTML; empty where no trace has events of the allocator."""
    curves = [
        (rank_name(rank), _memory(trace.memory, device, rank.window_start_ns))
        for trace, rank in zip(traces, ranks, strict=True)
        for device in np.unique(trace.memory.device).tolist()
    ]
    note = "As the allocator reports it; time is since the begin of each rank's window."
    return _section("memory", "Memory over time", note, curves)


def stream_section(traces: Sequence[Trace], ranks: Sequence[RankAnalysis]) -> str:
    """HTML; empty where no stream file lies beside the traces."""
    curves: list[tuple[str, Curve]] = []
    for trace, rank in zip(traces, ranks, strict=True):
        if rank.rank is not None:
            rows = _rows(trace.path.parent / "stream" / f"rank{rank.rank}.jsonl")
            curves += [(rank_name(rank), curve) for curve in _stream(rows)]
    note = "From the stream that each rank writes beside its traces, over the whole run; time is since its first line."
    return _section("stream", "Utilisation and power over time", note, curves)


def _section(anchor: str, heading: str, note: str, curves: Sequence[tuple[str, Curve]]) -> str:
    """The same thing of all ranks side by side, with one scale."""
    if not curves:
        return ""
    blocks = []
    for title, unit in dict.fromkeys((curve.title, curve.unit) for _, curve in curves):
        same = [(who, curve) for who, curve in curves if (curve.title, curve.unit) == (title, unit)]
        values = np.concatenate([line for _, curve in same for line in curve.lines.values()])
        low, high = min(0.0, float(np.nanmin(values))), max(float(np.nanmax(values)), 0.0)
        scale = low, max(high, 100.0) if unit == "%" else high
        pictures = "".join(_picture(who, curve, *scale) for who, curve in same)
        name = f"{escaped(title, 60)}, {escaped(unit)}" if unit else escaped(title, 60)
        blocks.append(f'<h3>{name}</h3><div class="curves">{pictures}</div>')
    return f'<section id="{anchor}"><h2>{heading}</h2><p class="note">{note}</p>{"".join(blocks)}</section>'


def _memory(memory: MemoryEvents, device: int, start_ns: int) -> Curve:
    of_device = memory.device == device
    time_s = (memory.time_ns[of_device] - start_ns) / 1e9
    lines = {
        name: np.where(column[of_device] >= 0, column[of_device], np.nan) / 2**30
        for name, column in (("reserved", memory.reserved), ("allocated", memory.allocated))
        if (column[of_device] >= 0).any()
    }
    if not lines:
        lines = {"change since the first event": np.cumsum(memory.bytes[of_device]) / 2**30}
    return Curve("host" if device < 0 else "GPU", "GiB", time_s, lines, steps=True)


def _rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; what is none is left away, and so is the file's begin if it is too long."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MAX_STREAM_BYTES))
            data = file.read(MAX_STREAM_BYTES)
    except OSError:
        return []
    rows = []
    for line in data.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _stream(rows: Sequence[dict[str, Any]]) -> list[Curve]:
    times = [_number(row.get("time_s")) for row in rows]
    timed = [(row, time) for row, time in zip(rows, times, strict=True) if not math.isnan(time)]
    timed.sort(key=lambda pair: pair[1])
    if len(timed) < 2:
        return []
    time_s = np.array([time for _, time in timed])
    keys = list(dict.fromkeys([*KNOWN, *(key for row, _ in timed for key in row)]))
    curves: list[Curve] = []
    for key in keys:
        values = np.array([_number(row.get(key)) for row, _ in timed])
        if key not in _NO_CURVES and (~np.isnan(values)).sum() > 1 and len(curves) < MAX_CURVES:
            title, unit = KNOWN.get(key, (key.removesuffix("_bytes").replace("_", " "), ""))
            if key.endswith("_bytes"):
                values, unit = values / 2**30, "GiB"
            curves.append(Curve(title, unit, time_s - time_s[0], {"": values}))
    return curves


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if abs(value) < 1e300 else math.nan


def _picture(who: str, curve: Curve, low: float, high: float) -> str:
    """A drawing with its range; the greatest value of each of at most `POINTS` stretches is drawn."""
    begin, end = float(curve.time_s.min()), float(curve.time_s.max())
    span, extent = (high - low) or 1.0, (end - begin) or 1.0
    paths, legend = [], []
    for place, (name, line) in enumerate(curve.lines.items()):
        known = ~np.isnan(line)
        if not known.any():
            continue
        x, y = _thinned((curve.time_s[known] - begin) / extent, (high - line[known]) / span)
        paths.append(f'<path class="line{place}" d="{_path(x * WIDTH, y * HEIGHT, curve.steps)}"/>')
        most = f"at most {float(line[known].max()):.4g} {escaped(curve.unit)}"
        legend.append(f'<span class="line{place}">{escaped(name)} {most}</span>' if name else f"<span>{most}</span>")
    name = escaped(curve.title, 60)
    axis = f"<span>{_axis(begin)}</span><span>{_axis(end)}</span>"
    return (
        f'<figure class="curve"><figcaption><b>{who}</b> {" ".join(legend)}</figcaption>'
        f'<div class="plot"><span class="high">{high:.4g}</span><span class="low">{low:.4g}</span>'
        f'<svg viewBox="0 -2 {WIDTH} {HEIGHT + 4}" preserveAspectRatio="none" role="img" aria-label="{name}">'
        f'{"".join(paths)}</svg></div><div class="axis">{axis}</div></figure>'
    )


def _axis(seconds: float) -> str:
    if abs(seconds) >= 120:
        return f"{seconds / 60:.1f} min"
    return f"{seconds:.1f} s" if abs(seconds) >= 2 else f"{round(1000 * seconds)} ms"


def _thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each stretch the first point and the highest (the least y)."""
    if len(x) <= POINTS:
        return x, y
    stretch = np.minimum((x * POINTS / 2).astype(np.int64), POINTS // 2 - 1)
    first = np.flatnonzero(np.diff(stretch, prepend=-1))
    place = np.cumsum(np.diff(stretch, prepend=-1) != 0) - 1
    highest = np.lexsort((y, place))[first]
    chosen = np.union1d(np.union1d(first, highest), [len(x) - 1])
    return x[chosen], y[chosen]


def _path(x: np.ndarray, y: np.ndarray, steps: bool) -> str:
    points = [f"{a:.1f} {b:.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    if not steps:
        return "M" + "L".join(points)
    rest = [f"H{a:.1f}V{b:.1f}" for a, b in zip(x[1:].tolist(), y[1:].tolist(), strict=True)]
    return f"M{points[0]}{''.join(rest)}"
