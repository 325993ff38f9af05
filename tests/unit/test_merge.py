"""All ranks' traces as one: synthetic worlds of which the truth is known, a real one, and folders with other files."""

import gzip
import json
import math
import random
import shutil
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from typer.testing import CliRunner

from dflash_profiling import cli
from dflash_profiling.clock import align, match_p2p
from dflash_profiling.kineto import read_folder, read_trace
from dflash_profiling.merge import Merged, merge_folder
from dflash_profiling.record import TraceWindow, span
from dflash_profiling.trace_file import TraceError, load
from tests.synthetic_traces import BASE_NS, SyntheticRank, messages_world

MS = 1_000_000
PAIRS = {"1-1": [(0, 1)], "3-1": [(0, 3), (1, 3), (2, 3)], "2-2": [(0, 2), (0, 3), (1, 2), (1, 3)]}

Event = dict[str, Any]
Slice = tuple[int, int, str]


def merged_document(merged: Merged) -> dict[str, Any]:
    """The document; anything that would spoil a viewer's picture of it fails."""
    text = gzip.decompress(merged.path.read_bytes()).decode("ascii")
    document = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON for browsers"))
    assert load(merged.path, 2**30) == document
    assert '"ph": "X"' in text and '"ts": ' in text
    events = document["traceEvents"]
    assert all(event["ts"] >= 0 and type(event["pid"]) is type(event["tid"]) is int for event in events)
    assert_named(events)
    assert_nested(events)
    assert_arrows(events)
    return document


def ns(microseconds: float) -> int:
    return round(microseconds * 1000)


def slices_of(events: list[Event]) -> dict[tuple[int, int], list[Slice]]:
    """By process and thread: start, end, name; in order."""
    slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start_ns = ns(event["ts"])
            slices[event["pid"], event["tid"]].append((start_ns, start_ns + ns(event["dur"]), event["name"]))
    return {track: sorted(rows, key=lambda row: (row[0], -row[1])) for track, rows in slices.items()}


def assert_named(events: list[Event]) -> None:
    named = defaultdict(list)
    for event in events:
        if event["ph"] == "M":
            named[event["name"]].append((event["pid"], event["tid"]) if "thread" in event["name"] else event["pid"])
    used = {(event["pid"], event["tid"]) for event in events if event["ph"] != "M"}
    for what, numbers in named.items():
        assert len(numbers) == len(set(numbers))
        assert set(numbers) == (used if "thread" in what else {process for process, _ in used})
    assert len(named) == 4


def assert_nested(events: list[Event]) -> None:
    for rows in slices_of(events).values():
        stack: list[int] = []
        for start_ns, end_ns, name in rows:
            while stack and stack[-1] <= start_ns:
                stack.pop()
            assert not stack or end_ns <= stack[-1], f"{name} cuts across another slice of its thread"
            stack.append(end_ns)


def assert_arrows(events: list[Event]) -> None:
    """Each with a tail and a head, both in slices, and one that stays in its rank unless it is a message."""
    slices = slices_of(events)
    ends = defaultdict(list)
    for event in events:
        if event["ph"] in "sft":
            ends[event["cat"], event["name"], event["id"]].append(event)
    assert len({key[2] for key in ends}) == len(ends)
    rank_of = {event["pid"]: event["args"]["name"].split(":")[0] for event in events if event["name"] == "process_name"}
    for (category, name, _), pair in ends.items():
        assert [end["ph"] for end in pair] == ["s", "f"]
        for end in pair:
            moment_ns = ns(end["ts"])
            rows = slices[end["pid"], end["tid"]]
            assert any(first <= moment_ns < last or first == moment_ns for first, last, _ in rows)
        tail, head = (rank_of[end["pid"]] for end in pair)
        assert (tail == head) == (category != "message"), name


def arrows_of(events: list[Event], category: str) -> list[tuple[Event, Event]]:
    tails = [event for event in events if event["ph"] == "s" and event["cat"] == category]
    heads = {event["id"]: event for event in events if event["ph"] == "f"}
    return [(tail, heads[tail["id"]]) for tail in tails]


def innermost(slices: dict[tuple[int, int], list[Slice]], end: Event) -> Slice:
    rows = slices[end["pid"], end["tid"]]
    return [row for row in rows if row[0] <= ns(end["ts"]) < row[1]][-1]


