"""The delta rule of linear-attention layers, and the convolution and norm around it, kept to the documents of a pack.

Shape suffixes: B rows, T tokens of each, H heads, K key heads, D values of a head, X channels, W taps of the
convolution, M all heads of all tokens.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dflash_dist.target.packed import Pack, current, running

DELTA_RULE, CONVOLUTION = "torch_chunk_gated_delta_rule", "causal_conv1d_fn"
"""Names by which the modelling code of Qwen3-Next and Qwen3.5 calls its mixers."""
GATED_NORM = "RMSNormGated"
"""End of the name of its class of the norm behind the delta rule."""
OWN_MIXERS = {"modeling_qwen3_next", "modeling_qwen3_5", "modeling_qwen3_5_moe"}
"""Modelling code whose mixers compute what those of this module do; others use the same names for other things."""


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
    current.fla = torch.cuda.is_available() and fla_missing() is None
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
    """Runs the decoder's delta rule on random documents of these lengths."""
    config, dtype = decoder.config, next(decoder.parameters()).dtype
    keys = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads, config.linear_value_head_dim
    tokens = int(lengths_N.sum())
    query_1TKD, key_1TKD, value_1THD = (
        torch.rand(1, tokens, *shape, dtype=dtype, device=device) for shape in (keys, keys, values)
    )
    g_1TH, beta_1TH = -torch.rand(1, tokens, values[0], device=device), value_1THD[..., 0].contiguous()
    with torch.no_grad(), running(decoder, Pack.of(lengths_N, device)):
        _delta_rule(query_1TKD, key_1TKD, value_1THD, g_1TH, beta_1TH, use_qk_l2norm_in_kernel=True)


@functools.cache
def fla_missing() -> str | None:
    """Why fla's kernels cannot be used, in the words of the failed import; None where they can."""
    try:
        _fla()
    except Exception as error:  # transformers takes any exception for "not installed"
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None


def _modelling(decoder: Any) -> Any:
    return sys.modules[type(decoder).__module__]


def _switched(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def mixer(*args: Any, **kwargs: Any) -> Any:
        return (ours if current.active else theirs)(*args, **kwargs)

    mixer.is_switched = True  # type: ignore[attr-defined]
    return mixer


_theirs: dict[str, Callable[..., Any]] = {}
"""The modelling code's own functions, which are torch's where no kernel fits."""


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
    step = query_BTHD.shape[2] // current.key_heads
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
    shape, pack = value_BTHD.shape, current.pack or current.rows
    inputs = [query_BTKD, key_BTKD, value_BTHD, g_BTH, beta_BTH]
    if pack is not None:
        inputs = [x.flatten(0, 1)[None] for x in inputs]
    if value_BTHD.is_cuda and current.fla:
        bounds = {} if pack is None else {"cu_seqlens": pack.offsets_P, "chunk_indices": pack.chunks_C2}
        return _fla()(*inputs, **bounds)[0].view(shape)
    inputs[:2] = (x.repeat_interleave(shape[2] // x.shape[2], dim=2) for x in inputs[:2])
    parts = [inputs] if pack is None else zip(*(x.split(pack.lengths, dim=1) for x in inputs), strict=True)
    reference = _theirs[DELTA_RULE]
    out_BTHD = torch.cat([reference(q, k, v, g=g, beta=beta)[0] for q, k, v, g, beta in parts], dim=1)
    return out_BTHD.contiguous().view(shape)


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

    return convolution(hidden_BTX, weight_XW, None if current.pack is None else current.pack.positions_1T)


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
