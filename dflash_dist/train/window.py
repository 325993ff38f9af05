"""A trace window asked of a run that is going on: a request in its folder, which the first drafter rank answers.

The request is `profile/request.json`, the answer `profile/window.json`; both are whole once they are there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from dflash_dist.config import Config
from dflash_dist.errors import RunFailed, UserError
from dflash_dist.topology import Topology
from dflash_dist.train.metrics import read_metrics
from dflash_dist.train.run_folder import is_held, write_text
from dflash_profiling.throughput import step_slowdown
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


def pending_request(run_folder: Path) -> Request | None:
    """The request that waits for its answer; one look at the folder."""
    try:
        return Request(**json.loads((run_folder / REQUEST).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def answer(run_folder: Path, window: Window) -> None:
    """Tells who asked what will be recorded, and takes the request away."""
    write_text(run_folder / ANSWER, json.dumps(asdict(window)))
    (run_folder / REQUEST).unlink(missing_ok=True)


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
    request = Request(time.time_ns(), steps, stack_steps)
    folder.mkdir(exist_ok=True)
    before = set(folder.rglob(TRACES))
    write_text(run_folder / REQUEST, json.dumps(asdict(request)))
    try:
        window = _answer_to(run_folder, request.number)
        if not window.fits:
            raise UserError(f"{run_folder.name} ends before a window of {request.length} steps could; lower --steps")
        last = window.start_step + request.length - 1
        say(f"steps {window.start_step} to {last} of {window.ranks} ranks are recorded")
        files = window.ranks * (2 if stack_steps else 1)
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
    say_slowdown(folder, window.first_drafter, say)


def say_slowdown(folder: Path, rank: int, say: Callable[[str], None]) -> None:
    """Tells how much longer steps took in a rank's newest window than before it, where its trace knows."""
    paths = sorted(folder.glob(f"rank{rank}.{TRACES}"))
    try:
        slowdown = step_slowdown(read_metadata(paths[-1])) if paths else None
    except TraceError as error:
        say(f"warning: {error}")
        return
    if slowdown is not None:
        say(f"steps in the window took {slowdown:.2f} of those before it")


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
