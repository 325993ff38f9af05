"""The GPUs, their driver, their power, and how they reach each other."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dflash_dist.check.findings import Finding, one_line
from dflash_dist.check.versions import is_older
from dflash_dist.installed import import_error

CUDA_MINIMUM = "11.8"
"""The first that knows Hopper."""
NCCL_MINIMUM = "2.18"
"""The first that splits communicators."""
DRIVER_MINIMUM = {"11": "450.80.02", "12": "525.60.13", "13": "580.65.06"}
"""Least Linux driver for each major version of CUDA."""
SHM_LEAST_GIB = 1.0
"""Containers have 64 MiB by default, in which NCCL does not start."""
THROTTLES = {
    0x2: "application clocks set by hand",
    0x8: "hardware slowdown",
    0x20: "thermal slowdown by software",
    0x40: "thermal slowdown by hardware",
    0x80: "power brake",
}
"""Bits of NVML's reasons for lower clocks, but for idleness and the power cap, which every GPU knows."""

PATHS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
"""NCCL's names of the ways between two GPUs, nearest first; NCCL_P2P_LEVEL names the farthest for P2P."""
PATHS_BY_NUMBER = ("LOC", "PIX", "PXB", "PHB", "SYS")
"""Those that NCCL_P2P_LEVEL could name when it was a number; a greater number is the last."""

ON_CPU = "ranks run on the CPU and talk through gloo, so fused kernels, links, power and compile caches are left out"

Reach = Literal["NVLink", "PCIe", "PCIe across CPUs", "unknown"]


@dataclass(frozen=True)
class Pair:
    """How two GPUs reach each other."""

    first: int
    second: int
    peer_access: bool
    link: Reach
    path: str = ""
    """One of `PATHS`; empty where that is not known."""


@dataclass(frozen=True)
class Power:
    """A GPU's limits in W and the bits of what lowers its clocks."""

    limit_w: float
    default_w: float
    reasons: int


def device_type(device: str) -> Literal["cpu", "cuda"] | None:
    """What ranks run on for `--device` cpu, cuda or auto; None where they cannot."""
    import torch

    if device == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    return "cpu" if device == "auto" else None


def gpu_findings(device: str = "auto") -> list[Finding]:
    """The findings on GPUs, driver, CUDA, NCCL and NVML; where ranks run on the CPU one finding that says so.

    `device`: cpu, cuda or auto, as `train` is given it.
    """
    import torch

    gpus = visible_gpus()
    if not gpus:
        return [_no_gpu() if device != "cuda" else _asked_in_vain(_no_gpu())]
    if device == "cpu":
        return [Finding("gpu", "ok", f"{len(gpus)} here, but --device is cpu: {ON_CPU}")]
    kinds = torch.cuda.get_arch_list()
    findings = [
        gpu_finding(index, gpu, torch.cuda.get_device_capability(index), kinds) for index, gpu in enumerate(gpus)
    ]
    findings += [
        driver_finding(driver_version(), torch.version.cuda),
        _minimum("cuda", torch.version.cuda, CUDA_MINIMUM, f"torch {torch.__version__} is built without CUDA"),
        _minimum("nccl", nccl_version(), NCCL_MINIMUM, f"torch {torch.__version__} is built without NCCL"),
    ]
    if error := import_error("pynvml"):
        detail = f"{one_line(error)}; metrics lack GPU utilisation and power"
        findings.append(Finding("pynvml", "warning", detail, "pip install nvidia-ml-py"))
    powers, pairs = read_nvml(len(gpus))
    findings += [power_finding(index, power) for index, power in powers.items()]
    if len(gpus) > 1:
        shared = shutil.disk_usage("/dev/shm")
        findings += [link_finding(pairs), transport_finding(pairs, shared.free, os.environ)]
        findings.append(shm_finding(shared.total, shared.free))
    return findings


def visible_gpus() -> list[dict[str, Any]]:
    """Name and memory of each GPU that torch can use."""
    import torch

    if not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [{"name": p.name, "memory_gib": round(p.total_memory / 2**30, 1)} for p in properties]


def nccl_version() -> str | None:
    """The version of the NCCL that torch has loaded; None without a GPU or without NCCL."""
    import torch

    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def driver_version() -> str | None:
    """The version of the NVIDIA driver; None where there is none."""
    with contextlib.suppress(OSError):
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", Path("/proc/driver/nvidia/version").read_text(encoding="utf-8"))
        return found.group() if found else None
    with _nvml() as nvml:
        return str(nvml.nvmlSystemGetDriverVersion()) if nvml else None


