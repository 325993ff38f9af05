"""The environment check against real packages, and against broken ones that are made and imported for real."""

import importlib
import importlib.metadata
import json
import os
import re
import socket
import sys
from pathlib import Path

import pytest
import torch

from dflash_dist.check import Finding, as_json, as_text, check, environment, has_errors, host, layers, versions
from dflash_dist.check.kernels import Failure
from dflash_dist.config import Config, DataConfig, ObjectiveConfig, ScheduleConfig, TargetConfig

HYBRID = {"text_config": {"layer_types": ["linear_attention", "full_attention"]}}
DENSE = {"layer_types": ["full_attention", "full_attention"]}
FLA_OPS = "def chunk_gated_delta_rule(): ...\ndef fused_recurrent_gated_delta_rule(): ...\n"
WORKING = {
    "triton/__init__.py": "def jit(): ...\n",
    "fla/__init__.py": "",
    "fla/ops/__init__.py": "",
    "fla/ops/gated_delta_rule.py": FLA_OPS,
    "causal_conv1d/__init__.py": "def causal_conv1d_fn(): ...\ndef causal_conv1d_update(): ...\n",
}


def make_config(folder: Path, target: dict | None = None, model: str | None = None, source: str = "a.jsonl") -> Config:
    if target is not None:
        (folder / "target").mkdir(parents=True)
        (folder / "target" / "config.json").write_text(json.dumps(target))
    return Config(
        target=TargetConfig(model=model or str(folder / "target")),
        data=DataConfig(sources=(source,)),
        schedule=ScheduleConfig(token_budget=64, batches_per_step=1),
        objective=ObjectiveConfig(max_anchors_per_batch=8),
        cache_dir=str(folder / "cache"),
        runs_dir=str(folder / "runs"),
    )


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts kernel packages of the given files first on the path, in place of any that are installed."""

    def forget() -> dict:
        names = [name for name in sys.modules if name.split(".")[0] in ("triton", "fla", "causal_conv1d")]
        importlib.invalidate_caches()
        return {name: sys.modules.pop(name) for name in names}

    def install(files: dict[str, str]) -> None:
        for name, text in files.items():
            path = tmp_path / "packages" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        forget()

    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    installed = forget()
    yield install
    forget()
    sys.modules.update(installed)


@pytest.fixture(autouse=True)
def no_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are tried in tests of their own."""
    monkeypatch.setattr(layers, "try_kernels", lambda names, *rest: {n: Failure("a test", untried=True) for n in names})


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_this_environment_has_no_errors() -> None:
    findings = by_name(check(None))
    assert not has_errors(list(findings.values()))
    assert findings["torch"].detail == importlib.metadata.version("torch")
    assert findings["python"].detail.startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")


def test_old_and_missing_packages_are_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (("numpy", "999.1", "token stores"), ("no-such-package", "1.2", "this test"))
    monkeypatch.setattr(versions, "PACKAGES", rows)
    monkeypatch.setattr(versions, "PYTHON_MINIMUM", "3.99")
    findings = by_name(check(None))
    assert findings["numpy"].level == "error" and "token stores needs at least 999.1" in findings["numpy"].detail
    assert findings["no-such-package"] == Finding(
        "no-such-package",
        "error",
        "not installed; this test needs at least 1.2",
        "pip install 'no-such-package>=1.2'",
    )
    assert findings["python"].level == "error" and "3.99" in findings["python"].detail


@pytest.mark.parametrize(
    ("version", "numbers"), [("2.13.0+cpu", (2, 13, 0)), ("5.9", (5, 9)), ("2.14.0a0+git12", (2, 14, 0))]
)
def test_versions_compare_as_numbers(version: str, numbers: tuple[int, ...]) -> None:
    assert versions.numbers(version) == numbers


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (HYBRID, "hybrid, with"),
        (HYBRID["text_config"], "hybrid, with"),
        ({"linear_num_value_heads": 4}, "hybrid, with"),
        (DENSE, "no linear-attention"),
        ({"hidden_size": 8}, "no linear-attention"),
    ],
)
def test_target_kind_is_read_from_its_config(tmp_path: Path, tree: dict, expected: str) -> None:
    assert expected in by_name(check(make_config(tmp_path, tree)))["target"].detail


def test_a_hub_target_that_is_not_here_yet_is_a_warning(tmp_path: Path) -> None:
    finding = by_name(check(make_config(tmp_path, model="nobody/no-such-model")))["target"]
    assert finding.level == "warning" and "is unknown" in finding.detail and "prepare" in finding.mend


