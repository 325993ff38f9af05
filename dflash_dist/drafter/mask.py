"""What a block's tokens see: one rule, and the two forms in which attention takes it.

Queries are the tokens of all blocks, block after block. Keys are the pack's T context tokens, then the queries again.

Shape suffixes: T context tokens, A blocks, B block size, Q = A * B queries, S = T + Q keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from dflash_dist.drafter.config import DrafterConfig

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query index, key index), broadcast together, to bool: whether the query sees the key."""


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
    anchor_documents_A: Tensor
    """int64: the anchor's document."""
    documents_T: Tensor
    """int64: the document of each context token, -1 for padding."""


class DenseMask(NamedTuple):
    """A mask for scaled dot-product attention."""

    visible_QS: Tensor
    """bool; rows of padding are all True, so that their softmax is finite."""
    padding_Q: Tensor
    """bool: queries that see nothing, whose output is set to zero."""


Mask = DenseMask | BlockMask | None
"""None: every key is visible."""


def visibility(kind: LayerKind, layout: BlockLayout) -> Rule:
    """The visibility rule of one kind of layer.

    A query at offset j of the block at anchor a sees the context before a in its document (from a + j - (window - 1)
    on in a sliding layer) and its own block (up to j where causal). Padding blocks see nothing, and context of
    document -1 is never seen.
    """
    causal, window = kind
    block_size, anchors_A, keep_A, anchor_documents_A, documents_T = layout
    context = documents_T.shape[0]
    # Keys past the context get a document of their own, so that no index leaves the tensor.
    documents_S = torch.cat([documents_T, documents_T.new_full((anchors_A.shape[0] * block_size,), -2)])

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block, offset = query // block_size, query % block_size
        anchor, document = anchors_A[block], documents_S[key]
        in_context = (key < anchor) & (document == anchor_documents_A[block]) & (document >= 0)
        if window is not None:
            in_context = in_context & (key >= anchor + offset - (window - 1))
        own = key - context
        in_block = (own >= 0) & (own // block_size == block)
        if causal:
            in_block = in_block & (own % block_size <= offset)
        return keep_A[block] & (in_context | in_block)

    return visible


def build_masks(config: DrafterConfig, attention: Literal["dense", "flex"], layout: BlockLayout) -> list[Mask]:
    """One mask a layer, DenseMask or BlockMask; layers of one kind share theirs."""
    build = _flex_mask if attention == "flex" else _dense_mask
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
        layout = BlockLayout(block_size, zero + context_tokens, zero == 0, zero, zero.expand(context_tokens))
        masks |= {kind: _dense_mask(kind, layout) for kind in dict.fromkeys(kinds) if kind != sees_all}
    return [masks[kind] for kind in kinds]


def _layer_kinds(config: DrafterConfig) -> list[LayerKind]:
    return [LayerKind(config.causal(layer), config.window(layer)) for layer in range(config.num_hidden_layers)]


def _dense_mask(kind: LayerKind, layout: BlockLayout) -> DenseMask:
    device = layout.anchors_A.device
    queries = layout.anchors_A.shape[0] * layout.block_size
    query_Q1 = torch.arange(queries, device=device)[:, None]
    key_1S = torch.arange(layout.documents_T.shape[0] + queries, device=device)[None]
    visible_QS = visibility(kind, layout)(query_Q1, query_Q1, query_Q1, key_1S)
    padding_Q = ~layout.keep_A.repeat_interleave(layout.block_size)
    return DenseMask(visible_QS | padding_Q[:, None], padding_Q)


def _flex_mask(kind: LayerKind, layout: BlockLayout) -> BlockMask:
    device = layout.anchors_A.device
    queries = layout.anchors_A.shape[0] * layout.block_size
    create = _compiled_create_block_mask() if device.type == "cuda" else create_block_mask
    keys = layout.documents_T.shape[0] + queries
    return create(visibility(kind, layout), None, None, queries, keys, device=device)


@functools.cache
def _compiled_create_block_mask() -> Callable[..., BlockMask]:
    """Compiled, so that the Q x S mask never exists in memory."""
    return torch.compile(create_block_mask, dynamic=False)
