"""Answers written in this process, by the target itself.

Shape suffixes: R rows of a batch, L padded prompt length, N new tokens, V vocabulary rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_dist.config import TargetConfig
from dflash_dist.data.chat import ChatRejected, check_vocabulary, prompt_ids
from dflash_dist.data.regenerate import CUT, Rewriting, Sampling
from dflash_dist.errors import UserError
from dflash_dist.evaluate.acceptance import stop_ids
from dflash_dist.target.load import load_full, load_tokenizer

_WINDOW_BATCHES = 2


class TargetWriter:
    """Writes a window of chats turn by turn: prompts of like length share a batch, padded on the left."""

    def __init__(
        self,
        folder: Path | str,
        settings: TargetConfig,
        chat_template_kwargs: dict[str, Any],
        sampling: Sampling,
        batch_rows: int,
        device: torch.device,
    ) -> None:
        self._folder = folder
        self._tokenizer = load_tokenizer(folder, settings.trust_remote_code)
        self._target = load_full(folder, settings, device)
        self._kwargs = chat_template_kwargs
        self._sampling = sampling
        self._batch_rows = batch_rows
        self.window_rows = _WINDOW_BATCHES * batch_rows
        self._stop_ids = stop_ids(self._target)
        if not self._stop_ids:
            raise UserError(
                f"target {folder} names no end-of-turn token; add eos_token_id to its generation_config.json"
            )
        self._context = int(self._target.config.get_text_config().max_position_embeddings)
        self._vocab_size = int(self._target.config.get_text_config().vocab_size)
        self._forget_generation_defaults()

    def rewrite(self, chats: Iterable[Rewriting], on_answer: Callable[[], None]) -> Iterator[Rewriting]:
        """See Writer."""
        chats = iter(chats)
        while window := list(itertools.islice(chats, self.window_rows)):
            while asking := [chat for chat in window if chat.questions]:
                self._answer(asking, on_answer)
            yield from window

    def _answer(self, chats: list[Rewriting], on_answer: Callable[[], None]) -> None:
        """The next answer of each chat."""
        asked: list[tuple[Rewriting, list[int]]] = []
        for chat in chats:
            try:
                ids = prompt_ids(self._tokenizer, chat.prompt, self._kwargs | chat.template_kwargs)
            except ChatRejected as rejected:
                chat.end(rejected.reason, rejected.detail)
                continue
            check_vocabulary(max(ids), self._vocab_size, self._folder)
            if len(ids) < self._context:
                asked.append((chat, ids))
            else:
                chat.end("prompt_too_long", f"{len(ids)} tokens, and the target's context holds {self._context}")
        asked.sort(key=lambda pair: len(pair[1]))
        for begin in range(0, len(asked), self._batch_rows):
            batch = asked[begin : begin + self._batch_rows]
            for (chat, _), new in zip(batch, self._generate(batch), strict=True):
                length = next((i for i, token in enumerate(new) if token in self._stop_ids), None)
                if length is None:
                    chat.end(CUT)
                else:
                    chat.answer({"role": "assistant", "content": self._text(new[:length])})
                on_answer()

    def _text(self, ids: list[int]) -> str:
        """All that was generated, thinking and its marks too: the template knows what to do with them."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @torch.inference_mode()
    def _generate(self, batch: Sequence[tuple[Rewriting, list[int]]]) -> list[list[int]]:
        """The new tokens of each prompt, as many as the context has room for; after its end of turn meaningless ones.

        A row is generated as far as the shortest prompt allows and cut to its own room: it must not depend on the
        rows beside it.
        """
        from transformers import LogitsProcessorList

        width = max(len(ids) for _, ids in batch)
        ids_RL = torch.zeros(len(batch), width, dtype=torch.int64)
        real_RL = torch.zeros_like(ids_RL)
        for row, (_, ids) in enumerate(batch):
            ids_RL[row, width - len(ids) :] = torch.tensor(ids)
            real_RL[row, width - len(ids) :] = 1
        rooms = [min(self._sampling.max_new_tokens, self._context - len(ids)) for _, ids in batch]
        keys = [self._sampling.key(chat.id, chat.answers) for chat, _ in batch]
        device = self._target.device
        processors = [] if self._sampling.temperature == 0 else _sampling_processors(self._sampling, keys, device)
        output_RL = self._target.generate(
            ids_RL.to(device),
            attention_mask=real_RL.to(device),
            max_new_tokens=max(rooms),
            logits_processor=LogitsProcessorList(processors),
        )
        new_RN: list[list[int]] = output_RL[:, width:].tolist()
        return [new[:room] for new, room in zip(new_RN, rooms, strict=True)]

    def _forget_generation_defaults(self) -> None:
        """Only what is asked for shapes the answers; a model's own defaults would (a repetition penalty, say)."""
        from transformers import GenerationConfig

        stops = sorted(self._stop_ids)
        self._target.generation_config = GenerationConfig(do_sample=False, eos_token_id=stops, pad_token_id=stops[0])


def _sampling_processors(sampling: Sampling, keys: list[int], device: torch.device) -> list[Any]:
    """Logits to scores whose largest is a sample: temperature, top-k and top-p, then noise of each row's own."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    processors: list[Any] = [TemperatureLogitsWarper(float(sampling.temperature))]
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    return [*processors, KeyedNoise(keys, device)]


class KeyedNoise:
    """Adds Gumbel noise, which makes the largest score a sample of their softmax, from one generator for each row.

    A row's noise thus depends on its key and the number of its new tokens, not on the rows beside it.
    """

    def __init__(self, keys: list[int], device: torch.device) -> None:
        self._generators = [torch.Generator(device).manual_seed(key) for key in keys]

    def __call__(self, input_ids: Tensor, scores_RV: Tensor) -> Tensor:
        """float32 [R, V]"""
        noise_RV = torch.empty_like(scores_RV, dtype=torch.float32)
        for noise_V, generator in zip(noise_RV, self._generators, strict=True):
            noise_V.exponential_(generator=generator)
        return scores_RV.float() - noise_RV.log()
