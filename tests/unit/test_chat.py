"""Masks under templates that behave like those of the model families, with the real SmolLM2 tokenizer."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from dflash_dist.data.chat import ChatRejected, Row, check_run, first_answer, prompt_ids, render, supervised_runs

# Thinking is kept only behind the last question; with enable_thinking=false the prompt closes an empty thought.
QWEN3_LIKE = """
{%- set ns = namespace(last=0) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
{%- set said = m.content -%}{%- set thought = '' -%}
{%- if m.role == 'assistant' and '</think>' in said -%}
{%- set thought = said.split('</think>')[0].split('<think>')[-1].strip() -%}
{%- set said = said.split('</think>')[-1].lstrip() -%}
{%- endif -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or thought) -%}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- said + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}
"""

# The prompt opens a thought that no render of an answer shows.
SCAFFOLD_ONLY_IN_PROMPT = """
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif -%}
"""

# Begins with a token of its own, strips what is said, ends turns with a token that need not be the tokenizer's eos.
LLAMA3_LIKE = """
{{- '<|begin_of_text|>' -}}
{%- for m in messages -%}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif -%}
"""

# Strict about turns; the end of a text appears behind the last answer alone.
MISTRAL_LIKE = """
{%- for m in messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif -%}
{%- if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}
{%- else %}{{ ' ' + m.content + (eos_token if loop.last else '') }}{% endif -%}
{%- endfor -%}
"""

# Calls the assistant "model", knows no system turn, begins with a token of its own and strips what is said.
GEMMA_LIKE = """
{{- '<bos>' -}}
{%- for m in messages -%}
{%- if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no') }}{% endif -%}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' -}}
{{- m.content | trim + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif -%}
"""

# Says itself which text the assistant generates: for a mask that other trainers take, and that is not needed here.
GENERATION_TAGS = """
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- else %}{{ m.content + '<|im_end|>\\n' }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""

# The prompt opens a thought; what is rendered of an answer keeps its thought, in the newest answer alone.
QWEN35_LIKE = QWEN3_LIKE.replace(
    "{{- '<|im_start|>assistant\\n' -}}\n{%- if", "{{- '<|im_start|>assistant\\n<think>\\n' -}}\n{%- if false and"
)

# The prompt opens a thought; no answer is rendered with its thought, not even the newest.
R1_LIKE = """
{{- '<|begin_of_text|>' -}}
{%- for m in messages -%}
{%- if m.role == 'user' %}{{ '<|User|>' + m.content }}{% endif -%}
{%- if m.role == 'assistant' %}{{ '<|Assistant|>' + m.content.split('</think>')[-1] + '<|im_end|>' }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif -%}
"""

CHAT = [
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And naïve 漢字 🙂?"},
    {"role": "assistant", "content": "Ça va: 漢字 🙂\n\n```python\nx = 1\n```\n"},
    {"role": "user", "content": "Bye"},
]


def with_template(tokenizer: Any, template: str, special: tuple[str, ...] = (), eos: str | None = None) -> Any:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    if special:
        tokenizer.add_tokens(list(special), special_tokens=True)
    if eos is not None:
        tokenizer.eos_token = eos
    return tokenizer


def answers(tokenizer: Any, row: Row) -> list[str]:
    """The text of each supervised run."""
    assert row.tokens_T.dtype == np.uint32
    assert row.supervised_T.dtype == bool
    return [tokenizer.decode(row.tokens_T[a:b]) for a, b in zip(*supervised_runs(row.supervised_T), strict=True)]


def text_of(tokenizer: Any, row: Row) -> str:
    return str(tokenizer.decode(row.tokens_T))


def reason(tokenizer: Any, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    with pytest.raises(ChatRejected) as rejected:
        render(tokenizer, messages, kwargs)
    return rejected.value.reason


def test_chatml_supervises_each_answer_through_its_end_token(smollm2_tokenizer: Any) -> None:
    (row,) = render(smollm2_tokenizer, CHAT, {})
    assert row.turn is None
    assert answers(smollm2_tokenizer, row) == ["Four.<|im_end|>", CHAT[3]["content"] + "<|im_end|>"]
    text = text_of(smollm2_tokenizer, row)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text == smollm2_tokenizer.apply_chat_template(CHAT[:4], tokenize=False), "nothing after the last answer"


def test_a_system_message_of_the_chat_replaces_the_default(smollm2_tokenizer: Any) -> None:
    (row,) = render(smollm2_tokenizer, [{"role": "system", "content": "Be brief."}, *CHAT[:2]], {})
    assert text_of(smollm2_tokenizer, row).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat")
    assert answers(smollm2_tokenizer, row) == ["Four.<|im_end|>"]


def test_an_end_token_within_an_answer_does_not_end_it(smollm2_tokenizer: Any) -> None:
    messages = [CHAT[0], {"role": "assistant", "content": "ChatML ends with <|im_end|> you see."}]
    (row,) = render(smollm2_tokenizer, messages, {})
    assert answers(smollm2_tokenizer, row) == ["ChatML ends with <|im_end|> you see.<|im_end|>"]


def test_what_is_said_before_the_first_question_is_history(smollm2_tokenizer: Any) -> None:
    messages = [{"role": "assistant", "content": "Welcome!"}, *CHAT[:2]]
    (row,) = render(smollm2_tokenizer, messages, {})
    assert "Welcome!" in text_of(smollm2_tokenizer, row)
    assert answers(smollm2_tokenizer, row) == ["Four.<|im_end|>"]
    assert first_answer(messages) == 2


THOUGHTFUL = [
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\nFour."},
    {"role": "user", "content": "And three?"},
    {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nSeven."},
]


THOUGHT = "<think>\nHm.\n</think>\n\n"
LLAMA3_SPECIAL = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
# Template (None: SmolLM2's own), special tokens, end of turn, arguments.
TEMPLATES: dict[str, tuple[str | None, tuple[str, ...], str, dict[str, Any]]] = {
    "chatml with a default system turn": (None, (), "<|im_end|>", {}),
    "qwen3, thinking": (QWEN3_LIKE, (), "<|im_end|>", {}),
    "qwen3, not thinking": (QWEN3_LIKE, (), "<|im_end|>", {"enable_thinking": False}),
    "qwen3.5": (QWEN35_LIKE, (), "<|im_end|>", {}),
    "llama 3": (LLAMA3_LIKE, LLAMA3_SPECIAL, "<|eot_id|>", {}),
    "gemma": (GEMMA_LIKE, ("<bos>", "<start_of_turn>", "<end_of_turn>"), "<end_of_turn>", {}),
    "generation tags": (GENERATION_TAGS, (), "<|im_end|>", {}),
    "mistral": (MISTRAL_LIKE, ("[INST]", "[/INST]"), "<|im_end|>", {}),
    "r1": (R1_LIKE, ("<|begin_of_text|>", "<|User|>", "<|Assistant|>"), "<|im_end|>", {}),
}
THINKING = ("qwen3, thinking", "qwen3.5", "r1")


@pytest.mark.parametrize("name", TEMPLATES)
def test_supervised_is_what_follows_the_generation_prompt(smollm2_tokenizer: Any, name: str) -> None:
    template, special, end, kwargs = TEMPLATES[name]
    tokenizer = with_template(smollm2_tokenizer, template or smollm2_tokenizer.chat_template, special)
    said = ["Four, of course.", "```python\nx = 1\n```", "漢字 🙂"]
    chat = []
    for question, answer in zip(("What is two and two?", "And naïve 漢字 🙂?", "Bye"), said, strict=True):
        content = THOUGHT + answer if name in THINKING else answer
        chat += [{"role": "user", "content": question}, {"role": "assistant", "content": content}]

    seen = []
    for row in render(tokenizer, chat, kwargs):
        for begin, stop in zip(*supervised_runs(row.supervised_T), strict=True):
            answer = len(seen)
            prompt = prompt_ids(tokenizer, chat[: 2 * answer + 1], kwargs)
            generated = tokenizer.decode(row.tokens_T[begin:stop])
            assert row.tokens_T[:begin].tolist() == prompt
            thought = THOUGHT if name in THINKING else ""
            if name in ("qwen3.5", "r1"):
                thought = thought.removeprefix("<think>\n")  # the prompt holds it
            space = " " if name == "mistral" else ""
            assert generated == space + thought + said[answer] + end
            assert tokenizer(generated, add_special_tokens=False)["input_ids"] == row.tokens_T[begin:stop].tolist()
            seen.append(generated)
    assert len(seen) == 3


def test_qwen3_like_history_without_thinking_gives_a_row_for_each_answer(smollm2_tokenizer: Any) -> None:
    tokenizer = with_template(smollm2_tokenizer, QWEN3_LIKE)
    first, second = render(tokenizer, THOUGHTFUL, {})
    assert (first.turn, second.turn) == (1, 2)
    assert answers(tokenizer, first) == ["<think>\nEasy.\n</think>\n\nFour.<|im_end|>"]
    assert answers(tokenizer, second) == ["<think>\nHm.\n</think>\n\nSeven.<|im_end|>"]
    assert "Easy" not in text_of(tokenizer, second)
    # Before each answer stands what the server would have been asked.
    for row, history in ((first, THOUGHTFUL[:1]), (second, THOUGHTFUL[:3])):
        prompt = tokenizer.apply_chat_template(history, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(row.tokens_T[: int(np.argmax(row.supervised_T))]) == prompt


def test_qwen3_like_thinking_turned_off_leaves_the_prefilled_thought_unsupervised(smollm2_tokenizer: Any) -> None:
    tokenizer = with_template(smollm2_tokenizer, QWEN3_LIKE)
    rows = render(tokenizer, CHAT, {"enable_thinking": False})
    assert [row.turn for row in rows] == [1, 2]
    assert [answers(tokenizer, row) for row in rows] == [["Four.<|im_end|>"], [CHAT[3]["content"] + "<|im_end|>"]]
    for row, history in zip(rows, (CHAT[:1], CHAT[:3]), strict=True):
        prompt = tokenizer.apply_chat_template(
            history, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        assert prompt.endswith("<think>\n\n</think>\n\n")
        assert tokenizer.decode(row.tokens_T[: int(np.argmax(row.supervised_T))]) == prompt


@pytest.mark.parametrize("content", ["Four.", "<b>Four</b>", "<thin ice>"])
def test_a_scaffold_that_no_answer_shows_is_left_out(smollm2_tokenizer: Any, content: str) -> None:
    tokenizer = with_template(smollm2_tokenizer, SCAFFOLD_ONLY_IN_PROMPT)
    (row,) = render(tokenizer, [CHAT[0], {"role": "assistant", "content": content}, *CHAT[2:4]], {})
    assert answers(tokenizer, row) == [content + "<|im_end|>", CHAT[3]["content"] + "<|im_end|>"]
    assert "<think>" not in text_of(tokenizer, row)


@pytest.mark.parametrize("eos", ["<|eot_id|>", "<|endoftext|>"])
def test_llama3_like_ends_with_the_end_of_turn_whatever_the_eos(smollm2_tokenizer: Any, eos: str) -> None:
    tokenizer = with_template(smollm2_tokenizer, LLAMA3_LIKE, LLAMA3_SPECIAL, eos)
    rows = render(tokenizer, CHAT, {})
    said = [["Four.<|eot_id|>"], [CHAT[3]["content"].strip() + "<|eot_id|>"]]
    assert [answers(tokenizer, row) for row in rows] == said
    assert [text_of(tokenizer, row).count("<|begin_of_text|>") for row in rows] == [1, 1]


def test_a_row_for_each_answer_only_where_the_tokens_of_a_prompt_depend_on_what_follows(smollm2_tokenizer: Any) -> None:
    # This tokenizer reads two newlines as one token at the end of a prompt, and as two before an answer.
    tokenizer = with_template(smollm2_tokenizer, LLAMA3_LIKE, LLAMA3_SPECIAL)
    assert [row.turn for row in render(tokenizer, CHAT, {})] == [1, 2]
    one_newline = LLAMA3_LIKE.replace("<|end_header_id|>\\n\\n", "<|end_header_id|>\\n")
    (row,) = render(with_template(smollm2_tokenizer, one_newline, LLAMA3_SPECIAL), CHAT, {})
    assert row.turn is None


@pytest.mark.parametrize("answer", ["\nFour.", "  Four.", "\n\n Four."])
def test_an_answer_that_begins_with_blanks_is_supervised_from_its_first_one(
    smollm2_tokenizer: Any, answer: str
) -> None:
    chat = [CHAT[0], {"role": "assistant", "content": answer}]
    (row,) = render(smollm2_tokenizer, chat, {})
    assert answers(smollm2_tokenizer, row) == [answer + "<|im_end|>"]
    begin = int(np.argmax(row.supervised_T))
    assert row.tokens_T[:begin].tolist() == prompt_ids(smollm2_tokenizer, chat[:1], {})


def test_end_of_turn_that_is_not_the_eos_leaves_the_newline_unsupervised(smollm2_tokenizer: Any) -> None:
    tokenizer = with_template(smollm2_tokenizer, smollm2_tokenizer.chat_template, eos="<|endoftext|>")
    (row,) = render(tokenizer, CHAT, {})
    assert answers(tokenizer, row) == ["Four.<|im_end|>", CHAT[3]["content"] + "<|im_end|>"]


# Closes each turn, and behind the newest answer the text too.
PHI3_LIKE = """
{%- for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif -%}
"""


@pytest.mark.parametrize("answer", ["Four.", "Texts end with <|endoftext|> you see."])
def test_nothing_behind_the_end_of_turn_is_supervised(smollm2_tokenizer: Any, answer: str) -> None:
    special = ("<|user|>", "<|assistant|>", "<|end|>")
    tokenizer = with_template(smollm2_tokenizer, PHI3_LIKE, special, eos="<|endoftext|>")
    (row,) = render(tokenizer, [CHAT[0], {"role": "assistant", "content": answer}], {})
    assert text_of(tokenizer, row).endswith("<|end|>\n<|endoftext|>")
    assert answers(tokenizer, row) == [answer + "<|end|>"]


@pytest.mark.parametrize("template", [QWEN3_LIKE, QWEN35_LIKE])
def test_an_empty_thought_before_an_answer_is_unsupervised(smollm2_tokenizer: Any, template: str) -> None:
    tokenizer = with_template(smollm2_tokenizer, template)
    (row,) = render(tokenizer, CHAT[:2], {})
    assert "assistant\n<think>\n\n</think>\n\nFour." in text_of(tokenizer, row)
    assert answers(tokenizer, row) == ["Four.<|im_end|>"]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_reasoning_that_the_template_leaves_out_is_not_trained_on(smollm2_tokenizer: Any, key: str) -> None:
    messages = [CHAT[0], {"role": "assistant", "content": "Four.", key: "\nTwice two.\n"}]
    assert reason(smollm2_tokenizer, messages) == "reasoning_not_rendered"
    shows = smollm2_tokenizer.chat_template.replace(
        "message['content']", f"((message.{key} | trim + ' So: ' if message.{key} else '') + message['content'])"
    )
    tokenizer = with_template(smollm2_tokenizer, shows)
    (row,) = render(tokenizer, messages, {})
    assert answers(tokenizer, row) == ["Twice two. So: Four.<|im_end|>"]


def test_a_template_that_ends_only_the_last_answer_gives_a_row_for_each(smollm2_tokenizer: Any) -> None:
    tokenizer = with_template(smollm2_tokenizer, MISTRAL_LIKE)
    rows = render(tokenizer, CHAT, {})
    assert [answers(tokenizer, row) for row in rows] == [
        [" Four.<|im_end|>"],
        [" " + CHAT[3]["content"] + "<|im_end|>"],
    ]


def test_tool_messages_and_calls_reach_the_template(smollm2_tokenizer: Any) -> None:
    template = smollm2_tokenizer.chat_template.replace(
        "message['content']",
        "((message['content'] or '') + (message['tool_calls'] | tojson if message['tool_calls'] else ''))",
    )
    tokenizer = with_template(smollm2_tokenizer, template)
    messages = [
        CHAT[0],
        {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "Four."},
    ]
    (row,) = render(tokenizer, messages, {})
    assert answers(tokenizer, row) == ['[{"name": "add"}]<|im_end|>', "Four.<|im_end|>"]
    assert "<|im_start|>tool\n4<|im_end|>" in text_of(tokenizer, row)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], "no_messages"),
        ([{"role": "narrator", "content": "x"}], "unknown_role"),
        ([CHAT[0]], "no_assistant"),
        ([CHAT[1]], "no_assistant"),
        ([CHAT[0], {"role": "assistant", "content": " \n"}], "empty_content"),
        ([CHAT[0], {"role": "assistant", "content": None}], "empty_content"),
        ([CHAT[0], {"role": "assistant", "content": "half a pair: \ud800"}], "not_unicode"),
        ([{"role": "user", "content": None}, CHAT[1]], "template_error"),
    ],
)
def test_chats_are_rejected_by_reason(smollm2_tokenizer: Any, messages: list[dict[str, Any]], expected: str) -> None:
    assert reason(smollm2_tokenizer, messages) == expected


def test_templates_that_raise_or_lose_the_answer_or_change_history_reject(smollm2_tokenizer: Any) -> None:
    assert reason(with_template(smollm2_tokenizer, MISTRAL_LIKE), [CHAT[0], CHAT[0], CHAT[1]]) == "template_error"
    silent = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    assert reason(with_template(smollm2_tokenizer, silent), CHAT) == "no_supervised_tokens"
    counting = "{{ messages | length }}" + smollm2_tokenizer.chat_template
    assert reason(with_template(smollm2_tokenizer, counting), CHAT) == "history_diverges"


def test_a_run_is_measured_by_its_longest_stretch() -> None:
    mask = np.array([1, 1, 0, 1, 1, 1, 0, 1], dtype=bool)
    check_run(mask, 3)
    with pytest.raises(ChatRejected, match="too_short: the longest supervised run has 3 of 4 tokens"):
        check_run(mask, 4)
    with pytest.raises(ChatRejected, match="has 0 of 2"):
        check_run(np.zeros(4, dtype=bool), 2)


@pytest.mark.parametrize("content", ["", "Let me look."])
def test_tool_calls_that_the_template_leaves_out_are_not_trained_on(smollm2_tokenizer: Any, content: str) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
    messages = [CHAT[0], {"role": "assistant", "content": content, "tool_calls": [call]}]
    assert reason(smollm2_tokenizer, messages) == "tool_calls_not_rendered"
    shows = (
        "{%- for m in messages %}{{ m.role + ': ' + m.content + (m.tool_calls | tojson if m.tool_calls else '') }}\n"
    )
    shows += "<|im_end|>{% endfor -%}{% if add_generation_prompt %}assistant: {% endif -%}"
    (row,) = render(with_template(smollm2_tokenizer, shows), messages, {})
    assert "look" in answers(smollm2_tokenizer, row)[0]


def test_special_tokens_that_close_a_tool_call_do_not_end_the_turn(smollm2_tokenizer: Any) -> None:
    """As Kimi's and DeepSeek's templates write calls."""
    template = "{%- for m in messages %}{{ m.role + ': ' + (m.content or '') }}"
    template += "{% if m.tool_calls %}{{ m.tool_calls | tojson + '<|call_end|>' }}{% endif %}{{ '<|im_end|>\\n' }}"
    template += "{% endfor -%}{% if add_generation_prompt %}assistant: {% endif -%}"
    tokenizer = with_template(smollm2_tokenizer, template, special=("<|call_end|>",), eos="<|im_end|>")
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    (row,) = render(tokenizer, [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [call]}], {})
    (answer,) = answers(tokenizer, row)
    assert answer.endswith("<|call_end|><|im_end|>")
