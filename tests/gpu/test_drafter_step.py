"""The drafter's step on CUDA: as exact as plain bf16, without a wait or a compilation once it is warm."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_dist.config import TrainConfig
from dflash_dist.data.store import Documents
from dflash_dist.drafter import fused, head, head_reference, linear, model
from dflash_dist.drafter.anchors import Blocks, draw_blocks
from dflash_dist.drafter.config import DrafterConfig
from dflash_dist.drafter.loss import Objective, backward_in_groups, sums_in_groups
from dflash_dist.drafter.model import DFlashDrafter
from dflash_dist.target.load import TargetEnds
from dflash_dist.target.packing import token_offsets
from dflash_dist.train.optimizer import Optimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: run `make test-gpu` on a GPU machine"),
]
HIDDEN, VOCABULARY, TOKENS, ANCHORS = 256, 1000, 1024, 96
SHAPE = DrafterConfig(
    hidden_size=HIDDEN, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    intermediate_size=512, rms_norm_eps=1e-6, vocab_size=VOCABULARY, max_position_embeddings=4096, rope_theta=1e4,
    initializer_range=0.02, block_size=8, target_layer_ids=(1, 3), num_target_layers=6, mask_token_id=VOCABULARY - 1,
    layer_types=("sliding_attention", "full_attention", "full_attention"), sliding_window=100, is_causal=None,
)  # fmt: skip
OBJECTIVES = [Objective(), Objective("tokens", "dpace"), Objective("kl")]


def drawn(lengths_N: np.ndarray, seed: int = 0, pad_to: int = ANCHORS) -> tuple[Tensor, Blocks]:
    """Positions, padded to TOKENS, and blocks, at most ANCHORS, of documents of these lengths."""
    rng, tokens = np.random.default_rng(seed), int(lengths_N.sum())
    keys = rng.integers(0, 2**63, len(lengths_N)).astype(np.uint64)
    pack = Documents(rng.integers(0, VOCABULARY, tokens), rng.random(tokens) < 0.9, lengths_N, keys)
    blocks = draw_blocks(
        pack, block_size=8, mask_token_id=VOCABULARY - 1, anchors_per_document=40, max_anchors=ANCHORS, gamma=4.0,
        seed=0, epoch=0, pad_to=pad_to,
    )  # fmt: skip
    return torch.from_numpy(np.pad(token_offsets(lengths_N), (0, TOKENS - tokens))), blocks


def ends_of(device: str, dtype: torch.dtype) -> TargetEnds:
    generator = torch.Generator().manual_seed(3)
    table, head_VH = (torch.randn(VOCABULARY, HIDDEN, generator=generator).bfloat16() for _ in range(2))
    embedding = nn.Embedding.from_pretrained(table.to(device, dtype))
    return TargetEnds(embedding, 0.1 * head_VH.to(device, dtype), None)


def autograds_product(first: nn.Linear, x: Tensor, norm: nn.Module | None = None, *others: nn.Linear) -> Any:
    if norm is None:
        return F.linear(x, first.weight)
    return [x, *(F.linear(norm(x), product.weight) for product in (first, *others))]


@contextlib.contextmanager
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Autograd and autocast alone: no kernel and no compiler."""
    with monkeypatch.context() as patch:
        patch.setattr(linear.Linear, "forward", autograds_product)
        patch.setattr(model, "gated_product", lambda gate, up, down: down(F.silu(gate) * up))
        for name in ("rms_norm", "norm_rotate"):
            patch.setattr(fused, name, getattr(fused, name).__wrapped__)
        patch.setattr(fused, "_has_kernel", lambda x: False)
        patch.setattr(head, "_operations", lambda hidden: head_reference)
        yield


def gradient_of(drafter: DFlashDrafter, objective: Objective, group: int, device: str, dtype: torch.dtype) -> Tensor:
    """The loss and the whole gradient, float64."""
    positions_T, blocks = drawn(np.array([300, 70, 400, 100]))
    generator = torch.Generator().manual_seed(4)
    features_TF, last_TH = (
        torch.randn(TOKENS, width, generator=generator).bfloat16().to(device, dtype) for width in (2 * HIDDEN, HIDDEN)
    )
    for parameter in drafter.parameters():
        parameter.grad = torch.zeros_like(parameter)
    sums = backward_in_groups(
        drafter, ends_of(device, dtype), features_TF, positions_T.to(device), blocks.to(device), group, 20, objective,
        last_TH, forward=lambda: torch.autocast(device, dtype, enabled=dtype == torch.bfloat16),
    )  # fmt: skip
    gradients = [p.grad.flatten() for p in drafter.parameters() if p.grad is not None]
    return torch.cat([sums[:1], *gradients]).double().cpu()


