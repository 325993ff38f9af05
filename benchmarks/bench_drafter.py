"""A drafter's step on one GPU, with SpecForge's beside it: the same tensors, the same anchors, plain cross-entropy.

    python benchmarks/bench_drafter.py [SHAPE] [--case ROWSxTOKENS ...] [--packed TOKENS] [--peer] [--json FILE]
        [--trace FOLDER]
    torchrun --nproc-per-node 2 benchmarks/bench_drafter.py [SHAPE] [--case ROWSxTOKENS ...]

A step is forward, backward and optimizer. Under torchrun each line is followed by one for ranks that sum their
gradients. A line for each: milliseconds (the median of five behind three, of the slowest rank), anchors a second, peak
memory, and the host's time until the step is queued, over the whole.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from bench_target import GIB, chat_lengths

from dflash_dist.config import TrainConfig
from dflash_dist.data.store import Documents
from dflash_dist.drafter.anchors import Blocks, blocks_at, draw_blocks
from dflash_dist.drafter.config import DrafterConfig
from dflash_dist.drafter.loss import Objective, backward_in_groups
from dflash_dist.drafter.model import DFlashDrafter
from dflash_dist.target.load import TargetEnds
from dflash_dist.train.drafter_loop import blocks_per_chunk
from dflash_dist.train.optimizer import Optimizer

COLUMNS = ("ms", "anchors_s", "peak_gib", "host_share", "loss")
GAMMA, ANCHORS_PER_DOCUMENT = 7.0, 512
WARM_UP, REPEATS = 3, 5


def shapes() -> dict[str, DrafterConfig]:
    """Drafters of five layers and blocks of 16, by their target's name; `tiny` is for trying this out."""
    common: dict[str, Any] = {
        "num_hidden_layers": 5, "rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "rope_theta": 1e6,
        "initializer_range": 0.02, "block_size": 16, "layer_types": ("full_attention",) * 5, "sliding_window": None,
        "is_causal": None, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    }  # fmt: skip
    tiny = {
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 64, "intermediate_size": 96,
        "vocab_size": 500, "target_layer_ids": (1, 3), "num_target_layers": 6, "mask_token_id": 499,
    }  # fmt: skip
    return {
        "qwen3.6-27b": DrafterConfig(
            **common, hidden_size=5120, intermediate_size=17408, vocab_size=248320, num_target_layers=64,
            target_layer_ids=(1, 16, 31, 46, 61), mask_token_id=248100,
        ),
        "qwen3-8b": DrafterConfig(
            **common, hidden_size=4096, intermediate_size=12288, vocab_size=151936, num_target_layers=36,
            target_layer_ids=(1, 9, 17, 25, 33), mask_token_id=151800,
        ),
        "tiny": DrafterConfig(**(common | tiny)),
    }  # fmt: skip


class Batch:
    """Documents with random states, of which every token is supervised; the target's ends."""

    def __init__(self, shape: DrafterConfig, lengths: np.ndarray, anchors: int, objective: Objective, device: str):
        rng, tokens = np.random.default_rng(0), int(lengths.sum())
        keys = rng.integers(0, 2**63, len(lengths)).astype(np.uint64)
        self.pack = Documents(rng.integers(0, shape.vocab_size, tokens), np.ones(tokens, bool), lengths, keys)
        self.shape, self.device, self.objective = shape, device, objective
        self.positions_T = torch.cat([torch.arange(n) for n in lengths.tolist()]).to(device)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        width = len(shape.target_layer_ids) * shape.hidden_size
        self.features_TF = torch.randn(tokens, width, device=device, dtype=dtype)
        self.last_TH = torch.randn(tokens, shape.hidden_size, device=device, dtype=dtype)
        table = torch.nn.Embedding(shape.vocab_size, shape.hidden_size, device=device, dtype=dtype)
        head_VH = 0.02 * torch.randn(shape.vocab_size, shape.hidden_size, device=device, dtype=dtype)
        self.ends = TargetEnds(table, head_VH, None)
        self.blocks: Blocks = draw_blocks(
            self.pack, block_size=shape.block_size, mask_token_id=shape.mask_token_id, gamma=GAMMA, seed=0, epoch=0,
            anchors_per_document=ANCHORS_PER_DOCUMENT, max_anchors=anchors, pad_to=anchors,
        )  # fmt: skip

    def spread_anchors(self, count: int) -> None:
        """Gives each document as many anchors, as rows have them."""
        rng, starts_N = np.random.default_rng(1), np.cumsum(self.pack.lengths_N) - self.pack.lengths_N
        places = [
            start + np.sort(rng.choice(np.arange(1, length - 1), count, replace=False))
            for start, length in zip(starts_N, self.pack.lengths_N, strict=True)
        ]
        self.blocks = blocks_at(
            self.pack, np.concatenate(places), block_size=self.shape.block_size, gamma=GAMMA,
            mask_token_id=self.shape.mask_token_id, pad_to=count * len(places),
        )  # fmt: skip


