"""What transformers calls for each function, and what follows for the target. Of the installed version."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

from dflash_dist.check import Finding, layers
from dflash_dist.check.bindings import NAMES, Binding, bindings, torch_reference
from dflash_dist.check.installs import FusedPackage
from dflash_dist.check.kernels import Failure, Outcome
from dflash_dist.check.layers import (
    Layers,
    binding_finding,
    fallback_finding,
    has_own_mixers,
    kernel_findings,
    leak_of_fallback,
    never_packed,
    packing_finding,
)
from dflash_dist.check.slowdown import slowdown
from dflash_dist.check.target import TargetFacts
from dflash_dist.check.trials import Measured
from dflash_dist.check.versions import numbers
from dflash_dist.config import Config, load_config
from tests.tiny import make_chats, make_config, target_config

HYBRIDS = ["qwen3_next", "qwen3_5", "qwen3_5_moe"]
WORKS = Measured(0.004, 0.0, 100.0, 900.0, 4096)
LEAKS = Measured(0.004, 0.4, 100.0, 900.0, 4096)
without_kernels = pytest.mark.skipif(
    any(importlib.util.find_spec(name) for name in ("fla", "causal_conv1d")), reason="fused kernels are installed"
)


def modelling(architecture: str) -> ModuleType:
    return importlib.import_module(f"transformers.models.{architecture}.modeling_{architecture}")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_config(make_config(tmp_path, tmp_path, make_chats(tmp_path / "chats.jsonl", rows=1)))


def with_dtype(config: Config, dtype: Any) -> Config:
    return dataclasses.replace(config, target=dataclasses.replace(config.target, dtype=dtype))


@without_kernels
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_each_function_of_a_hybrid_is_seen_to_fall_back(architecture: str) -> None:
    found = {binding.function: binding for binding in bindings(modelling(architecture))}
    assert {name: binding.kernel for name, binding in found.items()} == NAMES
    for name, binding in found.items():
        assert binding.fallback and binding.implementation == f"{modelling(architecture).__name__}.{name}"
        assert binding.package == ("causal_conv1d" if "conv1d" in name else "fla")


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen3_moe"])
def test_a_plain_architecture_has_no_bindings(architecture: str) -> None:
    assert bindings(modelling(architecture)) == []


@without_kernels
@pytest.mark.parametrize("architecture", ["kimi_linear", "olmo_hybrid", "mamba2"])
def test_other_architectures_are_seen_too(architecture: str) -> None:
    found = bindings(modelling(architecture))
    assert len(found) >= 4 and all(binding.fallback for binding in found)


def wrapped_by_a_kernel(kernel: Any, layers_of_wrapping: int = 0) -> ModuleType:
    """A modelling module whose function is chosen as transformers does it, then wrapped by others."""
    module = ModuleType("transformers.models.made.modeling_made")

    def torch_chunk_gated_delta_rule() -> None: ...

    implementation = torch_function = torch_chunk_gated_delta_rule
    if kernel is not None:
        implementation = kernel

    @functools.wraps(torch_function)
    def function(*arguments: Any) -> Any:
        return (implementation or torch_function)(*arguments)

    for _ in range(layers_of_wrapping):
        inner = function

        @functools.wraps(inner)
        def function(*arguments: Any, inner: Any = inner) -> Any:
            return inner(*arguments)

    for made in (torch_function, function):
        made.__module__ = module.__name__
    module.torch_chunk_gated_delta_rule = function  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("deep", [0, 1, 3])
def test_a_kernel_is_seen_behind_wrappers(deep: int) -> None:
    (binding,) = bindings(wrapped_by_a_kernel(Path.exists, deep))
    assert binding.fallback is False and binding.implementation.endswith("Path.exists")
    module = wrapped_by_a_kernel(None, deep)
    (binding,) = bindings(module)
    assert binding.fallback is True
    assert torch_reference(module, "torch_chunk_gated_delta_rule") is not None


def test_the_flag_of_older_versions_is_read() -> None:
    module = ModuleType("transformers.models.old.modeling_old")
    vars(module).update(is_fast_path_available=False, chunk_gated_delta_rule=Path.exists, causal_conv1d_fn=None)
    found = {binding.kernel: binding.fallback for binding in bindings(module)}
    assert found == {"chunk_gated_delta_rule": False, "causal_conv1d_fn": True}


def test_what_cannot_be_seen_is_a_warning_not_a_guess() -> None:
    module = ModuleType("transformers.models.new.modeling_new")

    def causal_conv1d_fn() -> None: ...

    module.causal_conv1d_fn = causal_conv1d_fn  # type: ignore[attr-defined]
    (binding,) = bindings(module)
    assert binding.fallback is None
    finding = binding_finding(binding, in_forward=True)
    assert finding.level == "warning" and "cannot be seen" in finding.detail and "make profile" in finding.mend


@pytest.mark.parametrize(("in_forward", "level"), [(True, "error"), (False, "warning")])
def test_torch_in_spite_of_a_kernel_that_can_be_imported(
    monkeypatch: pytest.MonkeyPatch, in_forward: bool, level: str
) -> None:
    """As in transformers 5.15 and 5.16, without a word."""
    monkeypatch.setattr(layers, "import_error", lambda module, functions: None)
    finding = binding_finding(Binding("f", "chunk_gated_delta_rule", "fla", "transformers.f", True), in_forward)
    assert finding.level == level and "calls torch, although fla can be imported" in finding.detail
    assert finding.mend == "pip install --upgrade 'transformers>=5.17,<6'"


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        (Layers(64, 48, True, True), "48 of 64 layers would run the torch fallback: about 1.6 times slower"),
        (Layers(64, 48, True, False), "48 of 64 layers would run the torch fallback: about 1.5 times slower"),
        (Layers(64, 48, False, True), "48 of 64 layers would run the torch fallback: about 1.1 times slower"),
        (Layers(32, 8, True, True), "8 of 32 layers would run the torch fallback: about 1.2 times slower"),
        (Layers(0, 0, True, True), "all linear-attention layers would run the torch fallback: about 1.6 times slower"),
    ],
)
def test_the_sentence_about_layers_in_torch(shape: Layers, sentence: str) -> None:
    finding = fallback_finding(shape, "a command", {})
    assert finding.level == "error" and finding.detail.startswith(sentence) and finding.mend == "a command"
    assert "estimated" in finding.cost and "measured on this GPU" not in finding.cost
    measured = fallback_finding(shape, "a command", {}, measured_us=54.3)
    assert measured.cost.endswith("measured on this GPU: torch takes 54.3 us a token there")


def test_the_sentence_where_nothing_is_missing() -> None:
    finding = fallback_finding(Layers(64, 48), "", {})
    assert finding.level == "ok" and finding.detail == "48 of 64 layers run the fused delta rule"


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_target_ranks_have_mixers_of_their_own_for_hybrids(architecture: str) -> None:
    assert has_own_mixers(modelling(architecture))
    assert not has_own_mixers(modelling("kimi_linear"))


@without_kernels
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_packing_in_the_fallback_is_tried(architecture: str) -> None:
    """5.17 drops the documents' bounds without a word; 5.24 raises."""
    says = leak_of_fallback(modelling(architecture))
    version = numbers(transformers.__version__)
    if version < (5, 18):
        assert "would leak into each other" in says
    elif version >= (5, 24):
        assert "refuses packed documents" in says
    else:
        assert "leak" in says or "refuses" in says


