"""The check looks at the device that `train` will use, which is not always the one that is there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dflash_dist import check as package
from dflash_dist.check import Finding, check, gpus, layers
from dflash_dist.check.config import check_config
from dflash_dist.check.gpus import device_type
from dflash_dist.cli import main
from dflash_dist.config import Config, load_config
from dflash_dist.errors import UserError
from dflash_dist.topology import check_devices, parse_topology
from dflash_dist.train import launch
from tests.command import run_here
from tests.tiny import make_chats, make_config, make_target

GIB = 2**30
OF_A_GPU = {"driver", "cuda", "nccl", "pynvml", "cores", "locked memory", "compiler", "packing", "TRITON_CACHE_DIR"}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target("hybrid", tmp_path_factory.mktemp("target"))


@pytest.fixture
def path(hybrid: Path, tmp_path: Path) -> Path:
    return make_config(tmp_path, hybrid, make_chats(tmp_path / "chats.jsonl", rows=20))


@pytest.fixture
def config(path: Path) -> Config:
    return load_config(path)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch sees them; nothing can run on them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    card = SimpleNamespace(name="a GPU", total_memory=80 * GIB, major=8, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (77 * GIB, 80 * GIB))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


@pytest.mark.parametrize("device", ["cpu", "cuda", "auto"])
@pytest.mark.parametrize("gpus_here", [0, 2])
def test_it_is_the_device_that_train_takes(monkeypatch: pytest.MonkeyPatch, device: str, gpus_here: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus_here > 0)
    try:
        taken = check_devices(parse_topology("x1"), gpus_here, device)
    except UserError:
        taken = None
    assert device_type(device) == taken


def test_a_cpu_run_on_a_gpu_machine(monkeypatch: pytest.MonkeyPatch, two_gpus: None, config: Config) -> None:
    monkeypatch.setattr(layers, "try_kernels", lambda *rest: pytest.fail("no kernel matters to it"))
    monkeypatch.setattr(layers, "import_error", lambda *rest: None)  # all is installed
    found = by_name([*check(config, "cpu"), *check_config(config, "cpu")])
    assert found["gpu"].level == "ok" and found["gpu"].detail.startswith("2 here, but --device is cpu: ranks run on")
    assert not OF_A_GPU & set(found) and not [name for name in found if name.startswith("kernel ")]
    assert "linear attention" in found or "triton" in found
    for role in ("target memory", "drafter memory"):
        assert "of 77.0 GiB free" not in found[role].detail
        assert "of 77.0 GiB free" in by_name(check_config(config, "cuda"))[role].detail


def test_kernels_that_transformers_takes_on_the_cpu_of_a_gpu_machine(
    monkeypatch: pytest.MonkeyPatch, two_gpus: None, config: Config
) -> None:
    monkeypatch.setattr("dflash_dist.check.installs.import_error", lambda *rest: None)
    finding = by_name(check(config, "cpu"))["triton"]
    assert finding.level == "error" and "ranks run on the CPU" in finding.detail and "no CUDA" not in finding.detail
    assert finding.mend == "--device cuda, or: pip uninstall triton"


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_a_gpu_run_on_a_gpu_machine(
    monkeypatch: pytest.MonkeyPatch, two_gpus: None, config: Config, device: str
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(package, "gpu_findings", lambda device: [])
    monkeypatch.setattr(package, "kernel_findings", lambda *rest, on_gpu: asked.append(on_gpu) or [])
    found = by_name(check(config, device))
    assert asked == [True] and {"compiler", "cores", "TRITON_CACHE_DIR"} <= set(found)


def test_a_gpu_run_on_a_machine_without_one(no_gpu: None, config: Config) -> None:
    found = by_name([*check(config, "cuda"), *check_config(config, "cuda")])
    finding = found["gpu"]
    assert finding.level == "error" and finding.detail == "--device is cuda, but no CUDA device"
    assert "--device cpu" in finding.mend and finding.cost == "no rank can start"
    assert not OF_A_GPU & set(found) and "linear attention" not in found  # of the CPU nothing is asked
    assert "drafter" in found and not [name for name in found if name.endswith("memory")]
    assert by_name(check(config, "cpu"))["gpu"].level == by_name(check(config))["gpu"].level == "ok"


def test_a_driver_that_torch_cannot_use_is_the_reason(monkeypatch: pytest.MonkeyPatch, no_gpu: None) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "driver_version", lambda: "570.133.20")
    monkeypatch.setattr(torch.version, "cuda", None)
    levels = {device: by_name(check(None, device))["gpu"] for device in ("cuda", "auto")}
    assert levels["auto"].level == "warning" and levels["cuda"].level == "error"
    assert "570.133.20" in levels["cuda"].detail and "built without CUDA" in levels["cuda"].detail
    assert levels["cuda"].mend == "install a CUDA build of torch; see pytorch.org, or give --device cpu"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_train_checks_the_device_that_it_takes(
    monkeypatch: pytest.MonkeyPatch, two_gpus: None, path: Path, device: str
) -> None:
    checked: list[str] = []

    def refuse(config: Config, device: str) -> list[Finding]:
        checked.append(device)
        return [Finding("made", "error", "a test", "none")]

    monkeypatch.setattr(launch, "check", refuse)
    arguments = ["train", "--config", str(path), "--topo", "1-1", "--run", "run", "--device", device]
    monkeypatch.setattr(sys, "argv", ["dflash-dist", *arguments])
    for variable in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):  # which it would leave behind
        monkeypatch.setenv(variable, str(path.parent))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and checked == [device]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_the_command_takes_the_device(path: Path) -> None:
    for device, code in (("cpu", 0), ("cuda", 1), ("auto", 0)):
        ended, out, err = run_here("check", "--config", str(path), "--device", device, "--json")
        assert ended == code, out + err
        levels = {row["name"]: row["level"] for row in json.loads(out)["findings"]}
        assert levels["gpu"] == ("error" if device == "cuda" else "ok")
    ended, _, err = run_here("check", "--device", "gpu")
    assert ended == 2 and "--device is 'gpu', but must be cpu, cuda or auto" in err
