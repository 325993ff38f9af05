"""Traces are taken by the real torch.profiler on the CPU and read back."""

import gzip
import json
import resource
import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from dflash_profiling import record
from dflash_profiling.kineto import read_folder
from dflash_profiling.record import TraceWindow, span
from dflash_profiling.throughput import step_slowdown


def run_loop(window: TraceWindow, steps: Iterable[int]) -> None:
    for step in steps:
        window.advance(step)
        with span(f"forward {step}"):
            torch.ones(8) @ torch.ones(8)
    window.close()


def read_trace(folder: Path) -> dict:
    (path,) = folder.glob("*.gz")
    assert path.name.startswith("rank3.") and path.name.endswith(".pt.trace.json.gz")
    with gzip.open(path, "rt") as file:
        return json.load(file)


def span_names(trace: dict) -> list[str]:
    spans = [e for e in trace["traceEvents"] if e.get("cat") == "user_annotation"]
    return [e["name"] for e in sorted(spans, key=lambda e: e["ts"])]


def test_span_calls_nothing_of_torch_while_off() -> None:
    with patch.object(record, "record_function", side_effect=AssertionError):
        assert span("a") is span("b")
        with span("a"):
            pass


@pytest.mark.parametrize("first_step", [1, 4, 5])
def test_window_holds_exactly_its_steps(tmp_path: Path, first_step: int) -> None:
    """With steps before the window, with the warm-up step alone, and with none."""
    window = TraceWindow(tmp_path, 3, "drafter", start_step=5, steps=2, metadata={"topology": "3-1", "taps": [1, 8]})
    run_loop(window, range(first_step, 10))
    trace = read_trace(tmp_path)
    names = span_names(trace)
    assert names == ["ProfilerStep#5", "forward 5", "ProfilerStep#6", "forward 6"]
    assert sum(e["name"] == "aten::dot" for e in trace["traceEvents"]) == 2
    assert (trace["role"], trace["rank"], trace["topology"], trace["taps"]) == ("drafter", 3, "3-1", [1, 8])


@pytest.mark.parametrize(
    ("loop_steps", "expected"),
    [(range(5, 7), [5, 6]), (range(6, 20), [6, 7]), (range(7, 20), [7])],
    ids=["loop ends inside", "resumed inside", "resumed at the last step"],
)
def test_part_of_a_window_is_written(tmp_path: Path, loop_steps: range, expected: list[int]) -> None:
    run_loop(TraceWindow(tmp_path, 3, "target", start_step=5, steps=3, metadata={}), loop_steps)
    steps = [name for name in span_names(read_trace(tmp_path)) if name.startswith("ProfilerStep#")]
    assert steps == [f"ProfilerStep#{step}" for step in expected]


def test_steps_that_are_left_out_or_repeated_keep_their_numbers(tmp_path: Path) -> None:
    """A target rank advances once a batch, and has no batch in some steps."""
    window = TraceWindow(tmp_path, 3, "target", start_step=5, steps=4, metadata={})
    run_loop(window, [2, 4, 4, 5, 5, 7, 8, 8, 8, 10])
    steps = [5, 5, 7, 8, 8, 8]
    expected = [name for step in steps for name in (f"ProfilerStep#{step}", f"forward {step}")]
    assert span_names(read_trace(tmp_path)) == expected


def test_first_step_can_be_traced(tmp_path: Path) -> None:
    run_loop(TraceWindow(tmp_path, 3, "target", start_step=1, steps=1, metadata={}), range(1, 4))
    assert span_names(read_trace(tmp_path)) == ["ProfilerStep#1", "forward 1"]


def test_stacks_are_in_a_trace_of_their_own(tmp_path: Path) -> None:
    """A step is left out between the two, and who reads the folder reads the window without stacks."""
    window = TraceWindow(tmp_path, 3, "drafter", start_step=3, steps=2, metadata={}, stack_steps=1)
    run_loop(window, range(1, 10))
    plain, stacked = read_trace(tmp_path), read_trace(tmp_path / "stacks")
    assert span_names(plain) == ["ProfilerStep#3", "forward 3", "ProfilerStep#4", "forward 4"]
    assert span_names(stacked) == ["ProfilerStep#6", "forward 6"]
    frames = [[e["name"] for e in t["traceEvents"] if e.get("cat") == "python_function"] for t in (plain, stacked)]
    assert not frames[0] and any("run_loop" in name for name in frames[1])
    assert ("with_stack" in plain, stacked["with_stack"]) == (False, 1)
    (read,) = read_folder(tmp_path)
    assert read.metadata.get("with_stack") is None
    window.move(12, 1, 1)
    run_loop(window, range(10, 20))
    assert len(list(tmp_path.glob("*.gz"))) == len(list((tmp_path / "stacks").glob("*.gz"))) == 2


