"""`dflash-dist train`: what comes before the world of ranks, the world, and what comes after it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil
import torch
import torch.distributed as dist

from dflash_dist.check import check, environment, has_errors
from dflash_dist.check.host import cache_folders
from dflash_dist.config import Config
from dflash_dist.data.prepare import print_report
from dflash_dist.drafter.model import DFlashDrafter
from dflash_dist.errors import RunFailed, UserError
from dflash_dist.evaluate.run import evaluate_drafter
from dflash_dist.export.plain import export_plain, serve_commands
from dflash_dist.target.package import target_folder
from dflash_dist.topology import Topology, check_devices
from dflash_dist.train.checkpoint import find_checkpoint, newest_checkpoint, set_damaged_aside
from dflash_dist.train.inputs import resolve_inputs
from dflash_dist.train.memory import check_memory, rank_memory
from dflash_dist.train.metrics import read_metrics, summary
from dflash_dist.train.run_folder import (
    CHECKPOINTS,
    FILLED,
    SUMMARY,
    check_name_is_free,
    check_writable,
    is_finished,
    lock_run,
    record_begin,
    run_folder,
    run_store,
    write_text,
)
from dflash_dist.train.world import (
    Stopper,
    in_world,
    launch_world,
    launched_here,
    remove_left_worlds,
    stop_signals,
)

Result = TypeVar("Result")


def train(
    config: Config,
    topology: Topology,
    device: str,
    run_name: str,
    arguments: list[str],
    *,
    finish: bool = True,
    allow_slow: bool = False,
    max_restarts: int = 0,
) -> int:
    """Trains run `run_name`, or goes on with it where it stopped; returns the exit code.

    `arguments` start the same command on every rank. `finish`: export and evaluate at the end. `allow_slow`: train even
    where the environment check finds errors. `max_restarts`: how often a world that failed starts again.
    """
    if max_restarts and in_world() and not launched_here():
        raise UserError(
            f"--max-restarts {max_restarts} is for worlds that this command starts; here torchrun starts them again: "
            "give it its own --max-restarts, or set MAX_RESTARTS for a script of launchers/"
        )
    if topology.nodes > 1 and not in_world():
        raise UserError(
            f"topology {topology} runs on {topology.nodes} nodes: start the command with torchrun on each of them, as "
            f"`launchers/torchrun.sh {topology} CONFIG` does"
        )
    device_type = check_devices(topology, torch.cuda.device_count(), device)
    folder = run_folder(config, run_name)
    os.environ.update(cache_folders(config.cache_dir))
    if not launched_here():
        check_name_is_free(config, folder)
        if is_finished(folder):
            if os.environ.get("RANK", "0") == "0":  # under another's torchrun every rank comes here
                print(f"run {run_name} is finished: see {folder}; --run NAME starts another", file=sys.stderr)
            return 0
    if in_world():
        return _train_as_rank(config, topology, device_type, folder, allow_slow)
    phases: dict[str, float] = {}
    with Stopper() as stopper, contextlib.ExitStack() as held:
        begun = begin_run(config, topology, device_type, folder, allow_slow)
        _timed(phases, "prepare", lambda: held.enter_context(begun))
        if not _trained(config, topology, folder):
            world = functools.partial(launch_world, topology, arguments, folder, stopper)
            _timed(phases, "train", lambda: _with_restarts(world, max_restarts, folder, stopper))
        if finish and stopper.received is None:
            finish_run(config, device_type, folder, phases)
    if stopper.received is None:
        return 0
    _print_resume_command(folder, arguments)
    return 130 if stopper.received == signal.SIGINT else 0


def _with_restarts(world: Callable[[], None], max_restarts: int, folder: Path, stopper: Stopper) -> None:
    """Runs `world` again after a failure, from its newest checkpoint, up to `max_restarts` times."""
    for restart in range(1, max_restarts + 1):
        try:
            return world()
        except RunFailed as error:
            if stopper.received is not None:
                raise
            set_damaged_aside(folder / CHECKPOINTS)
            checkpoint = newest_checkpoint(folder / CHECKPOINTS)
            where = f"after step {checkpoint.step}" if checkpoint else "from the beginning"
            print(f"error: {error}", file=sys.stderr)
            print(f"restart {restart} of {max_restarts}: the world goes on {where}", file=sys.stderr)
    return world()


def _print_resume_command(folder: Path, arguments: list[str]) -> None:
    module = Path(sys.argv[0]).name == "__main__.py"
    command = shlex.join([*([sys.executable, "-m", "dflash_dist"] if module else [sys.argv[0]]), *arguments])
    checkpoint = newest_checkpoint(folder / CHECKPOINTS)
    where = f"checkpoint of step {checkpoint.step}" if checkpoint else "no checkpoint yet"
    print(f"stopped ({where}); go on with: {command}", file=sys.stderr)


def _train_as_rank(config: Config, topology: Topology, device_type: str, folder: Path, allow_slow: bool) -> int:
    """One rank of a world; under a torchrun that is not ours rank 0 also does what our launcher would."""
    from dflash_dist.train.run import run_rank

    threading.excepthook = _thread_failed
    with contextlib.ExitStack() as held:

        def begin() -> None:
            if not launched_here():
                held.enter_context(begin_run(config, topology, device_type, folder, allow_slow))

        started_s = time.perf_counter()
        rank = run_rank(config, topology, device_type, folder, stop_signals(), begin)
        if rank == 0 and not launched_here() and _trained(config, topology, folder):
            assert not dist.is_initialized()
            finish_run(config, device_type, folder, {"train": time.perf_counter() - started_s})
    return 0


def _thread_failed(failure: threading.ExceptHookArgs) -> None:
    """Tells of an error that ended a thread, but of TensorBoard's: there the next write raises it."""
    if not type(failure.thread).__module__.startswith("tensorboard."):
        threading.__excepthook__(failure)


