"""The target in a process of its own, which runs shapes for `dflash-dist probe` one after the other.

Running out of memory may be survived or not, and a kernel that crashes takes its process with it. So the parent only
asks; where the process is gone it says of what, and starts another one for the next shape.

Shape suffixes: M, K, N of a matrix product, T tokens of a batch.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import math
import multiprocessing
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import TracebackType
from typing import Literal

import numpy as np
import torch

from dflash_dist.channel import ring
from dflash_dist.config import TargetConfig
from dflash_dist.errors import UserError
from dflash_dist.target.capture import TargetForward
from dflash_dist.target.load import torch_dtype
from dflash_dist.train.memory import GIB, used_memory_gib

LEAST_RUNS, MOST_RUNS, ENOUGH_S = 3, 50, 0.5
"""Timed runs of a shape: as many as take that long."""
PRODUCTS_S = 0.1
"""Of the matrix products that make up one timing."""
OUT_OF_MEMORY = "out of memory"
_OUT_OF_MEMORY_WORDS = (OUT_OF_MEMORY, "allocate memory", "alloc_failed")
"""As CUDA, Triton, the CPU's allocator and cuBLAS say it."""


@dataclass(frozen=True)
class Job:
    """What the process loads."""

    folder: Path
    settings: TargetConfig
    layer_ids: tuple[int, ...]
    last_state: bool
    wire: Literal["full", "fp8"]
    device: str
    random_weights: bool
    vocabulary: int


@dataclass(frozen=True)
class Shape:
    """One batch."""

    name: str
    lengths: tuple[int, ...]
    """Tokens of each document."""
    slots: int = 1
    """Messages of this size to hold memory for."""

    @property
    def tokens(self) -> int:
        """Tokens of the batch."""
        return sum(self.lengths)


@dataclass(frozen=True)
class Loaded:
    """What is known of a target once it is loaded."""

    gpu: str
    """The GPU's name, or `cpu`."""
    dtype: str
    layout: str
    """How documents are kept apart: `packed` or `rows`."""
    not_packed_because: str
    weights_bytes: int
    bytes_per_token: int
    """Of a message."""
    memory_bytes: int | None = None
    """Of the GPU; None on the CPU."""
    other_bytes: int = 0
    """Of the GPU's memory, what is neither free nor this process's to allocate: the driver's, other processes'."""


@dataclass(frozen=True)
class Timing:
    """A batch that ran."""

    seconds: float
    """The median."""
    peak_bytes: int
    """On a GPU the greatest sum of allocations, weights included; on the CPU the process's resident memory."""


@dataclass(frozen=True)
class Failure:
    """Something that did not work, and what remains of the process."""

    reason: str
    refused: bool = False
    """It is the user's to mend: no other shape will work either."""
    ends: bool = False
    """The process cannot go on."""


