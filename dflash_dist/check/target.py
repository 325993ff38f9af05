"""What the target at hand is, and what of its layers runs in fused kernels."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_dist.check.findings import Finding, refusal
from dflash_dist.config import Config
from dflash_dist.errors import UserError
from dflash_dist.target.package import local_folder


@dataclass(frozen=True)
class TargetFacts:
    """The target's shape, as far as its config.json and transformers tell it."""

    text: dict[str, Any]
    """The language model's config."""
    modelling: str | None = None
    """transformers' module with the model's code; None where it has none."""

    @property
    def layer_types(self) -> list[str]:
        """The type of each layer; empty where unknown."""
        return list(self.text.get("layer_types") or [])

    @property
    def is_hybrid(self) -> bool:
        """Whether some layers are linear attention."""
        if self.layer_types:
            return "linear_attention" in self.layer_types
        return any(key.startswith("linear_") for key in self.text)  # older files leave the types to the model's code


def look_at_target(config: Config) -> tuple[Finding, TargetFacts | None]:
    """The finding on the target, and its shape; None where that is unknown."""
    try:
        path = target_config_path(config)
    except UserError as error:
        return refusal("target", error), None
    if path is None:
        unknown = "so whether it has linear-attention layers is unknown"
        if config.target.model.startswith("package:"):
            return Finding("target", "ok", f"not converted from its package yet, {unknown}"), None
        mend = "`dflash-dist prepare` downloads it; then check again"
        return Finding("target", "warning", f"its config.json is not on this machine yet, {unknown}", mend), None
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        mend = "check that it is open to you"
        return Finding("target", "error", f"{path} cannot be read: {error.strerror}", mend), None
    except (ValueError, RecursionError):
        tree = None
    if not isinstance(tree, dict):
        return Finding("target", "error", f"{path} is no JSON object", "get the target's files again"), None
    facts = _facts(path, tree, config.target.trust_remote_code)
    if not facts.is_hybrid:
        return Finding("target", "ok", "no linear-attention layers"), facts
    counts = f": {facts.layer_types.count('linear_attention')} of {len(facts.layer_types)}" if facts.layer_types else ""
    return Finding("target", "ok", f"hybrid, with linear-attention layers{counts}"), facts


def target_config_path(config: Config) -> Path | None:
    """The target's config.json: in its folder, as converted from a package, or in the hub's cache; never downloaded.

    None where it is not on this machine yet. UserError where `target.model` names nothing that a target could be.
    """
    model = config.target.model
    if model.startswith("package:"):
        name = model.removeprefix("package:")
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise UserError(f"target {model} names no package; check target.model")
        return next(iter(sorted(Path(config.cache_dir, "targets").glob(f"{name}-*/config.json"))), None)
    if folder := local_folder(model):
        return folder / "config.json"
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model, "config.json")
    except ValueError:
        raise UserError(f"target {model} is neither a folder nor the form of a hub name; check target.model") from None
    return Path(cached) if isinstance(cached, str) else None


def _facts(path: Path, tree: dict[str, Any], trust_remote_code: bool) -> TargetFacts:
    """As transformers completes the file, or as it stands where transformers does not know it."""
    as_it_stands = TargetFacts(tree.get("text_config") or tree)
    if "model_type" not in tree:
        return as_it_stands
    try:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(path.parent, trust_remote_code=trust_remote_code).get_text_config()
    except Exception:  # what is wrong with it is told when the drafter is made for it
        return as_it_stands
    module = type(config).__module__
    known = module.startswith("transformers.models.")
    return TargetFacts(config.to_dict(), module.replace(".configuration_", ".modeling_") if known else None)
