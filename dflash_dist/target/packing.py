"""Laying the documents of a pack out as one row or as right-padded rows, and finding their tokens again.

A causal model reads a right-padded row exactly: no real token sees the padding after it, nor another document.
Rows of like length go together, so that little is computed in vain.

Shape suffixes: N documents of the pack, R rows of a group, L padded length of the group, T tokens of the pack.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RowGroup:
    """Some documents of a pack as rows of one padded length."""

    shape: tuple[int, int]
    """(R, L)"""
    source: np.ndarray
    """int64: for each real token of the group, its place in the flattened [R * L] rows."""
    destination: np.ndarray
    """int64: the same token's place in the pack."""


def row_groups(lengths_N: np.ndarray, max_padding_share: float = 0.15) -> list[RowGroup]:
    """Groups that cover every document once, each with at most the given share of padding."""
    starts_N = np.cumsum(lengths_N) - lengths_N
    longest_first = np.argsort(-lengths_N, kind="stable")
    groups, first = [], 0
    while first < len(longest_first):
        width = max(2, int(lengths_N[longest_first[first]]))  # torch.compile takes a size of 1 for a constant
        real = np.cumsum(lengths_N[longest_first[first:]])
        padded = width * np.arange(1, len(real) + 1)
        too_empty = np.flatnonzero(real < (1 - max_padding_share) * padded)
        count = max(1, int(too_empty[0])) if len(too_empty) else len(real)
        groups.append(_group(longest_first[first : first + count], starts_N, lengths_N, width))
        first += count
    return groups


def one_row(lengths_N: np.ndarray) -> RowGroup:
    """All documents behind each other in one row, without padding."""
    tokens = np.arange(int(lengths_N.sum()))
    return RowGroup((1, len(tokens)), tokens, tokens)


def token_offsets(lengths_N: np.ndarray) -> np.ndarray:
    """int64 [T]: each token's position within its document."""
    starts_N = np.cumsum(lengths_N) - lengths_N
    return np.arange(int(lengths_N.sum())) - np.repeat(starts_N, lengths_N)


def _group(documents: np.ndarray, starts_N: np.ndarray, lengths_N: np.ndarray, width: int) -> RowGroup:
    lengths_R = lengths_N[documents]
    offsets = token_offsets(lengths_R)
    source = np.repeat(np.arange(len(documents)) * width, lengths_R) + offsets
    destination = np.repeat(starts_N[documents], lengths_R) + offsets
    return RowGroup((len(documents), width), source, destination)
