"""The division of ranks' time on traces of which the truth is known, and on other people's."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from dflash_profiling.analysis import WAITS, RankAnalysis, analyze, analyze_ranks
from dflash_profiling.kineto import read_folder, read_trace
from dflash_profiling.table import as_json, as_text, tenths
from dflash_profiling.timeline import PARTS
from dflash_profiling.trace_file import TraceError
from tests.synthetic_traces import BASE_NS, SyntheticRank, messages_world
from tests.unit.test_kineto import TRACES

END_NS = 2_000_000
KERNELS = {
    "compute": "nvjet_sm90_tst_192x192", "copy": "Memcpy HtoD", "collective": "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
    "p2p": "ncclDevKernel_SendRecv(x)",
}  # fmt: skip


def sums_up(rank: RankAnalysis) -> bool:
    parts = rank.split.parts_ns
    computing = [sum(rank.compute_by_span_ns.values())]
    computing += [sum(rank.compute_by_family_ns.values())] if rank.has_gpu_rows else []
    return sum(parts.values()) == rank.split.window_ns and set(computing) == {parts["compute"]}


@pytest.mark.parametrize("seed", range(100))
def test_parts_are_those_of_a_timeline_whose_truth_is_known(tmp_path: Path, seed: int) -> None:
    """Work on three streams, launched in time or late, under calls of the host: the truth looks at every moment."""
    draw = random.Random(seed)
    rank = SyntheticRank(0)
    rank.span("ProfilerStep#7", BASE_NS, BASE_NS + END_NS)
    moments = {part: np.zeros(END_NS // 1000, bool) for part in PARTS}
    busy = np.zeros(END_NS // 1000, bool)
    launches: list[tuple[int, int]] = []
    for stream in (7, 20, 24):
        now = draw.randrange(100)
        while now < 1990:
            start, end = now + draw.randrange(1, 120), 0
            end = start + draw.randrange(1, 80)
            if end >= 2000:
                break
            part = draw.choice(list(KERNELS))
            launch_end = start - draw.randrange(0, 60)
            category = "gpu_memcpy" if part == "copy" else "kernel"
            at = BASE_NS + 1000 * start
            rank.kernel(KERNELS[part], at, BASE_NS + 1000 * end, stream, BASE_NS + 1000 * launch_end - 3_000, category)
            moments[part][start:end] = True
            busy[start:end] = True
            launches.append((start, launch_end))
            now = end
    for part, name in (("allocator", "cudaMalloc"), ("compile", "cuModuleLoadData"), ("data", "load")):
        for _ in range(draw.randrange(3)):
            start = draw.randrange(1900)
            end = start + draw.randrange(1, 90)
            extent = BASE_NS + 1000 * start, BASE_NS + 1000 * end
            rank.span(name, *extent) if part == "data" else rank.runtime(name, *extent)
            moments[part][start:end] = True
    starts = np.flatnonzero(np.diff(busy.astype(int), prepend=1, append=0) == 1)  # of busy times behind idle ones
    for start in starts:
        launch_end = min(end for at, end in launches if at == start)
        idle_from = max((m for m in range(start) if busy[m]), default=-1) + 1
        moments["host_bound"][idle_from : max(idle_from, min(launch_end, start))] = True
    expected = dict.fromkeys(PARTS, 0)
    for moment in range(END_NS // 1000):
        expected[next((p for p in PARTS if moments[p][moment]), "unexplained")] += 1
    found = analyze(read_trace(rank.write(tmp_path)))
    assert sums_up(found) and found.steps == 1
    for part in PARTS:
        assert found.split.parts_ns[part] == pytest.approx(1000 * expected[part], abs=END_NS / 1000), part


@pytest.mark.parametrize("skew_ms", [0, 5])
def test_messages_are_waits_and_transfers_on_either_end(tmp_path: Path, skew_ms: int) -> None:
    ranks, truth = messages_world([(0, 1)], {0: 0, 1: 1_000_000 * skew_ms}, seed=3)
    for rank in ranks:
        rank.write(tmp_path)
    analyzed = analyze_ranks(read_folder(tmp_path))
    for found in analyzed:
        assert sums_up(found)
        parts = found.split.parts_ns
        starved_ns = sum(m.waiting_ns for m in truth if m.destination == found.rank)
        assert parts["p2p"] == 0 and parts["compute"] == 0
        assert parts["p2p_starved"] == pytest.approx(starved_ns, rel=0.01, abs=50_000)
        assert parts["p2p_transfer"] > 0 and parts["p2p_backpressured"] > 0


def test_a_collective_waits_until_its_last_rank_has_come(tmp_path: Path) -> None:
    for rank, start_ns in ((0, 100_000), (1, 400_000), (2, 350_000)):
        trace = SyntheticRank(rank, world_size=3, skew_ns=1_000 * rank)
        trace.span("ProfilerStep#1", BASE_NS, BASE_NS + 1_000_000)
        args = {"Collective name": "allreduce", "dtype": "Float", "In msg nelems": 8, "Out msg nelems": 8, "Seq": 5}
        args |= {"Process Group Name": "0", "Process Group Ranks": "[0, 1, 2]", "Group size": 3}
        at = BASE_NS + start_ns
        trace.kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", at, BASE_NS + 600_000, 20, **args)
        trace.write(tmp_path)
    parts = [found.split.parts_ns for found in analyze_ranks(read_folder(tmp_path))]
    for part, wait_ns, rest_ns in zip(parts, (300_000, 0, 50_000), (200_000, 200_000, 200_000), strict=True):
        assert part["collective_wait"] == pytest.approx(wait_ns, abs=3_000)
        assert part["collective"] == pytest.approx(rest_ns, abs=3_000)


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name[:40])
def test_every_public_trace_adds_up(path: Path) -> None:
    try:
        trace = read_trace(path)
    except TraceError:
        return  # what is refused is tested with the reader
    found = analyze(trace)
    assert sums_up(found)
    assert (found.gpu_busy_ns is None) == (not trace.has_gpu_rows)
    if found.gpu_busy_ns is not None:
        assert found.gpu_busy_ns + sum(found.idle_by_host_ns.values()) == found.split.window_ns
    assert sum(tenths(found.split.parts_ns).values()) == pytest.approx(100, abs=1e-9)
    text = as_text([found])
    assert ("no GPU rows" in text) == (not trace.has_gpu_rows)
    assert as_json([found])[0]["parts_ns"] == found.split.parts_ns


def test_shares_add_up_to_a_hundred_however_they_are_cut() -> None:
    draw = random.Random(0)
    for _ in range(300):
        parts = {str(part): draw.randrange(10 ** draw.randrange(1, 12)) for part in range(draw.randrange(1, 14))}
        shares = tenths(parts)
        if total := sum(parts.values()):
            assert round(sum(round(10 * share) for share in shares.values())) == 1000
            assert all(abs(shares[name] - 100 * part / total) <= 0.1 for name, part in parts.items())


def test_waits_are_told_by_the_rank_that_is_waited_for(tmp_path: Path) -> None:
    """Of a receive that waits, a send whose receiver is late, a collective, and what another wait lies under."""
    ms = 1_000_000
    ranks = [SyntheticRank(number, 3) for number in range(3)]
    for rank in ranks:
        rank.span("ProfilerStep#1", 0, 100 * ms)
        args = {"Collective name": "allreduce", "Process Group Name": "0", "Seq": 1}
        begin = {0: 70, 1: 78, 2: 74}[rank.rank] * ms
        rank.kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", begin, 80 * ms, 30, **args)
    for number, (send, receive) in enumerate([(20, 10), (40, 46), (52, 50)]):
        end = (max(send, receive) + 1) * ms
        ranks[0].message("send", 2, send * ms, end, sequence=number, group="a")
        ranks[2].message("recv", 0, receive * ms, end, sequence=number, group="a")
    ranks[1].message("send", 2, 18 * ms, 19 * ms, sequence=0, group="b", stream=21)
    ranks[2].message("recv", 1, 8 * ms, 19 * ms, sequence=0, group="b", stream=21)
    for rank in ranks:
        rank.write(tmp_path)
    found = analyze_ranks(read_folder(tmp_path))
    assert found[0].waits_for_ns == {1: 8 * ms, 2: 6 * ms}
    assert found[1].waits_for_ns == {}  # it came last
    # For 1, which it waits for most, from 8 to 18 and from 74 to 78; of what is left, for 0 from 19 to 20 and 50 to 52.
    assert found[2].waits_for_ns == {1: 14 * ms, 0: 3 * ms}
    assert as_json(found)[0]["waits_for_ns"] == {"1": 8 * ms, "2": 6 * ms}
    assert "waits for: rank 1 8.0 %, rank 2 6.0 %" in as_text(found)
    assert all(sum(rank.waits_for_ns.values()) == sum(rank.split.parts_ns[part] for part in WAITS) for rank in found)


def test_a_wait_for_a_slot_is_for_the_next_message_s_rank(tmp_path: Path) -> None:
    ms = 1_000_000
    rank = SyntheticRank(0, 3)
    rank.span("ProfilerStep#1", 0, 100 * ms)
    for start, end, peer in ((10, 20, 1), (40, 45, 2), (60, 70, 1)):
        rank.span("wait_slot", start * ms, end * ms)
        rank.span("send", (end + 5) * ms, (end + 6) * ms)
        rank.span(f"message of {start} to rank {peer}", (end + 5) * ms, (end + 6) * ms)
    rank.span("wait_slot", 90 * ms, 95 * ms)
    rank.write(tmp_path)
    (found,) = analyze_ranks(read_folder(tmp_path))
    assert found.waits_for_ns == {1: 20 * ms, 2: 5 * ms} and found.split.parts_ns["p2p_backpressured"] == 30 * ms


def test_what_the_gpu_computes_is_of_the_span_that_launched_it(tmp_path: Path) -> None:
    """The host is ahead: while the forward pass runs, it is in the optimizer already."""
    rank = SyntheticRank(0)
    rank.span("ProfilerStep#1", BASE_NS, BASE_NS + 10_000)
    rank.span("forward", BASE_NS, BASE_NS + 1_000)
    rank.span("optimizer", BASE_NS + 2_000, BASE_NS + 10_000)
    rank.kernel("gemm", BASE_NS + 5_000, BASE_NS + 9_000, launch_ns=BASE_NS + 500)
    rank.kernel("adam", BASE_NS + 8_000, BASE_NS + 10_000, stream=9, launch_ns=BASE_NS + 3_000)
    rank.kernel("gemm", BASE_NS + 1_000, BASE_NS + 2_000, launch_ns=BASE_NS - 4_000)
    found = analyze(read_trace(rank.write(tmp_path)))
    assert sums_up(found)
    assert found.compute_by_span_ns == {"": 1_000, "forward": 4_000, "optimizer": 1_000}


def test_what_was_queued_before_the_trace_is_told_apart(tmp_path: Path) -> None:
    """Its launch is not in the trace, so neither is its span."""
    rank = SyntheticRank(0)
    rank.span("ProfilerStep#1", BASE_NS, BASE_NS + 10_000)
    rank.span("forward", BASE_NS + 5_000, BASE_NS + 10_000)
    rank.slice("kernel", "gemm", BASE_NS, BASE_NS + 6_000, 0, 7, device=0, context=1, stream=7, correlation=999)
    rank.kernel("gemm", BASE_NS + 6_000, BASE_NS + 9_000, launch_ns=BASE_NS + 5_500)
    found = analyze(read_trace(rank.write(tmp_path)))
    assert sums_up(found)
    assert found.compute_by_span_ns == {"": 0, "forward": 3_000, "launched before the trace": 6_000}
    assert "launched before the trace 60.0 %" in as_text([found])


def test_without_gpu_rows_the_innermost_span_counts(tmp_path: Path) -> None:
    """A rank that is its own target computes what it would receive."""
    rank = SyntheticRank(0)
    rank.span("ProfilerStep#1", BASE_NS, BASE_NS + 10_000)
    for name, start_ns, end_ns in (("receive", 0, 8_000), ("forward", 1_000, 8_000), ("gather", 7_000, 8_000)):
        rank.span(name, BASE_NS + start_ns, BASE_NS + end_ns)
    found = analyze(read_trace(rank.write(tmp_path)))
    parts = {name: ns for name, ns in found.split.parts_ns.items() if ns}
    assert sums_up(found) and parts == {"compute": 7_000, "p2p_starved": 1_000, "unexplained": 2_000}
    assert found.compute_by_span_ns["forward"] == 6_000


def test_a_collective_waits_for_no_rank_of_another_window(tmp_path: Path) -> None:
    """Of a job that was begun again the groups and numbers are the same, but the clock is hours ahead."""
    hour_ns = 3600 * 10**9
    for number, start_ns in ((0, BASE_NS), (1, BASE_NS - hour_ns)):
        rank = SyntheticRank(number, 2)
        rank.span("ProfilerStep#1", start_ns, start_ns + 10_000)
        facts = {"Collective name": "allreduce", "Process Group Name": "0", "Seq": 3}
        rank.kernel(KERNELS["collective"], start_ns + 1_000, start_ns + 3_000, **facts)
        rank.write(tmp_path)
    for found in analyze_ranks(read_folder(tmp_path)):
        assert found.split.parts_ns["collective"] == 2_000 and not found.waits_for_ns, found.split


MS = 1_000_000


def analyzed(rank: SyntheticRank, folder: Path) -> RankAnalysis:
    return analyze(read_trace(rank.write(folder)))


@pytest.mark.parametrize("name", ["load", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"])
def test_a_data_loaders_wait_is_data_with_and_without_a_gpu(name: str, tmp_path: Path) -> None:
    rank = SyntheticRank(0)
    rank.span("ProfilerStep#1", 0, 100 * MS)
    rank.span(name, 10 * MS, 60 * MS)
    rank.span("forward", 60 * MS, 100 * MS)
    assert analyzed(rank, tmp_path).split.parts_ns["data"] == 50 * MS
    rank.kernel("gemm", 40 * MS, 90 * MS, launch_ns=39 * MS)
    assert analyzed(rank, tmp_path).split.parts_ns["data"] == 30 * MS


def test_what_the_host_was_in_while_the_gpu_had_nothing_to_do(tmp_path: Path) -> None:
    rank = SyntheticRank(0)
    rank.span("ProfilerStep#1", 0, 1_000 * MS)
    rank.span("forward", 0, 500 * MS)
    rank.span("optimizer", 500 * MS, 900 * MS)
    rank.kernel("gemm", 100 * MS, 300 * MS, launch_ns=50 * MS)
    rank.runtime("cudaMemcpyAsync", 250 * MS, 450 * MS)
    rank.kernel("gemm", 600 * MS, 700 * MS, launch_ns=550 * MS)
    analysis = analyzed(rank, tmp_path)
    launching_ns = 3_000
    assert analysis.gpu_busy_ns == 300 * MS
    assert analysis.idle_by_host_ns == {
        "cudaMemcpyAsync": 150 * MS,
        "cudaLaunchKernel": 2 * launching_ns,
        "forward": 150 * MS - launching_ns,
        "optimizer": 300 * MS - launching_ns,
        "": 100 * MS,
    }
    text = as_text([analysis])
    assert "rank 0: GPU busy 30.0 %" in text
    assert (
        "GPU idle while the host was in: optimizer 30.0 %, cudaMemcpyAsync 15.0 %, forward 15.0 %, "
        "nothing that is named 10.0 %" in text
    )


def test_a_collective_on_another_thread_that_the_loop_waits_for_is_no_computing(tmp_path: Path) -> None:
    """As gloo's of DistributedDataParallel: the loop's thread is in `backward`, but in no operation."""
    rank = SyntheticRank(0)
    rank.span("ProfilerStep#1", 0, 100 * MS)
    rank.span("backward", 0, 100 * MS)
    rank.span("gloo:all_reduce", 20 * MS, 90 * MS, thread=77)
    assert analyzed(rank, tmp_path).split.parts_ns["compute"] == 100 * MS  # it shows none of its operations
    rank.op("aten::mm", 0, 30 * MS)
    parts_ns = analyzed(rank, tmp_path).split.parts_ns
    assert parts_ns["collective"] == 60 * MS and parts_ns["compute"] == 40 * MS


def test_a_trace_alone_is_on_no_clock_of_others_and_says_where_it_names_no_steps(tmp_path: Path) -> None:
    rank = SyntheticRank(0)
    rank.kernel("gemm", 100 * MS, 300 * MS)
    trace = read_trace(rank.write(tmp_path).rename(tmp_path / "x.json.gz"))
    text = as_text(analyze_ranks([trace]))
    assert "not on the clock" not in text
    assert "it names no steps (ProfilerStep#), so the window is the whole trace" in text
