"""What the export formats share: a folder of bf16 weights and config.json, written whole, checked, and read back."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_dist.drafter.config import DrafterConfig
from dflash_dist.drafter.model import DFlashDrafter
from dflash_dist.errors import UserError

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def write_folder(drafter: DFlashDrafter, tree: dict[str, Any], folder: Path | str) -> None:
    """Writes `tree` as config.json, and bf16 weights, to `folder`; checked before the folder gets its name.

    UserError where the folder exists or cannot be made, or the drafter is not fit to serve: untrained, or not finite.
    """
    folder = Path(folder)
    if os.path.lexists(folder):
        raise UserError(f"{folder} exists already and is not overwritten; remove it or export elsewhere")
    tensors = {name: tensor.detach().cpu() for name, tensor in drafter.state_dict().items()}
    check_trained(tensors)
    served = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    try:
        _write_whole(served, tree, folder, drafter.config)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder} cannot be written: {error}; free some space there or export elsewhere") from None


def _write_whole(served: dict[str, Tensor], tree: dict[str, Any], folder: Path, config: DrafterConfig) -> None:
    """Writes aside, checks, and renames; whatever fails, nothing is left."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        save_file(served, temporary / WEIGHTS, metadata={"format": "pt"})
        (temporary / CONFIG).write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
        for file in (WEIGHTS, CONFIG):
            (temporary / file).chmod(0o644)
        temporary.chmod(0o755)
        _check_written(temporary, tree, config)
        os.rename(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of an export with its shape: 11 a layer and 3 more."""
    hidden, width, head = config.hidden_size, config.intermediate_size, config.head_dim
    query, key = config.num_attention_heads * head, config.num_key_value_heads * head
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.v_proj.weight": (key, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "mlp.gate_proj.weight": (width, hidden),
        "mlp.up_proj.weight": (width, hidden),
        "mlp.down_proj.weight": (hidden, width),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(config.num_hidden_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def check_table(tensors: dict[str, Tensor], config: DrafterConfig, where: Path) -> None:
    """UserError unless the tensors are those of `tensor_shapes`, and nothing else."""
    shapes = tensor_shapes(config)
    missing, extra = sorted(shapes.keys() - tensors.keys()), sorted(tensors.keys() - shapes.keys())
    if missing or extra:
        parts = [
            f"{word} {len(names)}: {', '.join(names[:3])}" for word, names in (("lacks", missing), ("adds", extra))
        ]
        wrong = "; ".join(part for part, names in zip(parts, (missing, extra), strict=True) if names)
        raise UserError(f"{where / WEIGHTS} has not the drafter's {len(shapes)} tensors ({wrong}); export it again")
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise UserError(
                f"{where / WEIGHTS}: {name} has shape {list(tensors[name].shape)}, but config.json asks for "
                f"{list(shape)}; export the drafter again"
            )


def check_trained(tensors: dict[str, Tensor]) -> None:
    """UserError where a value is not finite, in bf16 too, or no norm weight of the masters has moved from 1."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor.to(torch.bfloat16)).all():
            raise UserError(f"the drafter's {name} has values that are not finite; export an earlier checkpoint")
    norms = [tensor for name, tensor in tensors.items() if name.endswith("norm.weight")]
    if all(bool((norm == 1).all()) for norm in norms):
        raise UserError(
            f"all {len(norms)} norm weights of the drafter are exactly 1: it is untrained, or its norms are frozen "
            "(bf16 master weights do that); train it in fp32 before exporting"
        )


def read_tree(folder: Path) -> dict[str, Any]:
    """The config.json of a drafter folder as it stands; UserError if there is none or it is broken."""
    try:
        tree = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder} is not a drafter: it has no {CONFIG}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{folder / CONFIG} cannot be read: {error}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{folder / CONFIG} is not a mapping of keys; export the drafter again")
    return tree


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of a drafter folder; UserError if there are none or the file is broken."""
    try:
        return load_file(folder / WEIGHTS)
    except FileNotFoundError:
        raise UserError(f"{folder} is not a drafter: it has no {WEIGHTS}") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / WEIGHTS} cannot be read: {error}; export the drafter again") from None


def _check_written(folder: Path, tree: dict[str, Any], config: DrafterConfig) -> None:
    """Reads back what was written: the same config.json, every tensor, all bf16 and finite."""
    assert read_tree(folder) == tree, f"{CONFIG} is not what was written"
    tensors = read_weights(folder)
    check_table(tensors, config, folder)
    assert all(tensor.dtype == torch.bfloat16 and bool(torch.isfinite(tensor).all()) for tensor in tensors.values())
