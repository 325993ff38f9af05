"""Whether the packages of fused kernels can be imported, and the true reason where one cannot.

transformers takes any exception of such an import for "not installed" and goes on in torch.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass

from dflash_dist.check.findings import Finding, Level, one_line
from dflash_dist.check.versions import is_older
from dflash_dist.installed import import_error, version_of

LAYERS_SLOW = "every linear-attention layer of the target runs a slow torch fallback"
FLA_BOTH = "'flash-linear-attention>=0.6.0' 'fla-core>=0.6.0'"


@dataclass(frozen=True)
class FusedPackage:
    """A package of fused kernels, and what mends each way in which its import can fail."""

    name: str
    module: str
    functions: tuple[str, ...]
    distributions: tuple[str, ...]
    """The one whose version counts comes first."""
    minimum: str
    cost: str
    install: str
    upgrade: str
    reinstall: str
    rebuild: str = ""
    """For a package with an extension that is bound to one torch."""


TRITON = FusedPackage(
    "triton",
    "triton",
    ("jit",),
    ("triton",),
    "3.3",
    f"fla cannot run, so {LAYERS_SLOW}",
    install="pip install 'triton>=3.3'",
    upgrade="pip install --upgrade 'triton>=3.3'",
    reinstall="pip install --force-reinstall --no-deps 'triton>=3.3'",
)
FLA = FusedPackage(
    "fla",
    "fla.ops.gated_delta_rule",
    ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    ("fla-core", "flash-linear-attention"),
    "0.6.0",
    f"{LAYERS_SLOW} for the delta rule (about 1.5 times the time a token where this was measured, on an H200)",
    install="pip install 'flash-linear-attention>=0.6.0' 'triton>=3.3'",
    upgrade=f"pip install --upgrade {FLA_BOTH}",
    reinstall=f"pip uninstall -y flash-linear-attention fla-core && pip install {FLA_BOTH}",
)
CAUSAL_CONV1D = FusedPackage(
    "causal-conv1d",
    "causal_conv1d",
    ("causal_conv1d_fn", "causal_conv1d_update"),
    ("causal-conv1d",),
    "1.7.0",
    f"{LAYERS_SLOW} for the convolution (about 1.1 times the time a token where this was measured, on an H200)",
    install="pip install --no-build-isolation 'causal-conv1d>=1.7.0'  # needs nvcc",
    upgrade="pip install --no-build-isolation 'causal-conv1d>=1.7.0' --upgrade  # needs nvcc",
    reinstall="pip install --no-build-isolation 'causal-conv1d>=1.7.0' --force-reinstall --no-deps  # needs nvcc",
    rebuild="pip install --no-build-isolation 'causal-conv1d>=1.7.0' --force-reinstall --no-deps --no-cache-dir"
    "  # builds it for this torch; needs nvcc",
)
FLASH_ATTN = FusedPackage(
    "flash-attn",
    "flash_attn",
    ("flash_attn_varlen_func",),
    ("flash-attn",),
    "2.7",
    "target.attention=flash_attention_2 cannot run",
    install="pip install --no-build-isolation 'flash-attn>=2.7'  # needs nvcc",
    upgrade="pip install --no-build-isolation 'flash-attn>=2.7' --upgrade  # needs nvcc",
    reinstall="pip install --no-build-isolation 'flash-attn>=2.7' --force-reinstall --no-deps  # needs nvcc",
    rebuild="pip install --no-build-isolation 'flash-attn>=2.7' --force-reinstall --no-deps --no-cache-dir"
    "  # builds it for this torch; needs nvcc",
)


def install_finding(package: FusedPackage, level: Level = "error") -> Finding:
    """Whether the package's functions can be imported; `level` where they cannot."""
    version = next(filter(None, map(version_of, package.distributions)), None)
    error = import_error(package.module, package.functions)
    if error is not None:
        detail, mend = _problem(package, version, error)
        return Finding(package.name, level, detail, mend, package.cost)
    if version is not None and is_older(version, package.minimum):
        detail = f"{version}, but at least {package.minimum} is known to work"
        return Finding(package.name, "warning", detail, package.upgrade)
    if package is FLA and (uneven := _uneven_fla()):
        return uneven
    return Finding(package.name, "ok", f"{version or 'version unknown'}, imported")


