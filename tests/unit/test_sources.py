from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_dist.data.sources import CHITCHAT, Chat, Rejection, read_source, source_identity
from dflash_dist.errors import UserError

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
SHAREGPT = [{"from": "system", "value": "be kind"}, {"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]


def write(path: Path, content: Any) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def chats(name: str, max_rows: int | None = None) -> list[Chat]:
    rows = list(read_source(name, max_rows))
    assert all(isinstance(row, Chat) for row in rows)
    return [row for row in rows if isinstance(row, Chat)]


def test_json_holds_a_list_of_rows_or_one_row(tmp_path: Path) -> None:
    rows = chats(write(tmp_path / "a.json", [{"id": 7, "messages": MESSAGES}, {"messages": MESSAGES}]))
    assert [(row.id, row.location) for row in rows] == [("7", "a.json:1"), ("a.json:2", "a.json:2")]
    assert rows[0].messages == MESSAGES
    assert [row.messages for row in chats(write(tmp_path / "b.json", {"messages": MESSAGES}))] == [MESSAGES]


def test_sharegpt_roles_become_the_usual_ones(tmp_path: Path) -> None:
    (row,) = chats(write(tmp_path / "a.json", [{"conversations": SHAREGPT}]))
    assert row.messages == [{"role": "system", "content": "be kind"}, *MESSAGES]


def test_jsonl_keeps_the_line_numbers_of_broken_rows(tmp_path: Path) -> None:
    good = json.dumps({"messages": MESSAGES})
    name = write(tmp_path / "a.jsonl", "\n".join([good, '{"messages": [', "", "[1]", '{"text": "x"}', good, good[:20]]))
    rows = list(read_source(name))
    assert [(row.reason, row.location) for row in rows if isinstance(row, Rejection)] == [
        ("broken_json", "a.jsonl:2"),
        ("not_an_object", "a.jsonl:4"),
        ("no_messages", "a.jsonl:5"),
        ("broken_json", "a.jsonl:7"),
    ]
    assert "the file ends within the row" in rows[-1].detail  # type: ignore[union-attr]
    assert [row.id for row in rows if isinstance(row, Chat)] == ["a.jsonl:1", "a.jsonl:6"]


def test_bytes_that_are_not_utf8_break_only_their_row(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"messages": [{"role": "user", "content": "hi"}]}\n{"messages": "\xff\xfe"}\n')
    first, second = read_source(str(file))
    assert isinstance(first, Chat)
    assert isinstance(second, Rejection) and second.reason == "broken_json"


def test_parquet_gives_what_jsonl_gives(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": ["f()"]}]
    table = pyarrow.Table.from_pylist(
        [{"id": "x", "messages": messages, "other": 1}, {"id": None, "messages": MESSAGES}]
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    first, second = chats(str(tmp_path / "a.parquet"))
    assert (first.id, second.id) == ("x", "a.parquet:2")
    assert second.messages == MESSAGES, "nulls that fill the columns are no keys"
    assert first.messages[2] == {"role": "assistant", "content": None, "tool_calls": ["f()"]}


def test_parquet_fills_no_nulls_into_tools_and_calls(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    tools = [{"name": "f", "parameters": {"a": "int"}}, {"name": "g", "parameters": {"b": "str"}}]
    calls = [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": "x"}}]
    messages = [MESSAGES[0], {"role": "assistant", "content": "", "tool_calls": calls}]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"messages": messages, "tools": tools}, {"messages": MESSAGES, "tools": None}]),
        tmp_path / "a.parquet",
    )
    first, second = chats(str(tmp_path / "a.parquet"))
    assert (first.messages, first.template_kwargs) == (messages, {"tools": tools})
    assert (second.messages, second.template_kwargs) == (MESSAGES, {})


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "hi "}, {"type": "text", "text": "you"}], "hi you"),
        ([{"text": "hi"}, " you"], "hi you"),
        ("", ""),
    ],
)
def test_text_parts_are_joined(tmp_path: Path, content: Any, text: str) -> None:
    name = write(tmp_path / "a.json", [{"messages": [{"role": "user", "content": content}, MESSAGES[1]]}])
    assert chats(name)[0].messages == [{"role": "user", "content": text}, MESSAGES[1]]


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize(
    "content",
    [5, 1.5, True, {"text": "hi"}, [], [5], [{"type": "text", "text": None}], ["hi", {"type": "image", "text": "x"}]],
    ids=str,
)
def test_content_that_is_not_text_is_rejected(tmp_path: Path, role: str, content: Any) -> None:
    rows = [{"messages": [*MESSAGES, {"role": role, "content": content}]}]
    rows.append({"conversations": [*SHAREGPT, {"from": role, "value": content}]})
    read = list(read_source(write(tmp_path / "a.json", rows)))
    assert [(row.reason, row.location) for row in read if isinstance(row, Rejection)] == [
        ("content_not_text", "a.json:1"),
        ("content_not_text", "a.json:2"),
    ]
    assert read[0].detail == f"message 3 holds {type(content).__name__}"  # type: ignore[union-attr]


