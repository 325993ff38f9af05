"""Traces are taken by the real torch.profiler on the CPU and read back."""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from dflash_profiling import record
from dflash_profiling.record import TraceWindow, span


def run_loop(window: TraceWindow, steps: Iterable[int]) -> None:
    for step in steps:
        window.advance(step)
        with span(f"forward {step}"):
            torch.ones(8) @ torch.ones(8)
    window.close()


def read_trace(folder: Path) -> dict:
    (path,) = folder.iterdir()
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
