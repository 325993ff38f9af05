"""What `make bench` prints: the schedule, the store, and a drafter step on this machine. Figures, not tests."""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import subprocess
import sys
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
from dflash_dist.train.checkpoint_writer import CheckpointWriter


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
    """int64 document lengths: median 1,500 tokens, 90 % under 4,200, cut at 8,192."""
    drawn = np.random.default_rng(0).lognormal(np.log(1500), np.log(4200 / 1500) / 1.2816, count)
    return np.clip(drawn, 16, 8192).astype(np.int64)


SCHEDULE = ["schedule.token_budget=65536", "train.max_steps=null", "train.validate_every=0"]
# Attention costs as much as all else where one document fills the budget.
SCHEDULE += ["schedule.cost_fixed_us=5000", "schedule.cost_token_us=100", "schedule.cost_token_squared_us=0.0015"]


def schedule_of(lengths: np.ndarray, topo: str, batches_per_step: int) -> Schedule:
    """The schedule of one epoch of documents of these lengths."""
    store = SimpleNamespace(lengths=lengths, supervised_counts=lengths // 2, held_out=np.zeros(len(lengths), bool))
    config = load_config("configs/smollm2.yaml", [*SCHEDULE, f"schedule.batches_per_step={batches_per_step}"])
    return Schedule(store, config, parse_topology(topo))  # type: ignore[arg-type]


def bench_packing() -> str:
    """How full the batches are, and whether a document's place in the epoch shows its length."""
    lengths = log_normal_lengths(200_000)
    works = list(schedule_of(lengths, "1-1", 6).work())
    fill = np.mean([work.tokens for work in works]) / 65536
    place = np.empty(len(lengths))
    for number, work in enumerate(works):
        place[work.documents] = number
    ranks = [np.argsort(np.argsort(values, kind="stable"), kind="stable") for values in (lengths, place)]
    correlation = np.corrcoef(ranks[0], ranks[1])[0, 1]
    return (
        f"packing, 200,000 documents: budget filled {fill:.2%}, padding 0 %, "
        f"rank correlation of length and place {correlation:+.4f}"
    )


def cost_us(lengths: np.ndarray) -> float:
    """The cost model of `SCHEDULE`, for one batch."""
    return 5000 + 100 * float(lengths.sum()) + 0.0015 * float((lengths.astype(np.float64) ** 2).sum())


def next_fit(lengths: np.ndarray) -> list[float]:
    """Costs of the batches that cutting the documents in the given order makes."""
    batch_of = np.zeros(len(lengths), np.int64)
    tokens = batch = 0
    for i, length in enumerate(lengths.tolist()):
        if tokens + length > 65536:
            tokens, batch = 0, batch + 1
        tokens += length
        batch_of[i] = batch
    return [cost_us(some) for some in np.split(lengths, np.flatnonzero(np.diff(batch_of)) + 1)]


def worst_makespan(costs_us: list[float], targets_of: list[int], targets: int) -> float:
    """The worst window of 32 batches a target: predicted time over its lower bound."""
    window, worst = 32 * targets, 0.0
    for begin in range(0, len(costs_us) - window + 1, window):
        some = costs_us[begin : begin + window]
        loads = np.bincount(targets_of[begin : begin + window], weights=some, minlength=targets)
        worst = max(worst, loads.max() / max(sum(some) / targets, max(some)))
    return worst


def bench_makespan() -> str:
    """Ours beside documents cut in shuffled order, and in order of length, both dealt round-robin."""
    lines = []
    for topo, per_step in (("3-1", 6), ("5-3", 6), ("16-8", 16), ("512-128", 256)):
        targets = parse_topology(topo).targets
        lengths = log_normal_lengths(35 * 32 * targets * (4 if targets < 100 else 1))
        works = list(schedule_of(lengths, topo, per_step).work())
        ours = [cost_us(lengths[work.documents]) for work in works]
        figures = {"ours": worst_makespan(ours, [work.target for work in works], targets)}
        for name, order in (("round-robin", lengths), ("length-sorted", np.sort(lengths))):
            costs = next_fit(order)
            figures[name] = worst_makespan(costs, [i % targets for i in range(len(costs))], targets)
        lines.append(f"{topo} " + ", ".join(f"{name} {value:.4f}" for name, value in figures.items()))
    return "makespan over its lower bound, 32 batches a target: " + "; ".join(lines)


def bench_big_schedule() -> str:
    """One epoch of 10 million documents, in a process of its own."""
    code = (
        "import resource, time; from benchmarks.bench import log_normal_lengths, schedule_of;"
        "lengths = log_normal_lengths(10_000_000); start = time.perf_counter();"
        "schedule = schedule_of(lengths, '5-3', 6); schedule.fingerprint();"
        "print(f'{time.perf_counter() - start:.1f} s, "
        "{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return f"schedule with hash, 10,000,000 documents on 5-3: {done.stdout.strip()}"


def bench_store() -> str:
    """Batches of the schedule from a store that was opened just now, and the same again."""
    cache = Path(".cache")  # where stores lie, not /tmp: that is memory on many machines
    cache.mkdir(exist_ok=True)
    documents = 1_000_000 if shutil.disk_usage(cache).free > 16e9 else 100_000
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        write_store(Path(folder), log_normal_lengths(documents))
        works = itertools.islice(schedule_of(log_normal_lengths(documents), "3-1", 6).work(), 200)
        batches = [work.documents for work in works]
        start = time.perf_counter()
        store = TokenStore.open(Path(folder))
        open_ms = 1000 * (time.perf_counter() - start)
        from_disk, from_memory = ([read_ms(store, batch) for batch in batches] for _ in range(2))
    return (
        f"store of {documents:,} documents, one 65,536-token batch: opened in {open_ms:.0f} ms; from the disk first "
        f"{from_disk[0]:.2f} ms, median {statistics.median(from_disk):.2f} ms; from memory "
        f"{statistics.median(from_memory):.2f} ms"
    )


def write_store(folder: Path, lengths: np.ndarray) -> None:
    """Writes a store of documents of these lengths, and has the system forget what it holds of them in memory."""
    tokens, supervised = np.arange(lengths.max()), np.ones(lengths.max(), bool)
    with StoreWriter(folder, 0.0) as writer:
        for i, length in enumerate(lengths.tolist()):
            writer.add(str(i), [("", tokens[:length], supervised[:length])], [])
        writer.finish("bench", {})
    with open(folder / "tokens.bin", "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_ms(store: TokenStore, documents: np.ndarray) -> float:
    """Milliseconds to read some documents once."""
    start = time.perf_counter()
    store.read(documents)
    return 1000 * (time.perf_counter() - start)


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
    model = DFlashDrafter(shape, attention="flex" if device.type == "cuda" else "dense")
    model.init_weights(0)
    model.to(device)
    ends = TargetEnds(torch.nn.Embedding(49152, 576), torch.randn(49152, 576), None).to(device)
    features = torch.randn(1024, 3 * 576, device=device)
    positions = torch.arange(1024, device=device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def step() -> None:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            sums = block_sums(model, ends, features, positions, blocks.to(device), chunk=64)
        sums[0].backward()

    milliseconds = median_ms(step, repeats=3)
    return f"drafter step, 1,024 tokens and 64 blocks of 8 on {device.type}: {milliseconds:.0f} ms"


def bench_checkpoint(device: torch.device) -> str:
    """A checkpoint of 50 M parameters: what the training loop waits, and what the thread behind it takes."""
    names = [f"{kind}.{i}" for kind in ("drafter", "exp_avg", "exp_avg_sq") for i in range(50)]
    tensors = {name: torch.randn(1024, 1024, device=device) for name in names}
    with tempfile.TemporaryDirectory(dir=".cache") as folder:
        writer = CheckpointWriter(Path(folder), tensors, keep=1)
        for step in (1, 2):  # the first does not count
            start = time.perf_counter()
            writer.copy()
            writer.write({"step": step, "val_loss": None})
            blocking_ms = 1000 * (time.perf_counter() - start)
            writer.wait()
            whole_ms = 1000 * (time.perf_counter() - start)
        size_bytes = sum(path.stat().st_size for path in Path(folder).glob("*/*"))
    return (
        f"checkpoint of {size_bytes / 1e6:.0f} MB from {device.type}: training waits {blocking_ms:.1f} ms of the "
        f"{whole_ms:.0f} ms until it is on the disk"
    )


def main() -> None:
    """Prints a line a benchmark."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for bench in (bench_packing, bench_makespan, bench_big_schedule, bench_store):
        print(bench(), flush=True)
    for bench_on in (bench_drafter, bench_checkpoint):
        print(bench_on(device), flush=True)


if __name__ == "__main__":
    main()
