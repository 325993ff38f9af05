"""Speculative decoding of one sequence, and the plain decoding that it must equal: token for token where it is greedy,
in distribution where it is sampled.

Shape suffixes: B tokens of a block, M = B - 1 drafted ones, T newly committed tokens, H hidden size, F = K * H features
of K taps, m key-value heads, d head size, V vocabulary rows.
"""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dflash_dist.drafter.mask import inference_masks
from dflash_dist.drafter.model import DFlashDrafter, KeyValue
from dflash_dist.errors import UserError
from dflash_dist.evaluate.sampling import Choice, Greedy

if TYPE_CHECKING:
    from dflash_dist.target.load import TargetEnds

GREEDY = Greedy()


@dataclass
class Generation:
    """What was decoded after a prompt."""

    ids: list[int]
    """New tokens, up to and with the first stop token."""
    decode_s: float = 0.0
    """Seconds after the first new token, which the prefill gives."""
    cycles: list[int] = field(default_factory=list)
    """Tokens committed by each target forward after the prefill, the bonus token included."""

    @property
    def decoded_tokens(self) -> int:
        """Tokens that `decode_s` was spent on."""
        return len(self.ids) - 1


class TargetDecoder:
    """The target with its cache: runs tokens, captures the taps, and takes tokens back."""

    def __init__(self, target: Any, target_layer_ids: Sequence[int] = ()) -> None:
        from transformers import DynamicCache

        self._target = target
        self._cache: Any = DynamicCache(config=target.config.get_text_config())
        # transformers 5.24 renamed the argument and warns about the old name.
        parameters = inspect.signature(target.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._taps = [target.get_decoder().layers[layer] for layer in target_layer_ids]
        self.length = 0
        """Committed tokens in the cache."""

    def run(self, ids_T: Tensor, last_only: bool = False) -> tuple[Tensor, Tensor | None]:
        """Appends tokens to the cache: the logits [T, V] of what follows each, and the features [T, F].

        `last_only`: logits [1, V] after the last of the tokens alone. Features are None where nothing is tapped.
        """
        captured: list[Tensor] = []

        def keep(module: nn.Module, inputs: Any, output: Tensor | tuple[Tensor, ...]) -> None:
            captured.append((output[0] if isinstance(output, tuple) else output)[0])

        hooks = [layer.register_forward_hook(keep) for layer in self._taps]
        positions_1T = torch.arange(self.length, self.length + len(ids_T), device=ids_T.device)[None]
        try:
            output = self._target(
                input_ids=ids_T[None],
                position_ids=positions_1T,
                use_cache=True,
                logits_to_keep=1 if last_only else 0,
                **{self._cache_argument: self._cache},
            )
        finally:
            for hook in hooks:
                hook.remove()
        self.length += len(ids_T)
        return output.logits[0], torch.cat(captured, dim=-1) if captured else None

    def snapshot(self) -> list[Any]:
        """What `roll_back` needs: copies of the layers' caches that cannot be cropped, such as recurrent states."""
        return [None if _croppable(layer) else copy.deepcopy(layer) for layer in self._cache.layers]

    def roll_back(self, snapshot: list[Any], ids_T: Tensor, accepted: int) -> None:
        """Forgets all but the first `accepted` of the tokens `ids_T`, which were run since the snapshot."""
        rejected = len(ids_T) - accepted
        if rejected == 0:
            return
        if all(layer is None for layer in snapshot):
            self._crop(rejected)
            return
        # A recurrent state cannot forget single tokens: go back to before all of them and read the accepted ones again.
        self._crop(len(ids_T), snapshot)
        self.run(ids_T[:accepted], last_only=True)

    def _crop(self, tokens: int, snapshot: Sequence[Any] = ()) -> None:
        for index, layer in enumerate(self._cache.layers):
            if snapshot and snapshot[index] is not None:
                self._cache.layers[index] = snapshot[index]
            else:
                layer.crop(-tokens)
        self.length -= tokens


def _croppable(layer: Any) -> bool:
    """Whether a layer's cache is plain keys and values of all tokens."""
    from transformers.cache_utils import DynamicLayer

    return type(layer) is DynamicLayer


def context_left(target: Any, prompt_tokens: int, prompt: str = "a prompt") -> int:
    """How many new tokens fit the target's context after a prompt; UserError, naming `prompt`, if none does."""
    context = int(target.config.get_text_config().max_position_embeddings)
    if prompt_tokens >= context:
        raise UserError(
            f"{prompt} has {prompt_tokens} tokens, but the target's context holds {context} with at least one new "
            "token; shorten or leave out the prompt"
        )
    return context - prompt_tokens


@torch.inference_mode()
def plain_decode(
    target: Any,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    stop_ids: Collection[int],
    choice: Choice = GREEDY,
) -> Generation:
    """The target's own continuation, token by token with a cache.

    Stops with the first of `stop_ids`, after `max_new_tokens`, or where the target's context is full.
    """
    decoder = TargetDecoder(target)
    device = target.device
    limit = min(max_new_tokens, context_left(target, len(prompt_ids)))
    logits_1V, _ = decoder.run(torch.tensor(prompt_ids, device=device), last_only=True)
    generation = Generation([int(choice.draw(choice.odds(logits_1V)))])
    start_s = _now_s(device)
    while len(generation.ids) < limit and generation.ids[-1] not in stop_ids:
        logits_1V, _ = decoder.run(torch.tensor(generation.ids[-1:], device=device))
        generation.ids.append(int(choice.draw(choice.odds(logits_1V))))
    generation.decode_s = _now_s(device) - start_s
    return generation


@torch.inference_mode()
def speculative_decode(
    target: Any,
    drafter: DFlashDrafter,
    ends: TargetEnds,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    stop_ids: Collection[int],
    choice: Choice = GREEDY,
) -> Generation:
    """The target's continuation, drafted a block at a time and verified by one target forward a block.

    Greedy, it equals `plain_decode` token for token, but for ties that the target's rounding breaks otherwise in a
    batch; sampled, it has the same distribution.
    """
    decoder = TargetDecoder(target, drafter.config.target_layer_ids)
    device = target.device
    limit = min(max_new_tokens, context_left(target, len(prompt_ids)))
    logits_1V, features_TF = decoder.run(torch.tensor(prompt_ids, device=device), last_only=True)
    generation = Generation([int(choice.draw(choice.odds(logits_1V)))])
    context: list[KeyValue] = []
    start_s = _now_s(device)
    while len(generation.ids) < limit and generation.ids[-1] not in stop_ids:
        assert features_TF is not None
        context = extend_context(drafter, context, features_TF)
        assert context[0][0].shape[0] == decoder.length
        # The last block is shortened to the tokens still wanted, as z-lab's loop does.
        size = min(drafter.config.block_size, limit - len(generation.ids) + 1)
        drafter_odds = choice.odds(block_logits(drafter, ends, context, generation.ids[-1], size))
        drafted_M = choice.draw(drafter_odds)
        block_B = torch.cat([torch.tensor(generation.ids[-1:], device=device), drafted_M])
        snapshot = decoder.snapshot()
        logits_BV, features_BF = decoder.run(block_B)
        assert features_BF is not None

        new = choice.verify(drafted_M, drafter_odds, choice.odds(logits_BV))
        new = _until_stop(new[: limit - len(generation.ids)], stop_ids)
        generation.ids += new
        generation.cycles.append(len(new))
        decoder.roll_back(snapshot, block_B, accepted=len(new))
        features_TF = features_BF[: len(new)]
    generation.decode_s = _now_s(device) - start_s
    return generation


def extend_context(drafter: DFlashDrafter, context: list[KeyValue], features_TF: Tensor) -> list[KeyValue]:
    """The drafter's context keys and values with those of T newly committed tokens appended."""
    length = context[0][0].shape[0] if context else 0
    positions_T = torch.arange(length, length + features_TF.shape[0], device=features_TF.device)
    new = drafter.context(features_TF, positions_T)
    if not context:
        return new
    return [(torch.cat([k, new_k]), torch.cat([v, new_v])) for (k, v), (new_k, new_v) in zip(context, new, strict=True)]


def block_logits(
    drafter: DFlashDrafter, ends: TargetEnds, context: list[KeyValue], anchor_id: int, size: int
) -> Tensor:
    """[size - 1, V] logits of the tokens that follow an anchor placed right after the context."""
    device = context[0][0].device
    length = context[0][0].shape[0]
    ids_B = torch.full((size,), drafter.config.mask_token_id, device=device)
    ids_B[0] = anchor_id
    positions_B = torch.arange(length, length + size, device=device)
    masks = inference_masks(drafter.config, length, size, device)
    hidden_1MH = drafter.blocks(ends.embed(ids_B)[None], positions_B[None], context, masks)
    return ends.logits(hidden_1MH[0])


def _until_stop(ids: list[int], stop_ids: Collection[int]) -> list[int]:
    """The tokens up to and with the first stop token."""
    stop = next((i for i, token in enumerate(ids) if token in stop_ids), len(ids) - 1)
    return ids[: stop + 1]


def _now_s(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
