"""Tables of what the streams say: who held the GIL, and what was compiled or tuned and when."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_profiling.analysis import RankAnalysis
from dflash_profiling.compiles import Compile
from dflash_profiling.gil import SAMPLED_S
from dflash_profiling.rank_stream import RankStream
from dflash_profiling.report.text import duration, escaped, rank_name
from dflash_profiling.stream_table import when_text

Streams = Sequence[tuple[RankAnalysis, RankStream]]
TOP_THREADS = 10
TOP_KERNELS = 20


def gil_table(streams: Streams) -> str:
    """HTML; empty where no stream tells of the GIL."""
    known = [(rank_name(rank), stream.gil) for rank, stream in streams if stream.gil.samplings]
    reasons = {escaped(stream.gil.unknown, 200) for _, stream in streams if stream.gil.unknown}
    unknown = f'<p class="note">Who holds the GIL is unknown: {"; ".join(sorted(reasons))}.</p>' if reasons else ""
    if not known:
        return unknown
    most = {t: max(gil.by_thread.get(t, 0.0) for _, gil in known) for _, gil in known for t in gil.by_thread}
    shown = sorted(most, key=lambda thread: (-most[thread], thread))[:TOP_THREADS]

    def row(name: str, cells: Sequence[float]) -> str:
        return f'<tr><th scope="row">{name}</th>{"".join(f"<td>{100 * cell:.1f} %</td>" for cell in cells)}</tr>'

    rows = [row(escaped(thread, 60), [gil.by_thread.get(thread, 0.0) for _, gil in known]) for thread in shown]
    if len(most) > len(shown):
        others = [sum(share for t, share in gil.by_thread.items() if t not in shown) for _, gil in known]
        rows.append(row(f"{len(most) - len(shown)} others", others))
    rows.append(row("nobody", [max(0.0, 1 - sum(gil.by_thread.values())) for _, gil in known]))
    caption = f"Who held the GIL: per cent of samples, {SAMPLED_S} s a minute"
    head = "".join(f'<th scope="col">{who}</th>' for who, _ in known)
    return (
        f'<div class="scroll"><table id="gil" class="facts-table"><caption>{caption}</caption><thead><tr>'
        f'<th scope="col">thread</th>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>{unknown}'
    )


def compiled(streams: Streams) -> str:
    """HTML; empty where no stream tells of anything that was compiled or tuned."""
    found = [(rank_name(rank), entry) for rank, stream in streams for entry in stream.compiles.listed]
    if not found:
        return ""
    found.sort(key=lambda item: (not item[1].steady, -item[1].ms))
    count = sum(stream.compiles.count for _, stream in streams)
    left = count - len(found[:TOP_KERNELS])
    more = f"; {left} others left away" if left else ""
    rows = "".join(_compile_row(who, entry) for who, entry in found[:TOP_KERNELS])
    head = "".join(f'<th scope="col">{name}</th>' for name in ("rank", "took", "what", "when", "kernel or function"))
    return (
        '<section id="compiled"><h2>Compiled and tuned</h2><p class="note">From the streams, before the window, in it '
        "and after it. In steady state, which is a window and whatever follows a loop's warm-up, there should be "
        "nothing: what is there was met with a key that was new to it.</p>"
        f'<div class="scroll"><table id="compiled-table"><caption>Those in steady state first, then the longest{more}'
        f"</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _compile_row(who: str, entry: Compile) -> str:
    configs = f", {entry.configs} configurations" if entry.configs else ""
    steady = ", <b>steady state</b>" if entry.steady else ""
    return (
        f'<tr><th scope="row">{who}</th><td>{duration(1e6 * entry.ms)}</td><td>{escaped(entry.kind, 40)}{configs}</td>'
        f'<td>{when_text(entry)}{steady}</td><td class="code">{escaped(entry.kernel)} ({escaped(entry.key)})</td></tr>'
    )
