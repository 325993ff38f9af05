"""TensorBoard's profiler plugin shows our traces: a real server is asked for every view that it offers."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dflash_profiling.analysis import analyze_ranks
from dflash_profiling.kineto import read_folder
from dflash_profiling.merge import merge_folder
from dflash_profiling.record import TraceWindow, span
from dflash_profiling.stream_facts import read_stream, stream_path
from dflash_profiling.table import tenths
from tests.conftest import ROOT
from tests.interop.plugin import ask, ask_all_views, wait_for_tags
from tests.report_world import write_streams, write_world
from tests.synthetic_traces import SyntheticRank, messages_world

pytest.importorskip("torch_tb_profiler", reason="the extra `interop` is not installed")

LIMIT_S = 120.0


def environment(**changes: str) -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "profiling"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **changes}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "dflash_profiling.cli", "tensorboard", *arguments]


@contextmanager
def tensorboard(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command and the address that it prints; killed with all that it started, should it be left."""
    process = subprocess.Popen(
        command(str(folder), "--port", "0"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    alarm = threading.Timer(LIMIT_S, os.killpg, (process.pid, signal.SIGKILL))  # which ends what waits for its output
    alarm.start()
    lines: list[str] = []
    assert process.stdout is not None and process.stderr is not None
    drain = threading.Thread(target=lines.extend, args=(process.stderr,))
    drain.start()
    try:
        address = process.stdout.readline().strip()
        assert re.fullmatch(r"http://\S+:\d+/#pytorch_profiler", address), lines
        yield process, address
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        drain.join()
        alarm.cancel()
        process.stdout.close()
        process.stderr.close()


def loop(rank: int, folder: str) -> None:
    """Two worlds in one: messages alone in the first window, with a sum over both ranks, and stacks, in the second."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    windows: list[tuple[str, bool]] = [("messages", False), ("sums", True)]
    for name, sums in windows:
        role = ["target", "drafter"][rank]
        window = TraceWindow(Path(folder) / name, rank, role, 2, 2, {"topology": "1-1"}, stack_steps=int(sums))
        tensor = torch.zeros(1 << 10)
        for step in range(1, 7):
            window.advance(step)
            with span("forward"):
                torch.ones(64, 64) @ torch.ones(64, 64)
            if rank == 0:
                dist.send(tensor, 1)
            else:
                dist.recv(tensor, 0)
            if sums:
                dist.all_reduce(tensor)
        window.close()
    dist.destroy_process_group()


def memory_and_modules(folder: Path) -> None:
    """What a window of ours leaves out, as other people's traces have it."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    activities = [torch.profiler.ProfilerActivity.CPU]
    options: dict[str, Any] = {"profile_memory": True, "with_stack": True, "with_modules": True, "record_shapes": True}
    with torch.profiler.profile(activities=activities, **options) as profiler:
        for _ in range(2):
            model(torch.ones(8, 16)).sum().backward()
            profiler.step()
    folder.mkdir()
    profiler.export_chrome_trace(str(folder / "host_1.1.pt.trace.json"))


def gpu_world(folder: Path) -> None:
    """Kernels, copies and messages of three ranks, in steps."""
    folder.mkdir()
    ranks, _ = messages_world([(0, 2), (1, 2)], {0: 0, 1: 0, 2: 0}, count=5)
    for rank in ranks:
        end_ns = max(round(1000 * (event["ts"] + event.get("dur", 0))) for event in rank.events)
        for step in range(2):
            rank.span(f"ProfilerStep#{step}", step * (end_ns // 2), (step + 1) * (end_ns // 2))
        launch = {"External id": rank.op("aten::mm", 1_000_000, 1_200_000)}
        shape = {"grid": [8, 1, 1], "block": [128, 1, 1], "blocks per SM": 0.5, "warps per SM": 2.0}
        occupancy = {"est. achieved occupancy %": 12, "registers per thread": 32, "shared memory": 0}
        rank.kernel("gemm_kernel", 1_100_000, 1_900_000, launch_ns=1_050_000, **launch, **shape, **occupancy)
        rank.write(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with traces of every kind, some with other files beside, and one trace that is broken."""
    folder = tmp_path_factory.mktemp("runs")
    mp.spawn(loop, (str(folder),), nprocs=2)
    gpu_world(folder / "gpu")
    memory_and_modules(folder / "memory")
    merge_folder(folder / "messages")
    merge_folder(folder / "gpu")
    (folder / "messages" / "report.html").write_text("<html>")
    (folder / "messages" / "always-on.jsonl").write_text("{}\n")
    hostile = folder / "hostile"
    hostile.mkdir()
    rank = SyntheticRank(0)
    rank.op("aten::add", 0, 1000)
    rank.write(hostile)
    (hostile / "rank1.1.pt.trace.json.gz").write_bytes(b"\x1f\x8b\x08broken")
    (hostile / "report.html").write_text("<html>")
    (folder / "empty").mkdir()
    return folder


def test_every_view_that_is_offered_answers(runs: Path) -> None:
    """And Ctrl-C ends the command, and TensorBoard with it."""
    with tensorboard(runs) as (process, address):
        answers = ask_all_views(address, runs, LIMIT_S)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert {answer for answer in answers if answer.status != 200} == set()
    views: dict[str, set[str]] = {}
    workers: dict[str, set[str]] = {}
    for answer in answers:
        views.setdefault(answer.run, set()).add(answer.view)
        workers.setdefault(answer.run, set()).add(answer.worker)
    always = {"Overview", "Operator", "Trace"}
    views = {run.removeprefix(f"{runs.name}/"): of_run for run, of_run in views.items()}
    workers = {run.removeprefix(f"{runs.name}/"): of_run for run, of_run in workers.items()}
    assert views == {
        "messages": always,  # sends and receives alone give no Distributed view
        "sums": always | {"Distributed"},
        "sums/stacks": always | {"Distributed"},
        "gpu": always | {"Kernel"},
        "memory": always | {"Memory", "Module"},
        "hostile": always,
    }
    assert workers == {
        "messages": {"rank0", "rank1"},  # neither the merged trace nor any other file
        "sums": {"rank0", "rank1", "All"},
        "sums/stacks": {"rank0", "rank1", "All"},
        "gpu": {"rank0", "rank1", "rank2"},
        "memory": {"host_1"},
        "hostile": {"rank0"},
    }


def test_sigterm_ends_tensorboard_too(runs: Path) -> None:
    with tensorboard(runs / "empty" / ".." / "hostile") as (process, address):
        assert ask_all_views(address, runs / "hostile", LIMIT_S)
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
        with pytest.raises(TimeoutError):
            ask_all_views(address, runs / "hostile", 0)


def refused(*arguments: str, **changes: str) -> str:
    done = subprocess.run(
        command(*arguments), capture_output=True, text=True, env=environment(**changes), timeout=LIMIT_S
    )
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr


def test_what_cannot_be_shown_is_refused_in_a_line(runs: Path, tmp_path: Path) -> None:
    assert refused(str(runs / "empty")).startswith(f"error: {runs}/empty holds no trace")
    assert refused(str(runs / "absent")).startswith(f"error: {runs}/absent does not exist")
    (tmp_path / "torch_tb_profiler.py").write_text("import no_such_module")
    paths = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    error = refused(str(runs), PYTHONPATH=paths)
    assert error.count("\n") == 1
    assert "torch-tb-profiler cannot be imported (No module named 'no_such_module'): pip install" in error


def test_a_port_that_is_taken(runs: Path) -> None:
    with tensorboard(runs / "hostile") as (_, address):
        port = re.findall(r":(\d+)/", address)[0]
        error = refused(str(runs / "hostile"), "--port", port).splitlines()[-1]
        assert error.startswith("error: TensorBoard ended with exit code") and "already in use" in error


def files_of(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_the_analysis_stands_beside_as_text_and_scalars(tmp_path: Path) -> None:
    """In TensorBoard's own tabs: the shares and curves of each rank; the folder is as it was."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_world(tmp_path / name, 2)
    write_streams(tmp_path / "one", 2, seconds=3000)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "rank0.1.pt.trace.json").write_text("{")
    before = files_of(tmp_path)
    found = analyze_ranks(read_folder(tmp_path / "one"))
    with tensorboard(tmp_path) as (process, address):
        texts = wait_for_tags(address, "text", 2, LIMIT_S)
        scalars = wait_for_tags(address, "scalars", 4, LIMIT_S)
        (text,) = ask(address, "data/plugin/text/text", run="analysis/one", tag="profile")
        share, power, slowdown, waits = (
            ask(address, "data/plugin/scalars/scalars", run="analysis/one/rank 1, drafter", tag=tag)
            for tag in (
                "share of window, %/compute",
                "stream/power, W",
                "a step, of those before the window",
                "stream/waits for other ranks, each second, rank 0, ms",
            )
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert texts == {"analysis/one": ["profile"], "analysis/two": ["profile"]}
    ranks = {f"analysis/{name}/rank {rank}" for name in ("one", "two") for rank in ("0, target", "1, drafter")}
    assert scalars.keys() == ranks
    percent = tenths(found[1].split.parts_ns)["compute"]
    assert [value for _, _, value in share] == [pytest.approx(percent)]
    assert "<table>" in text["text"] and f">{percent:.1f} %<" in text["text"] and "allocator retries" in text["text"]
    rows = read_stream(stream_path(tmp_path / "one", 1))
    assert len(power) <= 1000 and power[-1] == [rows[-1]["time_s"], 2999, rows[-1]["power_w"]]
    assert [value for _, _, value in slowdown] == [pytest.approx(25 / 23)]
    assert waits[-1] == [rows[-1]["time_s"], 2999, rows[-1]["wait_ms_of_rank"]["0"]]
    assert "was compiled or tuned in steady state" in text["text"]
    kinds = {tag.split("/")[0] for tag in scalars["analysis/two/rank 1, drafter"]}
    assert kinds == {"share of window, %", "waits for, % of window", "a step, of those before the window"}  # no stream
    assert files_of(tmp_path) == before
    assert not list(Path(tempfile.gettempdir()).glob(f"dflash-profile-*/{tmp_path.name}"))
