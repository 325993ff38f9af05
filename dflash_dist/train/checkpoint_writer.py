"""Writing checkpoints behind the training loop: it waits for a copy in host memory, and a thread does the rest."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import threading
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.futures import Future

from dflash_dist.errors import RunFailed, UserError
from dflash_dist.train.checkpoint import (
    COMPLETE,
    DRAFTER,
    STATE,
    aside_of,
    by_val_loss,
    cause,
    crc32,
    folder_of,
    folders,
    step_of,
)

GRACE_S = 10.0
"""How long a rank that has failed lets its last checkpoint go on."""


class CheckpointWriter:
    """Writes one checkpoint at a time, each whole or not at all, while training goes on.

    `copy` takes the state as it is at that point of the current stream; `write` has it written. A write that failed is
    raised by `poll`, `wait`, or the next `copy`: UserError where the disk is full or the folder cannot be written,
    RunFailed where weights are not finite. Nothing half-written stays.
    """

    def __init__(
        self, root: Path, tensors: dict[str, Tensor], keep: int, group: dist.ProcessGroup | None = None
    ) -> None:
        """`tensors` is the live state by name. Host memory of its size is taken now, pinned where it is on a GPU.

        `group`: the ranks, on gloo, that hold parts of it, as DTensors; each of them makes the same calls. `keep`: how
        many of the last checkpoints stay, beside the one of least `val_loss`.
        """
        self._root, self._keep, self._group = root, keep, group
        self._live = {name: _local(tensor) for name, tensor in tensors.items()}
        mesh = DeviceMesh.from_group(group, "cpu") if group is not None else None
        self._host = {name: _host_twin(tensor, mesh) for name, tensor in tensors.items()}
        on_gpu = any(tensor.is_cuda for tensor in self._live.values())
        self._copied = torch.cuda.Event(blocking=True) if on_gpu else None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def copy(self) -> None:
        """Copies the state to the host, in the order of the current stream; the host itself does not wait for it.

        It does wait where the write before is still going on.
        """
        self.wait()
        for name, tensor in self._live.items():
            _local(self._host[name]).copy_(tensor, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def write(self, state: dict[str, Any]) -> None:
        """Has what `copy` took written, with `state`: what `state.json` tells beside the files."""
        assert self._thread is None
        # A daemon: a rank that failed must be able to end, even where the disk or another rank has stopped answering.
        self._thread = threading.Thread(target=self._write, args=(state,), name="checkpoint", daemon=True)
        self._thread.start()

    def poll(self) -> None:
        """Raises what the last write failed of, as soon as that is known. Cheap."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def wait(self) -> None:
        """Waits for the write in progress, if there is one."""
        self._join(None)
        self.poll()

    def close(self) -> None:
        """For a rank that ends, well or by an error: gives a write in progress `GRACE_S`, and raises nothing."""
        self._join(GRACE_S)

    def _join(self, timeout_s: float | None) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._thread = None

    def _write(self, state: dict[str, Any]) -> None:
        folder = folder_of(self._root, state["step"])
        storage = _Storage(folder, state, self._keep, dist.get_rank(self._group) if self._group is not None else 0)
        try:
            if self._copied is not None:
                self._copied.synchronize()  # sync: this thread only
            dcp.save(dict(self._host), storage_writer=storage, process_group=self._group, no_dist=self._group is None)
        except dcp.CheckpointException as error:
            storage.clean_up()
            self._failure = _as_ours(cause(error), state["step"], self._root)
        except BaseException as error:  # of the group: another rank is gone
            self._failure = error


