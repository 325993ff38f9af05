"""Starting one process a rank on this machine through torch's elastic launcher, and ending the world in good order."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, get_error_handler
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from dflash_dist.check.host import usable_cores
from dflash_dist.errors import RunFailed, UserError
from dflash_dist.topology import Topology
from dflash_dist.train.liveness import WORLD_FOLDER, read_place, read_verdict

LAUNCHED = "DFLASH_DIST_LAUNCHED"
"""Set in the environment of ranks that our own launcher started."""
STOP_SIGNAL = signal.SIGUSR1
"""What our launcher sends to its ranks for a checkpoint and an orderly end; SIGTERM ends them at once."""
USER_ERROR = "UserError: "
USER_ERROR_CODE = 2
WORLD_PREFIX = ".world_"
"""What the names of the folders in a run's begin with through which a world's ranks tell its launcher of their end."""


def in_world() -> bool:
    """Whether a torchrun, ours or another, started this process as a rank."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def launched_here() -> bool:
    """Whether our own launcher started this rank."""
    return LAUNCHED in os.environ


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals on which this rank checkpoints and ends."""
    return (STOP_SIGNAL,) if launched_here() else (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


def launch_world(topology: Topology, arguments: list[str], run_folder: Path, stopper: Stopper) -> None:
    """Runs `dflash-dist` with `arguments` on every rank, to the end or until `stopper` has stopped it.

    RunFailed, or UserError where a rank's input was bad or the disk is full, names the rank that failed first.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # we say what failed ourselves
    os.environ[LAUNCHED] = "1"
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // topology.ranks_per_node)))
    with _world_folder(run_folder) as folder:
        os.environ[WORLD_FOLDER] = folder
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=topology.ranks_per_node,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(folder),
            signals_to_handle="SIGQUIT",  # the others are the stopper's
        )
        try:
            elastic_launch(config, sys.executable)(*_path_options(), "-m", "dflash_dist", *arguments)
        except ChildFailedError as error:
            # A rank that has not begun to listen ends of the signal itself, and takes others with it; without such a
            # rank it is a failure of its own, such as a full disk at the last checkpoint.
            too_early = any(failure.exitcode == -STOP_SIGNAL for failure in error.failures.values())
            if stopper.received is None or not too_early:
                raise _first_cause(error, topology, Path(folder)) from None
        except json.JSONDecodeError:
            # torch reads what a rank wrote of its end, and that was cut short.
            raise RunFailed("a rank was killed while it told why it had failed; start again to resume") from None
        except SignalException:
            stopper.received = signal.SIGINT
            raise KeyboardInterrupt from None


@contextlib.contextmanager
def _world_folder(run_folder: Path) -> Iterator[str]:
    """A new folder in the run's, for the block; what stays of it goes at the next start. UserError: a full disk."""
    try:
        with tempfile.TemporaryDirectory(
            prefix=WORLD_PREFIX, dir=run_folder.absolute(), ignore_cleanup_errors=True
        ) as folder:
            yield folder
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            f"run folder {run_folder} cannot be written: {error.strerror}; free some space and start again to resume"
        ) from None


def remove_left_worlds(run_folder: Path) -> None:
    """Removes what a launcher that was killed has left. Only who holds the run's lock may call this."""
    for left in run_folder.glob(f"{WORLD_PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)


def _path_options() -> list[str]:
    """Python's options with which ranks import from where this process does.

    With `-m` alone they would look into the current folder first, where a queue.py stands in for Python's own.
    """
    return [] if {"", os.getcwd()} & {*sys.path} else ["-P"]


class Stopper:
    """Within its block, turns the first of its signals into an orderly end: ranks checkpoint, and then the world ends.

    Where no rank runs, and at a second SIGINT, the block itself ends at once. `received` tells the last signal.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stopper:
        hang_up = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)  # as nohup asks
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, *hang_up):
            self._previous[number] = signal.signal(number, self._stop)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        return kind is KeyboardInterrupt

    def _stop(self, number: int, frame: Any) -> None:
        again, self.received = self.received is not None, signal.Signals(number)
        if not _signal_ranks() or (again and number == signal.SIGINT):
            raise KeyboardInterrupt
        print("stopping: within a few steps, then a checkpoint is written", file=sys.stderr)


def _signal_ranks() -> int:
    """Asks this process's ranks to checkpoint and end; returns how many there are."""
    count = 0
    for child in psutil.Process().children():
        try:
            if "dflash_dist" in child.cmdline():
                child.send_signal(STOP_SIGNAL)
                count += 1
        except psutil.Error:
            continue  # it has just ended
    return count


def record_failure(error: BaseException) -> None:
    """Leaves a rank's error, whole or not at all, where the launcher finds it."""
    handler = get_error_handler()
    handler.initialize()
    try:
        handler.record_exception(error)
    except OSError:  # a full disk
        with contextlib.suppress(OSError):
            os.unlink(os.environ["TORCHELASTIC_ERROR_FILE"])


def _first_cause(error: ChildFailedError, topology: Topology, folder: Path) -> Exception:
    """The failure that the others followed from: what the ranks found, else who was killed, else the earliest."""
    verdict = read_verdict(folder)
    if verdict is not None and not (verdict.is_gone and verdict.rank in error.failures):
        return (UserError if verdict.user_error else RunFailed)(verdict.message)
    failures = error.failures
    killed = [r for r, f in failures.items() if f.exitcode < 0 and f.exitcode not in (-signal.SIGTERM, -STOP_SIGNAL)]
    first = min(failures, key=lambda rank: failures[rank].timestamp)
    rank = verdict.rank if verdict is not None else [*killed, first][0]
    failure = failures[rank]
    message = _message(failure)
    if message.startswith(USER_ERROR):
        return UserError(message.removeprefix(USER_ERROR))
    message = f"rank {rank} ({topology.role(rank)}) {message}; its last batch: {read_place(folder, rank)}"
    if failure.exitcode == USER_ERROR_CODE:  # the rank's message, and the verdict, did not come to lie on the disk
        return UserError(f"{message}; is the disk of {folder.parent} full? free some space and start again to resume")
    return RunFailed(message)


def _message(failure: ProcessFailure) -> str:
    """What became of a rank that ended before it could tell the others, or while it joined them."""
    if failure.exitcode < 0:
        return f"was killed by {signal.Signals(-failure.exitcode).name}"
    try:
        with open(failure.error_file, encoding="utf-8") as file:
            message = json.load(file)["message"]
    except (OSError, ValueError, KeyError):
        return f"ended with code {failure.exitcode}"
    text = message["message"] if isinstance(message, dict) else str(message)
    text = text.splitlines()[0] if text else "without a message"  # --debug shows the rest
    return text if text.startswith(USER_ERROR) else f"failed: {text.removeprefix('RunFailed: ')}"
