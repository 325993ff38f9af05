"""A disk that is full, or becomes so, with all of a run on it and TMPDIR too."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.cli import WORLD_TIMEOUT_S
from tests.ranks.conftest import Maker

ON_A_DISK_THAT_FILLS = """
import contextlib, sys
from pathlib import Path
from tests.ranks.cli import Running

runs = Path(sys.argv[1]).parent / "runs"
world = Running(Path(sys.argv[1]), "1-1", "run", *sys.argv[2:], TMPDIR=str(runs))
world.wait_for_step(2)
with contextlib.suppress(OSError), (runs / "filler").open("wb", buffering=0) as filler:
    while True:
        filler.write(bytes(4096))
code, stderr = world.end()
print(*(path.name for path in [*runs.iterdir(), *(runs / "run").iterdir()]))
print(stderr, file=sys.stderr)
sys.exit(code)
"""
ON_A_DISK_WITHOUT_INODES = """
import sys
from pathlib import Path
from dflash_dist.errors import UserError
from dflash_dist.topology import parse_topology
from dflash_dist.train.world import Stopper, launch_world

try:
    launch_world(parse_topology("x1"), [], Path(sys.argv[1]).parent / "runs", Stopper())
except UserError as error:
    sys.exit(f"error: {error}")
"""


def on_small_disk(option: str, program: str, config: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a Python program in a mount namespace of its own, in which the runs lie on a small disk."""
    runs = config.parent / "runs"
    runs.mkdir()
    mounted = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    mounted += [f'mount -t tmpfs -o {option} tmpfs "$0" && exec "$@"', str(runs)]
    if subprocess.run([*mounted, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system lets nobody mount")
    command = [*mounted, sys.executable, "-c", program, str(config), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=WORLD_TIMEOUT_S, check=False)


def test_a_disk_that_fills_ends_the_run_with_one_line(make: Maker) -> None:
    """TMPDIR lies there too, and nothing that ranks have to say can be written any more."""
    arguments = ["--allow-slow", "--max-restarts", "2", "train.checkpoint_every=1000", "train.max_steps=1000"]
    done = on_small_disk("size=1m", ON_A_DISK_THAT_FILLS, make(), *arguments, "train.epochs=1000")
    assert done.returncode == 2, done.stderr
    lines = done.stderr.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("step "))
    (error,) = [line for line in lines[first:] if line and not line.startswith("step ")]
    assert error.startswith("error: ") and "free some space and start again" in error
    assert not [name for name in done.stdout.split() if name.startswith((".world_", "dflash_dist_", "torch"))]


def test_a_disk_that_is_full_before_the_world_starts(make: Maker) -> None:
    done = on_small_disk("nr_inodes=1", ON_A_DISK_WITHOUT_INODES, make())
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert re.match("error: run folder .*/runs cannot be written: No space left .*; free some space", done.stderr)
