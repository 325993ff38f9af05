"""Three short documents with answers in them, and anchors, for the comparisons with other trainers.

Shape suffixes: N documents, T tokens of the pack, A blocks.
"""

from __future__ import annotations

import numpy as np
import torch

from dflash_dist.data.store import Documents
from dflash_dist.drafter.anchors import Blocks, blocks_at
from tests.random_models import MASK, VOCAB

BLOCK_SIZE, GAMMA = 8, 3.0
LENGTHS = [40, 23, 31]
ANSWERS = [[(12, 36)], [(5, 23)], [(9, 28)]]
"""Supervised tokens of each document; a block that leaves one ends before the next document's."""
ANCHORS = [[12, 14, 20, 30, 34], [5, 6, 15, 21], [9, 10, 22]]
"""Near the start and the end of each answer, and between."""
POSITIONS_T = torch.cat([torch.arange(length) for length in LENGTHS])
DOCUMENTS_T = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))


def answer_pack(answers: list[list[tuple[int, int]]] = ANSWERS) -> Documents:
    """The pack, with random tokens, where only `answers` are supervised: spans [start, end) of each document."""
    supervised = [np.zeros(length, bool) for length in LENGTHS]
    for row, spans in zip(supervised, answers, strict=True):
        for start, end in spans:
            row[start:end] = True
    tokens_T = np.random.default_rng(3).integers(0, VOCAB - 1, sum(LENGTHS))
    keys_N = np.arange(len(LENGTHS), dtype=np.uint64)
    return Documents(tokens_T, np.concatenate(supervised), np.array(LENGTHS), keys_N)


def answer_blocks(pack: Documents) -> Blocks:
    """The blocks at `ANCHORS`, and four of padding."""
    starts_N = np.cumsum(LENGTHS) - LENGTHS
    anchors_A = np.concatenate([start + np.array(places) for start, places in zip(starts_N, ANCHORS, strict=True)])
    return blocks_at(pack, anchors_A, block_size=BLOCK_SIZE, mask_token_id=MASK, gamma=GAMMA, pad_to=16)
