import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from dflash_dist.train.prefetch import prefetch


def test_items_come_in_order_with_what_was_loaded() -> None:
    assert list(prefetch(range(7), lambda n: n * n, depth=2)) == [(n, n * n) for n in range(7)]
    assert list(prefetch([], str, depth=2)) == []


def test_an_error_of_a_load_comes_with_its_item() -> None:
    pairs = prefetch([1, 0], lambda n: 1 // n, depth=1)
    assert next(pairs) == (1, 1)
    with pytest.raises(ZeroDivisionError):
        next(pairs)


def test_an_error_comes_out_while_the_loading_thread_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error at any line, such as within `Future.result`, may leave a lock behind that the thread waits for."""

    def struck(future: Future[int]) -> None:
        raise InterruptedError

    def take(pairs: Iterator[tuple[int, int]]) -> None:
        with pytest.raises(InterruptedError):
            next(pairs)
        out.set()

    monkeypatch.setattr(Future, "result", struck)
    free, out = threading.Event(), threading.Event()
    pairs = prefetch([1, 2, 3], lambda number: number * free.wait(), depth=1)
    threading.Thread(target=take, args=(pairs,), daemon=True).start()
    try:
        assert out.wait(20)
    finally:
        free.set()
