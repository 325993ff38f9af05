"""A network within one process, in which ranks run in a random but repeatable order.

Each rank is a thread, and one runs at a time: at every point where it touches the network or the control store, the
rank that goes on is drawn anew, as is the moment at which a message moves. Weights make some ranks and links far slower
than others. Where nobody can go on, the world is stuck, and it is said who waits for what.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


class Stuck(Exception):
    """No rank can go on, and not all are done: who waits for what."""


class Violation(Exception):
    """A message or a slot is not what the protocol promises."""


class _Abandoned(BaseException):
    """Ends a rank of a world that has failed; nothing catches it by accident."""


class Rank:
    """One rank's thread and what it waits for."""

    def __init__(self, name: str, weight: float) -> None:
        self.name, self.weight = name, weight
        self.waits_for = ""
        self.polled_at = -1
        self.turn = threading.Lock()
        self.turn.acquire()


class Baton:
    """Lets one rank at a time run."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.current: Rank
        self.movable: dict[Link, None] = {}
        """Links on which a message can move now."""
        self._runnable: list[Rank] = []
        self._waiting: list[Rank] = []
        self._pollers: list[Rank] = []
        self._changes = 0
        self._threads: list[threading.Thread] = []
        self._failure: BaseException | None = None
        self._over = threading.Lock()

    def add(self, name: str, weight: float, play: Callable[[], None]) -> None:
        """A rank that runs `play`."""
        rank = Rank(name, weight)
        self._runnable.append(rank)
        self._threads.append(threading.Thread(target=self._play, args=(rank, play), name=name, daemon=True))

    def run(self) -> None:
        """Runs all ranks to their ends; raises what the first of them raised, or Stuck."""
        ranks = list(self._runnable)
        self._over.acquire()
        for thread in self._threads:
            thread.start()
        self._pass_to(self._draw())
        self._over.acquire()
        for rank in ranks:
            if self._failure and rank.turn.locked():
                rank.turn.release()
        for thread in self._threads:
            thread.join()
        if self._failure:
            raise self._failure

    def pause(self) -> None:
        """Others may go on here."""
        me, following = self.current, self._draw()
        if following is not me:
            self._pass_to(following)
            me.turn.acquire()
        if self._failure:
            raise _Abandoned

    def wait(self, what: str) -> None:
        """The current rank goes on after `wake`."""
        me = self.current
        me.waits_for = what
        self._runnable.remove(me)
        self._waiting.append(me)
        self.pause()

    def wake(self, rank: Rank) -> None:
        """Ends the rank's wait."""
        self._waiting.remove(rank)
        self._runnable.append(rank)

    def poll(self) -> None:
        """The current rank goes on once the control store has changed since it polled last."""
        me = self.current
        if me.polled_at == self._changes:
            self._pollers.append(me)
            self.wait("a change in the control store")
        else:
            self.pause()
        me.polled_at = self._changes

    def changed(self) -> None:
        """The control store has changed."""
        self._changes += 1
        while self._pollers:
            self.wake(self._pollers.pop())

    def _draw(self) -> Rank:
        """The rank that goes on; messages that are drawn before it move."""
        while True:
            choices: list[Rank | Link] = [*self._runnable, *self.movable]
            if not choices:
                raise Stuck("; ".join(f"{rank.name} waits for {rank.waits_for}" for rank in self._waiting))
            (chosen,) = self.random.choices(choices, [choice.weight for choice in choices])
            if isinstance(chosen, Rank):
                return chosen
            chosen.move()

    def _pass_to(self, rank: Rank) -> None:
        self.current = rank
        rank.turn.release()

    def _play(self, rank: Rank, play: Callable[[], None]) -> None:
        rank.turn.acquire()
        if self._failure:
            return
        try:
            play()
            self._runnable.remove(rank)
            if self._runnable or self._waiting:
                self._pass_to(self._draw())
                return
        except _Abandoned:
            return
        except BaseException as error:
            self._failure = error
        self._over.release()


