"""Two drafter ranks on gloo, replicated and sharded, against one process that adds up what both give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dflash_dist.config import TrainConfig
from dflash_dist.drafter.anchors import draw_blocks
from dflash_dist.drafter.loss import SUMS, block_sums
from dflash_dist.drafter.model import DFlashDrafter
from dflash_dist.target.load import TargetEnds
from dflash_dist.train import gradients
from dflash_dist.train.gradients import shard_drafter
from dflash_dist.train.optimizer import Optimizer
from tests.random_models import MASK, VOCAB, documents, drafter_config, llama_config, random_drafter

CONFIG = drafter_config(llama_config(hidden_size=16, intermediate_size=25), num_layers=3, target_layer_ids=(0, 1, 2))
SETTINGS = TrainConfig(learning_rate=1e-3, clip_norm=0.5)
RANKS, STEPS, BATCHES = 2, 5, 2
NO_ANCHORS, NO_BATCH, POISONED = (2, 1), (3, 1), (4, 0)
"""(step, rank) whose last batch has no anchor, is missing, or has a finite loss with a gradient that is not."""
SHARDS = ["none", "fsdp"]


def main(rank: int, folder: Path) -> None:
    """One rank: trains replicated, then sharded, and leaves in the folder what it saw."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    group = dist.new_group([0, 1])
    gradients.BUCKET_BYTES = 2048  # ten buckets of this tiny drafter
    log: list[str] = []
    all_reduce = dist.all_reduce

    def logged(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        log.append(f"all_reduce {tensor.numel()}")
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = logged
    results = {}
    for shard in SHARDS:
        drafter = random_drafter(CONFIG)
        if shard == "fsdp":
            shard_drafter(drafter, group, torch.device("cpu"))
        optimizer = Optimizer(drafter, SETTINGS, STEPS, group)
        log.clear()
        steps = [train_step(drafter, optimizer, rank, step, group, log) for step in range(1, STEPS + 1)]
        state = optimizer.state_tensors()
        dcp.save(state, checkpoint_id=folder / shard)
        results[shard] = {"steps": steps, "log": list(log), "state": {n: whole(t) for n, t in state.items()}}
        restored = Optimizer(drafter, SETTINGS, STEPS, group)
        loaded = restored.state_tensors()
        dcp.load(loaded, checkpoint_id=folder / "one")
        restored.load_state_tensors(loaded)
        results[shard]["from one"] = {n: whole(t) for n, t in restored.state_tensors().items()}
    torch.save(results, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


def train_step(
    drafter: DFlashDrafter, optimizer: Optimizer, rank: int, step: int, group: dist.ProcessGroup, log: list[str]
) -> dict[str, Any]:
    """One step as the loop takes it."""
    optimizer.zero_grad()
    stats = torch.zeros(RANKS * BATCHES, len(SUMS) + 1)
    # FSDP needs every rank in every batch: there the rank runs a batch without anchors, as the schedule's fillers are.
    missing = (step, rank) == NO_BATCH and not isinstance(drafter, FSDPModule)
    for index in range(BATCHES - missing):
        sums = sums_of(drafter, step, rank, index)
        log.append("backward")
        with optimizer.overlap(last=index == BATCHES - 1):
            loss_of(sums, step, rank, index).backward()
            log.append("backward ends")
        stats[rank * BATCHES + index] = torch.cat([sums.detach(), optimizer.gradient_is_finite()[None]])
    optimizer.reduce()
    dist.all_reduce(stats, group=group)
    gradient = {name: whole(p.grad) for name, p in drafter.named_parameters() if p.grad is not None}
    outcome = optimizer.step(step, stats, stats[:, 1].sum())
    weights = {name: whole(p) for name, p in drafter.named_parameters()}
    return {"stats": stats, "gradient": gradient, "outcome": outcome, "weights": weights}


def sums_of(drafter: DFlashDrafter, step: int, rank: int, index: int) -> Tensor:
    """`block_sums` of one batch, which its three numbers alone decide."""
    empty = (step, rank) in (NO_ANCHORS, NO_BATCH) and index == BATCHES - 1
    lengths = [1] if empty else [8 + step, 5 + 4 * rank, 6 + index]
    pack = documents(lengths, seed=100 * step + 10 * rank + index)
    blocks = draw_blocks(
        pack,
        block_size=CONFIG.block_size,
        mask_token_id=MASK,
        anchors_per_document=3,
        max_anchors=100,
        gamma=2.0,
        seed=0,
        epoch=0,
        pad_to=4,
    ).to("cpu")
    generator = torch.Generator().manual_seed(7)
    table, head = (torch.randn(VOCAB, CONFIG.hidden_size, generator=generator) for _ in range(2))
    ends = TargetEnds(torch.nn.Embedding.from_pretrained(table), head, None)
    positions = torch.cat([torch.arange(n) for n in lengths])
    features = torch.randn(len(positions), 3 * CONFIG.hidden_size, generator=generator)
    return block_sums(drafter, ends, features, positions, blocks, chunk=3)


def loss_of(sums: Tensor, step: int, rank: int, index: int) -> Tensor:
    poisoned = (step, rank) == POISONED and index == BATCHES - 1
    return sums[0] + (0 * sums[0]).sqrt() if poisoned else sums[0]  # a root of 0: its gradient is not finite


def whole(tensor: Tensor) -> Tensor:
    """A copy of a tensor, put together from its shards where it has some."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks leave their checkpoints; they find one of a single rank there."""
    folder = tmp_path_factory.mktemp("world")
    optimizer = Optimizer(random_drafter(CONFIG), SETTINGS, STEPS, None)
    filled = {name: torch.full_like(t, i + 0.5) for i, (name, t) in enumerate(optimizer.state_tensors().items())}
    optimizer.load_state_tensors(filled)
    dcp.save(optimizer.state_tensors(), checkpoint_id=folder / "one", no_dist=True)
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    """What each rank saw."""
    torch.multiprocessing.spawn(main, (folder,), nprocs=RANKS)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(RANKS)]


def sum_of_gradients(weights: dict[str, Tensor], step: int) -> dict[str, Tensor]:
    """The definition: each rank adds up its batches, and then the ranks' sums are added."""
    total = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for rank in range(RANKS):
        drafter = DFlashDrafter(CONFIG)
        drafter.load_state_dict(weights)
        for index in range(BATCHES):
            loss_of(sums_of(drafter, step, rank, index), step, rank, index).backward()
        total = {name: total[name] + p.grad for name, p in drafter.named_parameters() if p.grad is not None}
    return total


def test_the_overlapped_sum_is_the_sum(ranks: list[dict[str, Any]]) -> None:
    weights = random_drafter(CONFIG).state_dict()
    for number, (left, right) in enumerate(zip(*(r["none"]["steps"] for r in ranks), strict=True), start=1):
        for name, expected in sum_of_gradients(weights, number).items():
            for side in (left, right):
                torch.testing.assert_close(side["gradient"][name], expected, rtol=0, atol=0, equal_nan=True)
        for name, weight in left["weights"].items():
            assert torch.equal(weight, right["weights"][name]), (number, name)
        weights = left["weights"]


def test_all_reduces_start_within_the_last_backward_and_in_one_order(ranks: list[dict[str, Any]]) -> None:
    logs = [r["none"]["log"] for r in ranks]
    begin = [i for i, entry in enumerate(logs[0]) if entry == "backward"]
    end = [i for i, entry in enumerate(logs[0]) if entry == "backward ends"]
    for turn, (first, last) in enumerate(zip(begin, end, strict=True)):
        started = logs[0][first + 1 : last]
        assert len(started) == (10 if turn % BATCHES == BATCHES - 1 else 0), "none within the step's accumulation"
    collectives = [[entry for entry in log if entry.startswith("all_reduce")] for log in logs]
    assert collectives[0] == collectives[1] and len(collectives[0]) == STEPS * (10 + 1)
    assert logs[1].count("backward") == logs[0].count("backward") - 1, "a batch is missing on the second rank"


def test_a_sharded_drafter_trains_as_a_whole_one(ranks: list[dict[str, Any]]) -> None:
    none, fsdp = (ranks[0][shard]["steps"] for shard in SHARDS)
    for number, (expected, step) in enumerate(zip(none, fsdp, strict=True), start=1):
        torch.testing.assert_close(step["stats"][:, :-1], expected["stats"][:, :-1], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(step["outcome"], expected["outcome"], rtol=1e-6, atol=0, equal_nan=True)
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(step["weights"][name], weight, rtol=0, atol=1e-6)
            assert torch.equal(step["weights"][name], ranks[1]["fsdp"]["steps"][number - 1]["weights"][name])
            if number != POISONED[0]:
                difference = step["gradient"][name] - expected["gradient"][name]
                assert difference.norm() <= 1e-5 * expected["gradient"][name].norm(), (number, name)


@pytest.mark.parametrize("shard", SHARDS)
def test_only_the_culprit_is_flagged_and_the_step_skipped(ranks: list[dict[str, Any]], shard: str) -> None:
    step, rank = POISONED
    before, after = (ranks[0][shard]["steps"][number] for number in (step - 2, step - 1))
    culprit = rank * BATCHES + BATCHES - 1
    assert after["stats"][:, -1].tolist() == [float(i != culprit) for i in range(RANKS * BATCHES)]
    assert after["stats"].isfinite().all(), "the loss is finite"
    assert [s["outcome"][1].item() for s in ranks[rank - 1][shard]["steps"]] == [0, 0, 0, 1, 0]
    for name, weight in before["weights"].items():
        assert torch.equal(after["weights"][name], weight), name
    assert ranks[0][shard]["state"]["step.norm.weight"] == STEPS - 1


@pytest.mark.parametrize("shard", SHARDS)
def test_state_goes_from_two_ranks_to_one_and_back(ranks: list[dict[str, Any]], folder: Path, shard: str) -> None:
    optimizer = Optimizer(random_drafter(CONFIG), SETTINGS, STEPS, None)
    state = optimizer.state_tensors()
    dcp.load(state, checkpoint_id=folder / shard, no_dist=True)
    for name, tensor in ranks[0][shard]["state"].items():
        assert torch.equal(optimizer.state_tensors()[name], tensor), name
        expected = ranks[0]["none"]["state"][name]
        torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-6 * expected.abs().max().item())
    assert {name.split(".")[0] for name in state} == {"exp_avg", "exp_avg_sq", "step"}
    for i, name in enumerate(state):
        assert (ranks[1][shard]["from one"][name] == i + 0.5).all(), name


def test_with_one_rank_nothing_is_sent() -> None:
    """No process group exists in this process."""
    drafter = random_drafter(CONFIG)
    optimizer = Optimizer(drafter, SETTINGS, STEPS, None)
    optimizer.zero_grad()
    sums = sums_of(drafter, 1, 0, 0)
    with optimizer.overlap(last=True):
        sums[0].backward()
    optimizer.reduce()
    before = drafter.fc.weight.clone()
    norm, skipped = optimizer.step(1, sums.detach(), sums[1].detach()).tolist()
    assert norm > 0 and not skipped and not torch.equal(drafter.fc.weight, before)
