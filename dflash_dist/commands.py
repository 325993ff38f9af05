"""What stands behind the commands that need more than one call into the library."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dflash_dist import inspection
from dflash_dist.config import Config, EvaluateConfig, TargetConfig, load_config
from dflash_dist.data.regenerate import Sampling, regenerate
from dflash_dist.data.regenerate_server import ServerWriter
from dflash_dist.data.regenerate_target import TargetWriter
from dflash_dist.drafter.model import DFlashDrafter
from dflash_dist.errors import UserError
from dflash_dist.evaluate.run import bundled_prompts, evaluate_drafter, evaluate_on, read_prompts
from dflash_dist.export.plain import export_plain, serve_commands
from dflash_dist.export.speculators import export_speculators
from dflash_dist.target.load import full_config, load_tokenizer
from dflash_dist.target.package import target_folder
from dflash_dist.topology import Topology, check_devices, parse_topology
from dflash_dist.train.inputs import resolve_inputs
from dflash_dist.train.launch import export_checkpoint
from dflash_dist.train.launch import train as run_train
from dflash_dist.train.run_folder import CONFIG, run_config, run_store
from dflash_dist.train.window import ask_window, say_slowdown

CACHE = ".cache/dflash_dist"
STACK_STEPS = 1
"""Of `profile run --stacks`: stacks make a trace many times larger."""


def evaluate_command(
    run: Path | None,
    drafter: Path | None,
    target: str | None,
    prompts: Path | None,
    changes: dict[str, Any],
    chat_template_kwargs: dict[str, Any] | None,
    device: str,
    checkpoint: str | None = None,
) -> dict[str, Any]:
    """The figures of `dflash-dist eval`: of a run's export or `checkpoint`, or of a drafter folder with its target.

    `changes`: keys of `EvaluateConfig` given on the command line. `chat_template_kwargs` stand in for the run's.
    """
    device_type = check_devices(parse_topology("x1"), torch.cuda.device_count(), device)
    if run is not None and drafter is None and target is None:
        folder = find_run(run)
        config = run_config(folder)
        config = dataclasses.replace(config, evaluate=dataclasses.replace(config.evaluate, **changes))
        if chat_template_kwargs is not None:
            data = dataclasses.replace(config.data, chat_template_kwargs=chat_template_kwargs)
            config = dataclasses.replace(config, data=data)
        with tempfile.TemporaryDirectory(prefix="dflash_dist_") as made:
            return _evaluate_run(folder, config, prompts, device_type, checkpoint, Path(made) / "drafter")
    if run is None and drafter is not None and target is not None and checkpoint is None:
        return evaluate_on(
            read_prompts(prompts or bundled_prompts()),
            drafter,
            target_folder(target, Path(CACHE)),
            TargetConfig(model=target),
            device_type,
            EvaluateConfig(**changes),
            chat_template_kwargs or {},
        )
    raise UserError("give either --run R, with --checkpoint C or without, or --drafter D with --target T")


def _evaluate_run(
    folder: Path, config: Config, prompts: Path | None, device_type: str, checkpoint: str | None, made: Path
) -> dict[str, Any]:
    """The figures of the run's export, or of its `checkpoint`, which is exported to `made`."""
    exported = folder / "export" / "plain"
    if checkpoint is not None:
        export_checkpoint(folder, made, which=checkpoint)
        exported = made
    elif not exported.exists():
        raise UserError(
            f"run {folder} has no export yet; finish its training, use `dflash-dist export` first, or give --checkpoint"
        )
    if prompts is None:
        figures = evaluate_drafter(config, run_store(folder), exported, device_type)
        if figures is None:
            raise UserError(
                f"run {folder} kept no document, or none that fits the target, out of training; give --prompts FILE"
            )
        return figures
    return evaluate_on(
        read_prompts(prompts),
        exported,
        target_folder(config.target.model, Path(config.cache_dir)),
        config.target,
        device_type,
        config.evaluate,
        config.data.chat_template_kwargs,
    )


def regenerate_command(
    config: Config, out: Path, sampling: Sampling, url: str | None, model: str | None, batch: int, device: str
) -> None:
    """Writes the config's chats with the target's own answers to `out`: a server's at `url`, else made here."""
    if url is None and model is not None:
        raise UserError(f"--model {model} is the name at a server; give its --url too, or set target.model=")
    settings: dict[str, Any] = {"target": config.target.model, "batch": batch} | dataclasses.asdict(sampling)
    kwargs = config.data.chat_template_kwargs
    if url is not None:
        if not url.startswith(("http://", "https://")):
            raise UserError(f"--url is {url!r}, but must be a server's address such as http://localhost:8000/v1")
        name = model or config.target.model
        settings |= {"url": url, "model": name}
        regenerate(config, out, settings, lambda: ServerWriter(url, name, kwargs, sampling, batch))
        return
    device_type = check_devices(parse_topology("x1"), torch.cuda.device_count(), device)
    folder = target_folder(config.target.model, Path(config.cache_dir))
    settings |= {"dtype": config.target.dtype, "device": device_type}
    regenerate(
        config,
        out,
        settings,
        lambda: TargetWriter(folder, config.target, kwargs, sampling, batch, torch.device(device_type)),
    )


