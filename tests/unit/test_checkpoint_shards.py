"""Checkpoints of drafters that are sharded over ranks on gloo: written by three, read by three, two and one."""

import resource
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dflash_dist.errors import UserError
from dflash_dist.train.checkpoint import Checkpoint, newest_checkpoint
from dflash_dist.train.checkpoint_writer import CheckpointWriter
from dflash_dist.train.gradients import shard_drafter
from tests.checkpoints import run_state, training_tensors
from tests.random_models import drafter_config, qwen3_config, random_drafter

RANKS = 3
CONFIG = drafter_config(qwen3_config())


def numbered(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights as they are, and values of its own for each of the optimizer's tensors."""
    return {
        name: tensor if name.startswith("drafter.") else torch.arange(tensor.numel()).reshape(tensor.shape) + i / 128
        for i, (name, tensor) in enumerate(tensors.items())
    }


def sharded_tensors(group: dist.ProcessGroup, seed: int) -> dict[str, Tensor]:
    """A drafter and its optimizer over the ranks of a group, and a tensor with fewer rows than ranks."""
    drafter = random_drafter(CONFIG, seed)
    shard_drafter(drafter, group, torch.device("cpu"))
    mesh = DeviceMesh.from_group(group, "cpu")
    return training_tensors(drafter) | {"exp_avg.few_rows": distribute_tensor(torch.zeros(2, 4), mesh, [Shard(0)])}


def whole_tensors(seed: int) -> dict[str, Tensor]:
    return training_tensors(random_drafter(CONFIG, seed)) | {"exp_avg.few_rows": torch.zeros(2, 4)}


def newest(root: Path) -> Checkpoint:
    checkpoint = newest_checkpoint(root, verify=True)
    assert checkpoint is not None
    return checkpoint


def save_without_waiting_for_each_other(writer: CheckpointWriter, rank: int) -> None:
    """The other ranks begin when the first has gone on: it would wait for ever if it waited for them."""
    if rank:
        dist.barrier()
    writer.copy()
    writer.write(run_state(CONFIG, 3))
    if rank == 0:
        dist.barrier()
    writer.wait()


def fill_the_disk_of_one_rank(writer: CheckpointWriter, rank: int) -> None:
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
    writer.copy()
    writer.write(run_state(CONFIG, 6))
    with pytest.raises(UserError, match="checkpoint of step 6 cannot be written"):
        writer.wait()


def main(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=RANKS)
    all_ranks, two_ranks = dist.new_group(list(range(RANKS))), dist.new_group([0, 1])
    tensors = sharded_tensors(all_ranks, seed=0)
    with torch.no_grad():
        for name, values in numbered(whole_tensors(seed=0)).items():
            tensor = tensors[name]
            if isinstance(tensor, DTensor):
                values = distribute_tensor(values, tensor.device_mesh, tensor.placements)
            tensor.copy_(values)
    writer = CheckpointWriter(folder / "checkpoints", tensors, 2, all_ranks)
    save_without_waiting_for_each_other(writer, rank)
    fill_the_disk_of_one_rank(writer, rank)
    dist.barrier()
    for group in (all_ranks, two_ranks):
        if dist.get_rank(group) >= 0:
            read = sharded_tensors(group, seed=1)
            newest(folder / "checkpoints").load(read)
            for name, expected in numbered(whole_tensors(seed=0)).items():
                tensor = read[name]
                assert torch.equal(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor, expected), name
    dist.barrier()
    dist.destroy_process_group()


def test_shards_of_three_ranks_are_read_by_two_and_by_one(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(main, (tmp_path,), nprocs=RANKS)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000003"]
    files = sorted(path.name for path in (tmp_path / "checkpoints" / "step_00000003").glob("*.safetensors"))
    assert files == [f"{kind}-{rank:05d}.safetensors" for kind in ("drafter", "optimizer") for rank in range(RANKS)]
    read = whole_tensors(seed=1)
    newest(tmp_path / "checkpoints").load(read)
    for name, expected in numbered(whole_tensors(seed=0)).items():
        assert torch.equal(read[name], expected), name
