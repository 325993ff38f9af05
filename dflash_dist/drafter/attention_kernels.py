"""The backward pass of the drafter's attention on CUDA, in Triton: five products for each tile of pairs.

Flex attention's own makes seven, since it computes the scores of a tile once for the keys and once for the queries.
Here a program owns a tile of keys and adds what it gives to the queries' gradient in memory, in fp32. The order of
those additions is not fixed, so neither are the last bits of the result.

Shape suffixes: Q queries, S keys, n query heads, m key-value heads, d head size, J tiles of keys, I tiles of queries.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_dist.drafter.mask import TILE, FlexMask

BLOCK_QUERIES, BLOCK_KEYS, WARPS, STAGES = 64, 128, 8, 2
LOG2_E = tl.constexpr(1.4426950408889634)


def attention_backward(
    query_Qnd: Tensor,
    key_Smd: Tensor,
    value_Smd: Tensor,
    log_sum_nQ: Tensor,
    inner_Qn: Tensor,
    gradient_Qnd: Tensor,
    mask: FlexMask,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values, in their type, bf16 or fp16.

    `log_sum_nQ`: fp32, the natural logarithm of each query's sum of exponentials. `inner_Qn`: fp32, each output's
    inner product with its gradient. Heads have a power of 2 of values, from 16 to 128.
    """
    queries, heads, size = query_Qnd.shape
    keys, key_heads, _ = key_Smd.shape
    query_gradient_Qnd = torch.zeros(query_Qnd.shape, dtype=torch.float32, device=query_Qnd.device)
    key_Smd, value_Smd = key_Smd.contiguous(), value_Smd.contiguous()  # the gradients are to be laid out alike
    key_gradient_Smd, value_gradient_Smd = torch.empty_like(key_Smd), torch.empty_like(value_Smd)
    blocks = mask.blocks
    _attention_backward_kernel[key_heads, triton.cdiv(keys, BLOCK_KEYS)](
        query_Qnd.contiguous(),
        key_Smd,
        value_Smd,
        gradient_Qnd.contiguous(),
        log_sum_nQ.contiguous(),
        inner_Qn,
        mask.spans_2Q,
        query_gradient_Qnd,
        key_gradient_Smd,
        value_gradient_Smd,
        blocks.full_q_num_blocks,
        blocks.full_q_indices,
        blocks.q_num_blocks,
        blocks.q_indices,
        queries,
        keys,
        -(-queries // TILE),
        1 / math.sqrt(size),
        KEY_HEADS=key_heads,
        GROUP=heads // key_heads,
        SIZE=size,
        BLOCK_M=BLOCK_QUERIES,
        BLOCK_N=BLOCK_KEYS,
        TILE=TILE,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return query_gradient_Qnd.to(query_Qnd.dtype), key_gradient_Smd, value_gradient_Smd


@triton.jit
def _within(key, span):
    """Whether the span, as in `FlexMask.spans_2Q`, holds the key."""
    begin, length = (span & 0xFFFFFFFF).to(tl.int32), (span >> 32).to(tl.int32)
    return (key >= begin) & (key - begin < length)


@triton.jit
def _add_tiles(
    key, value, key_gradient, value_gradient, query_ptr, gradient_ptr, log_sum_ptr, inner_ptr, spans_ptr,
    query_gradient_ptr, tiles_ptr, count, first_key, key_head, Q, scale,
    MASKED: tl.constexpr, KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Adds what `count` tiles of queries give, in every head that shares these keys."""
    PARTS: tl.constexpr = TILE // BLOCK_M
    offset_d = tl.arange(0, SIZE)
    for step in range(0, count * GROUP * PARTS):
        part = step % (GROUP * PARTS)
        head = key_head * GROUP + part // PARTS
        row_m = tl.load(tiles_ptr + step // (GROUP * PARTS)) * TILE + part % PARTS * BLOCK_M + tl.arange(0, BLOCK_M)
        place_md = (row_m[:, None] * (KEY_HEADS * GROUP) + head) * SIZE + offset_d[None, :]
        if MASKED:
            inside_m = row_m < Q
            query = tl.load(query_ptr + place_md, mask=inside_m[:, None], other=0.0)
            gradient = tl.load(gradient_ptr + place_md, mask=inside_m[:, None], other=0.0)
            log_sum_m = tl.load(log_sum_ptr + head * Q + row_m, mask=inside_m, other=0.0)
            inner_m = tl.load(inner_ptr + row_m * (KEY_HEADS * GROUP) + head, mask=inside_m, other=0.0)
        else:
            query = tl.load(query_ptr + place_md)
            gradient = tl.load(gradient_ptr + place_md)
            log_sum_m = tl.load(log_sum_ptr + head * Q + row_m)
            inner_m = tl.load(inner_ptr + row_m * (KEY_HEADS * GROUP) + head)
        score_nm = tl.dot(key, tl.trans(query))
        weight_nm = tl.exp2(score_nm * (scale * LOG2_E) - (log_sum_m * LOG2_E)[None, :])
        if MASKED:
            key_n1 = (first_key + tl.arange(0, BLOCK_N))[:, None]
            context_m = tl.load(spans_ptr + row_m, mask=inside_m, other=0)
            block_m = tl.load(spans_ptr + Q + row_m, mask=inside_m, other=0)
            in_context = _within(key_n1, context_m[None, :])
            in_block = _within(key_n1, block_m[None, :])
            weight_nm = tl.where(in_context | in_block, weight_nm, 0.0)
        value_gradient = tl.dot(weight_nm.to(gradient.dtype), gradient, value_gradient)
        score_gradient_nm = weight_nm * (tl.dot(value, tl.trans(gradient)) - inner_m[None, :])
        score_gradient_nm = score_gradient_nm.to(query.dtype)
        key_gradient = tl.dot(score_gradient_nm, query, key_gradient)
        query_gradient = scale * tl.dot(tl.trans(score_gradient_nm), key)
        if MASKED:
            tl.atomic_add(query_gradient_ptr + place_md, query_gradient, mask=inside_m[:, None], sem="relaxed")
        else:
            tl.atomic_add(query_gradient_ptr + place_md, query_gradient, sem="relaxed")
    return key_gradient, value_gradient


@triton.jit(do_not_specialize=["Q", "S", "QUERY_TILES"])
def _attention_backward_kernel(
    query_ptr, key_ptr, value_ptr, gradient_ptr, log_sum_ptr, inner_ptr, spans_ptr, query_gradient_ptr,
    key_gradient_ptr, value_gradient_ptr, full_counts_ptr, full_tiles_ptr, some_counts_ptr, some_tiles_ptr,
    Q, S, QUERY_TILES, scale,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    key_head, first_key = tl.program_id(0), tl.program_id(1) * BLOCK_N
    tile = first_key // TILE
    row_n = first_key + tl.arange(0, BLOCK_N)
    place_nd = (row_n[:, None] * KEY_HEADS + key_head) * SIZE + tl.arange(0, SIZE)[None, :]
    inside_n1 = row_n[:, None] < S
    key = tl.load(key_ptr + place_nd, mask=inside_n1, other=0.0)
    value = tl.load(value_ptr + place_nd, mask=inside_n1, other=0.0)
    key_gradient = tl.zeros([BLOCK_N, SIZE], dtype=tl.float32)
    value_gradient = tl.zeros([BLOCK_N, SIZE], dtype=tl.float32)
    key_gradient, value_gradient = _add_tiles(
        key, value, key_gradient, value_gradient, query_ptr, gradient_ptr, log_sum_ptr, inner_ptr, spans_ptr,
        query_gradient_ptr, full_tiles_ptr + tile * QUERY_TILES, tl.load(full_counts_ptr + tile), first_key,
        key_head, Q, scale, False, KEY_HEADS, GROUP, SIZE, BLOCK_M, BLOCK_N, TILE,
    )  # fmt: skip
    key_gradient, value_gradient = _add_tiles(
        key, value, key_gradient, value_gradient, query_ptr, gradient_ptr, log_sum_ptr, inner_ptr, spans_ptr,
        query_gradient_ptr, some_tiles_ptr + tile * QUERY_TILES, tl.load(some_counts_ptr + tile), first_key,
        key_head, Q, scale, True, KEY_HEADS, GROUP, SIZE, BLOCK_M, BLOCK_N, TILE,
    )  # fmt: skip
    tl.store(key_gradient_ptr + place_nd, (scale * key_gradient).to(key.dtype), mask=inside_n1)
    tl.store(value_gradient_ptr + place_nd, value_gradient.to(value.dtype), mask=inside_n1)
