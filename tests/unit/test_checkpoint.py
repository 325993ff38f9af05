"""A checkpoint is whole, or it is set aside; nothing else in the folder counts."""

import json
import shutil
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dflash_dist.drafter.model import DFlashDrafter
from dflash_dist.errors import UserError
from dflash_dist.train.checkpoint import find_checkpoint, newest_checkpoint, set_damaged_aside
from dflash_dist.train.launch import export_checkpoint
from tests.checkpoints import save, training_tensors
from tests.random_models import drafter_config, qwen3_config, random_drafter

WEIGHTS, MOMENTS = "drafter-00000.safetensors", "optimizer-00000.safetensors"


@pytest.fixture(scope="module")
def drafter() -> DFlashDrafter:
    return random_drafter(drafter_config(qwen3_config()))


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def newest_step(root: Path, *, verify: bool = False) -> int | None:
    checkpoint = newest_checkpoint(root, verify=verify)
    return checkpoint.step if checkpoint else None


def test_what_is_read_is_what_was_written_and_nothing_is_unpickled(tmp_path: Path, drafter: DFlashDrafter) -> None:
    unpickled: list[object] = []
    listening = True

    def listen(event: str, arguments: tuple[object, ...]) -> None:
        if listening and event == "pickle.find_class":
            unpickled.append(arguments)

    written = training_tensors(drafter)
    with torch.no_grad():
        for number, tensor in enumerate(written.values()):
            tensor += number
    save(tmp_path, drafter, 3, val_losses={3: 0.5})
    read = training_tensors(random_drafter(drafter.config, seed=9))
    sys.addaudithook(listen)
    checkpoint = newest_checkpoint(tmp_path, verify=True)
    assert checkpoint is not None
    checkpoint.load(read)
    listening = False
    assert not unpickled
    assert (checkpoint.tokens, checkpoint.val_loss, checkpoint.drafter) == (300, 0.5, drafter.config)
    weights = [name for name in written if name.startswith("drafter.")]
    assert all(torch.equal(read[name], written[name]) for name in weights) and len(read) == 4 * len(weights)


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_the_newest_are_kept(tmp_path: Path, drafter: DFlashDrafter, keep: int) -> None:
    save(tmp_path, drafter, 3, 6, 9, keep=keep)
    assert names(tmp_path) == [f"step_{step:08d}" for step in (3, 6, 9)][-keep:]


@pytest.mark.parametrize(
    ("val_losses", "kept", "best"),
    [
        ({3: 2.0, 6: 1.0, 9: 3.0}, [6, 12, 15], 6),
        ({3: 1.0, 6: 2.0, 9: 3.0}, [3, 12, 15], 3),
        ({3: 2.0, 15: 1.0}, [12, 15], 15),
        ({3: 1.0, 12: 0.5}, [12, 15], 12),
        ({}, [12, 15], None),
    ],
)
def test_the_best_is_kept_too(
    tmp_path: Path, drafter: DFlashDrafter, val_losses: dict[int, float], kept: list[int], best: int | None
) -> None:
    save(tmp_path, drafter, 3, 6, 9, 12, 15, val_losses=val_losses)
    assert names(tmp_path) == [f"step_{step:08d}" for step in kept]
    if best is None:
        with pytest.raises(UserError, match=r"no whole checkpoint with a val_loss; .*train\.validate_every"):
            find_checkpoint(tmp_path, "best")
    else:
        assert find_checkpoint(tmp_path, "best").step == best
    assert find_checkpoint(tmp_path, "last").step == 15


def test_a_checkpoint_is_found_by_its_step(tmp_path: Path, drafter: DFlashDrafter) -> None:
    save(tmp_path, drafter, 3, 6, val_losses={3: 1.0, 6: 2.0})
    assert find_checkpoint(tmp_path, "3").step == 3
    with pytest.raises(UserError, match="has no checkpoint of step 4; it has 3, 6"):
        find_checkpoint(tmp_path, "4")
    with pytest.raises(UserError, match="'newest' is none of last, best and a step"):
        find_checkpoint(tmp_path, "newest")
    DAMAGES["weights' end"](tmp_path / "step_00000003")
    with pytest.raises(UserError, match="no whole checkpoint of step 3; it has 6"):
        find_checkpoint(tmp_path, "3")
    assert find_checkpoint(tmp_path, "best").step == 6
    with pytest.raises(UserError, match="no whole checkpoint; train it further"):
        find_checkpoint(tmp_path / "nothing", "last")


@pytest.mark.parametrize("name", ["step_best", "step_9", "step_00000009.old", "step_00000009"])
def test_a_copy_under_another_name_is_no_newer_checkpoint(tmp_path: Path, drafter: DFlashDrafter, name: str) -> None:
    save(tmp_path, drafter, 6)
    shutil.copytree(tmp_path / "step_00000006", tmp_path / name)
    assert newest_step(tmp_path) == 6


def test_steps_are_ordered_as_numbers(tmp_path: Path, drafter: DFlashDrafter) -> None:
    save(tmp_path, drafter, 99_999_999, 100_000_000)
    assert newest_step(tmp_path) == 100_000_000


