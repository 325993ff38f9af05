"""How much longer a token takes where torch stands in for fused kernels, estimated from one measured target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_dist.check.trials import Shapes

US_FUSED, US_DELTA_RULE, US_CONVOLUTION, MEASURED_SHARE = 100, 50, 11, 48 / 64
"""Measured on an H200 at Qwen3.6-27B's shape: microseconds a token, what torch's delta rule and torch's convolution add
to them, and the share of linear-attention layers."""
MEASURED_HIDDEN, MEASURED_INTERMEDIATE = 5120, 17408
"""Sizes of that target which `Shapes` does not hold."""


def slowdown(text: Mapping[str, Any], share: float, delta_rule: bool, convolution: bool) -> float:
    """How many times its time a token takes with torch's delta rule, torch's convolution or both.

    `text`: the target's config, where a missing size is as in Qwen3.6-27B; `share`: of linear-attention layers.

    All is scaled from the figures above, measured there: the time with fused kernels by the parameters that a token
    meets in a layer, the delta rule's by its values, the convolution's by its channels. So a mixture of experts loses
    most, as it computes little else for a token.
    """
    keys, values = _widths(text)
    measured_keys, measured_values = _widths({})
    fused_us = US_FUSED * _active_parameters(text) / _active_parameters({})
    added_us = US_DELTA_RULE * delta_rule * values / measured_values
    added_us += US_CONVOLUTION * convolution * (2 * keys + values) / (2 * measured_keys + measured_values)
    return 1 + added_us / fused_us * share / MEASURED_SHARE


def _widths(text: Mapping[str, Any]) -> tuple[int, int]:
    """The size of the keys of all heads of linear attention, and of their values."""
    shapes = Shapes.of(dict(text))
    return shapes.keys, shapes.values


def _active_parameters(text: Mapping[str, Any]) -> int:
    """The parameters that a token meets in a layer of linear attention; other layers are about as large."""
    hidden = text.get("hidden_size") or MEASURED_HIDDEN
    width = text.get("moe_intermediate_size") or text.get("intermediate_size") or MEASURED_INTERMEDIATE
    width = width * (text.get("num_experts_per_tok") or 1) + (text.get("shared_expert_intermediate_size") or 0)
    keys, values = _widths(text)
    # An MLP's gate, up and down; a mixer's queries and keys, and its values, their gate and its output.
    return int(hidden * (3 * width + 2 * keys + 3 * values))
