"""One forward of many documents in a row, of which each sees only itself, and no padding.

Only attention, the delta rule and the short convolution of a target look at other tokens. Inside `running` a decoder
that was given to `use_own_attention` and `use_own_mixers` takes them from here, and they keep to the documents of
the pack. They are custom ops: torch.compile sees one opaque call, and the pack is looked up when it runs. So another
mix of lengths recompiles nothing, and nothing is read back from the device. Attention is torch's, the delta rule fla's,
and what lies around that is in `packed_kernels.py`; causal-conv1d is not needed.

Where no kernel fits (CPU, float32 attention), an op goes through the documents one by one: the definition, and slow.

Shape suffixes: N documents of the pack, T its tokens, P = N + 1, C chunks of at most `CHUNK` tokens of one document, B
rows, H heads, K key heads, D values of a head, X channels, W taps of the convolution, M all heads of all tokens.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dflash_dist.target.packing import token_offsets

ATTENTION = "dflash_dist"
CHUNK = 64
"""Tokens that the delta rule's kernels take at a time."""
DELTA_RULE, CONVOLUTION = "torch_chunk_gated_delta_rule", "causal_conv1d_fn"
"""Names by which the modelling code of Qwen3-Next and Qwen3.5 calls its mixers."""
GATED_NORM = "RMSNormGated"
"""End of the name of its class of the norm behind the delta rule."""
OWN_MIXERS = {"modeling_qwen3_next", "modeling_qwen3_5", "modeling_qwen3_5_moe"}
"""Modelling code whose mixers compute what those of this module do; others use the same names for other things."""
LAYER_TYPES = {"full_attention", "sliding_attention", "linear_attention"}
_HARMLESS = {"position_ids", "seq_idx", "use_cache", "cache_position", "output_attentions", "output_router_logits"}
"""Arguments of an attention function that change nothing in a causal forward without a cache."""


class NotPackableError(Exception):
    """The target does something that packed documents could see through; the text says what."""


