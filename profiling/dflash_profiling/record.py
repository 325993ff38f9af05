"""Named spans, and a window of steps in which a rank writes a torch.profiler trace.

The one module of this package that needs torch. One window is open at a time in a process.
"""

from __future__ import annotations

import gzip
import json
import shutil
import sys
import tempfile
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

STACKS = "stacks"
"""The folder, within that of the traces, of those with Python stacks: no reader of the one looks into the other."""
STEPS_BEFORE = 10
_GZIP_LEVEL = 3
"""A tenth of the time of torch's own level, 9, while the loop waits; 40 MB take 0.13 s instead of 1.4."""
_NO_SPAN: AbstractContextManager[None] = nullcontext()
_recording = False


def span(name: str) -> AbstractContextManager[Any]:
    """A context whose extent appears as `name` in the trace; outside a window, one that calls nothing of torch."""
    return record_function(name) if _recording else _NO_SPAN


def _all_threads() -> Any:
    """torch's switch that records the work of every thread, such as one that loads; None where it has none."""
    try:
        return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        return None


@dataclass(frozen=True)
class _Part:
    """Steps that go into one file."""

    start_step: int
    end_step: int
    """The first one after them."""
    with_stack: bool


class TraceWindow:
    """Traces the steps `start_step` .. `start_step + steps - 1` of one rank's loop into `folder`; none if `steps` is 0.

    Then, one step later, `stack_steps` more with Python stacks into `folder/stacks`: stacks make steps longer, so they
    are never in the same file as times to go by.

    The step before each is profiled and thrown away, because the profiler's own start-up falls into it. The trace holds
    `role`, `rank` and each key of `metadata` (JSON-able values) at its top level, the first and last step asked for
    (`window`), how long steps took on the host in the window (`step_ms`) and before it (`step_ms_before`), and a
    `ProfilerStep#n` span for each call of `advance`, with its step. Nothing here raises into the loop: what goes wrong
    is said on stderr and ends the window.

    `all_threads`: whether what other threads do is recorded, too. Not where one of them has operations of gloo under
    way: torch would write the end of one that outlives the window into memory that is freed by then (seen with torch
    2.13 as heap corruption).
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        role: str,
        start_step: int,
        steps: int,
        metadata: dict[str, Any],
        stack_steps: int = 0,
        all_threads: bool = False,
    ) -> None:
        self._all_threads = all_threads
        self.folder = folder
        self.rank = rank
        self.metadata = {"role": role, "rank": rank, **metadata}
        self._profiler: profile | None = None
        self._asked = (start_step, steps, stack_steps)
        self._parts = _parts(*self._asked)
        self._times = _StepTimes()

    @property
    def step(self) -> int | None:
        """The loop's step by the last `advance`; None before the first. Any thread may ask."""
        return self._times.step

    def move(self, start_step: int, steps: int, stack_steps: int = 0) -> None:
        """Trace these steps, unless a window is open; one that lies ahead gives way, and the last one is not repeated.

        To be called before `advance(start_step - 1)`; later the window has the steps that are left of it.
        """
        if self._profiler is None and (start_step, steps, stack_steps) != self._asked:
            self._asked = (start_step, steps, stack_steps)
            self._parts = _parts(*self._asked)

    def advance(self, step: int) -> None:
        """Open, continue or end the trace; called by the loop at the start of each step, with its number.

        A loop may leave steps out, and may call this several times in one step, such as once a batch.
        """
        self._times.end(step, recorded=_recording, profiled=self._profiler is not None)
        self._advance(step)
        self._times.begin(step)

    def _advance(self, step: int) -> None:
        while self._parts and step >= self._parts[0].end_step:
            self._end_part()
        if not self._parts or step < self._parts[0].start_step - 1:
            return
        try:
            if self._profiler is None:
                self._open(self._parts[0])
            if step >= self._parts[0].start_step:
                self._record(step)
        except Exception as error:
            self._give_up("be taken", error)

    def close(self) -> None:
        """End the window at the end of the loop; what was recorded so far is written."""
        if self._parts:
            self._end_part()
        self._parts.clear()

    def _end_part(self) -> None:
        global _recording
        part = self._parts.popleft()
        profiler, recorded = self._profiler, _recording
        self._profiler, _recording = None, False
        if profiler is None:
            return
        try:
            for key, value in self._times.facts().items():
                profiler.add_metadata_json(key, json.dumps(value))
            profiler.stop()
            if recorded:
                self._write(profiler, self.folder / STACKS if part.with_stack else self.folder)
        except Exception as error:
            self._give_up("be written", error)

    def _open(self, part: _Part) -> None:
        """Start the warm-up; it lasts until `_record`, a whole step where the loop began before the window."""
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(
            activities=activities,
            schedule=lambda _: ProfilerAction.RECORD if _recording else ProfilerAction.WARMUP,
            record_shapes=True,
            with_stack=part.with_stack,
            experimental_config=_all_threads() if self._all_threads else None,
        )
        window = [part.start_step, part.end_step - 1]
        for key, value in {**self.metadata, "window": window}.items():
            profiler.preset_metadata_json(key, json.dumps(value))
        profiler.start()
        self._profiler = profiler
        self._times.open()

    def _record(self, step: int) -> None:
        global _recording
        assert self._profiler is not None
        _recording = True
        self._profiler.step_num = step - 1  # which step() counts up: ProfilerStep#n carries the loop's own number
        self._profiler.step()

    def _write(self, profiler: profile, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"rank{self.rank}.{time.time_ns()}"
        part = folder / f"{stem}.part.gz"  # no reader takes this name for a trace
        try:
            with tempfile.NamedTemporaryFile(suffix=".json") as plain:
                profiler.export_chrome_trace(plain.name)
                _check_whole(Path(plain.name))
                with Path(plain.name).open("rb") as source, gzip.open(part, "wb", _GZIP_LEVEL) as packed:
                    shutil.copyfileobj(source, packed)
            part.rename(folder / f"{stem}.pt.trace.json.gz")
        finally:
            part.unlink(missing_ok=True)

    def _give_up(self, what: str, error: Exception) -> None:
        global _recording
        profiler, self._profiler = self._profiler, None
        _recording = False
        self._parts.clear()
        if profiler is not None:
            with suppress(Exception):
                profiler.stop()
        text = " ".join(str(error).split())
        print(
            f"warning: the trace of rank {self.rank} could not {what}: {type(error).__name__}: {text}", file=sys.stderr
        )


def _check_whole(path: Path) -> None:
    """OSError where a trace is cut: of a full disk torch tells nobody but its log."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64))
        if not file.read().rstrip().endswith(b"}"):
            raise OSError(f"torch wrote but a part of it to {path.parent}; free some space there, or set TMPDIR")


def _parts(start_step: int, steps: int, stack_steps: int) -> deque[_Part]:
    """Those of a window that have steps."""
    end_step = start_step + steps
    stacks = _Part(end_step + 1, end_step + 1 + stack_steps, with_stack=True)
    parts = (_Part(start_step, end_step, with_stack=False), stacks)
    return deque(part for part in parts if part.end_step > part.start_step)


class _StepTimes:
    """How long the loop's steps take on the host, without what `advance` itself takes, such as writing a trace."""

    def __init__(self) -> None:
        self.step: int | None = None
        """The one that goes on."""
        self._began_s = 0.0
        self._is_first = True
        self._before_ms: deque[float] = deque(maxlen=STEPS_BEFORE)
        self._inside_ms: list[float] = []

    def open(self) -> None:
        """A window begins."""
        self._inside_ms = []

    def end(self, step: int, recorded: bool, profiled: bool) -> None:
        """The step before is over, should `step` be another; the first one and one of warm-up count nowhere."""
        if self.step is None or step <= self.step:
            return
        took_ms = round(1e3 * (time.perf_counter() - self._began_s) / (step - self.step), 3)
        if recorded:
            self._inside_ms.append(took_ms)
        elif not profiled and not self._is_first:
            self._before_ms.append(took_ms)
        self._is_first = False

    def begin(self, step: int) -> None:
        """`step` goes on from here, or begins here."""
        if step != self.step:
            self.step, self._began_s = step, time.perf_counter()

    def facts(self) -> dict[str, list[float]]:
        """What a trace says of them."""
        return {"step_ms_before": list(self._before_ms), "step_ms": self._inside_ms}
