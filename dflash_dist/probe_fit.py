"""What a probe runs, and what follows from it: the shapes, the costs of the schedule, the largest token budget."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from dflash_dist.config import ScheduleConfig
from dflash_dist.probe_process import Loaded, Shape, TargetProcess, Timing
from dflash_dist.train.inputs import COSTS
from dflash_dist.train.memory import GIB

MEDIAN_TOKENS, NINE_OF_TEN_TOKENS, LONGEST_TOKENS = 1500, 4200, 8192
"""The log-normal lengths of chats; all of them smaller where documents are not as long."""
USABLE_SHARE = 0.9
"""Of a GPU's memory: the rest is for NCCL, fragments and other mixes of lengths."""
BUDGET_TRIES = 6


def shapes_for(budgets: Iterable[int], longest: int) -> list[Shape]:
    """For each budget documents of equal lengths and a mix; of the greatest smaller mixes too, and one document alone.

    `longest`: tokens of the longest document that there can be.
    """
    shapes = []
    for budget in sorted(budgets):
        for length in {max(1, min(longest, budget) // part): None for part in (1, 2, 4, 8)}:
            count = budget // length
            shapes.append(Shape(f"{count}x{length}", (length,) * count))
        shapes.append(mix(budget, longest))
    alone = min(longest, max(budgets))
    smaller = [mix(max(budgets) // part, longest) for part in (2, 4, 8) if max(budgets) >= part]
    return [*shapes, *smaller, Shape(f"1x{alone}", (alone,))]


def mixed_lengths(tokens: int, longest: int) -> tuple[int, ...]:
    """Log-normal lengths, none above `longest`, that make up so many tokens; always the same."""
    scale = min(1.0, longest / LONGEST_TOKENS)
    sigma = np.log(NINE_OF_TEN_TOKENS / MEDIAN_TOKENS) / 1.2816  # nine of ten of a normal distribution lie below 1.2816
    count = 64 + int(2 * tokens / max(1.0, MEDIAN_TOKENS * scale))
    drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN_TOKENS * scale), sigma, count).astype(np.int64)
    ends = np.minimum(np.cumsum(np.clip(drawn, 1, longest)), tokens)
    lengths = np.diff(ends, prepend=0)
    return tuple(lengths[lengths > 0].tolist())


def mix(tokens: int, longest: int, slots: int = 1) -> Shape:
    """A batch of `mixed_lengths`."""
    lengths = mixed_lengths(tokens, longest)
    return Shape(f"mix of {len(lengths)}", lengths, slots)


def fit_costs(batches: Sequence[tuple[Sequence[int], float]]) -> tuple[dict[str, float], float]:
    """The schedule's costs that fit batches of (document lengths, microseconds) best, none negative.

    With the greatest error, as a share of a batch's time.
    """
    times_us = np.array([time_us for _, time_us in batches])
    lengths = [np.array(lengths, np.float64) for lengths, _ in batches]
    counts = np.array([[1, some.sum(), (some**2).sum()] for some in lengths])
    shares = counts / times_us[:, None]  # so that a batch's error counts by its share of that batch
    best, least = np.zeros(3), np.inf
    for columns in ([1], [0, 1], [1, 2], [0, 1, 2], [0], [2], [0, 2]):  # those with a cost a token first
        found, *_ = np.linalg.lstsq(shares[:, columns], np.ones(len(batches)), rcond=None)
        error = float(np.linalg.norm(shares[:, columns] @ found - 1))
        if (found >= 0).all() and error < least:
            best, least = np.zeros(3), error
            best[columns] = found
    return dict(zip(COSTS, best.tolist(), strict=True)), float(np.abs(shares @ best - 1).max())


def largest_budget(
    process: TargetProcess, loaded: Loaded, timings: Mapping[Shape, Timing], schedule: ScheduleConfig, longest: int
) -> tuple[int | None, str]:
    """The largest budget at which a target rank leaves its share of memory, tried out; with the sum, or why none.

    A rank holds the weights, a forward, and `ring_slots` messages to one drafter rank.
    """
    if loaded.memory_bytes is None:
        return None, "left out, as a CPU's memory is shared with all else that runs here"
    mixes = {shape: timing for shape, timing in timings.items() if len(set(shape.lengths)) > 1}
    if len({shape.tokens for shape in mixes}) < 3:
        return None, "unknown, as memory was enough for fewer than three sizes of mixes; give a smaller --budget"
    room_bytes = USABLE_SHARE * loaded.memory_bytes - loaded.other_bytes - loaded.weights_bytes
    token_bytes = _token_bytes(mixes, loaded) + (schedule.ring_slots - 1) * loaded.bytes_per_token
    most = int(schedule.max_documents * np.mean([length for shape in mixes for length in shape.lengths]))
    budget = round_down(max(0, min(int(room_bytes / token_bytes), most)))
    bound = f"; schedule.max_documents={schedule.max_documents} hold no more" if budget == round_down(most) else ""
    fits = max((shape.tokens for shape in mixes if shape.tokens * token_bytes <= room_bytes), default=0)
    tries = 0
    while budget >= 2 and tries < BUDGET_TRIES:
        tries += 1
        answer = process.run(mix(budget, longest, schedule.ring_slots))
        if isinstance(answer, Timing) and answer.peak_bytes - loaded.weights_bytes <= room_bytes:
            return budget, _memory_sum(loaded, answer) + bound
        bound = ""
        if isinstance(answer, str):
            _say(f"a budget of {budget:,} tokens does not hold: {answer}")
            budget = round_down((budget + fits) // 2 if tries < BUDGET_TRIES - 1 else fits)
        else:
            _say(f"a budget of {budget:,} tokens does not hold: it takes {answer.peak_bytes / GIB:.1f} GiB")
            token_bytes = (answer.peak_bytes - loaded.weights_bytes) / budget
            budget = round_down(min(budget - 1, int(room_bytes / token_bytes)))
    return None, f"none found in {tries} tries, beside weights of {loaded.weights_bytes / GIB:.1f} GiB"


def round_down(tokens: int) -> int:
    """At most 3 % less, and a multiple of a power of two."""
    step = max(1, 1 << tokens.bit_length() >> 6)
    return tokens // step * step


def _token_bytes(mixes: Mapping[Shape, Timing], loaded: Loaded) -> float:
    """Bytes by which a token of a batch and its message raise the peak above the weights, by least squares."""
    tokens = np.array([shape.tokens for shape in mixes], np.float64)
    grown_bytes = np.array([timing.peak_bytes - loaded.weights_bytes for timing in mixes.values()], np.float64)
    return float((tokens * grown_bytes).sum() / (tokens**2).sum())


def _memory_sum(loaded: Loaded, timing: Timing) -> str:
    assert loaded.memory_bytes is not None
    left = 1 - (timing.peak_bytes + loaded.other_bytes) / loaded.memory_bytes
    return (
        f"it ran in {timing.peak_bytes / GIB:.1f} GiB, of which weights {loaded.weights_bytes / GIB:.1f}, beside "
        f"{loaded.other_bytes / GIB:.1f} that others hold: {left:.0%} of {loaded.memory_bytes / GIB:.1f} GiB is left"
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
