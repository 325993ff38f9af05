"""The page as a whole, and its file."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from dflash_profiling.analysis import RankAnalysis
from dflash_profiling.kineto import Trace
from dflash_profiling.rank_stream import RankStream, read_streams
from dflash_profiling.report.lanes import timeline
from dflash_profiling.report.sections import bars, header, legend, notes, tops
from dflash_profiling.report.series import memory_section, stream_section
from dflash_profiling.report.streams import compiled
from dflash_profiling.report.text import embedded, escaped
from dflash_profiling.report.waiting import waiting


def write_report(
    traces: Sequence[Trace],
    ranks: Sequence[RankAnalysis],
    path: Path | str,
    streams: Sequence[RankStream | None] | None = None,
) -> None:
    """Writes the page of `analyze_ranks(traces)`; at `path` there is the whole page or what was there before.

    The streams are read from beside the traces unless they are given.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        partial.write_bytes(render(traces, ranks, streams).encode("utf-8", "replace"))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def render(
    traces: Sequence[Trace], ranks: Sequence[RankAnalysis], streams: Sequence[RankStream | None] | None = None
) -> str:
    """The page's HTML. Nothing of the traces can run in it: text is escaped, and only our script is allowed."""
    script, style = _part("page.js"), _part("page.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    of_ranks = read_streams(traces, ranks) if streams is None else streams
    there = [(rank, stream) for rank, stream in zip(ranks, of_ranks, strict=True) if stream]
    shown = timeline(traces, ranks)
    remarks = notes(traces, ranks, of_ranks) + [escaped(note) for note in shown.notes]
    listed = "".join(f"<li>{note}</li>" for note in remarks)
    body = [
        header(traces, ranks),
        f'<ul class="remarks">{listed}</ul>' if remarks else "",
        waiting(ranks),
        bars(ranks),
        _timeline_section(ranks),
        tops(ranks),
        compiled(there),
        memory_section(traces, ranks),
        stream_section(there),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>Where the time goes</title>\n<style>{style}</style></head>\n<body><main>\n"
        + "\n".join(part for part in body if part)
        + f'\n</main>\n<script type="application/json" id="data">{embedded(shown.payload)}</script>\n'
        + f"<script>{script}</script>\n</body></html>\n"
    )


def _timeline_section(ranks: Sequence[RankAnalysis]) -> str:
    return (
        '<section id="timeline"><h2>Timeline</h2><div class="controls"><button type="button" id="in">zoom in</button>'
        '<button type="button" id="out">zoom out</button><button type="button" id="reset">whole window</button>'
        '<label><input type="checkbox" id="lines" checked> messages</label><span id="range" role="status"></span></div>'
        f'{legend(ranks)}<div id="stage"><canvas id="canvas" tabindex="0" role="img" '
        'aria-label="Timeline of all ranks: keys + and - zoom, arrows move, 0 shows all"></canvas>'
        '<div id="tip" hidden></div></div>'
        '<p class="note" id="help">Drag over a stretch or turn the wheel to zoom, Shift and drag to move, double-click '
        "for the whole window; with the keyboard + and −, ← and →, 0. Each rank shows what its time counts as, then "
        "the GPU's streams or the host's operations, then the steps and spans of its loop. A line goes from a "
        "message's send to the end of its receive. Where events are narrower than a pixel, its height is shared out "
        "by their time.</p>"
        "<noscript><p>The timeline needs JavaScript; the tables do without.</p></noscript></section>"
    )


def _part(name: str) -> str:
    return files("dflash_profiling.report").joinpath(name).read_text("utf-8")
