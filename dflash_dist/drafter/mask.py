"""What a block's tokens see: one rule, and the two forms in which attention takes it.

Queries are the tokens of all blocks, block after block. Keys are the pack's T context tokens, then the queries again.

Shape suffixes: T context tokens, A blocks, B block size, Q = A * B queries, S = T + Q keys, I and J tiles of queries
and keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

from dflash_dist.drafter.config import DrafterConfig

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query index, key index), broadcast together, to bool: whether the query sees the key."""
TILE = 128
"""Queries and keys of a tile of flex attention, which is computed as a whole, or not at all."""


class LayerKind(NamedTuple):
    """What distinguishes the masks of two layers."""

    causal: bool
    window: int | None


class BlockLayout(NamedTuple):
    """Where the blocks stand in the context."""

    block_size: int
    anchors_A: Tensor
    """int64: the anchor's place in the context."""
    keep_A: Tensor
    """bool: False for padding blocks."""
    starts_A: Tensor
    """int64: where the anchor's document begins in the context."""
    context: int
    """T, with padding."""


class DenseMask(NamedTuple):
    """A mask for scaled dot-product attention."""

    visible_QS: Tensor
    """bool; rows of padding are all True, so that their softmax is finite."""
    padding_Q: Tensor
    """bool: queries that see nothing, whose output is set to zero."""


class FlexMask(NamedTuple):
    """A mask for flex attention, and for the kernels of `attention_kernels` and `attention_flash`."""

    blocks: BlockMask
    spans_2Q: Tensor
    """int64: what each query sees of the context, and of its block: the first key, and in the upper half how many."""


Mask = DenseMask | FlexMask | None
"""None: every key is visible."""


