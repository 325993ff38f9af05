"""What the drafter's attention runs on this GPU: FlashAttention-4, where that is installed, is tried before it is used.

Shape suffixes: Q queries, S keys, n query heads, m key-value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from dflash_dist.check.findings import Finding
from dflash_dist.check.installs import FusedPackage, install_finding
from dflash_dist.check.kernels import try_kernels, verdict
from dflash_dist.check.target import TargetFacts
from dflash_dist.check.trials import LENGTHS, Measured, Shapes, difference, median_us
from dflash_dist.config import Config
from dflash_dist.drafter.attention import FLASH_HEAD_SIZES, attend, flash_install, flash_version, on_hopper
from dflash_dist.drafter.config import geometry
from dflash_dist.drafter.mask import BlockLayout, LayerKind, Mask, dense_mask, flex_mask

FLASH_ATTN_4 = FusedPackage(
    "flash-attn-4",
    "flash_attn.cute.interface",
    ("_flash_attn_fwd", "_flash_attn_bwd"),
    ("flash-attn-4",),
    "4.0",
    "the drafter's attention, which takes it where it is installed, cannot run",
    *3 * ("",),  # what mends it depends on the CUDA of torch: `flash_install`
)
GAIN = "with it a drafter's step took 2 to 4 % less time on an H200"
BLOCK_SIZE = 16
MANY_BLOCKS, FEW_BLOCKS = 192, 32
"""With few keys for each query, whose gradients are FlashAttention-4's own, and with many, whose are ours."""
KINDS = (LayerKind(causal=False, window=None), LayerKind(causal=True, window=200))


def drafter_findings(config: Config, facts: TargetFacts | None, caches: Mapping[str, str]) -> list[Finding]:
    """On FlashAttention-4 and a trial of it, where drafter ranks can run it; `caches`: as for `try_kernels`."""
    if not on_hopper() or config.train.attention == "dense" or facts is None:
        return []
    heads, key_heads, head_size = geometry(config.drafter, SimpleNamespace(**facts.text))
    if head_size not in FLASH_HEAD_SIZES or config.train.dtype == "float32":
        return []
    if flash_version() is None:
        return [Finding(FLASH_ATTN_4.name, "ok", f"not installed; {GAIN}: {flash_install()}")]
    found = install_finding(FLASH_ATTN_4)
    if found.level != "ok":
        return [replace(found, mend=f"{flash_install()}  # or: pip uninstall flash-attn-4")]
    # Kernels are made for a size of heads and a size of groups: two groups show as much as all.
    shapes = Shapes(num_attention_heads=2 * (heads // key_heads), num_key_value_heads=2, head_dim=head_size)
    outcomes = try_kernels(["drafter_attention"], shapes, None, caches)
    return [found, *(verdict(name, outcome) for name, outcome in outcomes.items())]


def drafter_attention(device: torch.device, shapes: Shapes) -> Measured:
    """Output and gradients of the drafter's attention in bf16, against dense fp32, for full and sliding layers.

    The leak is what of the gradients falls on keys that no query sees.
    """
    errors, leaks = [], []
    for blocks in (FEW_BLOCKS, MANY_BLOCKS):
        layout = _layout(blocks, device)
        inputs = _inputs(layout, shapes)
        wide = [x.float() for x in inputs]
        for kind in KINDS:
            fast, dense = flex_mask(kind, layout), dense_mask(kind, layout)
            seen_S = (dense.visible_QS & ~dense.padding_Q[:, None]).any(0)
            ours = _results(fast, *inputs)
            expected = _results(dense, *wide)
            errors += [difference(values, exact) for values, exact in zip(ours, expected, strict=True)]
            leaks += [float(values[~seen_S].float().norm() / values.float().norm()) for values in ours[2:]]
            fused_us = median_us(partial(_results, fast, *inputs), device)
            reference_us = median_us(partial(_results, dense, *wide), device)
    return Measured(max(errors), max(leaks), fused_us, reference_us, MANY_BLOCKS * BLOCK_SIZE)


def _inputs(layout: BlockLayout, shapes: Shapes) -> list[Tensor]:
    """Random queries, keys, values, and gradients of the output."""
    device = layout.anchors_A.device
    queries = len(layout.anchors_A) * BLOCK_SIZE
    keys = layout.context + queries
    heads, key_heads = shapes.num_attention_heads, shapes.num_key_value_heads
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(*shape, shapes.head_dim, device=device, generator=generator).bfloat16()
        for shape in ((queries, heads), (keys, key_heads), (keys, key_heads), (queries, heads))
    ]


def _layout(blocks: int, device: torch.device) -> BlockLayout:
    """Blocks spread over documents of `LENGTHS`, some of them padding."""
    ends = torch.tensor(LENGTHS).cumsum(0)
    anchors_A = torch.linspace(1, sum(LENGTHS) - 1, blocks).long()
    starts_A = (ends - torch.tensor(LENGTHS))[torch.searchsorted(ends, anchors_A, right=True)]
    keep_A = torch.arange(blocks) % 10 != 9
    anchors_A, keep_A, starts_A = (x.to(device) for x in (anchors_A, keep_A, starts_A))
    return BlockLayout(BLOCK_SIZE, anchors_A, keep_A, starts_A, sum(LENGTHS))


def _results(mask: Mask, query: Tensor, key: Tensor, value: Tensor, gradient: Tensor) -> list[Tensor]:
    """The output, and the gradients of queries, keys and values."""
    query, key, value = (x.detach().requires_grad_() for x in (query, key, value))
    out = attend(query, key, value, mask)
    return [out.detach(), *torch.autograd.grad(out, (query, key, value), gradient)]
