"""How much memory a run takes, before it starts and while it runs."""

from __future__ import annotations

import math
from typing import Any

import psutil
import torch

from dflash_dist.config import Config
from dflash_dist.drafter.config import DrafterConfig
from dflash_dist.drafter.loss import Objective
from dflash_dist.drafter.model import DFlashDrafter
from dflash_dist.errors import UserError
from dflash_dist.target.load import torch_dtype, weightless
from dflash_dist.topology import Topology
from dflash_dist.wire import WireFormat

GIB = 2**30
MASTER_BYTES = 16
"""fp32 weight, gradient and two moments of each drafter parameter."""
GATHERED_BYTES = 8
"""fp32 weight and gradient of each parameter that a rank of a sharded drafter holds whole for a while."""


def used_memory_gib(device: torch.device) -> float:
    """The peak of this rank's allocations on its GPU, or its resident memory on the CPU, in GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    return psutil.Process().memory_info().rss / GIB


def rank_memory(config: Config, topology: Topology, target_config: Any, drafter: DrafterConfig, device: str) -> dict:
    """Bytes that each role needs at the least, as {role: {part: bytes}}; activations are not counted."""
    dtype = torch_dtype(config.target.dtype, torch.device(device))
    hidden, vocab = drafter.hidden_size, drafter.vocab_size
    objective = Objective.of(config.objective)
    wire = WireFormat(config.schedule.wire, objective.captured_states(drafter), hidden, dtype)
    features = config.schedule.token_budget * wire.features * dtype.itemsize
    ring = config.schedule.ring_slots * config.schedule.token_budget * wire.bytes_per_token
    run_layers = drafter.num_target_layers if objective.needs_last_state else drafter.target_layer_ids[-1] + 1
    layers = _decoder_parameters(target_config, run_layers, config.target.trust_remote_code) * dtype.itemsize
    target = {"target layers": layers}
    shards = topology.num_drafters if config.train.shard == "fsdp" else 1
    compute = torch_dtype(config.train.dtype, torch.device(device))
    train = {
        **_drafter_memory(drafter, shards),
        "embedding and head": (1 if target_config.tie_word_embeddings else 2) * vocab * hidden * dtype.itemsize,
    }
    if device == "cuda" and shards == 1 and compute != torch.float32:
        train["drafter weights in train.dtype"] = drafter_parameters(drafter) * compute.itemsize  # see Linear.keep_cast
    if topology.shared:
        return {"target+drafter": {**target, **train, "features": features}}
    if wire.kind == "fp8":
        train["unpacked features"] = features
    return {
        "target": {**target, "ring to each drafter": ring * topology.drafters},
        "drafter": {**train, "ring from each target": ring * topology.targets},
    }


def check_memory(needs: dict[str, dict[str, float]], free_bytes: float, ranks_sharing: dict[str, int]) -> None:
    """UserError with the sum where a role, or all ranks of one machine's memory, cannot fit.

    `ranks_sharing`: how many ranks of each role share `free_bytes`.
    """
    total = sum(sum(parts.values()) * ranks_sharing[role] for role, parts in needs.items())
    if total <= free_bytes:
        return
    sums = "; ".join(
        f"{ranks_sharing[role]} x {role}: "
        + " + ".join(f"{part} {size / GIB:.1f}" for part, size in parts.items())
        + f" = {sum(parts.values()) / GIB:.1f} GiB"
        for role, parts in needs.items()
    )
    raise UserError(
        f"the run needs at least {total / GIB:.1f} GiB where {free_bytes / GIB:.1f} GiB are free ({sums}); "
        "take a smaller target, schedule.token_budget or schedule.ring_slots, or more memory"
    )


def drafter_parameters(drafter: DrafterConfig) -> int:
    """Trainable parameters of the drafter."""
    hidden, head = drafter.hidden_size, drafter.head_dim
    attention = hidden * head * (2 * drafter.num_attention_heads + 2 * drafter.num_key_value_heads) + 2 * head
    layer = attention + 3 * hidden * drafter.intermediate_size + 2 * hidden
    return drafter.num_hidden_layers * layer + len(drafter.target_layer_ids) * hidden**2 + 2 * hidden


def _drafter_memory(drafter: DrafterConfig, shards: int) -> dict[str, float]:
    """Bytes, by part, that the drafter's parameters take on a rank that keeps one of `shards` equal shares of them."""
    parameters = drafter_parameters(drafter)
    memory: dict[str, float] = {"drafter masters, gradients, moments": parameters * MASTER_BYTES / shards}
    if shards > 1:
        with torch.device("meta"):
            units = DFlashDrafter(drafter).modules_of_blocks()
        sizes = [sum(p.numel() for module in unit for p in module.parameters()) for unit in units]
        memory["gathered weights and gradients"] = (parameters - sum(sizes) + max(sizes)) * GATHERED_BYTES
    return memory


def _decoder_parameters(target_config: Any, layers: int, trust_remote_code: bool) -> int:
    """Parameters of the target's embedding and first layers, counted on the meta device."""
    model, _ = weightless(target_config, layers, trust_remote_code)
    return sum(math.prod(p.shape) for p in model.parameters())
