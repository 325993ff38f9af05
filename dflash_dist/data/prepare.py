"""Chats to a token store: read, render in parallel, cut to the longest length that a batch can hold, write once."""

from __future__ import annotations

import collections
import contextlib
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dflash_dist.config import Config
from dflash_dist.data.chat import ChatRejected, Row, check_run, first_answer, render, supervised_runs
from dflash_dist.data.fingerprint import check_unchanged, fingerprint_of, ingredients_of, limit_tokens
from dflash_dist.data.sources import Chat, Rejection, read_source
from dflash_dist.data.store import StoreWriter, read_meta, write_once
from dflash_dist.errors import RunFailed, UserError

_CHUNK_CHATS = 32
# Rendered before any worker is started: a small input is done by then, and a bad target is met in this process.
_SERIAL_CHUNKS = 4
_PLACES_KEPT = 3
_LINE_EVERY_S = 10.0


@dataclass(frozen=True)
class PrepareReport:
    """What `prepare` made, as saved in the store's meta.json."""

    chats: int
    documents: int
    held_out: int
    tokens: int
    supervised_tokens: int
    rejected: dict[str, int]
    """Rows and turns by reason."""
    rejected_places: dict[str, list[str]]
    """The first few of each reason, with line or row number."""
    truncated: int
    """Documents cut to the limit."""
    dropped: int
    """Documents longer than the limit, under `data.long_documents=drop`."""
    limit_tokens: int
    seconds: float
    reused: bool
    """The store was there already."""


@dataclass(frozen=True)
class _Rules:
    """How one chat becomes documents."""

    chat_template_kwargs: dict[str, Any]
    min_supervised_tokens: int
    limit_tokens: int
    long_documents: Literal["truncate", "drop"]


@dataclass
class _Outcome:
    """What became of one row of a source."""

    id: str = ""
    documents: list[Row] = field(default_factory=list)
    prompt: list[dict[str, Any]] = field(default_factory=list)
    prompt_is_whole: bool = True
    """False: the template reads more than the prompt's messages, and the evaluation would not."""
    rejections: list[Rejection] = field(default_factory=list)
    truncated: int = 0
    dropped: int = 0
    fitting_limit_tokens: int | None = None
    """The least limit under which a document that the limit cost would be kept."""

    def needs(self, limit_tokens: int) -> None:
        self.fitting_limit_tokens = min(self.fitting_limit_tokens or limit_tokens, limit_tokens)


@dataclass
class _Tally:
    """The sums over all outcomes."""

    chats: int = 0
    truncated: int = 0
    dropped: int = 0
    rejected: collections.Counter[str] = field(default_factory=collections.Counter)
    places: dict[str, list[str]] = field(default_factory=dict)
    fitting_limit_tokens: int | None = None

    def add(self, outcome: _Outcome) -> None:
        self.chats += 1
        self.truncated += outcome.truncated
        self.dropped += outcome.dropped
        for rejection in outcome.rejections:
            self.rejected[rejection.reason] += 1
            places = self.places.setdefault(rejection.reason, [])
            if len(places) < _PLACES_KEPT:
                places.append(rejection.location + (f" ({rejection.detail})" if rejection.detail else ""))
        if (needed := outcome.fitting_limit_tokens) is not None:
            self.fitting_limit_tokens = min(self.fitting_limit_tokens or needed, needed)


def prepare(config: Config, target_folder: Path, on_progress: Callable[[int], None] | None = None) -> Path:
    """The folder of the token store for this config, made unless it is there: `<cache_dir>/stores/<fingerprint>`.

    `on_progress` is called with the number of chats done, instead of the progress shown on stderr. UserError if the
    sources or the target are missing or broken, no document is left, or the store cannot be written.
    """
    return prepare_with_report(config, target_folder, on_progress)[0]


def prepare_with_report(
    config: Config, target_folder: Path, on_progress: Callable[[int], None] | None = None
) -> tuple[Path, PrepareReport]:
    """As `prepare`, with the report of what is in the store."""
    ingredients = ingredients_of(config, target_folder)
    folder = Path(config.cache_dir) / "stores" / fingerprint_of(ingredients)

    def fill(temporary: Path) -> None:
        if (damage := _damage(folder)) and folder.exists():
            print(f"{damage}; it is made anew", file=sys.stderr)
        _fill(temporary, ingredients, config, target_folder, on_progress)

    made = write_once(folder, lambda folder: _damage(folder) is None, fill)
    return folder, _read_report(folder, reused=not made)


