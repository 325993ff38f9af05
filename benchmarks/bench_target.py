"""The frozen target on this GPU: packed and padded, beside Hugging Face's own path. Random weights, from a shape alone.

usage: python benchmarks/bench_target.py [SHAPE] [BUDGET] [--json FILE]; shapes: those in `shapes`
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
from dflash_dist.target.capture import TargetForward
from dflash_dist.target.packed import Pack, running
from dflash_dist.target.packing import one_row

DATASHEET_TFLOPS = 989
GIB = 2**30
ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}


def shapes() -> dict[str, tuple[Any, tuple[int, ...], int]]:
    """(transformers configuration, taps, parameters not to count) by name."""
    from transformers import Qwen3_5TextConfig, Qwen3Config, Qwen3MoeConfig

    hybrid = {"rope_parameters": {**ROPE, "mrope_section": [11, 11, 10], "mrope_interleaved": True}}
    return {
        "qwen3.6-27b": (
            Qwen3_5TextConfig(
                vocab_size=248320, hidden_size=5120, intermediate_size=17408, num_hidden_layers=64,
                num_attention_heads=24, num_key_value_heads=4, head_dim=256, linear_num_value_heads=48,
                linear_num_key_heads=16, **hybrid,
            ),
            (1, 16, 31, 46, 61), 0,
        ),
        "small": (
            Qwen3_5TextConfig(
                vocab_size=32000, hidden_size=2048, intermediate_size=6144, num_hidden_layers=8, num_attention_heads=8,
                num_key_value_heads=2, head_dim=256, linear_num_value_heads=16, linear_num_key_heads=8, **hybrid,
            ),
            (1, 4, 7), 0,
        ),
        "qwen3-8b": (
            Qwen3Config(
                vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
                num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960,
            ),
            (1, 9, 17, 25, 33), 0,
        ),
        "qwen3-30b-a3b": (
            Qwen3MoeConfig(
                vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
                num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128,
                num_experts_per_tok=8, max_position_embeddings=40960,
            ),
            (1, 12, 23, 34, 45), 0,
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


def seconds(run: Callable[[], Any], repeats: int = 3) -> tuple[float, float]:
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
    took_s, _ = seconds(lambda: [torch.mm(a, b, out=out) for _ in range(20)])
    return 20 * 2 * tokens * rows * columns / took_s / 1e12


def active_parameters(decoder: Any) -> int:
    """Parameters that one token is multiplied with: no embedding, and of experts those that are chosen."""
    config = decoder.config
    share = getattr(config, "num_experts_per_tok", 1) / (getattr(config, "num_experts", None) or 1)
    return int(sum(p.numel() * (share if ".experts." in name else 1) for name, p in decoder.layers.named_parameters()))


class Bench:
    """One target, and the rows of the table so far."""

    def __init__(self, shape: str, budget: int, compile: bool) -> None:
        config, self.taps, _ = shapes()[shape]
        self.budget = budget
        self.rows: dict[str, dict[str, float]] = {}
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            self.forward = TargetForward(
                folder,
                TargetConfig(model=folder, compile=compile),
                self.taps,
                torch.device("cuda"),
                random_weights=True,
            )
        self.model = self.forward._model
        self.parameters = active_parameters(self.model)
        self.layers_share = config.num_hidden_layers / len(self.model.layers)
        self.vocabulary = config.vocab_size
        self.out_TW = torch.empty(budget, self.forward.features, dtype=torch.bfloat16, device="cuda")
        self.matrix = matrix_tflops(min(budget, 65536), config.hidden_size, config.intermediate_size)
        print(
            f"{shape}: {len(self.model.layers)} of {config.num_hidden_layers} layers, "
            f"{self.parameters / 1e9:.2f} B parameters; "
            f"layout {self.forward.layout} {self.forward.not_packed_because}; matrix rate {self.matrix:.0f} TFLOP/s; "
            f"{torch.cuda.memory_allocated() / GIB:.1f} GiB",
            flush=True,
        )

    def report(self, name: str, run: Callable[[], Any], tokens: int, repeats: int = 3) -> float:
        """Runs, prints and keeps one row; the median seconds."""
        torch.cuda.reset_peak_memory_stats()
        began_s = time.perf_counter()
        try:
            run()
            torch.cuda.synchronize()
            warm_s = time.perf_counter() - began_s
            torch.cuda.reset_peak_memory_stats()
            gpu_s, host_s = seconds(run, repeats)
        except torch.OutOfMemoryError:
            print(f"{name}: out of memory", flush=True)
            torch.cuda.empty_cache()
            return float("nan")
        tflops = 2 * self.parameters * tokens / gpu_s / 1e12
        self.rows[name] = row = {
            "ktok_s": tokens / gpu_s / 1e3, "us_per_token": gpu_s / tokens * 1e6, "tflops": tflops,
            "tflops_all_layers": tflops * self.layers_share, "of_matrix_rate": tflops / self.matrix,
            "mfu": tflops / DATASHEET_TFLOPS, "peak_gib": torch.cuda.max_memory_allocated() / GIB,
            "host_share": host_s / gpu_s, "first_s": warm_s, "gpu_s": gpu_s,
        }  # fmt: skip
        print(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in row.items()), flush=True)
        return gpu_s

    def capture(self, lengths_N: np.ndarray) -> Callable[[], None]:
        """The target's whole work on one batch."""
        tokens_T = torch.randint(0, self.vocabulary, (int(lengths_N.sum()),))
        return lambda: self.forward.capture(tokens_T, lengths_N, self.out_TW[: len(tokens_T)])

    def bare(self, lengths_N: np.ndarray) -> Callable[[], None]:
        """The forward alone: nothing kept, nothing gathered."""
        group = one_row(lengths_N)
        ids = torch.randint(0, self.vocabulary, group.shape, device="cuda")
        pack = Pack.of(lengths_N, torch.device("cuda"))

        def run() -> None:
            with torch.no_grad(), running(pack):
                self.model(input_ids=ids, use_cache=False, position_ids=pack.positions_1T, seq_idx=pack.document_1T)

        return run

    def plain(self, rows: int, length: int) -> Callable[[], None]:
        """Hugging Face's own path on rows without padding, as `transformers` runs it when left alone."""
        ids = torch.randint(0, self.vocabulary, (rows, length), device="cuda")

        def run() -> None:
            with torch.no_grad():
                self.model(input_ids=ids, use_cache=False)

        return run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", nargs="?", default="qwen3.6-27b")
    parser.add_argument("budget", nargs="?", type=int, default=65536)
    parser.add_argument("--json")
    parser.add_argument("--trace")
    parser.add_argument("--no-plain", action="store_true")
    options = parser.parse_args()
    budget = options.budget
    if not options.no_plain:
        bench = Bench(options.shape, budget, compile=False)
        bench.model.config._attn_implementation = "sdpa"
        bench.report("plain Hugging Face 16 rows", bench.plain(16, budget // 16), budget, 2)
        plain = bench.rows
        del bench
        torch.cuda.empty_cache()
    bench = Bench(options.shape, budget, compile=True)
    chats = [chat_lengths(budget, seed) for seed in range(4)]
    bench.report("packed chats", bench.capture(chats[0]), budget)
    if options.json:
        Path(options.json).write_text(json.dumps(bench.rows))
    bench.report("packed chats, another mix", bench.capture(chats[1]), budget, 2)
    bench.report("packed chats, bare forward", bench.bare(chats[0]), budget)
    for small in (8192,):
        bench.report(f"packed chats, budget {small}", bench.capture(chat_lengths(small)), small)
    if options.trace:
        run = bench.capture(chats[0])
        with torch.profiler.profile() as trace:
            run()
            torch.cuda.synchronize()
        Path(options.trace).write_text(
            trace.key_averages().table(sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=100)
        )
    bench.forward.layout = "rows"
    bench.model.config._attn_implementation = "sdpa"
    bench.report("rows 16", bench.capture(np.full(16, budget // 16)), budget, 2)
    if options.json:
        Path(options.json).write_text(json.dumps({**({} if options.no_plain else plain), **bench.rows}))


if __name__ == "__main__":
    main()
