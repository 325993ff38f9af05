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

REQUEST, ANSWER = "profile/request.json", "profile/window.json"
POLL_S = 0.2


@dataclass(frozen=True)
class Window:
    """What the run answers."""

    request: int
    """The number of the request."""
    start_step: int
    steps: int
    """0: refused, since the run ends before."""
    ranks: int
    """How many write a trace; those of other nodes perhaps elsewhere."""
    written_by: int
    """A step that no rank reaches before it has written its trace."""


def steps_ahead(config: Config, topology: Topology, lag_steps: int) -> int:
    """Steps from the one that the first drafter rank has done to the first that no rank can have begun.

    The host of a drafter rank is at most `lag_steps` ahead; a target rank by what both ends of a channel hold, and by
    the batches that it has begun.
    """
    batches = (2 * config.schedule.ring_slots + 3) * topology.num_drafters * topology.num_targets
    return 1 + lag_steps + -(-batches // config.schedule.batches_per_step)


def pending_request(run_folder: Path) -> tuple[int, int] | None:
    """(number, steps) of a request that waits for its answer; one look at the folder."""
    try:
        request = json.loads((run_folder / REQUEST).read_text(encoding="utf-8"))
        return int(request["number"]), int(request["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def answer(run_folder: Path, window: Window) -> None:
    """Tells who asked what will be recorded, and takes the request away."""
    write_text(run_folder / ANSWER, json.dumps(asdict(window)))
    (run_folder / REQUEST).unlink(missing_ok=True)


def ask_window(run_folder: Path, steps: int, say: Callable[[str], None]) -> list[Path]:
    """Asks the running process for a window and waits for it; the traces' paths.

    UserError where nobody trains the run, or it ends too soon; RunFailed where it ends before all traces are there.
    """
    folder = run_folder / "profile"
    if not is_held(run_folder):
        raise UserError(
            f"nobody trains {run_folder.name} now; for a short run of its own: dflash-dist profile run --config FILE "
            "--topo T-D"
        )
    number = time.time_ns()
    folder.mkdir(exist_ok=True)
    before = set(folder.glob("rank*.pt.trace.json.gz"))
    write_text(run_folder / REQUEST, json.dumps({"number": number, "steps": steps}))
    try:
        window = _answer_to(run_folder, number)
        if not window.steps:
            raise UserError(f"{run_folder.name} ends before a window of {steps} steps could; lower --steps")
        say(f"steps {window.start_step} to {window.start_step + window.steps - 1} of {window.ranks} ranks are recorded")
        while len(traces := set(folder.glob("rank*.pt.trace.json.gz")) - before) < window.ranks:
            _check_held(run_folder, f"the window: {len(traces)} of {window.ranks} traces were written")
            if _last_step(run_folder) >= window.written_by:
                say(
                    f"{len(traces)} of {window.ranks} traces are here; other nodes may keep theirs in their own folders"
                )
                break
            time.sleep(POLL_S)
    finally:
        (run_folder / REQUEST).unlink(missing_ok=True)
    return sorted(traces)


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
