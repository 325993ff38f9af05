"""A comparison as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_profiling.compare import Comparison, Item, Pair, WhatIf, named
from dflash_profiling.table import TOP

TOP_OF_OTHERS = 3
"""Rows of each kind for ranks that are not the bottleneck."""
TITLES = {
    "parts": "parts of the step",
    "spans": "the same step by the span that the host was in",
    "compute_by_span": "computing by span",
    "families": "computing by family of kernel",
    "kernels": "kernels that compute; their runs may overlap other work, so what they account for is at most",
}
_SHOWN_NS = 5_000
"""Half of the last digit."""


def as_text(found: Comparison) -> str:
    """Speed, the bottleneck's items with what each accounts for, then the other ranks."""
    blocks = ["\n".join([*_speed(found), *_waiting(found), *(f"note: {note}" for note in found.notes)])]
    if len(found.pairs) > 1:
        blocks.append(_overview([*found.roles, *found.pairs]))
    what_ifs = {(w.item.kind, w.item.name): w for w in found.what_ifs}
    blocks.append(_block(found.bottleneck, TOP, what_ifs))
    blocks += [_block(pair, TOP_OF_OTHERS, {}) for pair in found.pairs if pair is not found.bottleneck]
    return "\n\n".join(blocks)


def as_json(found: Comparison) -> dict[str, Any]:
    """Times in milliseconds a step; shares of 1."""
    return {
        "throughput_before": vars(found.throughput_before) if found.throughput_before else None,
        "throughput_after": vars(found.throughput_after) if found.throughput_after else None,
        "bottleneck": {
            "rank": found.bottleneck.rank,
            "role": found.bottleneck.role,
            "role_before": found.bottleneck_before,
            "what_if": [_what_if_json(what_if, found.bottleneck) for what_if in found.what_ifs],
        },
        "waits": [
            {
                "rank": wait.waiting.rank,
                "role": wait.waiting.role,
                "part": wait.part.name,
                "change_ms": _ms(wait.part.change_ns),
                "for_rank": wait.cause.rank,
                "for_role": wait.cause.role,
                "whose": wait.grown.name,
                "grew_ms": _ms(wait.grown.change_ns),
            }
            for wait in found.waits
        ],
        "pairs": [_pair_json(pair) for pair in found.pairs],
        "roles": [_pair_json(pair) for pair in found.roles],
        "notes": found.notes,
    }


def _what_if_json(what_if: WhatIf, bottleneck: Pair) -> dict[str, Any]:
    share = bottleneck.share(what_if.item)
    return {
        "kind": what_if.item.kind,
        "name": what_if.item.name,
        "change_ms": _ms(what_if.item.change_ns),
        "share_of_change": None if share is None else float(share),
        "step_ms": _ms(what_if.step_ns),
        "ktok_s": what_if.ktok_s,
        "limited_by": what_if.limited_by,
    }


def _pair_json(pair: Pair) -> dict[str, Any]:
    return {
        "rank": pair.rank,
        "role": pair.role,
        "ranks_before": list(pair.ranks_before),
        "ranks_after": list(pair.ranks_after),
        "steps_before": pair.steps_before,
        "steps_after": pair.steps_after,
        "step_before_ms": _ms(pair.step_before_ns),
        "step_after_ms": _ms(pair.step_after_ns),
        "waiting_before": float(pair.waiting_before),
        "waiting_after": float(pair.waiting_after),
        **{kind: [_item_json(item) for item in pair.items[kind]] if kind in pair.items else None for kind in TITLES},
    }


def _item_json(item: Item) -> dict[str, Any]:
    times = {"before_ms": _ms(item.before_ns), "after_ms": _ms(item.after_ns), "change_ms": _ms(item.change_ns)}
    runs = {} if item.runs_before is None or item.runs_after is None else {
        "runs_before": float(item.runs_before), "runs_after": float(item.runs_after),
    }  # fmt: skip
    return {"name": item.name, "waits": item.waits, **times, **runs}


def _speed(found: Comparison) -> list[str]:
    before, after, bottleneck = found.throughput_before, found.throughput_after, found.bottleneck
    lines = []
    if before and after:
        change = f"{100 * (after.ktok_s / before.ktok_s - 1):+z.1f} %"
        step = f"a step {before.step_ms:.1f} -> {after.step_ms:.1f} ms"
        speed = f"{before.ktok_s:.2f} -> {after.ktok_s:.2f} Ktok/s"
        lines.append(f"speed: {speed} ({change}), {step}, by metrics.jsonl")
    lines.append(
        f"step in the traces: {_ms(bottleneck.step_before_ns):.2f} -> {_ms(bottleneck.step_after_ns):.2f} ms "
        f"({_ms(bottleneck.change_ns):+z.2f} ms), of {_title(bottleneck)}"
    )
    line = f"bottleneck: {_title(bottleneck)}, waits {100 * float(bottleneck.waiting_after):.1f} % of its time in B"
    if found.bottleneck_before != bottleneck.role:
        line += f"; in A it was the {found.bottleneck_before or 'ranks without a role'}"
    return [*lines, line]


