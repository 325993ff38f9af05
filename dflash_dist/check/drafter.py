"""What the drafter's attention runs on this GPU: FlashAttention-4, where that is installed, is tried before it is used.

Shape suffixes: Q queries, S keys, n query heads, m key-value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dflash_dist.check.findings import Finding
from dflash_dist.check.installs import FLASH_ATTN_4, install_finding
from dflash_dist.check.kernels import try_kernels, verdict
from dflash_dist.check.trials import LENGTHS, Measured, Shapes, difference, median_us
from dflash_dist.drafter.attention import attend, flash_version, on_hopper
from dflash_dist.drafter.mask import BlockLayout, LayerKind, Mask, dense_mask, flex_mask

GAIN = "with it a drafter's step took 2 to 4 % less time on an H200"
HEADS, KEY_HEADS, HEAD_SIZE, BLOCK_SIZE, BLOCKS = 8, 2, 128, 16, 128


def drafter_findings(caches: Mapping[str, str]) -> list[Finding]:
    """On FlashAttention-4 and a trial of it, where drafter ranks can run it; `caches`: as for `try_kernels`."""
    if not on_hopper():
        return []
    if flash_version() is None:
        return [Finding(FLASH_ATTN_4.name, "ok", f"not installed; {GAIN}: {FLASH_ATTN_4.install}")]
    found = install_finding(FLASH_ATTN_4)
    if found.level == "error":
        return [found]
    outcomes = try_kernels(["drafter_attention"], Shapes(), None, caches)
    return [found, *(verdict(name, outcome) for name, outcome in outcomes.items())]


def drafter_attention(device: torch.device) -> Measured:
    """Output and gradients of the drafter's attention in bf16, against dense fp32, for full and sliding layers.

    The leak is what of the gradients falls on keys that no query sees.
    """
    generator = torch.Generator(device).manual_seed(0)
    layout = _layout(device)
    queries = BLOCKS * BLOCK_SIZE
    keys = layout.context + queries
    query_Qnd, key_Smd, value_Smd, gradient_Qnd = (
        torch.randn(*shape, HEAD_SIZE, device=device, generator=generator).bfloat16()
        for shape in ((queries, HEADS), (keys, KEY_HEADS), (keys, KEY_HEADS), (queries, HEADS))
    )
    errors, leaks = [], []
    for kind in (LayerKind(causal=False, window=None), LayerKind(causal=True, window=200)):
        fast, dense = flex_mask(kind, layout), dense_mask(kind, layout)
        seen_S = (dense.visible_QS & ~dense.padding_Q[:, None]).any(0)
        ours = _results(fast, query_Qnd, key_Smd, value_Smd, gradient_Qnd)
        expected = _results(dense, *(x.float() for x in (query_Qnd, key_Smd, value_Smd, gradient_Qnd)))
        errors += [difference(values, exact) for values, exact in zip(ours, expected, strict=True)]
        leaks += [float(values[~seen_S].float().norm() / values.float().norm()) for values in ours[2:]]

    def timed(mask: Mask, convert: Callable[[Tensor], Tensor]) -> float:
        inputs = [convert(x) for x in (query_Qnd, key_Smd, value_Smd, gradient_Qnd)]
        return median_us(lambda: _results(mask, *inputs), device)

    return Measured(max(errors), max(leaks), timed(fast, lambda x: x), timed(dense, Tensor.float), queries)


def _layout(device: torch.device) -> BlockLayout:
    """Blocks spread over documents of `LENGTHS`, some of them padding."""
    ends = torch.tensor(LENGTHS).cumsum(0)
    anchors_A = torch.linspace(1, sum(LENGTHS) - 1, BLOCKS).long()
    starts_A = (ends - torch.tensor(LENGTHS))[torch.searchsorted(ends, anchors_A, right=True)]
    keep_A = torch.arange(BLOCKS) % 10 != 9
    anchors_A, keep_A, starts_A = (x.to(device) for x in (anchors_A, keep_A, starts_A))
    return BlockLayout(BLOCK_SIZE, anchors_A, keep_A, starts_A, sum(LENGTHS))


def _results(mask: Mask, query: Tensor, key: Tensor, value: Tensor, gradient: Tensor) -> list[Tensor]:
    """The output, and the gradients of queries, keys and values."""
    query, key, value = (x.detach().requires_grad_() for x in (query, key, value))
    out = attend(query, key, value, mask)
    return [out.detach(), *torch.autograd.grad(out, (query, key, value), gradient)]
