import sys
import threading
from types import FrameType
from typing import Any

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


def test_an_error_at_any_line_comes_out_at_once() -> None:
    """Even while the loading thread is stuck."""
    number, outcome = 0, ""
    while outcome != "all taken":
        number += 1
        outcome = struck_at(number)
        assert outcome in ("struck", "all taken"), number
    assert number > 20


class Struck(Exception):
    pass


def struck_at(number: int) -> str:
    """What comes of taking items with an error at the given line, or return, of the caller's thread."""
    seen, outcome = 0, []
    free, done = threading.Event(), threading.Event()

    def load(item: int) -> int:
        if item == 3:
            free.wait()
        return item

    def strike(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal seen
        seen += event in ("line", "return")
        if seen == number:
            raise Struck
        if frame.f_code.co_name == "take":
            free.set()  # nothing came before the caller had to wait
        return strike

    def use() -> None:
        pairs = prefetch(range(5), load, depth=2)
        next(pairs)  # so far the thread was started, which is not looked at
        sys.settrace(strike)
        try:
            for _ in pairs:
                pass
            outcome.append("all taken")
        except Struck:
            outcome.append("struck")
        finally:
            sys.settrace(None)
            done.set()

    threading.Thread(target=use, daemon=True).start()
    done.wait(20)
    free.set()
    return outcome[0] if outcome else "stuck"
