"""What `dflash-dist inspect` shows: the mask of a row, and a drafter's losses as cached inference gives them."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from dflash_dist import inspection
from dflash_dist.commands import inspect_command, regenerate_command
from dflash_dist.config import Config, TargetConfig, load_config
from dflash_dist.data.prepare import prepare
from dflash_dist.data.regenerate import Sampling
from dflash_dist.data.store import TokenStore
from dflash_dist.drafter.config import resolve
from dflash_dist.drafter.model import DFlashDrafter
from dflash_dist.errors import UserError
from dflash_dist.evaluate.speculate import TargetDecoder, block_logits, extend_context
from dflash_dist.export.plain import export_plain, load_drafter
from dflash_dist.inspection import TrainingRow, print_row, stored_row
from dflash_dist.target.load import ends_of, load_full, load_tokenizer, text_config
from dflash_dist.topology import parse_topology
from dflash_dist.train.inputs import resolve_inputs
from tests import random_models, tiny


@pytest.fixture(scope="module", params=["llama", "hybrid"])
def target(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_target(request.param, tmp_path_factory.mktemp("target"))


@pytest.fixture
def config(target: Path, tmp_path: Path) -> Config:
    return load_config(tiny.make_config(tmp_path, target, tiny.make_chats(tmp_path / "chats.jsonl", rows=12)))


@pytest.fixture
def drafter(config: Config, target: Path, tmp_path: Path) -> Path:
    model: DFlashDrafter = random_models.random_drafter(resolve(config.drafter, text_config(target), 0))
    export_plain(model, tmp_path / "drafter")
    return tmp_path / "drafter"


def inspect(capsys: pytest.CaptureFixture[str], config: Config, **given: Any) -> Any:
    asked = {"number": None, "messages": None, "drafter": None, "anchors": None} | given
    inspect_command(config, **asked, device="cpu", as_json=True)
    return json.loads(capsys.readouterr().out)


def test_a_row_has_the_tokens_and_mask_of_the_store(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    store = TokenStore.open(prepare(config, Path(config.target.model)))
    lines = Path(config.data.sources[0]).read_text().splitlines()
    for number in (0, 7):
        shown = inspect(capsys, config, number=number)
        documents = store.read(np.array([number]))
        assert shown["ids"] == documents.tokens_T.tolist()
        assert shown["supervised"] == documents.supervised_T.tolist()
        assert shown["held_out"] == store.held_out[number]
        assert shown["id"] == json.loads(lines[number])["id"]
        assert sum(end - begin for begin, end in shown["runs"]) == shown["supervised_tokens"]


def test_rows_of_repeated_ids_are_told_apart(target: Path, tmp_path: Path) -> None:
    chats = tiny.make_chats(tmp_path / "chats.jsonl", rows=1)
    chats.write_text(chats.read_text() * 3)
    config = load_config(tiny.make_config(tmp_path, target, chats))
    assert [stored_row(config, number).id for number in range(3)] == ["chat-0", "chat-0#2", "chat-0#3"]


def test_a_repeated_id_is_found_in_one_pass(target: Path, tmp_path: Path) -> None:
    chats = tiny.make_chats(tmp_path / "chats.jsonl", rows=1)
    messages = len(json.loads(chats.read_text())["messages"])
    chats.write_text(chats.read_text() * 40)
    config = load_config(tiny.make_config(tmp_path, target, chats))
    with mock.patch.object(inspection, "document_key", wraps=inspection.document_key) as document_key:
        assert stored_row(config, 39).id == "chat-0#40"
    assert document_key.call_count <= 40 * (1 + messages)


def test_text_marks_supervised_runs_with_brackets(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    inspect_command(config, 0, None, None, None, "cpu", as_json=False)
    head, _, text = capsys.readouterr().out.partition("\n\n")
    chat = json.loads(Path(config.data.sources[0]).read_text().splitlines()[0])["messages"]
    expected = "".join(
        f"<|im_start|>{m['role']}\n"
        + (f"[[{m['content']}<|im_end|>]]\n" if m["role"] == "assistant" else f"{m['content']}<|im_end|>\n")
        for m in chat
    )
    assert text.strip() == expected.strip()
    assert re.match(r"row 0 of 12(, held out)?: chat-0\n\d+ tokens, \d+ supervised in \d runs: \d+-\d+", head)


def test_a_terminal_gets_colour_unless_it_wants_none(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = TrainingRow("a", 0, 1, False, np.arange(65, 70), np.array([0, 0, 1, 1, 0], bool))
    tokenizer = load_tokenizer(config.target.model)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    print_row(row, {}, "tokens", tokenizer)
    said = tokenizer.decode([67, 68])
    assert re.search(rf"\x1b\[1;32m{re.escape(said)}\x1b\[0m", capsys.readouterr().out)
    monkeypatch.setenv("NO_COLOR", "1")
    print_row(row, {}, "tokens", tokenizer)
    assert f"[[{said}]]" in capsys.readouterr().out


def test_losses_are_those_of_cached_inference(
    config: Config, target: Path, drafter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    number = next(n for n in range(12) if len(stored_row(config, n).runs) == 2)
    shown = inspect(capsys, config, number=number)
    (begin, end), (second, _) = shown["runs"]
    anchors = [second, begin, end - 2, end - 1]
    shown = inspect(capsys, config, number=number, drafter=drafter, anchors=",".join(map(str, anchors)))

    ids_T = torch.tensor(shown["ids"])
    model, full = load_drafter(drafter), load_full(target, TargetConfig(model=str(target)), torch.device("cpu"))
    size = model.config.block_size
    for anchor in anchors:
        with torch.no_grad():
            _, features_TF = TargetDecoder(full, model.config.target_layer_ids).run(ids_T[:anchor])
            context = extend_context(model, [], features_TF)
            logits_MV = block_logits(model, ends_of(full, target), context, int(ids_T[anchor]), size)
        labelled = min(size - 1, next(e for b, e in shown["runs"] if b <= anchor < e) - 1 - anchor)
        label_M = ids_T[anchor + 1 : anchor + size]
        loss_M = F.cross_entropy(logits_MV[:labelled], label_M[:labelled], reduction="none")
        assert shown["loss"][str(anchor)][:labelled] == pytest.approx(loss_M.tolist(), abs=1e-4)
        assert shown["loss"][str(anchor)][labelled:] == [None] * (size - 1 - labelled)
        assert shown["label"][str(anchor)] == label_M[:labelled].tolist() + [None] * (size - 1 - labelled)
        assert shown["prediction"][str(anchor)] == logits_MV.argmax(-1).tolist()
    assert shown["loss"][str(end - 1)] == [None] * (size - 1), "nothing is supervised behind the end of turn"


@pytest.mark.parametrize("kind", ["argmax", "kl"])
def test_the_objective_of_the_config_is_shown(
    kind: str, config: Config, target: Path, drafter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin = stored_row(config, 0).runs[0][0]
    data = inspect(capsys, config, number=0, drafter=drafter, anchors=str(begin))
    assert data["objective"] == "tokens"
    config = dataclasses.replace(config, objective=dataclasses.replace(config.objective, kind=kind))
    shown = inspect(capsys, config, number=0, drafter=drafter, anchors=str(begin))
    assert shown["objective"] == kind and shown["prediction"] == data["prediction"]

    ids_T = torch.tensor(shown["ids"])
    model, full = load_drafter(drafter), load_full(target, TargetConfig(model=str(target)), torch.device("cpu"))
    with torch.no_grad():
        _, features_TF = TargetDecoder(full, model.config.target_layer_ids).run(ids_T[:begin])
        context = extend_context(model, [], features_TF)
        logits_MV = block_logits(model, ends_of(full, target), context, int(ids_T[begin]), model.config.block_size)
        teacher_MV = full(input_ids=ids_T[None]).logits[0, begin : begin + len(logits_MV)]
    label_M = teacher_MV.argmax(-1)
    if kind == "argmax":
        loss_M = F.cross_entropy(logits_MV, label_M, reduction="none")
    else:
        loss_M = F.kl_div(logits_MV.log_softmax(-1), teacher_MV.softmax(-1), reduction="none").sum(-1)
    assert shown["label"][str(begin)] == label_M.tolist() != data["label"][str(begin)]
    assert shown["loss"][str(begin)] == pytest.approx(loss_M.tolist(), abs=1e-4)
    inspect_command(config, 0, None, drafter, str(begin), "cpu", as_json=False)
    assert f"\nobjective {kind}: loss is " in capsys.readouterr().out


def test_blocks_are_shown_offset_by_offset(config: Config, drafter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    end = inspect(capsys, config, number=0)["runs"][0][1]
    inspect_command(config, 0, None, drafter, str(end - 2), "cpu", as_json=False)
    block = capsys.readouterr().out.rpartition(f"anchor {end - 2} ")[2].splitlines()
    assert re.fullmatch(r'  \+1   loss +\d+\.\d{3}  predicts ".+": (right|wrong, label "<\|im_end\|>")', block[1])
    assert [line.startswith(f"  +{k}   no label      predicts ") for k, line in enumerate(block[2:], 2)] == [True] * 2


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_chat_from_a_file(
    config: Config, drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], wrapped: bool
) -> None:
    chat = [{"role": "user", "content": "rain"}, {"role": "assistant", "content": "stone"}]
    file = tmp_path / "chat.json"
    file.write_text(json.dumps({"messages": chat} if wrapped else chat))
    shown = inspect(capsys, config, messages=file, drafter=drafter, anchors="25,23")
    assert shown["runs"] == [[23, 29]]
    assert list(shown["loss"]) == ["23", "25"]
    assert len(shown["loss"]["23"]) == config.drafter.block_size - 1
    assert shown["label"]["25"] == shown["ids"][26:29]


def test_a_chat_from_a_file_is_read_as_a_row_of_a_source(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "chat.json"
    expected = None
    for row in (
        [{"role": "user", "content": "rain"}, {"role": "assistant", "content": "stone"}],
        {"conversations": [{"from": "human", "value": "rain"}, {"from": "gpt", "value": "stone"}]},
        [{"role": "user", "content": [{"type": "text", "text": "rain"}]}, {"role": "assistant", "content": "stone"}],
    ):
        file.write_text(json.dumps(row))
        shown = inspect(capsys, config, messages=file)
        expected = expected or shown
        assert shown == expected


def test_the_tools_of_a_chat_from_a_file_reach_the_template(
    target: Path, config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tooled = Path(shutil.copytree(target, tmp_path / "tooled"))
    (tooled / "chat_template.jinja").write_text("{{ tools[0]['name'] if tools else '' }}" + tiny.CHATML)
    config = dataclasses.replace(config, target=dataclasses.replace(config.target, model=str(tooled)))
    chat = [{"role": "user", "content": "rain"}, {"role": "assistant", "content": "stone"}]
    (tmp_path / "chat.json").write_text(json.dumps({"messages": chat, "tools": [{"name": "weather"}]}))
    shown = inspect(capsys, config, messages=tmp_path / "chat.json")
    assert load_tokenizer(tooled).decode(shown["ids"]).startswith("weather<|im_start|>user")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "give --row N"),
        ({"number": 12}, r"--row 12 is not in the token store, whose 12 rows are 0\.\.11"),
        ({"number": 0, "anchors": "3"}, "go together: give both or neither"),
        ({"number": 0, "drafter": "D", "anchors": "3,x"}, "--anchors '3,x' must be token places"),
        ({"chat": "{}"}, "holds no chat; it must be a list"),
        ({"chat": "[{"}, "cannot be read as JSON"),
        ({"chat": '[{"role": "user", "content": "x"}]'}, "cannot be trained on: no_assistant: no assistant message"),
        ({"good": True, "number": 1}, r"--row 1 is not in .*, whose chat gives the rows 0\.\.0"),
        (
            {"good": True, "drafter": "D", "anchors": "0"},
            r"anchor 0 is outside 1\.\.29; .*no context; possible are 23-28",
        ),
        ({"good": True, "drafter": "D", "anchors": "30"}, r"anchor 30 is outside 1\.\.29; .*possible are 23-28"),
        ({"good": True, "drafter": "D", "anchors": "-1"}, r"anchor -1 is outside"),
        ({"good": True, "drafter": "D", "anchors": "24,22"}, "anchor 22 is not supervised; possible are 23-28"),
    ],
)
def test_bad_requests_say_what_is_possible(config: Config, tmp_path: Path, given: dict[str, Any], message: str) -> None:
    asked: dict[str, Any] = {"number": None, "messages": None, "drafter": None, "anchors": None}
    given = dict(given)
    text = given.pop("chat", None)
    if given.pop("good", False):
        text = '[{"role": "user", "content": "rain"}, {"role": "assistant", "content": "stone"}]'
    if text is not None:
        asked["messages"] = tmp_path / "chat.json"
        asked["messages"].write_text(text)
    with pytest.raises(UserError, match=message):
        inspect_command(config, **(asked | given), device="cpu", as_json=True)


def test_a_drafter_of_another_target_is_refused(config: Config, tmp_path: Path) -> None:
    other = random_models.random_drafter(random_models.drafter_config(random_models.llama_config()))
    export_plain(other, tmp_path / "other")
    begin = stored_row(config, 0).runs[0][0]
    with pytest.raises(
        UserError,
        match=r"hidden size 64, 100 ids and 4 layers, but .* has hidden size 32, 288 ids and 8 layers; take the target",
    ):
        inspect_command(config, 0, None, tmp_path / "other", str(begin), "cpu", as_json=True)


def test_a_tokenizer_past_the_embedding_table_is_refused(
    target: Path, drafter: Path, config: Config, tmp_path: Path
) -> None:
    wide = Path(shutil.copytree(target, tmp_path / "wide"))
    tokenizer = load_tokenizer(wide)
    tokenizer.add_tokens([f"<extra{i}>" for i in range(40)])
    tokenizer.save_pretrained(wide)
    chats = tmp_path / "chats.jsonl"
    chats.write_text(chats.read_text().replace("tea", "<extra39>"))
    config = dataclasses.replace(config, target=dataclasses.replace(config.target, model=str(wide)))
    number = next(n for n in range(12) if stored_row(config, n).tokens_T.max() == 298)
    begin = stored_row(config, number).runs[0][0]
    with pytest.raises(
        UserError, match=r"gives token id 298 in the data, but the model's embedding table has 288 rows"
    ):
        inspect_command(config, number, None, drafter, str(begin), "cpu", as_json=True)
    with pytest.raises(UserError, match="gives token id 298 in the data"):
        resolve_inputs(config, parse_topology("1-1"))
    with pytest.raises(UserError, match="gives token id 298 in the data"):
        regenerate_command(config, tmp_path / "new.jsonl", Sampling(0, max_new_tokens=4), None, None, 2, "cpu")
