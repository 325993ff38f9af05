"""The wire format on CUDA: one Triton kernel each way, equal to `wire.py` byte for byte.

e4m3 is made with integers, not with the GPU's own conversion, which only sm_89 and later have. Offsets are int64, as a
slot can hold more than 2^31 values. No kernel is told the number of tokens, so that a new one compiles nothing.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_dist.wire import LEAST_MAGNITUDE, PER_GREATEST, WireFormat

TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
# Without contraction of multiply and add, which would round once where the definition rounds twice.
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}


def pack(wire: WireFormat, states: Sequence[Tensor], source_G: Tensor, destination_G: Tensor, slot_TW: Tensor) -> None:
    """See WireFormat.pack; the states are [R, H] and of the wire's dtype."""
    assert source_G.is_contiguous() and destination_G.is_contiguous() and slot_TW.is_contiguous()
    states = [_aligned(state_RH) for state_RH in states]
    addresses = torch.tensor([state_RH.data_ptr() for state_RH in states], dtype=torch.int64, pin_memory=True)
    _pack_kernel[len(source_G), wire.states](
        addresses.to(slot_TW.device, non_blocking=True),
        source_G,
        destination_G,
        slot_TW,
        slot_TW.view(torch.float32) if wire.kind == "fp8" else slot_TW,
        DTYPE=TRITON_DTYPES[wire.dtype],
        FP8=wire.kind == "fp8",
        **_constants(wire),
    )


def unpack(wire: WireFormat, slot_TW: Tensor, out_TF: Tensor) -> None:
    """See WireFormat.unpack."""
    assert slot_TW.is_contiguous() and out_TF.is_contiguous() and len(slot_TW) == len(out_TF)
    grid = len(slot_TW), wire.states
    _unpack_kernel[grid](slot_TW, slot_TW.view(torch.float32), out_TF, F=wire.features, **_constants(wire))


def _aligned(state_RH: Tensor) -> Tensor:
    """The state itself, unless a row cannot be found from its address alone or reads of 16 bytes would go wrong."""
    if state_RH.is_contiguous() and state_RH.data_ptr() % 16 == 0:
        return state_RH
    return state_RH.clone(memory_format=torch.contiguous_format)


def _constants(wire: WireFormat) -> dict[str, int | bool]:
    return {
        "H": wire.hidden,
        "W": wire.row_size,
        "FIRST_SCALE": wire.first_scale,
        "BLOCK": triton.next_power_of_2(wire.hidden),
        **OPTIONS,
    }


_LEAST_MAGNITUDE = tl.constexpr(LEAST_MAGNITUDE)
_PER_GREATEST = tl.constexpr(PER_GREATEST)


@triton.jit
def _pack_kernel(
    addresses,
    source,
    destination,
    slot,
    scales,
    DTYPE: tl.constexpr,
    FP8: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    FIRST_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each token and state. `scales`: the slot as fp32, where the format is fp8."""
    token, state = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < H
    # Wider reads need to know that the address is a multiple of 16, as `_aligned` has seen to.
    start = tl.multiple_of(tl.load(addresses + state).to(tl.pointer_type(DTYPE)), 16)
    values = tl.load(start + tl.load(source + token) * H + columns, mask=inside, other=0.0)
    row = tl.load(destination + token)
    if FP8:
        values = values.to(tl.float32)
        # As integers magnitudes have the same order, with NaN as the greatest.
        greatest = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0).to(tl.float32, bitcast=True)
        scale = tl.where(greatest < _LEAST_MAGNITUDE, _LEAST_MAGNITUDE, greatest) * _PER_GREATEST
        tl.store(scales + row * (W // 4) + FIRST_SCALE + state, scale)
        values = _e4m3_of(values * tl.div_rn(1.0, scale))
    tl.store(slot + row * W + state * H + columns, values, mask=inside)


@triton.jit
def _unpack_kernel(
    slot,
    scales,
    out,
    F: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    FIRST_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each token and state."""
    token, state = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < H
    codes = tl.load(slot + token * W + state * H + columns, mask=inside, other=0)
    values = _float_of(codes) * tl.load(scales + token * (W // 4) + FIRST_SCALE + state)
    tl.store(out + token * F + state * H + columns, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _e4m3_of(values):
    """uint8 codes of the nearest e4m3 numbers, ties to even. `values`: fp32 that round to 448 at most, in magnitude."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Drops 20 of fp32's 23 bits of mantissa; the exponents' biases differ by 120.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes are multiples of 2^-9, the last bit of 2^14 in fp32.
    small = (tl.abs(values) + 16384.0).to(tl.int32, bitcast=True) & 0xF
    return (tl.where(magnitude < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _float_of(codes):
    """fp32 values of e4m3 codes, which are not NaN."""
    codes = codes.to(tl.int32)
    magnitude = codes & 0x7F
    normal = ((magnitude + (120 << 3)) << 20).to(tl.float32, bitcast=True)
    values = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    return (values.to(tl.int32, bitcast=True) | ((codes & 0x80) << 24)).to(tl.float32, bitcast=True)
