"""Chats as the server renders them: token ids, and a mask of exactly the tokens that the target would generate.

A turn's history is rendered with the generation prompt, as the server would before that turn. What the render of the
history and the turn has beyond it, through the end-of-turn token, is supervised.

Shapes: T tokens of one row.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

ROLES = ("system", "developer", "user", "assistant", "tool")
# Stands in for an answer to find where a template puts answers; no template text can begin with this character.
_PROBE = "\ue000"


class ChatRejected(Exception):
    """A chat that cannot be trained on, with a `reason` to count it under."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Row:
    """A rendered chat, or one turn of it with its history."""

    tokens_T: np.ndarray
    """uint32 token ids."""
    supervised_T: np.ndarray
    """bool: what the target would have generated."""
    turn: int | None
    """None: all answers of the chat are supervised; else the only one that is, counted from 1."""


@dataclass(frozen=True)
class _Turn:
    """The render of a chat through one of its answers."""

    text: str
    start: int
    """Characters before the answer."""


def render(tokenizer: Any, messages: list[dict[str, Any]], chat_template_kwargs: dict[str, Any]) -> list[Row]:
    """One row with every answer supervised where the template only appends, else one row for each answer.

    Answers that precede the first user message are history. ChatRejected with a reason if there is nothing to train on.
    """
    answers = _checked_answers(messages)
    turns = [_render_turn(tokenizer, messages, answer, chat_template_kwargs) for answer in answers]
    whole = turns[-1].text
    if all(whole.startswith(turn.text) for turn in turns):
        rows = [_tokenise(tokenizer, whole, turns, None)]
    else:
        rows = [_tokenise(tokenizer, turn.text, [turn], number) for number, turn in enumerate(turns, start=1)]
    rows = [row for row in rows if row.supervised_T.any()]
    if not rows:
        raise ChatRejected("no_supervised_tokens", "the template renders no text for the assistant's turns")
    return rows


def first_answer(messages: list[dict[str, Any]]) -> int | None:
    """The index of the first assistant message after a user message; None if there is none."""
    asked = False
    for index, message in enumerate(messages):
        if asked and message["role"] == "assistant":
            return index
        asked = asked or message["role"] == "user"
    return None


def supervised_runs(supervised_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each stretch of True begins, and where it ends (exclusive)."""
    edges = np.flatnonzero(np.diff(supervised_T.astype(np.int8), prepend=0, append=0))
    return edges[::2], edges[1::2]


def check_run(supervised_T: np.ndarray, min_supervised_tokens: int) -> None:
    """ChatRejected if no supervised run has `min_supervised_tokens` tokens."""
    begins, ends = supervised_runs(supervised_T)
    run = int((ends - begins).max(initial=0))
    if run < min_supervised_tokens:
        raise ChatRejected("too_short", f"the longest supervised run has {run} of {min_supervised_tokens} tokens")


def _checked_answers(messages: list[dict[str, Any]]) -> list[int]:
    """The indices of the messages to supervise."""
    if not messages:
        raise ChatRejected("no_messages")
    for message in messages:
        if message["role"] not in ROLES:
            raise ChatRejected("unknown_role", repr(message["role"])[:100])
    first = first_answer(messages)
    if first is None:
        raise ChatRejected("no_assistant", "no assistant message follows a user message")
    answers = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
    for index in answers:
        content = messages[index].get("content")
        said = content.strip() if isinstance(content, str) else content
        if not said and not messages[index].get("tool_calls"):
            raise ChatRejected("empty_content", f"message {index + 1}")
    return answers


def _render_turn(tokenizer: Any, messages: list[dict[str, Any]], answer: int, kwargs: dict[str, Any]) -> _Turn:
    """Where the answer starts: behind all that the server would have put before it."""
    prompt = _apply(tokenizer, messages[:answer], kwargs, add_generation_prompt=True)
    text = _apply(tokenizer, messages[: answer + 1], kwargs)
    if text.startswith(prompt):
        return _Turn(text, len(prompt))
    # The prompt ends in a scaffold, such as an open thinking block, that the render of the answer lacks. An answer
    # that happens to begin like the scaffold must not lose its first characters to it, so a probe is compared too.
    probe = _apply(tokenizer, [*messages[:answer], {"role": "assistant", "content": _PROBE}], kwargs)
    start = min(_common_prefix(prompt, text), _common_prefix(prompt, probe))
    history = _apply(tokenizer, messages[:answer], kwargs)
    if start < len(history):
        raise ChatRejected(
            "history_diverges",
            f"message {answer + 1} changes the render before it at character {start} of {len(history)}",
        )
    return _Turn(text, start)


def _apply(tokenizer: Any, messages: list[dict[str, Any]], kwargs: dict[str, Any], **more: Any) -> str:
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **(kwargs | more))
    except Exception as error:  # a template is a user's program and can raise anything
        raise ChatRejected("template_error", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
    return str(text)


def _tokenise(tokenizer: Any, text: str, turns: list[_Turn], number: int | None) -> Row:
    try:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    except (TypeError, UnicodeError) as error:  # half a surrogate pair, which JSON can hold
        raise ChatRejected("not_unicode", str(error)[:200]) from error
    tokens_T = np.array(encoded["input_ids"], dtype=np.uint32)
    begins_T, ends_T = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
    supervised_T = np.zeros(len(tokens_T), dtype=bool)
    for turn in turns:
        inside = np.flatnonzero((begins_T >= turn.start) & (ends_T <= len(turn.text)) & (ends_T > begins_T))
        if inside.size:
            supervised_T[inside[: _answer_length(tokenizer, tokens_T[inside], text, ends_T[inside], turn)]] = True
    return Row(tokens_T, supervised_T, number)


def _answer_length(tokenizer: Any, tokens_T: np.ndarray, text: str, ends_T: np.ndarray, turn: _Turn) -> int:
    """How many of an answer's tokens the target generates: through the end-of-turn token, without what follows it."""
    end_of_turn = np.flatnonzero(tokens_T == tokenizer.eos_token_id)
    if not end_of_turn.size:
        # The end of a turn is another token than the end of a text: the special token that only blanks follow.
        special_ids = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
        special = np.flatnonzero(np.isin(tokens_T, special_ids))
        end_of_turn = np.array([i for i in special if not text[ends_T[i] : len(turn.text)].strip()])
    return int(end_of_turn[-1]) + 1 if end_of_turn.size else len(tokens_T)


def _common_prefix(a: str, b: str) -> int:
    return len(os.path.commonprefix([a, b]))  # noqa: RUF071 (these are no paths)
