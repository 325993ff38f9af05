"""The target on CUDA: fused kernels over packed documents, compiled layers, and a host that never waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_dist.config import TargetConfig
from dflash_dist.target.capture import Layout, TargetForward
from tests.tiny import target_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: run `make test-gpu` on a GPU machine"),
]
TAPS = (0, 2, 3, 6)
LENGTHS_N = np.array([7, 300, 3, 1, 130, 64, 1000])
CUDA = torch.device("cuda")
KINDS = ["llama", "qwen3", "gemma3", "qwen3_moe", "hybrid", "qwen3_next", "hybrid_moe"]


def save_target(kind: str, folder: Path) -> Any:
    """A target wide enough for every kernel, in float32; the model itself, on CUDA."""
    from transformers import AutoModelForCausalLM

    config = target_config(kind)
    wider = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "initializer_range": 0.05}
    linear = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "moe_intermediate_size": 128}
    for name, value in (wider | {k: v for k, v in linear.items() if hasattr(config, k)}).items():
        setattr(config, name, value)
    if rope := getattr(config, "rope_parameters", None):
        rope |= {"mrope_section": [8, 4, 4]} if "mrope_section" in rope else {}
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    model.save_pretrained(folder)
    return model.to("cuda")


def tokens_of(lengths_N: np.ndarray, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (int(lengths_N.sum()),), generator=torch.Generator().manual_seed(seed))


def captured(forward: TargetForward, tokens_T: torch.Tensor, lengths_N: np.ndarray) -> torch.Tensor:
    out_TF = torch.full((len(tokens_T), forward.features), torch.nan, dtype=forward.dtype, device="cuda")
    forward.capture(tokens_T, lengths_N, out_TF)
    return out_TF.float()


def exact_states(model: Any, tokens_T: torch.Tensor) -> torch.Tensor:
    """float32, one document at a time, by Hugging Face's own path."""
    parts = []
    for ids in tokens_T.to("cuda").split(LENGTHS_N.tolist()):
        with torch.no_grad():
            states = model(input_ids=ids[None], output_hidden_states=True).hidden_states
        parts.append(torch.cat([states[tap + 1][0] for tap in TAPS], dim=-1))
    return torch.cat(parts)


def error_by_tap(states_TF: torch.Tensor, exact_TF: torch.Tensor) -> torch.Tensor:
    pairs = zip(states_TF.chunk(len(TAPS), 1), exact_TF.chunk(len(TAPS), 1), strict=True)
    return torch.tensor([((ours - exact).norm() / exact.norm()).item() for ours, exact in pairs])


@pytest.mark.parametrize("kind", KINDS)
def test_packing_costs_no_precision(kind: str, tmp_path: Path) -> None:
    """bf16: against float32, packed documents are no farther off than each alone, nor than Hugging Face's own path."""
    torch._dynamo.reset()
    exact_model = save_target(kind, tmp_path)
    tokens_T = tokens_of(LENGTHS_N)
    exact_TF = exact_states(exact_model, tokens_T)
    forward = TargetForward(
        tmp_path, TargetConfig(model=str(tmp_path), compile=kind in ("qwen3_moe", "hybrid")), TAPS, CUDA
    )
    assert (forward.layout, forward.not_packed_because) == ("packed", "")
    packed = error_by_tap(captured(forward, tokens_T, LENGTHS_N), exact_TF)
    parts = zip(tokens_T.split(LENGTHS_N.tolist()), LENGTHS_N, strict=True)
    alone = error_by_tap(torch.cat([captured(forward, ids, np.array([n])) for ids, n in parts]), exact_TF)
    theirs = error_by_tap(exact_states(exact_model.bfloat16(), tokens_T).float(), exact_TF)
    print(kind, "packed", packed.tolist(), "alone", alone.tolist(), "Hugging Face's", theirs.tolist())
    assert packed.max() < 0.05 or "moe" in kind or kind == "qwen3_next"  # a token that takes another expert is far off
    assert (packed <= 1.1 * alone + 1e-4).all() and (packed <= 1.25 * theirs + 1e-3).all()


@pytest.mark.parametrize("layout", ["packed", "rows"])
def test_nothing_waits_compiles_or_allocates_after_the_warm_up(layout: Layout, tmp_path: Path) -> None:
    from fla.ops.utils.cumsum import chunk_local_cumsum_scalar_kernel  # tuned for each batch size
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    save_target("hybrid", tmp_path)
    forward = TargetForward(tmp_path, TargetConfig(model=str(tmp_path)), TAPS, CUDA, layout=layout)
    assert forward.layout == layout
    variants = chunk_local_cumsum_scalar_kernel.fn.cache
    tuned = len(variants)
    # Few tokens and many, of totals that are and are not multiples of 16: kernels may be specialised for those.
    mixes = [np.array(mix) for mix in ([2000, 48], [500, 500, 48, 1000], [77], [2048], [3, 45, 1500, 500], [1000, 1])]
    out_TW = torch.empty(2048, forward.features, dtype=torch.bfloat16, device="cuda")
    for lengths_N in mixes[:3]:
        forward.capture(tokens_of(lengths_N), lengths_N, out_TW[: lengths_N.sum()])
    torch.cuda.synchronize()
    graphs, reserved = counters["stats"]["unique_graphs"], torch.cuda.memory_reserved()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for lengths_N in mixes * 2:
            forward.capture(tokens_of(lengths_N), lengths_N, out_TW[: lengths_N.sum()])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert counters["stats"]["unique_graphs"] == graphs and len(variants) == tuned > 0
    assert torch.cuda.memory_reserved() == reserved or layout == "rows"
    assert out_TW.isfinite().all()
