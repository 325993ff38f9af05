import gzip
import json
from pathlib import Path

import pytest
import torch

from dflash_dist.topology import parse_topology
from tests.ranks.agents import Agents
from tests.ranks.cli import dflash, metrics, train, weights
from tests.ranks.conftest import Maker

TOPOLOGIES = ["1-1", "3-1", "2-2", "5-3", "x1", "x2", "2-1@2"]
MORE = [*TOPOLOGIES, "2-1", "1-2", "x3", "x1@2", "1-1@3"]
DESIGN_KEYS = {
    "step", "loss", "accuracy", "tau_estimate", "tokens", "ktok_s", "target_wait", "drafter_wait", "ring_depth",
    "memory_gib", "learning_rate", "grad_norm", "time_s",
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "topologies"),
    [
        ("qwen3", TOPOLOGIES),
        *(pytest.param(kind, MORE, marks=pytest.mark.full) for kind in ("qwen3", "llama", "hybrid")),
    ],
)
def test_every_topology_trains_alike(make: Maker, kind: str, topologies: list[str]) -> None:
    config = make(kind, schedule={"batches_per_step": 6})
    runs = {}
    for topo in topologies:
        train_anywhere(config, topo)
        runs[topo] = metrics(config, topo)
    first = runs["1-1"]
    assert [row["step"] for row in first] == list(range(1, 9))
    assert first[-1]["loss"] < first[0]["loss"]
    assert ["val_loss" in row for row in first] == [False, False, False, True, False, False, False, True]
    for topo, rows in runs.items():
        assert rows[0].keys() >= DESIGN_KEYS
        for row, expected in zip(rows, first, strict=True):
            for key in ("loss", "accuracy", "tau_estimate", "grad_norm", "val_loss"):
                assert row.get(key, 0) == pytest.approx(expected.get(key, 0), rel=1e-5), (topo, row["step"], key)
            assert row["tokens"] == expected["tokens"]
    for name, tensor in weights(config, "1-1", 8).items():
        torch.testing.assert_close(weights(config, "2-2", 8)[name], tensor, rtol=1e-3, atol=1e-4)


def train_anywhere(config: Path, topo: str) -> None:
    """A whole run on any topology, named after it; several nodes are several torchrun agents on this machine."""
    topology = parse_topology(topo)
    if topology.nodes == 1:
        train(config, topo, topo)
        return
    world = Agents(config, topo, topo)
    assert world.end() == [0] * topology.nodes, world.text()


@pytest.mark.parametrize("kind", ["hybrid", pytest.param("llama", marks=pytest.mark.full)])
def test_other_targets_train_export_and_evaluate(make: Maker, kind: str) -> None:
    config = make(kind)
    train(config, "2-1", "run")
    folder = config.parent / "runs" / "run"
    for name in ("config.yaml", "environment.json", "metrics.jsonl", "tb", "checkpoints", "export"):
        assert (folder / name).exists(), name
    streams = sorted(path.relative_to(folder).as_posix() for path in (folder / "profile").rglob("*.*"))
    assert streams == [f"profile/stream/rank{rank}.jsonl" for rank in range(3)]
    for name in streams:
        lines = [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]
        assert lines and all(line["wakeup_ms"] >= 0 for line in lines), name
    done = dflash("eval", "--run", str(folder), "--json", "--max-new-tokens", "8")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert {"tau_pooled", "tau_macro", "prompts", "greedy_equal", "tokens_per_s", "speedup"} <= figures.keys()
    assert figures["greedy_equal"] == figures["prompts"] == 2


