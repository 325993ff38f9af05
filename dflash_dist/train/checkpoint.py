"""Checkpoints that are whole or absent.

A checkpoint is a folder `step_00000100` with the drafter's fp32 masters, AdamW's state and `state.json`, which tells
the size of the other files. It is written beside its place and renamed when all of it is on the disk.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from dflash_dist.drafter.config import DrafterConfig
from dflash_dist.errors import RunFailed, UserError

WEIGHTS, MOMENTS, STATE = "drafter.safetensors", "optimizer.pt", "state.json"


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on the disk."""

    folder: Path
    step: int
    drafter: DrafterConfig

    def load_weights(self, model: nn.Module) -> None:
        """Copies the fp32 masters into `model`."""
        weights = load_file(self.folder / WEIGHTS)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights.pop(name))
        assert not weights, f"weights that no parameter takes: {sorted(weights)}"

    def load_moments(self) -> dict[str, Any]:
        """AdamW's state, on the CPU."""
        return torch.load(self.folder / MOMENTS, map_location="cpu", weights_only=True)


def save_checkpoint(
    root: Path, step: int, model: nn.Module, moments: dict[str, Any], drafter: DrafterConfig, keep: int
) -> Path:
    """Writes the checkpoint of `step` under `root` and removes all but the newest `keep`; returns its folder.

    UserError where the disk is full or the folder cannot be written; nothing half-written stays.
    """
    bad = [name for name, p in model.named_parameters() if not p.isfinite().all()]
    if bad:
        raise RunFailed(f"step {step}: {len(bad)} weights are not finite, such as {bad[0]}; no checkpoint was written")
    folder = root / f"step_{step:08d}"
    aside = root / f".{folder.name}.partial"
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        save_file({name: p.detach().contiguous().cpu() for name, p in model.named_parameters()}, aside / WEIGHTS)
        torch.save(moments, aside / MOMENTS)
        sizes = {name: (aside / name).stat().st_size for name in (WEIGHTS, MOMENTS)}
        state = {"step": step, "sizes_bytes": sizes, "drafter": drafter.to_json()}
        (aside / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
        for name in (WEIGHTS, MOMENTS, STATE):
            _flush_to_disk(aside / name)
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
        _flush_to_disk(root)
    # torch.save reports a full disk as RuntimeError, safetensors as an error of its own.
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise UserError(
            f"checkpoint of step {step} cannot be written to {root}: {error}; free some space and start again to resume"
        ) from None
    for old in _folders(root)[:-keep]:
        shutil.rmtree(old)
    return folder


def newest_checkpoint(root: Path) -> Checkpoint | None:
    """The newest whole checkpoint under `root`; damaged ones are named on stderr and passed over."""
    for folder in reversed(_folders(root)):
        try:
            state = json.loads((folder / STATE).read_text(encoding="utf-8"))
            for name, size in state["sizes_bytes"].items():
                found = (folder / name).stat().st_size
                if found != size:
                    raise ValueError(f"{name} has {found} bytes instead of {size}")
            return Checkpoint(folder, state["step"], DrafterConfig.from_json(state["drafter"]))
        except (OSError, ValueError, KeyError, TypeError, UserError) as error:
            print(f"warning: checkpoint {folder} is damaged ({error}); the one before it is used", file=sys.stderr)
    return None


def _folders(root: Path) -> list[Path]:
    return sorted(root.glob("step_*"))


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
