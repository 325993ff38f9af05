"""What torch.compile and Triton compile and tune, as it happens: an entry each, with its key and milliseconds.

It asks packages that the program has loaded, and loads none itself.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

MAX_WAITING = 1000
"""Entries between two lines; of more, the oldest are lost."""
MAX_KEY_CHARACTERS = 200


class KernelEvents:
    """Entries of `kind` (compile or autotune), `kernel`, `key` and `ms`, in the order in which they ended.

    - Triton's compiler says what it compiled, with the types and constants that it did so for; what came from its cache
      is no entry.
    - Of Triton's autotuner it is a kernel's configurations that were timed for one key.
    - torch.compile says which function it compiled, and how long inductor tuned kernels while the program ran.
    """

    def __init__(self) -> None:
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_WAITING)
        self._undo: list[Callable[[], None]] = []
        self._hooked: set[str] = set()
        self._last_metrics: Any = None

    def read(self) -> dict[str, Any]:
        """What is new since the last call, as {"compiles": entries}; nothing if there is none."""
        self._hook_triton()
        self._read_torch()
        entries = [self._events.popleft() for _ in range(len(self._events))]
        return {"compiles": _joined(entries)} if entries else {}

    def close(self) -> None:
        """Takes the hooks away."""
        while self._undo:
            self._undo.pop()()

    def _hook_triton(self) -> None:
        """Each hook once, as soon as what it goes to is there: another thread may be half through loading it."""
        compilation: Any = getattr(sys.modules.get("triton.knobs"), "compilation", None)
        if hasattr(compilation, "listener"):
            self._replace(compilation, "listener", self._listener)
        tuner: Any = getattr(sys.modules.get("triton.runtime.autotuner"), "Autotuner", None)
        if hasattr(tuner, "_bench"):
            self._replace(tuner, "_bench", self._timed)

    def _replace(self, owner: Any, name: str, wrapped: Callable[[Any], Any]) -> None:
        """Sets ours in place of theirs until `close`, unless someone else has set his by then."""
        if name in self._hooked:
            return
        self._hooked.add(name)
        theirs = getattr(owner, name)
        ours = wrapped(theirs)

        def undo() -> None:
            if getattr(owner, name) is ours:
                setattr(owner, name, theirs)

        setattr(owner, name, ours)
        self._undo.append(undo)

    def _listener(self, theirs: Any) -> Callable[..., None]:
        def listener(*, src: Any, times: Any, cache_hit: bool, **others: Any) -> None:
            if theirs is not None:
                theirs(src=src, times=times, cache_hit=cache_hit, **others)
            if not cache_hit:
                with contextlib.suppress(Exception):  # a compiler of another version must not fail for our sake
                    self._add("compile", getattr(src, "name", "?"), _specialisation(src), times.total / 1000)

        return listener

    def _timed(self, theirs: Callable[..., Any]) -> Callable[..., Any]:
        def bench(tuner: Any, *args: Any, config: Any, **meta: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return theirs(tuner, *args, config=config, **meta)
            finally:
                took_ms = 1000 * (time.perf_counter() - began_s)
                with contextlib.suppress(Exception):
                    given = {**(tuner.nargs or {}), **meta}
                    key = {name: given.get(name) for name in tuner.keys}
                    self._add("autotune", tuner.base_fn.__name__, _named(key), took_ms, configs=1)

        return bench

    def _read_torch(self) -> None:
        utils = sys.modules.get("torch._dynamo.utils")
        read = getattr(utils, "get_compilation_metrics", None)
        metrics = read() if read is not None else []
        new = []
        for entry in reversed(metrics):
            if entry is self._last_metrics:
                break
            new.append(entry)
        for entry in reversed(new):
            tuning = bool(entry.is_runtime)
            took_us = entry.runtime_triton_autotune_time_us if tuning else entry.duration_us
            if took_us:
                self._add(
                    "autotune" if tuning else "compile", str(entry.co_name), str(entry.compile_id), took_us / 1000
                )
        self._last_metrics = metrics[-1] if metrics else None

    def _add(self, kind: str, kernel: str, key: str, ms: float, **more: int) -> None:
        self._events.append(
            {"kind": kind, "kernel": kernel, "key": key[:MAX_KEY_CHARACTERS], "ms": round(ms, 3), **more}
        )


def _joined(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Configurations that were timed for one key as one entry."""
    joined: list[dict[str, Any]] = []
    tuned: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in entries:
        place = entry["kernel"], entry["key"]
        if "configs" in entry and (first := tuned.get(place)):
            first["configs"] += 1
            first["ms"] = round(first["ms"] + entry["ms"], 3)
            continue
        joined.append(entry)
        if "configs" in entry:
            tuned[place] = entry
    return joined


def _specialisation(source: Any) -> str:
    """Types of a kernel's arguments, and values of those that are constants."""
    types = getattr(source, "signature", None)
    types = dict(types) if isinstance(types, dict) else {}
    names = list(types)
    constants = getattr(source, "constants", None)
    for place, value in constants.items() if isinstance(constants, dict) else ():
        index = place[0] if isinstance(place, tuple) and place else place
        if isinstance(index, int) and index < len(names):
            types[names[index]] = value
    return _named(types)


def _named(values: dict[Any, Any]) -> str:
    """The text of a tensor would be fetched from its device: its type stands for it."""
    shown = {name: type(value).__name__ if hasattr(value, "data_ptr") else value for name, value in values.items()}
    return ", ".join(f"{name}={value}" for name, value in shown.items())
