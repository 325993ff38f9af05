"""Chats as the server renders them: token ids, and a mask of exactly the tokens that the target would generate.

A turn's history is rendered with the generation prompt, as the server would before that turn. What the render of the
history and the turn has beyond it, through the end-of-turn token, is supervised. The tokens before it are those of the
prompt alone: some tokenizers read the end of a prompt otherwise where an answer follows.

Shapes: T tokens of one row.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dflash_dist.errors import UserError

ROLES = ("system", "developer", "user", "assistant", "tool")
# Stands in for an answer to find where a template puts answers; no template text can begin with this character.
_PROBE = "\ue000"
_THOUGHT, _THOUGHT_END = "<think>", "</think>"
# What a template puts before an answer without thought; its beginning may stand in the prompt already.
_EMPTY_THOUGHT = re.compile(rf"({_THOUGHT})?\n*{_THOUGHT_END}\n{{0,2}}")


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
    end_id: int | None = None
    """The token that ends the turn, where other special tokens may stand before it: those that close tool calls."""


@dataclass(frozen=True)
class _Tokens:
    """A text's tokens."""

    ids_T: np.ndarray
    """uint32"""
    begins_T: np.ndarray
    """int64 characters before the token."""
    ends_T: np.ndarray
    """int64 characters through the token."""


def render(tokenizer: Any, messages: list[dict[str, Any]], chat_template_kwargs: dict[str, Any]) -> list[Row]:
    """One row with every answer supervised where each prompt is the begin of the next, else one row for each answer.

    Answers that precede the first user message are history. ChatRejected with a reason if there is nothing to train on.
    """
    answers = _checked_answers(messages)
    turns = [_checked_turn(tokenizer, messages, answer, chat_template_kwargs) for answer in answers]
    added = tokenizer.added_tokens_decoder  # a new dictionary at each access
    shared = _shared_row(tokenizer, added, turns)
    rows = [shared] if shared else [_turn_row(tokenizer, added, turn, i) for i, turn in enumerate(turns, start=1)]
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


def prompt_ids(tokenizer: Any, messages: list[dict[str, Any]], chat_template_kwargs: dict[str, Any]) -> list[int]:
    """Token ids of the chat up to where the answer begins, as the server renders them; ChatRejected if it cannot."""
    text = _apply(tokenizer, messages, chat_template_kwargs, add_generation_prompt=True)
    ids = [int(token) for token in _encode(tokenizer, text)["input_ids"]]
    if not ids:
        raise ChatRejected("empty_prompt", "the template renders no text for the messages before the answer")
    return ids


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


def check_vocabulary(largest_token: int, vocab_size: int, target: Path | str) -> None:
    """UserError where a token that the tokenizer of `target` gives has no row in the model's embedding table."""
    if largest_token >= vocab_size:
        raise UserError(
            f"the tokenizer of {target} gives token id {largest_token} in the data, but the model's embedding table "
            f"has {vocab_size} rows; take the tokenizer that belongs to the model"
        )


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


def _checked_turn(tokenizer: Any, messages: list[dict[str, Any]], answer: int, kwargs: dict[str, Any]) -> _Turn:
    """The turn without an empty thought, which the server has in the prompt; ChatRejected if its thought is lost."""
    turn = _render_turn(tokenizer, messages, answer, kwargs)
    thought = messages[answer].get("reasoning_content") or messages[answer].get("reasoning")
    if isinstance(thought, str) and thought.strip() not in turn.text[turn.start :]:
        raise ChatRejected("reasoning_not_rendered", f"message {answer + 1}")
    if messages[answer].get("tool_calls"):
        turn = replace(turn, end_id=tokenizer.eos_token_id)
    empty = _EMPTY_THOUGHT.match(turn.text, turn.start)
    return replace(turn, start=empty.end()) if empty else turn


def _render_turn(tokenizer: Any, messages: list[dict[str, Any]], answer: int, kwargs: dict[str, Any]) -> _Turn:
    """Where the answer starts: behind all that the server would have put before it."""
    prompt = _apply(tokenizer, messages[:answer], kwargs, add_generation_prompt=True)
    text = _apply(tokenizer, messages[: answer + 1], kwargs)
    if messages[answer].get("tool_calls"):
        silent = {"role": "assistant", "content": messages[answer].get("content") or ""}
        if _apply(tokenizer, [*messages[:answer], silent], kwargs) == text:
            raise ChatRejected("tool_calls_not_rendered", f"message {answer + 1}")
    if text.startswith(prompt):
        return _Turn(text, len(prompt))
    # The prompt ends in a scaffold, such as an open thinking block, that the render of the answer lacks. An answer
    # that happens to begin like the scaffold must not lose its first characters to it, so a probe is compared too.
    probe = _apply(tokenizer, [*messages[:answer], {"role": "assistant", "content": _PROBE}], kwargs)
    start = min(_common_prefix(prompt, text), _common_prefix(prompt, probe))
    content: Any = messages[answer].get("content")
    dropped = isinstance(content, str) and _THOUGHT_END in content and _THOUGHT_END not in text[start:]
    if dropped and prompt.rstrip().endswith(_THOUGHT):
        return _restored_thought(prompt, content, probe.partition(_PROBE)[2])
    history = _apply(tokenizer, messages[:answer], kwargs)
    if start < len(history):
        raise ChatRejected(
            "history_diverges",
            f"message {answer + 1} changes the render before it at character {start} of {len(history)}",
        )
    return _Turn(text, start)


