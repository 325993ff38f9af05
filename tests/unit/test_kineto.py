"""Traces of many versions are read and checked against plain JSON; what is none is refused in one sentence."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_profiling.clock import align, match_p2p
from dflash_profiling.kineto import Category, Trace, TraceError, launch_delays_ns, read_trace
from tests.synthetic_traces import BASE_NS, SyntheticRank, messages_world

GOLDEN = Path(__file__).parents[1] / "golden" / "traces"
MORE = os.environ.get("DFLASH_PUBLIC_TRACES", "")
TRACES = sorted(GOLDEN.rglob("*.gz")) + (sorted(Path(MORE).rglob("*.gz")) if MORE else [])


def test_more_public_traces() -> None:
    if not MORE:
        pytest.skip("DFLASH_PUBLIC_TRACES is not set: only the traces in tests/golden/traces are read")
    assert len(TRACES) > len(list(GOLDEN.rglob("*.gz"))), f"{MORE} holds no *.gz"


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name[:40])
def test_public_traces_are_read_whole_or_refused(path: Path) -> None:
    document = json.loads(gzip.decompress(path.read_bytes()))
    if isinstance(document, list):
        assert "is a memory timeline" in refusal(path)
        return
    if "nodes" in document:
        assert "is an execution trace" in refusal(path)
        return
    complete = [event for event in document["traceEvents"] if event["ph"] == "X"]
    trace = read_trace(path)
    slices = trace.slices
    assert trace.skipped_events == trace.negative_durations == 0
    assert len(slices) == len(complete)
    assert (np.diff(slices.start_ns) >= 0).all()
    for column, values in {
        "name": Counter(event["name"] for event in complete),
        "kernel_us": round(sum(event["dur"] for event in complete if event.get("cat") == "kernel"), 1),
        "correlations": Counter(event.get("args", {}).get("correlation", -1) for event in complete),
    }.items():
        assert (
            values
            == {
                "name": Counter(trace.names[index] for index in slices.name),
                "kernel_us": round(
                    (slices.end_ns - slices.start_ns)[slices.category == Category.KERNEL].sum() / 1000, 1
                ),
                "correlations": Counter(slices.correlation.tolist()),
            }[column]
        ), column
    base_us = document.get("baseTimeNanoseconds", 0) // 1000
    assert slices.start_ns[0] // 1000 == base_us + int(min(event["ts"] for event in complete))
    gpu = [event for event in complete if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    assert trace.has_gpu_rows == bool(gpu)
    placed = slices.device >= 0
    rows = Counter(zip(slices.device[placed].tolist(), slices.stream[placed].tolist(), strict=True))
    for place, count in Counter((event["args"]["device"], event["args"]["stream"]) for event in gpu).items():
        assert rows[place] >= count
    assert trace.rank == document.get("distributedInfo", {}).get("rank")
    delays = launch_delays_ns(trace)
    assert (delays.delay_ns >= 0).all() and delays.worst_ns == trace.max_launch_skew_ns


def golden(name: str) -> Trace:
    (path,) = GOLDEN.rglob(name)
    return read_trace(path)


def test_exact_figures_of_a_public_trace() -> None:
    trace = golden("gaunernst_bert-small-uncased__1016001.json.gz")
    count = Counter(Category(value).name for value in trace.slices.category)
    assert count == {
        "PYTHON": 1385,
        "CPU_OP": 479,
        "RUNTIME": 132,
        "KERNEL": 60,
        "USER_ANNOTATION": 1,
        "GPU_USER_ANNOTATION": 1,
        "MEMCPY": 1,
        "OTHER": 1,
    }
    assert trace.base_ns == 1751410836000000000
    assert (len(trace.memory.time_ns), trace.memory.allocated[0], trace.memory.reserved[0]) == (
        236,
        91505152,
        121634816,
    )
    assert trace.window_ns == (1751410836000000000 + 1419247332500684, 1751410836000000000 + 1419247340892366)
    assert len(launch_delays_ns(trace).gpu) == 61
    assert "python3" not in trace.threads.values() and len(trace.threads) == 3


def test_a_wait_is_placed_by_its_stream_and_not_by_its_row(tmp_path: Path) -> None:
    """kineto shifts the row of a wait for a stream away from that of the stream's kernels."""
    rank = SyntheticRank(0)
    rank.slice("cuda_sync", "Stream Sync", 0, 10, 0, 100_007, device=0, stream=7)
    rank.slice("cuda_sync", "Context Sync", 20, 30, 0, 100_000, device=0)
    rank.slice("gpu_user_annotation", "forward", 40, 50, 0, 7)
    slices = read_trace(rank.write(tmp_path)).slices
    assert slices.stream.tolist() == [7, -1, 7] and slices.device.tolist() == [0, 0, 0]


