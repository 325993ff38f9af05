"""What `make bench` prints: the schedule, the store, and a drafter step on this machine. Figures, not tests."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from dflash_dist.config import load_config
from dflash_dist.data.schedule import Schedule
from dflash_dist.data.store import Documents, StoreWriter, TokenStore
from dflash_dist.drafter.anchors import draw_blocks
from dflash_dist.drafter.config import DrafterConfig
from dflash_dist.drafter.loss import block_sums
from dflash_dist.drafter.model import DFlashDrafter
from dflash_dist.target.load import TargetEnds
from dflash_dist.topology import parse_topology


def median_ms(work: Callable[[], object], repeats: int = 5) -> float:
    """Median milliseconds of `work`, after one run that does not count."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # sync: the measurement's end
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def log_normal_lengths(count: int) -> np.ndarray:
    """int64 document lengths: median 1,500 tokens, cut at 8,192."""
    drawn = np.random.default_rng(0).lognormal(np.log(1500), 0.8, count)
    return np.clip(drawn, 16, 8192).astype(np.int64)


def bench_schedule() -> str:
    """One epoch of 200,000 documents on 3-1."""
    lengths = log_normal_lengths(200_000)
    store = SimpleNamespace(lengths=lengths, supervised_counts=lengths // 2, held_out=np.zeros(len(lengths), bool))
    overrides = ["schedule.token_budget=65536", "train.max_steps=null", "train.validate_every=0"]
    config = load_config("configs/smollm2.yaml", overrides)
    start = time.perf_counter()
    schedule = Schedule(store, config, parse_topology("3-1"))  # type: ignore[arg-type]
    loads = [0, 0, 0]
    tokens = []
    for work in schedule.work():
        loads[work.target] += work.tokens
        tokens.append(work.tokens)
    seconds = time.perf_counter() - start
    fill = np.mean(tokens) / 65536
    balance = max(loads) / (sum(loads) / 3)
    return (
        f"schedule, 200,000 documents: {seconds:.2f} s, budget filled {fill:.1%}, busiest target {balance:.4f} of mean"
    )


def bench_store() -> str:
    """A 65,536-token batch of random documents from a fresh store."""
    lengths = log_normal_lengths(4000)
    with tempfile.TemporaryDirectory() as folder:
        with StoreWriter(Path(folder), 0.0) as writer:
            for i, n in enumerate(lengths.tolist()):
                writer.add(str(i), [("", np.arange(n, dtype=np.uint32), np.ones(n, bool))], [])
            writer.finish("bench", {})
        store = TokenStore.open(Path(folder))
        order = np.random.default_rng(1).permutation(len(lengths))
        batches = iter(np.split(order, np.flatnonzero(np.diff(np.cumsum(lengths[order]) // 65536)) + 1))
        milliseconds = median_ms(lambda: store.read(next(batches)), repeats=40)
    return f"store, one batch of about 65,536 tokens: {milliseconds:.2f} ms"


def bench_drafter(device: torch.device) -> str:
    """Forward and backward of a small drafter: 2 layers of 576, 49,152 ids, one document of 1,024 tokens, 64 blocks."""
    shape = DrafterConfig(
        hidden_size=576, num_hidden_layers=2, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
        intermediate_size=1536, rms_norm_eps=1e-5, vocab_size=49152, max_position_embeddings=8192, rope_theta=1e5,
        initializer_range=0.02, block_size=8, target_layer_ids=(1, 10, 19), num_target_layers=30, mask_token_id=16,
        layer_types=("full_attention",) * 2, sliding_window=None, is_causal=None,
    )  # fmt: skip
    documents = Documents(
        np.arange(1024) % 49152, np.ones(1024, bool), np.array([1024]), np.array([7], np.uint64)
    )  # fmt: skip
    blocks = draw_blocks(
        documents, block_size=8, mask_token_id=16, anchors_per_document=64, max_anchors=64, gamma=4.0, seed=0, epoch=1,
        pad_to=64,
    )  # fmt: skip
    model = DFlashDrafter(shape, attention="flex" if device.type == "cuda" else "dense").to(device)
    ends = TargetEnds(torch.nn.Embedding(49152, 576), torch.randn(49152, 576), None).to(device)
    features = torch.randn(1024, 3 * 576, device=device)
    positions = torch.arange(1024, device=device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def step() -> None:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            sums = block_sums(
                model, ends, features, positions, torch.zeros_like(positions), blocks.to(device), chunk=128
            )
        sums[0].backward()

    milliseconds = median_ms(step, repeats=3)
    return f"drafter step, 1,024 tokens and 64 blocks of 8 on {device.type}: {milliseconds:.0f} ms"


def main() -> None:
    """Prints a line a benchmark."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for bench in (bench_schedule, bench_store, lambda: bench_drafter(device)):
        print(bench(), flush=True)


if __name__ == "__main__":
    main()
