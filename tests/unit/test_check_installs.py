"""Installs that are broken for real, in a process of their own: each gives its own finding and its own mend.

The installed transformers imports them, as in a run. Another version is tested by running this file in its environment.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field

import pytest

from dflash_dist.check import Finding
from tests.tiny import make_chats, make_config, target_config

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("fla") is not None, reason="an fla is installed, which would stand in for broken ones"
)
COMPILER = shutil.which("gcc") or shutil.which("cc")
CHECK = """
import json, os, sys
import torch
from transformers import AutoConfig, GenerationMixin  # before the stand-in for triton, which torch would import
from dflash_dist import check
from dflash_dist.check import layers
from dflash_dist.check.kernels import Failure
from dflash_dist.config import load_config
config = load_config(sys.argv[1])
for packages, device in json.loads(sys.argv[2]):
    if os.fork():
        assert os.wait()[1] == 0
        continue
    sys.path.insert(0, packages)
    os.environ["CC"] = sys.executable  # stands in for a C compiler
    if device == "cuda":  # as on a machine with a GPU, on which no kernel can be tried
        torch.cuda.is_available = lambda: True
        layers.try_kernels = lambda names, *rest: {name: Failure("a test", untried=True) for name in names}
    with open(os.path.join(packages, "findings.json"), "w") as file:
        file.write(check.as_json(check.check(config)))
    sys.exit()
"""
TRITON = {"triton/__init__.py": "def jit(): ...\n"}
OPS = "def chunk_gated_delta_rule(q, k, v, **rest): ...\ndef fused_recurrent_gated_delta_rule(q, k, v, **rest): ...\n"
FLA = {"fla/__init__.py": "", "fla/ops/__init__.py": "", "fla/ops/gated_delta_rule/__init__.py": OPS}
REST_OF_FLA = {"fla/layers/__init__.py": ""}
CONV = {"causal_conv1d/__init__.py": "def causal_conv1d_fn(x, **rest): ...\ndef causal_conv1d_update(x, **rest): ...\n"}
WORKING = TRITON | FLA | CONV
REINSTALL = (
    "pip uninstall -y flash-linear-attention fla-core && pip install 'flash-linear-attention>=0.6.0' 'fla-core>=0.6.0'"
)
ONE_COMMAND = "pip install --force-reinstall --no-deps 'flash-linear-attention>=0.6.0' 'fla-core>=0.6.0'"
HALF_A_MODULE = {"fla/ops/gated_delta_rule/__init__.py": "def chunk_gated_delta_rule(): ..."}
FALLBACK = "6 of 8 layers would run the torch fallback: about "


def dist(name: str, version: str) -> dict[str, str]:
    """What an installer leaves of a package's version."""
    return {f"{name.replace('-', '_')}-{version}.dist-info/METADATA": f"Name: {name}\nVersion: {version}\n"}


@dataclass
class Broken:
    """An install, and what is to be said of it."""

    files: dict[str, str]
    name: str
    says: str
    mend: str
    level: str = "error"
    also: dict[str, str] = field(default_factory=dict)
    """More findings, and what they say."""


