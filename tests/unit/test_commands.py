"""What the commands say of themselves, and from where they can be started."""

import os
import sys
from pathlib import Path

import pytest

from dflash_dist.cli import main
from dflash_dist.config import load_config
from dflash_dist.topology import parse_topology
from dflash_dist.train import launch
from dflash_dist.train.run_folder import SUMMARY
from tests.tiny import make_config


@pytest.mark.parametrize("group", [[], ["profile"]], ids=["all", "profile"])
def test_no_summary_of_a_command_is_cut(
    group: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["dflash-dist", *group, "--help"])
    with pytest.raises(SystemExit):
        main()
    summaries = capsys.readouterr().out.partition("Commands:\n")[2].splitlines()
    assert summaries and not [line for line in summaries if line.endswith("...")]


@pytest.mark.parametrize(("rank", "says"), [(None, True), ("0", True), ("1", False)])
def test_one_rank_says_that_a_run_is_finished(
    tmp_path: Path, rank: str | None, says: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under a torchrun that is not ours every rank finds it so."""
    config = load_config(make_config(tmp_path, tmp_path / "target", tmp_path / "chats.jsonl"))
    folder = Path(config.runs_dir) / "done"
    folder.mkdir(parents=True)
    (folder / SUMMARY).write_text("{}")
    (folder / "environment.json").write_text("{}")
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k != "RANK"})
    if rank is not None:
        monkeypatch.setitem(os.environ, "RANK", rank)
    assert launch.train(config, parse_topology("1-1"), "cpu", "done", []) == 0
    assert ("run done is finished" in capsys.readouterr().err) == says
