"""Which of a process's threads hold the GIL, by py-spy, where it is installed and may look.

Its samples cost too much to take them all the time, so they are taken for some seconds of each minute. Measured with
20 samples a second for 10 s: 30 ms of one core, most of it py-spy's start, which is a two-thousandth of a minute.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

PERIOD_S = 60.0
SAMPLED_S = 10
SAMPLES_PER_S = 20
_PR_SET_PTRACER = 0x59616D61
_LINE = re.compile(r"thread \([^)]*\)(?:: (?P<name>[^;]*))?;.* (?P<count>\d+)")


class GilSampler:
    """`read` gives {"gil_share": {thread's name: its share of the samples}} when samples have come in, else nothing.

    The shares add up to less than 1 where nobody held the GIL. Where there are none, {"gil_unknown": why} once. It
    waits for nothing: py-spy is a process of its own, which does not pause this one.
    """

    def __init__(self) -> None:
        self.cpu_s = 0.0
        """Processor time of the samplers that have ended."""
        self._command: list[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._due_s = 0.0
        self._given_up = False

    def read(self) -> dict[str, Any]:
        """What has come in since the last call."""
        if self._given_up:
            return {}
        try:
            return self._read()
        except OSError as error:
            return self._give_up(f"py-spy cannot be run: {error}")

    def close(self) -> None:
        """Ends the sampler, should one run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _read(self) -> dict[str, Any]:
        if self._process is not None:
            return self._harvest(self._process)
        if time.monotonic() < self._due_s:
            return {}
        program = _program()
        if program is None:
            return self._give_up("py-spy is not installed")
        self._start(program)
        return {}

    def _start(self, program: str) -> None:
        self._due_s = time.monotonic() + PERIOD_S
        self._samples, self._errors = tempfile.NamedTemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        _permit_children()
        options = ["--gil", "--threads", "--function", "--nonblocking", "--format", "raw"]
        sampling = ["--duration", str(SAMPLED_S), "--rate", str(SAMPLES_PER_S)]
        self._process = subprocess.Popen(
            [program, "record", "--pid", str(os.getpid()), *options, *sampling, "--output", self._samples.name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            start_new_session=True,  # a Ctrl-C would end it early, with too few samples and no word of that
        )

    def _harvest(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        """The shares, if the sampler has ended."""
        ended, status, usage = os.wait4(process.pid, os.WNOHANG)
        if not ended:
            return {}
        self._process, process.returncode = None, os.waitstatus_to_exitcode(status)
        self.cpu_s += usage.ru_utime + usage.ru_stime
        with self._samples, self._errors:
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").split("\n")[0]
            text = Path(self._samples.name).read_text(encoding="utf-8", errors="replace")
        if process.returncode:
            return self._give_up(f"py-spy ended with {process.returncode}: {said}")
        return {"gil_share": shares(text)}

    def _give_up(self, why: str) -> dict[str, Any]:
        self._given_up = True
        return {"gil_unknown": why}


def shares(raw: str) -> dict[str, float]:
    """Of each thread by name, from py-spy's raw form: a line a stack, with how many samples met it holding the GIL."""
    counts: Counter[str] = Counter()
    for match in map(_LINE.fullmatch, raw.splitlines()):
        if match:
            counts[match["name"] or "unnamed"] += int(match["count"])
    return {name: round(count / (SAMPLED_S * SAMPLES_PER_S), 3) for name, count in counts.most_common()}


def _program() -> str | None:
    """py-spy of this environment, be it on the PATH or not."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _permit_children() -> None:
    """Lets programs that this process starts look into it, where the kernel's Yama lets only parents look."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getpid()), 0, 0, 0)