BROKEN = {
    "raises": Broken(
        WORKING | {"fla/__init__.py": "raise RuntimeError('0 active drivers ([])')"},
        "fla",
        "its import fails: RuntimeError: 0 active drivers ([])",
        REINSTALL,
        also={
            "linear attention": FALLBACK,
            "binding chunk_gated_delta_rule": "calls torch, as it could not import fla",
            "packing": "right-padded rows, which never leak",
        },
    ),
    "namespace": Broken(
        TRITON | CONV | REST_OF_FLA | dist("flash-linear-attention", "0.6.0") | dist("fla-core", "0.6.0"),
        "fla",
        "half installed: the package has no __init__.py",
        ONE_COMMAND + "  # both in one command",
        also={"linear attention": FALLBACK},
    ),
    "no fla-core": Broken(
        TRITON | CONV | REST_OF_FLA | dist("flash-linear-attention", "0.6.0"),
        "fla",
        "flash-linear-attention 0.6.0 is here without fla-core",
        ONE_COMMAND + "  # both in one command",
    ),
    "lacks a function": Broken(
        WORKING | dist("fla-core", "0.6.0") | HALF_A_MODULE,
        "fla",
        "fla/ops/gated_delta_rule/__init__.py, lacks a function: AttributeError",
        "pip install --force-reinstall --no-deps 'fla-core==0.6.0' 'flash-linear-attention==0.6.0'",
        also={"binding fused_recurrent_gated_delta_rule": "could not import fla"},
    ),
    "too old": Broken(
        WORKING | dist("fla-core", "0.2.1") | HALF_A_MODULE,
        "fla",
        "0.2.1, but at least 0.6.0 is needed: AttributeError",
        "pip install --upgrade 'flash-linear-attention>=0.6.0' 'fla-core>=0.6.0'",
    ),
    "old, but whole": Broken(
        WORKING | dist("fla-core", "0.5.2"),
        "fla",
        "0.5.2, but at least 0.6.0 is known to work",
        "pip install --upgrade 'flash-linear-attention>=0.6.0' 'fla-core>=0.6.0'",
        "warning",
        also={"linear attention": "6 of 8 layers run the fused delta rule"},
    ),
    "two versions": Broken(
        WORKING | dist("fla-core", "0.6.0") | dist("flash-linear-attention", "0.6.1"),
        "fla",
        "fla-core 0.6.0 beside flash-linear-attention 0.6.1",
        "pip install 'fla-core==0.6.1' 'flash-linear-attention==0.6.1'",
        "warning",
    ),
    "no triton": Broken(
        FLA | CONV | {"fla/ops/__init__.py": "import triton"},
        "fla",
        "it needs triton, which is not installed: ModuleNotFoundError: No module named 'triton'",
        "pip install 'triton>=3.3'",
        also={"triton": "not installed: ModuleNotFoundError", "linear attention": "6 of 8 layers cannot run: "},
    ),
    "no extension": Broken(
        WORKING | {"causal_conv1d/__init__.py": "import causal_conv1d_cuda\n"} | dist("causal-conv1d", "1.7.0"),
        "causal-conv1d",
        "its extension causal_conv1d_cuda is missing: ModuleNotFoundError: No module named 'causal_conv1d_cuda'",
        "pip install --no-build-isolation 'causal-conv1d>=1.7.0' --force-reinstall --no-deps  # needs nvcc",
        "warning",
    ),
    "no causal-conv1d": Broken(
        TRITON | FLA,
        "causal-conv1d",
        "not installed: ModuleNotFoundError: No module named 'causal_conv1d'",
        "pip install --no-build-isolation 'causal-conv1d>=1.7.0'  # needs nvcc",
        "warning",  # target ranks have a convolution of their own
        also={
            "linear attention": "6 of 8 layers run the fused delta rule",
            "binding causal_conv1d_fn": "could not import causal-conv1d",
        },
    ),
}  # fmt: skip


