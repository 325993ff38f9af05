"""The drafter's shape: the one owner of tap numbering, block layout, mask token, RoPE base and window rule."""

from __future__ import annotations

import dataclasses
import itertools
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_dist.config import DrafterSettings
from dflash_dist.errors import UserError
from dflash_dist.typed import convert

FULL, SLIDING = "full_attention", "sliding_attention"

HYBRID_GEOMETRY = (32, 8, 128)
"""Heads, key-value heads and head size for hybrid targets, whose own geometry the engines do not serve in a drafter."""

_REQUIRED_KEYS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rms_norm_eps",
    "vocab_size",
    "max_position_embeddings",
    "initializer_range",
    "num_target_layers",
    "layer_types",
)


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Everything that defines a drafter's computation; valid once constructed (UserError otherwise)."""

    hidden_size: int
    """H, of the target and of the drafter alike: they share the embedding and the head."""
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    vocab_size: int
    """Rows of the target's embedding table."""
    max_position_embeddings: int
    rope_theta: float
    initializer_range: float
    block_size: int
    """B: the anchor and the B - 1 tokens drafted after it."""
    target_layer_ids: tuple[int, ...]
    """Tapped target layers, 0-based, ascending: the residual stream after the layer."""
    num_target_layers: int
    mask_token_id: int
    layer_types: tuple[str, ...]
    sliding_window: int | None
    """Tokens that a sliding layer sees, the current one included."""
    is_causal: bool | None
    """Whether offsets in a block see only earlier ones; None: in sliding layers they do, in full layers they do not."""
    input_embedding_scale: float = 1.0
    """What the target multiplies its embedding rows by (Gemma); engines look the rows up themselves."""
    final_logit_softcapping: float | None = None
    """The target's bound on its logits, which the drafter's get too."""

    def __post_init__(self) -> None:
        _check_shape(self)
        _check_taps(self)
        _check_layer_types(self)

    def causal(self, layer: int) -> bool:
        """Whether offset j of a block sees only offsets up to j in this layer, as the serving engines decide it."""
        return self.layer_types[layer] == SLIDING if self.is_causal is None else self.is_causal

    def window(self, layer: int) -> int | None:
        """The layer's window in tokens, or None where it sees the whole context."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def to_json(self) -> dict[str, Any]:
        """The config.json of the plain export, which z-lab's package, SGLang and vLLM all read."""
        sliding = SLIDING in self.layer_types
        tree: dict[str, Any] = {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "dflash_config": {
                "block_size": self.block_size,
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
            },
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "initializer_range": self.initializer_range,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
            "layer_types": list(self.layer_types),
            "use_sliding_window": sliding,
            "sliding_window": self.sliding_window if sliding else None,
            "max_window_layers": self.num_hidden_layers,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rope_scaling": None,
        }
        if self.is_causal is not None:
            tree["is_causal"] = self.is_causal
        if self.input_embedding_scale != 1.0:
            tree["dflash_config"]["input_embedding_scale"] = self.input_embedding_scale
        if self.final_logit_softcapping is not None:
            tree["dflash_config"]["final_logit_softcapping"] = self.final_logit_softcapping
        return tree

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> DrafterConfig:
        """The configuration in a plain export's config.json; UserError naming what is missing or contradictory."""
        where = "the drafter's config.json"
        nested = convert(dict, tree.get("dflash_config") or {}, where, "dflash_config")
        missing = [key for key in _REQUIRED_KEYS if tree.get(key) is None]
        missing += [f"dflash_config.{key}" for key in ("target_layer_ids", "mask_token_id") if nested.get(key) is None]
        block_size = nested.get("block_size", tree.get("block_size"))
        missing += ["block_size"] if block_size is None else []
        theta = rope_theta(tree, where)
        missing += ["rope_theta"] if theta is None else []
        if missing:
            raise UserError(f"the drafter's config.json lacks {', '.join(missing)}; export the drafter again")
        values = {
            **{key: tree[key] for key in _REQUIRED_KEYS},
            "rope_theta": theta,
            "block_size": block_size,
            "target_layer_ids": nested["target_layer_ids"],
            "mask_token_id": nested["mask_token_id"],
            "sliding_window": tree.get("sliding_window"),
            "is_causal": tree.get("is_causal"),
            "input_embedding_scale": nested.get("input_embedding_scale", 1.0),
            "final_logit_softcapping": nested.get("final_logit_softcapping"),
        }
        hints = typing.get_type_hints(cls)
        return cls(**{key: convert(hints[key], value, where, key) for key, value in values.items()})


