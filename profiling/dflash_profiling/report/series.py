"""Curves over time: memory by the traces, and what a stream file beside them holds. Static pictures, no script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash_profiling.analysis import RankAnalysis
from dflash_profiling.kineto import MemoryEvents, Trace
from dflash_profiling.rank_stream import RankStream
from dflash_profiling.report.streams import Streams, gil_table
from dflash_profiling.report.text import escaped, rank_name
from dflash_profiling.stream_facts import curves_of

POINTS = 600
MAX_CURVES = 16
WIDTH, HEIGHT = 600, 120
_OPEN = ("gpu_util", "power_w", "wait_ms_of_rank")
"""What is seen without opening anything."""


@dataclass(frozen=True)
class Curve:
    """One picture's worth."""

    title: str
    unit: str
    time_s: np.ndarray
    lines: dict[str, np.ndarray]
    steps: bool = False
    """Whether a value holds until the next."""
    window: tuple[float, float] | None = None
    """When the trace was recorded, by the same time."""


def memory_section(traces: Sequence[Trace], ranks: Sequence[RankAnalysis]) -> str:
    """HTML; empty where no trace has events of the allocator."""
    curves = [
        (rank_name(rank), _memory(trace.memory, device, rank.window_start_ns))
        for trace, rank in zip(traces, ranks, strict=True)
        for device in np.unique(trace.memory.device).tolist()
    ]
    note = "As the allocator reports it; time is since the begin of each rank's window."
    return _section("memory", "Memory over time", note, curves)


def stream_section(streams: Streams) -> str:
    """HTML; empty where no stream has a curve."""
    curves: dict[str, list[tuple[str, Curve]]] = {}
    for rank, stream in streams:
        for key, curve in _stream_curves(stream).items():
            curves.setdefault(key, []).append((rank_name(rank), curve))
    if not curves:
        return ""
    idle = [key for key, same in curves.items() if not any(_is_drawn(curve) for _, curve in same)]
    drawn = [key for key in curves if key not in idle][:MAX_CURVES]
    seen = [key for key in drawn if key in _OPEN] or drawn[:1]
    blocks = {key: _block(curves[key]) for key in drawn}
    rest = "".join(block for key, block in blocks.items() if key not in seen)
    never = ", ".join(escaped(curves[key][0][1].title, 60) for key in idle)
    return (
        '<section id="stream"><h2>The streams over time</h2><p class="note">From the stream that each rank '
        "writes beside its traces, a line a second over the whole run. Time is since its first line; the stretch that "
        f"was traced is shaded.</p>{_facts_table([(rank_name(rank), stream.facts) for rank, stream in streams])}"
        + gil_table(streams)
        + "".join(blocks[key] for key in seen)
        + (f"<details><summary>More curves: host, allocator, compiler</summary>{rest}</details>" if rest else "")
        + (f'<p class="note">Always 0, so not drawn: {never}.</p>' if never else "")
        + "</section>"
    )


def _stream_curves(stream: RankStream) -> dict[str, Curve]:
    """By key, with a line for each of its entries."""
    curves: dict[str, Curve] = {}
    for found in curves_of(stream.rows):
        begin_s = found.time_s[0]
        window = stream.window_s and (stream.window_s[0] - begin_s, stream.window_s[1] - begin_s)
        curve = curves.setdefault(found.key, Curve(found.title, found.unit, found.time_s - begin_s, {}, window=window))
        curve.lines[found.entry] = found.values
    return curves


def _is_drawn(curve: Curve) -> bool:
    return any(np.nan_to_num(line).any() for line in curve.lines.values())


def _facts_table(ranks: Sequence[tuple[str, dict[str, tuple[float, str]]]]) -> str:
    titles = {title: unit for _, facts in ranks for title, (_, unit) in facts.items()}
    head = "".join(f'<th scope="col">{who}</th>' for who, _ in ranks)
    body = "".join(
        f'<tr><th scope="row">{title}</th>'
        + "".join(f"<td>{f'{facts[title][0]:,.4g} {unit}' if title in facts else '–'}</td>" for _, facts in ranks)
        + "</tr>"
        for title, unit in titles.items()
    )
    return (
        '<div class="scroll"><table id="stream-facts" class="facts-table"><caption>Over the whole stream</caption>'
        f'<thead><tr><th scope="col">what</th>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _section(anchor: str, heading: str, note: str, curves: Sequence[tuple[str, Curve]]) -> str:
    """The same thing of all ranks side by side, with one scale."""
    if not curves:
        return ""
    of_title: dict[tuple[str, str], list[tuple[str, Curve]]] = {}
    for who, curve in curves:
        of_title.setdefault((curve.title, curve.unit), []).append((who, curve))
    blocks = "".join(_block(same) for same in of_title.values())
    return f'<section id="{anchor}"><h2>{heading}</h2><p class="note">{note}</p>{blocks}</section>'


def _block(same: Sequence[tuple[str, Curve]]) -> str:
    """The same thing of several ranks, under its name."""
    title, unit = same[0][1].title, same[0][1].unit
    values = np.concatenate([line for _, curve in same for line in curve.lines.values()])
    low, high = min(0.0, float(np.nanmin(values))), max(float(np.nanmax(values)), 0.0)
    scale = low, max(high, 100.0) if unit == "%" else high
    pictures = "".join(_picture(who, curve, *scale) for who, curve in same)
    name = f"{escaped(title, 60)}, {escaped(unit)}" if unit else escaped(title, 60)
    return f'<h3>{name}</h3><div class="curves">{pictures}</div>'


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


def _picture(who: str, curve: Curve, low: float, high: float) -> str:
    """A drawing with its range; the greatest value of each of at most `POINTS` stretches is drawn."""
    begin, end = float(curve.time_s.min()), float(curve.time_s.max())
    span, extent = (high - low) or 1.0, (end - begin) or 1.0
    paths, legend = [_shade(curve.window, begin, extent)], []
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


def _shade(window: tuple[float, float] | None, begin: float, extent: float) -> str:
    if window is None:
        return ""
    left, right = (min(max((edge - begin) / extent, 0.0), 1.0) * WIDTH for edge in window)
    if window[1] < begin or window[0] > begin + extent:
        return ""
    return f'<rect class="traced" x="{left:.1f}" y="-2" width="{max(right - left, 3):.1f}" height="{HEIGHT + 4}"/>'


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