@pytest.mark.parametrize("numbered", [True, False], ids=["by sequence", "by order"])
@pytest.mark.parametrize("topology", PAIRS)
def test_each_message_has_one_arrow_from_its_send_to_its_receive(tmp_path: Path, topology: str, numbered: bool) -> None:
    pairs = PAIRS[topology]
    draw = random.Random(topology)
    skews = {rank: draw.randrange(-5 * MS, 5 * MS) if rank else 0 for rank in range(1 + max(max(p) for p in pairs))}
    ranks, truth = messages_world(pairs, skews, count=15, numbered=numbered)
    for rank in ranks:
        rank.role = "drafter" if rank.rank == max(skews) else "target"
        rank.write(tmp_path)
    traces = read_folder(tmp_path)
    alignment = align(traces)
    merged = merge_folder(tmp_path)
    assert merged.warnings() == [] and merged.path == tmp_path / "merged.json.gz"
    assert merged.messages == len(truth)
    document = merged_document(merged)
    events, base_ns = document["traceEvents"], document["baseTimeNanoseconds"]
    arrows = arrows_of(events, "message")
    assert len(arrows) == len(truth)

    slices_by_rank = {trace.rank: trace.slices for trace in traces}
    expected = []
    for message in match_p2p(traces, alignment):
        extents = []
        for rank, index in ((message.source, message.send_slice), (message.destination, message.receive_slice)):
            offset_ns = alignment.offsets_ns[rank] - base_ns
            slices = slices_by_rank[rank]
            extents.append((int(slices.start_ns[index]) + offset_ns, int(slices.end_ns[index]) + offset_ns))
        expected.append((f"rank {message.source} to rank {message.destination}", *extents))
    drawn_slices = slices_of(events)
    found = [
        (tail["name"], innermost(drawn_slices, tail)[:2], innermost(drawn_slices, head)[:2]) for tail, head in arrows
    ]
    assert sorted(found) == sorted(expected)
    for tail, head in arrows:
        assert tail["ts"] <= head["ts"]

    for rank in ranks:  # on the clock of rank 0, within what the messages leave open
        mine = sorted(ns(e["ts"]) for e in rank.events if e["ph"] == "X")
        title = f"rank {rank.rank}, {rank.role}: "
        processes = {e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"].startswith(title)}
        drawn = sorted(ns(e["ts"]) for e in events if e["ph"] == "X" and e["pid"] in processes)
        shifts = {base_ns - BASE_NS + there - here + rank.skew_ns for here, there in zip(mine, drawn, strict=True)}
        assert len(shifts) == 1 and abs(shifts.pop()) <= 20_000


def test_names_and_order_of_what_is_drawn(tmp_path: Path) -> None:
    """The profiler's own tracks have text for numbers, or -1."""
    for number, role in ((0, "target"), (1, "drafter")):
        rank = SyntheticRank(number, 2, role=role)
        rank.op("aten::mm", 0, 1000)
        rank.kernel("gemm", 9000, 10_000, stream=7)
        rank.slice("Trace", "PyTorch Profiler (0)", 0, 20_000, "Spans", "PyTorch Profiler")
        rank.slice("overhead", "Activity Buffer Request", 0, 1000, -1, 0)
        name = {"ph": "M", "name": "thread_name", "pid": rank.process, "tid": rank.process, "ts": 0}
        rank.events.append({**name, "args": {"name": "thread 1 (python)"}})
        rank.events.append({"ph": "i", "name": "Iteration Start", "s": "g", "pid": "Traces", "tid": "Trace", "ts": 0})
        rank.events.append({"ph": "M", "name": "process_labels", "pid": 5, "tid": 0, "args": {"labels": "GPU 5"}})
        rank.write(tmp_path)
    events = merged_document(merge_folder(tmp_path))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    shown = [names[process] for process in sorted(names, key=order.__getitem__)]
    parts = ["host", "Spans", "Traces", "profiler's overhead", "GPU 0"]
    assert [name.split(": ")[0] for name in shown] == ["rank 0, target"] * 5 + ["rank 1, drafter"] * 5
    assert shown[0] == "rank 0, target: host" and shown[5] == "rank 1, drafter: host"
    assert {name.split(": ")[1] for name in shown[:5]} == set(parts)
    threads = sorted(e["args"]["name"] for e in events if e["name"] == "thread_name" and names[e["pid"]][5] == "1")
    assert threads == ["PyTorch Profiler", "Trace", "stream 7", "thread 0", "thread 1 (python)"]


def test_ids_that_two_ranks_share_are_told_apart(tmp_path: Path) -> None:
    """Both count from 1; so do forward and launch in one rank."""
    for number in range(2):
        rank = SyntheticRank(number, 2)
        rank.op("forward", 1000, 2000)
        rank.op("backward", 50_000, 60_000, thread=77)
        for phase, when_ns, thread in (("s", 1000, rank.process), ("f", 50_000, 77)):
            flow = {"ph": phase, "id": 3, "cat": "fwdbwd", "name": "fwdbwd", "pid": rank.process, "tid": thread}
            rank.events.append({**flow, "ts": when_ns / 1000, "bp": "e"})
        rank.kernel("gemm", 9000, 10_000)
        rank.write(tmp_path)
    events = merged_document(merge_folder(tmp_path))["traceEvents"]
    assert len(arrows_of(events, "ac2g")) == len(arrows_of(events, "fwdbwd")) == 2
    for key in ("correlation", "External id"):
        per_rank = defaultdict(set)
        for event in events:
            if key in event.get("args", {}):
                per_rank[event["args"][key] >> 32].add(event["args"][key])
        assert len(per_rank) == 2 and not per_rank[0] & per_rank[1]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    launches = {e["args"]["correlation"] for e in events if e.get("cat") == "cuda_runtime"}
    assert {e["args"]["correlation"] for e in kernels} == launches and len(launches) == 2


def test_arrows_of_a_graph_of_a_skewed_clock_and_of_spoiled_flows(tmp_path: Path) -> None:
    rank = SyntheticRank(0)
    launch = rank.runtime("cudaGraphLaunch", 1000, 4000)
    place = {"device": 0, "stream": 7, "correlation": launch}
    flow = {"id": launch, "cat": "ac2g", "name": "ac2g"}
    rank.events.append({"ph": "s", **flow, "pid": rank.process, "tid": rank.process, "ts": 1.0})
    for start_ns in (500, 5000, 7000):  # the first began before its launch, by the GPU's clock
        rank.slice("kernel", "k", start_ns, start_ns + 1500, 0, 7, **place)
        rank.events.append({"ph": "f", **flow, "pid": 0, "tid": 7, "ts": start_ns / 1000, "bp": "e"})
    rank.events.append({"ph": "s", "id": 98, "cat": "ac2g", "name": "ac2g", "pid": 1000, "tid": 1000, "ts": 1.0})
    rank.events.append({"ph": "f", "id": 99, "cat": "ac2g", "name": "ac2g", "pid": 0, "tid": 7, "ts": 5.0})
    rank.events.append({"ph": "f", **flow, "pid": 0, "tid": 7, "ts": 6.75})  # between two kernels
    rank.write(tmp_path)
    merged = merge_folder(tmp_path)
    assert merged.loose_arrows == 1 and "1 arrows" in merged.warnings()[0]
    arrows = arrows_of(merged_document(merged)["traceEvents"], "ac2g")
    assert len(arrows) == 3 and all(tail["ts"] <= head["ts"] for tail, head in arrows)


def test_a_host_process_with_the_number_of_a_gpu(tmp_path: Path) -> None:
    """As it is in a container, where the trainer is process 1."""
    rank = SyntheticRank(0)
    rank.slice("cpu_op", "aten::mm", 0, 10_000, 1, 7)
    rank.slice("kernel", "gemm", 5000, 15_000, 1, 7)
    rank.write(tmp_path)
    events = merged_document(merge_folder(tmp_path))["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["rank 0: host", "rank 0: GPU 1"]


def test_annotations_of_old_versions_on_the_gpu(tmp_path: Path) -> None:
    """They are in the category of those on the host."""
    rank = SyntheticRank(0)
    rank.op("aten::mm", 0, 1000)
    rank.kernel("gemm", 9000, 10_000)
    rank.slice("user_annotation", "ProfilerStep#1", 8000, 11_000, 0, 7)
    rank.write(tmp_path)
    events = merged_document(merge_folder(tmp_path))["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["rank 0: host", "rank 0: GPU 0"]
    assert len({(e["pid"], e["tid"]) for e in events if e["name"] in ("gemm", "ProfilerStep#1")}) == 1


GOLDEN = Path(__file__).parents[1] / "golden" / "traces"


@pytest.mark.parametrize("path", sorted(GOLDEN.rglob("*.gz")), ids=lambda path: path.name[:40])
def test_public_traces_keep_every_slice(tmp_path: Path, path: Path) -> None:
    """Twice: two copies of one rank are that rank, those that do not say their rank are two."""
    for worker in "ab":
        shutil.copy(path, tmp_path / f"{worker}.1.pt.trace.json.gz")
    try:
        trace = read_trace(path)
    except TraceError:
        with pytest.raises(TraceError):
            merge_folder(tmp_path)
        return
    merged = merge_folder(tmp_path)
    copies = 2 if trace.rank is None else 1
    assert (merged.ranks, len(merged.unaligned)) == (copies, copies - (trace.rank is not None))
    assert merged.left_out == merged.loose_arrows == 0
    events = merged_document(merged)["traceEvents"]
    names = [(event["name"], ns(event["dur"])) for event in events if event["ph"] == "X"]
    durations = (trace.slices.end_ns - trace.slices.start_ns).tolist()
    assert Counter(names) == Counter(
        zip(copies * [trace.names[i] for i in trace.slices.name], copies * durations, strict=True)
    )


def test_ranks_of_unknown_clocks_are_put_at_the_start_and_named(tmp_path: Path) -> None:
    ranks, truth = messages_world(PAIRS["3-1"], dict.fromkeys(range(4), 0))
    ranks[1].base_ns = None
    ranks[2].base_ns -= 3_600 * 10**9
    for rank in ranks:
        rank.write(tmp_path)
    result = CliRunner().invoke(cli.app, ["merge", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{tmp_path}/merged.json.gz\n"
    warnings = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 2
    assert warnings[0].startswith("warning: rank1.1.pt.trace.json.gz is put at the start, on no common clock: ")
    merged = merge_folder(tmp_path, overwrite=True)
    document = merged_document(merged)
    starts: dict[str, float] = defaultdict(lambda: math.inf)
    names = {e["pid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"}
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            title = names[event["pid"]].split(":")[0]
            starts[title] = min(starts[title], event["ts"])
    assert starts["rank 1"] == starts["rank 2"] == min(starts["rank 0"], starts["rank 3"])
    assert merged.messages == sum({message.source, message.destination} == {0, 3} for message in truth)
    assert [rank["unaligned"] is None for rank in document["ranks"]] == [True, False, False, True]


def test_what_is_malformed_is_left_out_and_said(tmp_path: Path) -> None:
    """And numbers that JSON does not know become text."""
    rank = SyntheticRank(0)
    for number in range(1000):
        rank.op("aten::add", 1000 * number, 1000 * number + 500)
    rank.events[5]["args"]["memory bandwidth (GB/s)"] = math.inf
    rank.events[6]["dur"] = -3.0
    place = {"pid": rank.process, "tid": rank.process}
    rank.events += [
        None,
        {"ph": "X", "name": "no time", **place},
        {"ph": "X", "name": 7, "ts": 1.0, "dur": 1.0, **place},
        {"ph": "i", "name": "Record Window End", "ts": 9e14, **place},
        {"ph": "C", "name": "counter", "ts": 2.5, "args": {"value": 3}, "pid": "GPU 0 Counters", "tid": 0},
    ]
    path = rank.write(tmp_path)
    merged = merge_folder(tmp_path)
    assert merged.left_out == 4 and "4 events" in merged.warnings()[0]
    document = merged_document(merged)
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == len(read_trace(path).slices) == 1000
    assert slices[5]["args"]["memory bandwidth (GB/s)"] == "inf" and slices[6]["dur"] == 0
    assert [event["name"] for event in document["traceEvents"] if event["ph"] == "C"] == ["counter"]


def exchange(rank: int, folder: str) -> None:
    """Rank 1 posts its receives long before the sends, computes meanwhile, and answers."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    window = TraceWindow(Path(folder) / "profile", rank, ["target", "drafter"][rank], 2, 3, {})
    weight = torch.ones(200, 200, requires_grad=True)
    for step in range(1, 6):
        window.advance(step)
        first, second = torch.zeros(step << 14), torch.zeros(step << 8)  # of sizes that tell the messages apart
        if rank == 0:
            with span("forward"):
                (weight @ weight).sum().backward()
            dist.send(first, 1)
            dist.send(second, 1)
            dist.recv(second, 1)
        else:
            works = [dist.irecv(first, 0), dist.irecv(second, 0)]
            with span("forward"):
                (weight @ weight).sum().backward()
            for work in works:
                assert work is not None
                work.wait()
            dist.send(second, 0)
    window.close()
    dist.destroy_process_group()


def test_a_real_world_on_gloo(tmp_path: Path) -> None:
    """Receives that are under way at once and while the thread computes: each arrow ends at its own."""
    mp.spawn(exchange, (str(tmp_path),), nprocs=2)
    merged = merge_folder(tmp_path / "profile")
    assert (merged.ranks, merged.messages, merged.unaligned, merged.left_out) == (2, 9, {}, 0)
    events = merged_document(merged)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert {"rank 0, target: host", "rank 1, drafter: host"} <= set(names.values())
    arrows = arrows_of(events, "message")
    assert len(arrows) == 9
    heads, slices = set(), slices_of(events)
    for tail, head in arrows:
        assert innermost(slices, tail)[2] in ("c10d::send", "gloo:send")
        start_ns, end_ns, name = innermost(slices, head)
        assert name == "gloo:recv"
        heads.add((head["pid"], head["tid"], start_ns, end_ns))
    assert len(heads) == 9
    assert arrows_of(events, "fwdbwd")
