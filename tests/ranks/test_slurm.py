"""launchers/slurm.sbatch on a real Slurm: a controller and two node daemons on this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from dflash_dist.topology import parse_topology
from tests.ranks.cli import ENVIRONMENT, WORLD_TIMEOUT_S, metrics, weights
from tests.ranks.conftest import Maker

DAEMONS = ["munged", "slurmctld", "slurmd"]
SBIN = f"{os.environ['PATH']}:/usr/sbin:/sbin"
missing = [name for name in DAEMONS if shutil.which(name, path=SBIN) is None]
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not found; see make test-slurm"),
    pytest.mark.skipif(os.geteuid() != 0, reason="Slurm's node daemon starts jobs as root only"),
]
SETTINGS = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldPort={ports[0]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmdParameters=config_overrides
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8
NodeName={host}2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8
PartitionName=all Nodes=ALL Default=YES State=UP
"""

BUSY = ("PENDING", "RUNNING", "COMPLETING", None)  # None: the controller was too busy itself to answer


def wait_until(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WORLD_TIMEOUT_S
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


class Cluster:
    """Two nodes, both on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        paths = {"PATH": f"{Path(sys.executable).parent}:{SBIN}", "SLURM_CONF": str(folder / "slurm.conf")}
        self.environment = ENVIRONMENT | paths | {"OMP_NUM_THREADS": "1"}
        self.daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Returns when both nodes are ready for jobs."""
        host = socket.gethostname().partition(".")[0]
        with contextlib.ExitStack() as held:
            servers = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
            ports = [server.getsockname()[1] for server in servers]
        configuration = self.folder / "slurm.conf"
        configuration.write_text(SETTINGS.format(host=host, folder=self.folder, ports=ports))
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o600)
        munge = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
        self._daemon("munged", "--foreground", *(f"--{k}={self.folder}/munge.{v}" for k, v in munge.items()))
        wait_until((self.folder / "munge.socket").exists, "munged does not come up")
        self._daemon("slurmctld", "-D", "-f", str(configuration))
        for node in (host, f"{host}2"):
            self._daemon("slurmd", "-D", "-N", node, "-f", str(configuration))
        wait_until(lambda: self("sinfo", "--noheader", "--states=idle", "--format=%D") == "2", "the nodes stay down")

    def _daemon(self, *command: str) -> None:
        with (self.folder / f"{len(self.daemons)}_{command[0]}.log").open("wb") as log:
            self.daemons.append(subprocess.Popen(command, stdout=log, stderr=log, env=self.environment))

    def stop(self) -> None:
        """Ends what still runs."""
        with contextlib.suppress(AssertionError):
            self("scancel", "--user=root")
            wait_until(lambda: self("squeue", "--noheader") == "", "jobs do not end")
        for daemon in reversed(self.daemons):
            daemon.terminate()
            daemon.wait(timeout=60)

    def __call__(self, *command: str) -> str:
        """What a client command prints."""
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment, timeout=60, check=False)
        return done.stdout.strip()

    def submit(self, config: Path, topo: str, run: str, *overrides: str) -> str:
        """The number of a new job."""
        topology = parse_topology(topo)
        log = config.parent / f"{run}.log"
        options = [f"--nodes={topology.nodes}", f"--ntasks-per-node={topology.ranks_per_node}", f"--output={log}"]
        arguments = [topo, str(config), "--run", run, "--device", "cpu", *overrides]
        number = self("sbatch", "--parsable", *options, "launchers/slurm.sbatch", *arguments)
        assert number.isdigit(), (self.folder / "1_slurmctld.log").read_text()
        return number

    def facts(self, job: str) -> dict[str, str]:
        """What the controller knows of a job."""
        words = self("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def rank(self, job: str, rank: int) -> psutil.Process:
        """The process of a rank."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # one that has just ended has no environment
                environment = process.environ()
                if (environment.get("SLURM_JOB_ID"), environment.get("RANK")) == (job, str(rank)):
                    return process
        raise AssertionError(f"job {job} has no rank {rank}")

    def wait_for_step(self, job: str, config: Path, run: str, step: int) -> None:
        """Until the metrics tell that `step` is done."""
        rows = config.parent / "runs" / run / "metrics.jsonl"

        def done() -> bool:
            assert self.facts(job).get("JobState") in BUSY, (config.parent / f"{run}.log").read_text()
            return rows.exists() and len(rows.read_text().splitlines()) >= step

        wait_until(done, f"step {step} does not come")

    def end(self, job: str) -> tuple[str, str]:
        """The job's last state, and its exit code with the signal that ended it."""
        wait_until(lambda: self.facts(job).get("JobState") not in BUSY, f"job {job} does not end")
        return self.facts(job)["JobState"], self.facts(job)["ExitCode"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Not below pytest's own folder, which is closed to other users: munged takes no such place for its socket.
    with tempfile.TemporaryDirectory(prefix="slurm_") as folder:
        Path(folder).chmod(0o755)
        cluster = Cluster(Path(folder))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


def test_a_job_trains_to_the_end(cluster: Cluster, make: Maker) -> None:
    config = make("qwen3")
    job = cluster.submit(config, "1-1", "run")
    assert cluster.end(job) == ("COMPLETED", "0:0"), (config.parent / "run.log").read_text()
    assert (config.parent / "runs/run/summary.json").exists()
    assert (config.parent / "run.log").read_text().startswith("srun --kill-on-bad-exit=1 ")


def test_a_signalled_job_checkpoints_and_the_next_one_goes_on(cluster: Cluster, make: Maker) -> None:
    """As before a time limit; and then on one node what was begun on two."""
    config = make("qwen3")
    long = ["train.epochs=200", "train.max_steps=400", "train.checkpoint_every=1000"]
    first = cluster.submit(config, "1-1@2", "run", *long)
    cluster.wait_for_step(first, config, "run", 3)
    cluster("scancel", "--signal=USR1", first)
    assert cluster.end(first) == ("COMPLETED", "0:0"), (config.parent / "run.log").read_text()
    done = len(metrics(config, "run"))
    assert 3 <= done < 400 and weights(config, "run", done)
    second = cluster.submit(config, "1-1", "run", *long)
    assert cluster.end(second) == ("COMPLETED", "0:0"), (config.parent / "run.log").read_text()
    assert [row["step"] for row in metrics(config, "run")] == list(range(1, 401))
    assert (config.parent / "runs/run/summary.json").exists()


def test_a_world_that_lost_a_rank_is_started_again(
    cluster: Cluster, make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make("qwen3")
    monkeypatch.setitem(cluster.environment, "MAX_RESTARTS", "1")
    steps = ["train.epochs=100", "train.max_steps=200", "train.checkpoint_every=5"]
    job = cluster.submit(config, "1-1", "run", *steps)
    cluster.wait_for_step(job, config, "run", 12)
    cluster.rank(job, 1).kill()
    log = config.parent / "run.log"
    assert cluster.end(job) == ("COMPLETED", "0:0"), log.read_text()
    assert "error: rank 1 (drafter) is gone" in log.read_text()
    assert [row["step"] for row in metrics(config, "run")] == list(range(1, 201))
