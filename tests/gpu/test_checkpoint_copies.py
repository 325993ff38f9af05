"""A checkpoint of a drafter on a GPU is taken in the order of the stream, and the host does not wait for it."""

from pathlib import Path

import pytest
import torch

from dflash_dist.train.checkpoint import newest_checkpoint
from dflash_dist.train.checkpoint_writer import CheckpointWriter
from tests.checkpoints import run_state, training_tensors
from tests.random_models import drafter_config, qwen3_config, random_drafter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: run `make test-gpu` on a GPU machine"),
]
CONFIG = drafter_config(qwen3_config())


def test_the_host_goes_on_while_the_gpu_is_busy(tmp_path: Path) -> None:
    tensors = training_tensors(random_drafter(CONFIG).to("cuda"))
    writer = CheckpointWriter(tmp_path, tensors, keep=2)
    for tensor in tensors.values():
        tensor.clone().add_(1)  # a kernel's first launch waits for the device while it is loaded
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000_000)  # cycles: some two seconds
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    torch.cuda.set_sync_debug_mode("error")
    writer.copy()
    torch.cuda.set_sync_debug_mode("default")
    for tensor in tensors.values():
        tensor.add_(1)  # the next step
    assert not torch.cuda.current_stream().query(), "the host waited for the GPU"
    writer.write(run_state(CONFIG, 3))
    writer.wait()
    checkpoint = newest_checkpoint(tmp_path, verify=True)
    assert checkpoint is not None
    checkpoint.load(tensors)
    for name, expected in copies.items():
        assert torch.equal(tensors[name], expected), name
