"""The verdicts on a machine's GPUs, links, limits, cores, disk and caches, from figures; and those of this machine."""

from __future__ import annotations

import ast
import itertools
import os
import resource
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dflash_dist.check import Finding, check, gpus, has_errors, host
from dflash_dist.check.config import drafter_here, run_disk_finding
from dflash_dist.check.gpus import (
    Pair,
    Power,
    driver_finding,
    link_finding,
    power_finding,
    shm_finding,
    transport,
    transport_finding,
)
from dflash_dist.check.host import (
    cache_finding,
    cache_folders,
    cores_finding,
    disk_finding,
    memlock_finding,
    not_kept,
    open_files_finding,
    quota_cores,
)
from dflash_dist.config import load_config
from dflash_dist.train.memory import drafter_parameters
from tests.tiny import make_chats, make_config, make_target

GIB = 2**30
UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("driver", "cuda", "level"),
    [
        ("580.95.05", "13.0", "ok"),
        ("570.133.20", "13.0", "error"),
        ("570.133.20", "12.8", "ok"),
        ("470.57", "12.6", "error"),
        (None, "13.0", "warning"),
        ("580.95.05", "99.1", "ok"),  # not known here: nothing is said of it
    ],
)
def test_driver(driver: str | None, cuda: str, level: str) -> None:
    finding = driver_finding(driver, cuda)
    assert finding.level == level and bool(finding.mend) == (level != "ok")
    if level == "error":
        assert cuda in finding.detail and str(driver) in finding.detail


@pytest.mark.parametrize(
    ("power", "level", "says", "mend"),
    [
        (Power(700, 700, 0x1), "ok", "700 W of 700 W", ""),
        (Power(700, 700, 0x4), "ok", "700 W of 700 W", ""),
        (Power(450, 700, 0), "warning", "capped at 450 W of 700 W", "sudo nvidia-smi -i 3 -pl 700"),
        (Power(700, 700, 0x2), "warning", "application clocks", "sudo nvidia-smi -i 3 -rac; sudo nvidia-smi -i 3 -rgc"),
        (Power(700, 700, 0x48), "warning", "hardware slowdown, thermal slowdown by hardware", "nvidia-smi -i 3 -q"),
        (Power(700, 700, 0x80), "warning", "power brake", "nvidia-smi -i 3 -q"),
    ],
)  # fmt: skip
def test_power(power: Power, level: str, says: str, mend: str) -> None:
    finding = power_finding(3, power)
    assert finding.name == "gpu 3 power" and finding.level == level
    assert says in finding.detail and finding.mend.startswith(mend) and bool(finding.mend) == bool(mend)


