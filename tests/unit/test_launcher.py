"""Signals to the launcher, in this process: with a rank, they are passed on; without one, the block ends."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest
from tensorboard.summary.writer.event_file_writer import _AsyncWriter
from tensorboard.summary.writer.record_writer import RecordWriter

from dflash_dist.config import load_config
from dflash_dist.errors import UserError
from dflash_dist.topology import parse_topology
from dflash_dist.train import launch
from dflash_dist.train.rendezvous import join_world
from dflash_dist.train.world import STOP_SIGNAL, Stopper

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1]
RANK = f"import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [{STOP_SIGNAL}]); print(flush=True);" + (
    f"signal.sigwait([{STOP_SIGNAL}])"
)


@pytest.mark.parametrize("number", SIGNALS)
def test_without_a_rank_the_block_ends(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    after = False
    with Stopper() as stopper:
        os.kill(os.getpid(), number)
        after = True
    assert stopper.received == number and not after
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("stderr", ["open", "closed"])
def test_ranks_are_told_whoever_reads_stderr(
    number: signal.Signals, stderr: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    if stderr == "closed":
        os.close(reader)
    monkeypatch.setattr(sys, "stderr", os.fdopen(writer, "w", buffering=1))
    with subprocess.Popen([sys.executable, "-c", RANK, "dflash_dist"], stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        broken = False
        with Stopper() as stopper:
            try:
                os.kill(os.getpid(), number)
            except BrokenPipeError:  # the command line's own stderr outlasts its reader; this one does not
                broken = True
        assert rank.wait(20) == 0
    assert stopper.received == number and broken == (stderr == "closed")


def test_nohup_is_honoured() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stopper() as stopper:
            os.kill(os.getpid(), signal.SIGHUP)
        assert stopper.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGHUP, 0)])
@pytest.mark.parametrize("phase", ["prepare", "eval"])
def test_a_signal_in_the_launchers_own_phases_ends_it(
    number: signal.Signals, code: int, phase: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config("configs/smollm2.yaml", [f"runs_dir={tmp_path}", f"cache_dir={tmp_path / 'cache'}"])

    def interrupt(*_: object) -> None:
        os.kill(os.getpid(), number)

    lock = mock.MagicMock()
    if phase == "prepare":
        lock.__enter__.side_effect = interrupt
    with (
        mock.patch.object(launch, "begin_run", lambda *_: lock),
        mock.patch.object(launch, "_trained", lambda *_: True),
        mock.patch.object(launch, "finish_run", interrupt),
    ):
        assert launch.train(config, parse_topology("x1"), "cpu", "run", ["train"]) == code
    assert "stopped (no checkpoint yet); go on with: " in capsys.readouterr().err
    assert lock.__exit__.called == (phase == "eval")


def test_a_world_of_another_size_is_refused_with_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"topology 2-1@2 has 6 ranks, but 1 were started; .*--nproc-per-node 3 "):
        join_world(parse_topology("2-1@2"))


@pytest.mark.parametrize("module", ["tensorboard", "another"])
def test_of_tensorboards_thread_only_its_user_tells(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(threading, "excepthook", launch._thread_failed)
    if module == "tensorboard":
        writer = _AsyncWriter(RecordWriter(open("/dev/full", "wb", buffering=0)))  # noqa: SIM115
        writer.write(b"")
        writer._worker.join()
        with pytest.raises(OSError, match="No space left on device"):
            writer.write(b"")
    else:
        thread = threading.Thread(target=lambda: os.write(-1, b""))
        thread.start()
        thread.join()
    assert ("Traceback" in capsys.readouterr().err) == (module == "another")