class Operation:
    """An isend or irecv under way: as much of `dist.Work` as the channel uses."""

    def __init__(self, baton: Baton, tensor: Tensor, what: str) -> None:
        self.tensor = tensor
        self._baton, self._what = baton, what
        self._done = False
        self._waiter: Rank | None = None

    def wait(self) -> None:
        """Returns when it is complete."""
        self._baton.pause()
        if not self._done:
            self._waiter = self._baton.current
            self._baton.wait(self._what)

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._done

    def complete(self) -> None:
        """Ends the wait for it."""
        self._done = True
        if self._waiter:
            self._baton.wake(self._waiter)


class Link:
    """The channel's process group of one pair: messages move one by one, in the order of both ends.

    A message moves when its send and its receive are posted; an `eager` link takes messages out of their slots before
    they are received. What a slot holds is read when the message leaves it, and a posted receive's slot holds NaN.
    """

    def __init__(self, baton: Baton, name: str, weight: float, slots: int, eager: bool) -> None:
        self.name, self.weight = name, weight
        self._baton, self._slots, self._eager = baton, slots, eager
        self._sends: deque[Operation] = deque()
        self._on_the_way: deque[Tensor] = deque()
        self._receives: deque[Operation] = deque()
        self._started = {dist.isend: 0, dist.irecv: 0}

    def start(self, operation: Callable[..., dist.Work | None], tensor: Tensor) -> Operation:
        """Takes the place of isend and irecv."""
        self._baton.pause()
        sends = operation is dist.isend
        queue = self._sends if sends else self._receives
        what = f"message {self._started[operation]} {self.name} to {'be taken' if sends else 'arrive'}"
        if len(queue) == self._slots or any(other.tensor.data_ptr() == tensor.data_ptr() for other in queue):
            raise Violation(f"{what}: its slot is still in use by one of {len(queue)} before it")
        self._started[operation] += 1
        if not sends:
            tensor.fill_(torch.nan)
        queue.append(Operation(self._baton, tensor, what))
        self._update()
        return queue[-1]

    def move(self) -> None:
        """Moves one message one stage on."""
        arrives = bool(self._receives and (self._on_the_way or not self._eager))
        if self._eager and self._sends and not (arrives and self._baton.random.random() < 0.5):
            self._on_the_way.append(self._sends[0].tensor.clone())
            self._sends.popleft().complete()
        else:
            receive = self._receives.popleft()
            sent = self._on_the_way.popleft() if self._eager else self._sends[0].tensor
            if sent.shape != receive.tensor.shape:
                raise Violation(f"{self.name}: {len(sent)} rows for a receive of {len(receive.tensor)}")
            receive.tensor.copy_(sent)
            receive.complete()
            if not self._eager:
                self._sends.popleft().complete()
        self._update()

    def check_empty(self) -> None:
        """Violation where a message was sent or awaited for nothing."""
        rest = len(self._sends), len(self._on_the_way), len(self._receives)
        if any(rest):
            raise Violation(f"{self.name}: {rest[0] + rest[1]} messages not received, {rest[2]} receives without one")

    def _update(self) -> None:
        if (self._eager and self._sends) or (self._receives and (self._on_the_way or self._sends)):
            self._baton.movable[self] = None
        else:
            self._baton.movable.pop(self, None)


class Meeting:
    """A collective operation of some ranks: nobody leaves before all have come."""

    def __init__(self, baton: Baton, ranks: int) -> None:
        self._baton, self._ranks = baton, ranks
        self._come: list[Rank] = []

    def meet(self) -> None:
        """Returns when every rank has called this once more."""
        self._baton.pause()
        if len(self._come) < self._ranks - 1:
            self._come.append(self._baton.current)
            self._baton.wait(f"the others at a collective ({len(self._come)} of {self._ranks} are there)")
        else:
            for rank in self._come:
                self._baton.wake(rank)
            self._come.clear()


class ControlStore:
    """A torch store at whose operations others may go on."""

    def __init__(self, baton: Baton) -> None:
        self._baton, self._store = baton, dist.HashStore()

    def set(self, key: str, value: str) -> None:
        """See torch's Store."""
        self._baton.pause()
        self._store.set(key, value)
        self._baton.changed()

    def get(self, key: str) -> bytes:
        """See torch's Store."""
        self._baton.pause()
        return bytes(self._store.get(key))

    def check(self, keys: list[str]) -> bool:
        """See torch's Store."""
        self._baton.pause()
        return bool(self._store.check(keys))
