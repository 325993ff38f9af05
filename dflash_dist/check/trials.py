"""Fused kernels run for real: against their definition in torch, for speed, and for keeping documents apart.

A case holds random inputs of a kernel in the target's shape, and how to call the kernel and its definition on them. All
of this runs on any device, with any function in the kernel's place; `kernels.py` runs it in a process of its own.

What target ranks run on a GPU are the ops of `target/attention.py` and `target/mixers.py`, inside `running`: those are
tried, and in the same way. The other kernels are those that transformers calls.

Shape suffixes: T tokens of the pack, K key heads, H heads, D values of a head, X channels, W taps of the convolution, M
all heads of all tokens.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dflash_dist.check.bindings import torch_reference
from dflash_dist.target.mixers import DELTA_RULE, use_own_mixers
from dflash_dist.target.packed import Pack, running

Kernel = Callable[..., Any]
LENGTHS = (1500, 40, 1000, 1556)
"""Tokens of the documents: a short one behind a long one shows even a leak of a few tokens."""
LONGEST_WINDOW = 500
"""Of attention in a trial: smaller than most of the documents, so that a window has an effect."""
REPEATS = 5


@dataclass(frozen=True)
class Shapes:
    """The target's numbers that its kernels' shapes follow from; by default those of Qwen3.6-27B."""

    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 48
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    num_attention_heads: int = 24
    num_key_value_heads: int = 4
    head_dim: int = 256
    sliding_window: int = 0
    """Tokens that one sees in some layers; 0 where each layer sees all."""

    @classmethod
    def of(cls, text: dict[str, Any]) -> Shapes:
        """Those of a language model's config; what it does not say stays as by default."""
        known = {field.name: text[field.name] for field in fields(cls) if isinstance(text.get(field.name), int)}
        if "head_dim" not in known and text.get("hidden_size") and text.get("num_attention_heads"):
            known["head_dim"] = text["hidden_size"] // text["num_attention_heads"]
        if "num_key_value_heads" not in known and text.get("num_attention_heads"):
            known["num_key_value_heads"] = text["num_attention_heads"]
        slides = "sliding_attention" in (text.get("layer_types") or ["sliding_attention"])
        if not slides or text.get("use_sliding_window") is False:
            known["sliding_window"] = 0
        return cls(**known)

    @property
    def keys(self) -> int:
        """Values of all key heads of linear attention together."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def values(self) -> int:
        """Values of all its value heads together."""
        return self.linear_num_value_heads * self.linear_value_head_dim


@dataclass(frozen=True)
class Case:
    """Inputs of a kernel, and the calls of it and of its definition."""

    tokens: tuple[Tensor, ...]
    """Each [T, ...]."""
    fused: Callable[[Kernel, tuple[Tensor, ...], Pack], Tensor]
    """The kernel's output [T, ...] for packed documents."""
    reference: Callable[[tuple[Tensor, ...]], Tensor]
    """The output [T, ...] for one document, in torch."""


@dataclass(frozen=True)
class Measured:
    """What a trial gave."""

    error: float
    """Relative difference from the definition in fp32, of the worst document, each run alone."""
    leak: float
    """Relative difference of the worst document packed from the same alone."""
    fused_us: float
    reference_us: float
    tokens: int


def measure(case: Case, kernel: Kernel, lengths: Sequence[int] = LENGTHS) -> Measured:
    """Runs the kernel on the documents packed and one by one, and its definition; raises what the kernel raises."""
    device = case.tokens[0].device
    pack, *singles = (Pack.of(np.array(some), device) for some in (lengths, *([length] for length in lengths)))
    documents = list(zip(*(values.split(list(lengths)) for values in case.tokens), strict=True))
    packed = case.fused(kernel, case.tokens, pack).split(list(lengths))
    alone = [case.fused(kernel, document, single) for document, single in zip(documents, singles, strict=True)]
    expected = [case.reference(tuple(values.float() for values in document)) for document in documents]
    return Measured(
        error=max(map(difference, alone, expected)),
        leak=max(map(difference, packed, alone)),
        fused_us=median_us(lambda: case.fused(kernel, case.tokens, pack), device),
        reference_us=median_us(lambda: [case.reference(d) for d in documents], device),
        tokens=sum(lengths),
    )


def delta_rule_case(
    shapes: Shapes,
    tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    reference: Callable[..., Any],
    ours: bool = False,
) -> Case:
    """The gated delta rule as the modelling code calls it, or, `ours`, as target ranks do, with keys of norm 1.

    `reference`: the modelling code's own torch function.
    """
    heads, decoder = shapes.linear_num_value_heads, _decoder(shapes)
    random, keys = _generator(device), (tokens, shapes.linear_num_key_heads, shapes.linear_key_head_dim)
    query_TKD, key_TKD = (
        nn.functional.normalize(torch.randn(keys, device=device, generator=random), dim=-1) for _ in range(2)
    )
    value_THD = torch.randn(tokens, heads, shapes.linear_value_head_dim, device=device, generator=random)
    decay_TH = -0.05 * torch.rand(tokens, heads, device=device, generator=random)  # states last for many tokens
    beta_TH = torch.rand(tokens, heads, device=device, generator=random)

    def fused(kernel: Kernel, inputs: tuple[Tensor, ...], pack: Pack) -> Tensor:
        query, key, value, g, beta = (x[None] for x in inputs)
        if ours:
            with _running(decoder, pack):
                return kernel(query, key, value, g, beta)[0]
        bounds = pack.offsets_P
        return kernel(query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True, cu_seqlens=bounds)[0][0]

    def definition(inputs: tuple[Tensor, ...]) -> Tensor:
        query, key, value, g, beta = (x[None] for x in inputs)
        query, key = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (query, key))
        return reference(query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0][0]

    half = (x.to(dtype) for x in (query_TKD, key_TKD, value_THD))
    return Case((*half, decay_TH, beta_TH.to(dtype)), fused, definition)


