"""The folder of a run: its name, its lock, and the record of what the run was begun with."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from dflash_dist.config import Config, config_difference, config_text, load_config
from dflash_dist.data.prepare import prepare
from dflash_dist.data.store import TokenStore
from dflash_dist.errors import UserError
from dflash_dist.target.package import target_folder
from dflash_dist.train.inputs import Inputs
from dflash_dist.train.metrics import METRICS_FILE

CONFIG, ENVIRONMENT, SUMMARY = "config.yaml", "environment.json", "summary.json"
INPUTS, LOCK, CHECKPOINTS = "inputs.json", ".lock", "checkpoints"
FILLED = (CHECKPOINTS, "tb")
"""The folders in a run's that are made at its begin; profile/ is made by what is written there."""
MOST_NAME_BYTES = 255
SAMPLES, SAMPLE_BYTES = 64, 4096
"""How much of each weight file is hashed: enough to tell models apart, and quick for any size."""


def run_folder(config: Config, name: str) -> Path:
    """Where run `name` lies; UserError where the name is not that of one visible folder."""
    plain = Path(name).name == name and not name.startswith(".") and name.isprintable()
    if not plain or not 0 < len(os.fsencode(name)) <= MOST_NAME_BYTES:
        raise UserError(
            f"run name {name!r} is not the plain name of a folder in {config.runs_dir}; give another with --run NAME, "
            "without slashes or a leading dot"
        )
    return Path(config.runs_dir) / name


def run_config(folder: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration saved with a run, with `overrides` applied."""
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder} is not a run: it has no {CONFIG}")
    return load_config(folder / CONFIG, overrides)


def run_store(folder: Path) -> TokenStore:
    """The token store that the run was trained on, made again where it is gone; UserError where the data changed."""
    config, fingerprint = run_config(folder), _recorded(folder).get("data")
    stored = Path(config.cache_dir) / "stores" / str(fingerprint)
    if stored.exists():
        return TokenStore.open(stored)
    made = prepare(config, Path(target_folder(config.target.model, Path(config.cache_dir))))
    if fingerprint not in (None, made.name):
        raise UserError(
            f"run {folder.name} was trained on other data than data.sources now give, so that its held-out documents "
            "are not known; put the data back, or give --prompts FILE"
        )
    return TokenStore.open(made)


def check_name_is_free(config: Config, folder: Path) -> None:
    """UserError where the folder is something else than a run, or a run that was begun with another configuration."""
    holds = [path.name for path in folder.iterdir() if not path.name.startswith(".")] if folder.is_dir() else []
    if holds and ENVIRONMENT not in holds:
        raise UserError(
            f"{folder} is there already and is no run: it has no {ENVIRONMENT}; remove it, or give the run another "
            "name with --run NAME"
        )
    begun = [folder / METRICS_FILE, folder / SUMMARY, *(folder / CHECKPOINTS).glob("step_*")]
    if (folder / CONFIG).exists() and any(path.exists() for path in begun):
        difference = config_difference(run_config(folder), config)
        if difference:
            raise UserError(
                f"run {folder.name} exists with another configuration ({'; '.join(difference)}); "
                "give the new one a name of its own with --run NAME"
            )


def check_writable(folder: Path) -> None:
    """UserError where the run's folder, or one of those in it, cannot be written: the first checkpoint would fail."""
    for place in (folder, *(folder / name for name in FILLED)):
        if os.path.lexists(place):
            try:
                tempfile.TemporaryFile(dir=place).close()
            except OSError as error:
                raise UserError(
                    f"{place} cannot be written: {error.strerror}; make it a folder that this user may write to, free "
                    "some space, or give the run another name with --run NAME"
                ) from None


def is_finished(folder: Path) -> bool:
    """Whether the run was trained, exported and evaluated."""
    return (folder / SUMMARY).exists()


def lock_run(folder: Path) -> IO[str]:
    """Keeps other processes off the run until the returned file is closed or this process ends.

    UserError, naming the process that has the run, where one has. File systems without locks go without.
    """
    lock = (folder / LOCK).open("a+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read()
        lock.close()
        raise UserError(
            f"run {folder.name} is in the hands of process {owner}; wait for it or stop it, or give this one a name "
            "of its own with --run NAME"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS):
            raise
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def is_held(folder: Path) -> bool:
    """Whether a process trains the run now; where there are no locks, none can be seen."""
    try:
        with (folder / LOCK).open(encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def record_begin(config: Config, inputs: Inputs, environment: dict[str, Any], folder: Path, *, resumes: bool) -> None:
    """Writes down what the run is begun with; UserError where it `resumes` and was begun with something else."""
    recorded, now = _recorded(folder), input_identity(inputs)
    changed = [name for name, identity in now.items() if resumes and recorded.get(name, identity) != identity]
    if changed:
        what = {
            "data": f"what data.sources={list(config.data.sources)} hold, or the tokenizer or chat template",
            "target": f"the config or weights of target {config.target.model}",
        }
        shown = "; ".join(f"{what[name]}: {recorded[name][:12]} -> {now[name][:12]}" for name in changed)
        raise UserError(
            f"run {folder.name} was begun with something else ({shown}); put it back, or begin anew with --run NAME"
        )
    # The environment first: it is what tells a run from another folder.
    write_text(folder / ENVIRONMENT, json.dumps(environment, indent=1))
    write_text(folder / INPUTS, json.dumps(now, indent=1))
    write_text(folder / CONFIG, config_text(config))


def input_identity(inputs: Inputs) -> dict[str, str]:
    """Hex hashes of the run's data and of its target, which differ where another drafter would come out."""
    return {"data": inputs.store.fingerprint, "target": target_identity(Path(inputs.target_folder))}


def target_identity(folder: Path) -> str:
    """Hex of a hash of the target's config and weights: of each weight file its size and samples from end to end.

    Takes milliseconds for any size, and finds every other model; a change of a few bytes alone may go unseen.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for sample in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def write_text(path: Path, text: str) -> None:
    """Writes a small file whole or not at all; UserError where the disk is full."""
    aside = path.with_name(f".{path.name}.partial")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.rename(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise UserError(f"{path} cannot be written: {error}; free some space and start again") from None


def _recorded(folder: Path) -> dict[str, str]:
    """The hashes of `input_identity` at the run's begin; empty for a run without them."""
    if not (folder / INPUTS).exists():
        return {}
    try:
        return dict(json.loads((folder / INPUTS).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{folder / INPUTS} cannot be read: {error}; remove it to go on without its check") from None
