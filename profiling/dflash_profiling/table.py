"""An analysis as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_profiling.analysis import RankAnalysis
from dflash_profiling.rank_stream import RankStream
from dflash_profiling.stream_table import compile_findings, stream_json, stream_lines
from dflash_profiling.throughput import slowdown_warning

LEAST_PERCENT, LEAST_IDLE_PERCENT = 0.05, 0.5
TOP = 8
"""Rows of a list of what takes longest."""


def tenths(parts_ns: Mapping[str, int]) -> dict[str, float]:
    """Per cent with one digit, which add up to 100.0: what rounding leaves goes to those cut the most."""
    total_ns = sum(parts_ns.values())
    if not total_ns:
        return dict.fromkeys(parts_ns, 0.0)
    exact = {name: 1000 * ns / total_ns for name, ns in parts_ns.items()}
    floors = {name: int(share) for name, share in exact.items()}
    most_cut = sorted(exact, key=lambda name: floors[name] - exact[name])
    for name in most_cut[: 1000 - sum(floors.values())]:
        floors[name] += 1
    return {name: share / 10 for name, share in floors.items()}


def as_text(ranks: Sequence[RankAnalysis], streams: Sequence[RankStream | None] = ()) -> str:
    """Shares of each rank's window, then what its computing is made of, and what its stream adds."""
    shares = [tenths(rank.split.parts_ns) for rank in ranks]
    used = [name for name in shares[0] if any(share[name] for share in shares)]
    head = ["rank", "role", "steps", "window ms", *(name.replace("_", " ") for name in used)]
    rows = [
        [_name(rank), rank.role or "", str(rank.steps or "-"), f"{rank.split.window_ns / 1e6:.1f}"]
        + [f"{share[name]:.1f} %" for name in used]
        for rank, share in zip(ranks, shares, strict=True)
    ]
    parts = [_aligned([head, *rows])]
    for rank, stream in _with_streams(ranks, streams):
        title = f"rank {_name(rank)}" + (f", {rank.role}" if rank.role else "")
        busy = busy_percent(rank)
        title += f": GPU busy {busy}" if busy else ": no GPU rows, so the times are those of the host"
        parts.append("\n".join([title, *_computing(rank), *(f"  {line}" for line in stream_lines(stream))]))
        parts[-1] += "".join(f"\n  {remark}" for remark in _with_clock(rank, stream))
    return "\n\n".join(parts)


def as_markdown(ranks: Sequence[RankAnalysis], streams: Sequence[RankStream | None] = ()) -> str:
    """The shares, the waits and the streams' facts, as tables, and what to bear in mind."""
    shares = [tenths(rank.split.parts_ns) for rank in ranks]
    used = [name for name in ranks[0].split.parts_ns if any(share[name] for share in shares)]
    titles = [rank_title(rank) for rank in ranks]
    rows = [[name.replace("_", " "), *(f"{share[name]:.1f} %" for share in shares)] for name in used]
    if any(rank.has_gpu_rows for rank in ranks):
        rows.append(["GPU busy", *map(busy_percent, ranks)])
    rows.append(["window", *(f"{rank.split.window_ns / 1e6:.1f} ms" for rank in ranks)])
    if any(rank.step_slowdown is not None for rank in ranks):
        rows.append(["a step, of those before the window", *(_factor(rank.step_slowdown) for rank in ranks)])
    parts = ["**Where the time goes**", _markdown_table(["part", *titles], rows)]
    peers = sorted({peer for rank in ranks for peer in rank.waits_for_ns})
    if peers:
        rows = [
            [f"for rank {peer}"]
            + [f"{100 * rank.waits_for_ns.get(peer, 0) / (rank.split.window_ns or 1):.1f} %" for rank in ranks]
            for peer in peers
        ]
        parts += ["**Who waits for whom**", _markdown_table(["waits", *titles], rows)]
    facts = {rank_title(rank): stream.facts for rank, stream in _with_streams(ranks, streams) if stream}
    if facts:
        names = dict.fromkeys(name for of_rank in facts.values() for name in of_rank)
        rows = [[name, *(_fact(of_rank.get(name)) for of_rank in facts.values())] for name in names]
        parts += ["**The streams beside the traces**", _markdown_table(["what", *facts], rows)]
    mind = [
        f"* {rank_title(rank)}: {r}"
        for rank, stream in _with_streams(ranks, streams)
        for r in _with_clock(rank, stream)
    ]
    return "\n\n".join(parts + (["\n".join(mind)] if mind else [])) + "\n"


def _with_streams(
    ranks: Sequence[RankAnalysis], streams: Sequence[RankStream | None]
) -> list[tuple[RankAnalysis, RankStream | None]]:
    return list(zip(ranks, streams or [None] * len(ranks), strict=True))


