"""The columns that a trace is kept in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np


class Category(IntEnum):
    """What a slice is, over all versions of kineto."""

    CPU_OP = 0
    USER_ANNOTATION = 1
    GPU_USER_ANNOTATION = 2
    KERNEL = 3
    MEMCPY = 4
    MEMSET = 5
    RUNTIME = 6
    """Calls of CUDA's and ROCm's runtime and driver."""
    SYNC = 7
    OVERHEAD = 8
    """The profiler's own."""
    PYTHON = 9
    OTHER = 10


GPU_WORK = (Category.KERNEL, Category.MEMCPY, Category.MEMSET)
CATEGORIES = {
    "cpu_op": Category.CPU_OP,
    "operator": Category.CPU_OP,
    "user_annotation": Category.USER_ANNOTATION,
    "gpu_user_annotation": Category.GPU_USER_ANNOTATION,
    "kernel": Category.KERNEL,
    "gpu_memcpy": Category.MEMCPY,
    "memcpy": Category.MEMCPY,
    "gpu_memset": Category.MEMSET,
    "memset": Category.MEMSET,
    "cuda_runtime": Category.RUNTIME,
    "cuda_driver": Category.RUNTIME,
    "hip_runtime": Category.RUNTIME,
    "hip_driver": Category.RUNTIME,
    "runtime": Category.RUNTIME,
    "cuda_sync": Category.SYNC,
    "overhead": Category.OVERHEAD,
    "python_function": Category.PYTHON,
}


@dataclass(frozen=True)
class Slices:
    """Columns over all complete ("X") events, ordered by start, the longer first."""

    start_ns: np.ndarray
    end_ns: np.ndarray
    """int64; unix time where the trace has a base, else since an unknown moment."""
    category: np.ndarray
    """uint8."""
    name: np.ndarray
    """int32, index into `Trace.names`."""
    process: np.ndarray
    thread: np.ndarray
    """int64; one that is written as text has a negative number that depends on the text alone."""
    device: np.ndarray
    """int16; -1 on the host."""
    stream: np.ndarray
    """int32; -1 on the host, and where a wait for the device names none."""
    correlation: np.ndarray
    """int64, equal for a launch and what it launched; -1: none."""
    external_id: np.ndarray
    """int64, of the CPU operation that it belongs to; -1: none."""

    def __len__(self) -> int:
        return len(self.start_ns)
