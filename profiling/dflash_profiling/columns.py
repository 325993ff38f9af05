"""Columns of numbers from values of any type, as they stand in JSON: fast where they are what they should be."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import DTypeLike


def numbers(values: Sequence[Any]) -> np.ndarray:
    """float64; NaN for what is no number."""
    if set(map(type, values)) <= {int, float}:
        with suppress(OverflowError):
            return np.fromiter(values, np.float64, len(values))
    return np.array([_number(value) for value in values], np.float64)


def _number(value: Any) -> float:
    if type(value) is not int and type(value) is not float:
        return np.nan
    try:
        return float(value)
    except OverflowError:
        return np.nan


def nanoseconds(microseconds: np.ndarray) -> np.ndarray:
    """int64; the whole part apart, as float64 does not hold unix time in nanoseconds."""
    whole = np.floor(microseconds)
    return whole.astype(np.int64) * 1000 + np.rint((microseconds - whole) * 1000).astype(np.int64)


def integers(values: Sequence[Any], low: int, high: int, dtype: DTypeLike = np.int64) -> np.ndarray:
    """Whole numbers from `low` to `high`; -1 for any other value."""
    if set(map(type, values)) <= {int}:
        with suppress(OverflowError):
            column = np.fromiter(values, np.int64, len(values))
            column[(column < low) | (column > high)] = -1
            return column.astype(dtype)
    return np.array([value if type(value) is int and low <= value <= high else -1 for value in values], dtype)


class _Translation(dict[Any, int]):
    """Asks `number` for each key once."""

    def __init__(self, number: Callable[[Any], int]) -> None:
        self._number = number

    def __missing__(self, key: Any) -> int:
        self[key] = number = self._number(key)
        return number


def translated(values: Sequence[Any], number: Callable[[Any], int], dtype: DTypeLike = np.int64) -> np.ndarray:
    """`number` of each value, called once for each that differs; lists and objects count as None."""
    number_of = _Translation(number).__getitem__
    try:
        return np.fromiter(map(number_of, values), dtype, len(values))
    except TypeError:
        values = [None if isinstance(value, list | dict) else value for value in values]
        return np.fromiter(map(number_of, values), dtype, len(values))


def identity(value: Any) -> int:
    """A process or thread as a number: itself, or a negative one that depends on nothing but the text."""
    if type(value) is int and abs(value) < 2**62:
        return value
    return -(2**40) - zlib.crc32(str(value).encode("utf-8", "replace"))
