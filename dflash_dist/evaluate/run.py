"""Measuring a drafter folder's tau on prompts: the data's held-out ones, a file's, or the bundled ones."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch

from dflash_dist.config import Config, EvaluateConfig, TargetConfig
from dflash_dist.data.chat import ROLES
from dflash_dist.data.sources import Rejection, chat_of_row, jsonl_rows
from dflash_dist.data.store import TokenStore
from dflash_dist.drafter.config import check_target
from dflash_dist.errors import UserError
from dflash_dist.evaluate.acceptance import evaluate, rendered_prompt
from dflash_dist.export.plain import load_drafter
from dflash_dist.target.load import ends_of, load_full, load_tokenizer, text_config
from dflash_dist.target.package import target_folder


def evaluate_drafter(
    config: Config, store: TokenStore, drafter_folder: Path, device_type: str
) -> dict[str, Any] | None:
    """What `evaluate_on` returns, on prompts of documents that were kept out of training; None where there is none.

    `store`: what the drafter was trained on. Prompts that leave the target no room for an answer are left out.
    """
    folder = target_folder(config.target.model, Path(config.cache_dir))
    prompts = _fitting(config, store.prompts(config.evaluate.prompts), folder)
    if not prompts:
        return None
    return evaluate_on(
        prompts,
        drafter_folder,
        folder,
        config.target,
        device_type,
        config.evaluate,
        config.data.chat_template_kwargs,
    )


def _fitting(config: Config, prompts: list[list[dict[str, Any]]], folder: Path | str) -> list[list[dict[str, Any]]]:
    """The prompts that are shorter than the target's context; how many are not is said on stderr."""
    context = text_config(folder, config.target.trust_remote_code).max_position_embeddings
    tokenizer = load_tokenizer(folder, config.target.trust_remote_code)
    kwargs = config.data.chat_template_kwargs
    fitting = [chat for chat in prompts if len(rendered_prompt(tokenizer, chat, kwargs)) < context]
    if len(fitting) < len(prompts):
        left_out = len(prompts) - len(fitting)
        print(
            f"{left_out} of {len(prompts)} held-out prompts fill the target's context of {context} tokens: left out",
            file=sys.stderr,
        )
    return fitting


def evaluate_on(
    prompts: list[list[dict[str, str]]],
    drafter_folder: Path,
    folder: Path | str,
    target_settings: TargetConfig,
    device_type: str,
    settings: EvaluateConfig,
    chat_template_kwargs: dict[str, Any],
) -> dict[str, Any]:
    """Figures of real speculative decoding, as `evaluate.acceptance.evaluate` gives them."""
    print(f"evaluating on {len(prompts)} prompts, each with and without the drafter ...", file=sys.stderr)
    device = torch.device(device_type)
    drafter = load_drafter(drafter_folder).to(device)
    target_config = text_config(folder, target_settings.trust_remote_code)
    check_target(drafter.config, target_config, drafter_folder, folder)
    tokenizer = load_tokenizer(folder, target_settings.trust_remote_code)
    target = load_full(folder, target_settings, device)
    return evaluate(
        prompts,
        tokenizer=tokenizer,
        target=target,
        drafter=drafter,
        ends=ends_of(target, folder),
        settings=settings,
        chat_template_kwargs=chat_template_kwargs,
        on_progress=lambda done, total: print(f"evaluated {done} of {total} prompts", file=sys.stderr),
    )


def bundled_prompts() -> Path:
    """The prompt file in configs/ of the source tree; UserError where the package was installed without it."""
    path = Path(__file__).resolve().parents[2] / "configs" / "prompts" / "mixed.jsonl"
    if not path.is_file():
        raise UserError(
            "the bundled prompts are configs/prompts/mixed.jsonl of the source tree, which an installed package lacks; "
            "give --prompts FILE, with a prompt a line (.txt) or a JSON object with `messages` a line (.jsonl)"
        )
    return path


def read_prompts(path: Path) -> list[list[dict[str, Any]]]:
    """The chats of a file, each cut before a closing assistant turn; UserError if it or one of its lines holds none.

    A .txt file holds one user's prompt a line; any other one a JSON object with `messages` a line.
    """
    plain = path.suffix == ".txt"
    try:
        chats = _text_prompts(path) if plain else [_messages(row, path, number) for number, row in jsonl_rows(path)]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompts {path} cannot be read: {error}") from None
    prompts = [chat for chat in chats if chat]
    if not prompts:
        holds = "a prompt" if plain else "a JSON object with `messages`"
        raise UserError(f"prompts {path} holds no chat; each line is {holds}")
    return prompts


def _text_prompts(path: Path) -> list[list[dict[str, Any]]]:
    # Not splitlines, which also breaks at characters that a prompt may hold, such as U+2028.
    lines = path.read_text(encoding="utf-8-sig").split("\n")
    return [[{"role": "user", "content": line.strip()}] for line in lines if line.strip()]


def _messages(row: Any, path: Path, number: int) -> list[dict[str, Any]]:
    """The messages of line `number` before a closing assistant turn; UserError if they are none."""
    chat = row if isinstance(row, Rejection) else chat_of_row(row, f"{path}:{number}")
    if isinstance(chat, Rejection):
        problem = f"{chat.reason} ({chat.detail})"
    elif unknown := [message["role"] for message in chat.messages if message["role"] not in ROLES]:
        problem = f"the role {unknown[0]!r} is none of {', '.join(ROLES)}"
    elif re.search("[\ud800-\udfff]", "".join(message["content"] or "" for message in chat.messages)):
        problem = "a text holds half a surrogate pair, which is no character"
    else:
        asked = chat.messages
        while asked and asked[-1]["role"] == "assistant":
            asked = asked[:-1]
        return asked
    raise UserError(f"prompts {path}, line {number}: {problem}; each line is a JSON object with `messages`")