@pytest.mark.parametrize(
    ("pair", "environment", "expected"),
    [
        (Pair(0, 1, True, "NVLink"), {}, "P2P over NVLink"),
        (Pair(0, 1, True, "PCIe"), {}, "P2P over PCIe"),
        (Pair(0, 1, True, "unknown"), {}, "P2P"),
        (Pair(0, 1, True, "PCIe across CPUs"), {}, "SHM"),
        (Pair(0, 1, True, "PCIe across CPUs"), {"NCCL_P2P_LEVEL": "SYS"}, "P2P over PCIe across CPUs"),
        (Pair(0, 1, True, "PCIe across CPUs"), {"NCCL_P2P_LEVEL": "4"}, "P2P over PCIe across CPUs"),
        (Pair(0, 1, True, "PCIe across CPUs"), {"NCCL_P2P_LEVEL": "PHB"}, "SHM"),
        (Pair(0, 1, True, "PCIe"), {"NCCL_P2P_LEVEL": "NVL"}, "SHM"),
        (Pair(0, 1, True, "NVLink"), {"NCCL_P2P_LEVEL": "NVL"}, "P2P over NVLink"),
        (Pair(0, 1, True, "NVLink"), {"NCCL_P2P_LEVEL": "LOC"}, "SHM"),
        (Pair(0, 1, True, "unknown"), {"NCCL_P2P_LEVEL": "0"}, "SHM"),
        (Pair(0, 1, True, "unknown"), {"NCCL_P2P_LEVEL": "PIX"}, "P2P"),
        (Pair(0, 1, True, "PCIe", "PIX"), {"NCCL_P2P_LEVEL": "PIX"}, "P2P over PCIe"),
        (Pair(0, 1, True, "PCIe", "PXB"), {"NCCL_P2P_LEVEL": "1"}, "SHM"),
        (Pair(0, 1, True, "PCIe", "PXB"), {"NCCL_P2P_LEVEL": "PXB"}, "P2P over PCIe"),
        (Pair(0, 1, True, "PCIe", "PHB"), {"NCCL_P2P_LEVEL": "PXB"}, "SHM"),
        (Pair(0, 1, True, "PCIe"), {"NCCL_P2P_LEVEL": "nonsense"}, "P2P over PCIe"),
        (Pair(0, 1, False, "PCIe"), {}, "SHM"),
        (Pair(0, 1, True, "NVLink"), {"NCCL_P2P_DISABLE": "1"}, "SHM"),
        (Pair(0, 1, False, "PCIe"), {"NCCL_SHM_DISABLE": "1"}, "NET"),
    ],
)
def test_transport(pair: Pair, environment: dict[str, str], expected: str) -> None:
    assert transport(pair, 16 * GIB, environment).split(" (")[0] == expected
    finding = transport_finding([pair], 16 * GIB, environment)
    assert finding.level == ("ok" if expected.startswith("P2P") else "warning")
    assert f"expected transport: {expected}" in finding.detail and "not observed" in finding.detail
    assert bool(finding.mend) == (finding.level != "ok")
    if "NCCL_P2P_DISABLE" in environment:
        assert finding.mend == "unset NCCL_P2P_DISABLE"


def test_a_level_that_rules_out_p2p_is_to_be_unset_where_that_helps() -> None:
    level = {"NCCL_P2P_LEVEL": "NVL"}
    assert transport_finding([Pair(0, 1, True, "PCIe")], 16 * GIB, level).mend == "unset NCCL_P2P_LEVEL"
    far = [Pair(0, 1, True, "PCIe across CPUs")]
    assert "NCCL_P2P_LEVEL=SYS allows P2P across CPUs" in transport_finding(far, 16 * GIB, level).mend
    mixed = [*far, Pair(0, 2, False, "PCIe")]  # unset, it would take P2P from the first two
    assert "unset" not in transport_finding(mixed, 16 * GIB, {"NCCL_P2P_LEVEL": "SYS"}).mend


def test_without_shared_memory_messages_take_the_network() -> None:
    assert transport(Pair(0, 1, False, "PCIe"), 64 * 2**20, {}).startswith("NET")
    small = shm_finding(64 * 2**20, 60 * 2**20)
    assert small.level == "warning" and "--shm-size" in small.mend and small.cost
    assert shm_finding(24 * GIB, 23 * GIB).level == "ok"


def test_links_are_told_by_kind() -> None:
    even = [Pair(i, j, True, "NVLink") for i, j in itertools.combinations(range(4), 2)]
    assert link_finding(even) == Finding("gpu links", "ok", "NVLink, peer access: every pair")
    uneven = [*even[:-1], Pair(2, 3, False, "PCIe across CPUs")]
    finding = link_finding(uneven)
    assert finding.level == "warning" and "PCIe across CPUs, no peer access: 2-3" in finding.detail
    assert "topo -p2p" in finding.mend and "host memory" in finding.cost


