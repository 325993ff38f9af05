"""Where a drafter rank's hidden states come from: a target rank's channel, or a target on the rank itself.

Shape suffixes: M most tokens of a batch, T tokens of this one (padded where shapes are fixed), F captured features, W
values of a row of the wire format.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from dflash_dist.channel import ReceiveChannel, ring
from dflash_dist.data.schedule import Work
from dflash_dist.target.capture import TargetForward
from dflash_dist.train.batches import DrafterBatch
from dflash_dist.wire import Unpacker
from dflash_profiling.record import span


class FeatureSource(Protocol):
    """Gives a batch's features and takes the buffer back."""

    def receive(self, work: Work, batch: DrafterBatch) -> Tensor:
        """[T, F] features of the batch, valid until `release`; rows past the real tokens are zero."""
        ...

    def release(self, work: Work) -> None:
        """The features are not needed any more by work that is queued from here on."""
        ...


class ChannelSource:
    """Features from target ranks. Where they are unpacked first, the slot goes back as soon as that is queued."""

    def __init__(self, channels: dict[int, ReceiveChannel], unpacker: Unpacker | None) -> None:
        self.channels = channels
        """By target number."""
        self._unpacker = unpacker

    def receive(self, work: Work, batch: DrafterBatch) -> Tensor:
        """See FeatureSource."""
        channel = self.channels[work.target]
        with span(f"message of {work.place} from rank {channel.peer}"):
            received_MW = channel.receive()
        if self._unpacker is None:
            return _real_rows(received_MW, work, batch)
        with span("unpack"):
            features_MF = self._unpacker(received_MW[: work.tokens])
        channel.release()
        return _real_rows(features_MF, work, batch)

    def release(self, work: Work) -> None:
        """See FeatureSource."""
        if self._unpacker is None:
            self.channels[work.target].release()


class LocalSource:
    """Features from the target on this rank: they never leave it."""

    def __init__(self, forward: TargetForward, max_tokens: int, device: torch.device) -> None:
        self._forward = forward
        (self._buffer_MF,) = ring(1, max_tokens, forward.features, forward.dtype, device)

    def receive(self, work: Work, batch: DrafterBatch) -> Tensor:
        """See FeatureSource."""
        with span("forward"):
            self._forward.capture(batch.tokens_T, batch.lengths_N, self._buffer_MF[: work.tokens])
        return _real_rows(self._buffer_MF, work, batch)

    def release(self, work: Work) -> None:
        """See FeatureSource."""


class ZeroSource:
    """Features of zero, for warming up and for fillers."""

    def __init__(self, features: int, dtype: torch.dtype, device: torch.device) -> None:
        self._features, self._dtype, self._device = features, dtype, device

    def receive(self, work: Work, batch: DrafterBatch) -> Tensor:
        """See FeatureSource."""
        return torch.zeros(len(batch.positions_T), self._features, dtype=self._dtype, device=self._device)

    def release(self, work: Work) -> None:
        """See FeatureSource."""


class FilledSource:
    """Another source, but that a filler's features are zero instead of received."""

    def __init__(self, source: FeatureSource, zeros: ZeroSource) -> None:
        self._source, self._zeros = source, zeros

    def receive(self, work: Work, batch: DrafterBatch) -> Tensor:
        """See FeatureSource."""
        return (self._zeros if work.is_filler else self._source).receive(work, batch)

    def release(self, work: Work) -> None:
        """See FeatureSource."""
        if not work.is_filler:
            self._source.release(work)


def _real_rows(buffer_MF: Tensor, work: Work, batch: DrafterBatch) -> Tensor:
    padded = len(batch.positions_T)
    buffer_MF[work.tokens : padded].zero_()  # what an earlier batch left there could be non-finite
    return buffer_MF[:padded]
