"""What the target's layers would really run: fused kernels or torch, packed documents or padded rows."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from dflash_dist.check.bindings import Binding, bindings, torch_reference
from dflash_dist.check.findings import Finding, one_line
from dflash_dist.check.installs import (
    CAUSAL_CONV1D,
    FLA,
    FLASH_ATTN,
    TRITON,
    FusedPackage,
    half_installed_fla,
    install_finding,
    triton_on_cpu,
)
from dflash_dist.check.kernels import TOLERANCE, Failure, Outcome, try_kernels, verdict
from dflash_dist.check.slowdown import MEASURED_SHARE, slowdown
from dflash_dist.check.target import TargetFacts
from dflash_dist.check.trials import Measured, Shapes, delta_rule_case, measure
from dflash_dist.config import Config
from dflash_dist.installed import import_error, version_of

PACKED_ATTENTION = "packed_attention"
OWN_KERNELS = ("packed_delta_rule", "packed_convolution", "heads_apart", "gated_norm")
"""What target ranks run in place of a hybrid's own; all but the first are Triton kernels of this project."""
PACKED_CAPABILITY = (8, 0)
"""The least for torch's attention over packed documents."""
ROWS = "documents run as right-padded rows, which never leak"
ROWS_COST = "up to 15 % of the tokens computed are padding"
CANNOT_RUN = "the target cannot run"
DECODING = "only the answers that are decoded in evaluation and by `regenerate` come slower"
NEWER_TRANSFORMERS = "pip install --upgrade 'transformers>=5.17,<6'"
SOURCES = {"fla": FLA, "causal_conv1d": CAUSAL_CONV1D}


@dataclass(frozen=True)
class Layers:
    """Of how many layers a target consists, and in which of their mixers torch stands in for a kernel."""

    total: int
    linear: int
    delta_rule_missing: bool = False
    convolution_missing: bool = False
    cannot_run: bool = False
    """Whether not even torch stands in."""


def kernel_findings(
    config: Config, facts: TargetFacts | None, caches: Mapping[str, str], on_gpu: bool
) -> list[Finding]:
    """The findings on all fused kernels that matter to the target; trials of them where ranks run on a GPU.

    `facts`: None where the target's shape is unknown. `caches`: variables that name folders of compiled kernels.
    """
    half = half_installed_fla(None if facts is None else facts.is_hybrid)
    if not on_gpu:
        return _on_cpu(facts, half)
    if facts is None:
        # Where the target is not known to need them, a missing package is no reason to refuse the run.
        return [half] if half else [install_finding(package, "warning") for package in (TRITON, FLA, CAUSAL_CONV1D)]
    attention, flash = [PACKED_ATTENTION], []
    wants_flash = config.target.attention.startswith("flash_attention")
    if wants_flash or _has_flash_attn():
        flash = [install_finding(FLASH_ATTN, "error" if wants_flash else "warning")]
        attention += ["flash_attn_varlen_func"] if _imports(FLASH_ATTN) else []
    if facts.is_hybrid:
        return flash + _hybrid(config, facts, half, attention, caches)
    outcomes = try_kernels(attention, Shapes.of(facts.text), None, caches)
    rows, mend = never_packed(config, facts, None, _capability())
    packing = packing_finding(outcomes, [PACKED_ATTENTION], rows, mend)
    return [*([half] if half else []), *flash, *_verdicts(outcomes, config, own=False, rows=rows), packing]


def fallback_finding(layers: Layers, mend: str, text: Mapping[str, Any], measured_us: float | None = None) -> Finding:
    """The finding on the linear-attention layers of a target with config `text`.

    `measured_us`: what a token takes in the fallback of all of them on this GPU.
    """
    of_them = f"{layers.linear} of {layers.total} layers" if layers.total else "all linear-attention layers"
    if layers.cannot_run:
        detail = f"{of_them} cannot run: what target ranks run around the delta rule is in Triton"
        return Finding("linear attention", "error", detail, mend, CANNOT_RUN)
    if not (layers.delta_rule_missing or layers.convolution_missing):
        return Finding("linear attention", "ok", f"{of_them} run the fused delta rule")
    share = layers.linear / layers.total if layers.total else MEASURED_SHARE
    factor = slowdown(text, share, layers.delta_rule_missing, layers.convolution_missing)
    parts = {"delta rule": layers.delta_rule_missing, "convolution": layers.convolution_missing}
    what = " and ".join(name for name, missing in parts.items() if missing)
    detail = f"{of_them} would run the torch fallback: about {factor:.1f} times slower ({what})"
    cost = "estimated from an H200 at Qwen3.6-27B's shape, by the share of such layers and the target's sizes"
    if measured_us is not None:
        cost += f"; measured on this GPU: torch takes {measured_us:.1f} us a token there"
    return Finding("linear attention", "error", detail, mend, cost)


