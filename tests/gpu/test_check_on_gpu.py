"""The environment check on a real GPU: its trials of the real kernels, and what it says of broken ones."""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_dist.check import Finding, check, has_errors
from dflash_dist.check.gpus import read_nvml
from dflash_dist.check.kernels import Failure, try_kernels, verdict
from dflash_dist.check.layers import OWN_KERNELS
from dflash_dist.check.trials import KERNELS, Case, Measured, Shapes, make_case, measure
from dflash_dist.installed import import_error
from dflash_dist.target.packed import Pack, running
from tests.ranks.cli import dflash
from tests.tiny import make_chats, make_config, make_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: run `make test-gpu` on a GPU machine"),
]
MODELLING = "transformers.models.qwen3_5.modeling_qwen3_5"
QWEN3_8B = Shapes(num_attention_heads=32, num_key_value_heads=8, head_dim=128)
SLIDING = Shapes(num_attention_heads=16, num_key_value_heads=8, head_dim=256, sliding_window=1024)
NEEDS = {"packed_delta_rule": "fla.ops.gated_delta_rule"}
"""What an op is to run, without which it runs in torch."""
INSTALLED = [
    name
    for name, module in KERNELS.items()
    if import_error(module, (name,)) is None and import_error(NEEDS.get(name, module)) is None
]
PER_TOKEN = ("heads_apart", "gated_norm")
"""Kernels that look at no other token."""
BOUNDS = {"cu_seqlens": lambda x: x[[0, -1]], "seq_idx": torch.zeros_like}
"""What becomes of an argument that tells where documents lie, so that it tells of one only."""


def case_of(name: str) -> Case:
    return make_case(name, Shapes(sliding_window=300), MODELLING, torch.device("cuda", 0))


def kernel_of(name: str) -> Callable[..., Any]:
    kernel: Callable[..., Any] = getattr(importlib.import_module(KERNELS[name]), name)
    return kernel


