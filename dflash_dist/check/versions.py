"""Versions of Python and of the packages that every run needs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re

from dflash_dist.check.findings import Finding, one_line
from dflash_dist.installed import import_error, version_of

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


def version_findings() -> list[Finding]:
    """The findings on Python and the packages, and on TensorBoard's view of traces."""
    return [_python(), *(_package(*row) for row in PACKAGES), _trace_view()]


def numbers(version: str) -> tuple[int, ...]:
    """(2, 13, 0) for `2.13.0+cpu`; enough to compare with a minimum, without the undeclared `packaging`."""
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])


def is_older(version: str, minimum: str) -> bool:
    """Whether the version is known to be below the minimum; one without a number is not."""
    return version[:1].isdigit() and numbers(version) < numbers(minimum)


def is_findable(name: str) -> bool:
    """Whether a package of this name is on the path; it is not imported."""
    try:
        return importlib.util.find_spec(name.replace("-", "_")) is not None
    except (ImportError, ValueError):  # a name that no package has
        return False


def _python() -> Finding:
    version = platform.python_version()
    if is_older(version, PYTHON_MINIMUM):
        mend = f"make a virtual environment with Python {PYTHON_MINIMUM} or newer"
        return Finding("python", "error", f"{version}, but at least {PYTHON_MINIMUM} is needed", mend)
    return Finding("python", "ok", version)


def _package(name: str, minimum: str, purpose: str) -> Finding:
    version, mend = version_of(name), f"pip install '{name}>={minimum}'"
    if version is None:
        return Finding(name, "error", f"not installed; {purpose} needs at least {minimum}", mend)
    if is_older(version, minimum):
        return Finding(name, "error", f"{version}, but {purpose} needs at least {minimum}", mend)
    if error := import_error(name):
        mend = f"pip install --force-reinstall '{name}>={minimum}'"
        return Finding(name, "error", f"{version}, but its import fails: {one_line(error)}", mend)
    return Finding(name, "ok", version)


def _trace_view() -> Finding:
    name = "torch-tb-profiler"
    version = version_of(name)
    if version is None:
        cost = "TensorBoard shows a run's curves, but not its traces; Perfetto shows them all the same"
        return Finding(name, "warning", "not installed", "pip install 'torch-tb-profiler>=0.4.3'", cost)
    return Finding(name, "ok", version)
