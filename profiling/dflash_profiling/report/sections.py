"""The page's parts that need no script: facts, sentences, bars and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from dflash_profiling.analysis import RankAnalysis
from dflash_profiling.kineto import Trace
from dflash_profiling.rank_stream import RankStream
from dflash_profiling.report.text import duration, escaped, label, rank_name, sentence
from dflash_profiling.report.waiting import awaited, headline
from dflash_profiling.table import busy_percent, remarks, tenths
from dflash_profiling.throughput import slowdown_warning
from dflash_profiling.timeline import PARTS

TOP = 12
MIN_LABELLED = 6
"""Per cent of a bar from which on the number stands in it."""


def header(traces: Sequence[Trace], ranks: Sequence[RankAnalysis]) -> str:
    """Facts of the run, and a sentence a rank."""
    facts = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in _facts(traces, ranks))
    rows = "".join(
        f"<li><b>{rank_name(rank)}</b> {sentence(rank, tenths(rank.split.parts_ns))}{awaited(rank)}</li>"
        for rank in ranks
    )
    return (
        f'<header><h1>Where the time goes</h1>{headline(ranks)}<dl class="facts">{facts}</dl>'
        f'<ul class="sentences">{rows}</ul></header>'
    )


def _facts(traces: Sequence[Trace], ranks: Sequence[RankAnalysis]) -> list[tuple[str, str]]:
    facts = []
    topologies = {escaped(t.metadata["topology"], 60) for t in traces if isinstance(t.metadata.get("topology"), str)}
    if topologies:
        facts.append(("topology", ", ".join(sorted(topologies))))
    world = max((t.world_size or 0 for t in traces), default=0)
    facts.append(("ranks", f"{len(ranks)} of {world}" if world > len(ranks) else str(len(ranks))))
    windows = [rank.split.window_ns for rank in ranks]
    short, long = duration(min(windows)), duration(max(windows))
    facts.append(("window", short if short == long else f"{short} to {long}"))
    steps = sorted({rank.steps for rank in ranks})
    named = f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else str(steps[0])
    facts.append(("steps", named if steps[-1] else "not marked in the traces"))
    if devices := sorted({name for trace in traces for name in _devices(trace)}):
        facts.append(("GPU", ", ".join(devices)))
    begins = [r.window_start_ns for t, r in zip(traces, ranks, strict=True) if t.base_ns]
    if begins and 0 < min(begins) < 4e18:
        moment = datetime.fromtimestamp(min(begins) / 1e9, UTC)
        facts.append(("recorded", f"{moment:%Y-%m-%d %H:%M:%S} UTC"))
    return facts


def _devices(trace: Trace) -> list[str]:
    listed = trace.metadata.get("deviceProperties")
    names = [item.get("name") for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
    return [escaped(name, 60) for name in names[:8] if isinstance(name, str)]


def notes(traces: Sequence[Trace], ranks: Sequence[RankAnalysis], streams: Sequence[RankStream | None]) -> list[str]:
    """What to bear in mind, escaped."""
    found = []
    without = [rank_name(rank) for rank in ranks if not rank.has_gpu_rows]
    if without:
        who = "No rank has" if len(without) == len(ranks) else f"{'; '.join(without)}: no"
        found.append(
            f"{who} rows of a GPU: the times are those of the host's spans, and how busy a GPU was is unknown."
        )
    for trace, rank, stream in zip(traces, ranks, streams, strict=True):
        if rank.max_launch_skew_ns:
            differ = f"the clocks of host and GPU differ by {duration(rank.max_launch_skew_ns)} or more"
            found.append(f"{rank_name(rank)}: {differ}; the launches concerned count as at their kernels' start.")
        found += [f"{rank_name(rank)}: {escaped(remark)}." for remark in remarks(rank, stream)]
        if trace.skipped_events:
            found.append(f"{rank_name(rank)}: {trace.skipped_events} malformed events of the trace were left away.")
    return found


def used_parts(ranks: Sequence[RankAnalysis]) -> list[str]:
    """Those that any rank spends time in."""
    return [name for name in PARTS if any(rank.split.parts_ns[name] for rank in ranks)]


def legend(ranks: Sequence[RankAnalysis]) -> str:
    """The colours of the parts."""
    host = not any(rank.has_gpu_rows for rank in ranks)
    items = "".join(f'<li><i class="swatch p-{name}"></i>{label(name, host)}</li>' for name in used_parts(ranks))
    return f'<ul class="legend">{items}</ul>'


def bars(ranks: Sequence[RankAnalysis]) -> str:
    """A bar a rank, and the table of the same numbers."""
    rows = "".join(_bar(rank) for rank in ranks)
    return (
        '<section id="parts"><h2>Time by part</h2><p class="note">Each instant counts once: as the most useful thing '
        f'that goes on then. The parts of a rank add up to 100 % of its window.</p>{legend(ranks)}<div class="bars" '
        f'aria-hidden="true">{rows}</div>{_parts_table(ranks)}</section>'
    )


def _bar(rank: RankAnalysis) -> str:
    total_ns = rank.split.window_ns or 1
    shares = tenths(rank.split.parts_ns)
    pieces = []
    for name, ns in rank.split.parts_ns.items():
        if ns:
            inside = f"<b>{shares[name]:.0f}</b>" if shares[name] >= MIN_LABELLED else ""
            title = f"{label(name, not rank.has_gpu_rows)} {shares[name]:.1f} %, {duration(ns)}"
            pieces.append(
                f'<span class="p-{name}" style="width:{100 * ns / total_ns:.4f}%" title="{title}">{inside}</span>'
            )
    return f'<div class="bar"><span class="who">{rank_name(rank)}</span><div>{"".join(pieces)}</div></div>'


def _parts_table(ranks: Sequence[RankAnalysis]) -> str:
    shares = [tenths(rank.split.parts_ns) for rank in ranks]
    host = not any(rank.has_gpu_rows for rank in ranks)
    head = "".join(f'<th scope="col">{rank_name(rank)}</th>' for rank in ranks)
    body = []
    for name in used_parts(ranks):
        cells = "".join(
            f'<td data-part="{name}" data-ns="{(ns := rank.split.parts_ns[name])}" title="{duration(ns)}">'
            f"{share[name]:.1f} %</td>"
            for rank, share in zip(ranks, shares, strict=True)
        )
        swatch = f'<i class="swatch p-{name}"></i>'
        body.append(f'<tr><th scope="row">{swatch}{label(name, host)}</th>{cells}</tr>')
    windows = "".join(f'<td data-ns="{r.split.window_ns}">{duration(r.split.window_ns)}</td>' for r in ranks)
    steps = "".join(f"<td>{rank.steps}</td>" for rank in ranks)
    foot = f'<tr><th scope="row">window</th>{windows}</tr><tr><th scope="row">steps</th>{steps}</tr>'
    if any(rank.has_gpu_rows for rank in ranks):
        busy = "".join(f"<td>{busy_percent(rank)}</td>" for rank in ranks)
        foot = f'<tr><th scope="row">GPU busy</th>{busy}</tr>{foot}'
    if any(rank.step_slowdown is not None for rank in ranks):
        slowdowns = "".join(f"<td>{_factor(rank.step_slowdown)}</td>" for rank in ranks)
        foot += f'<tr><th scope="row">a step, of those before the window</th>{slowdowns}</tr>'
    unused = [label(name, host) for name in PARTS if name not in used_parts(ranks)]
    rest = f'<p class="note">No time in: {", ".join(unused)}.</p>' if unused else ""
    return (
        '<div class="scroll"><table id="parts-table"><caption>Per cent of each rank\'s window</caption><thead><tr>'
        f'<th scope="col">part</th>{head}</tr></thead><tbody>{"".join(body)}</tbody>'
        f"<tfoot>{foot}</tfoot></table></div>{rest}"
    )


def _factor(value: float | None) -> str:
    """A warning's colour where there is one."""
    if value is None:
        return "–"
    return f'<b class="warn">{value:.2f}</b>' if slowdown_warning(value) else f"{value:.2f}"