def inspect_command(
    config: Config,
    number: int | None,
    messages: Path | None,
    drafter: Path | None,
    anchors: str | None,
    device: str,
    as_json: bool,
) -> None:
    """Prints a row of the store, or of the chat in the file `messages`, with a drafter's outcome at the anchors."""
    if number is None and messages is None:
        raise UserError("give --row N, a row of the token store, or --messages FILE.json, a chat")
    if (drafter is None) != (anchors is None):
        raise UserError("--drafter D and --anchors A,B,... go together: give both or neither")
    if messages is None:
        assert number is not None
        row = inspection.stored_row(config, number)
    else:
        row = inspection.chat_row(config, messages, number)
    outcomes = {}
    if drafter is not None and anchors is not None:
        if not re.fullmatch("-?[0-9]{1,18}(,-?[0-9]{1,18})*", anchors):
            raise UserError(f"--anchors {anchors!r} must be token places such as 35,40")
        device_type = check_devices(parse_topology("x1"), torch.cuda.device_count(), device)
        places = [int(place) for place in anchors.split(",")]
        outcomes = inspection.block_outcomes(config, row, drafter, places, torch.device(device_type))
    if as_json:
        print(inspection.as_json(row, outcomes, config.objective.kind))
    else:
        folder = target_folder(config.target.model, Path(config.cache_dir))
        tokenizer = load_tokenizer(folder, config.target.trust_remote_code)
        inspection.print_row(row, outcomes, config.objective.kind, tokenizer)


def export_command(run: Path, out: Path, form: str, checkpoint: str = "last") -> list[str]:
    """Exports a run's checkpoint, the last or best one or a step's, to `out` as `form`, plain or speculators.

    Returns the folder and the serve commands, a line each.
    """
    folder = find_run(run)
    config = run_config(folder)
    target_files = target_folder(config.target.model, Path(config.cache_dir))
    local = config.target.model.startswith("package:") or Path(config.target.model).expanduser().exists()
    target = str(target_files.absolute()) if local else config.target.model
    write: Callable[[DFlashDrafter, Path], None] = export_plain
    if form == "speculators":
        architectures = full_config(target_files, config.target.trust_remote_code).architectures or []
        write = functools.partial(export_speculators, verifier=target, verifier_architectures=architectures)
    export_checkpoint(folder, out, write, which=checkpoint)
    return [f"{out}", *serve_commands(out, target)]


def profile_command(
    config: Path, topology: Topology, steps: int, stacks: bool, run: str | None, device: str, overrides: list[str]
) -> int:
    """Trains a few steps under a new name with the trace window open; returns the exit code."""
    start = 6  # the first step compiles, the one before the window is profiled too; what is between them is compared
    last = start + steps + (STACK_STEPS + 1 if stacks else 0)
    window = [f"profile.start_step={start}", f"profile.steps={steps}", f"profile.stack_steps={STACK_STEPS * stacks}"]
    window += [f"train.max_steps={last}", "train.validate_every=0", f"train.checkpoint_every={last}"]
    overrides = [*overrides, *window]
    name = run or f"{config.stem}-profile-{time.strftime('%Y%m%d-%H%M%S')}"
    arguments = ["train", "--config", str(config), "--topo", str(topology), "--run", name, "--device", device]
    settings = load_config(config, overrides)
    steps_given = resolve_inputs(settings, topology).schedule.total_steps
    if steps_given < last:
        raise UserError(
            f"a window of {steps} steps from step {start} on needs a run of {last}, but the data give "
            f"{steps_given}; lower --steps, add data or raise train.epochs"
        )
    code = run_train(settings, topology, device, name, [*arguments, *overrides], finish=False, allow_slow=True)
    if code == 0:
        folder = Path(settings.runs_dir) / name / "profile"
        say_slowdown(folder, topology.drafter_rank(0), steps, lambda line: print(line, file=sys.stderr))
        print(
            f"where the time goes: dflash-dist profile analyze {folder}; all ranks as one trace: dflash-dist profile "
            f"merge {folder}",
            file=sys.stderr,
        )
        print(folder)
    return code


def window_command(run: Path, steps: int, stacks: bool) -> Path:
    """Has the process that trains the run record a window; returns the folder of the traces."""
    folder = find_run(run)
    ask_window(folder, steps, STACK_STEPS * stacks, lambda line: print(line, file=sys.stderr))
    return folder / "profile"


def find_run(run: Path) -> Path:
    """The run folder meant by a path or a name under runs/; a folder that is no run does not hide one."""
    for folder in (run, Path("runs") / run):
        if os.path.isfile(folder / CONFIG):  # which, unlike a Path, bears any name
            return folder
    raise UserError(f"neither {run} nor runs/{run} is a run: there is no {CONFIG} in it")
