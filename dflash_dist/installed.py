"""What is installed beside this project."""

from __future__ import annotations

import importlib.metadata


def version_of(distribution: str) -> str | None:
    """The installed version; None where there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
