"""Numbers and foreign text as the page shows them."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from typing import Any

from dflash_profiling.analysis import RankAnalysis
from dflash_profiling.timeline import PARTS

LABELS = {
    "compute": ("computing", "computes"),
    "p2p_transfer": ("messages: transfer", "transfers messages"),
    "collective": ("collectives", "is in collectives"),
    "p2p": ("messages: other end unknown", "is in messages whose other ends are not in these traces"),
    "p2p_starved": ("messages: sender not there", "waits for messages whose send has not begun"),
    "p2p_backpressured": ("messages: receiver not there", "waits for its receivers to take messages"),
    "collective_wait": ("collectives: last rank not there", "waits for the last rank of a collective"),
    "copy": ("copies", "copies between host and GPU, or on the GPU"),
    "profiler": ("profiler itself", "is in the profiler's own work"),
    "compile": ("compiling", "compiles or loads kernels"),
    "allocator": ("allocator", "allocates or frees memory of the device"),
    "data": ("loading data", "loads data"),
    "checkpoint": ("checkpoints", "writes checkpoints"),
    "host_bound": ("host too late", "has nothing to run because its host launches too late"),
    "unexplained": ("unexplained", "is in nothing that these traces explain"),
}
"""What each part is called, and what a rank does in it."""
assert tuple(LABELS) == PARTS
_HOST = {
    "p2p_starved": ("receiving", "is in receives"),
    "p2p_backpressured": ("waiting for a slot", "waits for a free slot of its ring"),
    "p2p_transfer": ("sending", "is in sends"),
}
"""The same where the spans of the host count, which do not tell waiting from transfer."""
MAX_NAME = 400


def label(part: str, host: bool = False) -> str:
    """What a part is called; `host`: on a rank without GPU rows."""
    return (_HOST.get(part, LABELS[part]) if host else LABELS[part])[0]


def doing(part: str, host: bool = False) -> str:
    """What a rank does in a part, to follow its name."""
    return (_HOST.get(part, LABELS[part]) if host else LABELS[part])[1]


def escaped(text: object, limit: int = MAX_NAME) -> str:
    """Any text as HTML, in an element or an attribute; cut where it is longer than `limit`."""
    return html.escape(shortened(text, limit))


def shortened(text: object, limit: int = MAX_NAME) -> str:
    """In one line, with what no file of UTF-8 can hold replaced."""
    line = " ".join(str(text).encode("utf-8", "replace").decode("utf-8").split())
    line = "".join(character if character.isprintable() else "\ufffd" for character in line)
    return line if len(line) <= limit else line[: limit - 1] + "…"


def embedded(value: Any) -> str:
    """JSON that a script element can hold: nothing in it ends the element or opens a comment."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def duration(ns: float) -> str:
    """With three or four digits, in the unit that suits."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if abs(ns) >= size:
            value = ns / size
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    return f"{ns:.0f} ns"


def rank_name(rank: RankAnalysis) -> str:
    """As a heading, escaped."""
    name = "rank ?" if rank.rank is None else f"rank {rank.rank}"
    return name + (f", {escaped(rank.role, 40)}" if rank.role else "")


def sentence(rank: RankAnalysis, shares: Mapping[str, float]) -> str:
    """What the rank mostly does and waits for, from its parts alone; HTML."""
    host = not rank.has_gpu_rows
    if not rank.split.window_ns:
        return "has a window of no length."
    order = sorted((name for name in shares if name != "compute"), key=lambda name: -shares[name])
    clauses = []
    if shares["compute"]:
        most = max(rank.compute_by_span_ns, key=lambda name: rank.compute_by_span_ns[name], default="")
        where = f", above all in <q>{escaped(most, 60)}</q>" if most else ""
        clauses.append(f"{doing('compute')} <b>{shares['compute']:.1f} %</b> of its window{where}")
    shown = [name for name in order if shares[name] >= 2][:3] or [name for name in order if shares[name]][:1]
    for name in shown:
        of = "" if clauses else " of its window"
        clauses.append(f"{doing(name, host)} <b>{shares[name]:.1f} %</b>{of}")
    left = round(100 - shares["compute"] - sum(shares[name] for name in shown), 1)
    if left > 0:
        clauses.append(f"the other parts are {left:.1f} %")
    return f"{'; '.join(clauses)}."
