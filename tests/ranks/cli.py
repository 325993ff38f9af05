"""Running the real command line in real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch

from dflash_dist.drafter.model import DFlashDrafter
from dflash_dist.train.checkpoint import find_checkpoint
from tests.command import run_here

BASE = [sys.executable, "-m", "dflash_dist"]
ENVIRONMENT = {
    k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "DFLASH_", "TORCHELASTIC_", "MAKE", "MFLAGS"))
}
WORLD_TIMEOUT_S = 240


def dflash(*arguments: str, timeout_s: float = WORLD_TIMEOUT_S, **environment: str) -> subprocess.CompletedProcess[str]:
    """`dflash-dist ARGUMENTS`, to its end."""
    return subprocess.run(
        [*BASE, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=ENVIRONMENT | environment,
        check=False,
    )


def train(config: Path, topo: str, run: str, *overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A whole `dflash-dist train`, which must succeed."""
    done = dflash("train", "--config", str(config), "--topo", topo, "--run", run, *overrides, **environment)
    assert done.returncode == 0, done.stderr
    return done


def train_from_here(config: Path, topo: str, run: str, *overrides: str) -> None:
    """The same for what nobody reads: this process starts the ranks, which spares a world the launcher's imports."""
    with mock.patch.dict(os.environ, ENVIRONMENT, clear=True):
        code, _, err = run_here("train", "--config", str(config), "--topo", topo, "--run", run, *overrides)
    assert code == 0, err


def metrics(config: Path, run: str) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl."""
    path = config.parent / "runs" / run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def weights(config: Path, run: str, step: int) -> dict[str, torch.Tensor]:
    """The fp32 masters of a run's checkpoint."""
    checkpoint = find_checkpoint(config.parent / "runs" / run / "checkpoints", str(step))
    drafter = DFlashDrafter(checkpoint.drafter)
    checkpoint.load_weights(drafter)
    return drafter.state_dict()


def assert_same_weights(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Bit for bit."""
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


class Running:
    """A `dflash-dist train` in the background, to be disturbed at a given step."""

    def __init__(self, config: Path, topo: str, run: str, *overrides: str, **environment: str) -> None:
        self._metrics = config.parent / "runs" / run / "metrics.jsonl"
        self._process = subprocess.Popen(
            [*BASE, "train", "--config", str(config), "--topo", topo, "--run", run, *overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT | environment,
            start_new_session=True,
            pipesize=2**20,  # nobody reads before the end, and a world whose pipe is full stands still
        )

    def wait_for_step(self, step: int) -> None:
        """Until the metrics tell that `step` is done."""
        deadline = time.monotonic() + WORLD_TIMEOUT_S
        while not (self._metrics.exists() and len(self._metrics.read_text().splitlines()) >= step):
            assert self._process.poll() is None, self._process.communicate()[1]
            assert time.monotonic() < deadline, f"step {step} did not come"
            time.sleep(0.02)

    def wait_for_ranks(self, count: int) -> None:
        """Until the launcher has started `count` rank processes."""
        deadline = time.monotonic() + WORLD_TIMEOUT_S
        while len(self.ranks()) < count:
            assert self._process.poll() is None and time.monotonic() < deadline, "the ranks did not start"
            time.sleep(0.02)

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes of the world by rank."""
        ranks = {}
        for child in psutil.Process(self._process.pid).children():
            with contextlib.suppress(psutil.Error):  # one that has just ended has no environment
                rank = child.environ().get("RANK")  # a child that has not begun its own program has none
                if rank is not None and "dflash_dist" in child.cmdline():
                    ranks[int(rank)] = child
        return ranks

    def send(self, number: signal.Signals) -> None:
        """A signal to the launcher alone."""
        self._process.send_signal(number)

    def close_stderr(self) -> None:
        """As a `tee` that ends, or a terminal that is closed: nobody reads any more what the world reports."""
        assert self._process.stderr is not None
        self._process.stderr.close()

    def end(self) -> tuple[int, str]:
        """Exit code and stderr, if it was not closed; no process of the world may be left."""
        ranks = self.ranks() if self._process.poll() is None else {}
        _, stderr = self._process.communicate(timeout=WORLD_TIMEOUT_S)
        _, alive = psutil.wait_procs(list(ranks.values()), timeout=10)
        assert not alive, f"ranks outlive their launcher: {alive}"
        return self._process.returncode, stderr
