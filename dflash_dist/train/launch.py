"""`dflash-dist train`: what comes before the world of ranks, the world, and what comes after it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import psutil
import torch
import torch.distributed as dist

from dflash_dist.check import check, environment, has_errors
from dflash_dist.config import Config, config_difference, config_text, load_config
from dflash_dist.data.prepare import print_report
from dflash_dist.drafter.model import DFlashDrafter
from dflash_dist.errors import UserError
from dflash_dist.evaluate.run import evaluate_drafter
from dflash_dist.export.plain import export_plain, serve_commands
from dflash_dist.target.package import target_folder
from dflash_dist.topology import Topology, check_devices
from dflash_dist.train.checkpoint import newest_checkpoint
from dflash_dist.train.inputs import resolve_inputs
from dflash_dist.train.memory import check_memory, rank_memory
from dflash_dist.train.metrics import read_metrics, summary
from dflash_dist.train.world import in_world, launch_world, launched_here, stop_signals

CONFIG, ENVIRONMENT, SUMMARY = "config.yaml", "environment.json", "summary.json"
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
) -> int:
    """Trains run `run_name`, or goes on with it where it stopped; returns the exit code.

    `arguments` start the same command on every rank. `finish`: export and evaluate at the end. `allow_slow`: train even
    where the environment check finds errors.
    """
    device_type = check_devices(topology, torch.cuda.device_count(), device)
    run_folder = Path(config.runs_dir) / run_name
    kernels = Path(config.cache_dir).absolute() / "kernels"
    os.environ.setdefault("TRITON_CACHE_DIR", str(kernels / "triton"))
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(kernels / "inductor"))
    if not launched_here() and _is_finished(config, run_folder):
        print(f"run {run_name} is finished: see {run_folder}; --run NAME starts another", file=sys.stderr)
        return 0
    if in_world():
        return _train_as_rank(config, topology, device_type, run_folder, allow_slow)
    phases: dict[str, float] = {}
    _timed(phases, "prepare", lambda: begin_run(config, topology, device_type, run_folder, allow_slow))
    stopped = None
    if not _trained(config, topology, run_folder):
        stopped = _timed(phases, "train", lambda: launch_world(topology, device_type, arguments))
    if stopped is not None:
        module = Path(sys.argv[0]).name == "__main__.py"
        command = shlex.join([*([sys.executable, "-m", "dflash_dist"] if module else [sys.argv[0]]), *arguments])
        checkpoint = newest_checkpoint(run_folder / "checkpoints")
        where = f"checkpoint of step {checkpoint.step}" if checkpoint else "no checkpoint yet"
        print(f"stopped ({where}); go on with: {command}", file=sys.stderr)
        return 130 if stopped == signal.SIGINT else 0
    if finish:
        finish_run(config, device_type, run_folder, phases)
    return 0


def _train_as_rank(config: Config, topology: Topology, device_type: str, run_folder: Path, allow_slow: bool) -> int:
    """One rank of a world; under a torchrun that is not ours rank 0 also does what our launcher would."""
    from dflash_dist.train.run import run_rank

    def begin() -> None:
        if not launched_here():
            begin_run(config, topology, device_type, run_folder, allow_slow)

    started_s = time.perf_counter()
    rank = run_rank(config, topology, device_type, run_folder, stop_signals(), begin)
    if rank == 0 and not launched_here() and _trained(config, topology, run_folder):
        assert not dist.is_initialized()
        finish_run(config, device_type, run_folder, {"train": time.perf_counter() - started_s})
    return 0


def begin_run(config: Config, topology: Topology, device_type: str, run_folder: Path, allow_slow: bool) -> None:
    """Prepares target and data, checks that the run can work, and makes its folder."""
    _is_finished(config, run_folder)
    inputs = resolve_inputs(config, topology)
    print_report(inputs.report, inputs.store_folder)
    print("target: documents run as right-padded rows of like length, each apart from the others", file=sys.stderr)
    findings = check(config)
    if has_errors(findings) and not allow_slow:
        wrong = "; ".join(f"{f.name}: {f.detail} (mend: {f.mend})" for f in findings if f.level == "error")
        raise UserError(f"the environment check found errors: {wrong}; or train all the same with --allow-slow")
    needs = rank_memory(config, topology, inputs.target_config, inputs.drafter, device_type)
    if device_type == "cuda":
        for role, parts in needs.items():
            check_memory({role: parts}, torch.cuda.mem_get_info()[0], {role: 1})
    else:
        ranks = {"target": topology.targets, "drafter": topology.drafters, "target+drafter": topology.targets}
        check_memory(needs, psutil.virtual_memory().available, ranks)
    try:
        for name in ("checkpoints", "tb", "profile"):
            (run_folder / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run folder {run_folder} cannot be made: {error}; free the place or set runs_dir") from None
    write_text(run_folder / ENVIRONMENT, json.dumps(environment(config, findings), indent=1))
    write_text(run_folder / CONFIG, config_text(config))


def finish_run(config: Config, device_type: str, run_folder: Path, phases: dict[str, float]) -> None:
    """Exports the newest checkpoint, measures its tau on held-out prompts, and prints the closing summary."""
    export_folder = run_folder / "export" / "plain"
    _timed(phases, "export", lambda: export_checkpoint(run_folder, export_folder, replace=True))
    evaluation = _timed(phases, "eval", lambda: evaluate_drafter(config, export_folder, device_type))
    rows = read_metrics(run_folder)
    facts = {"steps": rows[-1]["step"] if rows else 0, "evaluation": evaluation, "phases_s": phases}
    write_text(run_folder / SUMMARY, json.dumps(facts, indent=1))
    checkpoint = newest_checkpoint(run_folder / "checkpoints")
    assert checkpoint is not None
    print(summary(rows, evaluation, phases, run_folder, export_folder, checkpoint.folder), file=sys.stderr)
    for command in serve_commands(export_folder, str(target_folder(config.target.model, Path(config.cache_dir)))):
        print(f"serve: {command}", file=sys.stderr)


def write_text(path: Path, text: str) -> None:
    """Writes a small file whole or not at all; UserError where the disk is full."""
    aside = path.with_name(f".{path.name}.partial")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.rename(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error}; free some space and start again") from None


def export_checkpoint(
    run_folder: Path,
    folder: Path,
    write: Callable[[DFlashDrafter, Path], None] = export_plain,
    replace: bool = False,
) -> None:
    """Writes the newest checkpoint of a run as a drafter folder of the format that `write` gives it."""
    checkpoint = newest_checkpoint(run_folder / "checkpoints")
    if checkpoint is None:
        raise UserError(f"run {run_folder} has no whole checkpoint to export; train it further")
    model = DFlashDrafter(checkpoint.drafter)
    checkpoint.load_weights(model)
    if replace and folder.exists():
        shutil.rmtree(folder)
    write(model, folder)


def run_config(run_folder: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration saved with a run, with `overrides` applied."""
    if not (run_folder / CONFIG).is_file():
        raise UserError(f"{run_folder} is not a run: it has no {CONFIG}")
    return load_config(run_folder / CONFIG, overrides)


def _is_finished(config: Config, run_folder: Path) -> bool:
    """Whether the run is over; UserError where a run of that name has another configuration."""
    if (run_folder / CONFIG).exists() and newest_checkpoint(run_folder / "checkpoints"):
        difference = config_difference(run_config(run_folder), config)
        if difference:
            raise UserError(
                f"run {run_folder.name} exists with another configuration ({'; '.join(difference)}); "
                "give the new one a name of its own with --run NAME"
            )
    return (run_folder / SUMMARY).exists()


def _trained(config: Config, topology: Topology, run_folder: Path) -> bool:
    checkpoint = newest_checkpoint(run_folder / "checkpoints")
    return checkpoint is not None and checkpoint.step >= resolve_inputs(config, topology).schedule.total_steps


def _timed(phases: dict[str, float], name: str, work: Callable[[], Result]) -> Result:
    start_s = time.perf_counter()
    try:
        return work()
    finally:
        phases[name] = time.perf_counter() - start_s
