"""Attention of block tokens over context and blocks: dense, or on CUDA by the fastest kernels that take it.

Forward these are FlashAttention-4's where it is installed, on Hopper, and flex attention's elsewhere; backward they
are either's or our own.

Shape suffixes: Q queries, S keys, n query heads, m key-value heads, d head size.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from dflash_dist.drafter.fused import compile_once, inner_product
from dflash_dist.drafter.mask import FlexMask, Mask
from dflash_dist.errors import UserError
from dflash_dist.installed import version_of

FLEX_OPTIONS: Any = {"BACKEND": "TRITON"}
"""Never the kernel for decoding, which torch takes below 128 queries and does not always have."""
FLEX_OPTIONS_OF_HOPPER: Any = FLEX_OPTIONS | {
    "fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 3, "bwd_BLOCK_M1": 64,
    "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64, "bwd_num_warps": 4, "bwd_num_stages": 2,
}  # fmt: skip
"""For heads of 128 on an H200: 10 % less time forward and 4 % less backward than by torch's own choice."""
HEAD_SIZES = (16, 32, 64, 128)
SHARED_MEMORY_BYTES = 200_000
"""Of our own backward pass: the sizes of heads that it takes, and the memory that it needs of a block."""
FLASH_HEAD_SIZES = (64, 128)
FLASH_KEYS_PER_QUERY = 3
"""FlashAttention-4 sums the gradients of keys in memory, for each query head; our own does not. So its backward pass is
the faster one where a query has few keys: on an H200 1.8 ms beside 2.7 with 1.5, but 4.1 beside 3.6 with 5."""


def attend(query_Qnd: Tensor, key_Smd: Tensor, value_Smd: Tensor, mask: Mask) -> Tensor:
    """[Q, n, d] attention; queries that see nothing get zeros. Each group of n / m query heads shares keys."""
    if isinstance(mask, FlexMask):
        if not torch.is_grad_enabled():
            return _forward(query_Qnd, key_Smd, value_Smd, mask)[0]
        if _has_own_backward(query_Qnd, key_Smd):
            return _Attention.apply(query_Qnd, key_Smd, value_Smd, mask)
        return _flex(query_Qnd, key_Smd, value_Smd, mask)[0]
    query, key, value = (x.transpose(0, 1)[None] for x in (query_Qnd, key_Smd, value_Smd))
    visible_QS = None if mask is None else mask.visible_QS
    out_Qnd = F.scaled_dot_product_attention(query, key, value, visible_QS, enable_gqa=True)[0].transpose(0, 1)
    return out_Qnd if mask is None else out_Qnd.masked_fill(mask.padding_Q[:, None, None], 0.0)


def on_hopper(device: torch.device | None = None) -> bool:
    """Whether the GPU is an H100 or H200, for which FlashAttention-4's kernels were tried with these masks.

    AMD's cards of capability 9 are none.
    """
    if torch.version.cuda is None or torch.cuda.device_count() == 0:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


def flash_version() -> str | None:
    """The version of FlashAttention-4 that attention on this GPU would use; None where it would use none."""
    return version_of("flash-attn-4") if on_hopper() else None


def flash_install() -> str:
    """The command that installs it, and what it lacks, for this torch's CUDA."""
    extra = "[cu13]" if (torch.version.cuda or "").startswith("13") else ""
    return f"pip install --upgrade 'flash-attn-4{extra}>=4.0.0b36'"


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query_Qnd: Tensor, key_Smd: Tensor, value_Smd: Tensor, mask: FlexMask) -> Tensor:
        detached = query_Qnd.detach(), key_Smd.detach(), value_Smd.detach()  # so that validation has the same graph
        out_Qnd, log_sum_nQ = _forward(*detached, mask)
        ctx.mask = mask
        ctx.save_for_backward(query_Qnd, key_Smd, value_Smd, out_Qnd, log_sum_nQ)
        return out_Qnd

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query_Qnd, key_Smd, value_Smd, out_Qnd, log_sum_nQ = saved = ctx.saved_tensors  # once: it may run layers again
        few_keys = len(key_Smd) <= FLASH_KEYS_PER_QUERY * len(query_Qnd)
        if few_keys and (flash := _flash(query_Qnd, key_Smd)):
            return *flash.attention_backward(*saved, gradients[0], ctx.mask), None
        from dflash_dist.drafter.attention_kernels import attention_backward  # needs Triton

        inner_Qn = inner_product(out_Qnd, gradients[0])
        inputs = query_Qnd, key_Smd, value_Smd, log_sum_nQ, inner_Qn, gradients[0]
        return *attention_backward(*inputs, ctx.mask), None