class TargetProcess:
    """The parent's end. Within its block the target is loaded; however the block ends, the process is gone."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None

    def __enter__(self) -> TargetProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @property
    def pid(self) -> int | None:
        """Of the process, None where it does not run."""
        return self._process.pid if self._process else None

    def matrix_tflops(self, shape_MKN: tuple[int, int, int]) -> float:
        """The rate of matrix products of the target's type, measured before the target is loaded; UserError if none."""
        self._start()
        answer = self._ask(shape_MKN)
        if isinstance(answer, Failure):
            raise UserError(f"matrix products of {' x '.join(map(str, shape_MKN))} failed: {answer.reason}")
        assert isinstance(answer, float)
        return answer

    def load(self) -> Loaded:
        """Loads the target; UserError where it cannot be."""
        if self._process is None:
            self._start()
        answer = self._ask(None)
        if isinstance(answer, Failure):
            self._end()
            raise UserError(
                answer.reason if answer.refused else f"target {self._job.folder} cannot be loaded: {answer.reason}"
            )
        assert isinstance(answer, Loaded)
        return answer

    def run(self, shape: Shape) -> Timing | str:
        """The time and memory of a batch, or why it did not run; UserError where none would."""
        if self._process is None:
            try:
                self.load()
            except UserError as error:
                return str(error)
        answer = self._ask(shape)
        if isinstance(answer, Failure):
            if answer.refused:
                raise UserError(answer.reason)
            return answer.reason
        assert isinstance(answer, Timing)
        return answer

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would take CUDA and locks with it
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(self._job, theirs), name="probe")
        heeds = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as it will ignore Ctrl-C, on which this process ends it
        try:
            self._process.start()
        finally:
            signal.signal(signal.SIGINT, heeds)
        theirs.close()

    def _ask(self, question: tuple[int, int, int] | Shape | None) -> object:
        """The process's answer, or a Failure that says how it ended."""
        assert self._pipe is not None and self._process is not None
        answer: object = None
        try:
            self._pipe.send(question)
            wait([self._pipe, self._process.sentinel])
            if self._pipe.poll():
                answer = self._pipe.recv()
        except (EOFError, OSError):
            pass  # it ended before it could take the question, or in the middle of the answer
        if answer is None:
            self._process.join()
            answer = Failure(_death(self._process.exitcode or 0), ends=True)
        if isinstance(answer, Failure) and answer.ends:
            self._end()
        return answer

    def _end(self) -> None:
        if self._process is not None and self._pipe is not None:
            self._process.kill()  # it may be within a kernel, and has nothing to put in order
            self._process.join()
            self._pipe.close()
        self._process = self._pipe = None


def _death(code: int) -> str:
    """Why a process that gave no answer ended. A SIGKILL that nobody sent is the system's, out of memory."""
    if code == -signal.SIGKILL:
        return f"{OUT_OF_MEMORY} (killed by SIGKILL)"
    return f"crashed ({f'killed by {signal.Signals(-code).name}' if code < 0 else f'ended with code {code}'})"


def _serve(job: Job, pipe: Connection) -> None:
    """The process: answers each question of the parent until there is none, or until an answer says that it ends."""
    os.dup2(2, 1)  # stdout is for the parent's data
    threading.Thread(target=_end_with_parent, daemon=True).start()
    runner = _Runner(job)
    while True:
        try:
            answer = _answer(runner, pipe.recv())
        except EOFError:
            return
        pipe.send(answer)
        if isinstance(answer, Failure) and answer.ends:
            return


def _answer(runner: _Runner, question: tuple[int, int, int] | Shape | None) -> object:
    """To a matrix product's shape its rate, to a batch's its Timing, to None the Loaded target; or a Failure."""
    if question is None:
        return _attempt(runner.load)
    if isinstance(question, Shape):
        return runner.clear(_attempt(functools.partial(runner.run, question)))
    return _attempt(functools.partial(runner.matrix_tflops, question))