@pytest.mark.parametrize("shapes", [Shapes(), QWEN3_8B, SLIDING], ids=["qwen3.6-27b", "qwen3-8b", "sliding"])
def test_installed_kernels_pass(shapes: Shapes, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints how long the trials take and what they measured."""
    start_s = time.monotonic()
    outcomes = try_kernels(INSTALLED, shapes, MODELLING, {})
    with capsys.disabled():
        print(f"\ntrials of {len(INSTALLED)} kernels: {time.monotonic() - start_s:.1f} s")
        for name, outcome in outcomes.items():
            print(f"{name}: {outcome}")
    for name, outcome in outcomes.items():
        assert isinstance(outcome, Measured), outcome
        assert outcome.error < 0.015 and outcome.leak < 0.015, (name, outcome)  # half of what is allowed
        assert verdict(name, outcome).level == "ok", (name, outcome)


@pytest.mark.parametrize("name", [name for name in INSTALLED if name not in PER_TOKEN])
def test_a_kernel_that_is_not_told_of_documents_leaks(name: str) -> None:
    kernel = kernel_of(name)

    def leaky(*inputs: Any, **named: Any) -> Any:
        if name.startswith("packed"):
            tokens = inputs[0].shape[0 if name == "packed_attention" else 1]
            with running(type("Decoder", (), {"config": None}), Pack.of(np.array([tokens]), torch.device("cuda", 0))):
                return kernel(*inputs, **named)
        if name == "flash_attn_varlen_func":
            query, key, value, bounds, _, _, _ = inputs
            tokens, whole = len(query), bounds[[0, -1]].contiguous()
            return kernel(query, key, value, whole, whole, tokens, tokens, **named)
        return kernel(*inputs, **{key: BOUNDS.get(key, lambda x: x)(value) for key, value in named.items()})

    with torch.inference_mode():
        finding = verdict(name, measure(case_of(name), leaky))
    assert finding.level == "error" and "lets packed documents see each other" in finding.detail


@pytest.mark.parametrize("name", INSTALLED)
def test_a_kernel_with_wrong_values_is_found(name: str) -> None:
    kernel = kernel_of(name)

    def off(*inputs: Any, **named: Any) -> Any:
        out = kernel(*inputs, **named)
        return (out[0] * 1.1, None) if isinstance(out, tuple) else out * 1.1

    with torch.inference_mode():
        finding = verdict(name, measure(case_of(name), off))
    assert finding.level == "error" and "gives other values than torch" in finding.detail


def test_the_attention_of_drafter_ranks_passes() -> None:
    """FlashAttention-4's where it is installed, else our own."""
    shapes = Shapes(num_attention_heads=8, num_key_value_heads=2, head_dim=128)
    (outcome,) = try_kernels(["drafter_attention"], shapes, None, {}).values()
    assert isinstance(outcome, Measured), outcome
    assert outcome.error < 0.015 and outcome.leak == 0.0, outcome
    assert verdict("drafter_attention", outcome).level == "ok", outcome


def with_folder(folder: Path) -> dict[str, str]:
    """The environment of a process that looks for packages in `folder` first."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


def test_a_kernel_that_breaks_the_device_is_named_and_this_process_goes_on(tmp_path: Path) -> None:
    breaking = "def causal_conv1d_fn(x, *a, **b):\n    x[0, 0][x[0, 0].long() + 10**6].sum().item()\n"
    (tmp_path / "causal_conv1d.py").write_text(breaking)
    names = ["causal_conv1d_fn", "packed_attention"]
    outcomes = try_kernels(names, Shapes(), MODELLING, with_folder(tmp_path))
    assert isinstance(outcomes["causal_conv1d_fn"], Failure) and not outcomes["causal_conv1d_fn"].untried
    assert outcomes["packed_attention"] == Failure("the trial of causal_conv1d_fn ended all", untried=True)
    assert torch.ones(4, device="cuda").sum().item() == 4


def test_memory_that_is_short_says_nothing_of_a_kernel(tmp_path: Path) -> None:
    (tmp_path / "causal_conv1d.py").write_text(
        "import torch\ndef causal_conv1d_fn(*a, **b): torch.empty(2**50, device='cuda')\n"
    )
    outcome = try_kernels(["causal_conv1d_fn"], Shapes(), MODELLING, with_folder(tmp_path))["causal_conv1d_fn"]
    assert isinstance(outcome, Failure) and outcome.untried and "OutOfMemoryError" in outcome.reason


def checked(folder: Path, text: dict[str, Any]) -> dict[str, Finding]:
    """What the command says of a target of which there is only the config."""
    (folder / "target").mkdir()
    (folder / "target" / "config.json").write_text(json.dumps(text))
    make_tokenizer(folder / "target")
    config = make_config(folder, folder / "target", make_chats(folder / "chats.jsonl", rows=2))
    done = dflash("check", "--config", str(config), "--json", "target.dtype=auto")
    assert done.returncode in (0, 1), done.stderr
    return {tree["name"]: Finding(**tree) for tree in json.loads(done.stdout)["findings"]}


def test_the_check_of_a_hybrid_target(tmp_path: Path) -> None:
    from transformers import Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        hidden_size=5120, intermediate_size=17408, num_hidden_layers=64, num_attention_heads=24, num_key_value_heads=4,
        head_dim=256, linear_num_value_heads=48, linear_num_key_heads=16,
    )  # fmt: skip
    findings = checked(tmp_path, config.to_dict())
    assert findings["target"].detail == "hybrid, with linear-attention layers: 48 of 64"
    summary = findings["linear attention"]
    if "chunk_gated_delta_rule" in INSTALLED:
        assert summary.level == "ok" and summary.detail == "48 of 64 layers run the fused delta rule"
        assert findings["binding chunk_gated_delta_rule"].detail.startswith("fla.")
        assert {findings[f"kernel {name}"].level for name in OWN_KERNELS} == {"ok"}, findings
        assert findings["packing"].level == "ok" and "tried here" in findings["packing"].detail
    else:
        sentence = "48 of 64 layers would run the torch fallback: about 1.5 times slower"
        assert summary.level == "error" and summary.detail.startswith(sentence) and summary.mend
        assert "measured on this GPU: torch takes" in summary.cost
        assert {findings[f"kernel {name}"].level for name in OWN_KERNELS[1:]} == {"ok"}, findings
        assert findings["packing"].level == "warning"


def test_the_check_of_a_dense_target_tries_attention_alone(tmp_path: Path) -> None:
    from transformers import Qwen3Config

    findings = checked(tmp_path, Qwen3Config(num_hidden_layers=8).to_dict())
    assert "linear attention" not in findings and findings["kernel packed_attention"].level == "ok"
    assert not {f"kernel {name}" for name in (*OWN_KERNELS, "causal_conv1d_fn")} & set(findings)
    assert findings["packing"].level == "ok" and findings["compiler"].level == "ok"


def test_a_run_without_packed_attention_is_not_asked_to_mend_it(tmp_path: Path) -> None:
    from transformers import Gemma2Config

    findings = checked(tmp_path, Gemma2Config(num_hidden_layers=8).to_dict())
    assert findings["packing"].level == "warning" and "soft cap" in findings["packing"].detail
    assert findings["kernel packed_attention"].level != "error"


def test_what_is_said_of_this_machine() -> None:
    findings = check(None)
    names = {finding.name for finding in findings}
    assert not has_errors(findings), findings
    assert {"gpu 0", "driver", "cuda", "nccl", "cores", "locked memory", "TRITON_CACHE_DIR"} <= names
    powers, pairs = read_nvml(torch.cuda.device_count())
    assert len(pairs) == torch.cuda.device_count() * (torch.cuda.device_count() - 1) // 2
    assert all(power.default_w > 50 for power in powers.values())
    assert ("gpu 0 power" in names) == (0 in powers)
    if torch.cuda.device_count() > 1:
        assert {"gpu links", "nccl transport", "/dev/shm"} <= names
