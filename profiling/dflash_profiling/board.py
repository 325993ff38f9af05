"""Shows the traces of a folder in TensorBoard with the plugin torch-tb-profiler, and asks for all that it offers."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_profiling.trace_file import TraceError

_PACKAGES = {"tensorboard.program": "tensorboard", "torch_tb_profiler.plugin": "torch-tb-profiler"}
_TRACE_NAME = re.compile(r".*\.pt\.trace\.json(\.gz)?")
_SERVES_AT = re.compile(r"TensorBoard \S+ at (http\S+)")
_END_S = 10.0
_POLL_S = 0.1
_PLUGIN = "data/plugin/pytorch_profiler"
_ENDPOINTS = {
    "Overview": ["overview"],
    "Operator": [
        f"{name}?group_by={group}"
        for name in ("operation", "operation/table")
        for group in ("Operation", "OperationAndInputShape")
    ],
    "Kernel": ["kernel", "kernel/table?group_by=Kernel", "kernel/table?group_by=Operation", "kernel/tc_pie"],
    "Trace": ["trace"],
    "Distributed": [f"distributed/{name}" for name in ("gpuinfo", "overlap", "waittime", "commops")],
    "Memory": ["memory", "memory_curve", "memory_events"],
    "Module": ["module", "tree"],
    "Lightning": ["module", "tree"],
}
"""What the plugin's page asks for to show each view."""


@dataclass(frozen=True)
class Answer:
    """What the plugin said when it was asked for a part of a view."""

    run: str
    view: str
    worker: str
    path: str
    status: int


def serve(folder: Path, port: int | None = None) -> None:
    """Shows the folder's traces until Ctrl-C; prints the address once it is there. TraceError if it cannot.

    `port`: this one; 0 for any that is free; None for TensorBoard's own choice, the first free one from 6006 on.
    """
    run_folders(folder)
    _check_packages()
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder.resolve())]
    command += [] if port is None else ["--port", str(port)]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    reason = "it did not say why"
    try:
        with _sigterm_ends():
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("ERROR: "):
                    reason = line.removeprefix("ERROR: ").strip()
                print(line, end="", file=sys.stderr, flush=True)
                if match := _SERVES_AT.search(line):
                    print(f"{match[1]}#pytorch_profiler", flush=True)
            code = process.wait()
    except KeyboardInterrupt:
        return
    finally:
        _end(process)
    raise TraceError(f"TensorBoard ended with exit code {code}: {reason}")


def run_folders(folder: Path) -> list[Path]:
    """The folders in which the plugin finds traces: each is a run to it. TraceError if there is none."""
    if not folder.is_dir():
        raise TraceError(f"{folder} is no folder: give the one with the traces of a run, as runs/NAME/profile")
    found = {path.parent for path in folder.rglob("*.pt.trace.json*") if _TRACE_NAME.fullmatch(path.name)}
    if not found:
        raise TraceError(
            f"{folder} holds no trace (*.pt.trace.json or *.pt.trace.json.gz), nor do the folders in it: record some "
            "first, or give the folder that holds them"
        )
    return sorted(found)


def _check_packages() -> None:
    for module, package in _PACKAGES.items():
        try:
            importlib.import_module(module)
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise TraceError(
                f"{package} cannot be imported ({reason}): pip install tensorboard torch-tb-profiler"
            ) from None


@contextlib.contextmanager
def _sigterm_ends() -> Iterator[None]:
    """Ends TensorBoard with us, whoever ends us."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: Any) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(_END_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()


def ask_all_views(url: str, folder: Path, timeout_s: float = 120.0) -> list[Answer]:
    """Asks for every view that the plugin lists, of each run, worker and span; TimeoutError if it is not ready in time.

    `url`: TensorBoard's, which was started on `folder`.
    """
    answers = []
    for run in _loaded_runs(url, len(run_folders(folder)), timeout_s):
        for view in _json(url, "views", run=run):
            for worker in _json(url, "workers", run=run, view=view):
                for span in _json(url, "spans", run=run, worker=worker) or ["default"]:
                    for path in _ENDPOINTS[view]:
                        status, _ = _get(url, path, run=run, worker=worker, span=span)
                        answers.append(Answer(run, view, worker, path, status))
    return answers


def _loaded_runs(url: str, count: int, timeout_s: float) -> list[str]:
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            state = _json(url, "runs")
            if not state["loading"] and len(state["runs"]) >= count:
                return state["runs"]
        if time.monotonic() > deadline:
            raise TimeoutError(f"the plugin did not read {count} runs in {timeout_s:.0f} s")
        time.sleep(_POLL_S)


def _json(url: str, path: str, **query: str) -> Any:
    status, body = _get(url, path, **query)
    if status != 200:
        raise ConnectionError(f"{path} answers {status} for {query}")
    return json.loads(body)


def _get(url: str, path: str, **query: str) -> tuple[int, bytes]:
    path, _, rest = path.partition("?")
    query = {**query, **dict(urllib.parse.parse_qsl(rest))}
    address = f"{url.split('#')[0].rstrip('/')}/{_PLUGIN}/{path}?{urllib.parse.urlencode(query)}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it runs on this machine
    try:
        with opener.open(address, timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