@pytest.mark.parametrize("objective", OBJECTIVES, ids=["decay", "dpace", "kl"])
@pytest.mark.parametrize("group", [ANCHORS, 32])
def test_gradients_are_as_near_to_float64_as_those_of_plain_bf16(
    objective: Objective, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = DFlashDrafter(SHAPE)
    drafter.init_weights(0)
    exact = gradient_of(copy.deepcopy(drafter).double(), objective, group, "cpu", torch.float64)
    drafter.cuda()
    with plain(monkeypatch):
        theirs = gradient_of(drafter, objective, group, "cuda", torch.bfloat16)
    drafter.attention = "flex"
    ours = gradient_of(drafter, objective, group, "cuda", torch.bfloat16)
    error, their_error = (float((x[1:] - exact[1:]).norm() / exact[1:].norm()) for x in (ours, theirs))
    print(f"{objective.kind} {group}: relative error {error:.2e}, of plain bf16 {their_error:.2e}")
    assert error <= 1.01 * their_error < 0.05
    assert abs(ours[0] - exact[0]) <= 2e-3 * exact[0]


@pytest.mark.parametrize("group", [ANCHORS, 32])
def test_layers_that_are_run_again_give_the_same_gradient(group: int) -> None:
    drafter = DFlashDrafter(SHAPE, attention="flex")
    drafter.init_weights(0)
    drafter.cuda()
    kept, repeated = (gradient_of(drafter, Objective(), group, "cuda", torch.bfloat16) for _ in range(2))
    drafter.activation_checkpointing = True
    again = gradient_of(drafter, Objective(), group, "cuda", torch.bfloat16)
    chance = float((repeated - kept).norm() / kept.norm())  # attention adds in no fixed order
    print(f"{group}: repeated {chance:.1e}, run again {float((again - kept).norm() / kept.norm()):.1e}")
    assert chance < 1e-3
    assert (again - kept).norm() <= max(1e-5, 3 * chance) * kept.norm()


def test_steps_of_changing_lengths_wait_for_nothing_and_compile_nothing() -> None:
    """Training and validation, of batches with one, two and three groups of anchors, and of fillers."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    drafter = DFlashDrafter(SHAPE, attention="flex")
    drafter.init_weights(0)
    drafter.cuda()
    optimizer, ends = Optimizer(drafter, TrainConfig(), 1000, None), ends_of("cuda", torch.bfloat16)
    features_TF = torch.randn(TOKENS, 2 * HIDDEN, device="cuda", dtype=torch.bfloat16)
    rng = np.random.default_rng(0)
    mixes = [np.array([TOKENS]), np.array([3, 2, 70]), np.array([20, 3])]
    mixes += [np.diff(np.unique(rng.integers(0, TOKENS, 6)), prepend=0, append=TOKENS) for _ in range(197)]
    batches: list[tuple[Any, Any]] = [
        (positions_T.pin_memory(), blocks)
        for positions_T, blocks in (drawn(lengths_N[lengths_N > 0], seed, 32) for seed, lengths_N in enumerate(mixes))
    ]
    assert {len(blocks.anchors_A) for _, blocks in batches} >= {32, 64, 96}
    filler_positions_T, filler = drawn(np.array([1]), pad_to=8)
    batches.insert(3, (filler_positions_T[:128].pin_memory(), filler))

    def step(number: int) -> None:
        positions_T, blocks = batches[number]
        inputs = features_TF[: len(positions_T)], positions_T.to("cuda", non_blocking=True), blocks.to("cuda")
        optimizer.zero_grad()
        sums = backward_in_groups(
            drafter, ends, *inputs, 32, 20, forward=lambda: torch.autocast("cuda", torch.bfloat16)
        )
        optimizer.step(number + 1, sums[None], sums[1])
        with torch.autocast("cuda", torch.bfloat16):
            sums_in_groups(drafter, ends, *inputs, 32, 20)

    step(0)
    step(3)
    torch.cuda.synchronize()
    graphs = counters["stats"]["unique_graphs"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(1, 11):
            step(number)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for number in range(11, len(batches)):
        step(number)
    assert counters["stats"]["unique_graphs"] == graphs > 0
    assert all(parameter.isfinite().all() for parameter in drafter.parameters())
    products = [module for module in drafter.modules() if isinstance(module, linear.Linear)]
    for product in products:
        assert product.cast is not None and torch.equal(product.cast, product.weight.bfloat16())
