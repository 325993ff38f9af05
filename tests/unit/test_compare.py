"""What grew between two windows, on traces and metrics of which the truth is known."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import dflash_dist.cli
from dflash_profiling import cli
from dflash_profiling.analysis import analyze_ranks
from dflash_profiling.compare import Comparison, Pair, compare
from dflash_profiling.compare_table import as_json, as_text
from dflash_profiling.kineto import read_folder, read_trace
from dflash_profiling.throughput import find_throughput
from dflash_profiling.trace_file import TraceError
from tests.synthetic_traces import BASE_NS, SyntheticRank
from tests.unit.test_kineto import TRACES

MATMUL, ATTENTION, FALLBACK = "nvjet_sm90_tst_192x192", "flash_fwd_kernel", "chunk_gated_delta_rule_fwd"
MS = 1_000_000


def worker(
    kernels: Mapping[str, int],
    spans: Mapping[str, int] | None = None,
    rank: int = 0,
    role: str | None = "drafter",
    steps: int = 3,
    gpu: bool = True,
) -> SyntheticRank:
    """Steps in which kernels and spans, of as many ms as given, follow each other; a step is as long as the longer."""
    spans = spans or {}
    trace = SyntheticRank(rank, world_size=8, role=role)
    now = BASE_NS + MS
    for step in range(5, 5 + steps):
        ends = [now, now]
        for name, ms in kernels.items() if gpu else ():
            trace.kernel(name, ends[0], ends[0] + ms * MS, launch_ns=now - 5_000)
            ends[0] += ms * MS
        for name, ms in spans.items():
            trace.span(name, ends[1], ends[1] + ms * MS)
            ends[1] += ms * MS
        trace.span(f"ProfilerStep#{step}", now, max(ends))
        now = max(ends)
    return trace


def written(folder: Path, ranks: Sequence[SyntheticRank]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for rank in ranks:
        rank.write(folder)
    return folder


def compared(tmp_path: Path, before: Sequence[SyntheticRank], after: Sequence[SyntheticRank]) -> Comparison:
    folders = [written(tmp_path / side, ranks) for side, ranks in (("a", before), ("b", after))]
    windows = []
    for folder in folders:
        ranks = analyze_ranks(read_folder(folder))
        windows.append((ranks, find_throughput(folder, ranks[0].first_step, ranks[0].last_step)))
    found = compare(windows[0][0], windows[1][0], windows[0][1], windows[1][1])
    for pair in (*found.pairs, *found.roles):
        adds_up(pair)
    assert as_text(found) and json.loads(json.dumps(as_json(found), allow_nan=False))
    return found


def adds_up(pair: Pair) -> None:
    """To the fraction of a nanosecond."""
    for kind in ("parts", "spans"):
        if kind in pair.items:
            assert sum(item.change_ns for item in pair.items[kind]) == pair.change_ns, kind
            assert sum(item.after_ns for item in pair.items[kind]) == pair.step_after_ns, kind
    if "parts" in pair.items:
        (compute,) = (item for item in pair.items["parts"] if item.name == "compute")
        for kind in ("compute_by_span", "families"):
            if kind in pair.items:
                assert sum(item.change_ns for item in pair.items[kind]) == compute.change_ns, kind


def changes(pair: Pair, kind: str) -> dict[str, float]:
    """In ms a step, those that are not 0, in order."""
    return {item.name: float(item.change_ns) / MS for item in pair.items[kind] if item.change_ns}


def what_if(found: Comparison, kind: str, name: str) -> Any:
    (match,) = (w for w in as_json(found)["bottleneck"]["what_if"] if (w["kind"], w["name"]) == (kind, name))
    return match


def test_a_kernel_twice_as_slow_in_a_window_of_other_length(tmp_path: Path) -> None:
    before, after = {MATMUL: 4, ATTENTION: 6}, {MATMUL: 4, ATTENTION: 12}
    found = compared(tmp_path, [worker(before, steps=3)], [worker(after, steps=7)])
    (pair,) = found.pairs
    assert (pair.rank, pair.steps_before, pair.steps_after) == (0, 3, 7)
    assert (pair.step_before_ns, pair.step_after_ns) == (10 * MS, 16 * MS)
    assert changes(pair, "parts") == {"compute": 6}
    assert changes(pair, "families") == {"attention": 6}
    assert changes(pair, "kernels") == {ATTENTION: 6}
    assert [(item.runs_before, item.runs_after) for item in pair.items["kernels"]] == [(1, 1), (1, 1)]
    assert pair.share(pair.items["kernels"][0]) == 1
    assert what_if(found, "kernels", ATTENTION)["step_ms"] == 10
    text = as_text(found)
    assert "rank 0, drafter: 10.00 -> 16.00 ms a step, 3 and 7 steps" in text
    assert f"6.00      12.00   +6.00  100.0 %            10.00  {ATTENTION} (1 -> 1 runs)" in text
    assert "no metrics.jsonl beside A and B" in text and "Ktok/s" not in text


def test_steps_that_do_not_divide_evenly_add_up_all_the_same(tmp_path: Path) -> None:
    one, other = worker({MATMUL: 4}, {"load": 5}, steps=3), worker({MATMUL: 7}, {"load": 5}, steps=7)
    for trace, extra_ns in ((one, 1_001), (other, 2_003)):
        trace.events[-1]["dur"] += extra_ns / 1000
    found = compared(tmp_path, [one], [other])
    assert found.pairs[0].change_ns == Fraction(7 * 7 * MS + 2_003, 7) - Fraction(3 * 5 * MS + 1_001, 3)


def test_a_span_that_grew(tmp_path: Path) -> None:
    kernels = {MATMUL: 4}
    before, after = ({"forward": 4, "load": load} for load in (1, 9))
    found = compared(tmp_path, [worker(kernels, before)], [worker(kernels, after)])
    (pair,) = found.pairs
    assert changes(pair, "parts") == {"data": 8}
    assert changes(pair, "spans") == {"load": 8}
    assert changes(pair, "families") == changes(pair, "kernels") == {}
    assert what_if(found, "spans", "load")["share_of_change"] == 1


def test_a_fallback_that_appears_and_a_kernel_that_goes(tmp_path: Path) -> None:
    found = compared(tmp_path, [worker({MATMUL: 4, ATTENTION: 2})], [worker({MATMUL: 4, FALLBACK: 12})])
    assert changes(found.pairs[0], "families") == {"delta rule": 12, "attention": -2}
    assert changes(found.pairs[0], "kernels") == {FALLBACK: 12, ATTENTION: -2}
    text = as_text(found)
    assert f"{FALLBACK} (0 -> 1 runs) (new)" in text and f"{ATTENTION} (1 -> 0 runs) (gone)" in text
    assert what_if(found, "families", "delta rule")["share_of_change"] == pytest.approx(1.2)


def pipeline(target_ms: int, drafter_ms: int, steps: int = 4) -> list[SyntheticRank]:
    """A target and a drafter without GPU rows, of which the faster waits for the other."""
    step_ms = max(target_ms, drafter_ms)
    target = {"forward": target_ms, "send": 1, "wait_slot": step_ms - target_ms}
    drafter = {"receive": step_ms - drafter_ms, "draft_forward": drafter_ms, "all_reduce": 1}
    roles = (("target", target), ("drafter", drafter))
    return [worker({}, spans, rank, role, steps, gpu=False) for rank, (role, spans) in enumerate(roles)]


def run_folder(folder: Path, ranks: Sequence[SyntheticRank], step_s: float, tokens: int, last: int) -> Path:
    """Of 19 steps, the fifth to the `last` of which were traced: these and the first take longer."""
    written(folder / "profile", ranks)
    seconds = {1: 30.0, 4: 2 * step_s, 5: 2 * step_s, last: 2 * step_s, last + 1: 20.0}
    rows = [
        {"step": step, "tokens": tokens * step, "ktok_s": tokens / seconds.get(step, step_s) / 1000}
        for step in range(1, 20)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text + '{"step": 20, "tok')
    return folder


def test_a_drafter_starved_by_a_slower_target(tmp_path: Path) -> None:
    """And what that did to the speed: 21.5 to 12 Ktok/s."""
    folders = [
        run_folder(tmp_path / "a", pipeline(80, 99), 0.100, 2150, 8),
        run_folder(tmp_path / "b", pipeline(179, 99), 0.100 * 21.5 / 12, 2150, 8),
    ]
    result = CliRunner().invoke(cli.app, ["compare", *map(str, folders), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["throughput_before"]["ktok_s"] == pytest.approx(21.5)
    assert found["throughput_after"]["ktok_s"] == pytest.approx(12)
    assert found["throughput_after"]["steps"] == 12 and found["throughput_after"]["outside_window"]  # 2 and 3, 10 to 19
    bottleneck = found["bottleneck"]
    assert (bottleneck["rank"], bottleneck["role"], bottleneck["role_before"]) == (0, "target", "drafter")
    # Without the target's growth the drafter's own 100 ms remain, as in A.
    first = bottleneck["what_if"][0]
    assert (first["kind"], first["name"], first["limited_by"], first["step_ms"]) == ("parts", "compute", "drafter", 100)
    assert first["ktok_s"] == pytest.approx(12 * 1.8)
    assert {w["name"] for w in bottleneck["what_if"]}.isdisjoint({"p2p_backpressured", "wait_slot"})  # consequences
    assert found["waits"] == [
        {
            "rank": 1, "role": "drafter", "part": "p2p_starved", "change_ms": 80.0,
            "for_rank": 0, "for_role": "target", "whose": "compute", "grew_ms": 99.0,
        }
    ]  # fmt: skip
    assert not found["notes"]
    text = CliRunner().invoke(cli.app, ["compare", *map(str, folders)]).output
    assert "speed: 21.50 -> 12.00 Ktok/s (-44.2 %), a step 100.0 -> 179.2 ms, by metrics.jsonl" in text
    assert "bottleneck: rank 0, target, waits 0.0 % of its time in B; in A it was the drafter" in text
    starved = (
        "rank 1, drafter waits 80.00 ms a step more (p2p starved): for rank 0, target, whose compute grew by 99.00"
    )
    assert starved in text
    assert "p2p starved (new) (waiting)" in text and "compute; the drafter is next" in text


def messages(target_ms: int, drafter_ms: int, steps: int = 4) -> list[SyntheticRank]:
    """The same over NCCL: each step the target computes and sends, the drafter receives and computes."""
    target, drafter = SyntheticRank(0, 2, "target"), SyntheticRank(1, 2, "drafter")
    start = BASE_NS + MS
    for step in range(1, steps + 1):
        sent = start + target_ms * MS
        received = sent + MS
        end = received + drafter_ms * MS
        target.kernel(MATMUL, start, sent)
        target.message("send", 1, sent, received, sequence=step)
        drafter.message("recv", 0, start, received, sequence=step)
        drafter.kernel(ATTENTION, received, end)
        for rank in (target, drafter):
            rank.span(f"ProfilerStep#{step}", start, end)
        start = end
    return [target, drafter]


def test_a_drafter_starved_over_nccl(tmp_path: Path) -> None:
    found = compared(tmp_path, messages(10, 20), messages(30, 20))
    (wait,) = found.waits
    assert (wait.waiting.rank, wait.part.name, wait.cause.rank, wait.grown.name) == (1, "p2p_starved", 0, "compute")
    assert changes(found.pairs[1], "parts") == {"p2p_starved": 20} and changes(found.pairs[1], "kernels") == {}
    assert changes(found.pairs[0], "kernels") == {MATMUL: 20}
    assert found.bottleneck.role == "target" and what_if(found, "kernels", MATMUL)["step_ms"] == 31


def test_a_target_backpressured_by_a_slower_drafter(tmp_path: Path) -> None:
    found = compared(tmp_path, pipeline(50, 60), pipeline(50, 90))
    assert (found.bottleneck.role, found.bottleneck_before) == ("drafter", "drafter")
    (wait,) = found.waits
    assert (wait.waiting.rank, wait.part.name, wait.cause.rank) == (0, "p2p_backpressured", 1)
    assert what_if(found, "parts", "compute")["step_ms"] == 61  # not limited by the target's 51


def test_a_drafter_starved_by_a_target_that_loads(tmp_path: Path) -> None:
    """As after the data set grew."""
    worlds = [pipeline(80, 60), pipeline(80, 60)]
    worlds[1] = [
        worker({}, {"load": 40, "forward": 80, "send": 1}, 0, "target", 4, gpu=False),
        worker({}, {"receive": 60, "draft_forward": 60, "all_reduce": 1}, 1, "drafter", 4, gpu=False),
    ]
    found = compared(tmp_path, *worlds)
    assert "rank 1, drafter waits 40.00 ms a step more (p2p starved): for rank 0, target, whose data grew" in as_text(
        found
    )
    assert what_if(found, "parts", "data")["step_ms"] == 81
    assert found.bottleneck.role == "target" and what_if(found, "spans", "load")["share_of_change"] == 1


def test_the_trainer_has_the_command_and_refuses_in_one_sentence(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", [worker({MATMUL: 4})])
    same = CliRunner().invoke(dflash_dist.cli.app, ["profile", "compare", str(folder), str(folder)])
    assert "rank 0, drafter: 4.00 -> 4.00 ms a step, 3 and 3 steps: nothing changed by 0.01 ms or more" in same.output
    refused = subprocess.run(
        [sys.executable, "-m", "dflash_dist", "profile", "compare", str(folder), str(tmp_path / "none")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 2 and "none does not exist" in refused.stderr and refused.stderr.count("\n") == 1


def test_every_public_trace_is_as_itself(tmp_path: Path) -> None:
    for path in TRACES:
        try:
            ranks = analyze_ranks([read_trace(path)])
        except TraceError:
            continue
        found = compare(ranks, ranks)
        assert not found.what_ifs and not found.waits and found.bottleneck.change_ns == 0
        assert "nothing changed" in as_text(found)
        assert sum(ranks[0].host_by_span_ns.values()) == ranks[0].split.window_ns


def test_a_wait_that_nobody_elses_work_explains_blames_nobody(tmp_path: Path) -> None:
    before, after = pipeline(80, 80), pipeline(80, 80)
    after[1] = worker({}, {"receive": 40, "draft_forward": 80, "all_reduce": 1}, 1, "drafter", 4, gpu=False)
    found = compared(tmp_path, before, after)
    assert changes(found.pairs[1], "parts") == {"p2p_starved": 40} and not found.waits


@pytest.mark.parametrize("role", [None, "trainer"])
def test_ranks_without_our_roles_wait_for_nobody_in_particular(tmp_path: Path, role: str | None) -> None:
    before, after = pipeline(80, 99), pipeline(179, 99)
    for rank in (*before, *after):
        rank.role = role
    found = compared(tmp_path, before, after)
    assert changes(found.pairs[1], "parts") == {"p2p_starved": 80} and not found.waits


def test_a_target_that_waits_for_a_slot_with_an_idle_gpu_is_backpressured(tmp_path: Path) -> None:
    ranks = [[worker({MATMUL: 4}, {"forward": 4, "wait_slot": wait}, role="target")] for wait in (1, 6)]
    found = compared(tmp_path, *ranks)
    assert changes(found.pairs[0], "parts") == {"p2p_backpressured": 5}


def test_a_rank_that_recorded_nothing_in_the_window_is_left_out(tmp_path: Path) -> None:
    """A target without a batch in the last window: its newest trace is of the one before, and would blame it."""
    before, after = ([worker({MATMUL: ms}), worker({MATMUL: ms}, rank=1)] for ms in (4, 6))
    folders = [written(tmp_path / name, ranks) for name, ranks in (("a", before), ("b", after))]
    (stale,) = folders[1].glob("rank0.*")
    hour = before[0]
    hour.base_ns = BASE_NS - 3600 * 10**9
    stale.unlink()
    hour.write(folders[1])
    result = CliRunner().invoke(cli.app, ["compare", *map(str, folders)])
    assert "rank 0 of" in result.stderr and "it is of another window" in result.stderr
    assert "of rank 1" in result.stdout and "rank 0 (" in result.stdout and "left out, in A alone" in result.stdout
    table = CliRunner().invoke(cli.app, ["analyze", str(folders[1]), "--no-report"]).stdout
    assert table.count("not on the clock of the other ranks: it ended 36") == 1


def test_roles_are_means_where_topologies_differ(tmp_path: Path) -> None:
    def world(targets: int, drafters: int, ms: int) -> list[SyntheticRank]:
        roles = ["target"] * targets + ["drafter"] * drafters
        return [worker({MATMUL: ms + rank}, rank=rank, role=role) for rank, role in enumerate(roles)]

    found = compared(tmp_path, world(3, 1, 10), world(4, 2, 20))
    text = as_text(found)
    assert "the topologies differ: A has target ranks 0, 1, 2 and drafter rank 3, B has target ranks 0, 1, 2, 3" in text
    assert "rank 3 (target) left out, in B alone" in text
    assert "the drafters have no rank in common: rank 3 of A is compared with the mean of ranks 4, 5 of B" in text
    assert [(pair.rank, pair.ranks_before, pair.ranks_after) for pair in found.pairs] == [
        (0, (0,), (0,)), (1, (1,), (1,)), (2, (2,), (2,)), (None, (3,), (4, 5)),
    ]  # fmt: skip
    assert found.pairs[3].change_ns == (24.5 - 13) * MS
    assert [(pair.role, pair.change_ns) for pair in found.roles] == [("target", 10 * MS)]


def test_disjoint_ranks_and_roles(tmp_path: Path) -> None:
    one, other = worker({MATMUL: 4}, rank=0, role=None), worker({MATMUL: 5}, rank=4, role=None)
    assert "rank 0 of A and rank 4 of B: 4.00 -> 5.00 ms" in as_text(compared(tmp_path / "none", [one], [other]))
    other = worker({MATMUL: 5}, rank=0, role="target")
    with pytest.raises(
        TraceError, match=r"cannot be compared: .*the drafters are in A alone.*the targets are in B alone"
    ):
        compared(tmp_path / "roles", [worker({MATMUL: 4})], [other])


def test_without_gpu_rows_on_one_side_spans_alone_are_compared(tmp_path: Path) -> None:
    spans = {"forward": 4, "load": 2}
    found = compared(tmp_path, [worker({MATMUL: 4}, spans)], [worker({}, {"forward": 9, "load": 2}, gpu=False)])
    (pair,) = found.pairs
    assert list(pair.items) == ["spans"] and changes(pair, "spans") == {"forward": 5}
    assert "no GPU rows in B" in found.notes[0] and as_json(found)["pairs"][0]["kernels"] is None


def test_a_rank_that_had_no_part_in_a_step_counts_it(tmp_path: Path) -> None:
    whole, gap = worker({MATMUL: 4}, steps=3), worker({MATMUL: 4}, steps=3)
    gap.events = [event for event in gap.events if event["name"] != "ProfilerStep#6"]
    assert compared(tmp_path, [whole], [gap]).pairs[0].change_ns == 0


def test_steps_without_names(tmp_path: Path) -> None:
    def unnamed(ms: int) -> SyntheticRank:
        trace = worker({MATMUL: ms}, {"forward": ms})
        trace.events = [event for event in trace.events if "ProfilerStep" not in event["name"]]
        return trace

    found = compared(tmp_path / "both", [unnamed(4)], [unnamed(5)])
    assert "each window counts as one step" in as_text(found)
    with pytest.raises(TraceError, match="on one side alone"):
        compared(tmp_path / "one", [worker({MATMUL: 4})], [unnamed(4)])


def test_what_metrics_and_traces_do_not_agree_on_is_said(tmp_path: Path) -> None:
    folders = [
        run_folder(tmp_path / "a", [worker({MATMUL: 100})], 0.1, 1000, 7),
        run_folder(tmp_path / "b", [worker({MATMUL: 110})], 0.2, 1500, 7),
    ]
    text = CliRunner().invoke(cli.app, ["compare", *map(str, folders)]).output
    assert "a step of B holds 1.5 times the tokens of one of A (1,000 -> 1,500)" in text
    assert "by metrics.jsonl a step takes 2 times as long in B, in the traced windows 1.1 times" in text


@pytest.mark.parametrize(
    "text", ["", "[]\n", '{"step": 1, "tokens": null}\n', '{"step": 1e400, "tokens": 4}\n', "\0\n"]
)
def test_metrics_that_tell_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(text)
    assert find_throughput(tmp_path, 5, 7) is None


def test_a_short_run_has_the_speed_of_its_window(tmp_path: Path) -> None:
    rows = [{"step": step, "tokens": 1000 * step, "ktok_s": 10} for step in range(1, 8)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = find_throughput(tmp_path / "profile", 3, 7)
    assert found is not None and (found.steps, found.outside_window) == (5, False)
    assert (found.ktok_s, found.step_ms, found.tokens_per_step) == pytest.approx((10, 100, 1000))


def test_a_change_that_rounds_to_nothing_has_no_minus(tmp_path: Path) -> None:
    folders = [
        run_folder(tmp_path / "a", [worker({MATMUL: 100})], 0.1, 1000, 7),
        run_folder(tmp_path / "b", [worker({MATMUL: 100})], 0.10001, 1000, 7),
    ]
    text = CliRunner().invoke(cli.app, ["compare", *map(str, folders)]).output
    assert "(+0.0 %)" in text and "-0.0" not in text
