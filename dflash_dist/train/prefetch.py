"""Loading on a thread ahead of use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import TypeVar

from dflash_profiling.record import span

Item = TypeVar("Item")
Loaded = TypeVar("Loaded")


def prefetch(items: Iterable[Item], load: Callable[[Item], Loaded], depth: int) -> Iterator[tuple[Item, Loaded]]:
    """(item, load(item)) for each item in order, with `depth` loads running ahead on one thread.

    Whatever error strikes the caller comes out at once: the two threads share no lock that it could leave held, and
    none waits for the other's end.
    """
    wanted: SimpleQueue[tuple[Item] | None] = SimpleQueue()
    loaded: SimpleQueue[tuple[Item, Loaded] | BaseException] = SimpleQueue()

    def work() -> None:
        while (want := wanted.get()) is not None:
            try:
                loaded.put((want[0], load(want[0])))
            except BaseException as error:
                loaded.put(error)

    def take() -> tuple[Item, Loaded]:
        with span("load"):
            result = loaded.get()
        if isinstance(result, BaseException):
            raise result
        return result

    threading.Thread(target=work, name="prefetch", daemon=True).start()
    ahead = 0
    try:
        for item in items:
            wanted.put((item,))
            ahead += 1
            if ahead > depth:
                ahead -= 1
                yield take()
        for _ in range(ahead):
            yield take()
    finally:
        wanted.put(None)
