"""Tiny random targets, drafters and documents in memory, that the drafter's tests share."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from dflash_dist.config import DrafterSettings
from dflash_dist.data.store import Documents
from dflash_dist.drafter.config import DrafterConfig, resolve
from dflash_dist.drafter.model import DFlashDrafter
from dflash_dist.target import load
from dflash_dist.target.load import TargetEnds

VOCAB = 100
MASK = 99

_DENSE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def llama_config(**changes: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**{**_DENSE, **changes})


def qwen3_config(**changes: Any) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**{**_DENSE, "head_dim": 16, "tie_word_embeddings": True, **changes})


def hybrid_config(**changes: Any) -> Any:
    """A Qwen3.5 with three recurrent layers to one of attention, every field explicit."""
    from transformers import Qwen3_5TextConfig

    fields = {
        **_DENSE,
        "head_dim": 32,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        "attention_bias": False,
        "attention_dropout": 0.0,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    }
    return Qwen3_5TextConfig(**{**fields, **changes})


def random_target(config: Any, seed: int = 0) -> Any:
    """A target with fixed random weights, fp32, without stop tokens."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    return model.eval().requires_grad_(False)


def ends_of(target: Any) -> TargetEnds:
    return load.ends_of(target, "target")


def drafter_config(target_config: Any, **changes: Any) -> DrafterConfig:
    base = DrafterSettings(num_layers=2, block_size=4, target_layer_ids=(0, 2), mask_token_id=MASK)
    return resolve(dataclasses.replace(base, **changes), target_config, VOCAB)


def random_drafter(config: DrafterConfig, seed: int = 0, attention: Any = "dense") -> DFlashDrafter:
    """A drafter with random matrices and norms away from 1, as after training."""
    drafter = DFlashDrafter(config, attention)
    drafter.init_weights(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.empty(parameter.shape).uniform_(-0.3, 0.3, generator=generator))
    return drafter


def documents(lengths: list[int], seed: int = 0, supervised_share: float = 0.85) -> Documents:
    """Random documents with keys 1000, 1001, ...: each one's content depends on the seed and its number alone."""
    tokens, supervised = [], []
    for number, length in enumerate(lengths):
        random = np.random.default_rng([seed, number])
        tokens.append(random.integers(0, VOCAB - 1, length))
        supervised.append(random.random(length) < supervised_share)
    return Documents(
        tokens_T=np.concatenate(tokens).astype(np.int64),
        supervised_T=np.concatenate(supervised),
        lengths_N=np.array(lengths, np.int64),
        keys_N=np.arange(1000, 1000 + len(lengths)).astype(np.uint64),
    )


def reordered(pack: Documents, order: list[int]) -> Documents:
    """The same documents in another order, or fewer of them."""
    ends = np.cumsum(pack.lengths_N)
    places = np.concatenate([np.arange(ends[n] - pack.lengths_N[n], ends[n]) for n in order])
    return Documents(pack.tokens_T[places], pack.supervised_T[places], pack.lengths_N[order], pack.keys_N[order])
