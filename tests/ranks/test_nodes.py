"""Worlds of several torchrun agents, and signals under such an agent."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from tests.ranks.agents import Agents
from tests.ranks.cli import metrics, weights
from tests.ranks.conftest import Maker

LONG = ["train.max_steps=4000", "train.epochs=1000", "train.checkpoint_every=1000"]


def assert_all_end(ranks: dict[int, psutil.Process], within_s: float) -> None:
    _, alive = psutil.wait_procs(list(ranks.values()), timeout=within_s)
    assert not alive, f"ranks outlive their agent: {alive}"


def test_a_rank_that_dies_on_one_node_is_named_on_the_other(make: Maker) -> None:
    """The agent of the other node does not learn of it: its ranks do."""
    config = make("qwen3")
    world = Agents(config, "1-1@2", "run", *LONG)
    world.wait_for_step(1)
    while metrics(config, "run")[-1]["time_s"] < 4:  # a beat tells of a place once a second
        world.wait_for_step(len(metrics(config, "run")) + 1)
    ranks = world.ranks()
    began_s = time.monotonic()
    ranks[3].kill()
    assert_all_end(ranks, within_s=30)
    assert all(world.end()), world.text()
    assert time.monotonic() - began_s < 45
    assert "error: rank 3 (drafter) is gone" in world.text()
    assert "its last batch: step " in world.text()


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGUSR1, -signal.SIGUSR1),
        (signal.SIGTERM, 1),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.full),
    ],
)
def test_ranks_checkpoint_and_end_with_their_agent(make: Maker, number: signal.Signals, code: int) -> None:
    """torchrun itself dies of SIGUSR1 and SIGKILL, and returns 1 on SIGTERM."""
    config = make("qwen3")
    world = Agents(config, "1-1", "run", *LONG)
    world.wait_for_step(3)
    ranks = world.ranks()
    os.kill(world.agents[0].pid, number)
    assert_all_end(ranks, within_s=30)
    assert world.end() == [code], world.text()
    assert weights(config, "run", len(metrics(config, "run")))


def test_a_stop_asked_of_any_rank_stops_all(make: Maker) -> None:
    """One machine of several is told to go: the others hear it too."""
    config = make("qwen3")
    world = Agents(config, "x1@2", "run", *LONG)
    world.wait_for_step(3)
    world.ranks()[1].send_signal(signal.SIGUSR1)
    assert world.end() == [0, 0], world.text()
    assert weights(config, "run", len(metrics(config, "run")))


def test_nodes_that_were_given_different_commands_are_refused(make: Maker) -> None:
    rates = ["train.learning_rate=0.1", "train.learning_rate=0.2"]
    world = Agents(make("qwen3"), "x1@2", "run", of_node=rates)
    assert all(world.end())
    (error,) = {line for line in world.text().splitlines() if line.startswith("error: ")}
    assert "with another config or --run than rank 0 (train.learning_rate: 0." in error and "the same command" in error


@pytest.mark.full
def test_torchrun_starts_a_world_again(make: Maker) -> None:
    """Its agents may count restarts differently, and keep a store in which the world before left its port."""
    config = make("qwen3")
    overrides = ["train.max_steps=300", "train.epochs=100", "train.checkpoint_every=10"]
    world = Agents(config, "1-1@2", "run", *overrides, max_restarts=2)
    world.wait_for_step(30)
    world.ranks()[3].kill()
    assert world.end() == [0, 0], world.text()
    assert "error: rank 3 (drafter) is gone" in world.text()
    assert [row["step"] for row in metrics(config, "run")] == list(range(1, 301))
