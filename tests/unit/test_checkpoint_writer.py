"""Training goes on while a checkpoint is written, and hears of it when that fails."""

import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from dflash_dist.drafter.model import DFlashDrafter
from dflash_dist.errors import RunFailed, UserError
from dflash_dist.train.checkpoint import drafter_tensors, newest_checkpoint
from dflash_dist.train.checkpoint_writer import CheckpointWriter
from tests.checkpoints import run_state
from tests.random_models import drafter_config, qwen3_config, random_drafter

HANG_S = 60


@pytest.fixture
def drafter() -> DFlashDrafter:
    return random_drafter(drafter_config(qwen3_config()))


@pytest.fixture
def writer(tmp_path: Path, drafter: DFlashDrafter) -> CheckpointWriter:
    return CheckpointWriter(tmp_path, drafter_tensors(drafter), keep=2)


def save(writer: CheckpointWriter, drafter: DFlashDrafter, step: int) -> None:
    writer.copy()
    writer.write(run_state(drafter.config, step))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set to let the disk answer: until then no file can be flushed to it."""
    answers = threading.Event()
    fsync = os.fsync

    def slow_fsync(descriptor: int) -> None:
        if not answers.wait(HANG_S):
            raise OSError("the disk did not answer: who was to let it waits for it")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow_fsync)
    return answers


@contextmanager
def small_files(most_bytes: int) -> Iterator[None]:
    """Files end at this size, as on a full disk."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


def test_training_does_not_wait_for_the_disk(
    tmp_path: Path, writer: CheckpointWriter, drafter: DFlashDrafter, disk: threading.Event
) -> None:
    save(writer, drafter, 3)
    expected = {name: parameter.clone() for name, parameter in drafter.named_parameters()}
    with torch.no_grad():  # the steps that go on meanwhile
        for parameter in drafter.parameters():
            parameter += 1
    writer.poll()
    assert newest_checkpoint(tmp_path) is None
    disk.set()
    writer.wait()
    checkpoint = newest_checkpoint(tmp_path, verify=True)
    assert checkpoint is not None and checkpoint.step == 3
    checkpoint.load_weights(drafter)
    assert all(torch.equal(parameter, expected[name]) for name, parameter in drafter.named_parameters())


def test_the_next_copy_waits_for_the_write_before(
    tmp_path: Path, writer: CheckpointWriter, drafter: DFlashDrafter, disk: threading.Event
) -> None:
    save(writer, drafter, 3)
    disk.set()
    writer.copy()
    checkpoint = newest_checkpoint(tmp_path, verify=True)
    assert checkpoint is not None and checkpoint.step == 3


@pytest.mark.parametrize("told_by", ["poll", "wait", "copy"])
def test_a_full_disk_is_told_once_and_nothing_half_written_stays(
    tmp_path: Path, writer: CheckpointWriter, drafter: DFlashDrafter, told_by: str
) -> None:
    save(writer, drafter, 3)
    writer.wait()
    with small_files(60_000):
        save(writer, drafter, 6)
        writer.close()  # which waits, but tells nothing
    with pytest.raises(UserError, match=r"checkpoint of step 6 cannot be written to .*free some space"):
        getattr(writer, told_by)()
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000003"]
    save(writer, drafter, 6)
    writer.wait()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path, drafter: DFlashDrafter) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    writer = CheckpointWriter(tmp_path / "checkpoints", drafter_tensors(drafter), keep=2)
    save(writer, drafter, 3)
    with pytest.raises(UserError, match="checkpoint of step 3 cannot be written"):
        writer.wait()


def test_weights_that_are_not_finite_are_not_written(
    tmp_path: Path, writer: CheckpointWriter, drafter: DFlashDrafter
) -> None:
    name, parameter = next(iter(drafter.named_parameters()))
    with torch.no_grad():
        parameter.view(-1)[0] = torch.nan
    save(writer, drafter, 3)
    with pytest.raises(RunFailed, match=f"step 3: 1 weights are not finite, such as {name}; no checkpoint was written"):
        writer.wait()
    assert list(tmp_path.iterdir()) == []
