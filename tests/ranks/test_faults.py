"""What fails in the field: the right rank is named, the others end soon, and the resumed run equals a sound one."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from dflash_dist.topology import parse_topology
from tests.ranks.cli import Running, assert_same_weights, metrics, train, train_from_here, weights
from tests.ranks.conftest import Maker
from tests.ranks.faults import (
    INJECTOR,
    Fault,
    corrupt_store,
    fill_disk,
    hang,
    kill,
    kill_and_truncate,
    restore_store,
    stop,
    strike,
    throw,
    throw_and_hang,
    truncate_newest_checkpoint,
)

CHECKPOINT_EVERY, STEPS_A_FAULT = 5, 15
CASES: list[tuple[str, int]] = [("2-1", 0), ("2-1", 1), ("2-1", 2), ("x2", 0), ("x2", 1)]
"""Ranks of each role, those with the world's store among them."""


def overrides(steps: int) -> list[str]:
    every = [f"train.checkpoint_every={CHECKPOINT_EVERY}", "train.validate_every=10", "train.log_every=1"]
    return [f"train.max_steps={steps}", "train.epochs=1000", *every]


def start(config: Path, topo: str, run: str, steps: int) -> Running:
    (config.parent / "sitecustomize.py").write_text(INJECTOR, encoding="utf-8")
    for trigger in [*config.parent.glob("raise_*"), *config.parent.glob("hang_*")]:
        trigger.unlink()
    folder = str(config.parent)
    path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    return Running(config, topo, run, *overrides(steps), FAULT_FOLDER=folder, PYTHONPATH=path)


def strike_and_resume(config: Path, topo: str, faults: list[tuple[Fault, int]], rng: random.Random) -> None:
    """One run that meets one fault after another, each at a random moment, and then goes on to its end."""
    steps = 10 + STEPS_A_FAULT * len(faults)
    topology = parse_topology(topo)
    damaged = []
    for number, (fault, rank) in enumerate(faults):
        world = start(config, topo, "struck", steps)
        world.wait_for_step(5 + STEPS_A_FAULT * number + rng.randrange(CHECKPOINT_EVERY))
        time.sleep(rng.random() / 20)  # any moment within a step
        strike(world, fault, rank, topology.role(rank), config)
        restore_store(config)
        if fault is kill_and_truncate:
            damaged.append(truncate_newest_checkpoint(config, "struck", rng))
    train(config, topo, "struck", *overrides(steps))
    train_from_here(config, topo, "whole", *overrides(steps))
    assert [row["step"] for row in metrics(config, "struck")] == list(range(1, steps + 1))
    assert [row["loss"] for row in metrics(config, "struck")] == [row["loss"] for row in metrics(config, "whole")]
    assert_same_weights(weights(config, "struck", steps), weights(config, "whole", steps))
    for name in damaged:
        assert (config.parent / "runs/struck/checkpoints" / f"damaged_{name}").exists()


def test_one_fault_after_another(make: Maker) -> None:
    faults: list[tuple[Fault, int]] = [(stop, 1), (kill_and_truncate, 0), (throw, 1), (fill_disk, 2)]
    strike_and_resume(make("qwen3"), "2-1", [*faults, (throw_and_hang, 2), (corrupt_store, 0)], random.Random(0))


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("topo", "rank"), CASES)
@pytest.mark.parametrize("fault", [kill, kill_and_truncate, stop, throw])
def test_ten_moments(make: Maker, fault: Fault, topo: str, rank: int) -> None:
    strike_and_resume(make("qwen3"), topo, [(fault, rank)] * 10, random.Random(f"{fault.__name__} {topo} {rank}"))


@pytest.mark.full
@pytest.mark.parametrize(("topo", "rank"), [("2-1", 2), ("x2", 0)])
def test_ten_full_disks(make: Maker, topo: str, rank: int) -> None:
    """Of the first drafter rank, which alone writes."""
    strike_and_resume(make("qwen3"), topo, [(fill_disk, rank)] * 10, random.Random(topo))


@pytest.mark.full
@pytest.mark.parametrize("topo", ["2-1", "x2"])
def test_ten_corrupt_stores(make: Maker, topo: str) -> None:
    strike_and_resume(make("qwen3"), topo, [(corrupt_store, 0)] * 10, random.Random(topo))


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("topo", "rank"), [("2-1", 1), ("2-1", 2)])
def test_work_that_hangs(make: Maker, topo: str, rank: int) -> None:
    """Found after 2 minutes, or on a machine so busy that the run stood still at times, after 20 times as long."""
    config = make("qwen3")
    world = start(config, topo, "run", 10_000)
    world.wait_for_step(1)
    while metrics(config, "run")[-1]["time_s"] < 20:  # the watch wants to have seen the run's pace
        world.wait_for_step(len(metrics(config, "run")) + 1)
    strike(world, hang, rank, parse_topology(topo).role(rank), config, within_s=1250)


def test_a_world_starts_again_by_itself(make: Maker) -> None:
    config = make("qwen3")
    steps = 30
    world = Running(config, "1-1", "run", *overrides(steps), "--max-restarts", "2")
    world.wait_for_step(7)
    world.ranks()[1].kill()
    code, stderr = world.end()
    assert code == 0, stderr
    assert "error: rank 1 (drafter) was killed by SIGKILL; its last batch: step " in stderr
    assert "restart 1 of 2: the world goes on after step " in stderr
    train_from_here(config, "1-1", "whole", *overrides(steps))
    assert_same_weights(weights(config, "run", steps), weights(config, "whole", steps))
