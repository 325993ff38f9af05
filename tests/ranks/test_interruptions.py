import signal

import pytest

from tests.ranks.cli import Running, assert_same_weights, metrics, train, weights
from tests.ranks.conftest import Maker

STEPS = 30
OVERRIDES = [f"train.max_steps={STEPS}", "train.epochs=8", "train.checkpoint_every=5", "train.validate_every=10"]


FULL = [pytest.param(topo, marks=pytest.mark.full) for topo in ("1-1", "3-1", "2-2", "x1")]


@pytest.mark.parametrize("topo", ["2-1", "1-2", "x2", *FULL])
def test_ctrl_c_then_resume_equals_an_uninterrupted_run(make: Maker, topo: str) -> None:
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
    train(config, topo, "whole", *OVERRIDES)
    assert [row["step"] for row in metrics(config, "stopped")] == list(range(1, STEPS + 1))
    assert_same_weights(weights(config, "stopped", STEPS), weights(config, "whole", STEPS))
    for left, right in zip(metrics(config, "stopped"), metrics(config, "whole"), strict=True):
        assert left["loss"] == right["loss"] and left.get("val_loss") == right.get("val_loss")


def test_ctrl_c_before_the_first_step(make: Maker) -> None:
    running = Running(make("qwen3"), "2-1", "run", *OVERRIDES)
    running.wait_for_ranks(3)
    running.send(signal.SIGINT)
    code, stderr = running.end()
    assert code == 130, stderr
    assert "go on with: " in stderr and "Traceback" not in stderr


def test_sigterm_checkpoints_and_ends_with_zero(make: Maker) -> None:
    config = make("qwen3")
    running = Running(config, "1-1", "run", *OVERRIDES)
    running.wait_for_step(3)
    running.send(signal.SIGTERM)
    code, stderr = running.end()
    assert code == 0, stderr
    step = len(metrics(config, "run"))
    assert weights(config, "run", step)


KILLS = [("2-1", 0, "target"), ("2-1", 2, "drafter")]
FULL_KILLS = [("3-1", 1, "target"), ("3-1", 3, "drafter"), ("1-2", 0, "target"), ("1-2", 1, "drafter")]
FULL_KILLS += [("1-2", 2, "drafter"), ("x2", 1, "target+drafter"), ("x1", 0, "target+drafter")]


@pytest.mark.parametrize(
    ("topo", "rank", "role"), [*KILLS, *(pytest.param(*kill, marks=pytest.mark.full) for kill in FULL_KILLS)]
)
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
    train(config, topo, "whole", *OVERRIDES)
    assert [row["step"] for row in metrics(config, "killed")] == list(range(1, STEPS + 1))
    assert_same_weights(weights(config, "killed", STEPS), weights(config, "whole", STEPS))


def test_a_damaged_checkpoint_is_passed_over(make: Maker) -> None:
    config = make("qwen3")
    running = Running(config, "1-1", "run", *OVERRIDES)
    running.wait_for_step(12)
    running.send(signal.SIGINT)
    running.end()
    newest = sorted((config.parent / "runs/run/checkpoints").glob("step_*"))[-1]
    with (newest / "drafter.safetensors").open("r+b") as file:
        file.truncate(100)
    done = train(config, "1-1", "run", *OVERRIDES)
    assert f"{newest.name} is damaged" in done.stderr
    train(config, "1-1", "whole", *OVERRIDES)
    assert_same_weights(weights(config, "run", STEPS), weights(config, "whole", STEPS))
