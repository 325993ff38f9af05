"""Two drafter ranks over NCCL: what they send overlaps the backward pass, and no host waits for a device."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from dflash_dist.config import TrainConfig
from dflash_dist.drafter.anchors import BlockTensors, draw_blocks
from dflash_dist.drafter.config import DrafterConfig
from dflash_dist.drafter.loss import backward_in_groups, block_sums
from dflash_dist.drafter.model import DFlashDrafter
from dflash_dist.target.load import TargetEnds
from dflash_dist.train.gradients import shard_drafter
from dflash_dist.train.optimizer import Optimizer
from tests.random_models import MASK, VOCAB, documents
from tests.ranks.cli import metrics, train
from tests.tiny import make_chats, make_config, make_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: run `make test-gpu` where there are"),
]
# 77 M parameters, so five buckets.
CONFIG = DrafterConfig(
    hidden_size=1024, num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=2, head_dim=128,
    intermediate_size=4096, rms_norm_eps=1e-6, vocab_size=VOCAB, max_position_embeddings=4096, rope_theta=1e4,
    initializer_range=0.02, block_size=8, target_layer_ids=(1, 3), num_target_layers=6, mask_token_id=MASK,
    layer_types=("full_attention",) * 5, sliding_window=None, is_causal=None,
)  # fmt: skip
DEVICE, TOKENS = "cuda", 2048


@pytest.mark.parametrize("shard", ["none", "fsdp"])
def test_communication_overlaps_the_backward_pass_and_no_host_waits(tmp_path: Path, shard: str) -> None:
    torch.multiprocessing.spawn(rank_main, (tmp_path, shard), nprocs=2)
    matmuls_us, collectives_us = torch.load(tmp_path / "kernels.pt")
    assert min(collectives_us)[0] < max(matmuls_us)[1], "the first sum over ranks starts before the last product ends"
    together_us = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in matmuls_us for b in collectives_us)
    assert together_us > 0


def test_the_sum_over_ranks_of_batches_in_groups_of_anchors(tmp_path: Path) -> None:
    """It begins with the last group of the last batch, and holds all of them."""
    torch.multiprocessing.spawn(sum_main, (tmp_path,), nprocs=2)


def sum_main(rank: int, folder: Path) -> None:
    """One rank: compares the sum that overlaps the backward pass with one of the whole gradient afterwards."""
    group = join(rank, folder)
    drafter = DFlashDrafter(CONFIG, attention="flex")
    drafter.init_weights(0)
    drafter.to(DEVICE)
    ends, *inputs = inputs_of(rank)

    def gradient(ranks: dist.ProcessGroup | None) -> torch.Tensor:
        optimizer = Optimizer(drafter, TrainConfig(), 10, ranks)
        optimizer.zero_grad()
        for last in (False, True):
            backward_in_groups(
                drafter, ends, *inputs, 200, 64, forward=lambda: torch.autocast(DEVICE, torch.bfloat16),
                backward=lambda last_group, last=last: optimizer.overlap(last and last_group),
            )  # fmt: skip
        optimizer.reduce()
        return optimizer._gradients.flat

    together, afterwards = gradient(group), gradient(None)
    dist.all_reduce(afterwards, group=group)
    assert (together - afterwards).norm() <= 1e-3 * afterwards.norm() > 0
    dist.destroy_process_group()


def join(rank: int, folder: Path) -> dist.ProcessGroup:
    """The group of both ranks."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    group = dist.new_group([0, 1])
    assert group is not None
    return group


def inputs_of(rank: int) -> tuple[TargetEnds, torch.Tensor, torch.Tensor, BlockTensors]:
    """The target's ends, and a rank's own batch: states, positions and blocks."""
    blocks = draw_blocks(
        documents([TOKENS], seed=rank), block_size=8, mask_token_id=MASK, anchors_per_document=512, max_anchors=512,
        gamma=4.0, seed=0, epoch=1, pad_to=512,
    ).to(DEVICE)  # fmt: skip
    generator = torch.Generator(DEVICE).manual_seed(rank)
    features = torch.randn(TOKENS, 2 * CONFIG.hidden_size, generator=generator, device=DEVICE)
    table = torch.nn.Embedding(VOCAB, CONFIG.hidden_size, device=DEVICE)
    return TargetEnds(table, features[:VOCAB, :1024], None), features, torch.arange(TOKENS, device=DEVICE), blocks


def rank_main(rank: int, folder: Path, shard: str) -> None:
    """One rank: warms up, takes a step in which any host wait is an error, and traces the backward pass of another."""
    group = join(rank, folder)
    drafter = DFlashDrafter(CONFIG)
    drafter.init_weights(0)
    if shard == "fsdp":
        shard_drafter(drafter, group, torch.device(DEVICE, rank))
    drafter.to(DEVICE)
    optimizer = Optimizer(drafter, TrainConfig(), 10, group)
    ends, *inputs = inputs_of(rank)

    def backward(last: bool) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            sums = block_sums(drafter, ends, *inputs, chunk=512)
        with optimizer.overlap(last):
            sums[0].backward()
        return torch.cat([sums.detach(), optimizer.gradient_is_finite()[None]])

    def step(number: int) -> torch.Tensor:
        optimizer.zero_grad()
        stats = torch.stack([backward(last=False), backward(last=True)])
        optimizer.reduce()
        dist.all_reduce(stats, group=group)
        return optimizer.step(number, stats, stats[:, 1].sum())

    step(1)
    torch.cuda.set_sync_debug_mode("error")
    outcome = step(2)
    torch.cuda.set_sync_debug_mode("default")
    norm, skipped = outcome.tolist()
    assert norm > 0 and not skipped
    optimizer.zero_grad()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        torch.cuda._sleep(1_000_000_000)  # the host gets ahead: else what overlaps is left to how fast it launches
        backward(last=True)
        torch.cuda.synchronize()
    kernels = [event for event in trace.events() if event.device_type == DeviceType.CUDA]
    kind = "ReduceScatter" if shard == "fsdp" else "AllReduce"
    collectives = [k for k in kernels if k.name.startswith(f"ncclDevKernel_{kind}")]
    products = [k for k in kernels if "gemm" in k.name.lower() or "nvjet" in k.name]
    if rank == 0:
        spans_us = [[(k.time_range.start, k.time_range.end) for k in some] for some in (products, collectives)]
        torch.save(spans_us, folder / "kernels.pt")
    optimizer.reduce()
    torch.cuda.synchronize()
    dist.destroy_process_group()


def test_a_sharded_drafter_trains_alike_over_nccl(tmp_path: Path) -> None:
    config = make_config(
        tmp_path,
        make_target("qwen3", tmp_path / "target"),
        make_chats(tmp_path / "chats.jsonl"),
        objective={"max_anchors_per_batch": 32},
        drafter={"head_dim": 16},
    )
    for shard in ("none", "fsdp"):
        train(config, "x2", shard, "--device", "cuda", "train.dtype=float32", f"train.shard={shard}")
    for row, expected in zip(metrics(config, "fsdp"), metrics(config, "none"), strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5), row["step"]
