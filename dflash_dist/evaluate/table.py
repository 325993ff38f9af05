"""The figures of an evaluation as text for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BAR = 30
"""Characters of the longest bar."""


def as_table(figures: Mapping[str, Any]) -> str:
    """What `evaluate` returned, tau first, then how long the accepted runs are and where they break."""
    if figures["tau_pooled"] is None:
        return f"tau         not measured: none of {figures['prompts']} prompts has an answer of two tokens"
    taus = [tau for tau in figures["tau_per_prompt"] if tau is not None]
    lines = [
        f"tau         {figures['tau_pooled']:.2f} tokens a target forward, 1.00 without a drafter",
        f"            {figures['tau_macro']:.2f} as mean of the prompts' own, from {min(taus):.2f} to {max(taus):.2f}",
        f"speed       {_speed(figures)}",
        f"outputs     {_outputs(figures)}",
        f"prompts     {figures['prompts']}, with {figures['new_tokens']} new tokens in {figures['cycles']} cycles",
        "",
        "tokens of a cycle",
    ]
    most = max(figures["histogram"])
    for count, cycles in enumerate(figures["histogram"], start=1):
        bar = "#" * round(_BAR * cycles / most)
        lines.append(f"{count:>4}  {bar:<{_BAR}}  {_percent(cycles / figures['cycles'])}  {cycles}")
    lines += ["", "offset  accepted  where the one before was"]
    rates = zip(figures["acceptance_per_position"], figures["acceptance_conditional"], strict=True)
    for offset, (overall, conditional) in enumerate(rates, start=1):
        lines.append(f"{offset:>6}  {_percent(overall):>8}  {_percent(conditional):>8}")
    return "\n".join(lines)


def _speed(figures: Mapping[str, Any]) -> str:
    if figures["speedup"] is None:  # sampled answers differ in length
        return f"{figures['tokens_per_s']:.1f} tokens/s; plain decoding gave no answer of two tokens"
    times = f"{figures['speedup']:.2f} times the {figures['plain_tokens_per_s']:.1f} of plain decoding"
    return f"{figures['tokens_per_s']:.1f} tokens/s, {times}"


def _outputs(figures: Mapping[str, Any]) -> str:
    if figures["greedy_equal"] is None:
        return "sampled by the target's distribution"
    return f"{figures['greedy_equal']} of {figures['prompts']} equal to plain greedy decoding"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:4.0f} %"