def default_layer_ids(num_layers: int, count: int) -> tuple[int, ...]:
    """`count` taps spread over a target of `num_layers` layers, from layer 1 to the third last: the published rule."""
    if count == 1:
        return (num_layers // 2,)
    return tuple(round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count))


def resolve(settings: DrafterSettings, target_config: Any, tokenizer_end: int) -> DrafterConfig:
    """The drafter for a target, with what the settings leave open taken from the target or the published rule.

    `target_config`: the transformers configuration of the target's language model. `tokenizer_end`: one past the
    largest id that the tokenizer can give. UserError where the result is not a drafter for this target.
    """
    heads, key_value_heads, head_dim = geometry(settings, target_config)
    target_layers = target_config.num_hidden_layers
    theta = rope_theta(target_config.to_dict(), "the target's config.json")
    layer_types = settings.layer_types or (FULL,) * settings.num_layers
    return DrafterConfig(
        hidden_size=target_config.hidden_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=head_dim,
        intermediate_size=settings.intermediate_size or _intermediate_size(target_config),
        rms_norm_eps=getattr(target_config, "rms_norm_eps", None) or 1e-6,
        vocab_size=target_config.vocab_size,
        max_position_embeddings=target_config.max_position_embeddings,
        rope_theta=10_000.0 if theta is None else theta,
        initializer_range=getattr(target_config, "initializer_range", None) or 0.02,
        block_size=settings.block_size,
        target_layer_ids=_layer_ids(settings, target_layers),
        num_target_layers=target_layers,
        mask_token_id=_mask_token_id(settings, target_config.vocab_size, tokenizer_end),
        layer_types=layer_types,
        sliding_window=settings.sliding_window if SLIDING in layer_types else None,
        is_causal=settings.is_causal,
        input_embedding_scale=_embedding_scale(target_config),
        final_logit_softcapping=getattr(target_config, "final_logit_softcapping", None),
    )


def check_target(config: DrafterConfig, target_config: Any, drafter_folder: Path, target_folder: Path | str) -> None:
    """UserError unless the target has the shape of the one that the drafter was made for.

    `target_config`: the transformers configuration of the target's language model.
    """
    made_for = (config.hidden_size, config.vocab_size, config.num_target_layers)
    given = (target_config.hidden_size, target_config.vocab_size, target_config.num_hidden_layers)
    if made_for != given:
        shape = "hidden size {}, {} ids and {} layers"
        raise UserError(
            f"drafter {drafter_folder} is for a target of {shape.format(*made_for)}, but {target_folder} has "
            f"{shape.format(*given)}; take the target it was made for"
        )


def rope_theta(tree: dict[str, Any], where: str) -> float | None:
    """The RoPE base in a transformers configuration of either generation, or None; scaled RoPE types give their base.

    Where each layer type has a base of its own (Gemma), it is the full-attention layers'. UserError, beginning with
    `where`, if it is no number.
    """
    parameters = convert(dict, tree.get("rope_parameters") or {}, where, "rope_parameters")
    if isinstance(parameters.get(FULL), dict):
        parameters = parameters[FULL]
    theta = parameters.get("rope_theta", tree.get("rope_theta"))
    return convert(float | None, theta, where, "rope_theta")


def is_hybrid(target_config: Any) -> bool:
    """Whether the target has recurrent layers, partly rotated heads or multi-axis RoPE: a drafter copies none."""
    parameters = getattr(target_config, "rope_parameters", None) or {}
    layer_types = getattr(target_config, "layer_types", None) or ()
    attention = (FULL, SLIDING, "chunked_attention")
    partial = parameters.get("partial_rotary_factor") or getattr(target_config, "partial_rotary_factor", None) or 1.0
    return any(kind not in attention for kind in layer_types) or partial != 1.0 or "mrope_section" in parameters


def _embedding_scale(target_config: Any) -> float:
    """Gemma's factor. That there is no other one is checked where the target is loaded."""
    return target_config.hidden_size**0.5 if target_config.model_type.startswith("gemma") else 1.0


