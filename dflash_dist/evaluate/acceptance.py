"""Measuring a drafter: acceptance length and speed by real speculative decoding against plain decoding."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dflash_dist.config import EvaluateConfig
from dflash_dist.data.chat import ChatRejected, check_vocabulary, prompt_ids
from dflash_dist.drafter.model import DFlashDrafter
from dflash_dist.errors import UserError
from dflash_dist.evaluate.sampling import choice_of
from dflash_dist.evaluate.speculate import Generation, context_left, plain_decode, speculative_decode

if TYPE_CHECKING:
    from dflash_dist.target.load import TargetEnds


def evaluate(
    prompts: Sequence[list[dict[str, Any]]],
    tokenizer: Any,
    target: Any,
    drafter: DFlashDrafter,
    ends: TargetEnds,
    settings: EvaluateConfig,
    *,
    chat_template_kwargs: dict[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """What `summarise` gives for the prompts, each decoded with and without the drafter, one at a time.

    `prompts`: lists of chat messages, without the answer. `target`: the full model, on its device. The drafter decodes
    in the target's dtype, as it is served. `on_progress(done, prompts)` is called after each prompt. UserError where
    there is no prompt, or one fits neither the target's context nor its vocabulary.
    """
    if not prompts:
        raise UserError("there is no prompt to evaluate on; give a file with at least one row of messages")
    drafter = copy.deepcopy(drafter).to(device=target.device, dtype=target.dtype).eval()
    stops = stop_ids(target, tokenizer)
    rendered = [rendered_prompt(tokenizer, messages, chat_template_kwargs or {}) for messages in prompts]
    check_vocabulary(max(map(max, rendered)), drafter.config.vocab_size, target.name_or_path)
    for number, ids in enumerate(rendered, start=1):
        context_left(target, len(ids), f"prompt {number} of {len(rendered)}")
    # Kernels are chosen and compiled on first use: not part of the measurement.
    few, choice = min(settings.max_new_tokens, 2 * drafter.config.block_size), choice_of(settings, 0, target.device)
    plain_decode(target, rendered[0], few, (), choice)
    speculative_decode(target, drafter, ends, rendered[0], few, (), choice)

    plain: list[Generation] = []
    speculative: list[Generation] = []
    for number, ids in enumerate(rendered):
        choice = choice_of(settings, number, target.device)
        plain.append(plain_decode(target, ids, settings.max_new_tokens, stops, choice))
        speculative.append(speculative_decode(target, drafter, ends, ids, settings.max_new_tokens, stops, choice))
        if on_progress:
            on_progress(len(plain), len(rendered))
    return summarise(plain, speculative, drafter.config.block_size, greedy=settings.temperature == 0)


def summarise(
    plain: Sequence[Generation], speculative: Sequence[Generation], block_size: int, *, greedy: bool
) -> dict[str, Any]:
    """The measures of one evaluation; None where no prompt gave a second token.

    tau_pooled: tokens committed per target forward over all cycles; tau_macro: mean over prompts of each prompt's own
    mean, which tau_per_prompt lists. greedy_equal: prompts with the same tokens either way, None where they are
    sampled. tokens_per_s and speedup count the time after the prefill. acceptance_per_position: share of all cycles
    that accept offset 1, 2, ...; acceptance_conditional: share of those that accepted the offset before it.
    histogram: cycles that committed 1, 2, ... tokens.
    """
    cycles = [count for generation in speculative for count in generation.cycles]
    histogram = [cycles.count(count) for count in range(1, block_size + 1)]
    reached = [sum(histogram[offset:]) for offset in range(block_size)]
    tau_per_prompt = [_ratio(sum(g.cycles), len(g.cycles)) for g in speculative]
    means = [tau for tau in tau_per_prompt if tau is not None]
    plain_token_s, token_s = _seconds_per_token(plain), _seconds_per_token(speculative)
    equal = sum(a.ids == b.ids for a, b in zip(plain, speculative, strict=True))
    return {
        "tau_pooled": _ratio(sum(cycles), len(cycles)),
        "tau_macro": _ratio(sum(means), len(means)),
        "prompts": len(speculative),
        "greedy_equal": equal if greedy else None,
        "tokens_per_s": _ratio(1.0, token_s),
        "plain_tokens_per_s": _ratio(1.0, plain_token_s),
        "speedup": _ratio(plain_token_s, token_s),
        "new_tokens": sum(len(g.ids) for g in speculative),
        "cycles": len(cycles),
        "histogram": histogram,
        "acceptance_per_position": [_ratio(count, len(cycles)) for count in reached[1:]],
        "acceptance_conditional": [_ratio(b, a) for a, b in itertools.pairwise(reached)],
        "tau_per_prompt": tau_per_prompt,
    }


def stop_ids(target: Any, tokenizer: Any = None) -> frozenset[int]:
    """The tokens that end the target's answers, by its generation config; where it names none, by the tokenizer."""
    eos = target.generation_config.eos_token_id
    if eos is None:
        eos = getattr(tokenizer, "eos_token_id", None)
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)


def rendered_prompt(tokenizer: Any, messages: list[dict[str, Any]], chat_template_kwargs: dict[str, Any]) -> list[int]:
    """Token ids of the chat up to where the answer begins; UserError if the template gives none."""
    try:
        return prompt_ids(tokenizer, messages, chat_template_kwargs)
    except ChatRejected as rejected:
        raise UserError(f"a prompt of {len(messages)} messages cannot be rendered: {rejected}; mend it") from None


def _seconds_per_token(generations: Sequence[Generation]) -> float | None:
    return _ratio(sum(g.decode_s for g in generations), sum(g.decoded_tokens for g in generations))


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None