def _damage(folder: Path) -> UserError | None:
    """What is wrong with the store, if anything."""
    try:
        _read_report(folder, reused=True)
    except UserError as error:
        return error
    return None


def _read_report(folder: Path, reused: bool) -> PrepareReport:
    report = read_meta(folder)["report"]
    try:
        return PrepareReport(**report, reused=reused)
    except TypeError as error:  # other keys
        raise UserError(
            f"token store {folder} is damaged: the report in meta.json is not of this form: {error}"
        ) from None


def _fill(
    folder: Path,
    ingredients: dict[str, Any],
    config: Config,
    target_folder: Path,
    on_progress: Callable[[int], None] | None,
) -> None:
    """Render all sources into the empty `folder`; UserError if `ingredients` are not what was read in the end."""
    start_s = time.monotonic()
    rules = _Rules(
        config.data.chat_template_kwargs,
        config.data.min_supervised_tokens,
        limit_tokens(config),
        config.data.long_documents,
    )
    chats = itertools.chain.from_iterable(read_source(name, config.data.max_rows) for name in config.data.sources)
    renderer = (target_folder, config.target.trust_remote_code, rules)
    tally = _Tally()
    with (
        StoreWriter(folder, config.data.held_out_share) as writer,
        contextlib.closing(_outcomes(chats, renderer, config.data.workers)) as outcomes,
        _progress(on_progress) as advance,
    ):
        for outcome in outcomes:
            tally.add(outcome)
            if outcome.documents:
                rows = [(_suffix(row), row.tokens_T, row.supervised_T) for row in outcome.documents]
                writer.add(outcome.id, rows, outcome.prompt, may_be_held_out=outcome.prompt_is_whole)
            advance(tally.chats)
        if not writer.documents:
            raise _nothing_left(tally, config)
        check_unchanged(ingredients, config, target_folder)
        writer.finish(
            fingerprint_of(ingredients),
            {
                "chats": tally.chats,
                "rejected": dict(tally.rejected.most_common()),
                "rejected_places": tally.places,
                "truncated": tally.truncated,
                "dropped": tally.dropped,
                "limit_tokens": rules.limit_tokens,
                "seconds": round(time.monotonic() - start_s, 3),
            },
        )


def _suffix(row: Row) -> str:
    return "" if row.turn is None else f"/turn{row.turn}"


class _Renderer:
    """A tokenizer and the rules, applied to chunks of rows."""

    def __init__(self, target_folder: Path, trust_remote_code: bool, rules: _Rules) -> None:
        from dflash_dist.target.load import load_tokenizer

        self._tokenizer = load_tokenizer(target_folder, trust_remote_code)
        self._rules = rules
        if not self._tokenizer.is_fast:
            raise UserError(f"the tokenizer of {target_folder} gives no character offsets; add a tokenizer.json to it")

    def outcomes(self, chunk: Iterable[Chat | Rejection]) -> list[_Outcome]:
        """What became of each row."""
        return [_Outcome(rejections=[c]) if isinstance(c, Rejection) else self._outcome(c) for c in chunk]

    def _outcome(self, chat: Chat) -> _Outcome:
        outcome = _Outcome(chat.id, prompt_is_whole=not chat.template_kwargs)
        try:
            rows = render(self._tokenizer, chat.messages, self._rules.chat_template_kwargs | chat.template_kwargs)
        except ChatRejected as rejected:
            outcome.rejections.append(Rejection(rejected.reason, chat.location, rejected.detail))
            return outcome
        outcome.prompt = chat.messages[: first_answer(chat.messages)]
        for row in rows:
            try:
                self._fit(row, outcome)
            except ChatRejected as rejected:
                place = chat.location + (f", answer {row.turn}" if row.turn else "")
                outcome.rejections.append(Rejection(rejected.reason, place, rejected.detail))
        return outcome

    def _fit(self, row: Row, outcome: _Outcome) -> None:
        """Add the row to the outcome's documents, cut or dropped where it is too long."""
        rules = self._rules
        check_run(row.supervised_T, rules.min_supervised_tokens)
        if len(row.tokens_T) > rules.limit_tokens:
            if rules.long_documents == "drop":
                outcome.dropped += 1
                outcome.needs(len(row.tokens_T))
                return
            begins, ends = supervised_runs(row.supervised_T)
            needed = int(begins[ends - begins >= rules.min_supervised_tokens][0]) + rules.min_supervised_tokens
            if needed > rules.limit_tokens:
                outcome.needs(needed)
                raise ChatRejected("too_short", f"the first answer ends past the limit of {rules.limit_tokens} tokens")
            row = Row(row.tokens_T[: rules.limit_tokens], row.supervised_T[: rules.limit_tokens], row.turn)
            outcome.truncated += 1
        outcome.documents.append(row)


