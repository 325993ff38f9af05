"""Where a rank's time goes: parts that add up to the whole window, to the nanosecond.

At every instant the most useful thing that goes on counts. On a GPU a kernel that computes comes before one that sends,
and that before a copy; where none runs, what the host does says why. Without GPU rows the spans of the loop count.

Shape suffixes: K kernels, S slices, I intervals.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_profiling.intervals import Intervals, difference, intersection, joined, union

PARTS = (
    "compute", "p2p_transfer", "collective", "p2p", "p2p_starved", "p2p_backpressured", "collective_wait", "copy",
    "profiler", "compile", "allocator", "data", "checkpoint", "host_bound", "unexplained",
)  # fmt: skip
"""From the most useful on: of what goes on at one time the first counts.

A receive is starved until its send begins, a send backpressured until its receive does, and a collective waits until
its last rank has come. `p2p` and `collective` are also those whose other ends are not in the traces, where waiting
cannot be told from transfer.
"""
FAMILIES = {
    "communication": r"^(void )?(nccl|rccl|mscclpp|msccl)|_all_reduce_kernel",
    "attention": r"flash|fmha|flex_attention|attention|sdpa",
    "delta rule": r"delta_rule|chunk_fwd|chunk_gated|recompute_w_u|solve_tril|l2norm",
    "convolution": r"(?<!type)conv",
    "matrix product": r"(?<!fb)gemm|nvjet|cutlass|cublas|wgmma|_mm_|matmul|splitk|tensile|Cijk",
    "optimizer": r"adam|multi_tensor_apply|sgd|lamb(?!da)",
    "softmax and loss": r"softmax|cross_entropy|nll_loss|_statistics_kernel|log_sum_exp",
    "norm": r"(?<!re)norm",
    "reduction": r"reduce_kernel|triton_red|triton_per|cub::|scan|cumsum|sort|topk",
    "gather and scatter": r"index|gather|scatter|embedding|catarray|copy",
    "random": r"distribution|philox|random|dropout",
    "element-wise": r"elementwise|triton_poi|vectorized|fill|pointwise|unrolled",
}
"""Names of kernels by family; the first that is found counts."""
_FAMILY = {family: re.compile(pattern, re.IGNORECASE) for family, pattern in FAMILIES.items()}


def family_of(kernel: str) -> str:
    """The family of a kernel by its name."""
    return next((family for family, pattern in _FAMILY.items() if pattern.search(kernel)), "other")


@dataclass(frozen=True)
class Split:
    """A rank's window, divided."""

    window_ns: int
    parts_ns: dict[str, int]
    """By name, of `PARTS`; they add up to the window."""


def split(window: Intervals, parts: Mapping[str, Intervals]) -> Split:
    """The window's time by part, each instant in the first of `PARTS` that has it; the rest is unexplained."""
    assert parts.keys() <= set(PARTS), parts.keys() - set(PARTS)
    shares = in_order(window, [parts[name] for name in PARTS if name in parts])
    parts_ns = dict(zip((name for name in PARTS if name in parts), (s.total_ns for s in shares), strict=True))
    rest = window.total_ns - sum(parts_ns.values())
    parts_ns["unexplained"] = parts_ns.get("unexplained", 0) + rest
    return Split(window.total_ns, {name: parts_ns.get(name, 0) for name in PARTS})


def in_order(window: Intervals, sets: Iterable[Intervals]) -> list[Intervals]:
    """Of each set what lies in the window and in no set before it."""
    shares, left = [], window
    for intervals in sets:
        share = intersection(left, intervals)
        left = difference(left, share)
        shares.append(share)
    return shares


def host_bound(idle: Intervals, kernel_start_K: np.ndarray, launch_end_K: np.ndarray) -> Intervals:
    """Of a GPU's idle time that before the launch of the kernel that ends it: the host came late.

    `kernel_start_K`, `launch_end_K`: int64 ns, of all kernels with a known launch. A launch after its kernel's start,
    which clocks that differ can show, counts as at the start.
    """
    launch_end_K = np.minimum(launch_end_K, kernel_start_K)
    order = np.lexsort((launch_end_K, kernel_start_K))  # of two that start together the one that was there first
    start_K, launch_K = kernel_start_K[order], launch_end_K[order]
    place_I = np.searchsorted(start_K, idle.end_I, side="left")
    found_I = place_I < len(start_K)
    found_I[found_I] &= start_K[place_I[found_I]] == idle.end_I[found_I]
    until_I = np.minimum(launch_K[place_I[found_I]], idle.end_I[found_I])
    return union(idle.start_I[found_I], until_I)


def by_span(time: Intervals, spans: Sequence[tuple[str, int, int]]) -> dict[str, int]:
    """How much of `time` lies in each named span (name, start, end in ns), each instant in the innermost; "" in none.

    The values add up to `time`.
    """
    return {name: share.total_ns for name, share in in_innermost(time, spans).items()}


def in_innermost(time: Intervals, spans: Sequence[tuple[str, int, int]]) -> dict[str, Intervals]:
    """The same as it lies in time."""
    shares: dict[str, list[Intervals]] = {}
    left = time
    # The shortest first: of spans of one thread that overlap, one lies in the other.
    lengths = np.array([end - start for _, start, end in spans], np.int64)
    names = [name for name, _, _ in spans]
    for level in _levels(spans, lengths):
        bounds = np.array([spans[place][1:] for place in level], np.int64).reshape(-1, 2)
        for name in dict.fromkeys(names[place] for place in level):
            of_name = np.array([names[place] == name for place in level])
            shares.setdefault(name, []).append(intersection(left, union(*bounds[of_name].T)))
        left = difference(left, union(*bounds.T))
    return {**{name: joined(some) for name, some in shares.items()}, "": left}


def _levels(spans: Sequence[tuple[str, int, int]], lengths: np.ndarray) -> list[list[int]]:
    """The spans' places by nesting, the innermost first: no span of a level holds one of the same or a later level."""
    order = sorted(range(len(spans)), key=lambda place: (spans[place][1], -lengths[place]))
    depth: dict[int, int] = {}
    open_ends: list[int] = []
    levels: list[list[int]] = []
    for place in order:
        _, start, end = spans[place]
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        depth[place] = len(open_ends)
        open_ends.append(end)
    for place, level in depth.items():
        while len(levels) <= level:
            levels.append([])
        levels[level].append(place)
    return levels[::-1]
