"""One training row as a person can check it: which tokens are supervised, and what a drafter makes of its blocks.

Shape suffixes: T tokens of the row, A anchors, B block size, M = B - 1 masked offsets, F captured features.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_dist.config import Config
from dflash_dist.data.chat import ChatRejected, check_vocabulary, render, supervised_runs
from dflash_dist.data.prepare import prepare
from dflash_dist.data.sources import Chat, Rejection, chat_of_row, read_source
from dflash_dist.data.store import Documents, TokenStore, document_key
from dflash_dist.drafter.anchors import blocks_at, default_gamma
from dflash_dist.drafter.config import check_target
from dflash_dist.drafter.loss import Objective, offset_outcomes
from dflash_dist.errors import UserError
from dflash_dist.export.plain import load_drafter
from dflash_dist.target.capture import TargetForward
from dflash_dist.target.load import load_ends, load_tokenizer, text_config, torch_dtype
from dflash_dist.target.package import target_folder

_CHUNK_BLOCKS = 32
_OBJECTIVES = {
    "tokens": "loss is the cross-entropy, labels are the data's tokens",
    "argmax": "loss is the cross-entropy, labels are the target's most likely tokens",
    "kl": "loss is KL(target || drafter), labels are the target's most likely tokens",
}


@dataclass(frozen=True)
class TrainingRow:
    """A document as the drafter is trained on it."""

    id: str
    number: int
    """Of the store, or of the rows that the chat gives; from 0."""
    rows: int
    """How many there are."""
    held_out: bool
    tokens_T: np.ndarray
    """int64 ids."""
    supervised_T: np.ndarray
    """bool"""

    @property
    def runs(self) -> list[tuple[int, int]]:
        """The stretches of supervised tokens, as (first, one past the last)."""
        begins, ends = supervised_runs(self.supervised_T)
        return [(int(begin), int(end)) for begin, end in zip(begins, ends, strict=True)]


@dataclass(frozen=True)
class BlockOutcome:
    """What the drafter says at offsets 1..B-1 of one anchor."""

    loss: list[float | None]
    """Unweighted, in nats, of the config's objective; None where nothing is trained: past row or supervised run."""
    prediction: list[int]
    label: list[int | None]
    """The data's token, or the target's most likely one where the objective is argmax or kl."""


def stored_row(config: Config, number: int) -> TrainingRow:
    """Row `number` of the config's token store, which is prepared if need be; UserError if it has no such row."""
    store = TokenStore.open(prepare(config, target_folder(config.target.model, Path(config.cache_dir))))
    if not 0 <= number < len(store):
        raise UserError(f"--row {number} is not in the token store, whose {len(store)} rows are 0..{len(store) - 1}")
    document = store.read(np.array([number]))
    name = _document_id(config, int(document.keys_N[0]))
    held_out = bool(store.held_out[number])
    return TrainingRow(name, number, len(store), held_out, document.tokens_T, document.supervised_T)


def chat_row(config: Config, path: Path, number: int | None) -> TrainingRow:
    """Row `number` of the rows that the chat in a JSON file gives, by default the last; not cut to any length.

    UserError if the file holds no chat, or one that cannot be trained on.
    """
    tokenizer = load_tokenizer(
        target_folder(config.target.model, Path(config.cache_dir)), config.target.trust_remote_code
    )
    chat = _read_chat(path)
    try:
        rows = render(tokenizer, chat.messages, config.data.chat_template_kwargs | chat.template_kwargs)
    except ChatRejected as rejected:
        raise UserError(f"the chat in {path} cannot be trained on: {rejected}") from None
    number = len(rows) - 1 if number is None else number
    if not 0 <= number < len(rows):
        raise UserError(f"--row {number} is not in {path}, whose chat gives the rows 0..{len(rows) - 1}")
    row = rows[number]
    name = chat.id if row.turn is None else f"{chat.id}/turn{row.turn}"
    return TrainingRow(name, number, len(rows), False, row.tokens_T.astype(np.int64), row.supervised_T)


