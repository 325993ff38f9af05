"""Fused kernels run for real: against their definition in torch, for speed, and for keeping documents apart.

A case holds random inputs of a kernel in the target's shape, and how to call the kernel and its definition on them. All
of this runs on any device, with any function in the kernel's place; `kernels.py` runs it in a process of its own.

Shape suffixes: T tokens of the pack, K key heads, H heads, D values of a head, X channels, W taps of the convolution.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from dflash_dist.check.bindings import torch_reference

Kernel = Callable[..., Any]
LENGTHS = (1500, 40, 1000, 1556)
"""Tokens of the documents: a short one behind a long one shows even a leak of a few tokens."""
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

    @classmethod
    def of(cls, text: dict[str, Any]) -> Shapes:
        """Those of a language model's config; what it does not say stays as by default."""
        known = {field.name: text[field.name] for field in fields(cls) if isinstance(text.get(field.name), int)}
        if "head_dim" not in known and text.get("hidden_size") and text.get("num_attention_heads"):
            known["head_dim"] = text["hidden_size"] // text["num_attention_heads"]
        if "num_key_value_heads" not in known and text.get("num_attention_heads"):
            known["num_key_value_heads"] = text["num_attention_heads"]
        return cls(**known)


@dataclass(frozen=True)
class Case:
    """Inputs of a kernel, and the calls of it and of its definition."""

    tokens: tuple[Tensor, ...]
    """Each [T, ...]."""
    fused: Callable[[Kernel, tuple[Tensor, ...], Sequence[int]], Tensor]
    """The kernel's output [T, ...] for packed documents of these lengths."""
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
    documents = list(zip(*(values.split(list(lengths)) for values in case.tokens), strict=True))
    packed = case.fused(kernel, case.tokens, lengths).split(list(lengths))
    alone = [case.fused(kernel, document, (len(document[0]),)) for document in documents]
    expected = [case.reference(tuple(values.float() for values in document)) for document in documents]
    return Measured(
        error=max(map(_difference, alone, expected)),
        leak=max(map(_difference, packed, alone)),
        fused_us=_median_us(lambda: case.fused(kernel, case.tokens, lengths), case.tokens[0].device),
        reference_us=_median_us(lambda: [case.reference(d) for d in documents], case.tokens[0].device),
        tokens=sum(lengths),
    )


def delta_rule_case(
    shapes: Shapes, tokens: int, device: torch.device, dtype: torch.dtype, reference: Callable[..., Any]
) -> Case:
    """The gated delta rule as the modelling code calls it; `reference`: its own torch function for that."""
    heads = shapes.linear_num_value_heads
    random = _generator(device)
    query_TKD, key_TKD = (
        torch.randn(tokens, shapes.linear_num_key_heads, shapes.linear_key_head_dim, device=device, generator=random)
        for _ in range(2)
    )
    value_THD = torch.randn(tokens, heads, shapes.linear_value_head_dim, device=device, generator=random)
    decay_TH = -0.05 * torch.rand(tokens, heads, device=device, generator=random)  # states last for many tokens
    beta_TH = torch.rand(tokens, heads, device=device, generator=random)

    def fused(kernel: Kernel, inputs: tuple[Tensor, ...], lengths: Sequence[int]) -> Tensor:
        query, key, value, g, beta = (x[None] for x in inputs)
        bounds = _offsets(lengths, device)
        out = kernel(query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True, cu_seqlens=bounds)[0]
        return out[0]

    def definition(inputs: tuple[Tensor, ...]) -> Tensor:
        query, key, value, g, beta = (x[None] for x in inputs)
        query, key = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (query, key))
        return reference(query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0][0]

    half = (x.to(dtype) for x in (query_TKD, key_TKD, value_THD))
    return Case((*half, decay_TH, beta_TH.to(dtype)), fused, definition)