def ours(batch: Batch, group: int, ranks: dist.ProcessGroup | None = None) -> tuple[Callable[[], torch.Tensor], Any]:
    """A step of this project's drafter, which returns its loss; `ranks`: who sum their gradients."""
    device = batch.device
    with torch.device("meta"):
        model = DFlashDrafter(batch.shape, attention="flex" if device == "cuda" else "dense")
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02) if parameter.dim() > 1 else parameter.fill_(1)
    optimizer = Optimizer(model, TrainConfig(), 1000, ranks)
    blocks = batch.blocks.to(device)
    last_TH = batch.last_TH if batch.objective.needs_last_state else None

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        sums = backward_in_groups(
            model, batch.ends, batch.features_TF, batch.positions_T, blocks, group, blocks_per_chunk(model),
            batch.objective, last_TH, backward=optimizer.overlap,
            forward=lambda: torch.autocast(device, torch.bfloat16, enabled=device == "cuda"),
        )  # fmt: skip
        optimizer.reduce()
        optimizer.step(100, sums[None], sums[1])
        return sums[0] / sums[1]

    return step, model


def peers(batch: Batch, rows: int) -> tuple[Callable[[], torch.Tensor], Any]:
    """A step of SpecForge's trainer on rows of one length, with the same anchors."""
    from transformers import Qwen3Config

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel  # type: ignore[import-untyped]
        from specforge.modeling.draft.dflash import DFlashDraftModel  # type: ignore[import-untyped]
        from specforge.optimizer import BF16Optimizer  # type: ignore[import-untyped]

    device, shape = batch.device, batch.shape
    attention = "flex_attention" if device == "cuda" else "sdpa"
    with torch.device(device):
        draft = DFlashDraftModel(Qwen3Config(**shape.to_json(), attn_implementation=attention))
        head = torch.nn.Linear(shape.hidden_size, shape.vocab_size, bias=False, dtype=batch.features_TF.dtype)
    head.requires_grad_(False).weight.copy_(batch.ends.head_weight)
    draft.to(batch.features_TF.dtype)
    length = len(batch.positions_T) // rows
    anchors_RA = torch.from_numpy(batch.blocks.anchors_A).view(rows, -1).to(device)
    anchors_RA = anchors_RA - length * torch.arange(rows, device=device)[:, None]
    model = OnlineDFlashModel(
        draft, head, batch.ends.embedding, shape.mask_token_id, shape.block_size, attention, anchors_RA.shape[1], GAMMA
    )
    keep_RA = torch.ones_like(anchors_RA, dtype=torch.bool)
    model._sample_anchor_positions = lambda *_: (anchors_RA, keep_RA)
    optimizer = BF16Optimizer(draft, lr=6e-4)
    ids_RS = torch.from_numpy(batch.pack.tokens_T).view(rows, length).to(device)
    features_RSF, mask_RS = batch.features_TF.view(rows, length, -1), torch.ones(rows, length, device=device)

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(ids_RS, features_RSF, mask_RS)[0]
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, model


