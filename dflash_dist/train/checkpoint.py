"""Checkpoints on the disk, which are whole or absent: finding, checking and reading them.

A checkpoint is a folder `step_00000100` with the drafter's fp32 masters and the optimizer's state in safetensors files
of torch.distributed.checkpoint, `state.json`, which tells where the run stood and the sizes and CRC-32s of those files,
and `complete`, the CRC-32 of `state.json`, written last. `checkpoint_writer` writes it beside its place and renames it.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dflash_dist.drafter.config import DrafterConfig
from dflash_dist.errors import UserError

STATE, COMPLETE = "state.json", "complete"
DRAFTER = "drafter."
"""What the names of the drafter's weights begin with; the optimizer's tensors have other names."""
OLD_FORMAT = "optimizer.pt"
"""A file that checkpoints of 0.1 had."""
DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, UserError)
"""What reading a damaged `state.json`, or comparing the files with it, raises."""
CHUNK_BYTES = 1 << 24
# One process alone writes and reads them on purpose.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on the disk."""

    folder: Path
    step: int
    drafter: DrafterConfig
    tokens: int
    """Training tokens that were run by then."""
    val_loss: float | None
    """As measured at this very step, if it was."""

    def load_weights(self, model: nn.Module) -> None:
        """Copies the fp32 masters into `model`."""
        self.load(drafter_tensors(model))

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Copies what was saved under these names into the tensors: whole ones, or DTensors of any sharding.

        Each rank reads what it needs by itself, whatever ranks wrote it.
        """
        # Takes a second, which the launcher need not spend.
        import torch.distributed.checkpoint as dcp

        reader = dcp.HuggingFaceStorageReader(str(self.folder))
        saved = reader.read_metadata().state_dict_metadata
        untaken = [name for name in saved if name.startswith(DRAFTER) and name not in tensors]
        assert not untaken, f"weights that no parameter takes: {sorted(untaken)}"
        try:
            dcp.load(dict(tensors), storage_reader=reader, no_dist=True)
        except dcp.CheckpointException as error:  # which is no Exception
            raise cause(error) from None


def cause(error: Any) -> BaseException:
    """What a CheckpointException of torch.distributed.checkpoint came of, on the first rank that failed."""
    return error.failures[min(error.failures)][0]


def drafter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The live fp32 masters under their names in a checkpoint."""
    return {DRAFTER + name: parameter.detach() for name, parameter in model.named_parameters()}


def newest_checkpoint(root: Path, *, verify: bool = False) -> Checkpoint | None:
    """The newest whole checkpoint under `root`; damaged ones are named on stderr and passed over.

    Whole is what has all its files in their sizes. `verify`: their checksums are compared too, which reads every byte.
    UserError where it is of an older format.
    """
    return _first_whole(list(reversed(folders(root))), verify, "the one before it is used")


def find_checkpoint(root: Path, which: str) -> Checkpoint:
    """The checkpoint that `which` means: last, best (of least `val_loss`) or a step; its bytes are checked.

    UserError where there is none.
    """
    run, steps = root.parent, [step_of(folder) for folder in folders(root)]
    if which == "last":
        found = newest_checkpoint(root, verify=True)
        mend = "train it further"
    elif which == "best":
        found = _first_whole(by_val_loss(root), True, "the next best is used")
        mend = "val_loss is measured where train.validate_every and train.checkpoint_every meet; or give last or a step"
    elif not re.fullmatch("[0-9]{1,18}", which):
        raise UserError(f"checkpoint {which!r} is none of last, best and a step such as 100")
    elif int(which) not in steps:
        raise UserError(f"run {run} has no checkpoint of step {which}; it has {', '.join(map(str, steps)) or 'none'}")
    else:
        found = _first_whole([folder_of(root, int(which))], True, "give another step")
        mend = f"it has {', '.join(str(step) for step in steps if step != int(which)) or 'no other'}"
    if found is None:
        kind = {"last": "", "best": " with a val_loss"}.get(which, f" of step {which}")
        raise UserError(f"run {run} has no whole checkpoint{kind}; {mend}")
    return found


