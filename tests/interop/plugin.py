"""Asks TensorBoard's profiler plugin for all that it offers."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_profiling.board import run_folders

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


def wait_for_tags(url: str, plugin: str, count: int, timeout_s: float = 120.0) -> dict[str, list[str]]:
    """The tags that TensorBoard's own plugin, "text" or "scalars", has by run, once there are `count` runs or more."""
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            tags = ask(url, f"data/plugin/{plugin}/tags")
            if len(tags) >= count:
                return {run: list(of_run) for run, of_run in tags.items()}
        if time.monotonic() > deadline:
            raise TimeoutError(f"TensorBoard did not read {count} runs with {plugin} in {timeout_s:.0f} s")
        time.sleep(_POLL_S)


def ask(url: str, path: str, **query: str) -> Any:
    """What TensorBoard answers to a request for JSON."""
    status, body = _request(url, path, query)
    if status != 200:
        raise ConnectionError(f"{path} answers {status} for {query}")
    return json.loads(body)


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
    return _request(url, f"{_PLUGIN}/{path}", query)


def _request(url: str, path: str, query: dict[str, str]) -> tuple[int, bytes]:
    address = f"{url.split('#')[0].rstrip('/')}/{path}?{urllib.parse.urlencode(query)}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it runs on this machine
    try:
        with opener.open(address, timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