def never_packed(
    config: Config, facts: TargetFacts, modelling: ModuleType | None, capability: tuple[int, int] | None
) -> tuple[str, str]:
    """Why target ranks would pack no documents whatever the kernels do, and what mends it; empty where they may.

    `capability`: of the GPU. It is what `use_own_attention` and `TargetForward` refuse, as far as the config tells it.
    """
    from dflash_dist.target.attention import LAYER_TYPES

    if (cap := facts.text.get("attn_logit_softcapping")) is not None:
        return f"packed attention has no soft cap, and the target's has one (attn_logit_softcapping {cap})", ""
    if unknown := sorted(set(facts.layer_types) - LAYER_TYPES):
        return f"the target has layers of a type that cannot be packed ({', '.join(unknown)})", ""
    if facts.is_hybrid and modelling is not None and not has_own_mixers(modelling):
        return "the target's linear attention is of another kind than those that can be packed", ""
    if config.target.dtype == "float32":
        return "attention over packed documents has no fused kernel in float32", "set target.dtype=bfloat16"
    if capability is not None and capability < PACKED_CAPABILITY:
        least, here = (".".join(map(str, numbers)) for numbers in (PACKED_CAPABILITY, capability))
        return f"attention over packed documents needs compute capability {least}, and this GPU has {here}", ""
    return "", ""


def packing_finding(outcomes: Mapping[str, Outcome], needed: list[str], refusal: str = "", mend: str = "") -> Finding:
    """Whether documents can lie beside each other; `refusal`: why they cannot, whatever the kernels do."""
    broken = [name for name in needed if verdict(name, outcomes[name]).level == "error"]
    if not refusal and broken:
        refusal, mend = f"{' and '.join(broken)} cannot be trusted with packed documents", "see the kernels above"
    if refusal:
        return Finding("packing", "warning", f"{refusal}: {ROWS}", mend, ROWS_COST)
    untried = [n for n in needed if isinstance(outcomes[n], Failure)]
    how = f"not tried here: {', '.join(untried)}" if untried else "tried here"
    detail = f"packed documents stay apart in {' and '.join(needed)} ({how}); target ranks try the whole target first"
    return Finding("packing", "ok", detail)


def binding_finding(binding: Binding, in_forward: bool) -> Finding:
    """What transformers calls for one function; `in_forward`: whether target ranks call it, and do not only decode."""
    name, transformers = f"binding {binding.kernel}", f"transformers {version_of('transformers')}"
    cost = "" if in_forward else DECODING
    if binding.fallback is None:
        mend = "`make profile`, and look for the kernel's name in the trace"
        return Finding(name, "warning", f"what {transformers} calls cannot be seen from outside", mend, cost)
    if not binding.fallback:
        return Finding(name, "ok", binding.implementation)
    source = SOURCES.get(binding.package)
    error = import_error(source.module, (binding.kernel,)) if source else None
    if source is None or error is not None:
        package = source.name if source else binding.package or "its package"
        mend = install_finding(source).mend if source else f"install {package}"
        return Finding(name, "warning", f"{transformers} calls torch, as it could not import {package}", mend, cost)
    detail = f"{transformers} calls torch, although {source.name} can be imported"
    return Finding(name, "error" if in_forward else "warning", detail, NEWER_TRANSFORMERS, cost)


