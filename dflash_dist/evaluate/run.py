"""Measuring a drafter folder's tau on prompts: the data's held-out ones, or a file's."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from dflash_dist.config import Config, TargetConfig
from dflash_dist.data.prepare import prepare
from dflash_dist.data.store import TokenStore
from dflash_dist.errors import UserError
from dflash_dist.evaluate.acceptance import evaluate
from dflash_dist.export.plain import load_drafter
from dflash_dist.target.load import TargetEnds, load_full, load_tokenizer
from dflash_dist.target.package import target_folder


def evaluate_drafter(config: Config, drafter_folder: Path, device_type: str) -> dict[str, Any] | None:
    """What `evaluate_on` returns, on prompts of documents that were kept out of training; None where there is none."""
    folder = target_folder(config.target.model, Path(config.cache_dir))
    prompts = TokenStore.open(prepare(config, Path(folder))).prompts(config.evaluate.prompts)
    if not prompts:
        return None
    return evaluate_on(
        prompts,
        drafter_folder,
        folder,
        config.target,
        device_type,
        config.evaluate.max_new_tokens,
        config.data.chat_template_kwargs,
    )


def evaluate_on(
    prompts: list[list[dict[str, str]]],
    drafter_folder: Path,
    folder: Path | str,
    settings: TargetConfig,
    device_type: str,
    max_new_tokens: int,
    chat_template_kwargs: dict[str, Any],
) -> dict[str, Any]:
    """Figures of real speculative decoding, as `evaluate.acceptance.evaluate` gives them."""
    device = torch.device(device_type)
    drafter = load_drafter(drafter_folder).to(device)
    tokenizer = load_tokenizer(folder, settings.trust_remote_code)
    target = load_full(folder, settings, device)
    vocab, hidden = target.config.get_text_config().vocab_size, target.config.get_text_config().hidden_size
    if (drafter.config.vocab_size, drafter.config.hidden_size) != (vocab, hidden):
        raise UserError(
            f"drafter {drafter_folder} is for hidden size {drafter.config.hidden_size} and "
            f"{drafter.config.vocab_size} ids, but {folder} has {hidden} and {vocab}; take the target it was made for"
        )
    softcap = getattr(target.config.get_text_config(), "final_logit_softcapping", None)
    ends = TargetEnds(target.get_input_embeddings(), target.get_output_embeddings().weight.detach(), softcap)
    return evaluate(
        prompts,
        tokenizer=tokenizer,
        target=target,
        drafter=drafter,
        ends=ends,
        max_new_tokens=max_new_tokens,
        chat_template_kwargs=chat_template_kwargs,
        on_progress=lambda done, total: print(f"evaluated {done} of {total} prompts", file=sys.stderr),
    )


def read_prompts(path: Path) -> list[list[dict[str, str]]]:
    """The chats of a JSONL file with `messages`, each cut before a closing assistant turn."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompts {path} cannot be read: {error}") from None
    prompts = []
    for number, line in enumerate(lines, start=1):
        try:
            messages = json.loads(line)["messages"] if line.strip() else []
            while messages and messages[-1]["role"] == "assistant":
                messages = messages[:-1]
            if not all(isinstance(message["content"], str) for message in messages):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"prompts {path}, line {number}: not a JSON object with `messages`, a list of role and content"
            ) from None
        if messages:
            prompts.append(messages)
    if not prompts:
        raise UserError(f"prompts {path} holds no chat; each line is a JSON object with `messages`")
    return prompts
