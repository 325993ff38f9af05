"""Checkpoints that are whole or absent.

A checkpoint is a folder `step_00000100` with the drafter's fp32 masters, AdamW's state and `state.json`, which tells
the sizes and CRC-32s of the other files. It is written beside its place and renamed when all of it is on the disk.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import zlib
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
DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, UserError)
"""What reading a damaged `state.json`, or comparing the files with it, raises."""
CHUNK_BYTES = 1 << 24


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
    """Writes the checkpoint of `step` under `root` and keeps `keep - 1` of those before it; returns its folder.

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
        checksums = {name: _crc32(aside / name) for name in sizes}
        state = {"step": step, "sizes_bytes": sizes, "crc32": checksums, "drafter": drafter.to_json()}
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
    before = [folder for folder in _folders(root) if _step_of(folder) < step]
    for old in before[: max(0, len(before) - keep + 1)]:
        shutil.rmtree(old)
    return folder


def newest_checkpoint(root: Path, *, verify: bool = False) -> Checkpoint | None:
    """The newest whole checkpoint under `root`; damaged ones are named on stderr and passed over.

    Whole is what has all its files in their sizes. `verify`: their checksums are compared too, which reads every byte.
    """
    for folder in reversed(_folders(root)):
        try:
            return _open(folder, verify)
        except DAMAGE as error:
            print(f"warning: checkpoint {folder} is damaged ({error}); the one before it is used", file=sys.stderr)
    return None


def set_damaged_aside(root: Path) -> None:
    """Renames the checkpoints under `root` that are damaged and newer than any sound one, so that none counts again.

    Each is read to its last byte, until a sound one is found. Only who holds the run's lock may call this.
    """
    for folder in reversed(_folders(root)):
        try:
            _open(folder, verify=True)
            return
        except DAMAGE as error:
            aside = root / f"damaged_{folder.name}"
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
            what = f"checkpoint {folder} is damaged ({error})"
            print(f"warning: {what}; it is now {aside.name}, and the one before it is used", file=sys.stderr)


def _open(folder: Path, verify: bool) -> Checkpoint:
    """The checkpoint in `folder`; one of `DAMAGE` where it is not what was written."""
    state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    for name in (WEIGHTS, MOMENTS):
        found, size = (folder / name).stat().st_size, state["sizes_bytes"][name]
        if found != size:
            raise ValueError(f"{name} has {found} bytes instead of {size}")
        if verify and _crc32(folder / name) != state["crc32"][name]:
            raise ValueError(f"{name} has another checksum than was written")
    if state["step"] != _step_of(folder):
        raise ValueError(f"it is of step {state['step']}")
    return Checkpoint(folder, state["step"], DrafterConfig.from_json(state["drafter"]))


def _folders(root: Path) -> list[Path]:
    """The checkpoint folders by step; a folder of any other name is none."""
    found = [path for path in root.glob("step_*") if re.fullmatch(r"step_[0-9]{8,}", path.name)]
    return sorted(found, key=_step_of)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
