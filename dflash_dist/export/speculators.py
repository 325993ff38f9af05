"""The speculators export: a folder that the speculators package and vLLM load, with the plain export's tensors."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from dflash_dist.drafter.config import FULL, SLIDING, DrafterConfig
from dflash_dist.drafter.model import DFlashDrafter
from dflash_dist.errors import UserError
from dflash_dist.export.folder import write_folder
from dflash_dist.typed import convert

_OWN_KEYS = ("architectures", "block_size", "dflash_config", "is_causal")
"""Keys of the plain format that this one holds elsewhere."""


def export_speculators(
    drafter: DFlashDrafter, folder: Path | str, verifier: str, verifier_architectures: list[str]
) -> None:
    """Writes the drafter to `folder`, which must not exist; see `write_folder` for what else is refused.

    `verifier`: the target's hub name or folder, and `verifier_architectures` the architectures in its config.json.
    UserError where the format cannot say how the layers attend, or what the target does to its embeddings and logits.
    """
    tree = to_speculators(drafter.config, verifier, verifier_architectures)
    _check_read_back(drafter.config, DrafterConfig.from_json(to_plain(tree)))
    write_folder(drafter, tree, folder)


def is_speculators(tree: dict[str, Any]) -> bool:
    """Whether a config.json is of this format; vLLM decides by the same key."""
    return "speculators_config" in tree


def to_speculators(config: DrafterConfig, verifier: str, verifier_architectures: list[str]) -> dict[str, Any]:
    """The config.json of the format; UserError where it cannot say what `export_speculators` names."""
    causal = _causality(config)
    _check_ends(config)
    plain = config.to_json()
    return {
        "architectures": plain["architectures"],
        "speculators_model_type": "dflash",
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "draft_vocab_size": config.vocab_size,
        # Counted from the embedding's output, as transformers' hidden_states are.
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids],
        "target_hidden_size": None,
        "sample_from_anchor": False,
        # True where no layer is sliding, too: vLLM 0.33 makes every layer causal where this is false.
        "sliding_window_non_causal": not causal,
        "transformer_layer_config": {
            **{key: value for key, value in plain.items() if key not in _OWN_KEYS},
            "is_causal": causal,
        },
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config.block_size - 1,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": verifier_architectures},
        },
    }


def to_plain(tree: dict[str, Any]) -> dict[str, Any]:
    """A config.json of this format in the plain format's keys; what is missing stays missing.

    UserError where a value that is to be reckoned with is of another type.
    """
    where = "the drafter's config.json"
    layer_config = convert(dict, tree.get("transformer_layer_config") or {}, where, "transformer_layer_config")
    layer_types = convert(tuple[str, ...] | None, layer_config.get("layer_types"), where, "layer_types")
    plain = {key: value for key, value in layer_config.items() if key != "is_causal"}
    if SLIDING in (layer_types or ()) and tree.get("sliding_window_non_causal"):
        plain["is_causal"] = False
    counted = "aux_hidden_state_layer_ids"
    taps = convert(tuple[int, ...] | None, tree.get(counted), where, counted)
    plain["block_size"] = tree.get("block_size")
    plain["dflash_config"] = {
        "mask_token_id": tree.get("mask_token_id"),
        "target_layer_ids": taps and [number - 1 for number in taps],
    }
    return plain


def _check_read_back(config: DrafterConfig, read: DrafterConfig) -> None:
    """Asserts that config.json gives the drafter's config; of causality and window, what they come to in each layer."""
    layers = range(config.num_hidden_layers)
    for rule in (DrafterConfig.causal, DrafterConfig.window):
        assert [rule(read, layer) for layer in layers] == [rule(config, layer) for layer in layers], rule.__name__
    read = dataclasses.replace(read, is_causal=config.is_causal, sliding_window=config.sliding_window)
    assert read == config, "config.json does not give the drafter's config"


def _check_ends(config: DrafterConfig) -> None:
    """UserError where embeddings are scaled or logits soft-capped (Gemma), for which the format has no keys."""
    done = {
        "scales its embeddings": config.input_embedding_scale != 1.0,
        "soft-caps its logits": config.final_logit_softcapping is not None,
    }
    if any(done.values()):
        what = " and ".join(text for text, holds in done.items() if holds)
        raise UserError(f"the drafter's target {what}, which the speculators format cannot say; use --format plain")


def _causality(config: DrafterConfig) -> bool:
    """Whether the layers are causal: all of them, or none."""
    causal = [layer for layer in range(config.num_hidden_layers) if config.causal(layer)]
    full = [layer for layer in range(config.num_hidden_layers) if config.layer_types[layer] == FULL]
    if causal and full:
        raise UserError(
            f"the drafter's layers {causal} are causal and {full} see the whole context, which the speculators format "
            "cannot say: vLLM would make all layers causal; use --format plain"
        )
    return bool(causal)
