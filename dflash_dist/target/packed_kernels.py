"""What lies around a target's delta rule, in Triton: each kernel reads and writes its tokens once.

Compilers make two or three passes of it, and fla's own convolution is tuned at the first length it meets. Offsets are
int64, as a batch can hold more than 2^31 values. No kernel is specialised for the number of tokens, so that a new one
compiles nothing.

Shape suffixes: B rows, T tokens, H heads, D values of a head, X channels, W taps of the convolution, N all heads of all
tokens.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS, CHANNELS, HEADS = 32, 128, 16
"""Of one program: tokens and channels of the convolution, heads elsewhere. Measured best on an H200."""


def convolution(hidden_BTX: Tensor, weight_XW: Tensor, positions_1T: Tensor | None) -> Tensor:
    """The causal convolution [B, T, X] of each channel over W tokens of its document, in fp32, then SiLU.

    `positions_1T`: int64 [1, T], each token's position in its document, with B = 1; None where each row is a document.
    """
    hidden_BTX, weight_XW = hidden_BTX.contiguous(), weight_XW.contiguous()
    rows, length, channels = hidden_BTX.shape
    out_BTX = torch.empty_like(hidden_BTX)
    programs = triton.cdiv(channels, CHANNELS) * triton.cdiv(rows * length, TOKENS)
    _convolution_kernel[(programs,)](
        hidden_BTX,
        out_BTX,
        weight_XW,
        hidden_BTX if positions_1T is None else positions_1T,
        rows * length,
        length,
        PACKED=positions_1T is not None,
        X=channels,
        W=weight_XW.shape[1],
        TOKENS=TOKENS,
        CHANNELS=CHANNELS,
    )
    return out_BTX


def heads_apart(values_BTHD: Tensor, normalise: bool) -> Tensor:
    """See mixers.heads_apart."""
    rows, length, heads, size = values_BTHD.shape
    evenly = rows == 1 or values_BTHD.stride(0) == length * values_BTHD.stride(1)
    if values_BTHD.stride(3) != 1 or not evenly:
        values_BTHD = values_BTHD.contiguous()
    out_BTHD = torch.empty(values_BTHD.shape, dtype=values_BTHD.dtype, device=values_BTHD.device)
    count = rows * length * heads
    _heads_kernel[(triton.cdiv(count, HEADS),)](
        values_BTHD,
        out_BTHD,
        values_BTHD.stride(1),
        values_BTHD.stride(2),
        count,
        NORMALISE=normalise,
        H=heads,
        D=size,
        HEADS=HEADS,
        BLOCK=triton.next_power_of_2(size),
    )
    return out_BTHD


def gated_norm(values_ND: Tensor, gate_ND: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """See mixers.gated_norm. Rounds where the models' own code does: behind the norm, and behind the weight."""
    values_ND, gate_ND = values_ND.contiguous(), gate_ND.contiguous()
    count, size = values_ND.shape
    out_ND = torch.empty_like(values_ND)
    _gated_norm_kernel[(triton.cdiv(count, HEADS),)](
        values_ND,
        gate_ND,
        out_ND,
        weight_D,
        epsilon,
        count,
        D=size,
        HEADS=HEADS,
        BLOCK=triton.next_power_of_2(size),
    )
    return out_ND


@triton.jit(do_not_specialize=["tokens", "length"])
def _convolution_kernel(
    hidden,
    out,
    weight,
    positions,
    tokens,
    length,
    PACKED: tl.constexpr,
    X: tl.constexpr,
    W: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """One program for each block of tokens and channels. `length`: of a row, where documents are not packed."""
    beside: tl.constexpr = (X + CHANNELS - 1) // CHANNELS
    channel = tl.program_id(0) % beside * CHANNELS + tl.arange(0, CHANNELS)
    token = (tl.program_id(0) // beside).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = (token < tokens)[:, None] & (channel < X)[None, :]
    position = tl.load(positions + token, mask=token < tokens, other=0) if PACKED else token % length
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for before in tl.static_range(W):
        here = inside & (position >= before)[:, None]
        values = tl.load(hidden + (token - before)[:, None] * X + channel[None, :], mask=here, other=0.0)
        factor = tl.load(weight + channel * W + (W - 1 - before), mask=channel < X, other=0.0)
        total += values.to(tl.float32) * factor.to(tl.float32)[None, :]
    values = (total * tl.sigmoid(total)).to(out.dtype.element_ty)
    tl.store(out + token[:, None] * X + channel[None, :], values, mask=inside)


@triton.jit(do_not_specialize=["count"])
def _heads_kernel(
    values,
    out,
    token_stride,
    head_stride,
    count,
    NORMALISE: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for some heads, of any tokens."""
    head = tl.program_id(0).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    place = tl.arange(0, BLOCK)
    inside = (head < count)[:, None] & (place < D)[None, :]
    start = head // H * token_stride + head % H * head_stride
    heads = tl.load(values + start[:, None] + place[None, :], mask=inside, other=0.0)
    if NORMALISE:
        exact = heads.to(tl.float32)
        heads = exact * tl.rsqrt(tl.sum(exact * exact, 1) + 1e-6)[:, None]
    tl.store(out + head[:, None] * D + place[None, :], heads.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _gated_norm_kernel(
    values,
    gate,
    out,
    weight,
    epsilon,
    count,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for some heads."""
    head = tl.program_id(0).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    place = tl.arange(0, BLOCK)
    inside = (head < count)[:, None] & (place < D)[None, :]
    offsets = head[:, None] * D + place[None, :]
    exact = tl.load(values + offsets, mask=inside, other=0.0).to(tl.float32)
    gates = tl.load(gate + offsets, mask=inside, other=0.0).to(tl.float32)
    normed = exact * tl.rsqrt(tl.sum(exact * exact, 1) / D + epsilon)[:, None]
    normed = normed.to(out.dtype.element_ty) * tl.load(weight + place, mask=place < D, other=0.0)[None, :]
    normed = normed.to(out.dtype.element_ty).to(tl.float32) * (gates * tl.sigmoid(gates))
    tl.store(out + offsets, normed.to(out.dtype.element_ty), mask=inside)