@contextlib.contextmanager
def begin_run(config: Config, topology: Topology, device_type: str, folder: Path, allow_slow: bool) -> Iterator[None]:
    """Prepares target and data, checks that the run can work, and makes its folder, which is locked in the block."""
    inputs = resolve_inputs(config, topology, device_type)
    print_report(inputs.report, inputs.store_folder)
    needs = rank_memory(config, topology, inputs.target_config, inputs.drafter, device_type)
    if device_type == "cuda":
        for role, parts in needs.items():
            check_memory({role: parts}, torch.cuda.mem_get_info()[0], {role: 1})
    else:
        ranks = {"target": topology.targets, "drafter": topology.drafters, "target+drafter": topology.targets}
        check_memory(needs, psutil.virtual_memory().available, ranks)
    findings = check(config, device_type)
    if has_errors(findings) and not allow_slow:
        costs = {f.name: f", so {f.cost}" if f.cost else "" for f in findings}
        wrong = "; ".join(
            f"{f.name}: {f.detail}{costs[f.name]} (mend: {f.mend})" for f in findings if f.level == "error"
        )
        raise UserError(f"the environment check found errors: {wrong}; or train all the same with --allow-slow")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_run(folder)
    except OSError as error:
        raise UserError(f"run folder {folder} cannot be made: {error}; free the place or set runs_dir") from None
    with lock:
        check_name_is_free(config, folder)  # again, now that nobody else can take it
        check_writable(folder)
        remove_left_worlds(folder)
        set_damaged_aside(folder / CHECKPOINTS)
        newest = newest_checkpoint(folder / CHECKPOINTS)
        if newest:
            print(f"run {folder.name} goes on after step {newest.step}", file=sys.stderr)
        record_begin(config, inputs, environment(config, findings), folder, resumes=newest is not None)
        try:
            for name in FILLED:
                (folder / name).mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(f"run folder {folder} cannot be filled: {error}; remove what is in the way") from None
        yield


def finish_run(config: Config, device_type: str, folder: Path, phases: dict[str, float]) -> None:
    """Exports the newest checkpoint, measures its tau on held-out prompts, and prints the closing summary."""
    export_folder = folder / "export" / "plain"
    _timed(phases, "export", lambda: export_checkpoint(folder, export_folder, replace=True))
    evaluation = _timed(phases, "eval", lambda: evaluate_drafter(config, run_store(folder), export_folder, device_type))
    rows = read_metrics(folder)
    facts = {"steps": rows[-1]["step"] if rows else 0, "evaluation": evaluation, "phases_s": phases}
    write_text(folder / SUMMARY, json.dumps(facts, indent=1))
    checkpoint = newest_checkpoint(folder / CHECKPOINTS)
    assert checkpoint is not None
    print(summary(rows, evaluation, phases, folder, export_folder, checkpoint.folder), file=sys.stderr)
    for command in serve_commands(export_folder, str(target_folder(config.target.model, Path(config.cache_dir)))):
        print(f"serve: {command}", file=sys.stderr)


def export_checkpoint(
    folder: Path,
    out: Path,
    write: Callable[[DFlashDrafter, Path], None] = export_plain,
    replace: bool = False,
    which: str = "last",
) -> None:
    """Writes a checkpoint of the run in `folder` as drafter folder `out`, in the format of `write`.

    `which`: last, best or a step, as `find_checkpoint` takes it.
    """
    while True:
        checkpoint = find_checkpoint(folder / CHECKPOINTS, which)
        model = DFlashDrafter(checkpoint.drafter)
        try:
            checkpoint.load_weights(model)
            break
        except OSError:
            if checkpoint.folder.exists():
                raise
            # A run that goes on has written a newer one in its place.
    if which != "last":
        print(f"checkpoint: step {checkpoint.step}, val_loss {checkpoint.val_loss}", file=sys.stderr)
    if replace and out.exists():
        shutil.rmtree(out)
    write(model, out)


def _trained(config: Config, topology: Topology, folder: Path) -> bool:
    checkpoint = newest_checkpoint(folder / CHECKPOINTS)
    return checkpoint is not None and checkpoint.step >= resolve_inputs(config, topology).schedule.total_steps


def _timed(phases: dict[str, float], name: str, work: Callable[[], Result]) -> Result:
    start_s = time.perf_counter()
    try:
        return work()
    finally:
        phases[name] = time.perf_counter() - start_s
