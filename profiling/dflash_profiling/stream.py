"""A light stream of what a process and its GPU are like: one line of JSON a second, on a thread of its own.

It asks the device for nothing that waits. What it cannot see it leaves out: NVML without its package, the allocator
without CUDA, the compiler before it is loaded.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from dflash_profiling.gil import GilSampler
from dflash_profiling.kernel_events import KernelEvents

PERIOD_S = 1.0
JOIN_S = 10.0
PROBES, PROBE_S = 40, 1e-3
"""A sleep of a millisecond ends late where the scheduler or the GIL is late: forty a second cost a thousandth of it."""


class Stream:
    """Writes to `path` from `start` to `close`, or within a `with`; lines are added to those of an earlier process.

    `facts` gives values of the program's own for each line, such as the depth of a queue; it must not wait, and where
    it has a key of the stream's own, that one stands. What cannot be written ends the stream, and what cannot be read
    is left out from then on, with a line on stderr each.
    """

    def __init__(self, path: Path, device: int | None = None, facts: Callable[[], dict[str, Any]] | None = None):
        self._path = path
        self._kernel_events, self._gil = KernelEvents(), GilSampler()
        self._pauses = _Pauses()
        self._sources: list[Callable[[], dict[str, Any]]] = [] if facts is None else [facts]  # what comes later stands
        self._sources += [_wakeups, self._pauses.read, _Process().read, _Compiler().read]
        self._sources += [self._kernel_events.read, self._gil.read]
        self._sources += [] if device is None else [_Allocator(device).read, _Gpu(device).read]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dflash-stream", daemon=True)

    def __enter__(self) -> Stream:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Begins."""
        gc.callbacks.append(self._pauses)
        self._thread.start()

    def close(self) -> None:
        """Ends; the last line is whole, unless a source hangs, such as a driver."""
        self._ended.set()
        self._thread.join(timeout=JOIN_S)
        self._kernel_events.close()
        self._gil.close()
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._pauses)

    def _run(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a+b") as file:
                if _is_cut(file):
                    file.write(b"\n")
                due_s = time.monotonic()
                while not self._ended.wait(max(0.0, due_s - time.monotonic())):
                    due_s += PERIOD_S
                    file.write(json.dumps(self._line()).encode() + b"\n")
                    file.flush()
        except Exception as error:  # such as a full disk
            self._warn("ends here", error)

    def _line(self) -> dict[str, Any]:
        time_s, line = round(time.time(), 3), dict[str, Any]()
        for source in list(self._sources):
            try:
                line |= source()
            except Exception as error:  # of a driver, a package of another version, or the program's own facts
                self._sources.remove(source)
                self._warn(f"goes on without {getattr(source, '__qualname__', type(source).__name__)}", error)
        return line | {"time_s": time_s, "own_cpu_s": round(time.thread_time() + self._gil.cpu_s, 4)}

    def _warn(self, what: str, error: Exception) -> None:
        text = " ".join(str(error).split())
        print(f"warning: {self._path} {what}: {type(error).__name__}: {text}", file=sys.stderr)


def _is_cut(file: BinaryIO) -> bool:
    """Whether an earlier process could not end its last line."""
    if file.seek(0, os.SEEK_END) == 0:
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"


def _wakeups() -> dict[str, Any]:
    """By how much sleeps end late, in ms: the delay of the scheduler and of whoever holds the GIL."""
    late_ms = []
    for _ in range(PROBES):
        began_s = time.perf_counter()
        time.sleep(PROBE_S)
        late_ms.append(1e3 * (time.perf_counter() - began_s - PROBE_S))
    late_ms.sort()
    return {"wakeup_ms": round(late_ms[PROBES // 2], 3), "wakeup_max_ms": round(late_ms[-1], 3)}


class _Pauses:
    """Collections of garbage since the last line: how many, and how long they held everything up."""

    def __init__(self) -> None:
        self._began_s, self._count, self._total_s, self._longest_s = 0.0, 0, 0.0, 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began_s = time.perf_counter()
        else:
            took_s = time.perf_counter() - self._began_s
            self._count, self._total_s = self._count + 1, self._total_s + took_s
            self._longest_s = max(self._longest_s, took_s)

    def read(self) -> dict[str, Any]:
        facts = {
            "gc": self._count,
            "gc_ms": round(1e3 * self._total_s, 3),
            "gc_max_ms": round(1e3 * self._longest_s, 3),
        }
        self._count, self._total_s, self._longest_s = 0, 0.0, 0.0
        return facts


class _Process:
    """The process's own processor time over the wall time, and the machine's load."""

    def __init__(self) -> None:
        self._wall_s, self._cpu_s = time.monotonic(), time.process_time()

    def read(self) -> dict[str, Any]:
        wall_s, cpu_s = time.monotonic(), time.process_time()
        share = (cpu_s - self._cpu_s) / max(1e-3, wall_s - self._wall_s)
        self._wall_s, self._cpu_s = wall_s, cpu_s
        return {"cpu_cores": round(share, 3), "load": round(os.getloadavg()[0], 2), "threads": threading.active_count()}


class _Compiler:
    """What torch.compile has made so far; nothing before it is loaded."""

    def read(self) -> dict[str, Any]:
        counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
        if counters is None:  # not loaded, or another thread is half through it
            return {}
        return {
            "compiled_graphs": counters["stats"].get("unique_graphs", 0),
            "graph_breaks": sum(list(counters["graph_break"].values())),
        }


class _Allocator:
    """torch's allocator on one GPU: bytes, and counts since the process began."""

    def __init__(self, device: int) -> None:
        self._device = device

    def read(self) -> dict[str, Any]:
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return {}
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        return {
            "allocated_bytes": stats["allocated_bytes"]["all"]["current"],
            "reserved_bytes": stats["reserved_bytes"]["all"]["current"],
            "alloc_retries": stats["num_alloc_retries"],
            "device_allocs": stats["num_device_alloc"],
            "device_frees": stats["num_device_free"],
        }


class _Gpu:
    """NVML's view of one GPU, where NVML's package is installed."""

    def __init__(self, device: int) -> None:
        self._handle: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            torch = sys.modules["torch"]
            self._nvml, self._handle = pynvml, pynvml.nvmlDeviceGetHandleByUUID(_uuid(torch, device))
        except Exception:  # no package, no driver, no permission: then there are no such facts
            self._handle = None

    def read(self) -> dict[str, Any]:
        if self._handle is None:
            return {}
        nvml, handle, facts = self._nvml, self._handle, dict[str, Any]()
        readings: dict[str, Callable[[], Any]] = {
            "gpu_util": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "memory_used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            "throttle_reasons": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        }
        for name, read in readings.items():
            with contextlib.suppress(nvml.NVMLError):
                facts[name] = read()
        return facts


def _uuid(torch: Any, device: int) -> str:
    """NVML's name of torch's device, whose numbers differ where CUDA_VISIBLE_DEVICES is set."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
