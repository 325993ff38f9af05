"""A drafter that knows a few of the real target's own answers by heart, trained in process by the project's pieces."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_dist.config import DrafterSettings, TargetConfig, TrainConfig
from dflash_dist.data.chat import prompt_ids
from dflash_dist.data.store import Documents
from dflash_dist.drafter.anchors import draw_blocks
from dflash_dist.drafter.config import resolve
from dflash_dist.drafter.loss import block_sums
from dflash_dist.drafter.model import DFlashDrafter
from dflash_dist.evaluate.acceptance import stop_ids
from dflash_dist.evaluate.speculate import Generation, plain_decode
from dflash_dist.target.capture import TargetForward
from dflash_dist.target.load import TargetEnds, ends_of, load_full
from dflash_dist.train.optimizer import Optimizer

BLOCK_SIZE, NEW_TOKENS = 4, 41
"""The first token of an answer comes with the prefill, and ten blocks make the other forty."""
QUESTIONS = (
    "Write a poem about the sea.",
    "Explain how to boil an egg, step by step.",
    "What is 12 times 9? Explain.",
    "Write a Python function that returns the factorial of n.",
)
STEPS, ANCHORS_PER_DOCUMENT = 180, 6
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Overfitted:
    """The target, the drafter, and what the drafter was trained on."""

    target: Any
    ends: TargetEnds
    drafter: DFlashDrafter
    prompts: list[list[int]]
    answers: list[Generation]
    """The target's own greedy ones."""


def overfit(folder: Path, tokenizer: Any) -> Overfitted:
    """Trains a small drafter on the target's own greedy answers to the questions, in fp32 on the CPU."""
    settings = TargetConfig(model=str(folder), dtype="float32")
    target = load_full(folder, settings, CPU)
    ends = ends_of(target, folder)
    prompts = [prompt_ids(tokenizer, [{"role": "user", "content": question}], {}) for question in QUESTIONS]
    answers = [plain_decode(target, ids, NEW_TOKENS, stop_ids(target)) for ids in prompts]
    pack = as_documents(prompts, [answer.ids for answer in answers])

    shape = DrafterSettings(
        num_layers=2, block_size=BLOCK_SIZE, target_layer_ids=(1, 10, 19), mask_token_id=16, intermediate_size=576
    )
    drafter = DFlashDrafter(resolve(shape, target.config, len(tokenizer)))
    drafter.init_weights(seed=0)
    forward = TargetForward(folder, settings, drafter.config.target_layer_ids, CPU)
    features = torch.empty(len(pack.tokens_T), forward.features)
    forward.capture(torch.from_numpy(pack.tokens_T), pack.lengths_N, features)
    train(drafter, ends, pack, features)
    return Overfitted(target, ends, drafter, prompts, answers)


def as_documents(prompts: list[list[int]], answers: list[list[int]]) -> Documents:
    """A pack of prompts with their supervised answers."""
    pairs = list(zip(prompts, answers, strict=True))
    return Documents(
        tokens_T=np.array([token for prompt, answer in pairs for token in prompt + answer], np.int64),
        supervised_T=np.array([s for prompt, answer in pairs for s in [False] * len(prompt) + [True] * len(answer)]),
        lengths_N=np.array([len(prompt) + len(answer) for prompt, answer in pairs], np.int64),
        keys_N=np.arange(len(pairs), dtype=np.uint64),
    )


def train(drafter: DFlashDrafter, ends: TargetEnds, pack: Documents, features: torch.Tensor) -> None:
    """Steps on the whole pack, with other anchors in each."""
    optimizer = Optimizer(drafter, TrainConfig(learning_rate=3e-3), STEPS, group=None)
    positions = np.concatenate([np.arange(length) for length in pack.lengths_N])
    for step in range(1, STEPS + 1):
        blocks = draw_blocks(
            pack,
            block_size=BLOCK_SIZE,
            mask_token_id=drafter.config.mask_token_id,
            anchors_per_document=ANCHORS_PER_DOCUMENT,
            max_anchors=ANCHORS_PER_DOCUMENT * len(QUESTIONS),
            gamma=2.0,
            seed=0,
            epoch=step,
            pad_to=1,
        ).to(CPU)
        optimizer.zero_grad()
        sums = block_sums(drafter, ends, features, torch.from_numpy(positions), blocks, chunk=64)
        sums[0].backward()
        optimizer.step(step, sums.detach(), sums[1].detach())