def _restored_thought(prompt: str, content: str, end: str) -> _Turn:
    """The turn as the target wrote it, where the template drops the thought of even the newest answer (DeepSeek-R1)."""
    opened = prompt[: prompt.rindex(_THOUGHT)] if content.startswith(_THOUGHT) else prompt
    return _Turn(opened + content + end, _common_prefix(prompt, opened + content))


def _apply(tokenizer: Any, messages: list[dict[str, Any]], kwargs: dict[str, Any], **more: Any) -> str:
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **(kwargs | more))
    except Exception as error:  # a template is a user's program and can raise anything
        raise ChatRejected("template_error", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
    return str(text)


def _encode(tokenizer: Any, text: str, **more: Any) -> Any:
    try:
        return tokenizer(text, add_special_tokens=False, verbose=False, **more)
    except (TypeError, UnicodeError) as error:  # half a surrogate pair, which JSON can hold
        raise ChatRejected("not_unicode", str(error)[:200]) from error


def _encode_text(tokenizer: Any, text: str) -> _Tokens:
    encoded = _encode(tokenizer, text, return_offsets_mapping=True)
    begins_T, ends_T = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
    return _Tokens(np.array(encoded["input_ids"], dtype=np.uint32), begins_T, ends_T)


def _shared_row(tokenizer: Any, added: dict[int, Any], turns: list[_Turn]) -> Row | None:
    """The last turn's render with all answers supervised; None if a turn's prompt has other text or tokens than it."""
    whole = turns[-1].text
    if not all(whole.startswith(turn.text) for turn in turns):
        return None
    tokens = _encode_text(tokenizer, whole)
    supervised_T = np.zeros(len(tokens.ids_T), dtype=bool)
    added_T = np.isin(tokens.ids_T, list(added))
    for turn in turns:
        cut = int(np.searchsorted(tokens.begins_T, turn.start))
        # Text on either side of an added token is read apart: a prompt need be read again from its last one only.
        last = int(np.flatnonzero(added_T[:cut])[-1]) if added_T[:cut].any() else 0
        prompt_end = _encode(tokenizer, whole[tokens.begins_T[last] : turn.start])["input_ids"]
        if tokens.ids_T[last:cut].tolist() != prompt_end:
            return None
        supervised_T |= _answer_mask(added, tokens, turn)
    return Row(tokens.ids_T, supervised_T, None)


def _turn_row(tokenizer: Any, added: dict[int, Any], turn: _Turn, number: int) -> Row:
    """The tokens of the prompt alone, then those of the answer."""
    prompt_T = np.array(_encode(tokenizer, turn.text[: turn.start])["input_ids"], dtype=np.uint32)
    tokens = _encode_text(tokenizer, turn.text)
    cut = int(np.searchsorted(tokens.begins_T, turn.start))
    if cut and tokens.ends_T[cut - 1] > turn.start:  # a token lies across the border
        tokens, cut = _encode_text(tokenizer, turn.text[turn.start :]), 0
        turn = _Turn(turn.text[turn.start :], 0, turn.end_id)
    answer_mask_T = _answer_mask(added, tokens, turn)[cut:]
    supervised_T = np.concatenate([np.zeros(len(prompt_T), dtype=bool), answer_mask_T])
    return Row(np.concatenate([prompt_T, tokens.ids_T[cut:]]), supervised_T, number)


def _answer_mask(added: dict[int, Any], tokens: _Tokens, turn: _Turn) -> np.ndarray:
    """bool [T]: the tokens of the turn's answer that the target generates: without what follows its end of turn.

    The turn ends at the first of the special tokens that close its text, or the first that is `turn.end_id` where that
    is given; that need not be the eos, which may follow it. A special token before other text is part of what is said.
    `added`: the tokenizer's added tokens by id. `tokens`: of a text that begins with the turn's.
    """
    inside = np.flatnonzero(
        (tokens.begins_T >= turn.start) & (tokens.ends_T <= len(turn.text)) & (tokens.ends_T > tokens.begins_T)
    )
    generated = inside
    for count in range(len(inside), 0, -1):
        last = inside[count - 1]
        token = added.get(int(tokens.ids_T[last]))
        if token and token.special:
            if turn.end_id in (None, tokens.ids_T[last]):
                generated = inside[:count]
        elif turn.text[tokens.begins_T[last] : tokens.ends_T[last]].strip():
            break
    mask_T = np.zeros(len(tokens.ids_T), dtype=bool)
    mask_T[generated] = True
    return mask_T


def _common_prefix(a: str, b: str) -> int:
    return len(os.path.commonprefix([a, b]))  # noqa: RUF071 (these are no paths)
