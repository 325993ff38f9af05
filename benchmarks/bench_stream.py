"""What the always-on stream costs: a drafter's steps with it and without it, in turn.

    python benchmarks/bench_stream.py [SHAPE] [--case ROWSxTOKENS] [--anchors N] [--turns N] [--seconds S] [--json FILE]

A turn is some seconds with the stream, then as many without; the next begins without. One line: steps a second of
both, the median over the turns of their ratio, and the stream's own processor time over the wall time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from bench_drafter import Batch, ours, shapes

from dflash_dist.drafter.loss import Objective
from dflash_profiling.stream import Stream


def steps_per_s(step: Callable[[], object], wait: Callable[[], None], seconds: float) -> float:
    """Steps a second, over at least so many seconds."""
    wait()
    began_s, steps = time.perf_counter(), 0
    while time.perf_counter() - began_s < seconds:
        step()
        steps += 1
        if steps % 4 == 0:  # as a loop that reads its metrics a few steps later: the queue does not run far ahead
            wait()
    wait()
    return steps / (time.perf_counter() - began_s)


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("shape", nargs="?", default="tiny", choices=list(shapes()))
    parser.add_argument("--case", default="1x256")
    parser.add_argument("--anchors", type=int, default=32)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    rows, length = map(int, options.case.split("x"))
    shape = shapes()[options.shape]
    batch = Batch(shape, np.full(rows, length), rows * options.anchors, Objective(), "cuda" if cuda else "cpu")
    batch.spread_anchors(options.anchors)
    step, _ = ours(batch, 1024)
    wait = torch.cuda.synchronize if cuda else lambda: None
    steps_per_s(step, wait, 2.0)
    rates: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stream.jsonl"
        for turn in range(options.turns):
            for on in (True, False) if turn % 2 == 0 else (False, True):
                if on:
                    with Stream(path, 0 if cuda else None):
                        rates[on].append(steps_per_s(step, wait, options.seconds))
                else:
                    rates[on].append(steps_per_s(step, wait, options.seconds))
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    ratio = statistics.median(on / off for on, off in zip(rates[True], rates[False], strict=True))
    own = max(line["own_cpu_s"] for line in lines) / options.seconds
    with_it, without = (statistics.median(rates[key]) for key in (True, False))
    print(
        f"{options.shape}: {with_it:.3f} steps/s with, {without:.3f} without, ratio {ratio:.4f}; "
        f"own processor time {own:.4f}"
    )
    print(f"last line: {json.dumps(lines[-1])}")
    if options.json:
        options.json.write_text(json.dumps({"ratio": ratio, "own_cpu_share": own, "rates": list(rates.values())}))


if __name__ == "__main__":
    main()
