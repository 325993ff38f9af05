"""How the ranks of a world find each other, and the store through which they talk beside the data."""

from __future__ import annotations

import datetime
import os
import time
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from dflash_dist.errors import RunFailed, UserError
from dflash_dist.topology import Topology
from dflash_dist.train.liveness import JOIN_WITHIN_S

START_TIMEOUT = datetime.timedelta(minutes=30)
"""The other ranks may wait this long for a target of tens of GiB to be read."""
CONNECT_TIMEOUT = datetime.timedelta(seconds=5)
PORT_KEY = "dflash_dist/world_store_port"


@dataclass(frozen=True)
class World:
    """One rank's way to the others."""

    rank: int
    store: dist.Store
    watch_store: dist.Store
    """A second client of the same store: a call that waits holds up all users of its client."""
    launcher_store: dist.Store
    """Where the ranks met; kept, since without an agent it lives in rank 0's process."""


def join_world(topology: Topology) -> World:
    """Meets the other ranks, as RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say; UserError for another world size.

    From then on all goes through a store in rank 0's process: that of torchrun's agent goes down with it, and ranks
    whose agent was killed are still to end together.
    """
    launcher_store, rank, world_size = next(rendezvous("env://", timeout=START_TIMEOUT))
    if world_size != topology.world_size:
        raise UserError(
            f"topology {topology} has {topology.world_size} ranks, but {world_size} were started; start them with "
            f"torchrun's --nnodes {topology.nodes} --nproc-per-node {topology.ranks_per_node} (Slurm's --nodes and "
            f"--ntasks-per-node), or give a --topo of {world_size} ranks"
        )
    if rank == 0:
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"], 0, is_master=True, wait_for_workers=False, timeout=START_TIMEOUT
        )
        launcher_store.set(PORT_KEY, str(store.port))
    else:
        store = _connect(launcher_store)
    return World(rank, store, _connect(launcher_store), launcher_store)


def _connect(launcher_store: dist.Store) -> dist.TCPStore:
    """A client of the store in rank 0's process.

    An agent that restarts its ranks may keep its own store, and in it the port of the world before: nobody listens
    there any more, and rank 0 is about to write another.
    """
    give_up_s = time.monotonic() + JOIN_WITHIN_S
    while True:
        port = int(launcher_store.get(PORT_KEY))
        try:
            store = dist.TCPStore(os.environ["MASTER_ADDR"], port, wait_for_workers=False, timeout=CONNECT_TIMEOUT)
        except dist.DistError:
            if time.monotonic() > give_up_s:
                raise RunFailed(
                    f"rank 0 has not answered at {os.environ['MASTER_ADDR']}:{port} for {JOIN_WITHIN_S:.0f} s; it "
                    "failed, or a firewall keeps this port from the other nodes"
                ) from None
            continue
        store.set_timeout(START_TIMEOUT)
        return store
