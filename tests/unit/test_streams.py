"""stderr outlasts its reader, and a stdout that cannot be written is an error of one line: in real processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

LASTING = """
import contextlib, sys
from dflash_dist.streams import LastingStream
with contextlib.redirect_stderr(LastingStream(sys.stderr)):
    sys.stdin.read()
    for _ in range(3):
        print("a line", file=sys.stderr)
    raise SystemExit(7)
"""
FILLING = """
import sys, typer
from dflash_dist import cli
@cli.app.command()
def fill(count: int) -> None:
    for _ in range(count):
        print("a line")
cli.main()
"""


def test_stderr_outlasts_its_reader() -> None:
    child = subprocess.Popen([sys.executable, "-c", LASTING], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdin is not None and child.stderr is not None
    child.stderr.close()
    child.stdin.close()
    assert child.wait(30) == 7


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_streams_that_were_closed_before_lead_nowhere(closed: tuple[int, ...], tmp_path: Path) -> None:
    """Here, and for children: no file that is opened later gets their numbers."""
    code = f"""
import os, subprocess, sys
from dflash_dist.streams import open_closed_streams
open_closed_streams()
file = open({str(tmp_path / "file")!r}, "w")
assert file.fileno() > 2
assert [stream.fileno() for stream in (sys.stdin, sys.stdout, sys.stderr)] == [0, 1, 2]
sys.stdin.read()
print("out", flush=True), print("err", file=sys.stderr, flush=True)
subprocess.run([sys.executable, "-c", "import sys; print(1), print(2, file=sys.stderr)"], check=True)
assert not os.path.getsize(file.name)
"""

    def close() -> None:
        for number in closed:
            os.close(number)

    pipe = subprocess.PIPE
    done = subprocess.run(
        [sys.executable, "-c", code], preexec_fn=close, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == (b"" if 1 in closed else b"out\n1\n") and done.stderr == (b"" if 2 in closed else b"err\n2\n")


def test_a_command_works_without_its_streams() -> None:
    command = [sys.executable, "-c", FILLING, "fill", "3"]
    done = subprocess.run(command, preexec_fn=lambda: os.closerange(0, 3), check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("count", [1, 10_000], ids=["in the buffer", "past the buffer"])
@pytest.mark.parametrize("sink", ["full", "gone"])
def test_a_stdout_that_cannot_be_written_is_one_line(sink: str, count: int, unbuffered: str) -> None:
    if sink == "full" and not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    reader, writer = os.pipe()
    os.close(reader)
    if sink == "full":
        os.close(writer)
        writer = os.open("/dev/full", os.O_WRONLY)
    command = [sys.executable, "-c", FILLING, "fill", str(count)]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    os.close(writer)
    if sink == "full":
        assert done.returncode == 2
        assert done.stderr == "error: stdout cannot be written: No space left on device; send it elsewhere\n"
    else:
        assert (done.returncode, done.stderr) == (1, "")