def gpu_finding(index: int, gpu: dict[str, Any], capability: tuple[int, int], kinds: list[str]) -> Finding:
    """Whether torch has kernels for the GPU; `kinds`: what it was compiled for, such as sm_90 or compute_90."""
    name, detail = f"gpu {index}", f"{gpu['name']}, {gpu['memory_gib']:.1f} GiB"
    known = [tuple(map(int, found)) for kind in kinds for found in re.findall(r"sm_(\d+)(\d)", kind)]
    fits = any(major == capability[0] and minor <= capability[1] for major, minor in known)
    if known and not fits and not any("compute" in kind for kind in kinds):
        mend = "install a build of torch for this GPU; see pytorch.org"
        detail += (
            f", compute capability {capability[0]}.{capability[1]}, for which torch has no kernels ({' '.join(kinds)})"
        )
        return Finding(name, "error", detail, mend)
    return Finding(name, "ok", detail)


def driver_finding(driver: str | None, cuda: str | None) -> Finding:
    """Whether the driver is new enough for the CUDA that torch was built with."""
    if driver is None:
        return Finding("driver", "warning", "its version cannot be read", "pip install nvidia-ml-py")
    minimum = DRIVER_MINIMUM.get((cuda or "").split(".")[0])
    if minimum is not None and is_older(driver, minimum):
        mend = f"install NVIDIA driver {minimum} or newer, or a torch built for an older CUDA"
        return Finding("driver", "error", f"{driver}, but CUDA {cuda} needs at least {minimum}", mend)
    return Finding("driver", "ok", driver)


def power_finding(index: int, power: Power) -> Finding:
    """Whether the GPU may draw its full power and runs at its full clocks."""
    name, reasons = f"gpu {index} power", [text for bit, text in THROTTLES.items() if power.reasons & bit]
    watts = f"{power.limit_w:.0f} W of {power.default_w:.0f} W by default"
    if reasons:
        by_hand = power.reasons & 0x2 and len(reasons) == 1
        reset = f"sudo nvidia-smi -i {index} -rac; sudo nvidia-smi -i {index} -rgc"  # and clocks that were locked
        mend = reset if by_hand else f"nvidia-smi -i {index} -q -d PERFORMANCE,TEMPERATURE"
        return Finding(name, "warning", f"slowed down now: {', '.join(reasons)}; {watts}", mend, "lower clocks")
    if power.limit_w < power.default_w:
        mend = f"sudo nvidia-smi -i {index} -pl {power.default_w:.0f}"
        cost = "lower clocks in long matrix products"
        return Finding(name, "warning", f"capped at {watts}", mend, cost)
    return Finding(name, "ok", f"{watts}, not slowed down")


def link_finding(pairs: list[Pair]) -> Finding:
    """The link between each two GPUs, and whether they can read each other's memory."""
    groups: dict[str, list[str]] = {}
    for pair in pairs:
        access = "peer access" if pair.peer_access else "no peer access"
        groups.setdefault(f"{pair.link}, {access}", []).append(f"{pair.first}-{pair.second}")
    detail = "; ".join(
        f"{kind}: {'every pair' if len(groups) == 1 and len(pairs) > 1 else ', '.join(names)}"
        for kind, names in groups.items()
    )
    if all(pair.peer_access for pair in pairs):
        return Finding("gpu links", "ok", detail)
    mend = "nvidia-smi topo -p2p r  # says why; in a container or VM, pass the GPUs through with their peer access"
    return Finding("gpu links", "warning", detail, mend, "messages between such GPUs pass through host memory")


def transport(pair: Pair, shm_free_bytes: int, environment: Mapping[str, str]) -> str:
    """What NCCL is expected to take between two GPUs: its first transport that can work."""
    # Of PCIe whose path is not known the farthest is taken; of an unknown link, that it is not what is ruled out.
    path = pair.path or {"PCIe": "PHB", "PCIe across CPUs": "SYS"}.get(pair.link, "NVL")
    near = PATHS.index(path) <= PATHS.index(_farthest_p2p(environment))
    if pair.peer_access and near and environment.get("NCCL_P2P_DISABLE") != "1":
        return f"P2P over {pair.link}" if pair.link != "unknown" else "P2P"
    if shm_free_bytes >= SHM_LEAST_GIB * 2**30 and environment.get("NCCL_SHM_DISABLE") != "1":
        return "SHM (host memory)"
    return "NET (sockets, or InfiniBand)"


