"""Answers from a server that speaks the OpenAI chat protocol, such as SGLang or vLLM."""

from __future__ import annotations

import collections
import http.client
import json
import os
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from dflash_dist.data.regenerate import CUT, Message, Rewriting, Sampling
from dflash_dist.errors import RunFailed, UserError

KEY_VARIABLE = "OPENAI_API_KEY"
_ATTEMPTS = 6
FIRST_WAIT_S = 1.0
"""Before the second attempt; doubled for each later one."""
_TIMEOUT_S = 1800.0
_PASSING_CODES = (408, 409, 425, 429)
"""Beside 5xx: what a later attempt may not meet."""
_REFUSED_CODES = (400, 413, 422)
"""This one request cannot be served, such as a prompt past the context."""

In = TypeVar("In")
Out = TypeVar("Out")


class _Passing(Exception):
    """A failure that another attempt may not meet."""


class _Refused(Exception):
    """The server will not answer this request."""


class ServerWriter:
    """Writes several chats at once, each turn by turn, a request an answer."""

    window_rows = 1

    def __init__(
        self,
        url: str,
        model: str,
        chat_template_kwargs: dict[str, Any],
        sampling: Sampling,
        requests_in_flight: int,
    ) -> None:
        """`url`: up to and with `/v1`."""
        self._url = url.rstrip("/") + "/chat/completions"
        self._sampling = sampling
        self._in_flight = requests_in_flight
        self._options: dict[str, Any] = {
            "model": model,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_new_tokens,
            # Not OpenAI's own, but SGLang's and vLLM's, whose -1 is no limit; left out, the model's default would hold.
            "top_k": sampling.top_k or -1,
        }
        if chat_template_kwargs:
            self._options["chat_template_kwargs"] = chat_template_kwargs
        self._key = os.environ.get(KEY_VARIABLE, "")
        self._opener = urllib.request.build_opener(_NoRedirect)

    def rewrite(self, chats: Iterable[Rewriting], on_answer: Callable[[], None]) -> Iterator[Rewriting]:
        """See Writer."""
        return ordered_map(lambda chat: self._rewrite_chat(chat, on_answer), chats, self._in_flight)

    def _rewrite_chat(self, chat: Rewriting, on_answer: Callable[[], None]) -> Rewriting:
        while chat.questions:
            try:
                choice = self._ask(chat)
            except _Refused as refused:
                chat.end("server_refused", str(refused))
                continue
            if choice["finish_reason"] == "stop":
                chat.answer(_answer_of(choice["message"]))
            else:
                chat.end(CUT if choice["finish_reason"] == "length" else f"finish_{choice['finish_reason']}")
            on_answer()
        return chat

    def _ask(self, chat: Rewriting) -> dict[str, Any]:
        """The server's choice for the chat's next answer; RunFailed if no attempt gets one."""
        seed = self._sampling.key(chat.id, chat.answers)
        request = self._options | chat.template_kwargs | {"messages": chat.prompt, "seed": seed}
        body = json.dumps(request).encode()
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(FIRST_WAIT_S * 2 ** (attempt - 1))
            try:
                return self._request(body)
            except _Passing as error:
                problem = error
        raise RunFailed(
            f"{self._url} failed {_ATTEMPTS} times on row {chat.id}: {problem}; mend the server, then the same command "
            "goes on"
        )

    def _request(self, body: bytes) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            with self._opener.open(urllib.request.Request(self._url, body, headers), timeout=_TIMEOUT_S) as reply:
                return _choice_of(reply.read())
        except urllib.error.HTTPError as error:
            detail = f"HTTP {error.code} {self._without_key(error.read().decode(errors='replace'))}"
            if error.code >= 500 or error.code in _PASSING_CODES:
                raise _Passing(detail) from None
            if error.code in _REFUSED_CODES:
                raise _Refused(detail) from None
            raise UserError(
                f"{self._url} refuses every request: {detail}; check --url, --model and the environment variable "
                f"{KEY_VARIABLE}"
            ) from None
        except (OSError, http.client.HTTPException) as error:  # no connection, or one that broke off
            raise _Passing(self._without_key(str(error))) from None

    def _without_key(self, text: str) -> str:
        """One line of a message that may quote the API key."""
        text = text.replace(self._key, "***") if self._key else text
        return " ".join(text.split())[:300]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the API key to another host."""

    def redirect_request(self, *arguments: Any, **keywords: Any) -> None:
        """No request: the redirect is reported as the error that it is here."""


def _choice_of(reply: bytes) -> dict[str, Any]:
    """The first choice of a reply, with `finish_reason` and a `message` that holds text."""
    try:
        choice = json.loads(reply)["choices"][0]
        message, _ = choice["message"], choice["finish_reason"]
        if not isinstance(message.get("content") or "", str):
            raise TypeError("message.content is no text")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _Passing(f"the reply is not a chat completion ({error!r}): {reply[:100]!r}") from None
    return dict(choice)


def _answer_of(message: dict[str, Any]) -> Message:
    """The answer as templates read it; a server that parses thinking gives it under one of two names."""
    answer = {"role": "assistant", "content": message.get("content") or ""}
    thought = message.get("reasoning_content") or message.get("reasoning")
    return answer | {"reasoning_content": thought} if thought else answer


def ordered_map(function: Callable[[In], Out], items: Iterable[In], workers: int) -> Iterator[Out]:
    """`map` on `workers` threads, results in order. The threads end with the process: Ctrl-C waits for no request."""
    tasks: queue.SimpleQueue[tuple[Future[Out], In]] = queue.SimpleQueue()

    def work() -> None:
        while True:
            future, item = tasks.get()
            try:
                future.set_result(function(item))
            except BaseException as error:
                future.set_exception(error)
                return  # the error ends the run: no task after it is begun here

    for _ in range(workers):
        threading.Thread(target=work, daemon=True).start()
    pending: collections.deque[Future[Out]] = collections.deque()
    for item in items:
        future: Future[Out] = Future()
        tasks.put((future, item))
        pending.append(future)
        # Twice as many as run, so that a slow one at the head does not idle the rest at once.
        if len(pending) >= 2 * workers:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()
