"""What stands behind the commands that need more than one call into the library."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from dflash_dist.config import TargetConfig, load_config
from dflash_dist.errors import UserError
from dflash_dist.evaluate.run import evaluate_drafter, evaluate_on, read_prompts
from dflash_dist.export.plain import serve_commands
from dflash_dist.target.package import target_folder
from dflash_dist.topology import Topology, check_devices, parse_topology
from dflash_dist.train.launch import export_checkpoint, run_config
from dflash_dist.train.launch import train as run_train

CACHE = ".cache/dflash_dist"


def evaluate_command(
    run: Path | None,
    drafter: Path | None,
    target: str | None,
    prompts: Path | None,
    max_new_tokens: int | None,
    device: str,
) -> dict[str, Any]:
    """The figures of `dflash-dist eval`: of a run's export, or of a drafter folder with its target."""
    device_type = check_devices(parse_topology("x1"), torch.cuda.device_count(), device)
    if run is not None and drafter is None and target is None:
        folder = find_run(run)
        config = run_config(folder)
        if max_new_tokens is not None:
            config = run_config(folder, [f"evaluate.max_new_tokens={max_new_tokens}"])
        exported = folder / "export" / "plain"
        if not exported.exists():
            raise UserError(f"run {folder} has no export yet; finish its training, or use `dflash-dist export` first")
        if prompts is None:
            figures = evaluate_drafter(config, exported, device_type)
            if figures is None:
                raise UserError(f"run {folder} kept no document out of training; give --prompts FILE.jsonl")
            return figures
        model, settings, kwargs = config.target.model, config.target, config.data.chat_template_kwargs
        cache, tokens, drafter = Path(config.cache_dir), config.evaluate.max_new_tokens, exported
    elif run is None and drafter is not None and target is not None:
        if prompts is None:
            raise UserError("--drafter and --target need --prompts FILE.jsonl, a file of chats with `messages`")
        model, settings, kwargs = target, TargetConfig(model=target), {}
        cache, tokens = Path(CACHE), max_new_tokens or 64
    else:
        raise UserError("give either --run R, or --drafter D with --target T and --prompts F")
    return evaluate_on(
        read_prompts(prompts), drafter, target_folder(model, cache), settings, device_type, tokens, kwargs
    )


def export_command(run: Path, out: Path) -> list[str]:
    """Exports a run's newest checkpoint to `out`; returns the folder and the serve commands, a line each."""
    folder = find_run(run)
    export_checkpoint(folder, out)
    config = run_config(folder)
    return [f"{out}", *serve_commands(out, str(target_folder(config.target.model, Path(config.cache_dir))))]


def profile_command(
    config: Path, topology: Topology, steps: int, run: str | None, device: str, overrides: list[str]
) -> int:
    """Trains a few steps under a new name with the trace window open; returns the exit code."""
    start = 3
    window = [f"profile.start_step={start}", f"profile.steps={steps}", f"train.max_steps={start + steps}"]
    window += ["train.validate_every=0", f"train.checkpoint_every={start + steps}"]
    overrides = [*overrides, *window]
    name = run or f"{config.stem}-profile-{time.strftime('%Y%m%d-%H%M%S')}"
    arguments = ["train", "--config", str(config), "--topo", str(topology), "--run", name, "--device", device]
    settings = load_config(config, overrides)
    code = run_train(settings, topology, device, name, [*arguments, *overrides], finish=False, allow_slow=True)
    if code == 0:
        print(Path(settings.runs_dir) / name / "profile")
    return code


def find_run(run: Path) -> Path:
    """The run folder meant by a path or a name under runs/."""
    for folder in (run, Path("runs") / run):
        if folder.is_dir():
            return folder
    raise UserError(f"run {run} does not exist, nor does runs/{run}")
