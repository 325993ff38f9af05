"""Shows the traces of a folder in TensorBoard with the plugin torch-tb-profiler."""

from __future__ import annotations

import contextlib
import importlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_profiling.trace_file import TraceError

_PACKAGES = {"tensorboard.program": "tensorboard", "torch_tb_profiler.plugin": "torch-tb-profiler"}
_TRACE_NAME = re.compile(r".*\.pt\.trace\.json(\.gz)?")
_SERVES_AT = re.compile(r"TensorBoard \S+ at (http\S+)")
_END_S = 10.0


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