def half_installed_fla(hybrid: bool | None) -> Finding | None:
    """The finding on an `fla` without __init__.py: a namespace package, which can be imported and holds some modules.

    So it is with flash-linear-attention without fla-core, and after two separate `pip install --target` of them. An
    error unless the target is known to have no linear attention.
    """
    spec = importlib.util.find_spec("fla")
    if spec is None or spec.origin is not None:
        return None
    detail = "half installed: the package has no __init__.py, so parts of it are missing"
    if version_of("fla-core") is None and (version := version_of("flash-linear-attention")):
        detail += f"; flash-linear-attention {version} is here without fla-core, which holds the kernels"
    mend = f"pip install --force-reinstall --no-deps {FLA_BOTH}  # both in one command"
    if hybrid is False:
        return Finding("fla", "warning", detail, mend, "none for this target, which has no linear attention")
    return Finding("fla", "error", detail, mend, f"{LAYERS_SLOW} or fails")


def triton_on_cpu() -> Finding | None:
    """The finding on a triton and an fla that can be imported where ranks run on the CPU."""
    import torch

    if any(import_error(module) for module in (TRITON.module, FLA.module)):
        return None
    detail, why, mend = "there is no CUDA device", "with `0 active drivers`", "pip uninstall triton"
    if torch.cuda.is_available():
        detail, why, mend = "ranks run on the CPU", "as Triton takes no tensors there", f"--device cuda, or: {mend}"
    detail = f"triton and fla are importable but {detail}: transformers binds fla's kernels all the same, "
    return Finding(
        "triton", "error", f"{detail}and each linear-attention layer then fails {why}", mend, "the target cannot run"
    )


def _problem(package: FusedPackage, version: str | None, error: Exception) -> tuple[str, str]:
    """What the failed import means, with the exception's own words, and what mends it."""
    text = one_line(error)
    top = package.module.split(".")[0]
    if isinstance(error, ModuleNotFoundError) and error.name != top:
        missing = (error.name or "").split(".")[0]
        if missing != top:
            if missing.startswith(f"{top}_"):  # built with the package, and no distribution of its own
                return f"its extension {missing} is missing: {text}", package.reinstall
            mend = TRITON.install if missing == "triton" else f"pip install {missing.replace('_', '-')}"
            return f"it needs {missing}, which is not installed: {text}", mend
        return f"a part of it is missing: {text}", package.reinstall
    if isinstance(error, ModuleNotFoundError):
        return f"not installed: {text}", package.install
    if package.rebuild and ("undefined symbol" in text or "cannot open shared object" in text):
        return f"built for another torch or CUDA than {_torch()}: {text}", package.rebuild
    if isinstance(error, AttributeError) or "cannot import name" in text:
        if version is not None and is_older(version, package.minimum):
            return f"{version}, but at least {package.minimum} is needed: {text}", package.upgrade
        where = getattr(sys.modules.get(package.module), "__file__", None) or package.module
        mend = _exact(package) if version else package.upgrade
        return f"{version or 'of unknown version'}, in {where}, lacks a function: {text}", mend
    return f"its import fails: {text}", package.reinstall


def _exact(package: FusedPackage) -> str:
    """The command for the version that is known to work."""
    what = " ".join(f"'{name}=={package.minimum}'" for name in package.distributions)
    return f"pip install --force-reinstall --no-deps {'--no-build-isolation ' if package.rebuild else ''}{what}"


def _uneven_fla() -> Finding | None:
    """The finding on two halves of different versions, which were never tried together."""
    core, rest = version_of("fla-core"), version_of("flash-linear-attention")
    if core is None or rest is None or core == rest:
        return None
    detail = f"fla-core {core} beside flash-linear-attention {rest}: the two go together in one version"
    return Finding("fla", "warning", detail, f"pip install 'fla-core=={rest}' 'flash-linear-attention=={rest}'")


def _torch() -> str:
    import torch

    return f"torch {torch.__version__}" + (f" with CUDA {torch.version.cuda}" if torch.version.cuda else "")
