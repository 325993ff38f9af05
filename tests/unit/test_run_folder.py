"""What a run's folder is guarded against: bad names, other folders, another process, and inputs that changed."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_dist.commands import find_run
from dflash_dist.config import Config, config_text, load_config
from dflash_dist.errors import UserError
from dflash_dist.train.run_folder import (
    check_name_is_free,
    check_writable,
    lock_run,
    record_begin,
    run_folder,
    run_store,
    target_identity,
    write_text,
)
from dflash_dist.train.world import WORLD_PREFIX, remove_left_worlds
from tests.tiny import make_chats, make_config, make_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target("qwen3", tmp_path_factory.mktemp("target") / "qwen3")


@pytest.fixture
def config(tmp_path: Path, target: Path) -> Config:
    return load_config(make_config(tmp_path, target, make_chats(tmp_path / "chats.jsonl", rows=8)))


@pytest.fixture
def folder(config: Config) -> Path:
    folder = run_folder(config, "run")
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "a/", "/tmp", ".hidden", "r\udcff", "a\nb", "é" * 128])
def test_names_that_are_no_folder_in_runs_dir(config: Config, name: str) -> None:
    with pytest.raises(UserError, match="--run NAME"):
        run_folder(config, name)


@pytest.mark.parametrize("name", ["smollm2", "a.b-c_d", "my run", "läuft"])
def test_plain_names_lie_in_runs_dir(config: Config, name: str) -> None:
    assert run_folder(config, name) == Path(config.runs_dir) / name


@pytest.mark.parametrize("file", ["config.yaml", "metrics.jsonl", "notes.txt"])
def test_a_folder_that_is_no_run_is_not_taken(config: Config, folder: Path, file: str) -> None:
    (folder / file).write_text("mine")
    with pytest.raises(UserError, match="is no run"):
        check_name_is_free(config, folder)


@pytest.mark.parametrize("result", ["metrics.jsonl", "summary.json", "checkpoints/step_00000003"])
def test_a_run_with_results_keeps_its_configuration(config: Config, folder: Path, result: str) -> None:
    other = load_config(Path(config.runs_dir).parent / "tiny.yaml", ["train.seed=7"])
    for name, text in (("environment.json", "{}"), ("config.yaml", config_text(config))):
        (folder / name).write_text(text)
    check_name_is_free(other, folder)  # it has done nothing yet
    (folder / result).mkdir(parents=True) if "/" in result else (folder / result).touch()
    check_name_is_free(config, folder)
    with pytest.raises(UserError, match=r"train\.seed: 0 -> 7"):
        check_name_is_free(other, folder)


def test_a_run_is_held_by_one_process(folder: Path) -> None:
    import os

    with (
        lock_run(folder),
        pytest.raises(UserError, match=f"run run is in the hands of process {os.getpid()}"),
    ):
        lock_run(folder)
    lock_run(folder).close()


@pytest.mark.parametrize("place", ["", "checkpoints", "tb"])
@pytest.mark.parametrize("kind", ["a folder that nobody may write", "a file", "a link to nothing"])
def test_folders_that_cannot_be_written_are_found_at_the_start(folder: Path, place: str, kind: str) -> None:
    (folder / "checkpoints").mkdir()
    check_writable(folder)
    assert [path.name for path in folder.iterdir()] == ["checkpoints"]
    shutil.rmtree(folder if not place else folder / place, ignore_errors=True)
    if kind == "a file":
        (folder / place).touch()
    else:  # the kernel lets not even root make a file in /proc
        (folder / place).symlink_to("/proc" if kind.startswith("a folder") else "/proc/nothing")
    with pytest.raises(UserError, match=f"{folder / place} cannot be written: .* --run NAME"):
        check_writable(folder)


@pytest.mark.parametrize("fails", ["write", "rename"])
def test_a_small_file_is_written_whole_or_not_at_all(tmp_path: Path, fails: str) -> None:
    path = tmp_path / "file.json"
    if fails == "write":
        (tmp_path / ".file.json.partial").symlink_to("/dev/full")
    else:
        path.mkdir()
    with pytest.raises(UserError, match=f"{path} cannot be written"):
        write_text(path, "{}")
    assert [name.name for name in tmp_path.iterdir()] == ([] if fails == "write" else ["file.json"])


def test_what_a_killed_launcher_left_is_removed(folder: Path) -> None:
    for name in (f"{WORLD_PREFIX}1", f"{WORLD_PREFIX}2", "checkpoints"):
        (folder / name).mkdir()
        (folder / name / "file").touch()
    remove_left_worlds(folder)
    assert [path.name for path in folder.iterdir()] == ["checkpoints"]


def save_scaled(file: Path, factor: float) -> None:
    save_file({name: tensor * factor for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})


@pytest.mark.parametrize("change", ["weights", "one large tensor", "config", "a file more", "a file less"])
def test_another_target_has_another_identity(tmp_path: Path, target: Path, change: str) -> None:
    folder = tmp_path / "target"
    shutil.copytree(target, folder)
    weights = folder / "model.safetensors"
    big = {"a": torch.zeros(200_000), "b": torch.ones(500_000), "c": torch.zeros(200_000)}
    save_file(big, folder / "big.safetensors")
    before = target_identity(folder)
    if change == "weights":
        save_scaled(weights, 1.5)
    elif change == "one large tensor":
        save_file(big | {"b": torch.zeros(500_000)}, folder / "big.safetensors")
    elif change == "config":
        (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | {"x": 1}))
    elif change == "a file more":
        shutil.copy(weights, folder / "more.safetensors")
    else:
        weights.unlink()
    assert target_identity(folder) != before


def test_a_copied_target_has_the_same_identity(tmp_path: Path, target: Path) -> None:
    shutil.copytree(target, tmp_path / "copy", copy_function=shutil.copy)  # with new times
    assert target_identity(tmp_path / "copy") == target_identity(target)


@pytest.mark.parametrize("changed", ["data", "target"])
def test_a_run_does_not_go_on_with_other_inputs(
    config: Config, folder: Path, tmp_path: Path, target: Path, changed: str
) -> None:
    local = tmp_path / "target"
    shutil.copytree(target, local)
    inputs: Any = SimpleNamespace(store=SimpleNamespace(fingerprint="first"), target_folder=local)
    record_begin(config, inputs, {}, folder, resumes=False)
    record_begin(config, inputs, {}, folder, resumes=True)
    if changed == "data":
        inputs.store.fingerprint = "second"
    else:
        save_scaled(local / "model.safetensors", 2.0)
    with pytest.raises(UserError, match="data.sources" if changed == "data" else "weights of target"):
        record_begin(config, inputs, {}, folder, resumes=True)
    record_begin(config, inputs, {}, folder, resumes=False)  # nothing was trained: it begins anew


def test_a_runs_own_store_is_opened_though_the_data_changed(config: Config, folder: Path, target: Path) -> None:
    from dflash_dist.data.prepare import prepare
    from dflash_dist.data.store import TokenStore

    store = TokenStore.open(prepare(config, target))
    record_begin(config, SimpleNamespace(store=store, target_folder=target), {}, folder, resumes=False)  # type: ignore[arg-type]
    chats = Path(config.data.sources[0])
    rows = chats.read_text().splitlines(keepends=True)
    chats.write_text("".join(rows[:4]))
    assert run_store(folder).fingerprint == store.fingerprint
    shutil.rmtree(store.folder)
    with pytest.raises(UserError, match="other data"):
        run_store(folder)
    chats.write_text("".join(rows))
    assert run_store(folder).fingerprint == store.fingerprint


def test_a_folder_that_is_no_run_does_not_hide_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("base", "runs/base"):
        Path(folder).mkdir(parents=True)
    with pytest.raises(UserError, match=r"neither base nor runs/base is a run"):
        find_run(Path("base"))
    Path("runs/base/config.yaml").touch()
    assert find_run(Path("base")) == Path("runs/base")
    assert find_run(Path("runs/base")) == Path("runs/base")