def _read_chat(path: Path) -> Chat:
    """The chat of a file that holds one row of a source, or the row's messages alone."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from None
    chat = chat_of_row({"messages": tree} if isinstance(tree, list) else tree, str(path))
    if isinstance(chat, Rejection):
        raise UserError(
            f"{path} holds no chat; it must be a list of messages, or an object with `messages` or `conversations` "
            f"({chat.reason}{chat.detail and ': '}{chat.detail})"
        )
    return chat


def _document_id(config: Config, key: int) -> str:
    """The id whose hash the store keeps, searched for in the sources; the hash in hex where it is not found."""
    seen = Counter[str]()
    for chat in itertools.chain.from_iterable(read_source(name, config.data.max_rows) for name in config.data.sources):
        if not isinstance(chat, Chat):
            continue
        seen[chat.id] += 1
        copy = chat.id if seen[chat.id] == 1 else f"{chat.id}#{seen[chat.id]}"
        for suffix in ["", *(f"/turn{turn}" for turn in range(1, len(chat.messages) + 1))]:
            if document_key(copy + suffix) == key:
                return copy + suffix
    return f"{key:016x}"


def block_outcomes(
    config: Config, row: TrainingRow, drafter_folder: Path, anchors: Sequence[int], device: torch.device
) -> dict[int, BlockOutcome]:
    """What the drafter says at each anchor, by the training path: captured states, packed blocks, the objective's loss.

    UserError if an anchor is none, or the drafter is for another target.
    """
    _check_anchors(row, anchors)
    folder = target_folder(config.target.model, Path(config.cache_dir))
    drafter = load_drafter(drafter_folder).to(device)
    check_target(drafter.config, text_config(folder, config.target.trust_remote_code), drafter_folder, folder)
    check_vocabulary(int(row.tokens_T.max()), drafter.config.vocab_size, folder)
    objective = Objective.of(config.objective)
    settings = dataclasses.replace(config.target, compile=False)  # for one row it would not pay
    forward = TargetForward(
        folder, settings, drafter.config.target_layer_ids, device, last_state=objective.needs_last_state
    )
    lengths_N = np.array([len(row.tokens_T)])
    features_TF = torch.empty(len(row.tokens_T), forward.features, dtype=forward.dtype, device=device)
    forward.capture(torch.from_numpy(row.tokens_T), lengths_N, features_TF)
    taps_TF, last_TH = features_TF.tensor_split([drafter.fc.in_features], dim=1)

    documents = Documents(row.tokens_T, row.supervised_T, lengths_N, np.zeros(1, np.uint64))
    block_size = drafter.config.block_size
    anchors_A = np.array(sorted(set(anchors)), np.int64)
    blocks = blocks_at(
        documents,
        anchors_A,
        block_size=block_size,
        mask_token_id=drafter.config.mask_token_id,
        gamma=default_gamma(block_size),
        pad_to=1,
    )
    positions_T = torch.arange(len(row.tokens_T), device=device)
    dtype = torch_dtype(config.train.dtype, device)
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        outcomes = offset_outcomes(
            drafter,
            load_ends(folder, config.target, device),
            taps_TF,
            positions_T,
            blocks.to(device),
            _CHUNK_BLOCKS,
            objective,
            last_TH if objective.needs_last_state else None,
        )
    loss_AM, prediction_AM, label_AM = (x_AM.tolist() for x_AM in outcomes[:3])
    valid_AM = blocks.valid_AB[:, 1:].tolist()
    return {
        int(anchor): BlockOutcome(
            loss=[value if valid else None for value, valid in zip(loss_AM[a], valid_AM[a], strict=True)],
            prediction=prediction_AM[a],
            label=[value if valid else None for value, valid in zip(label_AM[a], valid_AM[a], strict=True)],
        )
        for a, anchor in enumerate(anchors_A)
    }


def _check_anchors(row: TrainingRow, anchors: Sequence[int]) -> None:
    """UserError, naming what is possible, unless each anchor is a supervised token with context before it."""
    for anchor in anchors:
        if not 0 < anchor < len(row.tokens_T):
            problem = f"is outside 1..{len(row.tokens_T) - 1}; the token at 0 has no context"
        elif not row.supervised_T[anchor]:
            problem = "is not supervised"
        else:
            continue
        raise UserError(f"anchor {anchor} {problem}; possible are {_ranges(row)}")


def _ranges(row: TrainingRow) -> str:
    return ", ".join(f"{max(begin, 1)}-{end - 1}" for begin, end in row.runs)


def as_json(row: TrainingRow, outcomes: dict[int, BlockOutcome], objective: str) -> str:
    """One object; where a drafter was asked, with the objective, and `loss`, `prediction` and `label` by anchor."""
    tree: dict[str, Any] = {
        "id": row.id,
        "row": row.number,
        "held_out": row.held_out,
        "tokens": len(row.tokens_T),
        "supervised_tokens": int(row.supervised_T.sum()),
        "runs": row.runs,
        "ids": row.tokens_T.tolist(),
        "supervised": row.supervised_T.tolist(),
    }
    if outcomes:
        tree["objective"] = objective
        for name in ("loss", "prediction", "label"):
            tree[name] = {str(anchor): getattr(outcome, name) for anchor, outcome in outcomes.items()}
    return json.dumps(tree)


def print_row(row: TrainingRow, outcomes: dict[int, BlockOutcome], objective: str, tokenizer: Any) -> None:
    """Prints the row on stdout, supervised text in colour, or within [[ ]] where there is none; then the blocks."""
    from rich.console import Console
    from rich.text import Text

    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    text = Text()
    place = 0
    for begin, end in row.runs:
        text.append(tokenizer.decode(row.tokens_T[place:begin]))
        said = tokenizer.decode(row.tokens_T[begin:end])
        text.append(said if colour else f"[[{said}]]", "bold green")
        place = end
    text.append(tokenizer.decode(row.tokens_T[place:]))
    print(
        f"row {row.number} of {row.rows}{', held out' if row.held_out else ''}: {row.id}\n{len(row.tokens_T)} tokens, "
        f"{int(row.supervised_T.sum())} supervised in {len(row.runs)} runs: {_ranges(row)}\n"
    )
    if colour:
        Console(highlight=False, soft_wrap=True).print(text)
    else:
        print(text.plain)
    if outcomes:
        print(f"\nobjective {objective}: {_OBJECTIVES[objective]}")
    for anchor, outcome in outcomes.items():
        print(f"\nanchor {anchor} {_quoted(tokenizer, int(row.tokens_T[anchor]))}")
        _print_block(outcome, tokenizer)


def _print_block(outcome: BlockOutcome, tokenizer: Any) -> None:
    offsets = zip(outcome.loss, outcome.prediction, outcome.label, strict=True)
    for offset, (loss, prediction, label) in enumerate(offsets, start=1):
        said = f"predicts {_quoted(tokenizer, prediction)}"
        if loss is None or label is None:
            print(f"  +{offset:<3} no label      {said}")
        else:
            verdict = "right" if prediction == label else f"wrong, label {_quoted(tokenizer, label)}"
            print(f"  +{offset:<3} loss {loss:7.3f}  {said}: {verdict}")


def _quoted(tokenizer: Any, token: int) -> str:
    return json.dumps(tokenizer.decode([token]), ensure_ascii=False)
