"""Files of prompts for the evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_dist.errors import UserError
from dflash_dist.evaluate.run import read_prompts


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("text", ["tea?", "one\u2028two\u2029three\u0085four\x0cfive", "🙂 漢字"])
def test_a_line_ends_at_a_newline_alone(tmp_path: Path, bom: bytes, text: str) -> None:
    jsonl, plain = tmp_path / "prompts.jsonl", tmp_path / "prompts.txt"
    # Form feeds must be escaped in JSON, the other characters need not be.
    raw = json.dumps({"messages": asked(text)}, ensure_ascii=False)
    jsonl.write_bytes(bom + f"{raw}\r\n\n{raw}".encode())
    plain.write_bytes(bom + f"{text}\r\n\n{text}".encode())
    assert read_prompts(jsonl) == read_prompts(plain) == [asked(text)] * 2


def test_prompts_may_be_written_as_training_data_is(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    parts = [{"type": "text", "text": "te"}, {"type": "text", "text": "a?"}]
    rows: list[Any] = [
        {"conversations": [{"from": "human", "value": "tea?"}, {"from": "gpt", "value": "yes"}]},
        {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]},
        {"messages": [{"role": "assistant", "content": "I wait."}]},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    assert read_prompts(file) == [asked("tea?")] * 2


@pytest.mark.parametrize(
    "line",
    [
        '{"messages": [{"role": "user", "content": "\\ud800"}]}',
        '{"messages": ' + "[" * 100_000,
        '{"messages": ' + "9" * 5000 + "}",
        '{"messages": [{"role": "user", "content": 5}]}',
        '{"messages": [{"role": "user"}]}',
        '{"messages": [{"role": "owl", "content": "hu"}]}',
        '{"messages": [{"content": "hu"}]}',
        '{"messages": [5]}',
        '{"messages": 5}',
        '{"prompt": "tea?"}',
        '["tea?"]',
        "5",
        "{",
        "\udcff",
    ],
    ids=lambda line: line[:60].encode("unicode_escape").decode(),
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.jsonl"
    good = json.dumps({"messages": asked("tea?")})
    file.write_bytes(f"{good}\n\n{line}\n{good}\n".encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=r"prompts\.jsonl, line 3: .*; each line is a JSON object") as error:
        read_prompts(file)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("name", ["none.jsonl", "none.txt", "a" * 300 + ".jsonl", "."])
def test_files_that_cannot_be_read_are_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"prompts .* cannot be read"):
        read_prompts(tmp_path / name)
