"""Who waits for whom: as a line, as a clause a rank, and as a table."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_profiling.analysis import WAITS, RankAnalysis
from dflash_profiling.report.text import duration, rank_name


def headline(ranks: Sequence[RankAnalysis]) -> str:
    """The longest wait of a rank for another; empty where there is one rank."""
    if len(ranks) < 2:
        return ""
    names = {rank.rank: rank_name(rank) for rank in ranks}
    waits = [
        (ns / (rank.split.window_ns or 1), place, peer)
        for place, rank in enumerate(ranks)
        for peer, ns in rank.waits_for_ns.items()
    ]
    share, place, peer = max(waits, default=(0.0, 0, 0))
    if share < 0.01:
        return '<p class="headline">No rank is known to wait for another for 1 % of its window.</p>'
    return (
        f'<p class="headline">The longest wait: {rank_name(ranks[place])} waits <b>{100 * share:.1f} %</b> of its '
        f"window for {names.get(peer, f'rank {peer}')}.</p>"
    )


def awaited(rank: RankAnalysis) -> str:
    """Whom the rank waits for, as a sentence; empty where that is nobody."""
    percent = {peer: 100 * ns / rank.split.window_ns for peer, ns in rank.waits_for_ns.items()}
    shares = [f"rank {peer} (<b>{share:.1f} %</b>)" for peer, share in percent.items() if share >= 0.05]
    return f" It waits for {', '.join(shares[:4])}{' and others' if len(shares) > 4 else ''}." if shares else ""


def waiting(ranks: Sequence[RankAnalysis]) -> str:
    """Who waits for whom, as a table; empty where there is one rank."""
    if len(ranks) < 2:
        return ""
    peers = sorted({peer for rank in ranks for peer in rank.waits_for_ns})
    names = {rank.rank: rank_name(rank) for rank in ranks}
    heading = "<h2>Who waits for whom</h2>"
    if not peers:
        untold = any(rank.split.parts_ns[part] for rank in ranks for part in ("p2p", "collective"))
        nobody = "By these traces no rank waits for another."
        if untold:
            nobody = "Who waits cannot be told: of the ranks' messages and collectives the other ends are not known."
        return f'<section id="waiting">{heading}<p class="note">{nobody}</p></section>'
    head = "".join(f'<th scope="col">for {names.get(peer, f"rank {peer}")}</th>' for peer in peers)
    rows = "".join(_waiting_row(rank, peers) for rank in ranks)
    return (
        f'<section id="waiting">{heading}<p class="note">Per cent of each rank\'s window in which it did nothing but '
        "wait for another to send, to receive, or to come to a collective. Of several at once the one that is waited "
        "for most counts. Who waits little is the bottleneck: its row is light, its column dark.</p>"
        f'<div class="scroll"><table id="waiting-table"><thead><tr><th scope="col">waits</th>{head}'
        f'<th scope="col">not told for whom</th><th scope="col">in all</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div></section>"
    )


def _waiting_row(rank: RankAnalysis, peers: Sequence[int]) -> str:
    window_ns = rank.split.window_ns or 1
    total_ns = sum(rank.split.parts_ns[part] for part in WAITS)
    told_ns = sum(rank.waits_for_ns.values())

    def cell(ns: int, own: bool = False) -> str:
        share = 100 * ns / window_ns
        strength = min(95, round(2 * share)) if share >= 0.05 else 0
        text = "" if own else f"{share:.1f} %" if ns else "–"
        return f'<td data-waits="" data-ns="{ns}" style="--strength:{strength}%" title="{duration(ns)}">{text}</td>'

    cells = "".join(cell(rank.waits_for_ns.get(peer, 0), peer == rank.rank) for peer in peers)
    return f'<tr><th scope="row">{rank_name(rank)}</th>{cells}{cell(total_ns - told_ns)}{cell(total_ns)}</tr>'
