"""What a row of a ring slot holds: one token's captured states, as they are or in eight bits.

`full`: the states side by side, in the target's dtype. `fp8`: their e4m3 bytes side by side, then one fp32 scale for
each state, which maps the state's greatest magnitude to e4m3's; a row is a multiple of 16 bytes.

What is computed here on the CPU is the definition: the kernels on CUDA give the same bytes.

Shape suffixes: R rows of a target forward, padding among them, G its real tokens, T tokens of a message, M most tokens
of one, S captured states of a token, H values of a state, F = S * H features, W values of a slot's row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

PER_GREATEST = 1 / torch.finfo(torch.float8_e4m3fn).max
LEAST_MAGNITUDE = 2.0**-100
"""Taken for the greatest of a state whose values are all smaller: zeros need a scale that can be divided by."""


@dataclass(frozen=True)
class WireFormat:
    """How captured states cross the wire. Both ends of a channel make the same one."""

    kind: Literal["full", "fp8"]
    states: int
    """S"""
    hidden: int
    """H"""
    dtype: torch.dtype
    """Of the states on both sides."""

    @property
    def features(self) -> int:
        """F"""
        return self.states * self.hidden

    @property
    def slot_dtype(self) -> torch.dtype:
        """The dtype of a slot."""
        return self.dtype if self.kind == "full" else torch.uint8

    @property
    def row_size(self) -> int:
        """W: a slot's row in values of `slot_dtype`."""
        return self.features if self.kind == "full" else 16 * -(-(self.first_scale + self.states) // 4)

    @property
    def first_scale(self) -> int:
        """Where the scales of an fp8 row begin, in units of 4 bytes."""
        return -(-self.features // 4)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes on the wire and in a ring."""
        return self.row_size * self.slot_dtype.itemsize

    def pack(self, states: Sequence[Tensor], source_G: Tensor, destination_G: Tensor, slot_TW: Tensor) -> None:
        """Writes rows `source_G` of every state [R, H] to rows `destination_G` of `slot_TW`; on CUDA in one kernel.

        `states`: S tensors, [..., H] each, whose leading dimensions are taken as R. The indices are int64. In fp8 a
        state with a value that is not finite comes back with none that is.
        """
        assert len(states) == self.states and slot_TW.dtype == self.slot_dtype
        states = [state.reshape(-1, self.hidden).to(self.dtype) for state in states]
        if slot_TW.is_cuda:
            from dflash_dist.wire_kernels import pack

            pack(self, states, source_G, destination_G, slot_TW)
            return
        for number, state_RH in enumerate(states):
            state_GH = state_RH.index_select(0, source_G)
            if self.kind == "fp8":
                state_GH, scale_G = _quantised(state_GH)
                slot_TW.view(torch.float32)[:, self.first_scale + number].index_copy_(0, destination_G, scale_G)
            columns = slice(number * self.hidden, (number + 1) * self.hidden)
            slot_TW[:, columns].index_copy_(0, destination_G, state_GH)

    def unpack(self, slot_TW: Tensor, out_TF: Tensor) -> None:
        """Writes the states that fp8 rows hold into `out_TF`, of `dtype`; on CUDA in one kernel."""
        assert self.kind == "fp8" and slot_TW.dtype == torch.uint8 and out_TF.dtype == self.dtype
        if slot_TW.is_cuda:
            from dflash_dist.wire_kernels import unpack

            unpack(self, slot_TW, out_TF)
            return
        codes_TF = slot_TW[:, : self.features].view(torch.float8_e4m3fn)
        scales_TS = slot_TW.view(torch.float32)[:, self.first_scale : self.first_scale + self.states]
        out_TF.copy_((codes_TF.float().unflatten(1, (self.states, -1)) * scales_TS[:, :, None]).flatten(1))


class Unpacker:
    """Turns fp8 rows back into features, in a buffer of its own.

    To be made before messages wait on the device, as its kernel is compiled here.
    """

    def __init__(self, wire: WireFormat, max_tokens: int, device: torch.device) -> None:
        self._wire = wire
        self._features_MF = torch.zeros(max_tokens, wire.features, dtype=wire.dtype, device=device)
        self(torch.zeros(1, wire.row_size, dtype=wire.slot_dtype, device=device))

    def __call__(self, slot_TW: Tensor) -> Tensor:
        """The buffer [M, F] with the features of `slot_TW` in its first rows, valid until the next call."""
        self._wire.unpack(slot_TW, self._features_MF[: len(slot_TW)])
        return self._features_MF


def _quantised(state_GH: Tensor) -> tuple[Tensor, Tensor]:
    """The state's e4m3 bytes (uint8 [G, H]) and scales (fp32 [G])."""
    values_GH = state_GH.float()
    scale_G = values_GH.abs().amax(dim=1).clamp(min=LEAST_MAGNITUDE) * PER_GREATEST
    codes_GH = (values_GH * scale_G.reciprocal()[:, None]).to(torch.float8_e4m3fn)
    return codes_GH.view(torch.uint8), scale_G