def write(path: Path, content: bytes | Any) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(TraceError) as caught:
        read_trace(path, **options)
    return sentence(caught.value, path)


def sentence(error: TraceError, path: Path) -> str:
    """One sentence that names the file and ends in what to do."""
    text = str(error)
    assert str(path) in text and "\n" not in text and len(text) < 400 + len(str(path))
    assert re.search(r": (give|record|trace|check)|so record", text), text
    return text.replace(str(path), "FILE")


EVENT = {"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": 1, "ts": 5, "dur": 2}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "FILE is empty"),
        (gzip.compress(b" \n"), "FILE is empty"),
        (gzip.compress(json.dumps({"traceEvents": [EVENT] * 99}).encode())[:-20], "ends in the middle of its gzip"),
        (b"\x1f\x8b\x08\x00garbage that is no stream", "FILE is a damaged gzip file"),
        (b"\x1f\x8b", "ends in the middle of its gzip"),
        (json.dumps({"traceEvents": [EVENT] * 99}).encode()[:-9], "ends in the middle of its JSON"),
        (b'{"traceEvents": [{"name": "a', "ends in the middle of its JSON"),
        (b'{"traceEvents": [{"name": "a "quoted" b"}, {}]}', "FILE is not valid JSON"),
        (b"<html></html>", "FILE is not valid JSON"),
        (b"\x80\x02}q\x00.", "FILE is not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "FILE is not valid JSON"),
        (b"[" * 100_000, "FILE is JSON of great depth"),
        (b'{"traceEvents": [' + b'{"args": ' * 50_000, "FILE is JSON of great depth"),
        (b"17", "FILE is JSON without trace events"),
        ({"traceEvents": 3}, "FILE is JSON without trace events"),
        ({"traceEvents": []}, "FILE holds no events"),
        ([], "FILE holds no events"),
        ({"traceEvents": [{"ph": "M", "name": "process_name"}]}, "FILE holds no events"),
        ({"schema": "1.1.1", "nodes": []}, "FILE is an execution trace"),
        ([[-1, 1, 37888, 7]], "FILE is a memory timeline"),
        ({"traceEvents": [EVENT] * 98 + [{**EVENT, "dur": None}] * 2}, "FILE is damaged, 2 of its 100 events"),
        ({"traceEvents": [{"ph": "s"}] * 999 + [{"ph": "X"}]}, "FILE is damaged, 1 of its 1000 events"),
        ({"traceEvents": [EVENT, 7]}, "FILE is damaged, 1 of its 2 events"),
        ({"traceEvents": [EVENT, {"name": "a"}]}, "FILE is damaged, 1 of its 2 events"),
    ],
    ids=lambda value: value if isinstance(value, str) else "content",  # gzip's bytes hold the time of day
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: Any, expected: str) -> None:
    assert expected in refusal(write(tmp_path / "file.json", content))


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    assert "FILE is a folder" in refusal(tmp_path)
    assert "FILE cannot be read (No such file" in refusal(tmp_path / "absent.json")
    os.mkfifo(tmp_path / "pipe")
    assert "FILE is a device or pipe" in refusal(tmp_path / "pipe")