def test_packing_where_nothing_is_known_of_the_fallback() -> None:
    assert "not known to keep" in leak_of_fallback(None)


def test_packing_follows_the_kernels() -> None:
    needed = ["packed_attention", "packed_delta_rule"]
    well = packing_finding(dict.fromkeys(needed, WORKS), needed)
    assert well.level == "ok" and "stay apart in packed_attention and packed_delta_rule (tried here)" in well.detail
    for broken in (LEAKS, Failure("RuntimeError: no kernel image")):
        finding = packing_finding({"packed_attention": WORKS, "packed_delta_rule": broken}, needed)
        assert finding.level == "warning" and finding.detail.startswith("packed_delta_rule cannot be trusted")
        assert "right-padded rows, which never leak" in finding.detail and "15 %" in finding.cost
    untried = packing_finding(dict.fromkeys(needed, Failure("", untried=True)), needed)
    assert untried.level == "ok" and "not tried here" in untried.detail
    refused = packing_finding(dict.fromkeys(needed, WORKS), needed, "it is soft-capped", "a change")
    assert refused.level == "warning" and refused.mend == "a change"
    assert refused.detail == "it is soft-capped: documents run as right-padded rows, which never leak"


NOT_PACKED = [
    ({"attn_logit_softcapping": 50.0}, None, "has no soft cap, and the target's has one (attn_logit_softcapping 50.0)"),
    ({"layer_types": ["full_attention", "chunked_attention"]}, None, "that cannot be packed (chunked_attention)"),
    ({"layer_types": ["linear_attention"]}, "kimi_linear", "linear attention is of another kind"),
    ({"layer_types": ["linear_attention"]}, "olmo_hybrid", "linear attention is of another kind"),  # of the same names
]
PACKED = [
    ({}, None),
    ({"attn_logit_softcapping": None, "layer_types": ["full_attention", "sliding_attention"]}, None),
    ({"layer_types": ["linear_attention", "full_attention"]}, "qwen3_5"),
    ({"layer_types": ["linear_attention", "full_attention"]}, None),  # its code is not known
]


