"""What a rank's stream says, as lines of text, as JSON, and as what to bear in mind."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from dflash_profiling.compiles import Compile
from dflash_profiling.rank_stream import GilShares, RankStream

TOP = 8
MAX_NAME = 60


def stream_lines(stream: RankStream | None) -> list[str]:
    """Who held the GIL, and what was compiled or tuned; nothing of what the stream does not tell."""
    if stream is None:
        return []
    compiles = stream.compiles
    lines = [f"GIL {text}"] if (text := gil_text(stream.gil)) else []
    if compiles.count:
        lines.append(
            f"compiled or tuned: {compiles.count} in {compiles.ms / 1e3:.2f} s, of which {compiles.steady_count} in "
            f"{compiles.steady_ms / 1e3:.2f} s in steady state"
        )
        lines += [_line(entry) for entry in compiles.listed[:TOP]]
    return lines


def gil_text(gil: GilShares) -> str:
    """Threads' shares, or why there are none; empty where the stream does not say."""
    if not gil.samplings:
        return f"unknown: {gil.unknown[:200]}" if gil.unknown else ""
    shares = [f"{thread[:MAX_NAME]} {100 * share:.1f} %" for thread, share in list(gil.by_thread.items())[:TOP]]
    free = max(0.0, 1 - sum(gil.by_thread.values()))
    return f"held by {', '.join([*shares, f'nobody {100 * free:.1f} %'])} of the samples"


def when_text(entry: Compile) -> str:
    """When it was compiled or tuned, to about a second."""
    if entry.since_window_s is None:
        return "at some time"
    if entry.when == "during":
        return "in the window, or within a second of it"
    where = "before the window" if entry.when == "before" else "after the window's begin"
    return f"{abs(entry.since_window_s):.0f} s {where}"


def compile_findings(stream: RankStream | None) -> list[str]:
    """A sentence without its full stop, where something was compiled or tuned in steady state."""
    if stream is None or not stream.compiles.steady_count:
        return []
    compiles, first = stream.compiles, stream.compiles.listed[0]
    what = f"{first.kernel[:MAX_NAME]} ({first.key[:MAX_NAME]}), {first.ms:.0f} ms, {when_text(first)}"
    if compiles.steady_count == 1:
        return [f"something was compiled or tuned in steady state: {what}"]
    return [
        f"{compiles.steady_count} kernels or functions were compiled or tuned in steady state, for "
        f"{compiles.steady_ms / 1e3:.2f} s in all; longest {what}"
    ]


def stream_json(stream: RankStream) -> dict[str, Any]:
    """Facts as [value, unit]; of what was compiled or tuned those in steady state first, then the longest."""
    return {
        "facts": stream.facts,
        "gil_share": stream.gil.by_thread if stream.gil.samplings else None,
        "gil_samplings": stream.gil.samplings,
        "gil_unknown": stream.gil.unknown,
        "compiles": asdict(stream.compiles),
    }


def _line(entry: Compile) -> str:
    configs = f", {entry.configs} configurations" if entry.configs else ""
    steady = ", steady state" if entry.steady else ""
    name = f"{entry.kernel[:MAX_NAME]} ({entry.key[:MAX_NAME]})"
    return f"{entry.ms:10.2f} ms  {entry.kind[:MAX_NAME]}  {name}{configs}, {when_text(entry)}{steady}"