def _factor(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _fact(fact: tuple[float, str] | None) -> str:
    return "" if fact is None else f"{fact[0]:.4g} {fact[1]}".strip()


def as_json(ranks: Sequence[RankAnalysis], streams: Sequence[RankStream | None] = ()) -> list[dict[str, Any]]:
    """One object a rank; times in nanoseconds, but shares in per cent."""
    return [
        {
            "rank": rank.rank,
            "role": rank.role,
            "steps": rank.steps,
            "window_ns": rank.split.window_ns,
            "parts_ns": rank.split.parts_ns,
            "parts_percent": tenths(rank.split.parts_ns),
            "waits_for_ns": {str(peer): ns for peer, ns in rank.waits_for_ns.items()},
            "compute_by_span_ns": rank.compute_by_span_ns,
            "compute_by_family_ns": rank.compute_by_family_ns,
            "gpu_busy_ns": rank.gpu_busy_ns,
            "idle_by_host_ns": rank.idle_by_host_ns,
            "kernels": [vars(kernel) for kernel in rank.kernels[:TOP]],
            "has_gpu_rows": rank.has_gpu_rows,
            "max_launch_skew_ns": rank.max_launch_skew_ns,
            "unpaired_messages": rank.unpaired_messages,
            "undirected_kernels": rank.undirected_kernels,
            "unaligned": rank.unaligned,
            "clock_uncertainty_ns": rank.clock_uncertainty_ns,
            "step_slowdown": rank.step_slowdown,
            "stream": stream and stream_json(stream),
        }
        for rank, stream in _with_streams(ranks, streams)
    ]


def _computing(rank: RankAnalysis) -> list[str]:
    lines = []
    window_ns = rank.split.window_ns or 1
    if rank.waits_for_ns:
        percent = {peer: 100 * ns / window_ns for peer, ns in rank.waits_for_ns.items()}
        awaited = [f"rank {peer} {share:.1f} %" for peer, share in percent.items() if share >= LEAST_PERCENT]
        lines += ["  waits for: " + ", ".join(awaited[:TOP])] if awaited else []
    for what, times in (("span", rank.compute_by_span_ns), ("family of kernel", rank.compute_by_family_ns)):
        top = sorted(((ns, name) for name, ns in times.items() if ns), reverse=True)[:TOP]
        if top:
            parts = [f"{name or 'outside of spans'} {100 * ns / window_ns:.1f} %" for ns, name in top]
            lines.append(f"  computing by {what}: " + ", ".join(parts))
    idle = sorted(((ns, name) for name, ns in rank.idle_by_host_ns.items()), reverse=True)[:TOP]
    shares = [(100 * ns / window_ns, name or "nothing that is named") for ns, name in idle]
    if shown := [f"{name} {share:.1f} %" for share, name in shares if share >= LEAST_IDLE_PERCENT]:
        lines.append("  GPU idle while the host was in: " + ", ".join(shown))
    if rank.kernels:
        lines.append("  kernels of the whole trace:")
    lines += [
        f"  {kernel.total_ns / 1e6:10.2f} ms in {kernel.count:6} runs  {kernel.name[:90]}"
        for kernel in rank.kernels[:TOP]
    ]
    if rank.max_launch_skew_ns:
        lines.append(f"  clocks of host and GPU differ by {rank.max_launch_skew_ns / 1e3:.1f} us or more")
    if rank.step_slowdown is not None and not slowdown_warning(rank.step_slowdown):
        lines.append(f"  a step took {rank.step_slowdown:.2f} of those before the window")
    return lines


def _with_clock(rank: RankAnalysis, stream: RankStream | None) -> list[str]:
    clock = [f"not on the clock of the other ranks: {rank.unaligned}"] if rank.unaligned else []
    if rank.waits_for_ns and rank.clock_uncertainty_ns is not None:
        clock.append(f"messages fix the ranks' clocks to {rank.clock_uncertainty_ns / 1e6:.3g} ms: so exact are waits")
    return clock + remarks(rank, stream)


def remarks(rank: RankAnalysis, stream: RankStream | None = None) -> list[str]:
    """What to bear in mind of the rank, a sentence each without its full stop."""
    found = []
    if rank.step_slowdown is not None and (warning := slowdown_warning(rank.step_slowdown)):
        found.append(warning)
    if not rank.steps:
        found.append("it names no steps (ProfilerStep#), so the window is the whole trace")
    found += compile_findings(stream)
    if rank.unpaired_messages:
        found.append(
            f"{rank.unpaired_messages} messages could not be paired with their other ends: they have no arrows, and "
            "what waited for them is unknown"
        )
    if rank.undirected_kernels:
        found.append(
            f"of {rank.undirected_kernels} message kernels of NCCL the trace does not say whether they send or receive"
            ": they have no arrows, and what waited for them is unknown"
        )
    return found


def busy_percent(rank: RankAnalysis) -> str:
    """Of the window, in which the rank's GPU did anything; empty without GPU rows."""
    return "" if rank.gpu_busy_ns is None else f"{100 * rank.gpu_busy_ns / (rank.split.window_ns or 1):.1f} %"


def rank_title(rank: RankAnalysis) -> str:
    """The rank with its role, in a word that a folder can have too."""
    role = "".join(character if character.isalnum() or character in "+-_" else "_" for character in rank.role or "")
    return f"rank {_name(rank)}" + (f", {role[:40]}" if role else "")


def _name(rank: RankAnalysis) -> str:
    return "?" if rank.rank is None else str(rank.rank)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
