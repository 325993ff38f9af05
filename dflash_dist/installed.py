"""What is installed beside this project, and what is wrong where it cannot be imported."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Sequence

_DISTRIBUTIONS = {"yaml": "PyYAML"}
"""Those that are named otherwise than their module."""


def version_of(distribution: str) -> str | None:
    """The installed version; None where there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def import_error(module: str, functions: Sequence[str] = ()) -> Exception | None:
    """What is raised when the module or one of its functions is imported; None where it can be."""
    try:
        loaded = importlib.import_module(module)
        for name in functions:
            getattr(loaded, name)
    except Exception as error:  # whatever it is: transformers takes any of them for "not installed"
        return error
    return None


def import_problem(error: ImportError) -> str | None:
    """What is wrong with another project's package, and what mends it; None where the fault is in this one."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    name = getattr(cause, "name", None) or ""
    if name.split(".")[0] == "dflash_dist":
        return None
    if isinstance(cause, ModuleNotFoundError) and name and "." not in name:
        return f"the package {name} is not installed; run `make setup`, or: pip install {_requirement(name)}"
    text = f"{type(cause).__name__}: {' '.join(str(cause).split())}"
    return (
        f"an installed package cannot be imported ({text}); install it again, or run `make setup` in a fresh checkout"
    )


def _requirement(module: str) -> str:
    """What to give pip for the module: as this project requires it, where it does."""
    name = _DISTRIBUTIONS.get(module, module.replace("_", "-"))
    try:
        required = importlib.metadata.requires("dflash-dist") or []
    except importlib.metadata.PackageNotFoundError:
        required = []
    for line in required:
        requirement = line.split(";")[0].strip()
        found = re.match(r"[\w.-]+", requirement)
        if found and found.group().lower() == name.lower():
            return f"'{requirement}'"
    return name
