"""Telling processes apart: by machine, number and start, so that none is taken for a later one of the same number."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True)
class ProcessIdentity:
    """Which process of which machine, so that none is taken for another with the same number."""

    host: str
    machine: str
    """Of this start of the kernel, and this set of process numbers: a container has its own."""
    pid: int
    started_ticks: str

    @classmethod
    def of_this(cls) -> ProcessIdentity:
        """Of the calling process; without a machine where there is no /proc to tell of others."""
        pid, machine = os.getpid(), ""
        if PROC.is_dir():
            boot = (PROC / "sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
            machine = f"{boot} {os.readlink(PROC / 'self/ns/pid')}"
        return cls(socket.gethostname(), machine, pid, started_ticks_of(pid))

    def is_here(self) -> bool:
        """Whether it is a process of this machine, of which we can tell."""
        return bool(self.machine) and self.machine == OWN.machine

    def has_ended_here(self) -> bool:
        """Whether it was a process of this machine that is no more."""
        return self.is_here() and started_ticks_of(self.pid) != self.started_ticks

    def kill_here(self) -> None:
        """Ends the process at once, if it runs on this machine and is another one."""
        if self.is_here() and self.pid != OWN.pid and not self.has_ended_here():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def __str__(self) -> str:
        return f"{self.pid} on {self.host}"


def started_ticks_of(pid: int) -> str:
    """When the kernel started a process, by a clock that nobody sets; empty for one that has ended."""
    try:
        # The name stands in parentheses and may hold any character. See proc(5).
        fields = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    state, started_ticks = fields[0], fields[19]
    return "" if state in "ZX" else started_ticks


OWN = ProcessIdentity.of_this()
