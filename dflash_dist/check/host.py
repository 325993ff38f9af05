"""The host: disk, cores, limits, and the folders of compiled kernels."""

from __future__ import annotations

import math
import os
import resource
import shutil
import tempfile
from pathlib import Path

import psutil

from dflash_dist.check.findings import Finding, Level

FREE_GIB_ERROR, FREE_GIB_WARNING = 1, 10
OPEN_FILES_LEAST = 1024
CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
"""Variables that name folders of compiled kernels, and where `train` puts them below `cache_dir`/kernels."""


def usable_cores() -> int:
    """Cores that this process may use, by its affinity and its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8")
    except OSError:
        return cores
    return min(cores, quota_cores(quota))


def quota_cores(cpu_max: str) -> int:
    """The cores that a cgroup's cpu.max, `max 100000` or `150000 100000`, leaves; more than any machine has for max."""
    quota, period = cpu_max.split()
    return 1 << 30 if quota == "max" else max(1, math.ceil(int(quota) / int(period)))


def cores_finding(cores: int, ranks: int, threads: str | None) -> Finding:
    """Whether each of `ranks` has cores enough. `threads`: OMP_NUM_THREADS."""
    each, set_to = cores / ranks, f"OMP_NUM_THREADS={threads}" if threads else "OMP_NUM_THREADS is not set"
    detail = f"{cores} usable cores, {each:.1f} for each of {ranks} ranks; {set_to}"
    if each < 2:
        cost = "the host enqueues too slowly for the GPU"
        return Finding("cores", "warning", detail, "give the job at least 2 cores for each GPU", cost)
    if threads and threads.isdigit() and int(threads) * ranks > cores:
        cost = "ranks take each other's cores"
        return Finding("cores", "warning", detail, f"export OMP_NUM_THREADS={int(each)}", cost)
    return Finding("cores", "ok", detail)


def limit_findings(gpus: int) -> list[Finding]:
    """The limits on open files and, with GPUs, on locked memory."""
    findings = [open_files_finding(*resource.getrlimit(resource.RLIMIT_NOFILE))]
    if gpus:
        infiniband = Path("/sys/class/infiniband")
        has_infiniband = infiniband.is_dir() and any(infiniband.iterdir())
        findings.append(memlock_finding(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], has_infiniband))
    return findings


def open_files_finding(soft: int, hard: int) -> Finding:
    """Whether a rank may open all its sockets, stores and libraries."""
    if soft == resource.RLIM_INFINITY or soft >= OPEN_FILES_LEAST:
        return Finding("open files", "ok", _limit(soft))
    enough = hard == resource.RLIM_INFINITY or hard >= OPEN_FILES_LEAST
    mend = "ulimit -n 65536" if enough and hard != soft else "docker run --ulimit nofile=65536:65536 ..."
    if enough and 0 <= hard < 65536:
        mend = f"ulimit -n {hard}"
    return Finding("open files", "warning", _limit(soft), mend, "ranks may fail with `Too many open files`")


def memlock_finding(soft: int, has_infiniband: bool) -> Finding:
    """Whether InfiniBand may pin the memory that it sends from."""
    detail = _limit(soft, 2**20, " MiB")
    if soft == resource.RLIM_INFINITY or not has_infiniband:
        return Finding("locked memory", "ok", detail + ("" if has_infiniband else "; no InfiniBand here needs it"))
    mend = "ulimit -l unlimited, or: docker run --ulimit memlock=-1 ..."
    return Finding("locked memory", "warning", detail, mend, "NCCL cannot use InfiniBand between nodes")


def cache_folders(cache_dir: str) -> dict[str, str]:
    """Where compiled kernels are kept, by variable: as the environment says, else as `train` sets it."""
    default = Path(cache_dir).absolute() / "kernels"
    return {variable: os.environ.get(variable) or str(default / name) for variable, name in CACHES.items()}


def cache_finding(variable: str, folder: str) -> Finding:
    """Whether compiled kernels can be written there and are there at the next start."""
    name, mend = variable, f"export {variable}=$HOME/.cache/{CACHES[variable]}"
    cost = "each start compiles and tunes all kernels again, for minutes"
    place = _existing(folder)
    if not place.is_dir() or not os.access(place, os.W_OK):
        return Finding(name, "error", f"{folder} cannot be written", mend, cost)
    if why := not_kept(place):
        return Finding(name, "warning", f"{folder} is {why}", mend, cost)
    return Finding(name, "ok", folder)


def not_kept(folder: Path) -> str | None:
    """Why the folder may be gone after a restart; None where it stays."""
    folder = folder.resolve()
    for temporary in {Path("/tmp"), Path("/var/tmp"), Path(tempfile.gettempdir()).resolve()}:
        if folder.is_relative_to(temporary):
            return f"under {temporary}"
    mounts = [p for p in psutil.disk_partitions(all=True) if folder.is_relative_to(p.mountpoint)]
    kind = max(mounts, key=lambda p: len(p.mountpoint)).fstype if mounts else ""
    return f"on a {kind}" if kind in ("tmpfs", "ramfs") else None


def disk_finding(key: str, folder: str, checkpoint_bytes: float = 0, checkpoints: int = 0) -> Finding:
    """Free space where `folder` is or would be made, against what so many checkpoints take there."""
    place = _existing(folder)
    mend = f"set {key} to a place with more room that you may write to"
    if not place.is_dir() or not os.access(place, os.W_OK):
        return Finding(key, "error", f"{folder} cannot be written", mend)
    free_gib, one_gib = shutil.disk_usage(place).free / 2**30, checkpoint_bytes / 2**30
    level: Level = "ok"
    detail = f"{free_gib:.1f} GiB free"
    if checkpoints:
        detail += f"; a checkpoint takes {one_gib:.2f} GiB, and up to {checkpoints} are there at a time"
    if free_gib < max(FREE_GIB_WARNING, one_gib * checkpoints):
        level = "error" if free_gib < max(FREE_GIB_ERROR, one_gib) else "warning"
    return Finding(key, level, detail, "" if level == "ok" else mend)


def _existing(folder: str) -> Path:
    """The folder, or the nearest above it that exists."""
    place = Path(folder).expanduser().absolute()
    while not place.exists():
        place = place.parent
    return place


def _limit(value: int, unit: int = 1, name: str = "") -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value / unit:.0f}{name}"
