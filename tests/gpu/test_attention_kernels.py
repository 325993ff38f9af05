"""The drafter's attention on CUDA, its own backward pass included, against a dense one in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dflash_dist.drafter import attention
from dflash_dist.drafter.attention import attend, flash_version
from dflash_dist.drafter.mask import BlockLayout, FlexMask, LayerKind, dense_mask, flex_mask

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: run `make test-gpu` on a GPU machine"),
]
DEVICE, HALF = "cuda", torch.bfloat16
LENGTHS, PADDING = [300, 1, 70, 400], 53
KINDS = [LayerKind(causal, window) for causal in (False, True) for window in (None, 40)]


def layout_of(block_size: int, blocks: int, seed: int) -> BlockLayout:
    """Anchors anywhere in documents of LENGTHS, a tenth of the blocks padding."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.tensor(LENGTHS).cumsum(0)
    anchors = torch.randint(0, int(ends[-1]), (blocks,), generator=generator).sort()[0]
    starts = (ends - torch.tensor(LENGTHS))[torch.searchsorted(ends, anchors, right=True)]
    keep = torch.rand(blocks, generator=generator) < 0.9
    return BlockLayout(block_size, anchors.to(DEVICE), keep.to(DEVICE), starts.to(DEVICE), int(ends[-1]) + PADDING)


def dense(query_Qnd: Tensor, key_Smd: Tensor, value_Smd: Tensor, kind: LayerKind, layout: BlockLayout) -> Tensor:
    """Attention by its definition, in the type of its arguments."""
    mask = dense_mask(kind, layout)
    group = query_Qnd.shape[1] // key_Smd.shape[1]
    key_Snd, value_Snd = (x.repeat_interleave(group, 1) for x in (key_Smd, value_Smd))
    score_nQS = torch.einsum("qnd,snd->nqs", query_Qnd, key_Snd) / math.sqrt(query_Qnd.shape[-1])
    weight_nQS = score_nQS.masked_fill(~mask.visible_QS, -math.inf).softmax(-1)
    return torch.einsum("nqs,snd->qnd", weight_nQS, value_Snd).masked_fill(mask.padding_Q[:, None, None], 0.0)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("flash_keys_per_query", [0, 1000] if flash_version() else [0])
@pytest.mark.parametrize(
    ("block_size", "blocks", "heads", "key_heads", "size"), [(16, 40, 8, 2, 128), (10, 33, 4, 4, 64), (8, 7, 6, 2, 16)]
)
def test_output_and_gradients_equal_the_definition(
    kind: LayerKind,
    flash_keys_per_query: int,
    block_size: int,
    blocks: int,
    heads: int,
    key_heads: int,
    size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By our own backward pass, and by FlashAttention-4's where that is installed."""
    monkeypatch.setattr(attention, "FLASH_KEYS_PER_QUERY", flash_keys_per_query)
    layout = layout_of(block_size, blocks, 1)
    queries = block_size * blocks
    torch.manual_seed(0)
    shapes = (queries, heads), (layout.context + queries, key_heads), (layout.context + queries, key_heads)
    inputs = [torch.randn(*shape, size, device=DEVICE).to(HALF).requires_grad_() for shape in shapes]
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    exact = dense(*exact_inputs, kind, layout)
    gradient_Qnd = torch.randn(exact.shape, device=DEVICE).to(HALF)
    exact.backward(gradient_Qnd.double())
    mask = flex_mask(kind, layout)
    assert isinstance(mask, FlexMask)
    out = attend(*inputs, mask)
    out.backward(gradient_Qnd)
    named = [("out", out, exact)]
    named += [(n, x.grad, e.grad) for n, x, e in zip(("q", "k", "v"), inputs, exact_inputs, strict=True)]
    for name, ours, theirs in named:
        assert ours is not None and theirs is not None
        assert (ours - theirs).norm() <= 6e-3 * theirs.norm(), (name, float((ours - theirs).norm() / theirs.norm()))
    seen_S = torch.zeros(len(inputs[1]), dtype=torch.bool, device=DEVICE)
    visible = dense_mask(kind, layout)
    seen_S |= (visible.visible_QS & ~visible.padding_Q[:, None]).any(0)
    for x in inputs[1:]:
        assert x.grad is not None and not x.grad[~seen_S].any()  # nothing leaks to what nobody sees


def test_arguments_laid_out_heads_first_give_the_same_gradients() -> None:
    kind, layout = KINDS[0], layout_of(8, 7, 1)
    torch.manual_seed(0)
    sizes = (4, 56), (2, layout.context + 56), (2, layout.context + 56)
    heads_first = [torch.randn(*size, 16, device=DEVICE).to(HALF).transpose(0, 1) for size in sizes]
    gradients = []
    for inputs in (heads_first, [x.contiguous() for x in heads_first]):
        leaves = [x.detach().requires_grad_() for x in inputs]
        attend(*leaves, flex_mask(kind, layout)).float().square().sum().backward()
        gradients.append([x.grad for x in leaves])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)
