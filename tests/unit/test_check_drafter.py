"""The environment check tries FlashAttention-4 where drafter ranks would run it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from dflash_dist.check import drafter
from dflash_dist.check.kernels import TOLERANCE, Failure, Outcome, verdict
from dflash_dist.check.trials import Measured
from dflash_dist.drafter import attention
from dflash_dist.drafter.mask import BlockLayout, DenseMask, LayerKind, dense_mask
from dflash_dist.errors import UserError

GOOD = Measured(0.002, 0.0, 100.0, 900.0, 2048)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter, "BLOCKS", 12)
    monkeypatch.setattr(drafter, "LENGTHS", (150, 4, 100))
    monkeypatch.setattr(drafter, "HEAD_SIZE", 16)
    monkeypatch.setattr(drafter, "flex_mask", dense_mask)  # torch has no backward pass of flex attention on the CPU


@pytest.mark.usefixtures("small")
def test_a_right_attention_passes() -> None:
    measured = drafter.drafter_attention(torch.device("cpu"))
    assert measured.error < TOLERANCE
    assert measured.leak == 0.0
    assert measured.tokens == 12 * drafter.BLOCK_SIZE


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("change", [{"anchors_A": 1}, {"anchors_A": -1}, {"starts_A": -1}], ids=str)
def test_one_key_too_many_or_too_few_is_found(change: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(kind: LayerKind, layout: BlockLayout) -> DenseMask:
        return dense_mask(kind, layout._replace(**{name: getattr(layout, name) + by for name, by in change.items()}))

    monkeypatch.setattr(drafter, "flex_mask", shifted)
    assert drafter.drafter_attention(torch.device("cpu")).error > TOLERANCE


def test_where_it_cannot_run_nothing_is_said_and_where_it_could_what_it_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drafter.drafter_findings({}) == []
    monkeypatch.setattr(drafter, "on_hopper", lambda: True)
    (finding,) = drafter.drafter_findings({})
    assert finding.level == "ok" and "pip install 'dflash-dist[flash]'" in finding.detail


@pytest.mark.parametrize(
    ("outcome", "level", "words"),
    [
        (GOOD, "ok", "right"),
        (Measured(0.2, 0.0, 100.0, 900.0, 2048), "error", "the gradients would be wrong"),
        (Measured(0.002, 0.2, 100.0, 900.0, 2048), "error", "packed gradients would be wrong"),
        (Failure("no kernel image"), "error", "the drafter cannot run it"),
    ],
)
def test_the_trial_decides(outcome: Outcome, level: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def tried(names: Sequence[str], shapes: Any, modelling: None, caches: Mapping[str, str]) -> dict[str, Outcome]:
        assert names == ["drafter_attention"]
        return dict.fromkeys(names, outcome)

    monkeypatch.setattr(drafter, "on_hopper", lambda: True)
    monkeypatch.setattr(drafter, "flash_version", lambda: "4.0.0")
    monkeypatch.setattr(drafter, "install_finding", lambda package: verdict("drafter_attention", GOOD))
    monkeypatch.setattr(drafter, "try_kernels", tried)
    finding = drafter.drafter_findings({})[1]
    assert (finding.name, finding.level) == ("kernel drafter_attention", level)
    assert words in f"{finding.detail} {finding.cost}"
    assert level == "ok" or "pip uninstall -y flash-attn-4" in finding.mend


def test_an_install_that_cannot_be_imported_is_an_error_of_the_check_and_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drafter, "on_hopper", lambda: True)
    monkeypatch.setattr(drafter, "flash_version", lambda: "4.0.0")
    (finding,) = drafter.drafter_findings({})  # it is not installed here
    assert (finding.name, finding.level) == ("flash-attn-4", "error")
    assert "dflash-dist[flash]" in finding.mend
    monkeypatch.setattr(attention, "flash_version", lambda: "4.0.0")
    with pytest.raises(UserError, match=r"flash-attn-4 4\.0\.0 .* pip uninstall flash-attn-4"):
        attention._flash_kernels.__wrapped__()
