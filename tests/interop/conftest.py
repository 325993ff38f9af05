"""What is expensive and shared by tests against other people's packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.interop.overfit import Overfitted, overfit


@pytest.fixture(scope="session")
def overfitted(smollm2_folder: Path, smollm2_tokenizer: Any) -> Overfitted:
    """The real target with a drafter that knows four of its answers; half a minute on one core."""
    return overfit(smollm2_folder, smollm2_tokenizer)


@pytest.fixture(scope="session")
def overfitted_folder(overfitted: Overfitted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same drafter's plain export, in bf16."""
    from dflash_dist.export.plain import export_plain

    folder = tmp_path_factory.mktemp("overfitted") / "plain"
    export_plain(overfitted.drafter, folder)
    return folder