@pytest.mark.parametrize("model", ["./nowhere", "~nobody/model", "a/b/c", "package:../x", "package:/x", "package: "])
def test_a_target_that_cannot_be_is_an_error(tmp_path: Path, model: str) -> None:
    finding = by_name(check(make_config(tmp_path, model=model)))["target"]
    assert finding.level == "error" and model in finding.detail and "target.model" in finding.mend


@pytest.mark.parametrize("text", ["{", "", "[]", "[[1, 2]]", "3", "null", "[" * 100_000])
def test_a_target_whose_config_is_no_json_object(tmp_path: Path, text: str) -> None:
    config = make_config(tmp_path, DENSE)
    (tmp_path / "target" / "config.json").write_text(text)
    finding = by_name(check(config))["target"]
    assert finding.level == "error" and "is no JSON object" in finding.detail


def test_a_target_whose_config_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tmp_path, DENSE)
    read = Path.read_text

    def closed(path: Path, **named: str) -> str:
        if path.name == "config.json":
            raise PermissionError(13, "Permission denied")
        return read(path, **named)

    monkeypatch.setattr(Path, "read_text", closed)
    finding = by_name(check(config))["target"]
    assert finding.level == "error" and finding.detail.endswith("config.json cannot be read: Permission denied")


def test_target_kind_of_a_converted_package(tmp_path: Path) -> None:
    config = make_config(tmp_path, model="package:some-model")
    assert "is unknown" in by_name(check(config))["target"].detail
    folder = tmp_path / "cache" / "targets" / "some-model-1.0"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(HYBRID))
    assert "hybrid" in by_name(check(config))["target"].detail


def test_kernels_of_a_hybrid_on_cuda(tmp_path: Path, cuda: None, install) -> None:
    config = make_config(tmp_path, HYBRID)
    install(WORKING)
    findings = by_name(check(config))
    assert {findings[name].level for name in ("triton", "fla", "causal-conv1d")} == {"ok"}

    install({"causal_conv1d/__init__.py": "raise ImportError('undefined symbol: _ZN3c10')\n"})
    install({"fla/ops/gated_delta_rule.py": "def chunk_gated_delta_rule(): ...\n"})
    findings = by_name(check(config))
    conv, fla = findings["causal-conv1d"], findings["fla"]
    assert conv.level == fla.level == "error"
    assert "ImportError: undefined symbol: _ZN3c10" in conv.detail and "every linear-attention layer" in conv.cost
    assert "AttributeError" in fla.detail and "fused_recurrent_gated_delta_rule" in fla.detail
    assert conv.mend.startswith("pip install --no-build-isolation 'causal-conv1d>=1.7.0'")
    assert "flash-linear-attention>=0.6.0" in fla.mend
    summary = findings["linear attention"]
    assert summary.level == "error" and summary.mend == fla.mend
    assert "1 of 2 layers would run the torch fallback: about 1.4 times slower" in summary.detail


@pytest.mark.parametrize(("target", "level"), [(HYBRID, "error"), (None, "warning"), (DENSE, None)])
def test_missing_kernels_matter_as_far_as_the_target_needs_them(
    tmp_path: Path, cuda: None, install, target: dict | None, level: str | None
) -> None:
    install(WORKING | {"causal_conv1d/__init__.py": "raise ImportError('broken')\n"})
    finding = by_name(check(make_config(tmp_path, target))).get("causal-conv1d")
    assert (finding.level if finding else None) == level


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
@pytest.mark.parametrize(("target", "level"), [(HYBRID, "error"), (None, "warning"), (DENSE, None)])
def test_triton_without_a_cuda_device(tmp_path: Path, install, target: dict | None, level: str | None) -> None:
    config = make_config(tmp_path, target)
    install(WORKING)
    finding = by_name(check(config)).get("triton")
    assert (finding.level if finding else None) == level
    assert finding is None or finding.mend == "pip uninstall triton"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_fla_alone_without_a_cuda_device_does_no_harm(tmp_path: Path, install) -> None:
    install({"triton/__init__.py": "raise ImportError\n", "fla/__init__.py": ""})
    assert not has_errors(check(make_config(tmp_path, HYBRID)))


