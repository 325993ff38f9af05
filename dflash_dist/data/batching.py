"""Packing documents into batches: full to the budget, in a random order that does not depend on length.

The documents come in shuffled order. Windows of them, each a few batches long, are packed by themselves, all windows
at once: longest documents first, each into the emptiest batch of its window, so that all batches of a window get a like
mix of lengths and are filled up by the short documents at the end. What fits nowhere goes into windows of its own.

Shape suffixes: N documents, W windows, D most documents of a window, B batches of a window.
"""

from __future__ import annotations

import numpy as np

WINDOW_BATCHES = 16
"""Batches of a window: enough that the last documents find room, few enough that a document stays near its place."""
WINDOW_FILL = 0.997
"""Share of its batches' room that a window's documents take: a little air, or the last documents fit nowhere."""


def pack(lengths_N: np.ndarray, token_budget: int, max_documents: int) -> list[np.ndarray]:
    """The batches, each as ascending places (int64) in `lengths_N`, in the order of their mean place.

    No batch has more than `token_budget` tokens or `max_documents` documents; no document may be longer than that.
    """
    longest = int(lengths_N.max(initial=0))
    assert longest <= token_budget, f"document of {longest} tokens in a budget of {token_budget}: prepare cuts them"
    batch_N = np.full(len(lengths_N), -1, np.int64)
    rest, batches = np.arange(len(lengths_N)), 0
    while len(rest):
        window_of, bins = _windows(lengths_N[rest], token_budget, max_documents)
        batch_N[rest] = _fill_windows(lengths_N[rest], window_of, bins, token_budget, max_documents)
        placed = batch_N[rest] >= 0
        batch_N[rest[placed]] += batches
        batches += (int(window_of[-1]) + 1) * bins
        rest = rest[~placed]
    by_batch = np.argsort(batch_N, kind="stable")
    used, starts = np.unique(batch_N[by_batch], return_index=True)
    sizes = np.diff(np.append(starts, len(by_batch)))
    mean_place = np.add.reduceat(by_batch, starts) / sizes if len(used) else starts
    groups = np.split(by_batch, starts[1:])
    return [groups[i] for i in np.argsort(mean_place, kind="stable")] if len(used) else []


def _windows(lengths_N: np.ndarray, token_budget: int, max_documents: int) -> tuple[np.ndarray, int]:
    """The window of each document, from 0 in order, and the number of batches that each window gets."""
    # A document takes room for its tokens, or its share of the documents that a batch may hold.
    room_N = np.maximum(lengths_N, token_budget / max_documents).cumsum()
    bins = min(WINDOW_BATCHES, _batches_for(lengths_N, token_budget, max_documents))
    return (room_N / (bins * token_budget * WINDOW_FILL)).astype(np.int64), bins


def _batches_for(lengths_N: np.ndarray, token_budget: int, max_documents: int) -> int:
    """The least number of batches that may hold the documents."""
    return int(max(-(-lengths_N.sum() // token_budget), -(-len(lengths_N) // max_documents)))


def _fill_windows(
    lengths_N: np.ndarray, window_N: np.ndarray, bins: int, token_budget: int, max_documents: int
) -> np.ndarray:
    """The batch of each document, `bins` to a window; -1 where none of its window has room."""
    windows = int(window_N[-1]) + 1
    starts_W = np.searchsorted(window_N, np.arange(windows))
    longest_first = np.lexsort((-lengths_N, window_N))
    rank_N = np.arange(len(lengths_N)) - starts_W[window_N]
    sizes_W = np.bincount(window_N, minlength=windows)
    lengths_WD = np.zeros((windows, int(sizes_W.max())), np.int64)
    lengths_WD[window_N, rank_N] = lengths_N[longest_first]  # window_N is ascending, as longest_first is by window

    room_WB = np.full((windows, bins), token_budget)
    room_WB[-1, _batches_for(lengths_N[starts_W[-1] :], token_budget, max_documents) :] = -1  # the last window is short
    count_WB = np.zeros((windows, bins), np.int64)
    chosen_WD = np.full_like(lengths_WD, -1)
    rows = np.arange(windows)
    for d in range(lengths_WD.shape[1]):
        length_W = lengths_WD[:, d]
        open_WB = np.where(count_WB < max_documents, room_WB, -1)
        bin_W = open_WB.argmax(1)
        fits_W = (length_W > 0) & (open_WB[rows, bin_W] >= length_W)
        room_WB[rows, bin_W] -= np.where(fits_W, length_W, 0)
        count_WB[rows, bin_W] += fits_W
        chosen_WD[fits_W, d] = rows[fits_W] * bins + bin_W[fits_W]
    batch_N = np.empty(len(lengths_N), np.int64)
    batch_N[longest_first] = chosen_WD[window_N, rank_N]
    return batch_N
