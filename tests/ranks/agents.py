"""Worlds of several torchrun agents, as several machines run them, here on one."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from dflash_dist.topology import parse_topology
from tests.ranks.cli import ENVIRONMENT, WORLD_TIMEOUT_S


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


class Agents:
    """One torchrun a node, all on this machine."""

    def __init__(
        self, config: Path, topo: str, run: str, *overrides: str, max_restarts: int = 0, of_node: Sequence[str] = ()
    ) -> None:
        topology = parse_topology(topo)
        self._metrics = config.parent / "runs" / run / "metrics.jsonl"
        endpoint = f"localhost:{free_port()}"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(topology.nodes)]
        torchrun += ["--max-restarts", str(max_restarts)]
        torchrun += [
            "--nproc-per-node",
            str(topology.ranks_per_node),
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            endpoint,
        ]
        torchrun += ["--rdzv-id", run, "-m", "--", "dflash_dist", "train", "--config", str(config), "--topo", topo]
        torchrun += ["--run", run, "--device", "cpu", *overrides]
        self.logs = [config.parent / f"{run}_node{node}.log" for node in range(topology.nodes)]
        self.agents = []
        for node, log in enumerate(self.logs):
            with log.open("w") as file:
                command = [*torchrun, *of_node[node : node + 1]]
                self.agents.append(subprocess.Popen(command, stdout=file, stderr=file, env=ENVIRONMENT))

    def wait_for_step(self, step: int) -> None:
        """Until the metrics tell that `step` is done."""

        deadline = time.monotonic() + WORLD_TIMEOUT_S
        while not (self._metrics.exists() and len(self._metrics.read_text().splitlines()) >= step):
            assert all(agent.poll() is None for agent in self.agents), self.text()
            assert time.monotonic() < deadline, f"step {step} did not come"
            time.sleep(0.02)

    def ranks(self) -> dict[int, psutil.Process]:
        """The rank processes of all nodes."""
        found = {}
        for agent in self.agents:
            for child in psutil.Process(agent.pid).children():
                with contextlib.suppress(psutil.Error):  # one that has just ended has no environment
                    found[int(child.environ()["RANK"])] = child
        return found

    def end(self) -> list[int]:
        """The exit code of each agent."""
        return [agent.wait(timeout=WORLD_TIMEOUT_S) for agent in self.agents]

    def text(self) -> str:
        """What all nodes said."""
        return "".join(log.read_text() for log in self.logs)