@pytest.mark.parametrize(("target", "level"), [(HYBRID, "error"), (None, "error"), (DENSE, "warning")])
def test_half_installed_fla(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install, target: dict | None, level: str
) -> None:
    """A namespace package loses to a regular one, so an installed fla has to be hidden."""
    install({"fla/ops/gated_delta_rule.py": FLA_OPS})
    hidden = [p for p in sys.path if not (Path(p or ".") / "fla" / "__init__.py").exists()]
    monkeypatch.setattr(sys, "path", hidden)
    finding = by_name(check(make_config(tmp_path, target)))["fla"]
    assert finding.level == level and "half installed" in finding.detail and "--force-reinstall" in finding.mend
    assert finding.cost.startswith("none for this target") == (target is DENSE)


def test_embedded_packages_that_are_missing(tmp_path: Path) -> None:
    findings = by_name(check(make_config(tmp_path, model="package:no-such-llm", source="package:no-such-data")))
    assert findings["target no-such-llm"].level == findings["data no-such-data"].level == "error"
    assert "no-such-llm" in findings["target no-such-llm"].detail
    assert "pip install no-such-data" in findings["data no-such-data"].mend


@pytest.mark.parametrize("name", ["a.b", "../x", "/x", "..", "a b", ""])
def test_names_that_no_package_has(tmp_path: Path, name: str) -> None:
    assert by_name(check(make_config(tmp_path, DENSE, source=f"package:{name}")))[f"data {name}"].level == "error"
    found = by_name(check(make_config(tmp_path / "other", model=f"package:{name}")))
    assert found[f"target {name}"].level == "error"


def test_a_package_whose_import_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install) -> None:
    """It is installed, by what pip left of it, and yet broken."""
    install({"made_up.py": "raise OSError('libmade.so: cannot open')\n"})
    monkeypatch.setattr(versions, "PACKAGES", (("made_up", "1.2", "this test"),))
    monkeypatch.setattr(versions, "version_of", lambda name: "1.3")
    finding = by_name(check(None))["made_up"]
    assert finding.level == "error" and finding.detail == "1.3, but its import fails: OSError: libmade.so: cannot open"
    assert finding.mend == "pip install --force-reinstall 'made_up>=1.2'"


def test_embedded_packages_that_are_there(tmp_path: Path) -> None:
    findings = by_name(check(make_config(tmp_path, DENSE, source="package:numpy")))
    assert findings["data numpy"].level == "ok"


def test_disk_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tmp_path, DENSE)
    monkeypatch.setattr(host, "FREE_GIB_WARNING", 0)
    assert re.fullmatch(r"[0-9.]+ GiB free", by_name(check(config))["cache_dir"].detail)
    monkeypatch.setattr(host, "FREE_GIB_WARNING", 10**9)
    assert by_name(check(config))["cache_dir"].level == "warning"
    monkeypatch.setattr(host, "FREE_GIB_ERROR", 10**8)
    finding = by_name(check(config))["runs_dir"]
    assert finding.level == "error" and "runs_dir" in finding.mend
    (tmp_path / "runs").write_text("a file")
    assert "cannot be written" in by_name(check(config))["runs_dir"].detail


def test_environment_holds_facts_but_no_names_or_paths(tmp_path: Path) -> None:
    error = Finding(
        "fla", "error", "ImportError: /opt/site/fla/x.so: undefined symbol; see https://a.b/c/d or 1/2 /x/y"
    )
    facts = environment(make_config(tmp_path, DENSE), [error])
    text = json.dumps(facts)
    assert facts["versions"]["torch"] == importlib.metadata.version("torch")
    assert facts["host"]["cores"] == os.cpu_count() and facts["host"]["memory_gib"] > 0
    assert facts["findings"][0]["detail"] == "ImportError: .../x.so: undefined symbol; see https://a.b/c/d or 1/2 .../y"
    assert str(tmp_path) not in text
    assert f'"{socket.gethostname()}"' not in text
    fresh = environment(make_config(tmp_path / "fresh", DENSE))
    assert [f["name"] for f in fresh["findings"]][:2] == ["python", "torch"]
    assert str(tmp_path) not in json.dumps(fresh)


def test_findings_as_text_and_json() -> None:
    findings = [Finding("torch", "ok", "2.13.0"), Finding("fla", "error", "not there", "pip install fla", "time")]
    assert as_text(findings).splitlines() == [
        "ok       torch  2.13.0",
        "error    fla    not there",
        "                cost: time",
        "                mend: pip install fla",
        "2 checks: 1 errors, 0 warnings",
    ]
    tree = json.loads(as_json(findings))
    assert tree["ok"] is False
    assert tree["findings"][1]["mend"] == "pip install fla" and tree["findings"][1]["cost"] == "time"
    assert json.loads(as_json(findings[:1]))["ok"] is True
