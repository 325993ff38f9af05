import subprocess
import sys

import pytest

from dflash_dist.errors import UserError
from dflash_dist.topology import check_batches_per_step, check_devices, parse_topology


def test_ranks_of_a_split_topology() -> None:
    topology = parse_topology("3-2")
    assert (topology.world_size, str(topology)) == (5, "3-2")
    assert [topology.role(r) for r in range(5)] == ["target"] * 3 + ["drafter"] * 2
    assert [topology.drafter_of(r) for r in range(5)] == [None, None, None, 0, 1]
    assert topology.pairs() == [(0, 3), (0, 4), (1, 3), (1, 4), (2, 3), (2, 4)]


def test_ranks_of_a_shared_topology() -> None:
    topology = parse_topology("x2")
    assert (topology.world_size, topology.targets, topology.drafters, str(topology)) == (2, 2, 2, "x2")
    assert topology.pairs() == []
    assert [topology.drafter_of(r) for r in range(2)] == [0, 1]


def test_ranks_of_several_nodes() -> None:
    topology = parse_topology("2-1@2")
    assert (topology.world_size, topology.ranks_per_node, topology.nodes, str(topology)) == (6, 3, 2, "2-1@2")
    assert [topology.role(r) for r in range(6)] == ["target", "target", "drafter"] * 2
    assert [topology.target_of(r) for r in range(6)] == [0, 1, None, 2, 3, None]
    assert [topology.drafter_of(r) for r in range(6)] == [None, None, 0, None, None, 1]
    assert topology.pairs() == [(0, 2), (1, 2), (3, 5), (4, 5)], "hidden states stay within a node"
    for text in ("3-2@4", "x2@3"):
        topology = parse_topology(text)
        assert [topology.target_of(topology.target_rank(t)) for t in range(topology.num_targets)] == list(
            range(topology.num_targets)
        )
        assert [topology.drafter_of(topology.drafter_rank(d)) for d in range(topology.num_drafters)] == list(
            range(topology.num_drafters)
        )


@pytest.mark.parametrize(
    "text",
    [
        "3-1@0",
        "3-1@",
        "@2",
        "3-1@2@2",
        "0-1",
        "3-0",
        "abc",
        "x0",
        "3-1-1",
        "",
        "3 - 1",
        "-1",
        "x",
        "٣-١",
        "x٣",
        "9" * 5000 + "-1",
    ],
)
def test_what_is_not_a_topology_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="topology"):
        parse_topology(text)


def test_too_few_gpus_are_refused_with_what_would_fit() -> None:
    with pytest.raises(UserError, match=r"3-1 needs 4 GPUs.*2 are visible; use x1 or 1-1 or x2.*--device cpu"):
        check_devices(parse_topology("3-1"), 2, "auto")
    assert check_devices(parse_topology("3-1"), 2, "cpu") == "cpu"
    assert check_devices(parse_topology("3-1"), 0, "auto") == "cpu"
    assert check_devices(parse_topology("3-1"), 4, "auto") == "cuda"
    with pytest.raises(UserError, match="0 are visible"):
        check_devices(parse_topology("x1"), 0, "cuda")


@pytest.mark.parametrize("text", ["64-1", "1000-1", "x65"])
def test_more_ranks_than_a_cpu_bears_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="at most 64 run on a machine's CPU"):
        check_devices(parse_topology(text), 0, "auto")
    assert check_devices(parse_topology(text), 2000, "auto") == "cuda"
    assert check_devices(parse_topology("x64"), 0, "auto") == "cpu"


@pytest.mark.parametrize(("batches", "nearest"), [(1, 2), (3, 4), (5, 6)])
def test_batches_that_cannot_be_shared_are_refused_with_the_nearest(batches: int, nearest: int) -> None:
    with pytest.raises(UserError, match=f"batches_per_step={nearest}"):
        check_batches_per_step(parse_topology("1-2"), batches)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["0-1", "configs/smollm2.yaml"], "topology '0-1' has no target rank"),
        (["3-1", "no.yaml"], "config 'no.yaml' does not exist"),
        (["abc", "no.yaml"], "topology 'abc' is not one"),
        (["3-1", "configs/smollm2.yaml", "gpu"], "DEVICE=gpu, but must be cpu, cuda or auto"),
    ],
)
def test_preflight_refuses_in_one_line(arguments: list[str], part: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dflash_dist.preflight", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {part}") and done.stderr.count("\n") == 1