@pytest.mark.parametrize("compress", [gzip.compress, bytes])
def test_too_much_json_is_refused_before_it_is_read(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    path = write(tmp_path / "file.json", compress(b'{"traceEvents": [' + b" " * 2**20 + b"]}"))
    assert "FILE holds more than 0.5 MiB of JSON" in refusal(path, max_bytes=2**19)


def test_odd_values_are_read_or_skipped(tmp_path: Path) -> None:
    good = [
        {**EVENT, "ts": 1.5, "dur": 0.001, "pid": "Spans", "tid": "Trace"},
        {**EVENT, "ts": 2, "dur": -3, "cat": None, "args": None},
        {**EVENT, "ts": 3, "cat": ["a"], "pid": {}, "tid": 10**40, "args": []},
        {**EVENT, "ts": 4, "args": {"correlation": 10**40, "External id": "7", "stream": 10**12}},
        {
            **EVENT,
            "ts": 5,
            "cat": "kernel",
            "pid": 10**9,
            "tid": -4,
            "args": {"device": 10**6, "stream": [], "correlation": True},
        },
        {**EVENT, "ts": 6, "name": 'a "quoted" \u4e2d \U0001f600 name'},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "main"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": 4}},
        {"ph": "M", "name": "thread_name"},
        {"ph": "i", "name": "[memory]", "ts": float("nan")},
        {"ph": "C", "name": "counter", "ts": 1},
    ]
    bad = [
        {**EVENT, "ts": float("nan")},
        {**EVENT, "ts": float("inf")},
        {**EVENT, "dur": float("-inf")},
        {**EVENT, "ts": 10**400},
        {**EVENT, "ts": "5"},
        {**EVENT, "ts": True},
        {**EVENT, "ts": 1e17},
        {**EVENT, "name": 5},
        {"ph": "X"},
        {"ph": ["X"]},
        {"ph": None},
        "event",
        None,
    ]
    many = [{**EVENT, "ts": 100 + number} for number in range(2000)]
    top = {"baseTimeNanoseconds": "no", "distributedInfo": [1], "role": 5, "rank": -1, "blob": "x" * 10**6}
    trace = read_trace(write(tmp_path / "file.json", {**top, "traceEvents": good + bad + many}))
    slices = trace.slices
    assert (trace.skipped_events, trace.negative_durations, len(slices)) == (13, 1, 2006)
    assert slices.start_ns[:6].tolist() == [1500, 2000, 3000, 4000, 5000, 6000]
    assert slices.end_ns[:2].tolist() == [1501, 2000]
    assert slices.process[0] < -1 and slices.thread[0] < -1 and slices.process[0] != slices.thread[0]
    assert set(slices.correlation.tolist()) == set(slices.external_id.tolist()) == {-1}
    assert slices.category[:5].tolist() == [
        Category.CPU_OP,
        Category.OTHER,
        Category.OTHER,
        Category.CPU_OP,
        Category.KERNEL,
    ]
    assert trace.names[slices.name[5]] == 'a "quoted" \u4e2d \U0001f600 name'
    assert (trace.rank, trace.world_size, trace.role, trace.base_ns) == (None, None, None, None)
    assert "blob" not in trace.metadata and trace.threads == {(1, 1): "main"}
    assert len(trace.memory.time_ns) == 0


def test_times_are_exact_to_the_nanosecond(tmp_path: Path) -> None:
    """Of unix time in whole microseconds, and of three months in thousandths of them."""
    draw = random.Random(0)
    times = [draw.randrange(7_889_238 * 10**9) for _ in range(5000)]
    rank = SyntheticRank(0)
    for time_ns in times:
        rank.op("a", time_ns, time_ns + 7)
    trace = read_trace(rank.write(tmp_path))
    assert trace.slices.start_ns.tolist() == [BASE_NS + time_ns for time_ns in sorted(times)]
    old = {"traceEvents": [{**EVENT, "ts": 1_695_835_572_943_623}]}
    assert read_trace(write(tmp_path / "old.json", old)).slices.start_ns.tolist() == [1_695_835_572_943_623_000]


def test_of_slices_that_begin_together_the_longer_is_first(tmp_path: Path) -> None:
    rank = SyntheticRank(0)
    for end_ns in (20, 50, 30):
        rank.op(f"until {end_ns}", 10, end_ns)
    trace = read_trace(rank.write(tmp_path))
    assert [trace.names[index] for index in trace.slices.name] == ["until 50", "until 30", "until 20"]


def test_launch_delays_are_clamped_and_the_worst_is_told(tmp_path: Path) -> None:
    rank = SyntheticRank(0)
    rank.kernel("late", 100_000, 110_000, launch_ns=60_000)
    rank.kernel("early", 200_000, 210_000, launch_ns=208_100)
    graph = rank.runtime("cudaGraphLaunch", 300_000, 301_000)
    for start_ns in (310_000, 320_000):
        rank.slice("kernel", "in a graph", start_ns, start_ns + 5_000, 0, 7, correlation=graph, stream=7, device=0)
    rank.slice("kernel", "launched before the window", 400_000, 410_000, 0, 7, correlation=10**6, stream=7, device=0)
    trace = read_trace(rank.write(tmp_path))
    delays = launch_delays_ns(trace)
    assert delays.delay_ns.tolist() == [40_000, 0, 10_000, 20_000]
    assert (delays.negative, delays.worst_ns, trace.max_launch_skew_ns) == (1, 8_100, 8_100)
    assert [trace.names[trace.slices.name[row]] for row in delays.gpu] == ["late", "early", "in a graph", "in a graph"]


def test_communication_is_read_from_calls_and_kernels(tmp_path: Path) -> None:
    """A kernel without arguments takes those of its call; of a peer, its place in the group may be all that is told."""
    rank = SyntheticRank(2, world_size=4)
    rank.message("send", 3, 100_000, 200_000, bytes=4096, sequence=9, group="pair")
    group = {"Process Group Name": "g", "Process Group Ranks": "[0, 2, 3]", "dtype": "Float"}
    call = {**group, "Collective name": "recv", "Rank": 0, "In msg nelems": 8, "Out msg nelems": 16}
    external_id = rank.op("record_param_comms", 300_000, 310_000, **call)
    rank.kernel(
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 320_000, 330_000, **{"External id": external_id}
    )
    rank.kernel("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 340_000, 350_000)  # says nothing
    shortened = {**group, "Process Group Ranks": "[0, 1, ...]", "Collective name": "allreduce", "dtype": "Odd"}
    rank.op("record_param_comms", 400_000, 410_000, **shortened)
    trace = read_trace(rank.write(tmp_path))
    found = [(c.name, c.kind, c.direction, c.source, c.destination, c.group, c.bytes) for c in trace.communication]
    assert found == [
        ("send", "call", "send", 2, 3, "pair", 4096),
        ("send", "kernel", "send", 2, 3, "pair", 4096),
        ("recv", "call", "receive", 0, 2, "g", 64),
        ("recv", "kernel", "receive", 0, 2, "g", 64),
        ("allreduce", "call", None, None, None, "g", None),
    ]
    assert [c.sequence for c in trace.communication] == [9, 9, None, None, None]
    assert [c.ranks for c in trace.communication] == [(2, 3), (2, 3), (0, 2, 3), (0, 2, 3), ()]
    kernel = trace.communication[1]
    assert trace.slices.category[kernel.slice] == Category.KERNEL
    assert kernel.start_ns == trace.slices.start_ns[kernel.slice] == BASE_NS + 100_000


@pytest.mark.parametrize("key", ["External id", "external id"])
def test_links_to_operations_of_writers_of_any_age(tmp_path: Path, key: str) -> None:
    """Older ones write a small letter; by this number a kernel knows the call that says what it is."""
    rank = SyntheticRank(0, 2)
    rank.message("send", 1, 100_000, 200_000, sequence=3)
    kernel = next(event for event in rank.events if event["cat"] == "kernel")
    kernel["args"] = {
        k: v for k, v in kernel["args"].items() if k in ("External id", "correlation", "device", "stream")
    }
    for event in rank.events:
        if "External id" in event.get("args", {}):
            event["args"][key] = event["args"].pop("External id")
    trace = read_trace(rank.write(tmp_path))
    assert [(c.kind, c.name, c.destination, c.sequence) for c in trace.communication] == [
        ("call", "send", 1, 3),
        ("kernel", "send", 1, 3),
    ]
    assert (trace.slices.external_id >= 0).sum() == 2


def test_counters_of_the_hardware_are_left_away(tmp_path: Path) -> None:
    """They are samples of a GPU, on a process that is named by a text."""
    rank = SyntheticRank(0)
    rank.kernel("k", 1_000, 2_000)
    plain = read_trace(rank.write(tmp_path, stamp=1))
    counter = {"ph": "C", "cat": "hardware_counters", "name": "sm__cycles", "pid": "GPU 0 Counters", "tid": 0}
    rank.events += [{**counter, "ts": at, "args": {"sm__cycles": 1.5}} for at in range(200)]
    rank.events += [{**counter, "ts": None}, {**counter, "args": None}]
    counted = read_trace(rank.write(tmp_path, stamp=2))
    assert counted.skipped_events == 0 and counted.names == plain.names
    assert (counted.slices.start_ns == plain.slices.start_ns).all() and len(counted.slices) == len(plain.slices)


JUNK: list[Any] = [None, True, -1, 10**30, 1e308, float("nan"), float("inf"), "", "x", "7", [], [[1]], {}, {"a": {}}]


def bases() -> list[bytes]:
    ranks, _ = messages_world([(0, 1)], {0: 0, 1: 0}, count=3)
    names = ("triton_example.json.gz", "event_sync_trace.json.gz", "rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz")
    files = [gzip.decompress(path.read_bytes()) for name in names for path in GOLDEN.rglob(name)]
    return [json.dumps(ranks[0].document()).encode(), *files]


def spoil_value(value: Any, draw: random.Random, share: float) -> Any:
    """The document with some values replaced and some keys missing, at any depth."""
    if draw.random() < share:
        return draw.choice(JUNK)
    if isinstance(value, dict):
        return {key: spoil_value(item, draw, share) for key, item in value.items() if draw.random() > share / 2}
    if isinstance(value, list):
        return [spoil_value(item, draw, share) for item in value]
    return value


def spoiled(data: bytes, draw: random.Random) -> bytes:
    kind = draw.randrange(4)
    if kind == 0:  # wrong types and missing keys
        data = json.dumps(spoil_value(json.loads(data), draw, draw.choice([0.0002, 0.002, 0.02]))).encode()
    elif kind == 1:
        data = data[: draw.randrange(len(data))]
    packed = draw.random() < 0.5
    if packed:
        data = gzip.compress(data, 1)
    if kind == 2:
        data = data[: draw.randrange(len(data))]
    if kind == 3:
        flipped = bytearray(data)
        for _ in range(draw.choice([1, 1, 3, 30])):
            flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        data = bytes(flipped)
    return data


@pytest.mark.parametrize("inputs", [300, pytest.param(10_000, marks=pytest.mark.full)])
def test_spoiled_files_are_read_or_refused(tmp_path: Path, inputs: int) -> None:
    sources, path = bases(), tmp_path / "rank0.1.pt.trace.json.gz"
    outcomes: Counter[str] = Counter()
    for seed in range(inputs):
        draw = random.Random(seed)
        write(path, spoiled(draw.choice(sources), draw))
        start = time.monotonic()
        try:
            trace = read_trace(path)
            launch_delays_ns(trace)
            match_p2p([trace], align([trace]))
            outcomes["read"] += 1
        except TraceError as error:
            sentence(error, path)
            outcomes["refused"] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        assert time.monotonic() - start < 30, seed
    assert min(outcomes["read"], outcomes["refused"]) > inputs / 20, outcomes