def overwrite(name: str, at: int, data: bytes) -> Callable[[Path], None]:
    """Damage by `data` at byte `at`, from the end where it is negative."""

    def damage(folder: Path) -> None:
        with (folder / name).open("r+b") as file:
            file.seek(at, 2 if at < 0 else 0)
            file.write(data)

    return damage


def cut(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:100])


def reword_state(**changes: object) -> Callable[[Path], None]:
    """Another state, with the checksum that belongs to it."""

    def damage(folder: Path) -> None:
        text = json.dumps(json.loads((folder / "state.json").read_text()) | changes)
        (folder / "state.json").write_text(text)
        (folder / "complete").write_text(f"{zlib.crc32(text.encode()):08x}")

    return damage


DAMAGES = {
    "weights cut": cut(WEIGHTS),
    "moments cut": cut(MOMENTS),
    "weights' header": overwrite(WEIGHTS, 4, b"\xff" * 16),
    "weights' end": overwrite(WEIGHTS, -400, bytes(400)),
    "moments' header": overwrite(MOMENTS, 0, bytes(64)),
    "moments' middle": overwrite(MOMENTS, 300, b"\xff"),
    "weights gone": lambda folder: (folder / WEIGHTS).unlink(),
    "weights of another rank": lambda folder: shutil.copy(folder / WEIGHTS, folder / "drafter-00001.safetensors"),
    "state gone": lambda folder: (folder / "state.json").unlink(),
    "state cut": cut("state.json"),
    "a digit of the state": overwrite("state.json", 12, b"7"),
    "mark gone": lambda folder: (folder / "complete").unlink(),
    "mark cut": lambda folder: (folder / "complete").write_bytes(b""),
    "state of another kind": lambda folder: (folder / "state.json").write_text("[]"),
    "state without checksums": reword_state(files=None),
    "state without drafter": reword_state(drafter={}),
    "state of another step": reword_state(step=3),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_of_any_kind_is_passed_over(
    tmp_path: Path, drafter: DFlashDrafter, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, drafter, 3, 6)
    damage(tmp_path / "step_00000006")
    assert newest_step(tmp_path, verify=True) == 3
    set_damaged_aside(tmp_path)
    assert "step_00000006 is damaged" in capsys.readouterr().err
    assert names(tmp_path) == ["damaged_step_00000006", "step_00000003"]
    assert newest_step(tmp_path) == 3
    save(tmp_path, drafter, 6, keep=1)
    assert names(tmp_path) == ["damaged_step_00000006", "step_00000006"] and newest_step(tmp_path, verify=True) == 6


def test_a_sound_checkpoint_is_left_alone(tmp_path: Path, drafter: DFlashDrafter) -> None:
    save(tmp_path, drafter, 3, 6)
    set_damaged_aside(tmp_path)
    assert names(tmp_path) == ["step_00000003", "step_00000006"]


def test_what_a_write_left_half_done_is_removed_at_the_next_start(tmp_path: Path, drafter: DFlashDrafter) -> None:
    save(tmp_path, drafter, 3)
    shutil.copytree(tmp_path / "step_00000003", tmp_path / ".step_00000006.partial")
    assert newest_step(tmp_path) == 3
    set_damaged_aside(tmp_path)
    assert names(tmp_path) == ["step_00000003"]


def test_an_older_format_is_refused_and_left_as_it_is(tmp_path: Path, drafter: DFlashDrafter) -> None:
    """Rather than taken for damaged, and the run begun anew."""
    old = tmp_path / "step_00000006"
    old.mkdir()
    for name in ("drafter.safetensors", "optimizer.pt", "state.json"):
        (old / name).write_text("{}")
    for read in (set_damaged_aside, newest_checkpoint):
        with pytest.raises(UserError, match="step_00000006 is of an older dflash-dist"):
            read(tmp_path)
    assert names(tmp_path) == ["step_00000006"]


def test_what_was_just_written_is_never_removed(tmp_path: Path, drafter: DFlashDrafter) -> None:
    """Even where a newer folder, that nothing has read yet, is in the way."""
    save(tmp_path, drafter, 12)
    save(tmp_path, drafter, 3, 6, keep=1)
    assert names(tmp_path) == ["step_00000006", "step_00000012"]


def test_export_passes_over_a_damaged_checkpoint(tmp_path: Path, drafter: DFlashDrafter) -> None:
    save(tmp_path / "checkpoints", drafter, 3, 6)
    DAMAGES["weights' end"](tmp_path / "checkpoints" / "step_00000006")
    export_checkpoint(tmp_path, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_export_takes_the_checkpoint_that_is_asked_for(
    tmp_path: Path, drafter: DFlashDrafter, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "checkpoints", drafter, 3, 6, val_losses={3: 1.0, 6: 2.0})
    export_checkpoint(tmp_path, tmp_path / "out", which="best")
    assert "checkpoint: step 3, val_loss 1.0" in capsys.readouterr().err
    assert (tmp_path / "out" / "model.safetensors").exists()
