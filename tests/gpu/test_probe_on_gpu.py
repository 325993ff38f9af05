"""The probe on a real GPU: the table, the largest budget as it runs, and memory that runs out."""

import json
from pathlib import Path

import pytest
import torch

from dflash_dist.config import TargetConfig
from dflash_dist.probe_process import Job, Shape, TargetProcess, Timing
from tests.ranks.cli import dflash, train
from tests.tiny import VOCAB, make_chats, make_config, make_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: run `make test-gpu` on a GPU machine"),
]
SMALL = Shape("small", (100, 200))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target("qwen3", tmp_path_factory.mktemp("target"))


def test_a_probe_finds_a_budget_and_train_takes_its_costs(target: Path, tmp_path: Path) -> None:
    drafter = {"head_dim": 16}
    config = make_config(tmp_path, target, make_chats(tmp_path / "chats.jsonl"), drafter=drafter)
    done = dflash("probe", "--config", str(config), "--budget", "8192", "--json", "--device", "cuda")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["gpu"] == torch.cuda.get_device_name() and figures["dtype"] == "float32"
    assert figures["matrix_tflops"] > 0.01
    for row in figures["shapes"]:
        assert row["error"] is None and row["us_per_token"] > 0 and row["mfu"] > 0 and row["peak_gib"] > 0, row
    # Documents this short reach schedule.max_documents long before the GPU is full.
    assert figures["largest_budget"] > 8192 and "schedule.max_documents=1024" in figures["largest_budget_note"]
    assert "with xN the drafter's own" in figures["largest_budget_note"]
    assert min(figures["costs"].values()) >= 0 and max(figures["costs"].values()) > 0
    trained = train(config, "x1", "run", "train.max_steps=1", "evaluate.prompts=1", "--device", "cuda")
    assert f"as probed: {figures['file']}" in trained.stderr


def test_memory_that_runs_out_is_survived_in_the_same_process(target: Path) -> None:
    job = Job(target, TargetConfig(model=str(target)), (1, 3, 5), False, "full", "cuda", False, VOCAB)
    with TargetProcess(job) as process:
        loaded = process.load()
        assert loaded.dtype == "bfloat16" and loaded.memory_bytes == torch.cuda.mem_get_info()[1]
        before = process.run(SMALL)
        pid = process.pid
        slots = 2 * loaded.memory_bytes // (512 * 1024 * loaded.bytes_per_token)
        assert process.run(Shape("large", (1024,) * 512, slots)) == "out of memory"
        after = process.run(SMALL)
        assert isinstance(before, Timing) and isinstance(after, Timing) and process.pid == pid
        assert after.peak_bytes == pytest.approx(before.peak_bytes, rel=0.01)
