"""A drafter rank's batches: token ids, masks and anchors from the store, ready on the device.

Shape suffixes: T tokens of the pack (padded), N documents, A anchors (padded), B block size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_dist.config import Config
from dflash_dist.data.schedule import Work
from dflash_dist.data.store import Documents, TokenStore
from dflash_dist.drafter.anchors import Blocks, BlockTensors, default_gamma, document_hashes, draw_blocks
from dflash_dist.drafter.config import DrafterConfig
from dflash_dist.target.packing import token_offsets
from dflash_profiling.record import span

ANCHOR_MULTIPLE = 8
"""On the CPU the anchors are padded to a multiple of this; on CUDA to whole groups, so that shapes are fixed."""

NOISE_SEED = 1 << 32
"""Sets the noise's hashes apart from the anchors'."""

FILLER = Documents(np.zeros(1, np.int64), np.zeros(1, bool), np.ones(1, np.int64), np.zeros(1, np.uint64))
"""What a drafter runs for a filler: one token that no anchor can stand on."""
FILLER_TOKENS = 128
"""On CUDA a filler is padded to this: a second shape, which costs next to nothing to run."""


def anchors_per_group(config: Config) -> int:
    """Anchors that one backward pass takes.

    Of a sharded drafter those of a whole batch: its ranks must all run the same number of passes.
    """
    most = config.objective.max_anchors_per_batch
    return most if config.train.shard == "fsdp" else min(most, config.train.anchors_per_backward)


@dataclass(frozen=True)
class DrafterBatch:
    """What a drafter needs of a batch beside the hidden states."""

    tokens_T: Tensor
    """int64 ids of the real tokens, on the host: for a rank that is target too."""
    lengths_N: np.ndarray
    positions_T: Tensor
    """int64 position of each token in its document; 0 in the padding."""
    blocks: Blocks
    noise_seeds: list[int]
    """What each document's noise is drawn from."""

    def to(self, device: torch.device) -> tuple[Tensor, BlockTensors]:
        """(positions_T, blocks) on `device`; copies from pinned memory do not hold up the host."""
        return self.positions_T.to(device, non_blocking=True), self.blocks.to(device)


class BatchLoader:
    """Makes drafter batches on the host; called on the prefetch thread."""

    def __init__(self, store: TokenStore, config: Config, drafter: DrafterConfig, device: torch.device) -> None:
        self._store, self._config, self._drafter = store, config, drafter
        self._pin = device.type == "cuda"
        objective = config.objective
        self._gamma = objective.gamma if objective.gamma is not None else default_gamma(drafter.block_size)
        self._anchor_multiple = anchors_per_group(config) if self._pin else ANCHOR_MULTIPLE

    def load(self, work: Work) -> DrafterBatch:
        """The batch of `work`, on the host."""
        documents = FILLER if work.is_filler else self._store.read(work.documents)
        with span("anchors"):
            blocks = draw_blocks(
                documents,
                block_size=self._drafter.block_size,
                mask_token_id=self._drafter.mask_token_id,
                anchors_per_document=self._config.objective.anchors_per_document,
                max_anchors=self._config.objective.max_anchors_per_batch,
                gamma=self._gamma,
                seed=self._config.train.seed,
                epoch=work.epoch,
                pad_to=ANCHOR_MULTIPLE if work.is_filler else self._anchor_multiple,
            )
        padded = FILLER_TOKENS if work.is_filler else self._config.schedule.token_budget
        padding = padded - len(documents.tokens_T) if self._pin else 0
        lengths_N = documents.lengths_N
        return DrafterBatch(
            torch.from_numpy(documents.tokens_T),
            lengths_N,
            self._tensor(np.pad(token_offsets(lengths_N), (0, padding))),
            blocks,
            document_hashes(documents, NOISE_SEED ^ self._config.train.seed, work.epoch).view(np.int64).tolist(),
        )

    def _tensor(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self._pin else tensor