def convolution_case(shapes: Shapes, tokens: int, device: torch.device, dtype: torch.dtype, ours: bool = False) -> Case:
    """The short causal convolution of each channel, then SiLU; the op of target ranks or causal-conv1d's function."""
    channels = 2 * shapes.keys + shapes.values
    taps, random, decoder = shapes.linear_conv_kernel_dim, _generator(device), _decoder(shapes)
    hidden_TX = torch.randn(tokens, channels, device=device, generator=random).to(dtype)
    weight_XW = torch.randn(channels, taps, device=device, generator=random).to(dtype)

    def fused(kernel: Kernel, inputs: tuple[Tensor, ...], pack: Pack) -> Tensor:
        if ours:
            with _running(decoder, pack):
                return kernel(inputs[0][None], weight_XW)[0]
        return kernel(inputs[0].T[None], weight_XW, None, activation="silu", seq_idx=pack.document_1T)[0].T

    def definition(inputs: tuple[Tensor, ...]) -> Tensor:
        hidden_1XT = inputs[0].T[None]
        weight = weight_XW[:, None].to(hidden_1XT.dtype)
        out_1XT = nn.functional.conv1d(hidden_1XT, weight, padding=taps - 1, groups=channels)
        return nn.functional.silu(out_1XT[0, :, : hidden_1XT.shape[2]]).T

    return Case((hidden_TX,), fused, definition)


def heads_apart_case(shapes: Shapes, tokens: int, device: torch.device, dtype: torch.dtype) -> Case:
    """What precedes the delta rule: the keys cut out of the channels and normalised, the values only cut out."""
    hidden_TX = torch.randn(tokens, 2 * shapes.keys + shapes.values, device=device, generator=_generator(device))

    def slices(hidden_TX: Tensor) -> tuple[Tensor, Tensor]:
        key_1TKD = hidden_TX[None, :, : shapes.keys].unflatten(-1, (-1, shapes.linear_key_head_dim))
        return key_1TKD, hidden_TX[None, :, 2 * shapes.keys :].unflatten(-1, (-1, shapes.linear_value_head_dim))

    def fused(kernel: Kernel, inputs: tuple[Tensor, ...], pack: Pack) -> Tensor:
        key_1TKD, value_1THD = slices(*inputs)
        return _beside(kernel(key_1TKD, True), kernel(value_1THD, False))

    def definition(inputs: tuple[Tensor, ...]) -> Tensor:
        key_1TKD, value_1THD = slices(*inputs)
        return _beside(nn.functional.normalize(key_1TKD.float(), dim=-1).to(key_1TKD.dtype), value_1THD.contiguous())

    return Case((hidden_TX.to(dtype),), fused, definition)


def gated_norm_case(shapes: Shapes, tokens: int, device: torch.device, dtype: torch.dtype) -> Case:
    """What follows the delta rule: each head over its root mean square, times a weight, times SiLU of a gate."""
    random, size = _generator(device), shapes.linear_value_head_dim
    value_TX, gate_TX, weight_D = (
        torch.randn(shape, device=device, generator=random).to(dtype)
        for shape in ((tokens, shapes.values), (tokens, shapes.values), (size,))
    )

    def fused(kernel: Kernel, inputs: tuple[Tensor, ...], pack: Pack) -> Tensor:
        value_MD, gate_MD = (x.view(-1, size) for x in inputs)
        return kernel(value_MD, gate_MD, weight_D, 1e-6).view(-1, shapes.values)

    def definition(inputs: tuple[Tensor, ...]) -> Tensor:
        value_MD, gate_MD = (x.view(-1, size) for x in inputs)
        normed_MD = nn.functional.rms_norm(value_MD.float(), (size,), weight_D.float(), 1e-6)
        return (normed_MD * nn.functional.silu(gate_MD.float())).to(value_MD.dtype).view(-1, shapes.values)

    return Case((value_TX, gate_TX), fused, definition)


