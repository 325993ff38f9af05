"""The loop of a target rank: load, forward, send."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from dflash_dist.channel import SendChannel, WaitClock
from dflash_dist.data.schedule import Work
from dflash_dist.data.store import TokenStore
from dflash_dist.target.capture import TargetForward
from dflash_dist.train.context import RankContext
from dflash_dist.train.memory import used_memory_gib
from dflash_dist.train.prefetch import prefetch
from dflash_profiling.record import span


def target_loop(
    context: RankContext, forward: TargetForward, channels: dict[int, SendChannel], clock: WaitClock
) -> None:
    """Runs every batch that the schedule gives to this target and sends its states to the batch's drafter."""
    store, device, control = context.store, context.device, context.control
    mine = context.target_number
    works = (w for w in context.schedule.work(context.start_step) if w.target == mine and not w.is_filler)
    throttle = Throttle(device, depth=2)
    started_s = time.perf_counter()
    for work, (tokens_T, lengths_N) in prefetch(works, lambda work: load_documents(store, work), depth=2):
        stop_step = control.stop_step()
        if stop_step is not None and work.step > stop_step:
            break
        context.watch.at(work.place)
        context.advance_trace(work.step)
        channel = channels[work.drafter]
        with span("wait_slot"):
            slot_MF = channel.acquire()
        with span("forward"):
            forward.capture(tokens_T, lengths_N, slot_MF[: work.tokens])
        with span("send"), span(f"message of {work.place} to rank {channel.peer}"):
            channel.send(work.tokens)
        throttle.mark()
        control.publish(
            **{f"sent/{drafter}": c.sent for drafter, c in channels.items()},
            batches=sum(c.sent for c in channels.values()),
            wait_s=clock.seconds(),
            time_s=time.perf_counter() - started_s,
            memory_gib=used_memory_gib(device),
        )
    context.end_trace()
    control.publish_done()
    for drafter, channel in channels.items():
        fill_posted(context, drafter, channel)
        channel.finish()


def fill_posted(context: RankContext, drafter: int, channel: SendChannel) -> None:
    """After a stop: sends the messages for which the drafter has posted receives ahead, whatever the slots hold.

    A receive that is never met would keep its stream, and so the end of the process group, waiting for ever. After the
    last step there is none.
    """
    sizes = message_sizes(context, context.target_number, drafter)
    for tokens in itertools.islice(sizes, channel.sent, channel.sent + context.config.schedule.ring_slots):
        channel.acquire()
        channel.send(tokens)


def message_sizes(context: RankContext, target: int, drafter: int) -> Iterator[int]:
    """Tokens of each message from one target to one drafter, in the global order."""
    for work in context.schedule.work(context.start_step):
        if (work.target, work.drafter) == (target, drafter) and not work.is_filler:
            yield work.tokens


def load_documents(store: TokenStore, work: Work) -> tuple[Tensor, np.ndarray]:
    """A batch's token ids (int64 [T], on the host) and document lengths (int64 [N])."""
    documents = store.read(work.documents)
    return torch.from_numpy(documents.tokens_T), documents.lengths_N


class Throttle:
    """Keeps the host at most `depth` batches ahead of the GPU, so that the GPU always has work queued."""

    def __init__(self, device: torch.device, depth: int) -> None:
        self._cuda, self._depth = device.type == "cuda", depth
        self._events: deque[torch.cuda.Event] = deque()

    def mark(self) -> None:
        """Called after each batch is queued."""
        if not self._cuda:
            return
        event = torch.cuda.Event()
        event.record()
        self._events.append(event)
        if len(self._events) > self._depth:
            self._events.popleft().synchronize()  # sync: of a batch that is `depth` behind; the GPU stays busy
