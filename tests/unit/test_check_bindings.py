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
import transformers

from dflash_dist.check import layers
from dflash_dist.check.bindings import NAMES, Binding, bindings, torch_reference
from dflash_dist.check.kernels import Failure
from dflash_dist.check.layers import (
    Layers,
    binding_finding,
    fallback_finding,
    has_own_mixers,
    leak_of_fallback,
    packing_finding,
)
from dflash_dist.check.trials import Measured
from dflash_dist.check.versions import numbers
from dflash_dist.config import Config, load_config
from tests.tiny import make_chats, make_config

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
    finding = fallback_finding(shape, "a command")
    assert finding.level == "error" and finding.detail.startswith(sentence) and finding.mend == "a command"
    assert "estimated" in finding.cost and "measured on this GPU" not in finding.cost
    measured = fallback_finding(shape, "a command", measured_us=54.3)
    assert measured.cost.endswith("measured on this GPU: 54 us a token more")


def test_the_sentence_where_nothing_is_missing() -> None:
    finding = fallback_finding(Layers(64, 48), "")
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


def test_packing_follows_the_kernels(config: Config) -> None:
    needed = ["varlen_attn", "chunk_gated_delta_rule"]
    config = with_dtype(config, "bfloat16")
    well = packing_finding(config, dict.fromkeys(needed, WORKS), needed)
    assert well.level == "ok" and "stay apart in varlen_attn and chunk_gated_delta_rule (tried here)" in well.detail
    for broken in (LEAKS, Failure("RuntimeError: no kernel image")):
        finding = packing_finding(config, {"varlen_attn": WORKS, "chunk_gated_delta_rule": broken}, needed)
        assert finding.level == "warning" and finding.detail.startswith("chunk_gated_delta_rule cannot be trusted")
        assert "right-padded rows, which never leak" in finding.detail and "15 %" in finding.cost
    untried = packing_finding(config, dict.fromkeys(needed, Failure("", untried=True)), needed)
    assert untried.level == "ok" and "not tried here" in untried.detail
    whole = with_dtype(config, "float32")
    finding = packing_finding(whole, dict.fromkeys(needed, WORKS), needed)
    assert finding.level == "warning" and finding.mend == "set target.dtype=bfloat16"
