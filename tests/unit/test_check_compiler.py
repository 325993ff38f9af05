"""Whether torch.compile can work here: triton and a C compiler, for runs that compile."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from dflash_dist.check import Finding, check, compiler
from dflash_dist.check.compiler import compiler_finding, compiler_findings
from dflash_dist.config import Config, load_config
from tests.tiny import make_chats, make_config, make_target

TRITON = Finding("triton", "ok", "3.5.0, imported")
NO_TRITON = Finding("triton", "error", "not installed: ModuleNotFoundError", "pip install 'triton>=3.3'")
WAY_OUT = "target.compile=false"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_config(make_config(tmp_path, tmp_path, make_chats(tmp_path / "chats.jsonl", rows=1)))


def made(folder: Path, *names: str) -> dict[str, str]:
    """An environment whose PATH has these programs only."""
    for name in names:
        (folder / name).write_text("")
        (folder / name).chmod(0o755)
    return {"PATH": str(folder)}


@pytest.mark.parametrize(
    ("programs", "cc", "expected"),
    [
        (("gcc", "clang"), None, "gcc"),
        (("cc", "clang"), "", "clang"),
        (("cc",), None, "cc"),
        (("gcc", "icc"), "icc", "icc"),
        ((), None, "none of gcc, clang, cc is found"),
        (("gcc",), "icc", "CC is icc, which is not found"),
    ],
)
def test_the_c_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: tuple[str, ...], cc: str | None, expected: str
) -> None:
    monkeypatch.setenv("PATH", made(tmp_path, *programs)["PATH"])
    finding = compiler_finding(TRITON, {} if cc is None else {"CC": cc}, WAY_OUT)
    if expected in programs:
        assert finding.level == "ok" and finding.detail.endswith(f"with {tmp_path / expected}")
    else:
        assert finding.level == "error" and expected in finding.detail
        assert "C compiler" in finding.mend and finding.mend.endswith("; or set target.compile=false")


def test_a_missing_triton_is_named_with_its_mend() -> None:
    finding = compiler_finding(NO_TRITON, {"CC": sys.executable}, WAY_OUT)
    assert finding.level == "error" and finding.cost
    assert finding.detail == "torch.compile cannot work: triton: not installed: ModuleNotFoundError"
    assert finding.mend == "pip install 'triton>=3.3'; or set target.compile=false"
    both = compiler_finding(NO_TRITON, {"CC": "no-such-compiler"}, WAY_OUT)
    assert "ModuleNotFoundError; CC is no-such-compiler" in both.detail and "'triton>=3.3' and unset CC" in both.mend


def test_nothing_is_said_on_a_cpu(config: Config) -> None:
    assert compiler_findings(config, on_gpu=False) == []


@pytest.mark.parametrize(
    ("overrides", "way_out"),
    [
        ([], "target.compile=false and train.attention=dense"),
        (["target.compile=false"], "train.attention=dense"),
        (["train.attention=dense"], "target.compile=false"),
        (["target.compile=false", "train.attention=dense"], None),
    ],
)
def test_it_matters_to_runs_that_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], way_out: str | None
) -> None:
    path = make_config(tmp_path, tmp_path, make_chats(tmp_path / "chats.jsonl", rows=1))
    monkeypatch.setattr(compiler, "install_finding", lambda package: NO_TRITON)
    findings = compiler_findings(load_config(path, overrides), on_gpu=True)
    assert [f.mend.partition("; or set ")[2] for f in findings] == ([way_out] if way_out else [])


@pytest.mark.skipif(
    torch.cuda.is_available() or importlib.util.find_spec("triton") is not None, reason="needs to be without triton"
)
def test_a_dense_target_on_cuda_is_refused_without_triton(tmp_path: Path) -> None:
    target = make_target("qwen3", tmp_path / "target")
    config = load_config(make_config(tmp_path, target, make_chats(tmp_path / "chats.jsonl", rows=2)))
    assert "compiler" not in {finding.name for finding in check(config)}
    (finding,) = compiler_findings(config, on_gpu=True)
    assert finding.level == "error" and "triton: not installed" in finding.detail