def convolution_case(shapes: Shapes, tokens: int, device: torch.device, dtype: torch.dtype) -> Case:
    """The short causal convolution of each channel, then SiLU; kernels of our own or causal-conv1d's signature."""
    channels = (
        2 * shapes.linear_num_key_heads * shapes.linear_key_head_dim
        + shapes.linear_num_value_heads * shapes.linear_value_head_dim
    )
    taps, random = shapes.linear_conv_kernel_dim, _generator(device)
    hidden_TX = torch.randn(tokens, channels, device=device, generator=random).to(dtype)
    weight_XW = torch.randn(channels, taps, device=device, generator=random).to(dtype)

    def fused(kernel: Kernel, inputs: tuple[Tensor, ...], lengths: Sequence[int]) -> Tensor:
        if "positions_1T" in inspect.signature(kernel).parameters:
            positions_1T = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
            return kernel(inputs[0][None], weight_XW, positions_1T=positions_1T)[0]
        counts = torch.tensor(lengths, device=device)
        document_1T = torch.arange(len(lengths), device=device, dtype=torch.int32).repeat_interleave(counts)[None]
        out_1XT = kernel(inputs[0].T[None], weight_XW, None, activation="silu", seq_idx=document_1T)
        return out_1XT[0].T

    def definition(inputs: tuple[Tensor, ...]) -> Tensor:
        hidden_1XT = inputs[0].T[None]
        weight = weight_XW[:, None].to(hidden_1XT.dtype)
        out_1XT = nn.functional.conv1d(hidden_1XT, weight, padding=taps - 1, groups=channels)
        return nn.functional.silu(out_1XT[0, :, : hidden_1XT.shape[2]]).T

    return Case((hidden_TX,), fused, definition)


def attention_case(shapes: Shapes, tokens: int, device: torch.device, dtype: torch.dtype) -> Case:
    """Causal attention within each document, with grouped queries; kernels of torch's or flash-attn's signature."""
    random = _generator(device)
    heads = (shapes.num_attention_heads, shapes.num_key_value_heads, shapes.num_key_value_heads)
    query_THD, key_TKD, value_TKD = (
        torch.randn(tokens, count, shapes.head_dim, device=device, generator=random).to(dtype) for count in heads
    )
    groups = shapes.num_attention_heads // shapes.num_key_value_heads

    def fused(kernel: Kernel, inputs: tuple[Tensor, ...], lengths: Sequence[int]) -> Tensor:
        query, key, value = inputs
        takes, named = inspect.signature(kernel).parameters, {}
        if "enable_gqa" in takes:
            named["enable_gqa"] = True
        elif "cu_seq_q" in takes:  # torch's before 2.12
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        causal = next(({name: True} for name in ("causal", "is_causal") if name in takes), {"window_size": (-1, 0)})
        bounds = _offsets(lengths, device)
        return kernel(query, key, value, bounds, bounds, max(lengths), max(lengths), **causal, **named)

    def definition(inputs: tuple[Tensor, ...]) -> Tensor:
        query, key, value = inputs
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        scores_HTT = torch.einsum("thd,shd->hts", query, key).float() * shapes.head_dim**-0.5
        later_TT = torch.ones(scores_HTT.shape[1:], dtype=torch.bool, device=device).triu(1)
        weights_HTT = scores_HTT.masked_fill(later_TT, float("-inf")).softmax(-1).to(value.dtype)
        return torch.einsum("hts,shd->thd", weights_HTT, value)

    return Case((query_THD, key_TKD, value_TKD), fused, definition)


KERNELS = {
    "chunk_gated_delta_rule": "fla.ops.gated_delta_rule",
    "convolution": "dflash_dist.target.packed_kernels",
    "causal_conv1d_fn": "causal_conv1d",
    "varlen_attn": "torch.nn.attention.varlen",
    "flash_attn_varlen_func": "flash_attn",
}
"""The kernels that are tried, and where they are imported from."""


def run_trial(name: str, shapes: Shapes, modelling: str | None, device: torch.device) -> Measured:
    """Imports the kernel and measures it in bf16; `modelling`: the target's modelling module, for the delta rule."""
    kernel = getattr(importlib.import_module(KERNELS[name]), name)
    make: Callable[..., Case] = convolution_case if "conv" in name else attention_case
    if name == "chunk_gated_delta_rule":
        assert modelling is not None
        reference = torch_reference(importlib.import_module(modelling), "torch_chunk_gated_delta_rule")
        assert reference is not None
        make = functools.partial(delta_rule_case, reference=reference)
    with torch.inference_mode():
        return measure(make(shapes, sum(LENGTHS), device, torch.bfloat16), kernel)


def _offsets(lengths: Sequence[int], device: torch.device) -> Tensor:
    """int32 [N + 1]: where each document begins, and where the last one ends."""
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def _difference(values: Tensor, expected: Tensor) -> float:
    expected = expected.float()
    return float((values.float() - expected).norm() / expected.norm())


def _median_us(work: Callable[[], object], device: torch.device) -> float:
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
