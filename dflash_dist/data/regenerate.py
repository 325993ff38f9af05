"""Chats whose answers are the target's own: each answer is written anew, in order, on top of the new ones before it.

Next to the output `FILE.jsonl` lie, until it is complete, `FILE.jsonl.partial`, a journal with a line for each row of
the sources, and for good `FILE.jsonl.settings.json`, which says how the answers were made. The same command goes on
where it was stopped. At temperature 0 the output does not depend on where that was. When sampling, an answer is
drawn from (seed, row id, turn): in process the output is again the same; a server gets a seed for each answer and may
heed it or not.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fcntl
import importlib.metadata
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from dflash_dist import __version__
from dflash_dist.config import Config
from dflash_dist.data.chat import ROLES
from dflash_dist.data.sources import Chat, Rejection, read_source, source_identity
from dflash_dist.data.store import document_key
from dflash_dist.errors import UserError

CUT = "cut_at_max_new_tokens"
_LINE_EVERY_S = 10.0

Message = dict[str, Any]


@dataclass(frozen=True)
class Sampling:
    """How the target chooses its tokens."""

    temperature: float = 0.7
    """0: always the likeliest token."""
    top_p: float = 0.8
    top_k: int = 20
    """0: no limit."""
    max_new_tokens: int = 4096
    """Tokens of an answer, its end included; a longer one ends its chat."""
    seed: int = 0

    def key(self, chat_id: str, turn: int) -> int:
        """The seed of one answer, 31 bits: what any server takes for one."""
        return document_key(f"{self.seed}/{turn}/{chat_id}") >> 33


@dataclass
class Rewriting:
    """A chat whose answers are being written anew."""

    id: str
    questions: list[list[Message]] = field(default_factory=list)
    """The messages before each answer that is still to come."""
    messages: list[Message] = field(default_factory=list)
    """The chat so far; ends with an answer."""
    answers: int = 0
    ended: str = ""
    """Why the chat ends before its last question, if it does."""
    detail: str = ""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """What else the row holds for the template: `tools`."""

    @property
    def prompt(self) -> list[Message]:
        """The messages that the next answer follows."""
        return [*self.messages, *self.questions[0]]

    def answer(self, message: Message) -> None:
        """Takes the answer to `prompt`; one that says nothing ends the chat."""
        if not message["content"].strip():
            self.end("empty_answer")
            return
        self.messages = [*self.prompt, message]
        self.questions.pop(0)
        self.answers += 1

    def end(self, reason: str, detail: str = "") -> None:
        """Ends the chat after its last answer so far."""
        self.ended, self.detail = reason, detail
        self.questions = []


class Writer(Protocol):
    """Who writes the answers."""

    window_rows: int
    """Rows written as one piece: a resume repeats a window that was not finished, so that its batches are the same."""

    def rewrite(self, chats: Iterable[Rewriting], on_answer: Callable[[], None]) -> Iterator[Rewriting]:
        """The chats, in order, with no question left. `on_answer` is called after each answer, on any thread."""
        ...


@dataclass(frozen=True)
class RegenerateReport:
    """What became of the rows."""

    rows: int
    kept: int
    answers: int
    ended_early: dict[str, int]
    """Kept rows that lost their last turns, by reason."""
    rejected: dict[str, int]
    """Rows without any answer, by reason."""


def regenerate(config: Config, out: Path, settings: dict[str, Any], make_writer: Callable[[], Writer]) -> None:
    """Writes `out`, JSONL rows of `id`, `messages` and any `tools`, from the config's sources; a stopped one goes on.

    `settings`: who writes and how; a resume with others is refused. UserError if it is, if `out` exists and was made
    otherwise, another process is writing it, or no row is left.
    """
    if out.suffix != ".jsonl":
        raise UserError(f"--out {out} must end in .jsonl, so that data.sources can read it")
    settings = settings | {
        "sources": [source_identity(name) for name in config.data.sources],
        "max_rows": config.data.max_rows,
        "chat_template_kwargs": config.data.chat_template_kwargs,
    }
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _locked(_beside(out, "partial")) as journal:
            if _is_complete(out, settings):
                print(f"{out} is complete already", file=sys.stderr)
            else:
                _write_rows(config, journal, make_writer)
                _finish(out, journal)
            _beside(out, "partial").unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror or error}; the same command goes on") from error


def _beside(out: Path, suffix: str) -> Path:
    return out.with_name(f"{out.name}.{suffix}")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[IO[bytes]]:
    """The journal, open for reading and appending by this process alone."""
    with open(path, "a+b") as journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{path} is being written by another process; wait for it or name another --out") from None
        yield journal


def _is_complete(out: Path, settings: dict[str, Any]) -> bool:
    """Whether `out` is whole. Records the settings if it is new; UserError if it was begun with others."""
    record = _beside(out, "settings.json")
    settings = json.loads(json.dumps(settings))  # as they will be read back
    if not record.exists():
        if out.exists() or _beside(out, "partial").stat().st_size:
            raise UserError(f"{out}* exists, but nothing says how it was made; name another --out or remove it")
        versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
        _write_aside(record, {"settings": settings, "versions": {"dflash_dist": __version__} | versions})
        return False
    old = _read_record(record)["settings"]
    changed = [f"{k}: {old.get(k)} -> {settings.get(k)}" for k in old | settings if old.get(k) != settings.get(k)]
    if changed:
        raise UserError(
            f"{out} was begun with other settings ({'; '.join(changed)}); give the same ones, name another --out, or "
            f"remove {out.name}* to begin anew"
        )
    return out.exists()


def _read_record(record: Path) -> Any:
    try:
        return json.loads(record.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{record} is damaged: {error}; remove it and the file it belongs to") from None


def _write_aside(path: Path, content: Any) -> None:
    temporary = _beside(path, "tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _write_rows(config: Config, journal: IO[bytes], make_writer: Callable[[], Writer]) -> None:
    """Appends to the journal what it lacks: a line for each row, in the order of the sources."""
    total = sum(1 for _ in _rows(config))
    written = _whole_lines(journal)
    if written == total:
        return
    writer = make_writer()
    if written % writer.window_rows:
        written -= written % writer.window_rows
        _keep_lines(journal, written)
    if written:
        print(f"goes on after {written} of {total} rows", file=sys.stderr)
    progress = _Progress(written, total)
    chats = (_rewriting(row) for row in itertools.islice(_rows(config), written, None))
    try:
        for chat in writer.rewrite(chats, progress.answered):
            row = dataclasses.asdict(chat)
            journal.write(json.dumps(row).encode() + b"\n")
            journal.flush()
            progress.row_done()
    except KeyboardInterrupt:
        print(f"stopped after {progress.done} of {total} rows; the same command goes on", file=sys.stderr)
        raise


def _rows(config: Config) -> Iterator[Chat | Rejection]:
    return itertools.chain.from_iterable(read_source(name, config.data.max_rows) for name in config.data.sources)


def _whole_lines(journal: IO[bytes]) -> int:
    """The number of whole lines; a torn one at the end is cut off."""
    journal.seek(0)
    count = whole_bytes = 0
    for line in journal:
        if line.endswith(b"\n"):
            count += 1
            whole_bytes += len(line)
    journal.truncate(whole_bytes)
    return count


def _keep_lines(journal: IO[bytes], count: int) -> None:
    journal.seek(0)
    journal.truncate(sum(len(line) for line in itertools.islice(journal, count)))


def _rewriting(row: Chat | Rejection) -> Rewriting:
    """The row with its questions cut apart at its answers; every question is answered, the last one too."""
    if isinstance(row, Rejection):
        return Rewriting(row.location, ended=row.reason, detail=row.detail)
    chat = Rewriting(row.id, template_kwargs=row.template_kwargs)
    question: list[Message] = []
    asked = False
    for message in row.messages:
        if message["role"] not in ROLES:
            return Rewriting(row.id, ended="unknown_role", detail=repr(message["role"])[:100])
        if message["role"] == "tool" or message.get("tool_calls"):
            # What a tool replied would not fit a call that is written anew.
            chat.ended = "tool_calls"
            return chat
        if asked and message["role"] == "assistant":
            if question:
                chat.questions.append(question)
            question = []
        else:
            question.append(message)
            asked = asked or message["role"] == "user"
    if asked and question:
        chat.questions.append(question)
    if not chat.questions:
        chat.ended = "no_question"
    return chat


class _Progress:
    """A line on stderr now and then."""

    def __init__(self, done: int, total: int) -> None:
        self.done = self._begin = done
        self._total = total
        self._answers = 0
        self._start_s = self._last_s = time.monotonic()
        self._lock = threading.Lock()

    def answered(self) -> None:
        """One more answer is written: rows of many turns take their time."""
        with self._lock:
            self._answers += 1
            if time.monotonic() - self._last_s >= _LINE_EVERY_S:
                self._print_line()

    def row_done(self) -> None:
        """One more row is in the journal."""
        with self._lock:
            self.done += 1
            if self.done == self._total:
                self._print_line()

    def _print_line(self) -> None:
        self._last_s = time.monotonic()
        elapsed_s = max(self._last_s - self._start_s, 1e-9)
        rows_s = (self.done - self._begin) / elapsed_s
        left_s = round((self._total - self.done) / rows_s) if rows_s else None
        left = "?" if left_s is None else f"{left_s // 3600}:{left_s // 60 % 60:02}:{left_s % 60:02}"
        print(
            f"regenerated {self.done} of {self._total} rows, {rows_s:.2f} rows/s, "
            f"{self._answers / elapsed_s:.2f} answers/s, {left} left",
            file=sys.stderr,
        )


def _finish(out: Path, journal: IO[bytes]) -> None:
    """Writes the kept rows of the journal to `out`, and the report beside the settings; prints it on stderr."""
    kept = answers = 0
    ended_early, rejected = collections.Counter[str](), collections.Counter[str]()
    firsts: dict[tuple[str, str], str] = {}
    temporary = _beside(out, "tmp")
    journal.seek(0)
    with open(temporary, "w", encoding="utf-8") as file:
        for line in journal:
            chat = Rewriting(**json.loads(line))
            if chat.ended:
                kind, counter = ("ended early", ended_early) if chat.messages else ("rejected", rejected)
                counter[chat.ended] += 1
                firsts.setdefault((kind, chat.ended), chat.id + (f" ({chat.detail})" if chat.detail else ""))
            if chat.messages:
                file.write(json.dumps({"id": chat.id, "messages": chat.messages} | chat.template_kwargs) + "\n")
                kept += 1
                answers += chat.answers
    rows = kept + rejected.total()
    reasons = [
        f"{kind} {count} {reason}, first {firsts[kind, reason]}"
        for kind, counter in (("ended early", ended_early), ("rejected", rejected))
        for reason, count in counter.most_common()
    ]
    if not kept:
        raise UserError(
            f"data: none of {rows} rows got an answer: {'; '.join(reasons)}; remove {out.name}.* and mend it"
        )
    report = RegenerateReport(rows, kept, answers, dict(ended_early.most_common()), dict(rejected.most_common()))
    record = _beside(out, "settings.json")
    _write_aside(record, _read_record(record) | {"report": dataclasses.asdict(report)})
    os.replace(temporary, out)
    print("\n".join([f"kept {kept} of {rows} rows, with {answers} answers", *reasons]), file=sys.stderr)
