"""The plain export: one folder that z-lab's package, SGLang and vLLM all load; and drafter folders as we load them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, Literal

import torch

from dflash_dist.drafter.config import DrafterConfig
from dflash_dist.drafter.model import DFlashDrafter
from dflash_dist.export.folder import check_table, read_tree, read_weights, write_folder
from dflash_dist.export.speculators import is_speculators, to_plain


def export_plain(drafter: DFlashDrafter, folder: Path | str) -> None:
    """Writes the drafter to `folder`, which must not exist; see `write_folder` for what is refused."""
    tree = drafter.config.to_json()
    assert DrafterConfig.from_json(tree) == drafter.config, "config.json does not give the drafter's config"
    write_folder(drafter, tree, folder)


def load_drafter(folder: Path | str, attention: Literal["dense", "flex"] = "dense") -> DFlashDrafter:
    """The drafter in an export of either format, as fp32 parameters.

    UserError naming what is missing, misshapen or too much.
    """
    folder = Path(folder)
    config = DrafterConfig.from_json(read_config(folder))
    tensors = read_weights(folder)
    check_table(tensors, config, folder)
    with torch.device("meta"):
        drafter = DFlashDrafter(config, attention)
    drafter.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, assign=True)
    return drafter.requires_grad_(True)


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a drafter folder of either format, in the plain format's keys."""
    tree = read_tree(folder)
    return to_plain(tree) if is_speculators(tree) else tree


def serve_commands(folder: Path | str, target: str) -> list[str]:
    """The commands that serve `target` with the drafter in `folder`: SGLang's if it reads that format, then vLLM's."""
    folder = Path(folder)
    block_size = DrafterConfig.from_json(read_config(folder)).block_size
    speculative = json.dumps(
        {"method": "dflash", "model": str(folder), "num_speculative_tokens": block_size - 1}, separators=(",", ":")
    )
    sglang = (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm DFLASH "
        f"--speculative-draft-model-path {shlex.quote(str(folder))} --speculative-num-draft-tokens {block_size} "
        "--attention-backend fa3"
    )
    vllm = (
        f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(speculative)} "
        "--attention-backend flash_attn --max-num-batched-tokens 32768"
    )
    return [vllm] if is_speculators(read_tree(folder)) else [sglang, vllm]