def stand_in_nvml(links: dict[tuple[int, int], int], ancestor: int) -> ModuleType:
    """NVML of a machine whose GPUs are known by number; links by NVML's P2P status."""
    nvml = ModuleType("pynvml")

    def limit(handle: int) -> int:
        if handle == 1:
            raise RuntimeError("Not Supported")
        return 500_000

    vars(nvml).update(
        NVML_P2P_CAPS_INDEX_NVLINK=2,
        NVML_P2P_STATUS_OK=0,
        NVML_TOPOLOGY_MULTIPLE=20,
        NVML_TOPOLOGY_HOSTBRIDGE=30,
        NVML_TOPOLOGY_SYSTEM=50,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: int(uuid.removeprefix("GPU-")),
        nvmlDeviceGetP2PStatus=lambda first, second, index: links[first, second],
        nvmlDeviceGetTopologyCommonAncestor=lambda first, second: ancestor,
        nvmlDeviceGetEnforcedPowerLimit=limit,
        nvmlDeviceGetPowerManagementDefaultLimit=lambda handle: 700_000,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x20,
    )
    return nvml


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        def __init__(self, index: int) -> None:
            self.uuid = str(index)

    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda first, second: second != 2)


@pytest.mark.parametrize(
    ("ancestor", "far"),
    [
        (50, ("PCIe across CPUs", "SYS")),
        (40, ("PCIe", "PHB")),
        (30, ("PCIe", "PHB")),
        (20, ("PCIe", "PXB")),
        (10, ("PCIe", "PIX")),
    ],
)
def test_nvml_tells_links_and_power(monkeypatch: pytest.MonkeyPatch, three_gpus: None, ancestor: int, far: Any) -> None:
    nvml = stand_in_nvml({(0, 1): 0, (0, 2): 5, (1, 2): 5}, ancestor)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    powers, pairs = gpus.read_nvml(3)
    assert pairs == [Pair(0, 1, True, "NVLink", "NVL"), Pair(0, 2, False, *far), Pair(1, 2, False, *far)]
    assert powers == {0: Power(500, 700, 0x20), 2: Power(500, 700, 0x20)}  # GPU 1 does not tell its own


def test_without_nvml_links_are_unknown(monkeypatch: pytest.MonkeyPatch, three_gpus: None) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    powers, pairs = gpus.read_nvml(2)
    assert powers == {} and pairs == [Pair(0, 1, True, "unknown")]


@pytest.mark.parametrize(
    ("kinds", "level"),
    [(["sm_80", "sm_90"], "ok"), (["sm_80"], "error"), (["compute_80"], "ok"), (["sm_100"], "error")],
)
def test_a_gpu_for_which_torch_has_no_kernels(kinds: list[str], level: str) -> None:
    finding = gpus.gpu_finding(0, {"name": "H200", "memory_gib": 139.8}, (9, 0), kinds)
    assert finding.level == level and "H200, 139.8 GiB" in finding.detail
    assert level == "ok" or "compute capability 9.0" in finding.detail


@pytest.mark.parametrize(
    ("cpu_max", "cores"), [("max 100000", 1 << 30), ("200000 100000", 2), ("150000 100000\n", 2), ("10000 100000", 1)]
)
def test_cores_of_a_container(cpu_max: str, cores: int) -> None:
    assert quota_cores(cpu_max) == cores


@pytest.mark.parametrize(
    ("cores", "ranks", "threads", "level", "mend"),
    [
        (16, 1, None, "ok", ""),
        (64, 4, "16", "ok", ""),
        (64, 4, None, "ok", ""),
        (64, 4, "32", "warning", "export OMP_NUM_THREADS=16"),
        (4, 4, "1", "warning", "give the job at least 2 cores for each GPU"),
    ],
)
def test_cores(cores: int, ranks: int, threads: str | None, level: str, mend: str) -> None:
    finding = cores_finding(cores, ranks, threads)
    assert (finding.level, finding.mend) == (level, mend) and f"{cores} usable cores" in finding.detail


@pytest.mark.parametrize(
    ("soft", "hard", "level", "mend"),
    [
        (1024, 4096, "ok", ""),
        (UNLIMITED, UNLIMITED, "ok", ""),
        (256, UNLIMITED, "warning", "ulimit -n 65536"),
        (256, 4096, "warning", "ulimit -n 4096"),
        (256, 256, "warning", "docker run --ulimit nofile=65536:65536 ..."),
    ],
)
def test_open_files(soft: int, hard: int, level: str, mend: str) -> None:
    finding = open_files_finding(soft, hard)
    assert (finding.level, finding.mend) == (level, mend)