def _waiting(found: Comparison) -> list[str]:
    lines = []
    for wait in found.waits:
        more = f"{_ms(wait.part.change_ns):.2f} ms a step more ({wait.part.name.replace('_', ' ')})"
        whose = f"whose {wait.grown.name.replace('_', ' ')} grew by {_ms(wait.grown.change_ns):.2f} ms"
        lines.append(f"{_title(wait.waiting)} waits {more}: for {_title(wait.cause)}, {whose}")
    return lines


def _overview(pairs: Sequence[Pair]) -> str:
    rows = [["A ms/step", "B ms/step", "change", "waits A", "waits B", ""]]
    rows += [
        [
            f"{_ms(pair.step_before_ns):.2f}",
            f"{_ms(pair.step_after_ns):.2f}",
            f"{_ms(pair.change_ns):+z.2f}",
            f"{100 * float(pair.waiting_before):.1f} %",
            f"{100 * float(pair.waiting_after):.1f} %",
            _title(pair),
        ]
        for pair in pairs
    ]
    return _table(rows)


def _block(pair: Pair, top: int, what_ifs: dict[tuple[str, str], WhatIf]) -> str:
    head = ["A ms/step", "B ms/step", "change", "share"]
    if what_ifs:
        head.append("step if as in A")
        if any(what_if.ktok_s is not None for what_if in what_ifs.values()):
            head.append("Ktok/s then")
    rows, titles = [[*head, ""]], []
    for kind, items in pair.items.items():
        shown = [item for item in items if abs(item.change_ns) >= _SHOWN_NS][:top]
        if shown:
            titles.append((len(rows), TITLES[kind]))
            rows += [_row(pair, item, what_ifs.get((kind, item.name)), len(head)) for item in shown]
    title = f"{_title(pair)}: {_ms(pair.step_before_ns):.2f} -> {_ms(pair.step_after_ns):.2f} ms a step"
    title += f", {pair.steps_before} and {pair.steps_after} steps"
    if len(rows) == 1:
        return f"{title}: nothing changed by 0.01 ms or more"
    lines = _table(rows).split("\n")
    for place, text in reversed(titles):
        lines.insert(place, f"  {text}")
    return "\n".join([title, *lines])


def _row(pair: Pair, item: Item, what_if: WhatIf | None, columns: int) -> list[str]:
    share = pair.share(item)
    cells = [f"{_ms(item.before_ns):.2f}", f"{_ms(item.after_ns):.2f}", f"{_ms(item.change_ns):+z.2f}"]
    cells.append("-" if share is None else f"{100 * float(share):z.1f} %")
    step = f"{_ms(what_if.step_ns):.2f}" if what_if else "-"
    ktok_s = f"{what_if.ktok_s:.2f}" if what_if and what_if.ktok_s is not None else "-"
    limit = f"; the {what_if.limited_by} is next" if what_if and what_if.limited_by else ""
    return [*[*cells, step, ktok_s][:columns], _described(item) + limit]


def _described(item: Item) -> str:
    empty = {"spans": "outside of spans", "compute_by_span": "outside of spans"}
    name = item.name[:90] or empty.get(item.kind, "?")
    if item.kind == "parts":
        name = name.replace("_", " ")
    if item.runs_before is not None and item.runs_after is not None:
        name += f" ({float(item.runs_before):.4g} -> {float(item.runs_after):.4g} runs)"
    if not item.before_ns:
        name += " (new)"
    if not item.after_ns:
        name += " (gone)"
    return name + ((" (perhaps waiting)" if item.name == "p2p" else " (waiting)") if item.waits else "")


def _title(pair: Pair) -> str:
    role = f", {pair.role}" if pair.role else ""
    if pair.rank is not None:
        return f"rank {pair.rank}{role}"
    if pair.ranks_before == pair.ranks_after:
        return f"{'mean of ' * (len(pair.ranks_after) > 1)}{named(pair.ranks_after)}{role}"
    return f"{named(pair.ranks_before)} of A and {named(pair.ranks_after)} of B{role}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Numbers to the right, the last column to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    cells = [[*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]] for row in rows]
    return "\n".join("  ".join(row).rstrip() for row in cells)


def _ms(ns: Any) -> float:
    return float(ns) / 1e6
