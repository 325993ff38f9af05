"""The JSON in a file that may be a trace, or why it is none."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

MAX_BYTES = 600 * 2**20
"""Of JSON: the limit of who reads a trace, which takes about 4 times as much memory."""

RECORD_SOME = "record some first (dflash-dist profile run, or torch.profiler), or give the folder that holds them"
"""What to do where there are no traces."""


class TraceError(Exception):
    """A file that cannot be read as a trace: one sentence that names it, says what it is and what to do."""


def no_folder(folder: Path) -> str:
    """What is wrong with a folder of traces that is none."""
    wrong = "is no folder" if folder.exists() else "does not exist"
    return f"{folder} {wrong}: give the folder with the traces of a run, as runs/NAME/profile"


def load(path: Path, max_bytes: int) -> Any:
    """The JSON in a file, compressed or not; TraceError if there is none, or more of it than `max_bytes`."""
    text = _read(path, max_bytes).decode("utf-8-sig", "replace")
    if not text.strip():
        raise TraceError(f"{path} is empty: its writer was stopped, so record the trace again")
    try:
        return json.loads(text)
    except ValueError as error:
        at, reason = getattr(error, "pos", 0), getattr(error, "msg", "a number that is too long")
        cut = reason.startswith("Unterminated string") or at > len(text.rstrip()) - 5
        if text.lstrip()[:1] in "{[" and cut:
            raise TraceError(
                f"{path} ends in the middle of its JSON: record the trace or copy the file again"
            ) from None
        raise TraceError(
            f"{path} is not valid JSON ({reason} at character {at}): give a file that torch.profiler wrote; "
            "old versions of it wrote broken ones for names with quotes"
        ) from None


def _read(path: Path, max_bytes: int) -> bytes:
    if path.is_dir():
        raise TraceError(f"{path} is a folder, not a trace: give one of the files in it")
    if path.exists() and not path.is_file():
        raise TraceError(f"{path} is a device or pipe, not a trace: give a file that torch.profiler wrote")
    try:
        with path.open("rb") as file:
            compressed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            data = (gzip.GzipFile(fileobj=file) if compressed else file).read(max_bytes + 1)
    except EOFError:
        raise TraceError(
            f"{path} ends in the middle of its gzip stream: record the trace or copy the file again"
        ) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path} is a damaged gzip file ({error}): record the trace or copy the file again") from None
    except OSError as error:
        raise TraceError(f"{path} cannot be read ({error.strerror}): check the path and its permissions") from None
    if len(data) > max_bytes:
        raise TraceError(
            f"{path} holds more than {max_bytes / 2**20:.6g} MiB of JSON, the limit here: trace fewer steps, "
            "or leave out stacks and shapes"
        )
    return data


def read_metadata(path: Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The top-level keys of a trace but its events; TraceError as of `load`."""
    return events_of(path, load(path, max_bytes))[1]


def events_of(path: Path, document: Any) -> tuple[list[Any], dict[str, Any]]:
    """The list of events and the other top-level keys; the bare list is a form that Chrome allows."""
    if isinstance(document, list):
        if document and isinstance(document[0], list):
            raise TraceError(
                f"{path} is a memory timeline (export_memory_timeline), not a trace: give the *.pt.trace.json file "
                "that torch.profiler wrote beside it"
            )
        return document, {}
    if isinstance(document, dict):
        if "traceEvents" not in document and "nodes" in document:
            raise TraceError(
                f"{path} is an execution trace (ExecutionTraceObserver), which holds no times: give the "
                "*.pt.trace.json file that torch.profiler wrote"
            )
        events = document.pop("traceEvents", None)
        if isinstance(events, list):
            return events, document
    raise TraceError(f"{path} is JSON without trace events: give the *.pt.trace.json file that torch.profiler wrote")