@dataclass(frozen=True)
class Pack:
    """Where the documents of one forward lie, on the device."""

    lengths: tuple[int, ...]
    offsets_P: Tensor
    """int32: where each document begins, and where the last one ends."""
    document_1T: Tensor
    """int32: the document of each token."""
    positions_1T: Tensor
    """int64: each token's position in its document."""
    chunks_C2: Tensor
    """int32: document and number of each chunk. Given to fla, which otherwise reads the offsets back in every layer."""

    @classmethod
    def of(cls, lengths_N: np.ndarray, device: torch.device) -> Pack:
        """The pack of documents with these lengths, copied without a wait."""
        counts_N = -(-lengths_N // CHUNK)
        documents = np.arange(len(lengths_N))
        arrays = (
            np.concatenate([[0], np.cumsum(lengths_N)]).astype(np.int32),
            np.repeat(documents, lengths_N)[None].astype(np.int32),
            token_offsets(lengths_N)[None],
            np.stack([np.repeat(documents, counts_N), token_offsets(counts_N)], 1).astype(np.int32),
        )
        return cls(tuple(lengths_N.tolist()), *(to_device(torch.from_numpy(array), device) for array in arrays))


@dataclass
class _Running:
    """What the ops look up."""

    active: bool = False
    pack: Pack | None = None
    key_heads: int = 0
    """Of the delta rule. Up to transformers 5.17 queries and keys come repeated for the heads of the values."""
    fla: bool = False
    """Whether its kernels can be used here."""


_running = _Running()


@contextlib.contextmanager
def running(decoder: Any, pack: Pack | None) -> Iterator[None]:
    """Within it, the decoder's mixers are those of this module, for the documents of `pack`; None: one to a row."""
    _running.active, _running.pack = True, pack
    _running.key_heads = getattr(decoder.config, "linear_num_key_heads", 0)
    try:
        yield
    finally:
        _running.active, _running.pack = False, None


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


def has_own_mixers(decoder: Any) -> bool:
    """Whether the decoder's linear attention is of a kind that this module computes."""
    return is_own(_modelling(decoder))


def is_own(modelling: ModuleType) -> bool:
    """`has_own_mixers`, of a decoder of this modelling code."""
    names = all(hasattr(modelling, name) for name in (DELTA_RULE, CONVOLUTION))
    return names and modelling.__name__.rpartition(".")[2] in OWN_MIXERS


def use_own_mixers(decoder: Any) -> None:
    """Has the modelling code's delta rule, convolution and gated norm be the ops of this module inside `running`.

    Nothing to do where they are of another kind.
    """
    if not has_own_mixers(decoder):
        return
    module = _modelling(decoder)
    _running.fla = torch.cuda.is_available() and fla_missing() is None
    norms = [value for name, value in vars(module).items() if name.endswith(GATED_NORM)]
    switches: list[tuple[Any, str, Callable[..., Any]]] = [
        (module, DELTA_RULE, _delta_rule),
        (module, CONVOLUTION, _convolution),
        *((norm, "forward", _gated_norm) for norm in norms),
    ]
    for place, name, ours in switches:
        theirs = getattr(place, name)
        if not hasattr(theirs, "is_switched"):
            _theirs.setdefault(name, theirs)  # Qwen3-Next's and Qwen3.5's are alike
            setattr(place, name, _switched(ours, theirs))


def tune_delta_rule(decoder: Any, lengths_N: np.ndarray, device: torch.device) -> None:
    """Runs the decoder's delta rule on random documents of these lengths, as a pack and as one row."""
    config, dtype = decoder.config, next(decoder.parameters()).dtype
    keys = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads, config.linear_value_head_dim
    tokens = int(lengths_N.sum())
    query_1TKD, key_1TKD, value_1THD = (
        torch.rand(1, tokens, *shape, dtype=dtype, device=device) for shape in (keys, keys, values)
    )
    g_1TH, beta_1TH = -torch.rand(1, tokens, values[0], device=device), value_1THD[..., 0].contiguous()
    for pack in (Pack.of(lengths_N, device), None):
        with torch.no_grad(), running(decoder, pack):
            _delta_rule(query_1TKD, key_1TKD, value_1THD, g_1TH, beta_1TH, use_qk_l2norm_in_kernel=True)


@functools.cache
def fla_missing() -> str | None:
    """Why fla's kernels cannot be used, in the words of the failed import; None where they can."""
    try:
        _fla()
    except Exception as error:  # transformers takes any exception for "not installed"
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device in the order of its stream; the host does not wait."""
    if device.type == "cuda" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _modelling(decoder: Any) -> Any:
    return sys.modules[type(decoder).__module__]


def _switched(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def mixer(*args: Any, **kwargs: Any) -> Any:
        return (ours if _running.active else theirs)(*args, **kwargs)

    mixer.is_switched = True  # type: ignore[attr-defined]
    return mixer


_theirs: dict[str, Callable[..., Any]] = {}
"""The modelling code's own functions, which are torch's where no kernel fits."""


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
    if _running.pack is None:
        return _attention_of_rows(query_1HTD, key_1KTD, value_1KTD, scale, sliding_window or 0).transpose(1, 2), None
    query_THD, key_TKD, value_TKD = (x[0].transpose(0, 1).contiguous() for x in (query_1HTD, key_1KTD, value_1KTD))
    return packed_attention(query_THD, key_TKD, value_TKD, scale, sliding_window or 0)[None], None


@torch.library.custom_op("dflash::packed_attention", mutates_args=())
def packed_attention(query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scale: float, window: int) -> Tensor:
    """Causal attention [T, H, D] within each document; `window`: tokens that one sees, itself included, 0 for all."""
    pack = _running.pack
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


def _delta_rule(
    query_BTHD: Tensor,
    key_BTHD: Tensor,
    value_BTHD: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """In the form of the modelling code's function; what else it is given tells where documents lie."""
    assert initial_state is None and not output_final_state and use_qk_l2norm_in_kernel
    step = query_BTHD.shape[2] // _running.key_heads
    query_BTKD, key_BTKD = (heads_apart(x[:, :, ::step], normalise=True) for x in (query_BTHD, key_BTHD))
    value_BTHD = heads_apart(value_BTHD, normalise=False)
    return packed_delta_rule(query_BTKD, key_BTKD, value_BTHD, g.contiguous(), beta.contiguous()), None


@torch.library.custom_op("dflash::heads_apart", mutates_args=())
def heads_apart(heads_BTHD: Tensor, normalise: bool) -> Tensor:
    """A contiguous copy [B, T, H, D] of a slice; `normalise`: of each head over its norm, with fla's epsilon."""
    if heads_BTHD.is_cuda:
        from dflash_dist.target import packed_kernels

        return packed_kernels.heads_apart(heads_BTHD, normalise)
    exact_BTHD = heads_BTHD.float()
    scale_BTH1 = torch.rsqrt(exact_BTHD.square().sum(-1, keepdim=True) + 1e-6) if normalise else 1
    return (exact_BTHD * scale_BTH1).to(heads_BTHD.dtype, copy=True, memory_format=torch.contiguous_format)


@heads_apart.register_fake
def _(heads_BTHD: Tensor, normalise: bool) -> Tensor:
    return heads_BTHD.new_empty(heads_BTHD.shape)


@torch.library.custom_op("dflash::packed_delta_rule", mutates_args=())
def packed_delta_rule(
    query_BTKD: Tensor, key_BTKD: Tensor, value_BTHD: Tensor, g_BTH: Tensor, beta_BTH: Tensor
) -> Tensor:
    """The gated delta rule [B, T, H, D] over each document, of which `g_BTH` is the log of the decay.

    Queries and keys are of norm 1, and may have fewer heads than the values. All are contiguous.
    """
    pack = _running.pack
    if value_BTHD.is_cuda and _running.fla:
        bounds = {} if pack is None else {"cu_seqlens": pack.offsets_P, "chunk_indices": pack.chunks_C2}
        return _fla()(query_BTKD, key_BTKD, value_BTHD, g_BTH, beta_BTH, **bounds)[0]
    heads = value_BTHD.shape[2] // query_BTKD.shape[2]
    query_BTHD, key_BTHD = (x.repeat_interleave(heads, dim=2) for x in (query_BTKD, key_BTKD))
    inputs = (query_BTHD, key_BTHD, value_BTHD, g_BTH, beta_BTH)
    parts = [inputs] if pack is None else zip(*(x.split(pack.lengths, dim=1) for x in inputs), strict=True)
    reference = _theirs[DELTA_RULE]
    return torch.cat([reference(q, k, v, g=g, beta=beta)[0] for q, k, v, g, beta in parts], dim=1).contiguous()


@packed_delta_rule.register_fake
def _(query_BTKD: Tensor, key_BTKD: Tensor, value_BTHD: Tensor, g_BTH: Tensor, beta_BTH: Tensor) -> Tensor:
    return value_BTHD.new_empty(value_BTHD.shape)


def _convolution(
    hidden_BXT: Tensor,
    weight_XW: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """In the form of the modelling code's function. `seq_idx`: int [B, T], the document of each token."""
    assert bias is None and activation in ("silu", "swish")
    hidden_BTX = hidden_BXT.transpose(1, 2)
    if hidden_BTX.is_cuda:
        return packed_convolution(hidden_BTX, weight_XW).transpose(1, 2)
    return _shifted_sum(hidden_BTX, weight_XW, seq_idx).transpose(1, 2)


@torch.library.custom_op("dflash::packed_convolution", mutates_args=())
def packed_convolution(hidden_BTX: Tensor, weight_XW: Tensor) -> Tensor:
    """The causal convolution [B, T, X] of each channel over W tokens of its document, in fp32, then SiLU; on CUDA."""
    from dflash_dist.target.packed_kernels import convolution

    return convolution(hidden_BTX, weight_XW, None if _running.pack is None else _running.pack.positions_1T)


@packed_convolution.register_fake
def _(hidden_BTX: Tensor, weight_XW: Tensor) -> Tensor:
    return hidden_BTX.new_empty(hidden_BTX.shape)


def _shifted_sum(hidden_BTX: Tensor, weight_XW: Tensor, documents_BT: Tensor | None) -> Tensor:
    """What `packed_convolution` computes, as plain arithmetic."""
    tokens, taps = hidden_BTX.shape[1], weight_XW.shape[1]
    before_BTX = nn.functional.pad(hidden_BTX, (0, 0, taps - 1, 0))
    out_BTX = hidden_BTX.float() * weight_XW[:, -1].float()
    for tap in range(taps - 1):
        earlier_BTX = before_BTX[:, tap : tap + tokens].float()
        if documents_BT is not None:
            earlier_BT = nn.functional.pad(documents_BT, (taps - 1, 0), value=-1)[:, tap : tap + tokens]
            earlier_BTX = torch.where(earlier_BT.eq(documents_BT)[..., None], earlier_BTX, 0)
        out_BTX = out_BTX + earlier_BTX * weight_XW[:, tap].float()
    return nn.functional.silu(out_BTX).to(hidden_BTX.dtype)


def _gated_norm(norm: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
    """In the form of the norm's own forward."""
    if not hidden_states.is_cuda:
        return _theirs["forward"](norm, hidden_states, gate)
    return gated_norm(hidden_states, gate, norm.weight, norm.variance_epsilon)


@torch.library.custom_op("dflash::gated_norm", mutates_args=())
def gated_norm(values_MD: Tensor, gate_MD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """Each head [M, D] over its root mean square, times the weight, times SiLU of the gate; on CUDA."""
    from dflash_dist.target import packed_kernels

    return packed_kernels.gated_norm(values_MD, gate_MD, weight_D, epsilon)


@gated_norm.register_fake
def _(values_MD: Tensor, gate_MD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    return values_MD.new_empty(values_MD.shape)


@functools.cache
def _fla() -> Callable[..., Any]:
    """fla's delta rule."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]

    rule: Callable[..., Any] = chunk_gated_delta_rule
    return rule