def transport_finding(pairs: list[Pair], shm_free_bytes: int, environment: Mapping[str, str]) -> Finding:
    """The transports that NCCL is expected to take; what it took, it says itself."""
    taken = [transport(pair, shm_free_bytes, environment) for pair in pairs]
    chosen = sorted(set(taken))
    detail = f"expected transport: {', '.join(chosen)} (by links and environment, not observed"
    detail += "; NCCL_DEBUG=INFO shows what is taken)"
    if all(map(_is_p2p, chosen)):
        return Finding("nccl transport", "ok", detail)
    off = [n for n in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE") if environment.get(n) == "1"]
    by_default = [transport(pair, shm_free_bytes, {**environment, "NCCL_P2P_LEVEL": ""}) for pair in pairs]
    if any(_is_p2p(other) and not _is_p2p(name) for name, other in zip(taken, by_default, strict=True)):
        off.append("NCCL_P2P_LEVEL")
    mend = (
        f"unset {' '.join(off)}" if off else "see `gpu links` and `/dev/shm`; NCCL_P2P_LEVEL=SYS allows P2P across CPUs"
    )
    return Finding("nccl transport", "warning", detail, mend, "hidden states pass through host memory or sockets")


def shm_finding(total_bytes: int, free_bytes: int) -> Finding:
    """Whether NCCL finds room in shared memory."""
    detail = f"{free_bytes / 2**30:.1f} GiB free of {total_bytes / 2**30:.1f} GiB"
    if free_bytes >= SHM_LEAST_GIB * 2**30:
        return Finding("/dev/shm", "ok", detail)
    mend = "docker run --shm-size=16g ..., or: sudo mount -o remount,size=16G /dev/shm"
    return Finding("/dev/shm", "warning", detail, mend, "NCCL fails to start, or takes sockets")


def read_nvml(count: int) -> tuple[dict[int, Power], list[Pair]]:
    """The power of each GPU where NVML tells it, and all pairs; links are unknown without NVML."""
    import torch

    with _nvml() as nvml:
        handles = [_handle(nvml, str(torch.cuda.get_device_properties(i).uuid)) for i in range(count)]
        powers = {index: power for index, handle in enumerate(handles) if (power := _power(nvml, handle))}
        pairs = [
            Pair(i, j, torch.cuda.can_device_access_peer(i, j), *_link(nvml, handles[i], handles[j]))
            for i, j in itertools.combinations(range(count), 2)
        ]
    return powers, pairs


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """NVML, begun; None where there is none."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # its absence is a finding of its own
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _handle(nvml: Any, uuid: str) -> Any:
    with contextlib.suppress(Exception):  # such as a part of a GPU (MIG)
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
    return None


def _power(nvml: Any, handle: Any) -> Power | None:
    with contextlib.suppress(Exception):  # not told by every GPU and virtual machine
        reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        reasons = reasons or nvml.nvmlDeviceGetCurrentClocksThrottleReasons  # its older name
        return Power(
            nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
            nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1000,
            reasons(handle),
        )
    return None


def _link(nvml: Any, first: Any, second: Any) -> tuple[Reach, str]:
    """Link and path of a pair."""
    with contextlib.suppress(Exception):  # not told by every machine
        if nvml.nvmlDeviceGetP2PStatus(first, second, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK:
            return "NVLink", "NVL"
        ancestor = nvml.nvmlDeviceGetTopologyCommonAncestor(first, second)
        if ancestor >= nvml.NVML_TOPOLOGY_SYSTEM:
            return "PCIe across CPUs", "SYS"
        if ancestor >= nvml.NVML_TOPOLOGY_HOSTBRIDGE:
            return "PCIe", "PHB"
        return "PCIe", "PXB" if ancestor >= nvml.NVML_TOPOLOGY_MULTIPLE else "PIX"
    return "unknown", ""


def _is_p2p(transport: str) -> bool:
    return transport.startswith("P2P")


def _farthest_p2p(environment: Mapping[str, str]) -> str:
    """The one of `PATHS` up to which NCCL takes P2P; by default all but those across CPUs."""
    level = environment.get("NCCL_P2P_LEVEL", "")
    if level.isdecimal():
        return PATHS_BY_NUMBER[min(int(level), len(PATHS_BY_NUMBER) - 1)]
    return level if level in PATHS else "PHB"


def _minimum(name: str, version: str | None, minimum: str, none: str) -> Finding:
    mend = "install a CUDA build of torch for Linux; see pytorch.org"
    if version is None:
        return Finding(name, "error", none, mend)
    if is_older(version, minimum):
        return Finding(name, "error", f"{version}, but at least {minimum} is needed", mend)
    return Finding(name, "ok", version)


def _no_gpu() -> Finding:
    """Why ranks run on the CPU: no GPU, or one that torch cannot use."""
    import torch

    driver = driver_version()
    if driver is not None and os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() not in ("", "-1"):
        slow, mend = f"an NVIDIA driver ({driver}) is here, but", "install a CUDA build of torch; see pytorch.org"
        cost = "ranks run on the CPU"
        if torch.version.cuda is None:
            return Finding("gpu", "warning", f"{slow} torch {torch.__version__} is built without CUDA", mend, cost)
        finding = driver_finding(driver, torch.version.cuda)
        try:
            torch.cuda.init()
        except Exception as error:
            mend = finding.mend or "see what `nvidia-smi` says"
            return Finding("gpu", "warning", f"{slow} torch cannot use a GPU: {one_line(error)}", mend, cost)
    return Finding("gpu", "ok", f"no CUDA device: {ON_CPU}")


def _asked_in_vain(finding: Finding) -> Finding:
    """The finding that there is no GPU, for `--device cuda`."""
    why = "no CUDA device" if finding.level == "ok" else finding.detail
    mend = f"{finding.mend or 'take a machine with a GPU'}, or give --device cpu"
    return Finding("gpu", "error", f"--device is cuda, but {why}", mend, "no rank can start")
