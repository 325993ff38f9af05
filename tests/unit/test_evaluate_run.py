"""Which held-out prompts a run is evaluated on."""

from pathlib import Path
from typing import Any

import pytest

from dflash_dist.config import load_config
from dflash_dist.data.prepare import prepare
from dflash_dist.data.store import TokenStore
from dflash_dist.evaluate import run
from tests.tiny import make_chats, make_config, make_target

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