def _on_cpu(facts: TargetFacts | None, half: Finding | None) -> list[Finding]:
    """Kernels do harm on the CPU, where transformers takes them."""
    findings = [half] if half else []
    harm = triton_on_cpu() if half is None and (facts is None or facts.is_hybrid) else None
    if harm is not None:
        findings.append(harm if facts else replace(harm, level="warning"))
    if facts is not None and facts.is_hybrid and harm is None:
        detail = f"run in torch, as all does on a CPU; {ROWS}"
        findings.append(Finding("linear attention", "ok", f"{_counted(facts)} {detail}"))
    return findings


def _hybrid(
    config: Config, facts: TargetFacts, half: Finding | None, attention: list[str], caches: Mapping[str, str]
) -> list[Finding]:
    """All about linear attention: packages, bindings, trials, and the sum of it for the whole target."""
    modelling, broken = _modelling(facts)
    own = has_own_mixers(modelling)
    installs = [_triton_install(own), half or install_finding(FLA), _convolution_install(own)]
    errors = {finding.name: finding for finding in installs if finding.level == "error"}
    bound = bindings(modelling) if modelling else []
    layers = _layers(facts, bound, own, set(errors))
    mixers = _mixers_to_try(modelling, own, set(errors))
    decoding = ["causal_conv1d_fn"] if _imports(CAUSAL_CONV1D) else []
    outcomes = try_kernels([*attention, *mixers, *decoding], Shapes.of(facts.text), facts.modelling, caches)
    measured_us = _torch_us(layers, outcomes)
    if own and layers.delta_rule_missing:
        outcomes.pop("packed_delta_rule", None)  # it ran in torch: only its time is of interest

    cause = next((errors[name] for name in ("fla", "triton", "causal-conv1d") if name in errors), None)
    mend = cause.mend if cause else NEWER_TRANSFORMERS
    missing = layers.delta_rule_missing or layers.convolution_missing
    rows, mend_of_rows = never_packed(config, facts, modelling, _capability())
    refusal, mend_of_packing = (leak_of_fallback(modelling), mend) if missing and not rows else (rows, mend_of_rows)
    needed = [PACKED_ATTENTION, *mixers, *([] if own else decoding)]
    return [
        *installs,
        *broken,
        *(binding_finding(binding, in_forward=not own and not _decodes(binding)) for binding in bound),
        *_verdicts(outcomes, config, own, rows),
        fallback_finding(layers, mend, facts.text, measured_us),
        packing_finding(outcomes, [name for name in needed if name in outcomes], refusal, mend_of_packing),
    ]


def has_own_mixers(modelling: ModuleType | None) -> bool:
    """Whether target ranks call this project's delta rule, which is fla's, and convolution in place of the model's."""
    from dflash_dist.target.mixers import is_own

    return modelling is not None and is_own(modelling)


def leak_of_fallback(modelling: ModuleType | None) -> str:
    """What becomes of packed documents in the torch code that transformers falls back on, by trying it."""
    import torch

    reference = _delta_rule(modelling)
    if modelling is None or reference is None:
        return "torch's delta rule is not known to keep packed documents apart"
    small, lengths = Shapes(linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8), (7, 5)
    case = delta_rule_case(small, sum(lengths), torch.device("cpu"), torch.float32, reference)
    logging.disable(logging.WARNING)  # that it is the fallback is known
    try:
        leaks = measure(case, modelling.torch_chunk_gated_delta_rule, lengths).leak > TOLERANCE
    except Exception:
        return "transformers' torch fallback refuses packed documents"
    finally:
        logging.disable(logging.NOTSET)
    return f"packed documents {'would leak into each other' if leaks else 'stay apart'} in transformers' torch fallback"


def _modelling(facts: TargetFacts) -> tuple[ModuleType | None, list[Finding]]:
    """The target's modelling module, and the finding where it cannot be imported."""
    if facts.modelling is None:
        return None, []
    try:
        return importlib.import_module(facts.modelling), []
    except Exception as error:  # of whatever it imports
        detail = f"{facts.modelling} cannot be imported: {one_line(error)}"
        mend = "mend what the exception names, or: pip install --force-reinstall --no-deps 'transformers>=5.17,<6'"
        return None, [Finding("target code", "error", detail, mend, "the target cannot be loaded")]