def attention_case(shapes: Shapes, tokens: int, device: torch.device, dtype: torch.dtype, ours: bool = False) -> Case:
    """Causal attention within each document, with grouped queries; the op of target ranks or flash-attn's function.

    `ours`: where some of the target's layers see a window of tokens only, with such a window too.
    """
    random, decoder = _generator(device), _decoder(shapes)
    heads = (shapes.num_attention_heads, shapes.num_key_value_heads, shapes.num_key_value_heads)
    query_THD, key_TKD, value_TKD = (
        torch.randn(tokens, count, shapes.head_dim, device=device, generator=random).to(dtype) for count in heads
    )
    groups, scale = shapes.num_attention_heads // shapes.num_key_value_heads, shapes.head_dim**-0.5
    windows = [0, min(shapes.sliding_window, LONGEST_WINDOW)] if ours and shapes.sliding_window else [0]

    def fused(kernel: Kernel, inputs: tuple[Tensor, ...], pack: Pack) -> Tensor:
        if ours:
            with running(decoder, pack):
                return torch.cat([kernel(*inputs, scale, window) for window in windows], dim=-1)
        bounds, longest = pack.offsets_P, max(pack.lengths)
        return kernel(*inputs, bounds, bounds, longest, longest, causal=True)

    def definition(inputs: tuple[Tensor, ...]) -> Tensor:
        query, key, value = inputs
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        scores_HTT = torch.einsum("thd,shd->hts", query, key).float() * scale
        sees_TT = torch.ones(scores_HTT.shape[1:], dtype=torch.bool, device=device).tril()
        outs = []
        for window in windows:
            unseen_TT = ~(sees_TT.triu(1 - window) if window else sees_TT)
            weights_HTT = scores_HTT.masked_fill(unseen_TT, float("-inf")).softmax(-1).to(value.dtype)
            outs.append(torch.einsum("hts,shd->thd", weights_HTT, value))
        return torch.cat(outs, dim=-1)

    return Case((query_THD, key_TKD, value_TKD), fused, definition)


KERNELS = {
    "packed_attention": "dflash_dist.target.attention",
    "packed_delta_rule": "dflash_dist.target.mixers",
    "packed_convolution": "dflash_dist.target.mixers",
    "heads_apart": "dflash_dist.target.mixers",
    "gated_norm": "dflash_dist.target.mixers",
    "chunk_gated_delta_rule": "fla.ops.gated_delta_rule",
    "causal_conv1d_fn": "causal_conv1d",
    "flash_attn_varlen_func": "flash_attn",
}
"""The kernels that are tried, and where they are: the ops of target ranks, and what transformers calls."""


def make_case(
    name: str,
    shapes: Shapes,
    modelling: str | None,
    device: torch.device,
    tokens: int = sum(LENGTHS),
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    """The case of one of `KERNELS`; `modelling`: the target's modelling module, for the delta rule."""
    where = (shapes, tokens, device, dtype)
    if name in ("packed_delta_rule", "chunk_gated_delta_rule"):
        assert modelling is not None
        reference = torch_reference(importlib.import_module(modelling), DELTA_RULE)
        assert reference is not None
        use_own_mixers(_decoder(shapes, modelling))  # from here on the op knows whether fla is here
        return delta_rule_case(*where, reference, ours=name.startswith("packed"))
    others: dict[str, Callable[..., Case]] = {
        "packed_attention": functools.partial(attention_case, ours=True),
        "packed_convolution": functools.partial(convolution_case, ours=True),
        "heads_apart": heads_apart_case,
        "gated_norm": gated_norm_case,
        "causal_conv1d_fn": convolution_case,
        "flash_attn_varlen_func": attention_case,
    }
    return others[name](*where)


def run_trial(name: str, shapes: Shapes, modelling: str | None, device: torch.device) -> Measured:
    """Imports the kernel and measures it in bf16; `modelling`: the target's modelling module, for the delta rule."""
    if name == "drafter_attention":
        from dflash_dist.check.drafter import drafter_attention

        return drafter_attention(device, shapes)
    kernel = getattr(importlib.import_module(KERNELS[name]), name)
    with torch.inference_mode():
        return measure(make_case(name, shapes, modelling, device), kernel)


def _decoder(shapes: Shapes, modelling: str = __name__) -> Any:
    """Stands in for a decoder of that modelling code, where no more of it is looked at."""
    config = SimpleNamespace(linear_num_key_heads=shapes.linear_num_key_heads)
    return type("Decoder", (), {"__module__": modelling, "config": config})()


def _running(decoder: Any, pack: Pack) -> contextlib.AbstractContextManager[None]:
    """`running`, as for right-padded rows where the pack is a single document: so both ways are run."""
    return running(decoder, pack) if len(pack.lengths) > 1 else running(decoder, None, rows=pack)


def _beside(key_1TKD: Tensor, value_1THD: Tensor) -> Tensor:
    """All heads of a token in one row, [T, X]."""
    return torch.cat([key_1TKD[0].flatten(1), value_1THD[0].flatten(1)], dim=1)


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def difference(values: Tensor, expected: Tensor) -> float:
    """The norm of the difference over that of the expected."""
    expected = expected.float()
    return float((values.float() - expected).norm() / expected.norm())


def median_us(work: Callable[[], object], device: torch.device) -> float:
    """Of some runs behind one that may still compile."""
    wait = functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    times_s = []
    for _ in range(1 + REPEATS):
        wait()
        start_s = time.perf_counter()
        work()
        wait()  # sync: the time of the work itself
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s[1:]) * 1e6
