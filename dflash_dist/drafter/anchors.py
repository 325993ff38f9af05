"""Which tokens of a pack are anchors, and the blocks of inputs, labels and weights that follow from them.

All on the host, in numpy. Every choice is a hash of (seed, epoch, document key, position in the document), so that it
depends on no random stream, no topology and no neighbour in the pack.

Shape suffixes: T tokens of the pack, N documents, C candidate anchors, A blocks, B block size.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch

    from dflash_dist.data.store import Documents


class BlockTensors(NamedTuple):
    """`Blocks` as tensors on one device."""

    anchors_A: torch.Tensor
    keep_A: torch.Tensor
    ids_AB: torch.Tensor
    positions_AB: torch.Tensor
    labels_AB: torch.Tensor
    valid_AB: torch.Tensor
    weights_AB: torch.Tensor


@dataclass(frozen=True)
class Blocks:
    """The blocks of one batch. Padding has `keep_A` False, and neither labels nor weights."""

    anchors_A: np.ndarray
    """int64: the anchor's place in the pack, ascending over the kept blocks."""
    keep_A: np.ndarray
    """bool"""
    ids_AB: np.ndarray
    """int64: the anchor's token, then mask tokens."""
    positions_AB: np.ndarray
    """int64: positions within the document, as at inference."""
    labels_AB: np.ndarray
    """int64: the token at the same position; 0 where not valid."""
    valid_AB: np.ndarray
    """bool: offsets 1.. inside the document, up to the first token that is not supervised."""
    weights_AB: np.ndarray
    """float32: exp(-(offset - 1) / gamma); 0 where not valid."""

    def to(self, device: torch.device | str) -> BlockTensors:
        """The blocks on `device`, copied without a host wait where it is CUDA."""
        import torch

        cuda = torch.device(device).type == "cuda"
        tensors = (torch.from_numpy(getattr(self, field.name)) for field in dataclasses.fields(self))
        return BlockTensors(*((t.pin_memory() if cuda else t).to(device, non_blocking=cuda) for t in tensors))


def default_gamma(block_size: int) -> float:
    """The published decay length of the loss weight for a block size: 7 for 16, 5 for 10, 4 for 8; else 7/16 of it."""
    return {16: 7.0, 10: 5.0, 8: 4.0}.get(block_size, 7 / 16 * block_size)


def draw_blocks(
    documents: Documents,
    *,
    block_size: int,
    mask_token_id: int,
    anchors_per_document: int,
    max_anchors: int,
    gamma: float,
    seed: int,
    epoch: int,
    pad_to: int,
) -> Blocks:
    """The blocks of a batch for one epoch, padded to a multiple of `pad_to` blocks (at least one multiple).

    An anchor is a supervised token whose successor in the document is supervised too. Each document keeps the
    `anchors_per_document` candidates of smallest hash, and the batch the `max_anchors` of smallest hash among those.
    """
    anchors = _draw_anchors(documents, anchors_per_document, max_anchors, seed, epoch)
    return blocks_at(documents, anchors, block_size=block_size, mask_token_id=mask_token_id, gamma=gamma, pad_to=pad_to)


def blocks_at(
    documents: Documents, anchors: np.ndarray, *, block_size: int, mask_token_id: int, gamma: float, pad_to: int
) -> Blocks:
    """The blocks of the given anchors (int64, ascending places in the pack), padded as `draw_blocks` does."""
    starts_N = np.cumsum(documents.lengths_N) - documents.lengths_N
    document_T = np.repeat(np.arange(len(documents.lengths_N)), documents.lengths_N)
    padded = max(1, -(-len(anchors) // pad_to)) * pad_to
    keep_A = np.arange(padded) < len(anchors)
    anchors_A = np.zeros(padded, np.int64)
    anchors_A[: len(anchors)] = anchors

    offsets_B = np.arange(block_size)
    start_A = starts_N[document_T[anchors_A]]
    end_A = start_A + documents.lengths_N[document_T[anchors_A]]
    index_AB = anchors_A[:, None] + offsets_B
    inside_AB = index_AB < end_A[:, None]
    index_AB = np.minimum(index_AB, len(documents.tokens_T) - 1)
    supervised_AB = inside_AB & documents.supervised_T[index_AB] & keep_A[:, None]
    valid_AB = np.logical_and.accumulate(supervised_AB, axis=1) & (offsets_B > 0)

    ids_AB = np.full((padded, block_size), mask_token_id, np.int64)
    ids_AB[:, 0] = documents.tokens_T[anchors_A]
    decay_B = np.exp(-(offsets_B - 1) / gamma)
    return Blocks(
        anchors_A=anchors_A,
        keep_A=keep_A,
        ids_AB=ids_AB,
        positions_AB=(anchors_A - start_A)[:, None] + offsets_B,
        labels_AB=np.where(valid_AB, documents.tokens_T[index_AB], 0),
        valid_AB=valid_AB,
        weights_AB=np.where(valid_AB, decay_B, 0).astype(np.float32),
    )


def document_hashes(documents: Documents, seed: int, epoch: int) -> np.ndarray:
    """uint64 [N]: what a document's random choices in one epoch are drawn from."""
    epoch_key = _mix(_mix(np.array([seed], np.uint64)) + np.uint64(epoch))
    return _mix(epoch_key ^ documents.keys_N)


def _draw_anchors(
    documents: Documents, anchors_per_document: int, max_anchors: int, seed: int, epoch: int
) -> np.ndarray:
    """int64, ascending: the chosen anchors' places in the pack."""
    starts_N = np.cumsum(documents.lengths_N) - documents.lengths_N
    document_T = np.repeat(np.arange(len(documents.lengths_N)), documents.lengths_N)
    supervised_T = documents.supervised_T
    follows_T = supervised_T[:-1] & supervised_T[1:] & (document_T[:-1] == document_T[1:])
    candidates_C = np.flatnonzero(follows_T)
    document_C = document_T[candidates_C]
    position_C = candidates_C - starts_N[document_C]
    hash_C = _mix(document_hashes(documents, seed, epoch)[document_C] + position_C.astype(np.uint64))

    by_document_then_hash = np.lexsort((hash_C, document_C))
    first_of_document_C = np.searchsorted(document_C, document_C)
    rank_C = np.arange(len(candidates_C)) - first_of_document_C
    chosen = by_document_then_hash[rank_C < anchors_per_document]
    if len(chosen) > max_anchors:
        chosen = chosen[np.argsort(hash_C[chosen], kind="stable")[:max_anchors]]
    return np.sort(candidates_C[chosen])


def _mix(values: np.ndarray) -> np.ndarray:
    """uint64 hashes of uint64 values: one splitmix64 step, which maps distinct values to distinct hashes."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
