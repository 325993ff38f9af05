"""What ranks tell each other beside the data: progress of each rank, and the step after which a run is to stop.

All of it goes through the rendezvous store; nothing here touches a device.
"""

from __future__ import annotations

import json
import signal
import time
from typing import Any

from torch.distributed import Store

from dflash_dist.errors import RunFailed
from dflash_dist.topology import Topology

POLL_S = 0.02


class Control:
    """One rank's end of the control store."""

    def __init__(self, store: Store, rank: int, topology: Topology) -> None:
        self._store, self._rank, self._topology = store, rank, topology
        self._signals: tuple[signal.Signals, ...] = ()
        self._stop_asked = False

    def listen(self, signals: tuple[signal.Signals, ...]) -> None:
        """From now on each of the signals asks for a checkpoint and an orderly end."""
        self._signals = signals
        for number in signals:
            signal.signal(number, self._ask_stop)

    def _ask_stop(self, number: int, frame: Any) -> None:
        self._stop_asked = True

    def agree_on(self, name: str, value: str) -> None:
        """Checks that every rank holds the same `value`; RunFailed names the rank that does not."""
        key = f"agree/{name}"
        if self._rank == 0:
            self._store.set(key, value)
        first = self._store.get(key).decode()
        if first != value:
            raise RunFailed(f"{name} of rank {self._rank} is {value[:16]}, but rank 0 has {first[:16]}")

    def lead_stop(self, step: int, lag_steps: int) -> None:
        """Called by the first drafter rank after each step: passes a stop request on.

        The named step is far enough ahead that no other drafter rank can have passed it: they meet in each step's
        all-reduce, and a rank's host is at most `lag_steps` ahead of it.
        """
        if self._stop_asked and not self._store.check(["stop"]):
            self._store.set("stop", str(step + 1 + lag_steps))

    def stop_step(self) -> int | None:
        """The last step to train, once a stop was asked for; called by every rank once a step or more often."""
        self.listen(self._signals)  # LLVM, with which Triton compiles, puts its own handlers in place of ours
        return int(self._store.get("stop")) if self._store.check(["stop"]) else None

    def publish(self, **facts: float) -> None:
        """Makes this rank's progress readable by the others."""
        self._store.set(f"progress/{self._rank}", json.dumps(facts))

    def progress(self, rank: int) -> dict[str, float]:
        """What a rank published last; empty before it did."""
        key = f"progress/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else {}

    def publish_done(self) -> None:
        """Says that this target rank sends no further message."""
        self._store.set(f"done/{self._rank}", "1")

    def targets_done(self) -> bool:
        """Whether every target rank has sent its last message."""
        ranks = range(self._topology.targets)
        return self._store.check([f"done/{self._topology.target_rank(t)}" for t in ranks])

    def pause(self) -> None:
        """The interval of a poll on the store."""
        time.sleep(POLL_S)
