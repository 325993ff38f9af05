"""The main job itself: the default config on the real target and real chats, cut to a few steps."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.ranks.cli import ENVIRONMENT, metrics


@pytest.mark.skipif(not Path(".venv/.ready").exists(), reason="`make setup` has not been run in this checkout")
def test_make_train_on_the_real_target(tmp_path: Path, smollm2_folder: Path) -> None:
    few = "train.max_steps=3 train.validate_every=3 data.max_rows=60 evaluate.prompts=1 evaluate.max_new_tokens=6"
    command = ["make", "train", "TOPO=3-1", "RUN=main", f"ARGS={few} runs_dir={tmp_path / 'runs'}"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert "Nothing to be done" not in done.stdout
    rows = metrics(tmp_path / "x", "main")
    assert [row["step"] for row in rows] == [1, 2, 3] and rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["memory_gib"] < 8
    for words in ("without a drafter", "outputs equal plain decoding", "prepare", "train", "vllm serve", "TensorBoard"):
        assert words in done.stderr, words


@pytest.mark.parametrize(("variables", "named"), [(["TOPO=0-1"], "0-1"), (["CONFIG=none.yaml"], "none.yaml")])
def test_make_refuses_before_it_sets_anything_up(tmp_path: Path, variables: list[str], named: str) -> None:
    command = ["make", "-f", os.path.abspath("Makefile"), "train", *variables]
    for name in ("dflash_dist", "configs"):
        (tmp_path / name).symlink_to(os.path.abspath(name))
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT, check=False)
    assert done.returncode == 2
    error, makes_own = done.stderr.splitlines()
    assert error.startswith("error: ") and named in error and makes_own.startswith("make: ***")
    assert not (tmp_path / ".venv").exists()