def by_val_loss(root: Path) -> list[Path]:
    """The folders of the checkpoints that tell a `val_loss`, from the least on."""
    losses = {}
    for folder in folders(root):
        try:
            loss = _read_state(folder)["val_loss"]
        except DAMAGE:
            continue
        if loss is not None:
            losses[folder] = loss
    return sorted(losses, key=lambda folder: losses[folder])


def set_damaged_aside(root: Path) -> None:
    """Renames the checkpoints under `root` that are damaged and newer than any sound one, so that none counts again.

    Each is read to its last byte, until a sound one is found. What a write left that was cut short is removed. Only who
    holds the run's lock may call this. UserError where a checkpoint is of an older format.
    """
    for left in root.glob(".step_*.partial"):
        shutil.rmtree(left, ignore_errors=True)
    for folder in reversed(folders(root)):
        _refuse_old_format(folder)
        try:
            _open(folder, verify=True)
            return
        except DAMAGE as error:
            aside = root / f"damaged_{folder.name}"
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
            what = f"checkpoint {folder} is damaged ({error})"
            print(f"warning: {what}; it is now {aside.name}, and the one before it is used", file=sys.stderr)


def folders(root: Path) -> list[Path]:
    """The checkpoint folders by step; a folder of any other name is none."""
    found = [path for path in root.glob("step_*") if re.fullmatch(r"step_[0-9]{8,}", path.name)]
    return sorted(found, key=step_of)


def folder_of(root: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies."""
    return root / f"step_{step:08d}"


def aside_of(folder: Path) -> Path:
    """Where a checkpoint is written, and where it goes to be removed."""
    return folder.with_name(f".{folder.name}.partial")


def step_of(folder: Path) -> int:
    """The step that the folder's name tells."""
    return int(folder.name.removeprefix("step_"))


def crc32(path: Path) -> int:
    """The checksum of a file."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value


def _first_whole(candidates: list[Path], verify: bool, instead: str) -> Checkpoint | None:
    for folder in candidates:
        _refuse_old_format(folder)
        try:
            return _open(folder, verify)
        except DAMAGE as error:
            print(f"warning: checkpoint {folder} is damaged ({error}); {instead}", file=sys.stderr)
    return None


def _refuse_old_format(folder: Path) -> None:
    if (folder / OLD_FORMAT).exists():
        raise UserError(
            f"checkpoint {folder} is of an older dflash-dist, whose runs this one cannot go on with or export; begin "
            "anew with --run NAME, with train.init_from if the run was exported"
        )


def _open(folder: Path, verify: bool) -> Checkpoint:
    """The checkpoint in `folder`; one of `DAMAGE` where it is not what was written."""
    state = _read_state(folder)
    listed, found = set(state["files"]), {path.name for path in folder.glob("*.safetensors")}
    if listed != found:
        raise ValueError(f"it holds {sorted(found)} instead of {sorted(listed)}")
    for name, written in state["files"].items():
        size_bytes = (folder / name).stat().st_size
        if size_bytes != written["size_bytes"]:
            raise ValueError(f"{name} has {size_bytes} bytes instead of {written['size_bytes']}")
        if verify and crc32(folder / name) != written["crc32"]:
            raise ValueError(f"{name} has another checksum than was written")
    if state["step"] != step_of(folder):
        raise ValueError(f"it is of step {state['step']}")
    drafter = DrafterConfig.from_json(state["drafter"])
    return Checkpoint(folder, state["step"], drafter, state["schedule"]["tokens"], state["val_loss"])


def _read_state(folder: Path) -> Any:
    """The object in `state.json`; one of `DAMAGE` where it is not as it was written."""
    text = (folder / STATE).read_bytes()
    if f"{zlib.crc32(text):08x}" != (folder / COMPLETE).read_text(encoding="ascii"):
        raise ValueError(f"{STATE} has another checksum than was written")
    return json.loads(text)
