"""Trials of kernels, with stand-ins that work or are broken in a known way, and the verdict on each."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from dflash_dist.check import kernels, layers
from dflash_dist.check.bindings import torch_reference
from dflash_dist.check.kernels import Failure, try_kernels, verdict
from dflash_dist.check.trials import KERNELS, Case, Measured, Shapes, make_case, measure
from dflash_dist.target import attention as attention_of_target
from dflash_dist.target import mixers
from dflash_dist.target.attention import packed_attention
from dflash_dist.target.packed import Pack, current

CPU = torch.device("cpu")
SMALL = Shapes(2, 4, 16, 16, 4, 4, 2, 16, sliding_window=20)
LENGTHS = (70, 5, 33)
MODELLING = "transformers.models.qwen3_5.modeling_qwen3_5"
FIGURES = Measured(error=0.004, leak=0.0, fused_us=100.0, reference_us=900.0, tokens=4096)


def delta_reference() -> Callable[..., Any]:
    reference = torch_reference(importlib.import_module(MODELLING), "torch_chunk_gated_delta_rule")
    assert reference is not None
    return reference


def cut(inputs: Sequence[Tensor], bounds: Tensor) -> list[tuple[Tensor, ...]]:
    """The inputs [1, T, ...] of each document."""
    lengths = bounds.diff().tolist()
    return list(zip(*(x.split(lengths, dim=1) for x in inputs), strict=True))


def delta_rule(q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, cu_seqlens: Tensor, **named: Any) -> Any:
    """fla's signature."""
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    parts = cut((q, k, v, g, beta), cu_seqlens)
    return torch.cat([delta_reference()(*x[:3], g=x[3], beta=x[4], **named)[0] for x in parts], 1), None


def leaky_delta_rule(*inputs: Tensor, cu_seqlens: Tensor, **named: Any) -> Any:
    return delta_rule(*inputs, cu_seqlens=cu_seqlens[[0, -1]], **named)


def convolution(x: Tensor, weight: Tensor, bias: None, *, activation: str, seq_idx: Tensor) -> Tensor:
    """causal-conv1d's signature."""
    assert x.stride(1) == 1 and bias is None and activation == "silu"  # it takes seq_idx with channels last alone
    out = torch.zeros_like(x)
    taps = weight.shape[1]
    for tap in range(taps):
        back = taps - 1 - tap
        same = torch.zeros(x.shape[2], dtype=torch.bool)
        same[back:] = seq_idx[0, back:] == seq_idx[0, : x.shape[2] - back]
        out += x.roll(back, dims=2) * weight[None, :, tap, None] * same
    return torch.nn.functional.silu(out)


def leaky_convolution(*inputs: Any, seq_idx: Tensor, **named: Any) -> Tensor:
    return convolution(*inputs, seq_idx=torch.zeros_like(seq_idx), **named)


def attention(q: Tensor, k: Tensor, v: Tensor, bounds_q: Tensor, bounds_k: Tensor, most_q: int, most_k: int) -> Tensor:
    parts = []
    for query, key, value in cut([x[None] for x in (q, k, v)], bounds_q):
        heads = [x.transpose(1, 2) for x in (query, key, value)]
        out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        parts.append(out.transpose(1, 2)[0])
    return torch.cat(parts)


def flash_attn(*inputs: Any, causal: bool = False) -> Tensor:
    assert causal
    return attention(*inputs)


def leaky_attention(*inputs: Any, causal: bool = False) -> Tensor:
    q, k, v, bounds, _, most, _ = inputs
    whole = bounds[[0, -1]]
    return attention(q, k, v, whole, whole, most, most)


def packed_convolution(hidden_1TX: Tensor, weight_XW: Tensor) -> Tensor:
    """What the op computes on a GPU, where Triton runs."""
    pack = current.pack
    return mixers._shifted_sum(hidden_1TX, weight_XW, None if pack is None else pack.document_1T)


