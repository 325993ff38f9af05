"""Whether a configuration can run, and what it takes: what `train` would refuse, found before anything is prepared."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from dflash_dist.check.findings import Finding, one_line, refusal
from dflash_dist.check.gpus import device_type
from dflash_dist.check.host import disk_finding
from dflash_dist.check.target import target_config_path
from dflash_dist.config import Config
from dflash_dist.data.sources import checked_file, is_local
from dflash_dist.drafter.config import DrafterConfig
from dflash_dist.errors import UserError
from dflash_dist.installed import import_problem
from dflash_dist.target.load import check_attention
from dflash_dist.target.package import local_folder
from dflash_dist.target.weights import INDEX, ONE_FILE, check_weights, has_weights
from dflash_dist.topology import parse_topology
from dflash_dist.train.inputs import resolve_drafter, schedule_costs
from dflash_dist.train.memory import GIB, check_memory, drafter_parameters, rank_memory

CHECKPOINT_BYTES = 12
"""fp32 weight and two moments of each parameter."""


def check_config(config: Config, device: str = "auto") -> list[Finding]:
    """The findings on the data files, the drafter and the memory of each role; nothing is downloaded or written.

    About the drafter and its memory there is none while the target is not on this machine, and about the memory none
    where ranks cannot run on `device`: cpu, cuda or auto.
    """
    findings = [_data_file(source) for source in config.data.sources if is_local(source)]
    folder = _target_here(config)
    if folder is None:
        return findings
    findings.append(weights_finding(folder))
    looks = {
        "drafter": lambda: _drafter(config, folder, device_type(device)),
        "target.attention": lambda: check_attention(folder, config.target),
        "probe": lambda: _probe(config, folder, device),
    }
    for name, look in looks.items():
        try:
            findings += look() or []
        except UserError as error:
            return [*findings, refusal(name, error)]
        except ImportError as error:  # of transformers, or of what it imports
            return [*findings, refusal(name, UserError(import_problem(error) or one_line(error)))]
    return findings


def weights_finding(folder: Path) -> Finding:
    """Whether the weight files in the target's folder are whole; a warning where there are none yet."""
    if not has_weights(folder):
        mend = f"get {ONE_FILE}, or {INDEX} and the files that it names"
        return Finding("target weights", "warning", f"{folder} holds none yet", mend, "the target cannot be loaded")
    try:
        return Finding("target weights", "ok", f"{check_weights(folder) / GIB:.2f} GiB")
    except UserError as error:
        return refusal("target weights", error)


def drafter_here(config: Config) -> tuple[Any, DrafterConfig] | None:
    """The configurations of the target and of the run's drafter; None where the target is not here or does not fit."""
    folder = _target_here(config)
    try:
        return None if folder is None else resolve_drafter(config, folder)
    except (UserError, ImportError):  # `check_config` tells what is wrong
        return None


def run_disk_finding(config: Config) -> Finding:
    """Free space for the run, against its checkpoints where the drafter is known."""
    found = drafter_here(config)
    if found is None:
        return disk_finding("runs_dir", config.runs_dir)
    # Beside those that are kept: the one in writing, and that of least val_loss where there is one.
    count = config.train.keep_checkpoints + 1 + (config.train.validate_every > 0)
    return disk_finding("runs_dir", config.runs_dir, CHECKPOINT_BYTES * drafter_parameters(found[1]), count)


def _data_file(source: str) -> Finding:
    name = f"data {Path(source).name}"
    try:
        file = checked_file(source)
        size_bytes = file.stat().st_size
        file.open("rb").close()
    except UserError as error:
        return refusal(name, error)
    except OSError as error:
        return Finding(name, "error", f"{file} cannot be read: {error.strerror}", "check that it is open to you")
    return Finding(name, "ok", f"{size_bytes / 2**20:.1f} MiB")


def _target_here(config: Config) -> Path | None:
    """The target's folder; None where it lacks what `prepare` would download, or where `check` finds it wrong."""
    try:
        path = target_config_path(config)
        hub = not config.target.model.startswith("package:") and local_folder(config.target.model) is None
    except UserError:
        return None
    if path is None or (hub and not (path.parent / "tokenizer_config.json").is_file()):
        return None
    return path.parent


def _drafter(config: Config, folder: Path, device: Literal["cpu", "cuda"] | None) -> list[Finding]:
    """That the drafter fits the target in `folder`, and what a rank of each role takes of the device's memory.

    UserError where it does not fit.
    """
    target_config, drafter = resolve_drafter(config, folder)
    detail = (
        f"{drafter_parameters(drafter) / 1e6:,.1f} M parameters in {drafter.num_hidden_layers} layers; taps "
        f"{list(drafter.target_layer_ids)} of {drafter.num_target_layers} layers, mask token {drafter.mask_token_id}"
    )
    found = Finding("drafter", "ok", detail)
    if device is None:
        return [found]
    needs = rank_memory(config, parse_topology("1-1"), target_config, drafter, device)
    free_bytes = torch.cuda.mem_get_info()[0] if device == "cuda" else psutil.virtual_memory().available
    memory = [_memory(role, parts, free_bytes) for role, parts in needs.items()]
    return [found, *memory]


def _probe(config: Config, folder: Path, device: str) -> list[Finding]:
    """Nothing; UserError where the file of an earlier probe, which `train` will read, is damaged."""
    _, drafter = resolve_drafter(config, folder)
    schedule_costs(config, folder, drafter, device)
    return []


def _memory(role: str, parts: dict[str, float], free_bytes: float) -> Finding:
    """Whether one rank fits, in the topology that asks least of it."""
    name = f"{role} memory"
    try:
        check_memory({role: parts}, free_bytes, {role: 1})
    except UserError as error:
        return refusal(name, error)
    shown = " + ".join(f"{part} {size / GIB:.2f}" for part, size in parts.items())
    total_gib, free_gib = sum(parts.values()) / GIB, free_bytes / GIB
    return Finding(name, "ok", f"at least {total_gib:.2f} GiB a rank ({shown}) of {free_gib:.1f} GiB free")
