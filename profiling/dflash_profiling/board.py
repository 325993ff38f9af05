"""Shows the traces of a folder in TensorBoard: by the plugin torch-tb-profiler, and their analysis beside it."""

from __future__ import annotations

import contextlib
import importlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dflash_profiling.trace_file import RECORD_SOME, TraceError, no_folder

_PACKAGES = {"tensorboard.program": "tensorboard", "torch_tb_profiler.plugin": "torch-tb-profiler"}
_TRACE_NAME = re.compile(r".*\.pt\.trace\.json(\.gz)?")
_SERVES_AT = re.compile(r"TensorBoard \S+ at (http\S+)")
_END_S = 10.0
ANALYSIS = "analysis"
"""Of our own runs in TensorBoard the names begin with it."""


def serve(folder: Path, port: int | None = None) -> None:
    """Shows the folder's traces until Ctrl-C; prints the address once it is there. TraceError if it cannot.

    With our analysis of each run as text and scalars. Nothing is written into the folder: TensorBoard looks at one of
    its own, which holds a link to it.
    `port`: this one; 0 for any that is free; None for TensorBoard's own choice, the first free one from 6006 on.
    """
    runs = run_folders(folder)
    _check_packages()
    with (
        contextlib.suppress(KeyboardInterrupt),
        _sigterm_ends(),
        tempfile.TemporaryDirectory(prefix="dflash-profile-", ignore_cleanup_errors=True) as place,
    ):
        _write_analyses(folder, runs, Path(place) / ANALYSIS)
        name = folder.resolve().name
        link = Path(place) / (name if name not in ("", ANALYSIS) else "traces")
        link.symlink_to(folder.resolve(), target_is_directory=True)
        _run(Path(place), port)


def _write_analyses(folder: Path, runs: Sequence[Path], out: Path) -> None:
    """One for each run that can be read; what cannot is a line on stderr, and the plugin shows what it can of it."""
    from dflash_profiling.board_events import write_analysis

    for run in runs:
        try:
            write_analysis(run, out / run.relative_to(folder))
        except TraceError as error:
            print(f"warning: no analysis of {run}: {error}", file=sys.stderr, flush=True)


def _run(logdir: Path, port: int | None) -> None:
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir)]
    command += [] if port is None else ["--port", str(port)]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    reason = "it did not say why"
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ERROR: "):
                reason = line.removeprefix("ERROR: ").strip()
            print(line, end="", file=sys.stderr, flush=True)
            if match := _SERVES_AT.search(line):
                print(f"{match[1]}#pytorch_profiler", flush=True)
        code = process.wait()
    finally:
        _end(process)
    raise TraceError(f"TensorBoard ended with exit code {code}: {reason}")


def run_folders(folder: Path) -> list[Path]:
    """The folders in which the plugin finds traces: each is a run to it. TraceError if there is none."""
    if not folder.is_dir():
        raise TraceError(no_folder(folder))
    found = {path.parent for path in folder.rglob("*.pt.trace.json*") if _TRACE_NAME.fullmatch(path.name)}
    if not found:
        raise TraceError(
            f"{folder} holds no trace (*.pt.trace.json or *.pt.trace.json.gz), nor do the folders in it: {RECORD_SOME}"
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
