"""Where chats come from: files, hub data sets and a package; each row becomes a chat or a rejection with its place."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_dist.errors import UserError

CHITCHAT = "package:chitchat-dataset"
_SUFFIXES = (".json", ".jsonl", ".parquet")
_COLUMNS = ("id", "messages", "conversations", "tools")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}


@dataclass(frozen=True)
class Chat:
    """One chat of a source."""

    id: str
    location: str
    """`<file name>:<row or line number>`, counted from 1."""
    messages: list[dict[str, Any]]
    """Each with `role` and `content`, a text or None, and whatever else it holds for the template."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """What else the row holds for the template: `tools`."""


@dataclass(frozen=True)
class Rejection:
    """A row, or a turn of it, that is not trained on."""

    reason: str
    location: str
    detail: str = ""


def read_source(name: str, max_rows: int | None = None) -> Iterator[Chat | Rejection]:
    """Each of the first `max_rows` rows of the source `name`, in order.

    UserError, at the first row or when the reading gets there, if the source is missing, empty or cut off.
    """
    if name.startswith("package:"):
        rows: Iterable[Chat | Rejection] = _chitchat_rows(_chitchat_file(name))
    elif is_local(name):
        rows = _file_rows(checked_file(name))
    else:
        rows = _hub_rows(name)
    return itertools.islice(rows, max_rows)


def source_identity(name: str) -> list[str]:
    """What changes when the content of the source changes: file name and sha256, or data set and revision.

    Imports no heavy library for files and packages. UserError if the source is missing or empty.
    """
    if name.startswith("package:"):
        file = _chitchat_file(name)
        return [name, importlib.metadata.version("chitchat-dataset"), sha256(file)]
    if is_local(name):
        file = checked_file(name)
        return [file.name, sha256(file)]
    return [name, _hub_revision(_split_of(name)[0])]


def is_local(name: str) -> bool:
    """Whether `name` is meant as a file of this machine: it exists, or looks like a file or an explicit path."""
    return name.endswith(_SUFFIXES) or name.startswith(("/", "./", "../", "~")) or os.path.exists(name)


def checked_file(name: str) -> Path:
    """The file that the source `name` means; UserError if it is missing, empty or of an unknown kind."""
    file = Path(os.path.expanduser(name))
    try:
        status = file.stat()
    except FileNotFoundError:
        raise UserError(f"data source {name} does not exist; check data.sources") from None
    except (OSError, ValueError) as error:  # a name that is too long or holds a null byte, a closed folder
        raise UserError(f"data source {name!r} cannot be read: {error}; check data.sources") from None
    if stat.S_ISDIR(status.st_mode):
        raise UserError(f"data source {name} is a folder; name its files in data.sources")
    if file.suffix not in _SUFFIXES:
        raise UserError(f"data source {name} has the suffix {file.suffix!r}; known are {', '.join(_SUFFIXES)}")
    if status.st_size == 0:
        raise UserError(f"data source {name} is empty (0 bytes); write it again or take it out of data.sources")
    return file


def sha256(file: Path) -> str:
    """Hex of the hash of the file's content; UserError if it cannot be read."""
    try:
        with open(file, "rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}; check that it is there and open to you") from error


def _file_rows(file: Path) -> Iterator[Chat | Rejection]:
    readers = {".json": _json_rows, ".jsonl": jsonl_rows, ".parquet": _parquet_rows}
    count = 0
    try:
        for number, row in readers[file.suffix](file):
            count += 1
            location = f"{file.name}:{number}"
            yield row if isinstance(row, Rejection) else chat_of_row(row, location)
    except OSError as error:
        raise UserError(f"data source {file} cannot be read: {error.strerror or error}") from error
    if count == 0:
        raise UserError(f"data source {file} holds no rows; write it again or take it out of data.sources")


def _json_rows(file: Path) -> Iterator[tuple[int, Any]]:
    content = _load_json(file)
    if not isinstance(content, (list, dict)):
        raise UserError(
            f"data source {file} holds one {type(content).__name__}, but must hold a list of rows or one row"
        )
    yield from enumerate(content if isinstance(content, list) else [content], start=1)


def _load_json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except json.JSONDecodeError as error:
        raise UserError(
            f"data source {file} is cut off or not JSON: {error.msg} at line {error.lineno}, "
            f"character {error.pos} of {len(error.doc)}; get the whole file again (one row a line needs .jsonl)"
        ) from error
    except (ValueError, RecursionError) as error:  # not UTF-8, nested too deep, a number of thousands of digits
        raise UserError(f"data source {file} cannot be read as JSON: {error}; write it again") from error


def jsonl_rows(file: Path) -> Iterator[tuple[int, Any]]:
    """The number of each line that is not blank, counted from 1, with its value or a Rejection; OSError."""
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                whole = line.endswith(b"\n")
                detail = f"{error}" if whole else f"the file ends within the row: {error}"
                yield number, Rejection("broken_json", f"{file.name}:{number}", detail)


