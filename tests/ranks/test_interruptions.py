import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from dflash_dist.train.checkpoint import find_checkpoint
from tests.ranks.cli import Running, assert_same_weights, metrics, train, train_from_here, weights
from tests.ranks.conftest import Maker
from tests.ranks.test_bad_input import refused
from tests.tiny import make_chats, make_config

STEPS = 30
OVERRIDES = [f"train.max_steps={STEPS}", "train.epochs=8", "train.checkpoint_every=5", "train.validate_every=10"]


@pytest.fixture(scope="module")
def whole(targets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a run `whole` that nothing disturbed, on 1-2."""
    folder = tmp_path_factory.mktemp("whole")
    config = make_config(folder, targets["qwen3"], make_chats(folder / "chats.jsonl"))
    train_from_here(config, "1-2", "whole", *OVERRIDES)
    return config


FULL = [pytest.param(topo, marks=pytest.mark.full) for topo in ("1-1", "2-1", "3-1", "2-2", "x1", "x2")]


@pytest.mark.parametrize("topo", ["1-2", *FULL])
def test_ctrl_c_then_resume_equals_an_uninterrupted_run(make: Maker, whole: Path, topo: str) -> None:
    config = make("qwen3")
    running = Running(config, topo, "stopped", *OVERRIDES)
    running.wait_for_step(7)
    running.send(signal.SIGINT)
    code, stderr = running.end()
    assert code == 130, stderr
    assert "go on with: " in stderr and "--run stopped" in stderr
    done = len(metrics(config, "stopped"))
    assert 7 <= done < STEPS
    train(config, topo, "stopped", *OVERRIDES)
    if topo != "1-2":
        whole = config
        train_from_here(whole, topo, "whole", *OVERRIDES)
    assert [row["step"] for row in metrics(config, "stopped")] == list(range(1, STEPS + 1))
    assert_same_weights(weights(config, "stopped", STEPS), weights(whole, "whole", STEPS))
    for left, right in zip(metrics(config, "stopped"), metrics(whole, "whole"), strict=True):
        assert left["loss"] == right["loss"] and left.get("val_loss") == right.get("val_loss")


def test_ctrl_c_before_the_first_step(make: Maker) -> None:
    running = Running(make("qwen3"), "1-1", "run", *OVERRIDES)
    running.wait_for_ranks(2)
    running.send(signal.SIGINT)
    code, stderr = running.end()
    assert code == 130, stderr
    assert "go on with: " in stderr and "Traceback" not in stderr


def test_sigterm_checkpoints_and_ends_with_zero(make: Maker) -> None:
    config = make("qwen3")
    running = Running(config, "x1", "run", *OVERRIDES)
    running.wait_for_step(3)
    running.send(signal.SIGTERM)
    code, stderr = running.end()
    assert code == 0, stderr
    step = len(metrics(config, "run"))
    assert weights(config, "run", step)


def test_ctrl_c_that_ends_tee_too_leaves_a_checkpoint(make: Maker) -> None:
    """`train 2>&1 | tee log`: the signal reaches every process of the pipe."""
    config = make("qwen3")
    running = Running(config, "1-1", "run", *OVERRIDES)
    running.wait_for_step(3)
    running.close_stderr()
    running.send(signal.SIGINT)
    code, _ = running.end()
    assert code == 130
    assert weights(config, "run", len(metrics(config, "run")))


def test_a_run_is_held_by_one_process_and_by_its_inputs(make: Maker, targets: dict[str, Path], tmp_path: Path) -> None:
    config = make("qwen3")
    target = Path(shutil.copytree(targets["qwen3"], tmp_path / "target"))
    overrides = [*OVERRIDES, f"target.model={target}"]
    running = Running(config, "x1", "run", *overrides)
    running.wait_for_step(3)
    assert "in the hands of process" in refused(config, "--run", "run", *overrides)
    running.close_stderr()
    running.send(signal.SIGHUP)  # a terminal that is closed
    code, _ = running.end()
    assert code == 0
    step = len(metrics(config, "run"))
    assert step < STEPS and weights(config, "run", step)
    for file in (config.parent / "chats.jsonl", target / "model.safetensors"):
        content = file.read_bytes()
        if file.suffix == ".jsonl":
            file.write_bytes(b"".join(reversed(content.splitlines(keepends=True)[:30])))
        else:
            shutil.copy(targets["llama"] / file.name, file)
        line = refused(config, "--run", "run", *overrides)
        assert "run run was begun with something else" in line and (file.name in line or str(target) in line)
        file.write_bytes(content)
    done = train(config, "x1", "run", *overrides)
    assert [row["step"] for row in metrics(config, "run")] == list(range(1, STEPS + 1)), done.stderr


@pytest.mark.full
def test_rows_of_several_steps_go_on_where_a_killed_run_left_them(make: Maker) -> None:
    """A row is written at each checkpoint, so that none tells of steps on both sides of one."""
    config = make("qwen3")
    overrides = [*OVERRIDES, "train.max_steps=14", "train.log_every=4", "train.validate_every=0"]
    running = Running(config, "x1", "killed", *overrides)
    running.wait_for_step(3)
    running.ranks()[0].kill()
    assert running.end()[0] == 1
    train(config, "x1", "killed", *overrides)
    train_from_here(config, "x1", "whole", *overrides)
    whole = metrics(config, "whole")
    assert [row["step"] for row in whole] == [4, 5, 8, 10, 12, 14]
    assert [(row["step"], row["loss"]) for row in metrics(config, "killed")] == [(r["step"], r["loss"]) for r in whole]


BOTH = "target+drafter"
KILLS = [("2-1", 0, "target"), ("2-1", 2, "drafter"), ("3-1", 1, "target"), ("3-1", 3, "drafter"), ("x1", 0, BOTH)]
KILLS += [("1-2", 0, "target"), ("1-2", 1, "drafter"), ("1-2", 2, "drafter"), ("x2", 1, BOTH)]


@pytest.mark.full
@pytest.mark.parametrize(("topo", "rank", "role"), KILLS)
def test_a_killed_rank_is_named_and_the_run_resumes_exactly(make: Maker, topo: str, rank: int, role: str) -> None:
    config = make("qwen3")
    running = Running(config, topo, "killed", *OVERRIDES)
    running.wait_for_step(8)
    running.ranks()[rank].kill()
    code, stderr = running.end()
    assert code == 1
    assert f"rank {rank} ({role}) was killed by SIGKILL" in stderr.splitlines()[-1]
    assert "Traceback" not in stderr
    train(config, topo, "killed", *OVERRIDES)
    train_from_here(config, topo, "whole", *OVERRIDES)
    assert [row["step"] for row in metrics(config, "killed")] == list(range(1, STEPS + 1))
    assert_same_weights(weights(config, "killed", STEPS), weights(config, "whole", STEPS))


MOVES = [("2-1", "x1", "none")]
FULL_MOVES = [("2-1", "1-2", "none"), ("2-1", "2-2", "none"), ("x2", "2-1", "none")]
FULL_MOVES += [("1-2", "1-1", "fsdp"), ("x1", "x2", "fsdp")]


@pytest.mark.parametrize(
    ("first", "then", "shard"), [*MOVES, *(pytest.param(*move, marks=pytest.mark.full) for move in FULL_MOVES)]
)
def test_a_run_goes_on_with_another_topology(make: Maker, whole: Path, first: str, then: str, shard: str) -> None:
    """And learns what an undisturbed run learns on any."""
    config = make("qwen3")
    overrides = [*OVERRIDES, f"train.shard={shard}"]
    running = Running(config, first, "moved", *overrides)
    running.wait_for_step(8)
    running.send(signal.SIGINT)
    running.end()
    assert 8 <= len(metrics(config, "moved")) < STEPS
    train_from_here(config, then, "moved", *overrides)
    for left, right in zip(metrics(config, "moved"), metrics(whole, "whole"), strict=True):
        assert left["step"] == right["step"] and left["tokens"] == right["tokens"]
        assert left["loss"] == pytest.approx(right["loss"], rel=1e-5), left["step"]
    check_last_state(config.parent / "runs/moved", metrics(config, "moved"))


def check_last_state(run: Path, rows: list[dict[str, Any]]) -> None:
    """The last checkpoint tells where the run stood; the best one is still there."""
    state = json.loads((run / f"checkpoints/step_{STEPS:08d}/state.json").read_text())
    assert state["step"] == state["schedule"]["step"] == rows[-1]["step"]
    assert state["schedule"]["tokens"] == rows[-1]["tokens"] and state["schedule"]["batches"] > 3 * STEPS
    assert state["keys"] == {"seed": 0, "epoch": state["schedule"]["epoch"]} and state["keys"]["epoch"] > 1
    assert state["scheduler"]["learning_rate"] == rows[-1]["learning_rate"]
    assert state["val_loss"] == rows[-1]["val_loss"]
    assert state["config"] == (run / "config.yaml").read_text()
    assert state["environment"] == json.loads((run / "environment.json").read_text())
    measured = {row["val_loss"]: row["step"] for row in rows if "val_loss" in row}
    assert find_checkpoint(run / "checkpoints", "best").step == measured[min(measured)]
