"""A checkpoint is whole, or it is set aside; nothing else in the folder counts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_dist.drafter.model import DFlashDrafter
from dflash_dist.train.checkpoint import newest_checkpoint, save_checkpoint, set_damaged_aside
from dflash_dist.train.launch import export_checkpoint
from tests.random_models import drafter_config, qwen3_config, random_drafter


@pytest.fixture(scope="module")
def drafter() -> DFlashDrafter:
    return random_drafter(drafter_config(qwen3_config()))


def save(root: Path, drafter: DFlashDrafter, *steps: int, keep: int = 2) -> None:
    for step in steps:
        save_checkpoint(root, step, drafter, {"step": step}, drafter.config, keep)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def newest_step(root: Path, *, verify: bool = False) -> int | None:
    checkpoint = newest_checkpoint(root, verify=verify)
    return checkpoint.step if checkpoint else None


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_the_newest_are_kept(tmp_path: Path, drafter: DFlashDrafter, keep: int) -> None:
    save(tmp_path, drafter, 3, 6, 9, keep=keep)
    assert names(tmp_path) == [f"step_{step:08d}" for step in (3, 6, 9)][-keep:]


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
    def damage(folder: Path) -> None:
        state = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps(state | changes))

    return damage


DAMAGES = {
    "weights cut": cut("drafter.safetensors"),
    "moments cut": cut("optimizer.pt"),
    "weights' header": overwrite("drafter.safetensors", 4, b"\xff" * 16),
    "weights' end": overwrite("drafter.safetensors", -400, bytes(400)),
    "moments' header": overwrite("optimizer.pt", 0, bytes(64)),
    "moments' middle": overwrite("optimizer.pt", 300, b"\xff"),
    "weights gone": lambda folder: (folder / "drafter.safetensors").unlink(),
    "state gone": lambda folder: (folder / "state.json").unlink(),
    "state cut": cut("state.json"),
    "state of another kind": lambda folder: (folder / "state.json").write_text("[]"),
    "state without checksums": reword_state(crc32=None),
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
