"""What a token store depends on: a store is found by the hash of it, so that nothing stale is taken for current."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from dflash_dist.config import Config
from dflash_dist.data.sources import sha256, source_identity
from dflash_dist.data.store import FORMAT_VERSION
from dflash_dist.errors import UserError

# Raised when the same input would give another store, so that stores of older code are not taken for current.
_RENDER_VERSION = 3
_TOKENIZER_FILES = (
    *("token*", "tekken*", "vocab*", "merges*", "special_tokens*", "added_tokens*", "*.model", "*.tiktoken", "*.py"),
    *("chat_template*", "additional_chat_templates/*"),
)


def ingredients_of(config: Config, target_folder: Path) -> dict[str, Any]:
    """All that the store depends on: sources, tokenizer, template and settings, as JSON. Loads no tokenizer.

    UserError if a source is missing or empty, or the target has no tokenizer.
    """
    files = sorted({file for pattern in _TOKENIZER_FILES for file in target_folder.glob(pattern) if file.is_file()})
    if not files:
        raise UserError(f"target {target_folder} holds no tokenizer files; add tokenizer.json to the folder")
    settings = dataclasses.asdict(config.data)
    for key in ("sources", "workers", "max_length"):
        del settings[key]
    names = [str(file.relative_to(target_folder)) for file in files]
    return {
        "versions": [FORMAT_VERSION, _RENDER_VERSION],
        "sources": [source_identity(name) for name in config.data.sources],
        "tokenizer": {name: sha256(file) for name, file in zip(names, files, strict=True)},
        "settings": settings,
        "limit_tokens": limit_tokens(config),
    }


def fingerprint_of(ingredients: dict[str, Any]) -> str:
    """The name of the store: the hash of its ingredients, in hex."""
    return hashlib.sha256(json.dumps(ingredients, sort_keys=True, default=str).encode()).hexdigest()


def check_unchanged(before: dict[str, Any], config: Config, target_folder: Path) -> None:
    """UserError if a source or the tokenizer has changed: the store would hold another content than its name says."""
    after = ingredients_of(config, target_folder)
    sources = zip(config.data.sources, before["sources"], after["sources"], strict=True)
    changed = [f"data source {name}" for name, old, new in sources if old != new]
    if before["tokenizer"] != after["tokenizer"]:
        changed.append(f"the tokenizer of {target_folder}")
    if changed:
        raise UserError(f"{changed[0]} changed while it was read; run `dflash-dist prepare` when nothing writes to it")


def limit_tokens(config: Config) -> int:
    """The longest document that the store may hold."""
    return min(config.data.max_length, config.schedule.token_budget)