def _delta_rule(modelling: ModuleType | None) -> Callable[..., Any] | None:
    """The model's own torch code of the delta rule."""
    return torch_reference(modelling, "torch_chunk_gated_delta_rule") if modelling else None


def _imports(package: FusedPackage) -> bool:
    return import_error(package.module, package.functions) is None


def _triton_install(own: bool) -> Finding:
    finding = install_finding(TRITON)
    return replace(finding, cost=CANNOT_RUN) if own and finding.cost else finding


def _convolution_install(own: bool) -> Finding:
    finding = install_finding(CAUSAL_CONV1D, "warning" if own else "error")
    return replace(finding, cost=DECODING) if own and finding.cost else finding


def _layers(facts: TargetFacts, bound: list[Binding], own: bool, bad: set[str]) -> Layers:
    kinds = facts.layer_types
    total, linear = len(kinds), kinds.count("linear_attention")
    if own:  # target ranks import fla's delta rule themselves, and have Triton kernels of their own around it
        return Layers(total, linear, delta_rule_missing=bool(bad & {"fla", "triton"}), cannot_run="triton" in bad)
    torch_kernels = {b.kernel for b in bound if b.fallback and not _decodes(b)}
    return Layers(
        total,
        linear,
        delta_rule_missing=bool(bad & {"fla", "triton"} or torch_kernels - {"causal_conv1d_fn"}),
        convolution_missing="causal-conv1d" in bad or "causal_conv1d_fn" in torch_kernels,
    )


def _mixers_to_try(modelling: ModuleType | None, own: bool, bad: set[str]) -> list[str]:
    """The kernels of linear attention in the target's forward that can be tried; `bad`: packages that are missing."""
    if own:
        return [] if "triton" in bad else list(OWN_KERNELS)  # without fla the delta rule runs in torch, and is timed
    return ["chunk_gated_delta_rule"] if not bad & {"fla", "triton"} and _delta_rule(modelling) else []


def _torch_us(layers: Layers, outcomes: Mapping[str, Outcome]) -> float | None:
    """Microseconds a token of torch's code in all layers that run it; None where that could not be timed."""
    missing = {
        "packed_delta_rule": layers.delta_rule_missing,
        "chunk_gated_delta_rule": layers.delta_rule_missing,
        "causal_conv1d_fn": layers.convolution_missing,
    }
    timed = [o for n, o in outcomes.items() if missing.get(n) and isinstance(o, Measured)]
    return sum(o.reference_us / o.tokens for o in timed) * layers.linear if timed and layers.linear else None


def _has_flash_attn() -> bool:
    """Whether there is such a package, and not only the folder that FlashAttention-4 lies in."""
    spec = importlib.util.find_spec("flash_attn")
    return spec is not None and spec.origin is not None


def _verdicts(outcomes: Mapping[str, Outcome], config: Config, own: bool, rows: str) -> list[Finding]:
    """Of each kernel; a broken one that no target rank calls is a warning. `rows`: why documents are never packed."""
    unused = {"causal_conv1d_fn"} if own else set()
    if not config.target.attention.startswith("flash_attention"):
        unused.add("flash_attn_varlen_func")
    if rows:
        unused.add(PACKED_ATTENTION)
    findings = [verdict(name, outcome, "warning" if name in unused else "error") for name, outcome in outcomes.items()]
    # Without packed attention a run works, so there is nothing to mend.
    cost = f"none, as documents run as rows: {rows}"
    idle = f"kernel {PACKED_ATTENTION}" if rows else ""
    return [replace(f, mend="", cost=cost) if f.name == idle and f.level != "ok" else f for f in findings]


def _capability() -> tuple[int, int] | None:
    """Compute capability of the GPU that kernels are tried on; None where torch finds none."""
    import torch

    return torch.cuda.get_device_capability(0) if torch.cuda.device_count() else None


def _decodes(binding: Binding) -> bool:
    """Whether the function is for single tokens behind a cache."""
    return "recurrent" in binding.kernel or binding.kernel.endswith("_update")


def _counted(facts: TargetFacts) -> str:
    kinds = facts.layer_types
    return f"{kinds.count('linear_attention')} of {len(kinds)} layers" if kinds else "all linear-attention layers"
