"""A trace window asked of a run that is going on: a request in its folder, which the first drafter rank answers.

The request is `profile/request.json`, the answer `profile/window.json`; both are whole once they are there.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from dflash_dist.config import Config
from dflash_dist.errors import RunFailed, UserError
from dflash_dist.topology import Topology
from dflash_dist.train.metrics import read_metrics
from dflash_dist.train.run_folder import is_held, write_text
from dflash_profiling.throughput import slowdown_warning, step_slowdown
from dflash_profiling.trace_file import TraceError, read_metadata

REQUEST, ANSWER = "profile/request.json", "profile/window.json"
TRACES = "*.pt.trace.json.gz"
POLL_S = 0.2


@dataclass(frozen=True)
class Request:
    """What is asked of the run."""

    number: int
    steps: int
    stack_steps: int
    """With Python stacks, in a trace of their own."""

    @property
    def length(self) -> int:
        """Steps from the first to the last; one is left out before those with stacks."""
        return self.steps + (1 + self.stack_steps if self.stack_steps else 0)


@dataclass(frozen=True)
class Window:
    """What the run answers."""

    request: int
    """The number of the request."""
    start_step: int
    fits: bool
    """Whether the run does not end before."""
    ranks: int
    """How many write a trace; those of other nodes perhaps elsewhere."""
    first_drafter: int
    """The rank that answers."""
    written_by: int
    """A step that no rank reaches before it has written its trace."""


def steps_ahead(config: Config, topology: Topology, lag_steps: int) -> int:
    """Steps from the one that the first drafter rank has done to the first that no rank can have begun.

    The host of a drafter rank is at most `lag_steps` ahead; a target rank by what both ends of a channel hold, and by
    the batches that it has begun.
    """
    batches = (2 * config.schedule.ring_slots + 3) * topology.num_drafters * topology.num_targets
    return 1 + lag_steps + -(-batches // config.schedule.batches_per_step)


class Requests:
    """The end of the rank that answers; `ahead`: see `steps_ahead`, `total_steps`: of the run, `ranks`: that trace."""

    def __init__(self, run_folder: Path, ahead: int, total_steps: int, ranks: int, rank: int) -> None:
        self._folder, self._ahead, self._total_steps = run_folder, ahead, total_steps
        self._ranks, self._rank = ranks, rank
        self._busy_until = 0
        """A window that was granted ends before this step: the next request waits until then."""
        self._seen: int | None = None

    def take(self, step: int) -> tuple[int, Request] | None:
        """The first step of a window to record and what was asked, once whoever asks can know; called after `step`.

        Never raises: a run does not end because a window cannot be had. What cannot be answered is not recorded.
        """
        request = _pending(self._folder) if step >= self._busy_until else None
        if request is None or request.number == self._seen:
            return None
        self._seen = request.number
        start_step = step + self._ahead
        end_step = start_step + request.length
        fits = end_step - 1 <= self._total_steps
        window = Window(request.number, start_step, fits, self._ranks, self._rank, end_step + self._ahead)
        try:
            write_text(self._folder / ANSWER, json.dumps(asdict(window)))
            (self._folder / REQUEST).unlink(missing_ok=True)
        except (OSError, UserError) as error:
            print(f"warning: no trace is taken, as it cannot be answered: {error}", file=sys.stderr)
            return None
        if not fits:
            return None
        self._busy_until = end_step
        return start_step, request


def _pending(run_folder: Path) -> Request | None:
    """The request that waits for its answer; one look at the folder."""
    try:
        request = Request(**json.loads((run_folder / REQUEST).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return request if all(type(value) is int and value >= 0 for value in asdict(request).values()) else None


@contextlib.contextmanager
def _alone(folder: Path, name: str) -> Iterator[None]:
    """Keeps others from asking, where the file system has locks; UserError if another one asks already."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UserError(f"another command waits for a window of {name}; ask again when it has ended") from None
    except OSError:
        pass
    try:
        yield
    finally:
        os.close(handle)


def ask_window(run_folder: Path, steps: int, stack_steps: int, say: Callable[[str], None]) -> None:
    """Asks the running process for a window and waits for its traces.

    UserError where nobody trains the run, or it ends too soon; RunFailed where it ends before all traces are there.
    """
    folder = run_folder / "profile"
    if not is_held(run_folder):
        raise UserError(
            f"nobody trains {run_folder.name} now; for a short run of its own: dflash-dist profile run --config FILE "
            "--topo T-D"
        )
    folder.mkdir(exist_ok=True)
    with _alone(folder, run_folder.name):
        first_drafter = _ask(run_folder, Request(time.time_ns(), steps, stack_steps), say)
    say_slowdown(folder, first_drafter, steps, say)


def _ask(run_folder: Path, request: Request, say: Callable[[str], None]) -> int:
    """Returns when the traces are there, with the rank that answered."""
    folder = run_folder / "profile"
    before = set(folder.rglob(TRACES))
    write_text(run_folder / REQUEST, json.dumps(asdict(request)))
    try:
        window = _answer_to(run_folder, request.number)
        if not window.fits:
            raise UserError(f"{run_folder.name} ends before a window of {request.length} steps could; lower --steps")
        last = window.start_step + request.length - 1
        say(f"steps {window.start_step} to {last} of {window.ranks} ranks are recorded")
        files = window.ranks * (2 if request.stack_steps else 1)
        while len(traces := set(folder.rglob(TRACES)) - before) < files:
            _check_held(run_folder, f"the window: {len(traces)} of {files} traces were written")
            if _last_step(run_folder) >= window.written_by:
                say(
                    f"{len(traces)} of {files} traces are here; a rank without a batch in those steps writes none, and "
                    "other nodes may keep theirs in their own folders"
                )
                break
            time.sleep(POLL_S)
    finally:
        (run_folder / REQUEST).unlink(missing_ok=True)
    return window.first_drafter


def say_slowdown(folder: Path, rank: int, steps: int, say: Callable[[str], None]) -> None:
    """Tells how much longer steps took in a rank's newest window than before it, where its trace knows.

    And first, if the run ended before the window's `steps` were over.
    """
    paths = sorted(folder.glob(f"rank{rank}.{TRACES}"))
    try:
        metadata = read_metadata(paths[-1]) if paths else {}
    except TraceError as error:
        say(f"warning: {error}")
        return
    if len(times := metadata.get("step_ms", [0] * steps)) < steps:
        say(
            f"the run ended in the window: the traces hold {len(times)} of its {steps} steps, and perhaps a part of one"
        )
    slowdown = step_slowdown(metadata)
    if slowdown is not None:
        say(slowdown_warning(slowdown) or f"a step of the window took {slowdown:.2f} of those before it")


def _answer_to(run_folder: Path, number: int) -> Window:
    while True:
        try:
            window = Window(**json.loads((run_folder / ANSWER).read_text(encoding="utf-8")))
            if window.request == number:
                return window
        except (OSError, ValueError, TypeError):
            pass
        _check_held(run_folder, "it answered")
        time.sleep(POLL_S)


def _last_step(run_folder: Path) -> int:
    rows = read_metrics(run_folder)
    return int(rows[-1]["step"]) if rows else 0


def _check_held(run_folder: Path, what: str) -> None:
    if not is_held(run_folder):
        raise RunFailed(f"{run_folder.name} ended before {what}")