class _Storage(dcp.HuggingFaceStorageWriter):
    """The safetensors storage of torch.distributed.checkpoint, but whole or absent and with checksums.

    Its own way to a file makes two copies of it in memory, and no other thread of this process runs meanwhile.
    """

    def __init__(self, folder: Path, state: dict[str, Any], keep: int, shard: int) -> None:
        self._folder, self._aside = folder, aside_of(folder)
        self._state, self._keep, self._shard = state, keep, shard
        super().__init__(str(self._aside), save_distributed=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """On the first rank: makes the folder. No rank writes before all have planned."""
        if self._shard:
            return plan
        self.clean_up()
        return super().prepare_local_plan(plan)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's files; one result for each, with its checksum."""
        items: dict[str, list[WriteItem]] = {}
        for item in plan.items:
            assert item.tensor_data is not None
            if not item.tensor_data.chunk.sizes.numel():
                continue  # a rank without rows of a small tensor
            kind = "drafter" if item.index.fqn.startswith(DRAFTER) else "optimizer"
            items.setdefault(f"{kind}-{self._shard:05d}.safetensors", []).append(item)
        try:
            results = [self._write_file(name, some, planner) for name, some in items.items()]
        except SafetensorError as error:
            number = re.search(r"os error ([0-9]+)", str(error))
            raise OSError(int(number[1]) if number else None, str(error)) from None
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_file(self, name: str, items: list[WriteItem], planner: SavePlanner) -> WriteResult:
        tensors: dict[str, Tensor] = {}
        offsets = {}
        for item in items:
            fqn, tensor = item.index.fqn, planner.resolve_data(item)
            assert isinstance(tensor, Tensor) and item.tensor_data is not None and fqn not in tensors
            tensors[fqn], offsets[fqn] = tensor, {SAVED_OFFSETS_KEY: item.tensor_data.chunk.offsets}
        bad = [name for name, tensor in tensors.items() if name.startswith(DRAFTER) and not tensor.isfinite().all()]
        if bad:
            step, name = self._state["step"], bad[0].removeprefix(DRAFTER)
            raise RunFailed(
                f"step {step}: {len(bad)} weights are not finite, such as {name}; no checkpoint was written"
            )
        path = self._aside / name
        save_file(tensors, path, {CUSTOM_METADATA_KEY: json.dumps(offsets), "format": "pt"})
        _flush_to_disk(path)
        return WriteResult(MetadataIndex(name), path.stat().st_size, crc32(path))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank, once all have written: the other files, the rename, and the removal of older ones."""
        files = {
            result.index.fqn: {"size_bytes": result.size_in_bytes, "crc32": result.storage_data}
            for rank in results
            for result in rank
        }
        text = json.dumps(self._state | {"files": files}, indent=1).encode()
        for name, content in ((STATE, text), (COMPLETE, f"{zlib.crc32(text):08x}".encode())):
            (self._aside / name).write_bytes(content)
            _flush_to_disk(self._aside / name)
        _flush_to_disk(self._aside)
        if self._folder.exists():
            shutil.rmtree(self._folder)
        self._aside.rename(self._folder)
        _flush_to_disk(self._folder.parent)
        self._remove_older()

    def clean_up(self) -> None:
        """On the first rank: removes what is written aside."""
        if self._shard == 0:
            shutil.rmtree(self._aside, ignore_errors=True)

    def _remove_older(self) -> None:
        root, step = self._folder.parent, self._state["step"]
        before = [folder for folder in folders(root) if step_of(folder) < step]
        best = by_val_loss(root)[:1]
        for old in before[: max(0, len(before) - self._keep + 1)]:
            if old not in best:
                old.rename(aside_of(old))  # so that it, too, is whole or absent
                shutil.rmtree(aside_of(old), ignore_errors=True)


def _host_twin(tensor: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Host memory for this rank's part of `tensor`, as a whole tensor or as a DTensor on `mesh`."""
    local = _local(tensor)
    host = torch.zeros(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
    if mesh is None or not isinstance(tensor, DTensor):
        return host
    return DTensor.from_local(
        host, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _as_ours(error: BaseException, step: int, root: Path) -> BaseException:
    if not isinstance(error, OSError):
        return error
    message = f"checkpoint of step {step} cannot be written to {root}: {error}"
    if error.errno in (errno.EIO, errno.ESTALE):  # the disk's or the network's fault, which may pass
        return RunFailed(message)
    return UserError(f"{message}; free some space and start again to resume")


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