WELL = {
    "whole": WORKING | dist("fla-core", "0.6.0") | dist("causal-conv1d", "1.7.0"),
    "none on a CPU": {},
    "whole on a CPU": WORKING,
}
SYMBOL = "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_ib"
OTHER_TORCH = WORKING | dist("causal-conv1d", "1.7.0") | {"causal_conv1d/__init__.py": "import causal_conv1d_cuda\n"}


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Finding]]:
    """For each install by name the findings on a tiny Qwen3.5. A fresh process for each, forked behind slow imports."""
    folder = tmp_path_factory.mktemp("installs")
    installs = {name: case.files for name, case in BROKEN.items()} | WELL
    if COMPILER:
        installs["other torch"] = OTHER_TORCH
    for name, files in installs.items():
        (folder / name).mkdir()
        for path, text in files.items():
            (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / name / path).write_text(text, encoding="utf-8")
    if COMPILER:
        source = folder / "extension.c"
        source.write_text(f"void *{SYMBOL}(void);\nvoid *PyInit_causal_conv1d_cuda(void) {{ return {SYMBOL}(); }}\n")
        library = folder / "other torch" / f"causal_conv1d_cuda{sysconfig.get_config_var('EXT_SUFFIX')}"
        subprocess.run([COMPILER, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    target_config("hybrid").save_pretrained(folder / "target")
    config = make_config(folder, folder / "target", make_chats(folder / "chats.jsonl", rows=2))
    cases = json.dumps([(str(folder / name), "cpu" if name.endswith("CPU") else "cuda") for name in installs])
    command = [sys.executable, "-c", CHECK, str(config), cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    trees = {name: json.loads((folder / name / "findings.json").read_text())["findings"] for name in installs}
    return {name: {tree["name"]: Finding(**tree) for tree in rows} for name, rows in trees.items()}


@pytest.mark.parametrize("name", BROKEN)
def test_each_broken_install_has_its_finding_and_its_mend(findings: dict[str, dict[str, Finding]], name: str) -> None:
    case, found = BROKEN[name], findings[name]
    finding = found[case.name]
    assert finding.level == case.level and case.says in finding.detail, finding
    assert finding.mend == case.mend
    for other, says in case.also.items():
        assert says in found[other].detail, found[other]
    if FALLBACK in found["linear attention"].detail:
        assert found["linear attention"].detail.endswith("times slower (delta rule)")
    if "layers run" not in found["linear attention"].detail:
        assert found["linear attention"].level == "error" and found["linear attention"].mend == case.mend


def test_a_working_install_is_bound_and_all_is_well(findings: dict[str, dict[str, Finding]]) -> None:
    found = findings["whole"]
    assert not [finding for finding in found.values() if finding.level == "error"]
    bound = {name.removeprefix("binding "): f.detail for name, f in found.items() if name.startswith("binding ")}
    assert bound == {
        "chunk_gated_delta_rule": "fla.ops.gated_delta_rule.chunk_gated_delta_rule",
        "fused_recurrent_gated_delta_rule": "fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule",
        "causal_conv1d_fn": "causal_conv1d.causal_conv1d_fn",
        "causal_conv1d_update": "causal_conv1d.causal_conv1d_update",
    }
    assert found["fla"].detail == "0.6.0, imported"
    assert found["linear attention"].detail == "6 of 8 layers run the fused delta rule"


@pytest.mark.skipif(COMPILER is None, reason="no C compiler: an extension with a missing symbol cannot be made")
def test_an_extension_of_another_torch_is_to_be_built_again(findings: dict[str, dict[str, Finding]]) -> None:
    finding = findings["other torch"]["causal-conv1d"]
    assert finding.level == "warning" and f"undefined symbol: {SYMBOL}" in finding.detail
    assert "built for another torch or CUDA than torch " in finding.detail and "causal_conv1d_cuda" in finding.detail
    assert finding.mend.startswith("pip install --no-build-isolation") and "--no-cache-dir" in finding.mend
    assert finding.mend not in {case.mend for case in BROKEN.values()}


def test_each_kind_of_breakage_has_a_mend_of_its_own() -> None:
    kinds = ("raises", "namespace", "lacks a function", "too old", "no triton", "no causal-conv1d")
    assert len({BROKEN[kind].mend for kind in kinds}) == len(kinds)


def test_kernels_on_a_cpu_break_the_target(findings: dict[str, dict[str, Finding]]) -> None:
    finding = findings["whole on a CPU"]["triton"]
    assert finding.level == "error" and finding.mend == "pip uninstall triton" and "0 active drivers" in finding.detail


def test_without_kernels_a_cpu_runs_torch_in_rows(findings: dict[str, dict[str, Finding]]) -> None:
    found = findings["none on a CPU"]
    assert found["linear attention"] == Finding(
        "linear attention",
        "ok",
        "6 of 8 layers run in torch, as all does on a CPU; documents run as right-padded rows, which never leak",
    )
    assert not [finding for finding in found.values() if finding.level == "error"]
