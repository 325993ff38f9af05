"""z-lab's package as tests use it: importing this skips the test where the package is missing."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_dist.evaluate.speculate import Generation

package = pytest.importorskip("dflash.model", reason="install the dflash package without its requirements: make setup")
# Its timer synchronises with CUDA, also where there is none.
package._cuda_time = lambda: 0.0


def load(folder: Path) -> Any:
    """Their drafter in fp32; every tensor of the file is one of theirs, and the other way round."""
    model, report = package.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def generate(
    drafter: Any, target: Any, prompt_ids: list[int], max_new_tokens: int, stop_ids: Collection[int] = ()
) -> Generation:
    """What their greedy loop decodes."""
    stops = sorted(stop_ids) or None
    result = package.dflash_generate(
        drafter, target, torch.tensor([prompt_ids]), max_new_tokens, stops, return_stats=True
    )
    return Generation(result.output_ids[0, len(prompt_ids) :].tolist(), 0.0, result.acceptance_lengths)
