"""stdout and stderr whose reader may end first: `| head`, a `tee` that Ctrl-C killed, a terminal that was closed."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

from dflash_dist.errors import UserError


def open_closed_streams() -> None:
    """Lets the standard streams that this process was started without (`2>&-`) lead nowhere, as they do for children.

    Else the next file that is opened would get the stream's number, and what children print.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is the stream's
            os.set_inheritable(nowhere, True)
            setattr(sys, name, os.fdopen(nowhere, mode, encoding="utf-8", closefd=False))


class LastingStream:
    """A stream that goes silent once it cannot be written: a run is not lost with the `tee` that it reports to."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """As of the stream, but never an OSError."""
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """As of the stream, but never an OSError."""
        self._attempt(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            self._silence()
            self._failed(error)

    def _silence(self) -> None:
        """Sends what is still in the stream's buffer, and all that comes, to nowhere."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        with contextlib.suppress(OSError):
            self._stream.flush()

    def _failed(self, error: OSError) -> None:
        """Goes on, silently."""


class DataStream(LastingStream):
    """A stream for data, which are not to be lost unnoticed: UserError, or exit code 1 where the reader has left."""

    def _failed(self, error: OSError) -> None:
        if isinstance(error, BrokenPipeError):
            raise SystemExit(1) from None
        raise UserError(f"stdout cannot be written: {error.strerror}; send it elsewhere") from None