def test_only_an_assistant_may_say_nothing(tmp_path: Path) -> None:
    rows = [{"messages": [*MESSAGES, {"role": role, "content": None}]} for role in ("assistant", "user", "system")]
    first, *others = read_source(write(tmp_path / "a.json", rows))
    assert isinstance(first, Chat)
    assert [row.reason for row in others if isinstance(row, Rejection)] == ["content_not_text"] * 2


@pytest.mark.parametrize("tools", [5, {"name": "f"}, "f(x)", '{"name": "f"}', "[" * 100_000])
def test_tools_that_are_no_list_are_rejected(tmp_path: Path, tools: Any) -> None:
    (row,) = read_source(write(tmp_path / "a.json", [{"messages": MESSAGES, "tools": tools}]))
    assert isinstance(row, Rejection) and row.reason == "tools_not_a_list"


def test_parquet_that_is_cut_off_or_has_other_columns_is_refused(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "text.parquet")
    with pytest.raises(UserError, match=r"text\.parquet has the columns text; it must have `messages`"):
        list(read_source(str(tmp_path / "text.parquet")))
    whole = (tmp_path / "text.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"cut\.parquet is cut off or not Parquet"):
        list(read_source(str(tmp_path / "cut.parquet")))


def test_max_rows_counts_rejected_rows_too(tmp_path: Path) -> None:
    good = json.dumps({"messages": MESSAGES})
    name = write(tmp_path / "a.jsonl", f"{good}\nbroken\n{good}\n{good}\n")
    assert len(list(read_source(name, 3))) == 3
    assert len(list(read_source(name))) == 4


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet"])
def test_missing_and_empty_files_are_refused(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"a{suffix}"
    for use in (lambda: list(read_source(str(file))), lambda: source_identity(str(file))):
        with pytest.raises(UserError, match=rf"a\{suffix} does not exist; check data\.sources"):
            use()
    file.write_bytes(b"")
    for use in (lambda: list(read_source(str(file))), lambda: source_identity(str(file))):
        with pytest.raises(UserError, match=rf"a\{suffix} is empty \(0 bytes\)"):
            use()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cut.json", json.dumps([{"messages": MESSAGES}] * 3)[:100], r"cut off or not JSON: .* character \d+ of 100"),
        ("digits.json", "[" + "9" * 5000 + "]", "digits.json cannot be read as JSON: Exceeds the limit"),
        ("deep.json", "[" * 100_000, r"deep\.json cannot be read as JSON: maximum recursion"),
        ("number.json", "5", "holds one int, but must hold a list"),
        ("none.json", "[]", "holds no rows"),
        ("blank.jsonl", "\n\n", "holds no rows"),
        ("chats.csv", "a,b", r"has the suffix '\.csv'; known are \.json, \.jsonl, \.parquet"),
    ],
)
def test_files_that_hold_no_rows_are_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        list(read_source(write(tmp_path / name, content)))


@pytest.mark.parametrize(
    "name", ["~nobody-has-this-name/a.jsonl", "~nobody-has-this-name", "/" + "a" * 300 + ".jsonl", "nul\0.jsonl"]
)
@pytest.mark.parametrize("use", [lambda name: list(read_source(name)), source_identity])
def test_names_that_no_file_can_have_are_refused(name: str, use: Any) -> None:
    with pytest.raises(UserError, match=r"data source .*; check data\.sources"):
        use(name)


def test_a_long_name_may_be_one_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert source_identity("a" * 300) == ["a" * 300, ""]


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder; name its files"):
        list(read_source(str(tmp_path)))


def test_the_identity_follows_name_and_content_but_not_the_folder(tmp_path: Path) -> None:
    first = source_identity(write(tmp_path / "a.json", [1]))
    (tmp_path / "other").mkdir()
    assert source_identity(write(tmp_path / "other" / "a.json", [1])) == first
    assert source_identity(write(tmp_path / "b.json", [1])) != first
    assert source_identity(write(tmp_path / "a.json", [2])) != first


def test_a_hub_name_that_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets
    import huggingface_hub.constants

    # Set here, the offline variables are read too late: both libraries read them when first imported.
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        UserError, match=r"nobody/nothing:test is no local file, and the hub did not give its split 'test'"
    ):
        list(read_source("nobody/nothing:test"))


def test_chitchat_is_a_dialogue_that_begins_with_the_user() -> None:
    rows = chats(CHITCHAT, 50)
    assert len(rows) == 50
    assert len({row.id for row in rows}) == 50
    for row in rows:
        roles = [message["role"] for message in row.messages]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"] * (len(roles) % 2)
        assert all(message["content"].strip() for message in row.messages)
    assert rows[0].messages[:2] == [
        {"role": "user", "content": "Hello\nHow are you doing today?"},
        {"role": "assistant", "content": "whats up MD\nim doing good\nhow are you doing?"},
    ]


@pytest.mark.parametrize("use", [lambda name: list(read_source(name)), source_identity])
def test_packages_that_are_absent_or_unknown_are_refused(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="package:nothing is unknown; the one package with chats is"):
        use("package:nothing")
    monkeypatch.setitem(sys.modules, "chitchat_dataset", None)
    with pytest.raises(UserError, match="not installed; run `make setup`, or `pip install"):
        use(CHITCHAT)
