"""The stream on the CPU: what it writes, what it costs, and that it never harms."""

import gc
import json
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dflash_profiling import gil, stream
from dflash_profiling.kernel_events import KernelEvents
from dflash_profiling.stream import Stream


def lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def wait_for_lines(path: Path, count: int) -> list[dict[str, float]]:
    deadline = time.monotonic() + 30
    while not path.exists() or len(path.read_bytes().splitlines()) < count:
        assert time.monotonic() < deadline, f"{count} lines did not come"
        time.sleep(0.02)
    return lines(path)


def test_lines_come_once_a_period_and_cost_less_than_half_a_per_cent(tmp_path: Path) -> None:
    path = tmp_path / "deep/rank0.jsonl"
    with Stream(path, facts=lambda: {"ring_depth": 3, "time_s": 0}):
        written = wait_for_lines(path, 6)
    first, last = written[0], written[-1]
    wall_s = last["time_s"] - first["time_s"]
    assert wall_s == pytest.approx(len(written) - 1, rel=0.2)
    assert (last["own_cpu_s"] - first["own_cpu_s"]) / wall_s <= 0.003  # py-spy may take 0.002; see test_gil.py
    assert all(row["ring_depth"] == 3 and row["wakeup_ms"] >= 0 and row["load"] >= 0 for row in written)
    whole = len(lines(path))
    with Stream(path):  # a process that goes on adds to what is there
        wait_for_lines(path, whole + 1)


def test_a_thread_that_holds_the_gil_and_garbage_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "PERIOD_S", 0.2)
    path, ended = tmp_path / "rank0.jsonl", threading.Event()

    def burn() -> None:
        while not ended.is_set():
            sum(range(2000))

    with Stream(path):
        quiet = wait_for_lines(path, 3)
        burners = [threading.Thread(target=burn) for _ in range(3)]
        for thread in burners:
            thread.start()
        gc.collect()
        busy = wait_for_lines(path, len(quiet) + 4)[len(quiet) + 1 :]
        ended.set()
        for thread in burners:
            thread.join()
    assert min(row["wakeup_ms"] for row in busy) > 5 * min(row["wakeup_ms"] for row in quiet)
    assert sum(row["gc"] for row in lines(path)) >= 1 and max(row["gc_max_ms"] for row in lines(path)) > 0


def test_what_is_compiled_and_who_holds_the_gil_are_in_the_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "PERIOD_S", 0.2)
    monkeypatch.setattr(gil, "_program", lambda: None)
    path = tmp_path / "rank0.jsonl"
    compiled = torch.compile(lambda tensor: tensor + 1, backend="eager")
    with Stream(path):
        wait_for_lines(path, 1)
        compiled(torch.ones(3))
        wait_for_lines(path, len(lines(path)) + 2)
    written = lines(path)
    assert [row["gil_unknown"] for row in written if "gil_unknown" in row] == ["py-spy is not installed"]
    entries = [entry for row in written for entry in row.get("compiles", [])]
    assert entries[-1]["kind"] == "compile" and entries[-1]["kernel"] == "<lambda>" and entries[-1]["ms"] > 0


def test_a_compiler_that_is_being_loaded_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", ModuleType("torch._dynamo.utils"))
    assert stream._Compiler().read() == KernelEvents().read() == {}


def test_what_goes_wrong_is_one_line_and_the_program_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with Stream(tmp_path / "file" / "rank0.jsonl"):
        pass
    path, asked = tmp_path / "rank0.jsonl", threading.Event()
    path.write_text('{"cut')

    def facts() -> dict[str, Any]:
        asked.set()
        return {"a": 1 / 0}

    with Stream(path, facts=facts):
        assert asked.wait(timeout=30)
    captured = capfd.readouterr().err
    assert captured.count("\n") == 2 and "FileExistsError" in captured and "ZeroDivisionError" in captured
    cut, *lines = path.read_text().splitlines()
    assert cut == '{"cut' and all("wakeup_ms" in json.loads(line) for line in lines) and lines
    assert not [callback for callback in gc.callbacks if isinstance(callback, stream._Pauses)]
