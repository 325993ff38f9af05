"""The frozen target on one GPU: packed and padded, beside Hugging Face's own path, with random weights.

    python benchmarks/bench_target.py [SHAPE] [--budget TOKENS] [--json FILE] [--trace FILE]

A line for each way to run a batch: thousands of real tokens a second; TFLOP/s of the layers that run, and of all of
the target's as if they had run (2 x parameters x tokens, no attention, no embedding; of experts those that a token
takes); the former over the rate of a matrix product of the target's own size on this GPU, and over the data sheet's;
peak memory; the host's time until the batch is queued, over the GPU's time; and the first run's time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_dist.config import TargetConfig
from dflash_dist.target.capture import Layout, TargetForward
from dflash_dist.target.packed import Pack, running

CUDA = torch.device("cuda")
DATASHEET_TFLOPS = 989
"""H200, dense bf16."""
GIB = 2**30
ROPE = {
    "rope_type": "default",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
}
COLUMNS = ("ktok_s", "tflops", "tflops_all", "of_matrix_rate", "mfu", "peak_gib", "host_share", "first_s")


def shapes() -> dict[str, tuple[Any, tuple[int, ...]]]:
    """(transformers configuration, taps) by name."""
    from transformers import Qwen3_5TextConfig, Qwen3Config, Qwen3MoeConfig

    return {
        "qwen3.6-27b": (
            Qwen3_5TextConfig(
                vocab_size=248320, hidden_size=5120, intermediate_size=17408, num_hidden_layers=64,
                num_attention_heads=24, num_key_value_heads=4, head_dim=256, linear_num_value_heads=48,
                linear_num_key_heads=16, rope_parameters=ROPE,
            ),
            (1, 16, 31, 46, 61),
        ),
        "qwen3-8b": (
            Qwen3Config(
                vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
                num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960,
            ),
            (1, 9, 17, 25, 33),
        ),
        "qwen3-30b-a3b": (
            Qwen3MoeConfig(
                vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
                num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128,
                num_experts_per_tok=8, max_position_embeddings=40960,
            ),
            (1, 12, 23, 34, 45),
        ),
        "small-hybrid": (
            Qwen3_5TextConfig(
                vocab_size=32000, hidden_size=2048, intermediate_size=6144, num_hidden_layers=8, num_attention_heads=8,
                num_key_value_heads=2, head_dim=256, linear_num_value_heads=16, linear_num_key_heads=8,
                rope_parameters=ROPE,
            ),
            (1, 4, 7),
        ),
    }  # fmt: skip


def chat_lengths(budget: int, seed: int = 0) -> np.ndarray:
    """Log-normal lengths, median 1,500, 90 % under 4,200, cut at 8,192, that fill the budget exactly."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while sum(lengths) < budget:
        length = int(min(8192, max(64, rng.lognormal(np.log(1500), np.log(4200 / 1500) / 1.2816))))
        lengths.append(min(length, budget - sum(lengths)))
    return np.array(lengths)