def _outcomes(
    rows: Iterator[Chat | Rejection], renderer: tuple[Path, bool, _Rules], workers: int
) -> Generator[_Outcome, None, None]:
    """The outcome of each row, in the order of the rows whatever the number of workers (0: one for each core)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = workers or cores
    chunks = iter(lambda: list(itertools.islice(rows, _CHUNK_CHATS)), [])
    here = _Renderer(*renderer)
    for chunk in itertools.islice(chunks, None if workers == 1 else _SERIAL_CHUNKS):
        yield from here.outcomes(chunk)
    first = next(chunks, [])
    if not first:
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy locks that other threads hold
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=renderer)
    pending: collections.deque[Future[list[_Outcome]]] = collections.deque()
    try:
        for chunk in itertools.chain([first], chunks):
            pending.append(pool.submit(_work, chunk))
            if len(pending) >= 4 * workers:  # no more in memory than keeps the workers busy
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    except BrokenProcessPool as error:
        raise RunFailed(
            f"a worker process of prepare died, perhaps for memory; try data.workers={workers // 2 or 1}"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_worker: _Renderer


def _start_worker(target_folder: Path, trust_remote_code: bool, rules: _Rules) -> None:
    """Set up this worker process."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends the pool
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = _Renderer(target_folder, trust_remote_code, rules)


def _end_with_parent() -> None:
    """A killed parent cannot end its pool, and the workers would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(chunk: list[Chat | Rejection]) -> list[_Outcome]:
    return _worker.outcomes(chunk)


@contextlib.contextmanager
def _progress(on_progress: Callable[[int], None] | None) -> Iterator[Callable[[int], None]]:
    """A function to call with the number of chats done: a bar where stderr is a terminal, else a line now and then."""
    if on_progress is not None:
        yield on_progress
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("rendering"), BarColumn(), TextColumn("{task.completed} chats"), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=None)
            yield lambda chats: bar.update(task, completed=chats)
    else:
        start_s = last_s = time.monotonic()

        def line(chats: int) -> None:
            nonlocal last_s
            now_s = time.monotonic()
            if now_s - last_s >= _LINE_EVERY_S:
                last_s = now_s
                print(f"rendered {chats} chats, {chats / (now_s - start_s):.0f} a second", file=sys.stderr)

        yield line


def _nothing_left(tally: _Tally, config: Config) -> UserError:
    """The error that says why no document is left."""
    reasons = [f"{count} {reason}, first {tally.places[reason][0]}" for reason, count in tally.rejected.most_common()]
    if tally.dropped:
        reasons.append(f"{tally.dropped} dropped for their length")
    mend = "check data.sources and the target's chat template"
    if tally.fitting_limit_tokens is not None:
        mend = (
            f"the limit is {limit_tokens(config)} tokens (the lesser of data.max_length={config.data.max_length} and "
            f"schedule.token_budget={config.schedule.token_budget}), the shortest document needs "
            f"{tally.fitting_limit_tokens}; raise the limit"
        )
    return UserError(f"data: none of {tally.chats} chats can be trained on: {'; '.join(reasons)}; {mend}")


def print_report(report: PrepareReport, folder: Path) -> None:
    """Prints on stderr what is in the store."""
    lines = [
        f"{report.documents} documents ({report.held_out} held out), {report.tokens} tokens "
        f"({report.supervised_tokens} supervised), "
        + ("as prepared before: " if report.reused else f"in {report.seconds:.1f} s: ")
        + str(folder)
    ]
    if not report.reused and (report.truncated or report.dropped):
        lines.append(f"longer than {report.limit_tokens} tokens: {report.truncated} cut, {report.dropped} dropped")
    if report.rejected and not report.reused:
        lines.append(f"rejected {sum(report.rejected.values())} rows or answers:")
        lines += [f"  {n} {why}: {'; '.join(report.rejected_places[why])}" for why, n in report.rejected.items()]
    print("\n".join(lines), file=sys.stderr)
