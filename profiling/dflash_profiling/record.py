"""Named spans, and a window of steps in which a rank writes a torch.profiler trace.

The one module of this package that needs torch. One window is open at a time in a process.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

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


class TraceWindow:
    """Traces the steps `start_step` .. `start_step + steps - 1` of one rank's loop into `folder`; none if `steps` is 0.

    The step before is profiled and thrown away, because the profiler's own start-up falls into it. The trace holds
    `role`, `rank` and each key of `metadata` (JSON-able values) at its top level, and a `ProfilerStep#n` span for each
    call of `advance`, with its step. Nothing here raises into the loop: what goes wrong is said on stderr and ends the
    window.
    """

    def __init__(
        self, folder: Path, rank: int, role: str, start_step: int, steps: int, metadata: dict[str, Any]
    ) -> None:
        self.folder = folder
        self.rank = rank
        self.start_step = start_step
        self.end_step = start_step + steps
        self.metadata = {"role": role, "rank": rank, **metadata}
        self._profiler: profile | None = None
        self._done = steps == 0

    def move(self, start_step: int, steps: int) -> None:
        """Trace these steps, unless a window is open; one that lies ahead gives way, and the last one is not repeated.

        To be called before `advance(start_step - 1)`; later the window has the steps that are left of it.
        """
        if self._profiler is None and (start_step, start_step + steps) != (self.start_step, self.end_step):
            self.start_step, self.end_step, self._done = start_step, start_step + steps, steps == 0

    def advance(self, step: int) -> None:
        """Open, continue or end the trace; called by the loop at the start of each step, with its number.

        A loop may leave steps out, and may call this several times in one step, such as once a batch.
        """
        if self._done or step < self.start_step - 1:
            return
        if step >= self.end_step:
            self.close()
            return
        try:
            if self._profiler is None:
                self._open()
            if step >= self.start_step:
                self._record(step)
        except Exception as error:
            self._give_up("be taken", error)

    def close(self) -> None:
        """End the window at the end of the loop; what was recorded so far is written."""
        global _recording
        profiler, recorded = self._profiler, _recording
        self._profiler, self._done, _recording = None, True, False
        if profiler is None:
            return
        try:
            profiler.stop()
            if recorded:
                self._write(profiler)
        except Exception as error:
            self._give_up("be written", error)

    def _open(self) -> None:
        """Start the warm-up; it lasts until `_record`, a whole step where the loop began before the window."""
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(
            activities=activities,
            schedule=lambda _: ProfilerAction.RECORD if _recording else ProfilerAction.WARMUP,
            record_shapes=True,
            experimental_config=_all_threads(),
        )
        for key, value in self.metadata.items():
            profiler.preset_metadata_json(key, json.dumps(value))
        profiler.start()
        self._profiler = profiler

    def _record(self, step: int) -> None:
        global _recording
        assert self._profiler is not None
        _recording = True
        self._profiler.step_num = step - 1  # which step() counts up: ProfilerStep#n carries the loop's own number
        self._profiler.step()

    def _write(self, profiler: profile) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        stem = f"rank{self.rank}.{time.time_ns()}"
        part = self.folder / f"{stem}.part.gz"  # no reader takes this name for a trace
        try:
            profiler.export_chrome_trace(str(part))
            part.rename(self.folder / f"{stem}.pt.trace.json.gz")
        finally:
            part.unlink(missing_ok=True)

    def _give_up(self, what: str, error: Exception) -> None:
        global _recording
        profiler, self._profiler = self._profiler, None
        self._done, _recording = True, False
        if profiler is not None:
            with suppress(Exception):
                profiler.stop()
        text = " ".join(str(error).split())
        print(
            f"warning: the trace of rank {self.rank} could not {what}: {type(error).__name__}: {text}", file=sys.stderr
        )
