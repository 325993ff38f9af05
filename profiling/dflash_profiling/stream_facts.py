"""What the stream files beside the traces say: their curves, and a few numbers for each rank."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MAX_STREAM_BYTES = 64 * 2**20
MAX_ENTRIES = 6
"""Curves of one key: as many as a picture can tell apart."""
_NO_CURVES = ("time_s", "step", "rank", "throttle_reasons")
_POWER_CAP, _HEAT = 0x4 | 0x80, 0x8 | 0x20 | 0x40
"""NVML's throttle reasons: the power limit and brake; the hardware's slowdown, which heat makes, and heat itself."""
KNOWN = {
    "gpu_util": ("GPU utilisation", "%"), "power_w": ("power", "W"),
    "wait_ms_of_rank": ("waits for other ranks, each second", "ms"), "sm_mhz": ("SM clock", "MHz"),
    "temperature_c": ("GPU temperature", "°C"), "memory_used_bytes": ("GPU memory used", "GiB"),
    "wakeup_ms": ("how late a millisecond's sleep ends, median", "ms"),
    "wakeup_max_ms": ("how late a millisecond's sleep ends, worst", "ms"),
    "gc_ms": ("pauses for collecting garbage, each second", "ms"),
    "gc_max_ms": ("longest pause for collecting garbage", "ms"),
    "alloc_retries": ("retries of the allocator, so far", ""), "device_allocs": ("calls of cudaMalloc, so far", ""),
    "graph_breaks": ("graph breaks of torch.compile, so far", ""),
    "compiled_graphs": ("compiled graphs, so far", ""), "cpu_cores": ("the process's cores", "cores"),
    "load": ("load of the machine", "cores"), "gil_share": ("share of the GIL, by thread", ""),
    "wait_ms": ("waits for other ranks in all, each second", "ms"),
    "ring_depth": ("messages that wait for the drafter, mean of its rings", ""),
    "ring_depth_of_rank": ("messages that wait for the drafter, by sender", ""),
}  # fmt: skip
"""Titles and units of a stream's keys, in the order in which they are drawn, before any others."""


@dataclass(frozen=True)
class StreamCurve:
    """One key of one stream over time, or one entry of a key that has several, such as one a peer."""

    key: str
    title: str
    entry: str
    """Its name; empty where the key has one number."""
    unit: str
    time_s: np.ndarray
    """Since 1970."""
    values: np.ndarray
    """NaN where a line lacks the key."""


def stream_path(folder: Path, rank: int) -> Path:
    """Where a rank's stream lies beside the traces in `folder`."""
    return folder / "stream" / f"rank{rank}.jsonl"


def read_stream(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines that say their time, in its order; what is none is left away.

    And so is the file's begin if it is too long.
    """
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
        if isinstance(row, dict) and not math.isnan(number(row.get("time_s"))):
            rows.append(row)
    return sorted(rows, key=lambda row: row["time_s"])


def curves_of(rows: Sequence[dict[str, Any]]) -> list[StreamCurve]:
    """One for each key with several numbers, or entry of such a key, the known ones first; bytes are in GiB."""
    if len(rows) < 2:
        return []
    time_s = np.array([number(row["time_s"]) for row in rows])
    found = []
    for key in dict.fromkeys([*KNOWN, *(key for row in rows for key in row)]):
        if key in _NO_CURVES:
            continue
        title, unit = KNOWN.get(key, (key.removesuffix("_bytes").replace("_", " "), ""))
        for entry, values in _columns([row.get(key) for row in rows]).items():
            name = f"rank {entry}" if entry and key.endswith("_of_rank") else entry
            if key.endswith("_bytes"):
                values, unit = values / 2**30, "GiB"
            found.append(StreamCurve(key, title, name, unit, time_s, values))
    return found


def _columns(cells: Sequence[Any]) -> dict[str, np.ndarray]:
    """Of a key's cells the numbers, or those of each entry of the greatest sums; none with less than two numbers."""
    entries = {name for cell in cells if isinstance(cell, dict) for name in cell}
    columns = {
        name: np.array([number(c.get(name) if isinstance(c, dict) else None) for c in cells]) for name in entries
    }
    columns = {"": np.array([number(cell) for cell in cells]), **columns}
    several = [name for name, column in columns.items() if (~np.isnan(column)).sum() > 1]
    greatest = sorted(several, key=lambda name: (-np.nansum(columns[name]), name))[:MAX_ENTRIES]
    return {name: columns[name] for name in sorted(greatest)}


def facts_of(rows: Sequence[dict[str, Any]]) -> dict[str, tuple[float, str]]:
    """What a rank's lines say together, each with its unit; what none of them holds is left out."""
    columns = {
        key: column[~np.isnan(column)]
        for key in dict.fromkeys(key for row in rows for key in row)
        if not np.isnan(column := np.array([number(row.get(key)) for row in rows])).all()
    }
    facts: dict[str, tuple[float, str]] = {}
    for title, unit, key, reduce in _FACTS:
        if key in columns:
            facts[title] = (float(reduce(columns[key])), unit)
    return facts


def _share(mask: int) -> Callable[[np.ndarray], float]:
    return lambda values: 100 * float(((values.astype(np.int64) & mask) != 0).mean())


_FACTS: list[tuple[str, str, str, Callable[[np.ndarray], Any]]] = [
    ("GPU utilisation, mean", "%", "gpu_util", np.mean),
    ("power, mean", "W", "power_w", np.mean),
    ("power, most", "W", "power_w", np.max),
    ("SM clock, mean", "MHz", "sm_mhz", np.mean),
    ("at the power limit", "% of lines", "throttle_reasons", _share(_POWER_CAP)),
    ("slowed down by heat", "% of lines", "throttle_reasons", _share(_HEAT)),
    ("late wake-up, median", "ms", "wakeup_ms", np.median),
    ("late wake-up, worst", "ms", "wakeup_max_ms", np.max),
    ("garbage collections", "", "gc", np.sum),
    ("garbage collection, total", "ms", "gc_ms", np.sum),
    ("garbage collection, longest", "ms", "gc_max_ms", np.max),
    ("allocator retries", "", "alloc_retries", np.max),
    ("graph breaks", "", "graph_breaks", np.max),
    ("compiled graphs", "", "compiled_graphs", np.max),
    ("cores of the process, mean", "", "cpu_cores", np.mean),
    ("waits for other ranks, mean", "ms a second", "wait_ms", np.mean),
    ("messages waiting in a ring, mean", "", "ring_depth", np.mean),
]
"""Title, unit, key and what makes one number of a column."""


def number(value: Any) -> float:
    """The value, or NaN where it is no number that a curve could have."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if abs(value) < 1e15 else math.nan