def gated_norm(value_MD: Tensor, gate_MD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    exact_MD = value_MD.float()
    normed_MD = exact_MD * torch.rsqrt(exact_MD.square().mean(-1, keepdim=True) + epsilon)
    return (normed_MD * weight_D * torch.nn.functional.silu(gate_MD.float())).to(value_MD.dtype)


def one_document(op: Callable[..., Any]) -> Callable[..., Any]:
    """The op, which is not told where documents begin."""

    def leaky(*inputs: Tensor, **named: Any) -> Any:
        pack = current.pack
        if pack is None:
            return op(*inputs, **named)
        with mock.patch.object(current, "pack", Pack.of(np.array([sum(pack.lengths)]), CPU)):
            return op(*inputs, **named)

    return leaky


def off(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel with values a tenth too great."""

    def wrong(*inputs: Any, **named: Any) -> Any:
        out = kernel(*inputs, **named)
        return (out[0] * 1.1, None) if isinstance(out, tuple) else out * 1.1

    return wrong


RIGHT: dict[str, Callable[..., Any]] = {
    "packed_attention": packed_attention,
    "packed_delta_rule": mixers.packed_delta_rule,
    "packed_convolution": packed_convolution,
    "heads_apart": mixers.heads_apart,
    "gated_norm": gated_norm,
    "chunk_gated_delta_rule": delta_rule,
    "causal_conv1d_fn": convolution,
    "flash_attn_varlen_func": flash_attn,
}
"""Real ops where they run on a CPU, else stand-ins."""
LEAKY: dict[str, Callable[..., Any]] = {
    "packed_attention": one_document(packed_attention),
    "packed_delta_rule": one_document(mixers.packed_delta_rule),
    "packed_convolution": one_document(packed_convolution),
    "chunk_gated_delta_rule": leaky_delta_rule,
    "causal_conv1d_fn": leaky_convolution,
    "flash_attn_varlen_func": leaky_attention,
}
"""The others look at single tokens alone."""


def is_op(value: object) -> bool:
    return isinstance(value, torch.library.CustomOpDef)


def case(name: str) -> Case:
    return make_case(name, SMALL, MODELLING, CPU, sum(LENGTHS))


def test_each_kernel_has_a_case_and_a_mend() -> None:
    assert KERNELS.keys() == RIGHT.keys() == kernels.MENDS.keys() - {"drafter_attention"}


def test_each_op_of_target_ranks_is_tried() -> None:
    """All that their modules define; another one would run untried."""
    modules = (attention_of_target, mixers)
    found = {module.__name__: {n for n, value in vars(module).items() if is_op(value)} for module in modules}
    for module, ops in found.items():
        assert ops == {name for name, place in KERNELS.items() if place == module}
    assert set().union(*found.values()) == {layers.PACKED_ATTENTION, *layers.OWN_KERNELS}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_kernel_passes(name: str) -> None:
    measured = measure(case(name), RIGHT[name], LENGTHS)
    assert measured.error < 0.015 and measured.leak < 0.015 and measured.tokens == sum(LENGTHS)
    assert measured.fused_us > 0 and measured.reference_us > 0
    assert verdict(name, measured).level in ("ok", "warning")  # a stand-in may be slow


@pytest.mark.parametrize("name", LEAKY)
def test_a_leak_between_documents_is_found(name: str) -> None:
    measured = measure(case(name), LEAKY[name], LENGTHS)
    assert measured.error < 0.015 and measured.leak > 0.1
    finding = verdict(name, measured)
    assert finding.level == "error" and "lets packed documents see each other" in finding.detail and finding.mend


@pytest.mark.parametrize("name", RIGHT)
def test_wrong_values_are_found(name: str) -> None:
    finding = verdict(name, measure(case(name), off(RIGHT[name]), LENGTHS))
    assert finding.level == "error" and "gives other values than torch" in finding.detail and finding.mend


def test_a_window_that_attention_does_not_keep_to_is_found() -> None:
    def without_window(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> Tensor:
        return packed_attention(query, key, value, scale, 0)

    finding = verdict("packed_attention", measure(case("packed_attention"), without_window, LENGTHS))
    assert finding.level == "error" and "gives other values than torch" in finding.detail


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton, whose interpreter runs the kernels")
@pytest.mark.parametrize("name", ["packed_convolution", "heads_apart", "gated_norm"])
def test_our_own_kernels_pass_in_the_interpreter(name: str) -> None:
    """In float16, as the interpreter computes no bfloat16."""
    module = "packed_kernels" if name == "heads_apart" else "mixers"  # on a CPU the op itself does without
    code = f"""
import dataclasses, json, torch
from dflash_dist.check.trials import make_case, measure
from dflash_dist.target.{module} import {name} as kernel
from tests.unit.test_check_kernels import CPU, LENGTHS, MODELLING, SMALL
case = make_case({name!r}, SMALL, MODELLING, CPU, sum(LENGTHS), torch.float16)
print(json.dumps(dataclasses.asdict(measure(case, kernel, LENGTHS))))
"""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    measured = Measured(**json.loads(done.stdout.splitlines()[-1]))
    assert measured.error < 0.002 and measured.leak < 0.002


def test_values_that_are_not_numbers_are_wrong() -> None:
    measured = measure(case("causal_conv1d_fn"), lambda x, *_, **named: x * float("nan"), LENGTHS)
    assert "gives other values" in verdict("causal_conv1d_fn", measured).detail


def test_a_slow_kernel_is_found() -> None:
    def slow(*inputs: Any, **named: Any) -> Any:
        for _ in range(8):
            out = delta_rule(*inputs, **named)
        return out

    finding = verdict("chunk_gated_delta_rule", measure(case("chunk_gated_delta_rule"), slow, LENGTHS))
    assert finding.level == "warning" and "slower than torch" in finding.detail and "times the time" in finding.cost


@pytest.mark.parametrize(
    ("changes", "level", "says"),
    [
        ({}, "ok", "100 us for 4096 tokens, where torch takes 900 us"),
        ({"error": 0.2}, "error", "20.0% away"),
        ({"error": float("nan")}, "error", "other values"),
        ({"leak": 0.4}, "error", "see each other"),
        ({"leak": float("nan")}, "error", "see each other"),
        ({"fused_us": 1800.0}, "warning", "slower than torch"),
    ],
)
def test_verdicts(changes: dict[str, float], level: str, says: str) -> None:
    measured = dataclasses.replace(FIGURES, **changes)
    finding = verdict("causal_conv1d_fn", measured)
    assert finding.level == level and says in finding.detail
    assert bool(finding.mend) == (level != "ok")
    unused = verdict("causal_conv1d_fn", measured, "warning")
    assert unused.level == ("warning" if level == "error" else level)


def test_a_failure_is_no_verdict_where_it_says_nothing_of_the_kernel() -> None:
    assert verdict("packed_attention", Failure("RuntimeError: no kernel image")).level == "error"
    finding = verdict("packed_attention", Failure("OutOfMemoryError: 2 GiB", untried=True))
    assert finding.level == "warning" and "could not be tried: OutOfMemoryError" in finding.detail


def test_shapes_are_those_of_the_config() -> None:
    text = {"hidden_size": 96, "num_attention_heads": 6, "linear_num_key_heads": 3, "head_dim": None}
    assert Shapes.of(text) == Shapes(linear_num_key_heads=3, num_attention_heads=6, num_key_value_heads=6, head_dim=16)
    assert Shapes.of({"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}).head_dim == 32


@pytest.mark.parametrize(
    ("text", "window"),
    [
        ({"sliding_window": 128}, 128),
        ({"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]}, 128),
        ({"sliding_window": 128, "layer_types": ["full_attention"]}, 0),
        ({"sliding_window": None}, 0),
        ({"sliding_window": 128, "use_sliding_window": False}, 0),
        ({}, 0),
    ],
)
def test_attention_is_tried_with_the_window_that_some_layers_have(text: dict[str, Any], window: int) -> None:
    assert Shapes.of(text).sliding_window == window


def make_package(folder: Path, module: str, text: str) -> None:
    (folder / f"{module}.py").write_text(text, encoding="utf-8")


def tried(folder: Path, *names: str) -> dict[str, Any]:
    """The outcome of kernels that are stand-ins in `folder`, in a process as on a GPU."""
    return try_kernels(names, SMALL, MODELLING, {"PYTHONPATH": str(folder), "TRITON_CACHE_DIR": "kept"}, "cpu")


WORKING_ATTENTION = """
import torch
def flash_attn_varlen_func(q, k, v, bounds, *rest, causal):
    outs = []
    for start, end in zip(bounds.tolist(), bounds.tolist()[1:]):
        heads = [x[start:end].transpose(0, 1)[None] for x in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=causal, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)
"""


def test_trials_in_a_process_of_their_own(tmp_path: Path) -> None:
    """Each is tried whatever became of the one before; caches of compiled kernels are where they are said to be."""
    failing = "import os\ndef causal_conv1d_fn(*a, **b): raise RuntimeError('in ' + os.environ['TRITON_CACHE_DIR'])\n"
    make_package(tmp_path, "causal_conv1d", failing)
    make_package(tmp_path, "flash_attn", WORKING_ATTENTION)
    outcomes = tried(tmp_path, "causal_conv1d_fn", "flash_attn_varlen_func")
    assert outcomes["causal_conv1d_fn"] == Failure("RuntimeError: in kept")
    attention = outcomes["flash_attn_varlen_func"]
    assert isinstance(attention, Measured) and attention.error < 0.015 and attention.leak < 0.015


def test_the_ops_of_target_ranks_are_tried_in_a_process_of_their_own(tmp_path: Path) -> None:
    """Those that a CPU runs, as they are."""
    names = ("packed_attention", "packed_delta_rule", "heads_apart")
    for name, outcome in tried(tmp_path, *names).items():
        assert isinstance(outcome, Measured) and outcome.error < 0.015 and outcome.leak < 0.015, (name, outcome)


@pytest.mark.parametrize("name", ["packed_convolution", "gated_norm"])
def test_a_kernel_of_ours_that_cannot_be_imported_is_an_error_that_says_why(tmp_path: Path, name: str) -> None:
    make_package(tmp_path, "triton", "raise ImportError('libtriton.so: undefined symbol: _ZN4mlir')\n")
    outcome = tried(tmp_path, name)[name]
    assert outcome == Failure("ImportError: libtriton.so: undefined symbol: _ZN4mlir")
    finding = verdict(name, outcome)
    assert finding.level == "error" and "triton" in finding.mend


def test_a_kernel_that_kills_its_process_is_named(tmp_path: Path) -> None:
    killing = "import os\ndef causal_conv1d_fn(*a, **b): os.kill(os.getpid(), 11)\n"
    make_package(tmp_path, "causal_conv1d", killing)
    make_package(tmp_path, "flash_attn", WORKING_ATTENTION)
    outcomes = tried(tmp_path, "flash_attn_varlen_func", "causal_conv1d_fn", "chunk_gated_delta_rule")
    assert isinstance(outcomes["flash_attn_varlen_func"], Measured)
    assert outcomes["causal_conv1d_fn"].reason.startswith(f"its process was killed by {signal.Signals(11).name}")
    assert outcomes["chunk_gated_delta_rule"] == Failure("the trial of causal_conv1d_fn ended all", untried=True)


def test_a_kernel_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_package(tmp_path, "causal_conv1d", "import threading\nthreading.Event().wait()\n")
    monkeypatch.setattr(kernels, "TRIAL_TIMEOUT_S", 1.0)
    assert "had not ended after 1 s" in tried(tmp_path, "causal_conv1d_fn")["causal_conv1d_fn"].reason


def test_a_process_that_cannot_begin_says_why(tmp_path: Path) -> None:
    make_package(tmp_path, "torch", "raise ImportError('libcudart.so.12: cannot open shared object file')\n")
    outcome = tried(tmp_path, "causal_conv1d_fn")["causal_conv1d_fn"]
    assert outcome.untried and outcome.reason.endswith("ImportError: libcudart.so.12: cannot open shared object file")