def _parquet_rows(file: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        table = pyarrow.parquet.ParquetFile(file)
        columns = [name for name in _COLUMNS if name in table.schema_arrow.names]
        if not {"messages", "conversations"} & set(columns):
            raise UserError(
                f"data source {file} has the columns {', '.join(table.schema_arrow.names)}; "
                "it must have `messages` or `conversations`"
            )
        rows = (
            row
            for batch in table.iter_batches(batch_size=256, columns=columns)
            for row in _without_nulls(batch.to_pylist())
        )
        yield from enumerate(rows, start=1)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"data source {file} is cut off or not Parquet: {' '.join(str(error).split())[:300]}; get the file again"
        ) from error


def _hub_rows(name: str) -> Iterator[Chat | Rejection]:
    data_set, split = _split_of(name)
    try:
        import datasets
    except ImportError:
        raise UserError(f"data source {name} needs the hub client; pip install 'datasets>=3'") from None
    try:
        rows = datasets.load_dataset(data_set, split=split)
    except Exception as error:  # the hub client raises errors of many libraries: HTTP, validation, files
        raise UserError(
            f"data source {name} is no local file, and the hub did not give its split {split!r} "
            f"({type(error).__name__}: {' '.join(str(error).split())[:300]}); check data.sources and the network"
        ) from error
    for number, row in enumerate(rows, start=1):
        yield chat_of_row(_without_nulls(row), f"{data_set}:{number}")


def _split_of(name: str) -> tuple[str, str]:
    data_set, _, split = name.partition(":")
    return data_set, split or "train"


def _hub_revision(data_set: str) -> str:
    """The commit of the data set on the hub or, without a network, in the local cache; "" if neither is known."""
    from huggingface_hub import HfApi, constants

    try:
        return str(HfApi().dataset_info(data_set, timeout=10).sha)
    except Exception:  # offline, in one of many ways: what is in the cache will be read
        reference = Path(constants.HF_HUB_CACHE) / f"datasets--{data_set.replace('/', '--')}" / "refs" / "main"
        return reference.read_text().strip() if os.path.isfile(reference) else ""


def _chitchat_file(name: str) -> Path:
    if name != CHITCHAT:
        raise UserError(f"data source {name} is unknown; the one package with chats is {CHITCHAT}")
    spec = importlib.util.find_spec("chitchat_dataset")
    if spec is None or spec.origin is None:
        raise UserError(
            f"data source {name} is not installed; run `make setup`, or `pip install 'dflash-dist[realdata]'`"
        )
    return checked_file(str(Path(spec.origin).parent / "dataset.json"))


def _chitchat_rows(file: Path) -> Iterator[Chat | Rejection]:
    """Chats between two people; who speaks first is the user."""
    for number, (name, row) in enumerate(_load_json(file).items(), start=1):
        location = f"chitchat-dataset:{number}"
        lines = [line for turn in row["messages"] for line in turn if line["text"].strip()]
        messages: list[dict[str, Any]] = []
        for sender, group in itertools.groupby(lines, key=lambda line: line["sender"]):
            role = "user" if sender == lines[0]["sender"] else "assistant"
            text = "\n".join(line["text"].strip() for line in group)
            if messages and messages[-1]["role"] == role:  # a third speaker after the second
                messages[-1]["content"] += "\n" + text
            else:
                messages.append({"role": role, "content": text})
        yield Chat(name, location, messages) if messages else Rejection("no_messages", location)


def chat_of_row(row: Any, location: str) -> Chat | Rejection:
    """The chat that a row of a source holds, as `messages` or ShareGPT's `conversations`, or why it holds none."""
    if not isinstance(row, dict):
        return Rejection("not_an_object", location, f"the row is a {type(row).__name__}")
    turns = row.get("messages") or row.get("conversations")
    if not isinstance(turns, list):
        return Rejection("no_messages", location, f"the row's keys are {', '.join(map(str, row))[:200]}")
    messages = []
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict):
            return Rejection("no_messages", location, f"a message is a {type(turn).__name__}, not an object")
        # Templates would take a null for given.
        message = {key: value for key, value in turn.items() if value is not None and key not in ("from", "value")}
        role = turn.get("role", turn.get("from"))
        message["role"] = _SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else str(role)
        content = turn.get("content", turn.get("value"))
        message["content"] = _text_of(content)
        if message["content"] is None and not (content is None and message["role"] == "assistant"):
            return Rejection("content_not_text", location, f"message {number} holds {type(content).__name__}")
        messages.append(message)
    try:
        tools = _tools_of(row.get("tools"))
    except (ValueError, RecursionError) as error:
        return Rejection("tools_not_a_list", location, str(error))
    row_id = row.get("id")
    row_id = location if row_id in (None, "") else str(row_id)
    return Chat(row_id, location, messages, {"tools": tools} if tools else {})


def _text_of(content: Any) -> str | None:
    """A message's content as one text; None if it is neither a text nor a list of text parts."""
    if not isinstance(content, list) or not content:
        return content if isinstance(content, str) else None
    parts = [
        part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part for part in content
    ]
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(content) else None


def _tools_of(tools: Any) -> list[Any]:
    """A row's tools, which many data sets hold as JSON in a string; ValueError if they are no list."""
    if isinstance(tools, str) and tools.strip():
        tools = json.loads(tools)
    if tools and not isinstance(tools, list):
        raise ValueError(f"`tools` is a {type(tools).__name__}")
    return tools or []


def _without_nulls(value: Any) -> Any:
    """Columnar formats fill the keys that an object lacks with nulls: the value without them, at any depth."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
