"""The whole path on real GPUs: NCCL channels, compiled flex attention, fused AdamW, one rank a GPU."""

import os
import signal
from pathlib import Path

import pytest
import torch

from dflash_dist.data.store import Documents
from dflash_dist.drafter.anchors import draw_blocks
from dflash_dist.drafter.config import DrafterConfig
from dflash_dist.drafter.loss import Objective, block_sums
from dflash_dist.drafter.model import DFlashDrafter
from dflash_dist.target.load import TargetEnds
from tests.ranks.cli import Running, dflash, metrics, train
from tests.ranks.faults import INJECTOR, Fault, kill, stop, strike, throw
from tests.tiny import make_chats, make_config, make_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: run `make test-gpu` on a GPU machine"),
]


def config_for(tmp_path: Path, kind: str = "qwen3") -> Path:
    target = make_target(kind, tmp_path / "target")
    return make_config(
        tmp_path,
        target,
        make_chats(tmp_path / "chats.jsonl"),
        objective={"max_anchors_per_batch": 32},
        drafter={"head_dim": 16},
    )


def test_flex_equals_dense() -> None:
    import numpy as np

    shape = DrafterConfig(
        hidden_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=256, rms_norm_eps=1e-6, vocab_size=500, max_position_embeddings=4096, rope_theta=1e4,
        initializer_range=0.02, block_size=8, target_layer_ids=(1, 3), num_target_layers=6, mask_token_id=499,
        layer_types=("sliding_attention", "sliding_attention", "full_attention"), sliding_window=40, is_causal=None,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    lengths = np.array([300, 70, 512, 100])
    tokens = int(lengths.sum())
    documents = Documents(
        tokens_T=rng.integers(0, 498, tokens),
        supervised_T=rng.random(tokens) < 0.8,
        lengths_N=lengths,
        keys_N=rng.integers(0, 2**63, len(lengths)).astype(np.uint64),
    )
    blocks = draw_blocks(
        documents, block_size=8, mask_token_id=499, anchors_per_document=30, max_anchors=96, gamma=4.0, seed=0,
        epoch=1, pad_to=128,
    )  # fmt: skip
    padded = 1024
    torch.manual_seed(0)
    features = torch.randn(padded, 256, device="cuda")
    last = torch.randn(padded, 128, device="cuda")
    positions = torch.zeros(padded, dtype=torch.int64, device="cuda")
    positions[:tokens] = torch.from_numpy(np.concatenate([np.arange(n) for n in lengths]))
    embedding = torch.nn.Embedding(500, 128, device="cuda")
    ends = TargetEnds(embedding, torch.randn(500, 128, device="cuda"), None)
    inputs = (features, positions, blocks.to("cuda"))
    for objective in (Objective(), Objective("argmax", "dpace"), Objective("kl")):
        results = {}
        for attention in ("dense", "flex"):
            model = DFlashDrafter(shape, attention=attention)
            model.init_weights(1)
            model.cuda()
            sums = block_sums(model, ends, *inputs, chunk=32, objective=objective, last_TH=last)
            sums[0].backward()
            results[attention] = sums.detach(), [p.grad for p in model.parameters()]
        torch.testing.assert_close(results["flex"][0], results["dense"][0], rtol=2e-3, atol=1e-3)
        for flex, dense in zip(results["flex"][1], results["dense"][1], strict=True):
            assert (flex - dense).norm() <= 5e-3 * dense.norm(), objective


def test_one_gpu_trains_exports_and_evaluates(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    done = train(config, "x1", "run", "--device", "cuda")
    rows = metrics(config, "run")
    assert [row["step"] for row in rows] == list(range(1, 9)) and rows[-1]["loss"] < rows[0]["loss"]
    assert "tau" in done.stderr


def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    gpus = torch.cuda.device_count()
    refused = dflash("train", "--config", str(config_for(tmp_path)), "--topo", f"{gpus}-1", "--run", "r")
    assert refused.returncode == 2
    assert f"{gpus}-1 needs {gpus + 1} GPUs" in refused.stderr and refused.stderr.count("\n") == 1


OBJECTIVES = [
    ["objective.kind=tokens"],
    ["objective.kind=kl", "objective.weights=dpace", "noise.kind=gaussian", "noise.scale=0.2"],
]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("objective", OBJECTIVES, ids=["tokens", "kl"])
def test_topologies_agree_over_nccl(tmp_path: Path, objective: list[str]) -> None:
    """Also where fillers make the drafters even: on x2 in step 5, of 3 batches, and in each validation, of 1."""
    config = config_for(tmp_path)
    runs = {}
    for topo in ("x1", "1-1", "x2"):
        overrides = ["train.dtype=float32", "train.validation_batches=1", *objective]
        train(config, topo, topo, "--device", "cuda", *overrides)
        runs[topo] = metrics(config, topo)
    for topo, rows in runs.items():
        for row, expected in zip(rows, runs["x1"], strict=True):
            for key in ("loss", "val_loss"):
                assert row.get(key, 0) == pytest.approx(expected.get(key, 0), rel=1e-3), (topo, row["step"], key)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_stop_over_nccl_ends_and_resumes(tmp_path: Path) -> None:
    """Receives that were posted ahead are filled, so that the process groups can end."""
    config = config_for(tmp_path)
    steps = 300  # milliseconds each: enough that the signal comes long before the end
    overrides = [f"train.max_steps={steps}", "train.epochs=100", "train.checkpoint_every=100"]
    running = Running(config, "1-1", "run", "--device", "cuda", *overrides)
    running.wait_for_step(10)
    running.send(signal.SIGINT)
    code, stderr = running.end()
    assert code == 130, stderr
    assert 10 <= len(metrics(config, "run")) < steps
    train(config, "1-1", "run", "--device", "cuda", *overrides)
    assert [row["step"] for row in metrics(config, "run")] == list(range(1, steps + 1))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("fault", "rank"), [(stop, 0), (stop, 1), (kill, 1), (throw, 0)])
def test_a_fault_over_nccl_is_named_and_the_run_resumes(tmp_path: Path, fault: Fault, rank: int) -> None:
    """The others' streams wait for messages that never come; they end all the same."""
    config = config_for(tmp_path)
    overrides = ["train.epochs=1000", "train.checkpoint_every=20", "train.max_steps=4000"]
    (tmp_path / "sitecustomize.py").write_text(INJECTOR, encoding="utf-8")
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    running = Running(config, "1-1", "run", "--device", "cuda", *overrides, FAULT_FOLDER=str(tmp_path), PYTHONPATH=path)
    running.wait_for_step(50)
    strike(running, fault, rank, ("target", "drafter")[rank], config)
    done = len(metrics(config, "run"))
    again = Running(config, "1-1", "run", "--device", "cuda", *overrides)
    again.wait_for_step(done + 20)
    again.send(signal.SIGTERM)
    code, stderr = again.end()
    assert code == 0, stderr
    assert [row["step"] for row in metrics(config, "run")] == list(range(1, len(metrics(config, "run")) + 1))
