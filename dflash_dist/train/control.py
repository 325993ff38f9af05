"""What ranks tell each other beside the data: progress of each rank, and the step after which a run is to stop.

All of it goes through the rendezvous store; nothing here touches a device.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import Store

from dflash_dist.errors import RunFailed, UserError

POLL_S = 0.02


class Control:
    """One rank's end of the control store."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = store, rank
        self._signals: tuple[signal.Signals, ...] = ()
        self._stop_asked, self._stop_passed_on = False, False
        self.published: dict[str, float] = {}
        """This rank's own progress, as it last told it."""
        self.noted: dict[str, Any] = {}
        """What else its loop knows of itself and tells no other rank; replaced, never changed."""

    def listen(self, signals: tuple[signal.Signals, ...]) -> None:
        """From now on each of the signals asks for a checkpoint and an orderly end."""
        self._signals = signals
        for number in signals:
            signal.signal(number, lambda *_: self.ask_stop())

    def ask_stop(self) -> None:
        """Asks for a checkpoint and an orderly end of the world; any rank may, from any thread."""
        self._stop_asked = True

    def agree_on(self, name: str, value: str) -> None:
        """Checks that every rank holds the same `value`; RunFailed names the rank that does not."""
        first = self._of_rank_0(name, value)
        if first != value:
            raise RunFailed(f"{name} of rank {self._rank} is {value[:16]}, but rank 0 has {first[:16]}")

    def from_rank_0(self, name: str, find: Callable[[], Any]) -> Any:
        """What `find` gives on rank 0, which is to be JSON; the other ranks take it from there."""
        return json.loads(self._of_rank_0(name, json.dumps(find()) if self._rank == 0 else ""))

    def agree_on_command(self, facts: list[str]) -> None:
        """Checks that every rank was started with the same `facts`; UserError shows those that differ.

        Each node has a command line of its own.
        """
        first = json.loads(self._of_rank_0("command", json.dumps(facts)))
        own, other = ("; ".join(f for f in some if f not in rest) for some, rest in ((facts, first), (first, facts)))
        if own or other:
            raise UserError(
                f"rank {self._rank} was started with another config or --run than rank 0 ({own or 'nothing'} instead "
                f"of {other or 'nothing'}); give every node the same command"
            )

    def _of_rank_0(self, name: str, value: str) -> str:
        """What rank 0 gave for `name`, at which it arrives too."""
        key = f"agree/{name}"
        if self._rank == 0:
            self._store.set(key, value)
        wait_s = POLL_S
        while not self._store.check([key]):  # rank 0 may prepare data for hours, longer than a `get` waits
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, 1.0)
        return str(self._store.get(key).decode())

    def lead_stop(self, step: int, lag_steps: int) -> None:
        """Called by the first drafter rank after each step: names the last step, once any rank was asked to stop.

        The named step is far enough ahead that no other drafter rank can have passed it: they meet in each step's
        all-reduce, and a rank's host is at most `lag_steps` ahead of it.
        """
        if self._store.check(["stop_asked"]) and not self._store.check(["stop"]):
            self._store.set("stop", str(step + 1 + lag_steps))

    def stop_step(self) -> int | None:
        """The last step to train, once a stop was asked for; called by every rank once a step or more often."""
        self.listen(self._signals)  # LLVM, with which Triton compiles, puts its own handlers in place of ours
        if self._stop_asked and not self._stop_passed_on:
            self._store.set("stop_asked", "")
            self._stop_passed_on = True
        return int(self._store.get("stop")) if self._store.check(["stop"]) else None

    def lead_window(self, start_step: int, steps: int, stack_steps: int) -> None:
        """Called by the first drafter rank: has every rank trace these steps, which none has begun."""
        self._store.set("window", json.dumps([start_step, steps, stack_steps]))

    def window(self) -> tuple[int, int, int] | None:
        """(first step, steps, steps with stacks) of the last window that was asked for; called by every rank.

        Once a step or more often.
        """
        if not self._store.check(["window"]):
            return None
        start_step, steps, stack_steps = json.loads(self._store.get("window"))
        return start_step, steps, stack_steps

    def publish(self, **facts: float) -> None:
        """Makes this rank's progress readable by the others."""
        self.published = facts
        self._store.set(f"progress/{self._rank}", json.dumps(facts))

    def progress(self, rank: int) -> dict[str, float]:
        """What a rank published last; empty before it did."""
        key = f"progress/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else {}

    def all_progress(self, world_size: int) -> list[dict[str, float]]:
        """What each rank published last, in one look at the store; every rank must have published once."""
        return [json.loads(text) for text in self._store.multi_get([f"progress/{r}" for r in range(world_size)])]

    def publish_done(self) -> None:
        """Says that this target rank sends no further message."""
        self._store.set(f"done/{self._rank}", "1")

    def are_done(self, ranks: list[int]) -> bool:
        """Whether each of these target ranks has sent its last message."""
        return self._store.check([f"done/{rank}" for rank in ranks])

    def pause(self) -> None:
        """The interval of a poll on the store."""
        time.sleep(POLL_S)
