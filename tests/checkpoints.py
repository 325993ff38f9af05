"""Checkpoints as a run writes them, of a drafter in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from dflash_dist.config import TrainConfig
from dflash_dist.drafter.config import DrafterConfig
from dflash_dist.drafter.model import DFlashDrafter
from dflash_dist.train.checkpoint import drafter_tensors
from dflash_dist.train.checkpoint_writer import CheckpointWriter
from dflash_dist.train.optimizer import Optimizer


def training_tensors(drafter: DFlashDrafter) -> dict[str, Tensor]:
    """The live weights, and the state of an optimizer that has not stepped yet."""
    return drafter_tensors(drafter) | Optimizer(drafter, TrainConfig(), 10, None).state_tensors()


def run_state(drafter: DrafterConfig, step: int, val_loss: float | None = None) -> dict[str, Any]:
    """What readers of a checkpoint need beside the files."""
    return {"step": step, "val_loss": val_loss, "schedule": {"tokens": 100 * step}, "drafter": drafter.to_json()}


def save(
    root: Path, drafter: DFlashDrafter, *steps: int, keep: int = 2, val_losses: dict[int, float] | None = None
) -> None:
    """Writes a checkpoint of each of the steps, in this order."""
    writer = CheckpointWriter(root, training_tensors(drafter), keep)
    for step in steps:
        writer.copy()
        writer.write(run_state(drafter.config, step, (val_losses or {}).get(step)))
    writer.wait()