def test_locked_memory_matters_to_infiniband() -> None:
    assert memlock_finding(8 * 2**20, has_infiniband=False).level == "ok"
    assert memlock_finding(UNLIMITED, has_infiniband=True).level == "ok"
    finding = memlock_finding(8 * 2**20, has_infiniband=True)
    assert finding.level == "warning" and finding.detail == "8 MiB" and "memlock=-1" in finding.mend


def test_caches_are_where_train_puts_them_or_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    kernels = tmp_path / "cache" / "kernels"
    assert cache_folders(str(tmp_path / "cache")) == {
        "TRITON_CACHE_DIR": str(kernels / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": "/elsewhere",
    }


def test_caches_that_are_lost_or_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = cache_finding("TRITON_CACHE_DIR", "/tmp/kernels/triton")
    assert finding.level == "warning" and "under /tmp" in finding.detail
    assert finding.mend == "export TRITON_CACHE_DIR=$HOME/.cache/triton" and "compiles" in finding.cost
    (tmp_path / "file").write_text("")
    assert cache_finding("TRITON_CACHE_DIR", str(tmp_path / "file" / "triton")).level == "error"
    monkeypatch.setattr(host, "not_kept", lambda place: None)
    assert cache_finding("TRITON_CACHE_DIR", str(tmp_path / "new" / "triton")).level == "ok"


def test_what_is_not_kept() -> None:
    assert not_kept(Path("/tmp/x")) == "under /tmp"
    assert not_kept(Path("/usr/lib")) is None
    if os.path.ismount("/dev/shm"):
        assert not_kept(Path("/dev/shm")) == "on a tmpfs"


def test_disk_against_checkpoints(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    assert disk_finding("runs_dir", str(tmp_path), 1e6, 4).detail.endswith(
        "a checkpoint takes 0.00 GiB, and up to 4 are there at a time"
    )
    some = disk_finding("runs_dir", str(tmp_path), free / 3, 4)
    none = disk_finding("runs_dir", str(tmp_path), free * 2, 4)
    assert (some.level, none.level) == ("warning", "error") and "runs_dir" in some.mend


def test_checkpoints_of_a_config_are_counted(tmp_path: Path) -> None:
    target = make_target("qwen3", tmp_path / "target")
    path = make_config(tmp_path, target, make_chats(tmp_path / "chats.jsonl", rows=2))
    config = load_config(path, ["train.keep_checkpoints=3"])
    found = drafter_here(config)
    assert found is not None
    size_gib = 12 * drafter_parameters(found[1]) / GIB
    detail = run_disk_finding(config).detail
    assert f"a checkpoint takes {size_gib:.2f} GiB, and up to 5 are there at a time" in detail
    never = load_config(path, ["train.keep_checkpoints=3", "train.validate_every=0"])
    assert "up to 4 are" in run_disk_finding(never).detail
    elsewhere = load_config(path, ["target.model=nobody/no-such-model"])
    assert "checkpoint" not in run_disk_finding(elsewhere).detail


def test_findings_on_the_host_know_nothing_of_the_trainer() -> None:
    """`train` imports them: an import the other way, be it inside a function, would be a cycle."""
    tree = ast.parse(Path(host.__file__).read_text(encoding="utf-8"))
    imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {name for name in imported if name.startswith("dflash_dist")} == {"dflash_dist.check.findings"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_without_a_gpu_one_finding_says_what_is_left_out() -> None:
    findings = check(None)
    names = [finding.name for finding in findings]
    assert not has_errors(findings) and "open files" in names
    (gpu,) = (finding for finding in findings if finding.name == "gpu")
    assert gpu.level == "ok" and "no CUDA device" in gpu.detail and "left out" in gpu.detail
    without_meaning = {"cores", "locked memory", "/dev/shm", "nccl transport", "TRITON_CACHE_DIR", "driver"}
    assert not without_meaning & set(names)
