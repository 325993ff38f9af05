"""Faults as they come to a run in the field, each done to real processes and real files at a given moment."""

from __future__ import annotations

import random
import re
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.ranks.cli import Running

INJECTOR = """
import ctypes, os, threading, time

class InjectedFault(Exception):
    pass

def hang_at_the_next_batch():
    from dflash_dist.train.liveness import Watch
    Watch.at = lambda *_: time.sleep(1e6)

def hang_at_the_end():
    from dflash_dist.train.metrics import MetricsWriter
    MetricsWriter.close = lambda *_: time.sleep(1e6)

def wait_for_trigger(folder, rank, main):
    while not os.path.exists(os.path.join(folder, "raise_" + rank)):
        time.sleep(0.002)
        if os.path.exists(os.path.join(folder, "hang_" + rank)):
            return hang_at_the_next_batch()
    if os.path.getsize(os.path.join(folder, "raise_" + rank)):
        hang_at_the_end()
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(InjectedFault))

if "RANK" in os.environ and "FAULT_FOLDER" in os.environ:
    arguments = (os.environ["FAULT_FOLDER"], os.environ["RANK"], threading.get_ident())
    threading.Thread(target=wait_for_trigger, args=arguments, daemon=True).start()
"""
"""A `sitecustomize` that raises an exception in a rank's main thread, wherever that is, or makes its work hang, once a
file appears."""


def kill(world: Running, rank: int, config: Path) -> str:
    """`kill -9`."""
    world.ranks()[rank].kill()
    return f"error: rank {rank} ({{role}}) was killed by SIGKILL; its last batch: step "


def kill_and_truncate(world: Running, rank: int, config: Path) -> str:
    """`kill -9`; whoever calls this then damages the newest checkpoint."""
    return kill(world, rank, config)


def stop(world: Running, rank: int, config: Path) -> str:
    """SIGSTOP: the process is there, but does nothing any more."""
    world.ranks()[rank].send_signal(signal.SIGSTOP)
    return f"error: rank {rank} ({{role}}) gives no sign of life since 20 s"


def throw(world: Running, rank: int, config: Path) -> str:
    """An exception at whatever line the rank's main thread is."""
    (config.parent / f"raise_{rank}").touch()
    return f"error: rank {rank} ({{role}}) failed at step "


def throw_and_hang(world: Running, rank: int, config: Path) -> str:
    """The same, and the rank then waits for ever while it closes its files."""
    aside = config.parent / f"aside_{rank}"
    aside.write_text("and hang at the end")
    aside.rename(config.parent / f"raise_{rank}")
    return f"error: rank {rank} ({{role}}) failed at step "


def hang(world: Running, rank: int, config: Path) -> str:
    """The rank's work hangs, but its process lives on."""
    (config.parent / f"hang_{rank}").touch()
    return f"error: rank {rank} ({{role}}) was the first to stand still, and no rank has come to another batch for "


def fill_disk(world: Running, rank: int, config: Path) -> str:
    """From now on no file of the rank can grow past a few KiB."""
    psutil.Process(world.ranks()[rank].pid).rlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
    return "cannot be written"


def corrupt_store(world: Running, rank: int, config: Path) -> str:
    """The tokens of most documents change under the run."""
    (tokens,) = config.parent.glob("cache/stores/*/tokens.bin")
    content = tokens.read_bytes()
    backup = tokens.with_name("tokens.sound")
    if not backup.exists():
        backup.write_bytes(content)
    with tokens.open("r+b") as file:
        file.seek(len(content) // 8)
        file.write(bytes(byte ^ 0x55 for byte in content[len(content) // 8 :]))
    return "tokens.bin is not what was written"


def restore_store(config: Path) -> None:
    """Undoes `corrupt_store`."""
    for backup in config.parent.glob("cache/stores/*/tokens.sound"):
        backup.replace(backup.with_name("tokens.bin"))


def truncate_newest_checkpoint(config: Path, run: str, rng: random.Random) -> str:
    """Cuts a file of the newest checkpoint at any place; returns the checkpoint's name."""
    newest = max((config.parent / "runs" / run / "checkpoints").glob("step_*"))
    victim = rng.choice(sorted(path for path in newest.iterdir() if path.is_file()))
    with victim.open("r+b") as file:
        file.truncate(rng.randrange(victim.stat().st_size))
    return newest.name


Fault = Callable[[Running, int, Path], str]
BAD_INPUT: tuple[Fault, ...] = (fill_disk, corrupt_store)
"""What the user is to mend: the run ends with 2; of all else with 1."""


def strike(world: Running, fault: Fault, rank: int, role: str, config: Path, within_s: float = 30) -> str:
    """Does the fault to a running world and holds it to what must follow; returns its stderr."""
    processes = world.ranks()
    began_s = time.monotonic()
    expected = fault(world, rank, config).format(role=role)
    if fault in (kill, kill_and_truncate, stop):
        del processes[rank]
    _, alive = psutil.wait_procs(list(processes.values()), timeout=within_s + (fault is fill_disk) * 30)
    assert not alive, f"{fault.__name__}: still running after {within_s} s: {alive}"
    code, stderr = world.end()
    if fault is not fill_disk:  # it strikes at the next checkpoint
        assert time.monotonic() - began_s < within_s + 15
    first_error = next((line for line in stderr.splitlines() if line.startswith("error: ")), stderr[-500:])
    assert expected in first_error and code == (2 if fault in BAD_INPUT else 1), (code, first_error)
    if fault not in BAD_INPUT:
        assert re.search(r"step \d+, (validation )?batch \d+", first_error), first_error
    assert "Traceback" not in stderr
    return stderr
