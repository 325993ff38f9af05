"""Hidden states on their way from target ranks to drafter ranks: the only file that calls isend and irecv.

A channel is a directed pair of ranks with its own process group and a ring of preallocated slots on each side.
Sizes come from the schedule, so nothing but hidden states crosses the wire, and both ends post in the same order.
On NCCL every wait is a wait of the current stream, never of the host. On gloo a wait blocks, but only where the data
or the slot is needed at once.

Shape suffixes: M most tokens of a message, W values of a row, which holds a token as `wire.WireFormat` says.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from dflash_dist.topology import Topology


class WaitClock:
    """Adds up how long a rank's work stood still: host time on the CPU, stream time from CUDA events."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = 0.0
        self.seconds_of_peer: dict[int, float] = {}
        """The same by the rank that was waited for, as far as it was read; any thread may copy it."""
        self._events: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._read = 0

    @contextlib.contextmanager
    def waiting_for(self, peer: int) -> Iterator[None]:
        """For a wait for that rank."""
        if self._cuda:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._events.append((peer, start, end))
        else:
            start_s = time.perf_counter()
            yield
            self._add(peer, time.perf_counter() - start_s)

    def mark(self) -> float:
        """Stands for the waits that are queued by now; what `seconds_at` takes."""
        return float(self._read + len(self._events)) if self._cuda else self._seconds

    def seconds_at(self, mark: float) -> float:
        """Seconds of all waits before `mark`, once the device is known to have passed it; marks in order."""
        if not self._cuda:
            return mark
        while self._read < mark:
            self._add_oldest()
        return self._seconds

    def seconds(self) -> float:
        """Seconds of all waits that are over; reading waits for nothing."""
        while self._events and self._events[0][2].query():
            self._add_oldest()
        return self._seconds

    def _add_oldest(self) -> None:
        peer, start, end = self._events.popleft()
        self._add(peer, start.elapsed_time(end) / 1000)
        self._read += 1

    def _add(self, peer: int, seconds: float) -> None:
        self._seconds += seconds
        self.seconds_of_peer[peer] = self.seconds_of_peer.get(peer, 0.0) + seconds


class SendChannel:
    """The target's end: fill a slot, send it, go on."""

    def __init__(self, peer: int, group: dist.ProcessGroup, slots_MW: list[Tensor], clock: WaitClock) -> None:
        self.peer, self._group, self._slots_MW, self._clock = peer, group, slots_MW, clock
        self._in_flight: deque[dist.Work] = deque()
        self.sent = 0
        """Messages sent so far."""

    def acquire(self) -> Tensor:
        """The next slot [M, W], once the message that it held last has gone out."""
        if len(self._in_flight) == len(self._slots_MW):
            with self._clock.waiting_for(self.peer):
                self._in_flight.popleft().wait()
        return self._slots_MW[self.sent % len(self._slots_MW)]

    def send(self, tokens: int) -> None:
        """Starts sending the first `tokens` rows of the slot that `acquire` gave."""
        slot_MW = self._slots_MW[self.sent % len(self._slots_MW)]
        self._in_flight.append(_start(dist.isend, slot_MW[:tokens], self.peer, self._group))
        self.sent += 1

    def finish(self) -> None:
        """Waits until every message has gone out."""
        while self._in_flight:
            self._in_flight.popleft().wait()


class ReceiveChannel:
    """The drafter's end: receives are posted ahead, one for each slot."""

    def __init__(
        self,
        peer: int,
        group: dist.ProcessGroup,
        slots_MW: list[Tensor],
        clock: WaitClock,
        sizes: Iterator[int],
    ) -> None:
        self.peer, self._group, self._slots_MW, self._clock = peer, group, slots_MW, clock
        self._sizes = sizes
        """Tokens of each message to come, in order."""
        self._posted: deque[dist.Work] = deque()
        self._posts = 0
        self.received = 0
        """Messages received so far."""
        for _ in slots_MW:
            self._post()

    def receive(self) -> Tensor:
        """The slot [M, W] with the next message in its first rows, valid until `release`."""
        with self._clock.waiting_for(self.peer):
            self._posted.popleft().wait()
        slot_MW = self._slots_MW[self.received % len(self._slots_MW)]
        self.received += 1
        return slot_MW

    def depth(self, sent: float) -> int:
        """Messages that have arrived but are not taken, of `sent` by the target's count.

        gloo's receives cannot be asked, so there it is the messages on their way too.
        """
        if self._slots_MW[0].is_cuda:
            return sum(work.is_completed() for work in self._posted)
        return max(0, int(sent) - self.received)

    def release(self) -> None:
        """Gives the oldest received slot back: the next receive is posted into it.

        On CUDA the receive starts after all work that is queued on the current stream, so that the slot may still be
        read by it.
        """
        self._post()

    def finish(self) -> None:
        """Takes what was posted ahead and posts no more; the sender fills these messages after a stop."""
        while self._posted:
            self._posted.popleft().wait()

    def _post(self) -> None:
        tokens = next(self._sizes, None)
        if tokens is None:
            return
        slot_MW = self._slots_MW[self._posts % len(self._slots_MW)]
        self._posted.append(_start(dist.irecv, slot_MW[:tokens], self.peer, self._group))
        self._posts += 1


_gloo_thread = ThreadPoolExecutor(1, thread_name_prefix="gloo-start")


def _start(
    operation: Callable[..., dist.Work | None], tensor: Tensor, peer: int, group: dist.ProcessGroup
) -> dist.Work:
    """isend or irecv, under way.

    On gloo it is started from a thread that no profiler watches: torch would write the end of an operation that
    outlives the profiler's window into memory that is freed by then (seen with torch 2.13 as heap corruption).
    """
    if tensor.is_cuda:
        work = operation(tensor, peer, group=group)
    else:
        work = _gloo_thread.submit(operation, tensor, peer, group=group).result()
    assert work is not None
    return work


def ring(slots: int, max_tokens: int, row_size: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """`slots` zeroed buffers [M, W]. Zeroed, since rows past a message are read under a mask and must be finite."""
    return [torch.zeros(max_tokens, row_size, dtype=dtype, device=device) for _ in range(slots)]


MAX_CTAS = 4
"""Thread blocks that a message may occupy on a GPU: a receive that waits holds them, so they are few."""


def open_pair_groups(
    topology: Topology, rank: int, device: torch.device, timeout: timedelta | None = None, max_ctas: int = MAX_CTAS
) -> dict[tuple[int, int], dist.ProcessGroup]:
    """This rank's process group of each (target rank, drafter rank), connected and ready.

    Every rank makes all groups in the same order, and the first messages go out in that order too: connections are set
    up by the first message, and two ends that set up different ones first would wait for each other for ever.
    `timeout`: how long a message may be on its way; not given, torch's default.
    """
    groups = {pair: _pair_group(pair, device, timeout, max_ctas) for pair in topology.pairs()}
    token = torch.zeros(1, device=device)
    mine = {pair: group for pair, group in groups.items() if rank in pair}
    for (sender, receiver), group in mine.items():
        work = dist.isend(token, receiver, group=group) if rank == sender else dist.irecv(token, sender, group=group)
        assert work is not None
        work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize()  # sync: start-up only
    return mine


def _pair_group(
    pair: tuple[int, int], device: torch.device, timeout: timedelta | None, max_ctas: int
) -> dist.ProcessGroup:
    if device.type == "cpu":
        group = dist.new_group(list(pair), timeout, backend="gloo")
    else:
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = max_ctas
        group = dist.new_group(list(pair), timeout, backend="nccl", pg_options=options)
    assert group is not None
    return group