def measure(
    name: str, batch: Batch, made: tuple[Callable[[], torch.Tensor], Any], trace: Path | None = None
) -> dict[str, float]:
    """Runs the step, prints a line and returns its figures; `trace`: a folder for a table of one step's kernels."""
    step, _ = made
    lead = not dist.is_initialized() or dist.get_rank() == 0
    cuda = batch.device == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None
    try:
        for _ in range(WARM_UP):
            loss = step()
        wait()
        if cuda:
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
        whole_s, host_s = [], []
        for _ in range(REPEATS):
            if dist.is_initialized():
                dist.barrier()
            began_s = time.perf_counter()
            step()
            host_s.append(time.perf_counter() - began_s)
            wait()
            whole_s.append(time.perf_counter() - began_s)
    except torch.OutOfMemoryError:
        print(f"{name:<32} out of memory", flush=True)
        return {}
    seconds = _of_slowest_rank(statistics.median(whole_s), batch.device)
    peak_gib = torch.cuda.max_memory_allocated() / GIB if cuda else 0.0
    if trace:
        with torch.profiler.profile() as profile:
            step()
            wait()
        table = profile.key_averages().table("self_cuda_time_total", row_limit=45, max_name_column_width=100)
        (trace / f"{name.replace(', ', '-').replace(' ', '-')}.txt").write_text(table)
    anchors_s = int(batch.blocks.keep_A.sum()) / seconds
    host_share = statistics.median(host_s) / statistics.median(whole_s)
    values = (1e3 * seconds, anchors_s, peak_gib, host_share, float(loss))
    if lead:
        print(f"{name:<32} " + " ".join(f"{value:>12.4g}" for value in values), flush=True)
    return dict(zip(COLUMNS, values, strict=True))


def _of_slowest_rank(seconds: float, device: str) -> float:
    """The greatest of all ranks: who sums gradients waits for the slowest GPU, which is to be compared with itself."""
    if not dist.is_initialized():
        return seconds
    greatest = torch.tensor(seconds, device=device, dtype=torch.float64)
    dist.all_reduce(greatest, dist.ReduceOp.MAX)
    return float(greatest)


def parsed() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("shape", nargs="?", default="qwen3.6-27b", choices=list(shapes()))
    parser.add_argument("--case", nargs="*", default=["1x4096", "2x4096", "1x8192"])
    parser.add_argument("--row-anchors", type=int, default=512)
    parser.add_argument("--packed", type=int, default=65536)
    parser.add_argument("--anchors", type=int, default=8192, help="of the packed batch")
    parser.add_argument("--group", type=int, default=1024, help="train.anchors_per_backward")
    parser.add_argument("--objective", default="tokens", choices=("tokens", "argmax", "kl"))
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--ctas", type=int, help="most thread blocks of NCCL's sum of gradients")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trace", type=Path, help="a folder for tables of the kernels")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    shape, device = shapes()[options.shape], "cuda" if torch.cuda.is_available() else "cpu"
    ranks = None
    if "RANK" in os.environ:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
        ranks = dist.group.WORLD
        if options.ctas:
            limited = dist.ProcessGroupNCCL.Options()
            limited.config.max_ctas = options.ctas
            ranks = dist.new_group(pg_options=limited)
    objective = Objective(options.objective)
    print(f"{options.shape}, {options.objective}, {device}\n{'':<32} " + " ".join(f"{c:>12}" for c in COLUMNS))
    lines = {}

    def rows_of(case: str) -> tuple[int, Batch]:
        rows, length = map(int, case.split("x"))
        batch = Batch(shape, np.full(rows, length), rows * options.row_anchors, objective, device)
        batch.spread_anchors(options.row_anchors)
        return rows, batch

    for case in options.case:
        rows, batch = rows_of(case)
        name = f"{case}, {rows * options.row_anchors} anchors"
        lines[case] = measure(name, batch, ours(batch, options.group), options.trace)
        if ranks is not None:
            lines[f"{case} summed"] = measure(f"{case}, summed over ranks", batch, ours(batch, options.group, ranks))
    if options.packed:
        batch = Batch(shape, chat_lengths(options.packed), options.anchors, objective, device)
        name = f"packed {options.packed:,}, {int(batch.blocks.keep_A.sum()):,} anchors"
        lines["packed"] = measure(name, batch, ours(batch, options.group), options.trace)
    if options.peer and options.objective == "tokens":  # after all of ours, as its memory is not given back whole
        for case in options.case:
            rows, batch = rows_of(case)
            lines[f"{case} peer"] = measure(f"{case}, SpecForge", batch, peers(batch, rows))
    if ranks is not None:
        dist.destroy_process_group()
    if options.json:
        options.json.write_text(json.dumps(lines, indent=2))


if __name__ == "__main__":
    main()