@pytest.mark.parametrize(("text", "architecture", "says"), NOT_PACKED)
def test_a_target_that_cannot_be_packed(config: Config, text: dict, architecture: str | None, says: str) -> None:
    code = modelling(architecture) if architecture else None
    reason, mend = never_packed(with_dtype(config, "bfloat16"), TargetFacts(text), code, (9, 0))
    assert says in reason and mend == ""


@pytest.mark.parametrize(("text", "architecture"), PACKED)
def test_a_target_that_can_be_packed(config: Config, text: dict, architecture: str | None) -> None:
    code = modelling(architecture) if architecture else None
    for dtype, capability in (("auto", (8, 0)), ("bfloat16", (9, 0)), ("float16", None)):
        assert never_packed(with_dtype(config, dtype), TargetFacts(text), code, capability) == ("", "")
    reason, mend = never_packed(with_dtype(config, "float32"), TargetFacts(text), code, (9, 0))
    assert "no fused kernel in float32" in reason and mend == "set target.dtype=bfloat16"
    reason, mend = never_packed(with_dtype(config, "auto"), TargetFacts(text), code, (7, 5))
    assert "needs compute capability 8.0, and this GPU has 7.5" in reason and mend == ""


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], outcome: Outcome) -> None:
    """As on a machine with a GPU, on which each trial ends like that."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(layers, "try_kernels", lambda names, *rest: dict.fromkeys(names, outcome))


@pytest.mark.parametrize(
    ("dtype", "capability", "text", "level"),
    [
        ("bfloat16", (9, 0), {}, "error"),
        ("float32", (9, 0), {}, "warning"),
        ("auto", (7, 5), {}, "warning"),
        ("auto", (9, 0), {"attn_logit_softcapping": 50.0}, "warning"),
    ],
)
def test_packed_attention_that_fails_is_an_error_only_where_the_run_uses_it(
    monkeypatch: pytest.MonkeyPatch,
    config: Config,
    dtype: str,
    capability: tuple[int, int],
    text: dict[str, Any],
    level: str,
) -> None:
    on_a_gpu(monkeypatch, capability, Failure("RuntimeError: FlashAttention only supports Ampere GPUs or newer."))
    findings = {f.name: f for f in kernel_findings(with_dtype(config, dtype), TargetFacts(text), {}, on_gpu=True)}
    finding = findings["kernel packed_attention"]
    assert finding.level == level and "only supports Ampere" in finding.detail
    assert ("torch" in finding.mend) == (level == "error")
    assert findings["packing"].level == "warning" and "right-padded rows" in findings["packing"].detail
    if level == "warning":
        assert finding.mend == "" and finding.cost.startswith("none, as documents run as rows: ")


def test_packing_is_not_said_of_gemma_2_though_the_kernel_works(
    monkeypatch: pytest.MonkeyPatch, config: Config
) -> None:
    on_a_gpu(monkeypatch, (9, 0), WORKS)
    facts = TargetFacts(target_config("gemma2").to_dict(), "transformers.models.gemma2.modeling_gemma2")
    findings = {f.name: f for f in kernel_findings(with_dtype(config, "auto"), facts, {}, on_gpu=True)}
    assert findings["kernel packed_attention"].level == "ok"
    assert findings["packing"].level == "warning" and "soft cap" in findings["packing"].detail
    well = kernel_findings(with_dtype(config, "auto"), TargetFacts(target_config("qwen3").to_dict()), {}, on_gpu=True)
    assert well[-1].level == "ok" and "(tried here)" in well[-1].detail


def hybrid_findings(
    monkeypatch: pytest.MonkeyPatch, config: Config, kind: str, *missing: str, **facts: Any
) -> dict[str, Finding]:
    """Of a tiny hybrid on a GPU on which every trial ends well, where these packages cannot be imported."""

    def installed(package: FusedPackage, level: Any = "error") -> Finding:
        bad = package.name in missing
        return Finding(package.name, level if bad else "ok", "made", package.install, package.cost if bad else "")

    on_a_gpu(monkeypatch, (9, 0), WORKS)
    monkeypatch.setattr(layers, "install_finding", installed)
    monkeypatch.setattr(layers, "half_installed_fla", lambda hybrid: None)
    code = f"transformers.models.{kind}.modeling_{kind}"
    text = target_config("hybrid").to_dict() | facts
    return {f.name: f for f in kernel_findings(with_dtype(config, "auto"), TargetFacts(text, code), {}, on_gpu=True)}


OWN_KERNELS = {"packed_attention", "packed_delta_rule", "packed_convolution", "heads_apart", "gated_norm"}


@pytest.mark.parametrize("kind", HYBRIDS)
def test_each_kernel_that_target_ranks_run_is_tried(monkeypatch: pytest.MonkeyPatch, config: Config, kind: str) -> None:
    found = hybrid_findings(monkeypatch, config, kind)
    tried = {name.removeprefix("kernel ") for name in found if name.startswith("kernel ")}
    assert tried - {"causal_conv1d_fn", "flash_attn_varlen_func"} == OWN_KERNELS
    assert found["linear attention"].detail == "6 of 8 layers run the fused delta rule"
    assert all(name in found["packing"].detail for name in OWN_KERNELS) and "(tried here)" in found["packing"].detail


@pytest.mark.parametrize("kind", HYBRIDS)
def test_without_fla_the_fallback_of_target_ranks_is_timed(
    monkeypatch: pytest.MonkeyPatch, config: Config, kind: str
) -> None:
    """In torch; it is no kernel, and gets no verdict. The kernels around it run in Triton all the same."""
    found = hybrid_findings(monkeypatch, config, kind, "fla")
    summary = found["linear attention"]
    assert summary.level == "error" and "6 of 8 layers would run the torch fallback: about " in summary.detail
    assert summary.cost.endswith(f"torch takes {6 * 900 / 4096:.1f} us a token there")
    assert "kernel packed_delta_rule" not in found and found["kernel gated_norm"].level == "ok"
    assert found["packing"].level == "warning"
    unknown = hybrid_findings(monkeypatch, config, kind, "fla", layer_types=None)["linear attention"]
    assert "about " in unknown.detail and "measured on this GPU" not in unknown.cost  # of how many layers is not known


def test_without_triton_target_ranks_cannot_run_a_hybrid(monkeypatch: pytest.MonkeyPatch, config: Config) -> None:
    """What they run around the delta rule is in Triton, and has no other form on a GPU."""
    found = hybrid_findings(monkeypatch, config, "qwen3_5", "triton", "fla")
    summary = found["linear attention"]
    assert summary.level == "error" and summary.detail.startswith("6 of 8 layers cannot run: ")
    assert "times slower" not in summary.detail and "triton" in summary.mend
    assert summary.cost == found["triton"].cost == "the target cannot run"
    assert {name for name in found if name.startswith("kernel ")} == {"kernel packed_attention"}


@without_kernels
@pytest.mark.parametrize(("missing", "timed"), [(["fla"], False), (["causal-conv1d"], True), ([], True)])
def test_a_hybrid_whose_own_code_runs_is_timed_with_its_kernel(
    monkeypatch: pytest.MonkeyPatch, config: Config, missing: list[str], timed: bool
) -> None:
    """transformers calls torch for it, though fla is said to be importable."""
    found = hybrid_findings(monkeypatch, config, "olmo_hybrid", *missing)
    summary = found["linear attention"]
    assert summary.level == "error" and "torch fallback" in summary.detail
    assert ("measured on this GPU" in summary.cost) == ("kernel chunk_gated_delta_rule" in found) == timed


def qwen3_6_27b() -> dict[str, Any]:
    return {
        "hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 24, "num_key_value_heads": 4,
        "head_dim": 256, "linear_num_value_heads": 48, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    }  # fmt: skip


def qwen3_next_80b_a3b() -> dict[str, Any]:
    """Its config is the default one of transformers."""
    text: dict[str, Any] = transformers.Qwen3NextConfig().to_dict()
    assert (text["hidden_size"], text["num_experts_per_tok"], text["linear_num_value_heads"]) == (2048, 10, 32)
    return text


def test_slowdown_where_it_was_measured() -> None:
    for text in (qwen3_6_27b(), {}):
        assert slowdown(text, 48 / 64, delta_rule=True, convolution=False) == 1.5
        assert slowdown(text, 48 / 64, delta_rule=True, convolution=True) == pytest.approx(1.61)
        assert slowdown(text, 48 / 64, delta_rule=False, convolution=False) == 1
        assert slowdown(text, 24 / 64, delta_rule=True, convolution=False) == 1.25


def test_slowdown_is_scaled_by_what_a_token_computes() -> None:
    text = qwen3_next_80b_a3b()
    # A layer of it has 68 million parameters for a token, of which 383 million were measured; and 32 of 48 heads.
    layer = 2048 * (3 * 512 * 11 + 2 * 16 * 128 + 3 * 32 * 128)
    measured = 5120 * (3 * 17408 + 2 * 16 * 128 + 3 * 48 * 128)
    assert slowdown(text, 36 / 48, True, False) == pytest.approx(1 + 0.5 * (32 / 48) * measured / layer)
    assert slowdown(text, 36 / 48, True, False) > 2.5
    half = qwen3_6_27b() | {"linear_num_value_heads": 24}
    assert 1.25 < slowdown(half, 48 / 64, True, False) < 1.3  # half the work for it, of a slightly smaller layer
    finding = fallback_finding(Layers(48, 36, True, False), "", text)
    assert finding.detail.startswith("36 of 48 layers would run the torch fallback: about 2.9 times slower")