def geometry(settings: DrafterSettings, target_config: Any) -> tuple[int, int, int]:
    """Query heads, key-value heads and head size of the drafter for a target."""
    hidden = target_config.hidden_size
    if not is_hybrid(target_config):
        heads = target_config.num_attention_heads
        key_value_heads = getattr(target_config, "num_key_value_heads", None) or heads
        head_dim = getattr(target_config, "head_dim", None) or hidden // heads
    elif hidden >= 1024:
        heads, key_value_heads, head_dim = HYBRID_GEOMETRY
    else:
        heads, head_dim = max(1, round(hidden / 64)), 64
        key_value_heads = heads // 4 if heads % 4 == 0 else 1
    return (
        settings.num_attention_heads or heads,
        settings.num_key_value_heads or key_value_heads,
        settings.head_dim or head_dim,
    )


def _intermediate_size(target_config: Any) -> int:
    """The target's MLP width; three times the hidden size where it has experts alone, as published drafters have."""
    size = getattr(target_config, "intermediate_size", None)
    return size if isinstance(size, int) and size > 0 else 3 * target_config.hidden_size


def _layer_ids(settings: DrafterSettings, target_layers: int) -> tuple[int, ...]:
    if settings.target_layer_ids is not None:
        return settings.target_layer_ids
    count = settings.num_taps or settings.num_layers
    ids = default_layer_ids(target_layers, count)
    if any(a >= b for a, b in itertools.pairwise(ids)):
        raise UserError(
            f"a target of {target_layers} layers is too shallow for {count} taps by the published rule ({list(ids)}); "
            "set drafter.num_taps lower, or drafter.target_layer_ids"
        )
    return ids


def _mask_token_id(settings: DrafterSettings, vocab_size: int, tokenizer_end: int) -> int:
    if settings.mask_token_id is not None:
        return settings.mask_token_id
    if tokenizer_end >= vocab_size:
        raise UserError(
            f"the target's embedding table has {vocab_size} rows and its tokenizer has ids up to {tokenizer_end - 1}: "
            "no row is free for the mask token; set drafter.mask_token_id to an id of the table that no text uses"
        )
    return tokenizer_end


def _check_shape(config: DrafterConfig) -> None:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        least = {"mask_token_id": 0, "block_size": 2}.get(field.name, 1)
        if field.type == "int" and (not isinstance(value, int) or value < least):
            raise UserError(f"drafter: {field.name} is {value!r}, but must be a whole number of at least {least}")
    if config.num_attention_heads % config.num_key_value_heads:
        raise UserError(
            f"drafter: num_key_value_heads is {config.num_key_value_heads}, but must divide num_attention_heads "
            f"({config.num_attention_heads})"
        )
    if config.head_dim % 2:
        raise UserError(f"drafter: head_dim is {config.head_dim}, but must be even: RoPE rotates halves")
    if config.mask_token_id >= config.vocab_size:
        raise UserError(
            f"drafter: mask_token_id is {config.mask_token_id}, but the target's embedding table has "
            f"{config.vocab_size} rows; set drafter.mask_token_id to an unused id below that"
        )


def _check_taps(config: DrafterConfig) -> None:
    ids, last = config.target_layer_ids, config.num_target_layers - 1
    if not ids:
        raise UserError("drafter: target_layer_ids is empty; name at least one target layer")
    if last in ids:
        raise UserError(
            f"drafter: target_layer_ids {list(ids)} taps the last layer, {last}, whose state is post-norm in some "
            f"engines and pre-norm in others; use 0 to {last - 1}"
        )
    if any(not 0 <= layer < last for layer in ids):
        raise UserError(
            f"drafter: target_layer_ids {list(ids)} leave the target, which has {config.num_target_layers} layers; "
            f"use 0 to {last - 1}"
        )
    if any(a >= b for a, b in itertools.pairwise(ids)):
        raise UserError(f"drafter: target_layer_ids {list(ids)} must ascend without repeats")


def _check_layer_types(config: DrafterConfig) -> None:
    kinds = config.layer_types
    if len(kinds) != config.num_hidden_layers:
        raise UserError(f"drafter: layer_types names {len(kinds)} layers, but there are {config.num_hidden_layers}")
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise UserError(f"drafter: layer_types has {kind!r}, but knows {FULL} and {SLIDING}")
    if SLIDING not in kinds:
        return
    if config.sliding_window is None:
        raise UserError("drafter: layer_types has sliding layers without a window; set drafter.sliding_window")
    if config.sliding_window < config.block_size:
        raise UserError(
            f"drafter: sliding_window is {config.sliding_window}, but must be at least block_size "
            f"({config.block_size}): engines would hide the block's own anchor from its last offsets"
        )