def _end_with_parent() -> None:
    """A killed parent cannot end this process, which would keep the GPU's memory."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _attempt(work: Callable[[], object]) -> object:
    """What `work` returns, or its Failure. No reference to the exception is left, whose frames hold tensors."""
    try:
        return work()
    except UserError as error:
        return Failure(str(error), refused=True)
    except Exception as error:  # of any kernel or library: the table is to say it, and go on with the next shape
        text = " ".join(str(error).split())
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return Failure(OUT_OF_MEMORY)
        if any(words in text.lower() for words in _OUT_OF_MEMORY_WORDS):
            return Failure(OUT_OF_MEMORY, ends=torch.cuda.is_initialized())
        return Failure(f"crashed ({type(error).__name__}: {text[:200]})", ends=True)


class _Runner:
    """The child's end: the target on its device."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._device = torch.device(job.device)
        self._cuda = self._device.type == "cuda"
        self._forward: TargetForward | None = None
        self._weights_bytes = 0

    @torch.inference_mode()
    def matrix_tflops(self, shape_MKN: tuple[int, int, int]) -> float:
        """The median rate of products [M, K] x [K, N] of the target's type over several hundred milliseconds."""
        M, K, N = shape_MKN
        dtype = torch_dtype(self._job.settings.dtype, self._device)
        a_MK, b_KN = (torch.randn(shape, device=self._device, dtype=dtype) for shape in ((M, K), (K, N)))
        out_MN = a_MK @ b_KN

        def products(count: int) -> None:
            for _ in range(count):
                torch.mm(a_MK, b_KN, out=out_MN)

        products(3)
        count = math.ceil(PRODUCTS_S / min(self._seconds(lambda: products(1), 3)))
        products(count)  # clocks rise
        return 2 * M * K * N * count / statistics.median(self._seconds(lambda: products(count), 5)) / 1e12

    def load(self) -> Loaded:
        """Loads the target; UserError where it cannot be."""
        job = self._job
        self._clear()  # the matrix products' memory
        self._forward = forward = TargetForward(
            job.folder,
            job.settings,
            job.layer_ids,
            self._device,
            last_state=job.last_state,
            wire=job.wire,
            random_weights=job.random_weights,
        )
        self._clear()
        dtype = str(forward.dtype).removeprefix("torch.")
        layout = forward.layout, forward.not_packed_because
        if not self._cuda:
            weights_bytes = int(used_memory_gib(self._device) * GIB)
            return Loaded("cpu", dtype, *layout, weights_bytes, forward.wire.bytes_per_token)
        self._weights_bytes = torch.cuda.memory_allocated()
        free_bytes, memory_bytes = torch.cuda.mem_get_info()
        return Loaded(
            torch.cuda.get_device_name(),
            dtype,
            *layout,
            self._weights_bytes,
            forward.wire.bytes_per_token,
            memory_bytes,
            memory_bytes - free_bytes - torch.cuda.memory_reserved(),
        )

    def run(self, shape: Shape) -> Timing:
        """Runs the batch until its time is known: once to compile and tune, once alone, then back to back."""
        assert self._forward is not None
        forward, wire = self._forward, self._forward.wire
        lengths_N = np.array(shape.lengths, np.int64)
        tokens_T = torch.from_numpy(np.random.default_rng(0).integers(0, self._job.vocabulary, shape.tokens))
        slots = ring(shape.slots, shape.tokens, wire.row_size, wire.slot_dtype, self._device)

        def batch() -> None:
            forward.capture(tokens_T, lengths_N, slots[0])

        self._seconds(batch, 1)
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        first_s = self._seconds(batch, 1)
        runs = max(LEAST_RUNS, min(MOST_RUNS, math.ceil(ENOUGH_S / first_s[0])))
        seconds = first_s + self._seconds(batch, runs - 1)
        return Timing(statistics.median(seconds), int(used_memory_gib(self._device) * GIB))

    def clear(self, answer: object) -> object:
        """The answer to a shape, which ends the process where the shape's memory does not come back."""
        if isinstance(answer, Failure) and answer.ends:
            return answer  # the device may be beyond use
        self._clear()
        if self._cuda and isinstance(answer, Failure):
            lost_bytes = torch.cuda.memory_allocated() - self._weights_bytes
            return dataclasses.replace(answer, ends=lost_bytes > torch.cuda.mem_get_info()[1] // 100)
        return answer

    def _clear(self) -> None:
        gc.collect()
        if self._cuda:
            torch.cuda.empty_cache()

    def _seconds(self, work: Callable[[], object], count: int) -> list[float]:
        """Seconds of each of `count` runs of `work`, which on CUDA are queued without a wait in between."""
        if not self._cuda:
            starts_s = [time.perf_counter()]
            for _ in range(count):
                work()
                starts_s.append(time.perf_counter())
            return [end - start for start, end in itertools.pairwise(starts_s)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            work()
            event.record()
        events[-1].synchronize()  # sync: the measurement's end
        return [start.elapsed_time(end) / 1000 for start, end in itertools.pairwise(events)]