def seconds(run: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Median GPU seconds of a run, and the host's seconds until it is queued."""
    gpu_s, host_s = [], []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began_s = time.perf_counter()
        start.record()
        run()
        end.record()
        host_s.append(time.perf_counter() - began_s)
        end.synchronize()
        gpu_s.append(start.elapsed_time(end) / 1e3)
    return statistics.median(gpu_s), statistics.median(host_s)


def matrix_tflops(tokens: int, rows: int, columns: int) -> float:
    """What this GPU reaches on a product of the target's own size, warm."""
    a, b = (torch.randn(*size, device="cuda", dtype=torch.bfloat16) for size in ((tokens, rows), (rows, columns)))
    out = torch.empty(tokens, columns, device="cuda", dtype=torch.bfloat16)
    for _ in range(5):
        torch.mm(a, b, out=out)
    took_s, _ = seconds(lambda: [torch.mm(a, b, out=out) for _ in range(20)], 3)
    return 20 * 2 * tokens * rows * columns / took_s / 1e12


def active_parameters(decoder: Any) -> int:
    """Parameters that one token is multiplied with: no embedding, and of experts those that are chosen."""
    config = decoder.config
    share = getattr(config, "num_experts_per_tok", 1) / (getattr(config, "num_experts", None) or 1)
    return int(sum(p.numel() * (share if ".experts." in name else 1) for name, p in decoder.layers.named_parameters()))


class Bench:
    """One target on the GPU, and the lines of the table so far."""

    def __init__(self, shape: str, budget: int, layout: Layout) -> None:
        config, taps = shapes()[shape]
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            settings = TargetConfig(model=folder)
            self.forward = TargetForward(folder, settings, taps, CUDA, random_weights=True, layout=layout)
        if self.forward.layout != layout:
            print(f"not packed, because {self.forward.not_packed_because}", flush=True)
        self.model = self.forward._model
        self.parameters = active_parameters(self.model)
        self.layers_share = config.num_hidden_layers / len(self.model.layers)
        self.vocabulary = config.vocab_size
        self.slot_TW = torch.empty(budget, self.forward.features, dtype=torch.bfloat16, device="cuda")
        self.matrix_tflops = matrix_tflops(min(budget, 65536), config.hidden_size, config.intermediate_size)
        print(
            f"{shape}: {len(self.model.layers)} of {config.num_hidden_layers} layers, {self.parameters / 1e9:.2f} B "
            f"parameters; matrix product {self.matrix_tflops:.0f} TFLOP/s; with one ring slot of {budget:,} tokens "
            f"{torch.cuda.memory_allocated() / GIB:.1f} GiB",
            flush=True,
        )

    def line(self, name: str, run: Callable[[], Any], tokens: int, repeats: int = 3) -> dict[str, float]:
        """Runs, prints one line and returns its figures."""
        began_s = time.perf_counter()
        try:
            run()
            torch.cuda.synchronize()
            first_s = time.perf_counter() - began_s
            torch.cuda.reset_peak_memory_stats()
            gpu_s, host_s = seconds(run, repeats)
        except torch.OutOfMemoryError:
            print(f"{name:<32} out of memory", flush=True)
            return {}
        tflops = 2 * self.parameters * tokens / gpu_s / 1e12
        values = (
            tokens / gpu_s / 1e3, tflops, tflops * self.layers_share, tflops / self.matrix_tflops,
            tflops / DATASHEET_TFLOPS, torch.cuda.max_memory_allocated() / GIB, host_s / gpu_s, first_s,
        )  # fmt: skip
        print(f"{name:<32} " + " ".join(f"{value:>14.4g}" for value in values), flush=True)
        return dict(zip(COLUMNS, values, strict=True))

    def capture(self, lengths_N: np.ndarray) -> Callable[[], None]:
        """The target's whole work on one batch."""
        tokens_T = torch.randint(0, self.vocabulary, (int(lengths_N.sum()),))
        return lambda: self.forward.capture(tokens_T, lengths_N, self.slot_TW[: len(tokens_T)])

    def bare(self, lengths_N: np.ndarray) -> Callable[[], None]:
        """The packed forward alone: nothing kept, nothing gathered."""
        pack = Pack.of(lengths_N, CUDA)
        ids_1T = torch.randint(0, self.vocabulary, (1, int(lengths_N.sum())), device="cuda")
        where = {"position_ids": pack.positions_1T} | ({"seq_idx": pack.document_1T} if self.forward._hybrid else {})

        def run() -> None:
            with torch.no_grad(), running(self.model, pack):
                self.model(input_ids=ids_1T, use_cache=False, **where)

        return run

    def plain(self, rows: int, length: int) -> Callable[[], None]:
        """Rows without padding by transformers alone, with what it finds installed."""
        self.model.config._attn_implementation = "sdpa"
        ids_RL = torch.randint(0, self.vocabulary, (rows, length), device="cuda")
        for layer in self.model.layers:
            vars(layer).pop("forward", None)  # the compiled one

        def run() -> None:
            with torch.no_grad():
                self.model(input_ids=ids_RL, use_cache=False)

        return run


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("shape", nargs="?", default="qwen3.6-27b", choices=list(shapes()))
    parser.add_argument("--budget", type=int, default=65536)
    parser.add_argument("--only-packed", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trace", type=Path)
    options = parser.parse_args()
    budget, small, rows = options.budget, min(8192, options.budget), 16
    bench = Bench(options.shape, budget, "packed")
    print(f"{'':<32} " + " ".join(f"{column:>14}" for column in COLUMNS))
    chats, others = chat_lengths(budget, 0), chat_lengths(budget, 1)
    lines = {
        "packed chats": bench.line("packed chats", bench.capture(chats), budget),
        "another mix": bench.line("another mix", bench.capture(others), budget, 2),
        "bare forward": bench.line("bare forward", bench.bare(chats), budget),
        "small budget": bench.line(f"packed chats, {small:,} tokens", bench.capture(chat_lengths(small)), small),
        "host": bench.line("64 tokens: the host's own time", bench.capture(np.array([64])), 64),
    }
    if options.trace:
        with torch.profiler.profile() as trace:
            bench.capture(chats)()
            torch.cuda.synchronize()
        table = trace.key_averages().table(sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=100)
        options.trace.write_text(table)
    if not options.only_packed:
        del bench
        torch.cuda.empty_cache()
        bench = Bench(options.shape, budget, "rows")
        equal = np.full(rows, budget // rows)
        name = f"{rows} rows of {budget // rows:,}"
        lines["rows"] = bench.line(name, bench.capture(equal), budget, 2)
        lines["plain"] = bench.line(f"{name}, plain", bench.plain(rows, budget // rows), budget, 2)
    if options.json:
        options.json.write_text(json.dumps(lines, indent=2))


if __name__ == "__main__":
    main()