def visibility(kind: LayerKind, layout: BlockLayout) -> Rule:
    """The visibility rule of one kind of layer.

    A query at offset j of the block at anchor a sees the context before a in its document (from a + j - (window - 1)
    on in a sliding layer) and its own block (up to j where causal). Padding blocks see nothing.
    """
    causal, window = kind
    block_size, anchors_A, keep_A, starts_A, context = layout

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block, offset = query // block_size, query % block_size
        anchor = anchors_A[block]
        in_context = (key >= starts_A[block]) & (key < anchor)
        if window is not None:
            in_context = in_context & (key >= anchor + offset - (window - 1))
        own = key - context
        in_block = (own >= 0) & (own // block_size == block)
        if causal:
            in_block = in_block & (own % block_size <= offset)
        return keep_A[block] & (in_context | in_block)

    return visible


def build_masks(config: DrafterConfig, attention: Literal["dense", "flex"], layout: BlockLayout) -> list[Mask]:
    """One mask a layer, DenseMask or FlexMask; layers of one kind share theirs."""
    build = flex_mask if attention == "flex" else dense_mask
    kinds = _layer_kinds(config)
    masks: dict[LayerKind, Mask] = {kind: build(kind, layout) for kind in dict.fromkeys(kinds)}
    return [masks[kind] for kind in kinds]


def inference_masks(config: DrafterConfig, context_tokens: int, block_size: int, device: torch.device) -> list[Mask]:
    """One mask a layer for a single block of `block_size` tokens after `context_tokens` committed ones.

    Layers that see everything, as full bidirectional ones do, get None.
    """
    kinds = _layer_kinds(config)
    sees_all = LayerKind(causal=False, window=None)
    masks: dict[LayerKind, Mask] = {sees_all: None}
    if any(kind != sees_all for kind in kinds):
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        layout = BlockLayout(block_size, zero + context_tokens, zero == 0, zero, context_tokens)
        masks |= {kind: dense_mask(kind, layout) for kind in dict.fromkeys(kinds) if kind != sees_all}
    return [masks[kind] for kind in kinds]


def _layer_kinds(config: DrafterConfig) -> list[LayerKind]:
    return [LayerKind(config.causal(layer), config.window(layer)) for layer in range(config.num_hidden_layers)]


def dense_mask(kind: LayerKind, layout: BlockLayout) -> DenseMask:
    """The mask of one kind of layer, pair by pair."""
    device = layout.anchors_A.device
    queries = layout.anchors_A.shape[0] * layout.block_size
    query_Q1 = torch.arange(queries, device=device)[:, None]
    key_1S = torch.arange(layout.context + queries, device=device)[None]
    visible_QS = visibility(kind, layout)(query_Q1, query_Q1, query_Q1, key_1S)
    padding_Q = ~layout.keep_A.repeat_interleave(layout.block_size)
    return DenseMask(visible_QS | padding_Q[:, None], padding_Q)


def flex_mask(kind: LayerKind, layout: BlockLayout) -> FlexMask:
    """The mask's tiles from the ends of what each query sees: the Q x S pairs are never looked at."""
    ends_4Q = _ends(kind, layout)
    queries = ends_4Q.shape[1]
    some_IJ, all_IJ = _tiles(ends_4Q, layout.context + queries)
    blocks = BlockMask.from_kv_blocks(
        *_ordered(some_IJ & ~all_IJ),
        *_ordered(all_IJ),
        BLOCK_SIZE=TILE,
        mask_mod=visibility(kind, layout),
        seq_lengths=(queries, layout.context + queries),
    )
    begins_2Q, ends_2Q = ends_4Q[::2], ends_4Q[1::2]
    # Never below 0: `attention_flash` takes the number of keys as unsigned.
    return FlexMask(blocks, begins_2Q | ((ends_2Q - begins_2Q).clamp_min(0) << 32))


def _ends(kind: LayerKind, layout: BlockLayout) -> Tensor:
    """int64 [4, Q]: first and end of the context that each query sees, and of its block; all 0 for padding."""
    block_size, anchors_A, keep_A, starts_A, context = layout
    query_Q = torch.arange(anchors_A.shape[0] * block_size, device=anchors_A.device)
    block_Q, offset_Q = query_Q // block_size, query_Q % block_size
    begin_Q, end_Q = starts_A[block_Q], anchors_A[block_Q]
    if kind.window is not None:
        begin_Q = torch.maximum(begin_Q, end_Q + offset_Q - (kind.window - 1))
    own_begin_Q = context + block_Q * block_size
    own_end_Q = own_begin_Q + (offset_Q + 1 if kind.causal else block_size)
    return torch.stack([begin_Q, end_Q, own_begin_Q, own_end_Q]) * keep_A[block_Q]


def _tiles(ends_4Q: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """bool [I, J] each: the tiles in which some pair may be visible, and those in which all are."""
    begin_Q1, end_Q1, own_begin_Q1, own_end_Q1 = ends_4Q[..., None]
    first_J = torch.arange(0, keys, TILE, device=ends_4Q.device)
    last_J = first_J + TILE

    def meets(begin_Q1: Tensor, end_Q1: Tensor) -> Tensor:
        return torch.maximum(begin_Q1, first_J) < torch.minimum(end_Q1, last_J)

    some_QJ = meets(begin_Q1, end_Q1) | meets(own_begin_Q1, own_end_Q1)
    all_QJ = (begin_Q1 <= first_J) & (last_J <= end_Q1)
    rest = -ends_4Q.shape[1] % TILE
    some_QJ, all_QJ = (F.pad(x_QJ, (0, 0, 0, rest), value=False) for x_QJ in (some_QJ, all_QJ))
    return some_QJ.unflatten(0, (-1, TILE)).any(1), all_QJ.unflatten(0, (-1, TILE)).all(1)


def _ordered(tiles_IJ: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of a row's tiles, int32 [1, 1, I], and those tiles first of all, int32 [1, 1, I, J]."""
    order_IJ = tiles_IJ.int().argsort(dim=1, descending=True, stable=True)
    return tiles_IJ.sum(1, dtype=torch.int32)[None, None], order_IJ.int()[None, None]