@pytest.mark.parametrize("batches", [1, 3], ids=["advance a step", "advance a batch"])
def test_a_trace_says_how_long_steps_took_before_and_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: int
) -> None:
    """Without the first step, that of the warm-up, and what writing takes; a step that is left out counts as one."""
    clock = SimpleNamespace(now_s=0.0, time_ns=lambda: 7)
    clock.perf_counter = lambda: clock.now_s
    monkeypatch.setattr(record, "time", clock)
    window = TraceWindow(tmp_path, 3, "drafter", start_step=6, steps=3, metadata={})
    write = window._write

    def write_slowly(*arguments: object) -> None:
        clock.now_s += 1000
        write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(window, "_write", write_slowly)
    took_s = {1: 50, 2: 1, 3: 4, 5: 99, 6: 2, 7: 3, 8: 4, 9: 5, 10: 6}
    assert window.step is None
    for step, seconds in took_s.items():
        for _ in range(batches):
            window.advance(step)
            assert window.step == step
            clock.now_s += seconds / batches
    assert not window._parts
    trace = read_trace(tmp_path)
    assert trace["step_ms_before"] == pytest.approx([1000, 2000], abs=0.01)
    assert trace["step_ms"] == pytest.approx([2000, 3000, 4000], abs=0.01)
    assert step_slowdown(trace) == pytest.approx(2)
    window.move(13, 1)
    for step in (11, 12, 13, 14):
        window.advance(step)
        clock.now_s += 8
    newest = json.loads(gzip.decompress((tmp_path / "rank3.7.pt.trace.json.gz").read_bytes()))
    assert newest["step_ms_before"] == pytest.approx([1000, 2000, 5000, 6000, 8000], abs=0.01)
    assert newest["step_ms"] == [8000]


@pytest.mark.parametrize(
    ("steps", "loop_steps"),
    [(0, range(1, 10)), (2, range(1, 5)), (2, range(7, 9))],
    ids=["no window", "loop ends in the warm-up", "resumed past the window"],
)
def test_nothing_is_written(tmp_path: Path, steps: int, loop_steps: range) -> None:
    run_loop(TraceWindow(tmp_path, 3, "target", start_step=5, steps=steps, metadata={}), loop_steps)
    assert list(tmp_path.iterdir()) == []
    assert span("a") is span("b")


def test_a_failed_write_warns_and_training_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    window = TraceWindow(blocked / "profile", 3, "target", start_step=2, steps=1, metadata={})
    run_loop(window, range(1, 5))
    assert "warning: the trace of rank 3 could not be written: NotADirectoryError" in capfd.readouterr().err
    assert span("a") is span("b")


def test_a_trace_that_torch_wrote_but_a_part_of_is_none(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As on a full disk, of which torch says nothing: here files have a limit."""
    window = TraceWindow(tmp_path, 3, "drafter", start_step=2, steps=1, metadata={})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, before[1]))
    try:
        run_loop(window, range(1, 5))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())
    assert "the trace of rank 3 could not be written: OSError" in capfd.readouterr().err


def test_a_window_that_cannot_open_warns_and_training_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    metadata = {"topology": object()}  # no JSON
    run_loop(TraceWindow(tmp_path, 3, "target", start_step=2, steps=1, metadata=metadata), range(1, 5))
    assert "warning: the trace of rank 3 could not be taken" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_profiling_folder_is_not_a_package() -> None:
    """`profiling` is a standard library package from Python 3.15; an __init__.py here would hide it."""
    assert not (Path(record.__file__).parents[1] / "__init__.py").exists()


@pytest.mark.parametrize("all_threads", [False, True])
def test_other_threads_are_recorded_where_that_is_asked_for(tmp_path: Path, all_threads: bool) -> None:
    def load() -> None:
        with span("on another thread"):
            torch.ones(8).sum()

    window = TraceWindow(tmp_path, 0, "drafter", start_step=2, steps=2, metadata={}, all_threads=all_threads)
    for step in range(1, 5):
        window.advance(step)
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
    window.close()
    (trace,) = read_folder(tmp_path)
    assert ("on another thread" in trace.names) == all_threads
