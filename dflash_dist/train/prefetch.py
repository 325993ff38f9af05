"""Loading on a thread ahead of use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Loaded = TypeVar("Loaded")


def prefetch(items: Iterable[Item], load: Callable[[Item], Loaded], depth: int) -> Iterator[tuple[Item, Loaded]]:
    """(item, load(item)) for each item in order, with `depth` loads running ahead on one thread."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        ahead: deque[tuple[Item, Future[Loaded]]] = deque()
        for item in items:
            ahead.append((item, pool.submit(load, item)))
            if len(ahead) > depth:
                item, future = ahead.popleft()
                yield item, future.result()
        for item, future in ahead:
            yield item, future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # an error must come out, whatever the thread waits for
