"""Running the real command line in this process, for what starts no rank: without the seconds of another's imports."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from unittest import mock

import pytest


def run_here(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `dflash-dist ARGUMENTS`."""
    from dflash_dist.cli import main

    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["dflash-dist", *arguments]),
        mock.patch.dict(os.environ),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out.getvalue(), err.getvalue()
