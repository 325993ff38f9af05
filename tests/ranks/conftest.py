from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_chats, make_config, make_target

Maker = Callable[..., Path]


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny target folder of each kind."""
    root = tmp_path_factory.mktemp("targets")
    return {kind: make_target(kind, root / kind) for kind in ("llama", "qwen3", "hybrid")}


@pytest.fixture
def make(tmp_path: Path, targets: dict[str, Path]) -> Maker:
    """Writes a config for a tiny target of a kind."""

    def make(kind: str = "qwen3", **sections: dict[str, Any]) -> Path:
        return make_config(tmp_path, targets[kind], make_chats(tmp_path / "chats.jsonl"), **sections)

    return make
