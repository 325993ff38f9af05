"""What streams add to the analysis: compilation beside the window, holders of the GIL, waits by peer; slower steps."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_profiling.analysis import RankAnalysis, analyze_ranks
from dflash_profiling.compiles import MAX_LISTED, compiles_of
from dflash_profiling.kineto import Trace, read_folder
from dflash_profiling.rank_stream import gil_shares, read_streams
from dflash_profiling.report import render
from dflash_profiling.stream_facts import MAX_ENTRIES, curves_of
from dflash_profiling.table import as_json, as_markdown, as_text, remarks
from dflash_profiling.throughput import slowdown_warning
from tests.report_world import COMPILES, write_streams, write_world
from tests.synthetic_traces import BASE_NS, SyntheticRank


def tuned(name: str, ms: float = 5.0) -> dict[str, Any]:
    return {"kind": "autotune", "kernel": name, "key": "N=1", "ms": ms, "configs": 3}


def run(steps: list[int | None], **by_second: str) -> list[dict[str, Any]]:
    """A line a second, with its step where it has one, and what was tuned in it."""
    rows: list[dict[str, Any]] = [{"time_s": float(second)} for second in range(len(steps))]
    for row, step in zip(rows, steps, strict=True):
        row |= {} if step is None else {"step": step}
    for name, second in by_second.items():
        rows[int(second)]["compiles"] = [tuned(name)]
    return rows


def steady_ones(rows: list[dict[str, Any]], window: tuple[float, float] | None = None) -> set[str]:
    return {entry.kernel for entry in compiles_of(rows, window).listed if entry.steady}


@pytest.mark.parametrize("first", [1, 500], ids=["fresh", "resumed"])
def test_what_a_loop_compiles_past_its_warm_up_is_a_finding(first: int) -> None:
    """In the second in which the fourth step begins it may still have been warm-up; in the next it was not."""
    steps = [None, None, *range(first, first + 6), None, first + 6, first + 7, first + 11]
    rows = run(steps, setup="1", third="4", fourth="5", fifth="6", restarted="9", again="10")
    assert steady_ones(rows) == {"fifth"}
    assert steady_ones(run([None] * 6, some="5")) == set()


def test_a_window_is_steady_whatever_the_lines_know_of_steps() -> None:
    rows = run([None] * 9, early="2", edge="3", inside="4", end="6", late="7")
    entries = {entry.kernel: entry for entry in compiles_of(rows, (2.5, 5.5)).listed}
    assert {name: entry.when for name, entry in entries.items()} == {
        "early": "before", "edge": "during", "inside": "during", "end": "during", "late": "after",
    }  # fmt: skip
    assert {name for name, entry in entries.items() if entry.steady} == {"inside", "end", "late"}
    assert [entries[name].since_window_s for name in ("early", "late")] == [-0.5, 4.5]
    assert {entry.when for entry in compiles_of(rows, None).listed} == {""}
    rows[8]["step"] = 1  # a process that was started anew after the window
    assert steady_ones(rows, (2.5, 5.5)) == {"inside", "end"}


def test_the_longest_are_kept_and_all_are_counted() -> None:
    rows = run([None] * 2 + list(range(1, 9)))
    rows[1]["compiles"] = [tuned(f"k{place}", 10.0 + place) for place in range(MAX_LISTED)]
    rows[9]["compiles"] = [tuned("late", 1.0), *["no object", {"ms": True}, {"ms": None}, {"kernel": "no time"}]]
    rows[8]["compiles"] = {"no": "list"}
    found = compiles_of(rows, None)
    assert (found.count, found.steady_count, found.steady_ms) == (MAX_LISTED + 1, 1, 1.0)
    assert found.ms == pytest.approx(1 + sum(10.0 + place for place in range(MAX_LISTED)))
    assert len(found.listed) == MAX_LISTED and found.listed[0].kernel == "late"
    assert found.listed[1].ms == 10 + MAX_LISTED - 1


def test_shares_of_the_gil_are_means_over_all_samplings() -> None:
    rows = [{"gil_share": {"a": 0.4, "b": 0.1}}, {}, {"gil_share": {"a": 0.2}}, {"gil_share": 3}, {"gil_unknown": "it"}]
    gil = gil_shares(rows)
    assert gil.by_thread == pytest.approx({"a": 0.3, "b": 0.05}) and list(gil.by_thread) == ["a", "b"]
    assert (gil.samplings, gil.unknown) == (2, "it")
    assert gil_shares([{"gil_share": {"a": None, "b": "x", "c": 1e999}}]).by_thread == {}
    assert (nothing := gil_shares([{}])).samplings == 0 and nothing.unknown is None


def test_a_key_with_entries_has_a_curve_for_each_of_the_greatest() -> None:
    rows = [{"time_s": second, "wait_ms_of_rank": {str(r): r * second for r in range(9)}} for second in range(4)]
    rows += [{"time_s": 4.0, "wait_ms_of_rank": {"8": 1.0}}, {"time_s": 5.0, "wait_ms_of_rank": "none"}]
    found = curves_of(rows)
    assert [curve.entry for curve in found] == [f"rank {rank}" for rank in range(9 - MAX_ENTRIES, 9)]
    assert {(curve.key, curve.unit) for curve in found} == {("wait_ms_of_rank", "ms")}
    expected = [8.0 * second for second in range(4)] + [1.0, math.nan]
    assert np.array_equal(found[-1].values, expected, equal_nan=True)


def slow_world(folder: Path, slowdowns: list[float | None]) -> tuple[list[Trace], list[RankAnalysis]]:
    for number, slowdown in enumerate(slowdowns):
        rank = SyntheticRank(number, len(slowdowns))
        if slowdown is not None:
            rank.metadata |= {"step_ms": [10 * slowdown] * 3, "step_ms_before": [10.0, 10.0, 99.0]}
        rank.span("ProfilerStep#1", 0, 4_000_000)
        rank.kernel("gemm", 1_000_000, 3_000_000)
        rank.write(folder)
    traces = read_folder(folder)
    return traces, analyze_ranks(traces)


def test_how_much_slower_steps_were_is_told_and_warned_of(tmp_path: Path) -> None:
    traces, ranks = slow_world(tmp_path, [1.04, 1.151, None])
    assert [rank.step_slowdown for rank in ranks] == [pytest.approx(1.04), pytest.approx(1.151), None]
    assert [bool(remarks(rank)) for rank in ranks] == [False, True, False]
    text = as_text(ranks)
    assert text.count("a step took 1.04 of those before the window\n") == 1
    assert (
        text.count("a step took 1.15 of those before the window, which is above 1.15") == text.count("a step took") - 1
    )
    page = render(traces, ranks)
    row = page.split("a step, of those before the window</th>")[1].split("</tr>")[0]
    assert row == '<td>1.04</td><td><b class="warn">1.15</b></td><td>–</td>'
    assert "rank 1: a step took 1.15" in page and "rank 0: a step took" not in page
    assert "| a step, of those before the window | 1.04 | 1.15 |  |" in as_markdown(ranks)
    assert [rank["step_slowdown"] for rank in as_json(ranks)] == [rank.step_slowdown for rank in ranks]


def test_the_streams_are_in_the_text_the_json_and_the_page(tmp_path: Path) -> None:
    write_world(tmp_path, 3)
    write_streams(tmp_path, 3)
    (tmp_path / "stream" / "rank0.jsonl").write_text(f'{{"time_s": {BASE_NS / 1e9}, "gil_unknown": "no <py-spy>"}}')
    (tmp_path / "stream" / "rank1.jsonl").unlink()
    traces = read_folder(tmp_path)
    ranks = analyze_ranks(traces)
    streams = read_streams(traces, ranks)
    assert streams[1] is None and streams[0] is not None
    text, page, data = as_text(ranks, streams), render(traces, ranks), as_json(ranks, streams)
    json.dumps(data, allow_nan=False)
    assert "GIL unknown: no <py-spy>" in text and "is unknown: no &lt;py-spy&gt;" in page
    assert "GIL held by MainThread 50.0 %, prefetch 5.0 %, dflash-stream 0.5 %, nobody 44.5 % of the samples" in text
    assert "compiled or tuned: 3 in 2.88 s, of which 1 in 0.64 s in steady state" in text
    finding = (
        "something was compiled or tuned in steady state: chunk_fwd_kernel (T=8192, H=16, BT=64), 640 ms, 60 s after"
    )
    assert finding in text and finding in page and finding in as_markdown(ranks, streams)
    assert [rank["stream"] is None for rank in data] == [False, True, False]
    listed = data[2]["stream"]["compiles"]["listed"]
    order = [260, 4, 3]
    assert [entry["key"] for entry in listed] == [COMPILES[second][0]["key"] for second in order]
    assert [entry["when"] for entry in listed] == ["after", "before", "before"]
    table = page.split('id="compiled-table"')[1].split("</table>")[0]
    assert [table.index(COMPILES[second][0]["key"]) for second in order] == sorted(
        table.index(COMPILES[second][0]["key"]) for second in order
    )
    assert table.count("<b>steady state</b>") == 1 and "12 configurations" in table
    drawn = page.split("waits for other ranks, each second, ms</h3>")[1].split("<h3>")[0]
    assert drawn.count("<figure") == 1 and drawn.count("<path") == 2 and "rank 1 at most" in drawn


@pytest.mark.parametrize(("slowdown", "words"), [(0.5, "is not known"), (0.9, None), (1.15, None), (1.2, "stretched")])
def test_what_a_factor_of_steps_tells_of_the_profiler(slowdown: float, words: str | None) -> None:
    warning = slowdown_warning(slowdown)
    assert warning is None if words is None else warning is not None and words in warning
