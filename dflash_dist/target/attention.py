"""Attention that keeps to the documents of a pack, or to its rows, in the form that transformers calls.

Shape suffixes: T tokens of the pack, B rows, L their length, H heads, K key heads, D values of a head.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dflash_dist.target.mixers import has_own_mixers
from dflash_dist.target.packed import NotPackableError, Pack, current

ATTENTION = "dflash_dist"
LAYER_TYPES = {"full_attention", "sliding_attention", "linear_attention"}
_HARMLESS = {"position_ids", "seq_idx", "use_cache", "cache_position", "output_attentions", "output_router_logits"}
"""Arguments of an attention function that change nothing in a causal forward without a cache."""


def use_own_attention(decoder: Any) -> None:
    """Has the decoder's attention keep to the pack, or to its rows; only to be run inside `running` from here on.

    Not Hugging Face's for rows either where ours does: its masks are made after a look at the positions on the device.

    NotPackableError where a layer is of another kind than those whose tokens are kept apart here.
    """
    from transformers import AttentionInterface

    types = set(getattr(decoder.config, "layer_types", None) or ["full_attention"])
    if unknown := sorted(types - LAYER_TYPES):
        raise NotPackableError(f"it has layers of type {', '.join(unknown)}")
    if "linear_attention" in types and not has_own_mixers(decoder):
        raise NotPackableError("its linear attention is of another kind than those known here")
    AttentionInterface.register(ATTENTION, _attention)
    decoder.config._attn_implementation = ATTENTION


@contextlib.contextmanager
def checking_windows(decoder: Any) -> Iterator[None]:
    """NotPackableError if a forward within it does not give each sliding layer its window.

    Some architectures apply it by their mask alone, and own attention gets none.
    """
    from transformers import AttentionInterface

    config = decoder.config
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if types is None:
        types = ["sliding_attention"] * config.num_hidden_layers if getattr(config, "use_sliding_window", True) else []
    seen: dict[int, int | None] = {}

    def recording(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen[getattr(module, "layer_idx", -1)] = kwargs.get("sliding_window")
        return _attention(module, *args, **kwargs)

    AttentionInterface.register(ATTENTION, recording)
    try:
        yield
    finally:
        AttentionInterface.register(ATTENTION, _attention)
    sliding = [layer for layer, kind in enumerate(types) if kind == "sliding_attention" and window]
    if without := [layer for layer in sliding if seen.get(layer) != window]:
        raise NotPackableError(f"it applies its window of {window} tokens by a mask alone, as in layer {without[0]}")


def _attention(
    module: nn.Module,
    query_1HTD: Tensor,
    key_1KTD: Tensor,
    value_1KTD: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """In transformers' form of an attention function: the result is [1, T, H, D]."""
    more = [name for name, value in kwargs.items() if name not in _HARMLESS and value is not None]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if more or attention_mask is not None or not causal:
        what = ", ".join(more) or ("no causal mask" if attention_mask is None else "a mask")
        raise NotPackableError(f"its attention takes {what}")
    scale = query_1HTD.shape[-1] ** -0.5 if scaling is None else scaling
    if current.pack is None:
        return _attention_of_rows(query_1HTD, key_1KTD, value_1KTD, scale, sliding_window or 0).transpose(1, 2), None
    query_THD, key_TKD, value_TKD = (x[0].transpose(0, 1).contiguous() for x in (query_1HTD, key_1KTD, value_1KTD))
    return packed_attention(query_THD, key_TKD, value_TKD, scale, sliding_window or 0)[None], None


@torch.library.custom_op("dflash::packed_attention", mutates_args=())
def packed_attention(query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scale: float, window: int) -> Tensor:
    """Causal attention [T, H, D] within each document; `window`: tokens that one sees, itself included, 0 for all."""
    pack = current.pack
    assert pack is not None
    if not query_THD.is_cuda or query_THD.dtype == torch.float32:
        return _attention_one_by_one(pack, query_THD, key_TKD, value_TKD, scale, window)
    longest = max(pack.lengths)
    # What torch.nn.attention.varlen.varlen_attn calls; itself it takes no grouped queries before torch 2.12.
    return torch.ops.aten._flash_attention_forward(
        query_THD, key_TKD, value_TKD, pack.offsets_P, pack.offsets_P, longest, longest, 0.0, True, False, scale=scale,
        window_size_left=window - 1 if window else None, window_size_right=0 if window else None,
    )[0]  # fmt: skip


@packed_attention.register_fake
def _(query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scale: float, window: int) -> Tensor:
    return query_THD.new_empty(query_THD.shape)


def _attention_one_by_one(
    pack: Pack, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scale: float, window: int
) -> Tensor:
    out_THD = query_THD.new_empty(query_THD.shape)
    end = 0
    for length in pack.lengths:
        start, end = end, end + length
        query, key, value = (x[start:end].transpose(0, 1)[None] for x in (query_THD, key_TKD, value_TKD))
        out_THD[start:end] = _attention_of_rows(query, key, value, scale, window)[0].transpose(0, 1)
    return out_THD


def _attention_of_rows(query_BHLD: Tensor, key_BKLD: Tensor, value_BKLD: Tensor, scale: float, window: int) -> Tensor:
    """Causal attention [B, H, L, D] within each row."""
    mask_LL = None
    length = query_BHLD.shape[2]
    if query_BHLD.dtype == torch.float32 and query_BHLD.is_cuda:  # its one fused kernel takes no grouped queries
        heads = query_BHLD.shape[1] // key_BKLD.shape[1]
        key_BKLD, value_BKLD = (x.repeat_interleave(heads, dim=1) for x in (key_BKLD, value_BKLD))
    if 0 < window < length:
        mask_LL = torch.ones(length, length, dtype=torch.bool, device=query_BHLD.device).tril().triu(1 - window)
    return nn.functional.scaled_dot_product_attention(
        query_BHLD, key_BKLD, value_BKLD, attn_mask=mask_LL, is_causal=mask_LL is None, scale=scale, enable_gqa=True
    )
