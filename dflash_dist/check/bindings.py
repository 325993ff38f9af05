"""Which implementation transformers took for each function of an architecture that has fused kernels.

It decides when the modelling code is imported, and tells nobody: from 5.15 on each such function closes over what it
calls; before, the module held a flag and None for what was missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

NAMES = {
    "torch_chunk_gated_delta_rule": "chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule": "fused_recurrent_gated_delta_rule",
    "causal_conv1d_fn": "causal_conv1d_fn",
    "causal_conv1d_update": "causal_conv1d_update",
}
"""The functions of Qwen3-Next's and Qwen3.5's code, and the kernels that may stand in for them."""


@dataclass(frozen=True)
class Binding:
    """What one function of the modelling code calls."""

    function: str
    kernel: str
    package: str
    """Where the kernel would come from; empty where transformers does not say."""
    implementation: str
    fallback: bool | None
    """Whether it is torch code of transformers itself; None where that cannot be seen."""


def bindings(modelling: ModuleType) -> list[Binding]:
    """The binding of each function of the module that may run a fused kernel; none for a plain architecture."""
    if hasattr(modelling, "is_fast_path_available"):
        return [_by_flag(modelling, kernel) for kernel in NAMES.values() if hasattr(modelling, kernel)]
    found = []
    for name, function in vars(modelling).items():
        closed = _closed_over(function) if getattr(function, "__module__", None) == modelling.__name__ else None
        if closed is not None:
            found.append(_by_closure(name, closed))
        elif name in NAMES:
            found.append(Binding(name, NAMES[name], "", "", None))
    return found


def torch_reference(modelling: ModuleType, function: str) -> Callable[..., Any] | None:
    """transformers' own torch code of the function, which is what runs without a kernel; None where it has none."""
    bound = getattr(modelling, function, None)
    closed = _closed_over(bound)
    if closed is not None:
        return closed.get("torch_function")
    return bound if hasattr(modelling, "is_fast_path_available") else None


def _by_flag(modelling: ModuleType, kernel: str) -> Binding:
    value = getattr(modelling, kernel)
    function = next(name for name, of in NAMES.items() if of == kernel)
    return Binding(function, kernel, "", "torch" if value is None else _full_name(value), value is None)


def _by_closure(name: str, closed: dict[str, Any]) -> Binding:
    implementation = closed["implementation"]
    module = getattr(implementation, "__module__", None) or ""
    return Binding(
        name,
        closed.get("func_name", NAMES.get(name, name)),
        closed.get("package", ""),
        _full_name(implementation),
        fallback=module.split(".")[0] == "transformers",
    )


def _closed_over(function: Any) -> dict[str, Any] | None:
    """The variables of the wrapper that chose an implementation, found behind other wrappers; None if there is none."""
    todo, seen = [function], set()
    while todo:
        wrapper = todo.pop()
        if id(wrapper) in seen or not callable(wrapper):
            continue
        seen.add(id(wrapper))
        values = _variables(wrapper)
        if "implementation" in values:
            return values
        todo += [*values.values(), getattr(wrapper, "__wrapped__", None)]
    return None


def _variables(function: Any) -> dict[str, Any]:
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    values = {}
    for name, cell in zip(getattr(code, "co_freevars", ()), cells or (), strict=False):
        try:
            values[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return values


def _full_name(function: Any) -> str:
    module = getattr(function, "__module__", None) or type(function).__module__
    return f"{module}.{getattr(function, '__qualname__', type(function).__qualname__)}"
