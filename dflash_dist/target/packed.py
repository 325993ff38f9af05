"""One forward of many documents in a row, of which each sees only itself, and no padding.

Only attention, the delta rule and the short convolution of a target look at other tokens. Inside `running` a decoder
that was given to `attention.use_own_attention` and `mixers.use_own_mixers` takes them from there, and they keep to the
documents of the pack. They are custom ops: torch.compile sees one opaque call, and the pack is looked up when it runs.
So another mix of lengths recompiles nothing, and nothing is read back from the device. Attention is torch's, the delta
rule fla's, and what lies around that is in `packed_kernels.py`; causal-conv1d is not needed.

Where no kernel fits (CPU, float32 attention), an op goes through the documents one by one: the definition, and slow.

Shape suffixes: N documents of the pack, T its tokens, P = N + 1, C chunks of at most `CHUNK` tokens of one document.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_dist.target.packing import token_offsets

CHUNK = 64
"""Tokens that the delta rule's kernels take at a time."""


class NotPackableError(Exception):
    """The target does something that packed documents could see through; the text says what."""


@dataclass(frozen=True)
class Pack:
    """Where the documents of one forward lie, on the device."""

    lengths: tuple[int, ...]
    offsets_P: Tensor
    """int32: where each document begins, and where the last one ends."""
    document_1T: Tensor
    """int32: the document of each token."""
    positions_1T: Tensor
    """int64: each token's position in its document."""
    chunks_C2: Tensor
    """int32: document and number of each chunk. Given to fla, which otherwise reads the offsets back in every layer."""

    @classmethod
    def of(cls, lengths_N: np.ndarray, device: torch.device) -> Pack:
        """The pack of documents with these lengths, copied without a wait."""
        counts_N = -(-lengths_N // CHUNK)
        documents = np.arange(len(lengths_N))
        arrays = (
            np.concatenate([[0], np.cumsum(lengths_N)]).astype(np.int32),
            np.repeat(documents, lengths_N)[None].astype(np.int32),
            token_offsets(lengths_N)[None],
            np.stack([np.repeat(documents, counts_N), token_offsets(counts_N)], 1).astype(np.int32),
        )
        return cls(tuple(lengths_N.tolist()), *(to_device(torch.from_numpy(array), device) for array in arrays))


@dataclass
class _Running:
    """What the ops look up."""

    active: bool = False
    pack: Pack | None = None
    rows: Pack | None = None
    """Where there is no pack: the rows, padding included, as the documents of one row."""
    key_heads: int = 0
    """Of the delta rule. Up to transformers 5.17 queries and keys come repeated for the heads of the values."""
    fla: bool = False
    """Whether its kernels can be used here."""


current = _Running()


@contextlib.contextmanager
def running(decoder: Any, pack: Pack | None, rows: Pack | None = None) -> Iterator[None]:
    """Within it, the decoder's mixers are this project's, for the documents of `pack`; None: one to a row.

    `rows`: those rows, padding included, as documents that the delta rule takes in one row. fla tunes a kernel anew for
    each number of rows, but not of documents.
    """
    current.active, current.pack, current.rows = True, pack, rows
    current.key_heads = getattr(decoder.config, "linear_num_key_heads", 0)
    try:
        yield
    finally:
        current.active, current.pack, current.rows = False, None, None


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device in the order of its stream; the host does not wait."""
    if device.type == "cuda" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