@pytest.mark.parametrize("topo", [pytest.param("1-1", marks=pytest.mark.full), "1-2"])
def test_traces_of_every_rank_do_not_harm_the_run(make: Maker, topo: str) -> None:
    """Messages are on their way when the window ends; torch must not write their end into freed memory."""
    config = make("qwen3")
    train(config, topo, "traced", "profile.start_step=2", "profile.steps=2")
    traces = sorted(path.name.split(".")[0] for path in Path(config.parent, "runs/traced/profile").glob("*.gz"))
    assert traces == [f"rank{rank}" for rank in range(len(topo.split("-")) + (topo == "1-2"))]
    loops = {
        "rank0": {"load", "wait_slot", "forward", "gather", "send"},
        "rank1": {"load", "anchors", "receive", "draft_forward", "loss", "backward", "all_reduce", "optimizer"},
    }
    for path in Path(config.parent, "runs/traced/profile").glob("rank[01].*"):
        trace = json.loads(gzip.decompress(path.read_bytes()))
        assert (trace["topology"], trace["gpu"]) == (topo, None) and trace["versions"]["torch"] == torch.__version__
        spans = {event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"}
        assert loops[path.name.split(".")[0]] <= spans, path.name
    train(config, topo, "plain")
    assert [row["loss"] for row in metrics(config, "traced")] == [row["loss"] for row in metrics(config, "plain")]


def test_a_new_run_can_start_from_a_drafter(make: Maker) -> None:
    config = make("qwen3")
    train(config, "x1", "first")
    first = metrics(config, "first")
    drafter = config.parent / "runs/first/export/plain"
    done = dflash(
        "train", "--config", str(config), "--topo", "x1", "--run", "second", "--init-from", str(drafter)
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert metrics(config, "second")[0]["loss"] < first[0]["loss"]


def test_a_finished_run_says_so_and_another_config_is_refused(make: Maker) -> None:
    config = make("qwen3")
    train(config, "x1", "run")
    before = (config.parent / "runs/run/metrics.jsonl").read_bytes()
    again = train(config, "x1", "run")
    assert "finished" in again.stderr
    assert (config.parent / "runs/run/metrics.jsonl").read_bytes() == before
    other = dflash("train", "--config", str(config), "--topo", "x1", "--run", "run", "train.learning_rate=1.0")
    assert other.returncode == 2
    assert "train.learning_rate: 0.003 -> 1.0" in other.stderr and other.stderr.count("\n") == 1


@pytest.mark.full
def test_an_outer_torchrun_works_too(make: Maker) -> None:
    import subprocess
    import sys

    from tests.ranks.cli import ENVIRONMENT

    config = make("qwen3")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command += [
        "--",
        "dflash_dist",
        "train",
        "--config",
        str(config),
        "--topo",
        "1-1",
        "--run",
        "outer",
        "--device",
        "cpu",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert (config.parent / "runs/outer/summary.json").exists()
    assert len(metrics(config, "outer")) == 8


@pytest.mark.parametrize("kind", ["hybrid", pytest.param("llama", marks=pytest.mark.full)])
def test_objectives_on_the_targets_distribution_train_alike(make: Maker, kind: str) -> None:
    """The last state travels as one more tap, and noise does not depend on the topology."""
    config = make(
        kind,
        objective={"kind": "kl", "weights": "dpace"},
        noise={"kind": "gaussian", "scale": 0.2, "schedule": "cosine"},
    )
    runs = {}
    for topo in ("1-1", "2-2", "x1"):
        train(config, topo, topo)
        runs[topo] = metrics(config, topo)
    first = runs["1-1"]
    assert first[-1]["loss"] < first[0]["loss"]
    for topo, rows in runs.items():
        for row, expected in zip(rows, first, strict=True):
            for key in ("loss", "grad_norm", "val_loss"):
                assert row.get(key, 0) == pytest.approx(expected.get(key, 0), rel=1e-4), (topo, row["step"], key)
    train(config, "1-1", "quiet", "noise.kind=none")
    assert metrics(config, "quiet")[0]["loss"] != first[0]["loss"]


def test_states_in_eight_bits_train_alike(make: Maker) -> None:
    config = make("qwen3")
    runs = {}
    for topo, kind in (("1-1", "full"), ("1-1", "fp8"), ("2-2", "fp8")):
        train(config, topo, f"{topo}-{kind}", f"schedule.wire={kind}")
        runs[topo, kind] = [row["loss"] for row in metrics(config, f"{topo}-{kind}")]
    assert runs["2-2", "fp8"] == pytest.approx(runs["1-1", "fp8"], rel=1e-5)
    full, fp8 = runs["1-1", "full"], runs["1-1", "fp8"]
    assert fp8 != full
    assert fp8 == pytest.approx(full, rel=5e-3)  # seen: 9e-4 at the first step, 9e-5 later


def test_a_sharded_drafter_trains_alike(make: Maker) -> None:
    config = make("qwen3")
    train(config, "1-1", "whole", "train.shard=fsdp")  # nothing to share there
    whole = metrics(config, "whole")
    for topo in ("1-2", "x2"):
        train(config, topo, topo, "train.shard=fsdp")
        for row, expected in zip(metrics(config, topo), whole, strict=True):
            for key in ("loss", "val_loss", "grad_norm"):
                assert row.get(key, 0) == pytest.approx(expected.get(key, 0), rel=1e-5), (topo, row["step"], key)