def _has_own_backward(query_Qnd: Tensor, key_Smd: Tensor) -> bool:
    """Whether our own kernel takes these."""
    fits = query_Qnd.shape[-1] in HEAD_SIZES and _block_bytes(query_Qnd.device) >= SHARED_MEMORY_BYTES
    return query_Qnd.is_cuda and fits and _suits_kernels(query_Qnd, key_Smd)


def _flash(query_Qnd: Tensor, key_Smd: Tensor) -> ModuleType | None:
    """FlashAttention-4's kernels, where they are installed and take these."""
    fits = query_Qnd.is_cuda and query_Qnd.shape[-1] in FLASH_HEAD_SIZES and _suits_kernels(query_Qnd, key_Smd)
    return _flash_kernels() if fits else None


@functools.cache
def _flash_kernels() -> ModuleType | None:
    if (version := flash_version()) is None:
        return None
    try:
        from dflash_dist.drafter import attention_flash
    except Exception as error:
        raise UserError(
            f"flash-attn-4 {version} is installed but cannot be imported ({type(error).__name__}: {error}); install it "
            f"again with {flash_install()}, or remove it with pip uninstall flash-attn-4"
        ) from error
    return attention_flash


def _suits_kernels(query_Qnd: Tensor, key_Smd: Tensor) -> bool:
    """Kernels compute in half precision, with places of 32 bits, and their gradients add in no fixed order."""
    half = query_Qnd.dtype in (torch.bfloat16, torch.float16)
    countable = max(query_Qnd.numel(), key_Smd.numel()) < 2**31
    return half and countable and not torch.are_deterministic_algorithms_enabled()


def _block_bytes(device: torch.device) -> int:
    """The memory that a block may have; AMD's cards do not tell, nor has the CPU any."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return int(getattr(properties, "shared_memory_per_block_optin", 0))


def _forward(query_Qnd: Tensor, key_Smd: Tensor, value_Smd: Tensor, mask: FlexMask) -> tuple[Tensor, Tensor]:
    """The output, and the logarithm of each query's sum of exponentials, fp32 [n, Q]."""
    flash = _flash(query_Qnd, key_Smd)
    return (flash.attention if flash else _flex)(query_Qnd, key_Smd, value_Smd, mask)


def _flex(query_Qnd: Tensor, key_Smd: Tensor, value_Smd: Tensor, mask: FlexMask) -> tuple[Tensor, Tensor]:
    """As `_forward`."""
    query, key, value = (x.transpose(0, 1)[None] for x in (query_Qnd, key_Smd, value_Smd))
    hopper = query.is_cuda and query.shape[-1] == 128 and on_hopper(query.device)
    options = FLEX_OPTIONS_OF_HOPPER if hopper else FLEX_OPTIONS
    out, extra = _compiled_flex(query.is_cuda)(
        query, key, value, block_mask=mask.blocks, enable_gqa=True, kernel_options=options,
        return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    return out[0].transpose(0, 1), extra.lse[0]


@functools.cache
def _compiled_flex(compiled: bool) -> Any:
    """Compiled once for the process; as it is where there is no GPU, for tests."""
    return compile_once(flex_attention, dynamic=False) if compiled else flex_attention
