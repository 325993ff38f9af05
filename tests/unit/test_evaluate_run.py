"""Which held-out prompts a run is evaluated on."""

from pathlib import Path
from typing import Any

import pytest

from dflash_dist import commands
from dflash_dist.config import EvaluateConfig, TargetConfig, config_text, load_config
from dflash_dist.data.prepare import prepare
from dflash_dist.data.store import TokenStore
from dflash_dist.drafter.config import resolve
from dflash_dist.errors import UserError
from dflash_dist.evaluate import run
from tests import checkpoints
from tests.random_models import random_drafter
from tests.tiny import make_chats, make_config, make_target, target_config

CONTEXT_TOKENS = 1024


@pytest.mark.parametrize("long_chats", [0, 1, 3])
def test_prompts_that_fill_the_context_are_left_out_and_said(
    tmp_path: Path, long_chats: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make_target("qwen3", tmp_path / "target")
    chats = make_chats(tmp_path / "chats.jsonl", rows=20)
    config = load_config(make_config(tmp_path, target, chats))
    store = TokenStore.open(prepare(config, target))
    prompts = [[{"role": "user", "content": "tea " * 10}]] * (3 - long_chats)
    prompts += [[{"role": "user", "content": "x" * CONTEXT_TOKENS}]] * long_chats
    monkeypatch.setattr(store, "prompts", lambda count: prompts)
    given: list[Any] = []
    monkeypatch.setattr(run, "evaluate_on", lambda chats, *_: given.extend(chats) or {})
    figures = run.evaluate_drafter(config, store, tmp_path / "drafter", "cpu")
    assert given == prompts[: 3 - long_chats]
    assert (figures is None) == (long_chats == 3)
    said = f"{long_chats} of 3 held-out prompts fill the target's context of {CONTEXT_TOKENS} tokens: left out"
    assert (said in capsys.readouterr().err) == (long_chats > 0)


def test_a_wait_is_announced_before_the_models_are_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing, target = tmp_path / "missing", TargetConfig(model="target")
    with pytest.raises(UserError, match="missing"):
        run.evaluate_on([[], []], missing, tmp_path, target, "cpu", EvaluateConfig(), {})
    assert "evaluating on 2 prompts" in capsys.readouterr().err


@pytest.mark.parametrize("given", [None, {"enable_thinking": False}])
def test_template_arguments_of_the_command_line_stand_in_for_the_runs(
    tmp_path: Path, given: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target("qwen3", tmp_path / "target")
    settings = make_config(tmp_path, target, make_chats(tmp_path / "chats.jsonl", rows=2))
    of_run = {"enable_thinking": True}
    folder = tmp_path / "run"
    (folder / "export" / "plain").mkdir(parents=True)
    config = load_config(settings, ["data.chat_template_kwargs={enable_thinking: true}"])
    (folder / "config.yaml").write_text(config_text(config))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hello\n")
    used: list[Any] = []
    monkeypatch.setattr(commands, "evaluate_on", lambda *arguments: used.append(arguments[-1]) or {})
    commands.evaluate_command(folder, None, None, prompts, {}, given, "cpu")
    commands.evaluate_command(None, tmp_path / "drafter", str(target), prompts, {}, given, "cpu")
    assert used == [of_run if given is None else given, given or {}]


def test_a_checkpoint_of_a_run_can_be_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = make_target("qwen3", tmp_path / "target")
    folder = tmp_path / "run"
    folder.mkdir()
    settings = load_config(make_config(tmp_path, target, tmp_path / "chats.jsonl"))
    (folder / "config.yaml").write_text(config_text(settings))
    drafter = random_drafter(resolve(settings.drafter, target_config("qwen3"), 259))
    checkpoints.save(folder / "checkpoints", drafter, 3, 6, val_losses={3: 1.0, 6: 2.0})
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hello\n")
    given: Any = (prompts, {"max_new_tokens": 4}, None, "cpu")
    assert commands.evaluate_command(folder, None, None, *given, "best")["prompts"] == 1
    assert "checkpoint: step 3, val_loss 1.0" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"has no checkpoint of step 5; it has 3, 6"):
        commands.evaluate_command(folder, None, None, *given, "5")
    with pytest.raises(UserError, match=r"no export yet; .* or give --checkpoint"):
        commands.evaluate_command(folder, None, None, *given)
    with pytest.raises(UserError, match=r"give either --run R, .*--checkpoint"):
        commands.evaluate_command(None, tmp_path / "drafter", str(target), *given, "last")
