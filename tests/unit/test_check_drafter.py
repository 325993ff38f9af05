"""The environment check tries FlashAttention-4 where drafter ranks would run it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from dflash_dist.check import drafter, layers
from dflash_dist.check.kernels import TOLERANCE, Failure, Outcome, verdict
from dflash_dist.check.target import TargetFacts
from dflash_dist.check.trials import LENGTHS, Measured, Shapes
from dflash_dist.config import Config, load_config
from dflash_dist.drafter import attention
from dflash_dist.drafter.mask import BlockLayout, DenseMask, LayerKind, dense_mask
from dflash_dist.errors import UserError

GOOD = Measured(0.002, 0.0, 100.0, 900.0, 2048)
SHAPES = Shapes(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
FACTS = TargetFacts({"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128})


def config(*overrides: str) -> Config:
    return load_config(Path(__file__).parents[2] / "configs" / "qwen3-8b.yaml", overrides)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter, "MANY_BLOCKS", 12)
    monkeypatch.setattr(drafter, "FEW_BLOCKS", 4)
    monkeypatch.setattr(drafter, "LENGTHS", (150, 4, 100))
    monkeypatch.setattr(drafter, "flex_mask", dense_mask)  # torch has no backward pass of flex attention on the CPU


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter, "on_hopper", lambda: True)
    monkeypatch.setattr(drafter, "flash_version", lambda: "4.0.0")


@pytest.mark.usefixtures("small")
def test_a_right_attention_passes() -> None:
    measured = drafter.drafter_attention(torch.device("cpu"), SHAPES)
    assert measured.error < TOLERANCE
    assert measured.leak == 0.0
    assert measured.tokens == 12 * drafter.BLOCK_SIZE


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("change", [{"anchors_A": 1}, {"anchors_A": -1}, {"starts_A": -1}], ids=str)
def test_one_key_too_many_or_too_few_is_found(change: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(kind: LayerKind, layout: BlockLayout) -> DenseMask:
        return dense_mask(kind, layout._replace(**{name: getattr(layout, name) + by for name, by in change.items()}))

    monkeypatch.setattr(drafter, "flex_mask", shifted)
    assert drafter.drafter_attention(torch.device("cpu"), SHAPES).error > TOLERANCE


def test_both_backward_passes_are_tried() -> None:
    """FlashAttention-4's own, and ours behind its forward pass."""
    for blocks, own in ((drafter.MANY_BLOCKS, True), (drafter.FEW_BLOCKS, False)):
        queries = blocks * drafter.BLOCK_SIZE
        keys = sum(LENGTHS) + queries
        assert (1.2 * keys < attention.FLASH_KEYS_PER_QUERY * queries) is own
        assert (keys > 1.2 * attention.FLASH_KEYS_PER_QUERY * queries) is not own


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("overrides", "facts"),
    [
        (["train.attention=dense"], FACTS),
        (["train.dtype=float32"], FACTS),
        (["drafter.head_dim=256"], FACTS),
        ([], None),
    ],
)
def test_nothing_is_said_where_the_run_would_not_take_it(overrides: list[str], facts: TargetFacts | None) -> None:
    assert drafter.drafter_findings(config(*overrides), facts, {}) == []


def test_nothing_is_said_without_such_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter, "on_hopper", lambda: False)
    assert drafter.drafter_findings(config(), FACTS, {}) == []


@pytest.mark.usefixtures("hopper")
def test_where_it_is_not_installed_it_says_what_it_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter, "flash_version", lambda: None)
    (finding,) = drafter.drafter_findings(config(), FACTS, {})
    assert finding.level == "ok" and "pip install --upgrade 'flash-attn-4" in finding.detail


@pytest.mark.parametrize(("cuda", "what"), [("13.0", "'flash-attn-4[cu13]>="), ("12.8", "'flash-attn-4>=")])
def test_the_command_is_that_of_torchs_cuda(cuda: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert what in attention.flash_install()


@pytest.mark.usefixtures("hopper")
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
    def tried(names: Sequence[str], shapes: Shapes, modelling: None, caches: Mapping[str, str]) -> dict[str, Outcome]:
        assert names == ["drafter_attention"]
        assert (shapes.num_attention_heads, shapes.num_key_value_heads, shapes.head_dim) == (4, 2, 64)
        return dict.fromkeys(names, outcome)

    monkeypatch.setattr(drafter, "install_finding", lambda package: verdict("drafter_attention", GOOD))
    monkeypatch.setattr(drafter, "try_kernels", tried)
    settings = config("drafter.num_attention_heads=16", "drafter.head_dim=64")
    finding = drafter.drafter_findings(settings, FACTS, {})[1]
    assert (finding.name, finding.level) == ("kernel drafter_attention", level)
    assert words in f"{finding.detail} {finding.cost}"
    assert level == "ok" or "pip uninstall -y flash-attn-4" in finding.mend


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("missing", ["flash_attn", "cutlass", "quack"])
def test_an_install_that_cannot_be_imported_is_an_error_of_the_check_and_of_the_run(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it needs are packages of other names than their modules, and other projects have those."""
    error = ModuleNotFoundError(f"No module named '{missing}'", name=missing)
    monkeypatch.setattr("dflash_dist.check.installs.import_error", lambda *_: error)
    (finding,) = drafter.drafter_findings(config(), FACTS, {})
    assert (finding.name, finding.level) == ("flash-attn-4", "error")
    assert finding.mend.startswith("pip install --upgrade 'flash-attn-4") and missing in finding.detail


def test_the_run_says_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "flash_version", lambda: "4.0.0")
    monkeypatch.setitem(sys.modules, "cutlass", None)
    with pytest.raises(UserError, match=r"flash-attn-4 4\.0\.0 .* pip install .* pip uninstall flash-attn-4"):
        attention._flash_kernels.__wrapped__()


def test_its_folder_alone_is_no_flash_attn_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert not layers._has_flash_attn()
    (tmp_path / "flash_attn" / "__init__.py").write_text("")
    importlib.invalidate_caches()
    assert layers._has_flash_attn()
