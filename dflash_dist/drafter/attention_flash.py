"""The drafter's attention by FlashAttention-4, which takes the tiles of a mask and a function for those seen in part.

They are in CuTe, the language of NVIDIA's CUTLASS, and compiled when they first run, some 15 s in all.

Shape suffixes: Q queries, S keys, n query heads, m key-value heads, d head size.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import math
from typing import Any

import cutlass  # type: ignore[import-not-found]
from cutlass import cute
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch  # type: ignore[import-not-found]
from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd  # type: ignore[import-not-found]
from flash_attn.cute.utils import scalar_to_ssa  # type: ignore[import-not-found]
from torch import Tensor

from dflash_dist.drafter.mask import TILE, FlexMask


def attention(query_Qnd: Tensor, key_Smd: Tensor, value_Smd: Tensor, mask: FlexMask) -> tuple[Tensor, Tensor]:
    """The output, and the logarithm of each query's sum of exponentials, fp32 [n, Q]."""
    blocks = mask.blocks
    tiles = blocks.kv_num_blocks, blocks.kv_indices, blocks.full_kv_num_blocks, blocks.full_kv_indices
    inputs = (x[None] for x in (query_Qnd, key_Smd, value_Smd))
    out, log_sum, *_ = _flash_attn_fwd(*inputs, pack_gqa=False, return_lse=True, **_masked(query_Qnd, mask, tiles))
    return out[0], log_sum[0]


def attention_backward(
    query_Qnd: Tensor,
    key_Smd: Tensor,
    value_Smd: Tensor,
    out_Qnd: Tensor,
    log_sum_nQ: Tensor,
    gradient_Qnd: Tensor,
    mask: FlexMask,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values, in their type."""
    blocks = mask.blocks
    tiles = blocks.q_num_blocks, blocks.q_indices, blocks.full_q_num_blocks, blocks.full_q_indices
    inputs = (x[None] for x in (query_Qnd, key_Smd, value_Smd, out_Qnd, gradient_Qnd, log_sum_nQ))
    query, key, value = _flash_attn_bwd(*inputs, **_masked(query_Qnd, mask, tiles))
    return query[0], key[0], value[0]


def _masked(query_Qnd: Tensor, mask: FlexMask, tiles: tuple[Any, ...]) -> dict[str, Any]:
    return {
        "softmax_scale": 1 / math.sqrt(query_Qnd.shape[-1]),
        "mask_mod": _sees,
        "aux_tensors": [mask.spans_2Q],
        "block_sparse_tensors": BlockSparseTensorsTorch(*tiles, block_size=(TILE, TILE)),
    }


@cute.jit
def _sees(batch, head, query, key, lengths, aux_tensors):
    spans_2Q, row = aux_tensors[0], query[0]
    seen = _within(key[0], spans_2Q[0, row]) | _within(key[0], spans_2Q[1, row])
    return scalar_to_ssa(seen, cutlass.Boolean)


@cute.jit
def _within(key, span):
    begin, length = cutlass.Int32(span & 0xFFFFFFFF), cutlass.Uint32(span >> 32)
    return cutlass.Uint32(key - begin) < length
