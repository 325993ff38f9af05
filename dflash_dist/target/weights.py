"""Whether a target's weight files are whole, told by their sizes and headers: a download may have been cut short."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash_dist.errors import UserError

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
_LENGTH_BYTES = 8
"""At the start of a file: the size of its header, which is JSON."""
_POINTER = b"version https://git-lfs"
"""How a file begins that Git LFS has not fetched."""


def has_weights(folder: Path) -> bool:
    """Whether there are weights, or an index of them."""
    return any((folder / name).exists() for name in (ONE_FILE, INDEX))


def check_weights(folder: Path) -> int:
    """The bytes of the target's weight files; UserError where one is missing, cut short or of another kind."""
    if not has_weights(folder):
        raise UserError(f"target {folder} holds no weights: neither {ONE_FILE} nor {INDEX}; get the target's files")
    names = [ONE_FILE] if (folder / ONE_FILE).exists() else _indexed(folder)
    if missing := [name for name in names if not (folder / name).exists()]:
        raise UserError(
            f"target {folder} lacks {len(missing)} of {len(names)} weight files: {', '.join(missing[:3])}; get the "
            "target's files again"
        )
    return sum(_whole_size(folder / name) for name in names)


def _indexed(folder: Path) -> list[str]:
    """The files that the index names."""
    try:
        return sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        text = f"{type(error).__name__}: {error}"
        raise UserError(f"{folder / INDEX} cannot be read ({text}); get the target's files again") from None


def _whole_size(file: Path) -> int:
    """Bytes of the file; UserError where they are not as many as its header says."""
    try:
        size_bytes = file.stat().st_size
        with file.open("rb") as content:
            start = content.read(len(_POINTER))
            header_bytes = int.from_bytes(start[:_LENGTH_BYTES], "little")
            content.seek(_LENGTH_BYTES)
            header = content.read(min(header_bytes, size_bytes))
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}; check that it is open to you") from None
    if start == _POINTER:
        raise UserError(f"{file} is a pointer of Git LFS, of {size_bytes} bytes, and no weights; run `git lfs pull`")
    if size_bytes > _LENGTH_BYTES and not header.startswith(b"{"):
        raise UserError(f"{file} is no safetensors file, by its first bytes; get it again")
    whole_header = 0 < header_bytes == len(header)
    needed_bytes = _LENGTH_BYTES + (header_bytes + _end(file, header) if whole_header else header_bytes or 2)
    if size_bytes != needed_bytes:
        says = f"{'' if whole_header else 'at least '}{needed_bytes:,}"
        raise UserError(f"{file} has {size_bytes:,} bytes, where a whole one has {says}, by its header; get it again")
    return size_bytes


def _end(file: Path, header: bytes) -> int:
    """Where the last tensor ends, counted from the end of the header."""
    try:
        tensors: dict[str, Any] = json.loads(header)
        ends = [int(tensor["data_offsets"][1]) for name, tensor in tensors.items() if name != "__metadata__"]
    except (ValueError, LookupError, TypeError, AttributeError):
        raise UserError(f"{file} has a damaged header; get it again") from None
    return max(ends, default=0)