def tops(ranks: Sequence[RankAnalysis]) -> str:
    """A block a rank of what its computing is made of."""
    blocks = []
    for place, rank in enumerate(ranks):
        tables = [
            _shares_table("computing by span", "span", rank.compute_by_span_ns, rank.split.window_ns),
            _shares_table("computing by family of kernel", "family", rank.compute_by_family_ns, rank.split.window_ns),
            _shares_table("GPU idle while the host was in", "call or span", rank.idle_by_host_ns, rank.split.window_ns),
            _kernels_table(rank),
        ]
        opened = " open" if place == 0 or len(ranks) <= 2 else ""
        inside = "".join(tables) or '<p class="note">Nothing that computes was recorded.</p>'
        blocks.append(
            f'<details class="rank"{opened}><summary>{rank_name(rank)}</summary>'
            f'<div class="tops">{inside}</div></details>'
        )
    return f'<section id="tops"><h2>What computes</h2>{"".join(blocks)}</section>'


def _shares_table(caption: str, kind: str, times_ns: Mapping[str, int], window_ns: int) -> str:
    order = sorted(((ns, name) for name, ns in times_ns.items() if ns), reverse=True)
    if not order:
        return ""
    shown, left = order[:TOP], order[TOP:]
    rows = "".join(
        f'<tr><th scope="row">{escaped(name) or "outside of spans"}</th>{_share_cells(kind, ns, window_ns)}</tr>'
        for ns, name in shown
    )
    if left:
        rest_ns = sum(ns for ns, _ in left)
        rows += f'<tr><th scope="row">{len(left)} others</th>{_share_cells("rest", rest_ns, window_ns)}</tr>'
    return (
        f'<table class="shares"><caption>{caption}</caption><thead><tr><th scope="col">{kind}</th>'
        f'<th scope="col">of window</th><th scope="col">time</th></tr></thead><tbody>{rows}</tbody></table>'
    )


def _share_cells(kind: str, ns: int, window_ns: int) -> str:
    share = 100 * ns / (window_ns or 1)
    return (
        f'<td class="meter"><i style="width:{min(share, 100):.3f}%"></i><span>{share:.1f} %</span></td>'
        f'<td data-{kind}="" data-ns="{ns}">{duration(ns)}</td>'
    )


def _kernels_table(rank: RankAnalysis) -> str:
    rows = "".join(
        f'<tr><td data-kernel="" data-ns="{kernel.total_ns}">{duration(kernel.total_ns)}</td><td>{kernel.count}</td>'
        f"<td>{duration(kernel.total_ns / max(kernel.count, 1))}</td><td>{escaped(kernel.family)}</td>"
        f'<th scope="row" class="code"><span title="{escaped(kernel.name)}">{escaped(kernel.name)}</span></th></tr>'
        for kernel in rank.kernels[:TOP]
    )
    if not rows:
        return ""
    left = len(rank.kernels) - TOP
    more = f"; {left} others left away" if left > 0 else ""
    return (
        '<div class="scroll wide"><table class="kernels">'
        f"<caption>kernels of the whole trace, by total time{more}</caption>"
        '<thead><tr><th scope="col">total</th><th scope="col">runs</th><th scope="col">mean</th><th scope="col">family'
        f'</th><th scope="col">kernel</th></tr></thead><tbody>{rows}</tbody></table></div>'
    )
