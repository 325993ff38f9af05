"""The watch over two real processes that have nothing else to do; whole worlds are struck in tests/ranks."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

from dflash_dist.train.liveness import NO_BEAT, WORLD_FOLDER, Beat, Pace, read_place, read_verdict
from dflash_dist.train.processes import ProcessIdentity, started_ticks_of

RANK = """
import os, sys
import torch.distributed as dist
from dflash_dist.topology import parse_topology
from dflash_dist.train.liveness import Pace, Watch

rank, port, still_s, places = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]
store = dist.TCPStore("localhost", port, is_master=rank == 0, wait_for_workers=False)
if rank == 0:
    print(store.port, flush=True)
watch = Watch(store, rank, parse_topology("1-1"), os.getppid(), Pace(still_s, 1000, gaps=1, moves_to_know=2))
watch.start(orphaned=lambda: None)
for place in places:
    watch.at(place)
while (line := sys.stdin.readline()).startswith("step"):
    watch.at(line.strip())
if line == "fail\\n":
    watch.failed(ValueError("a thing\\nof two lines"))
    sys.exit(1)
if line == "stay\\n":
    sys.stdin.readline()
watch.stop()
"""


class Ranks:
    """Two processes that watch each other; a line on stdin lets one go on."""

    def __init__(self, folder: Path, still_s: float, *places: list[str]) -> None:
        self._environment = os.environ | {WORLD_FOLDER: str(folder)}
        self.processes: list[subprocess.Popen[str]] = []
        self._port = 0
        for rank, some in enumerate(places):
            self._start(rank, str(self._port), still_s, some)
            if rank == 0:
                assert self.processes[0].stdout is not None
                self._port = int(self.processes[0].stdout.readline())
        self._store = dist.TCPStore("localhost", self._port, wait_for_workers=False)
        for rank in range(len(places)):
            self._store.get(f"beat/{rank}")  # waits for the first

    def _start(self, rank: int, port: str, still_s: float, places: list[str]) -> None:
        command = [sys.executable, "-c", RANK, str(rank), port, str(still_s), *places]
        pipe = subprocess.PIPE
        self.processes.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=self._environment))

    def tell(self, rank: int, line: str) -> None:
        stdin = self.processes[rank].stdin
        assert stdin is not None
        stdin.write(line)
        stdin.flush()

    def wait_for_beats(self, more: int) -> None:
        """Until rank 0 has looked at the others so many times again."""
        first = last = self._beats()
        while last < first + more:
            last = self._beats()

    def _beats(self) -> int:
        return int(json.loads(self._store.get("beat/0"))["count"])

    def end(self) -> list[int]:
        codes = [process.wait(timeout=60) for process in self.processes]
        for process in self.processes:
            process.communicate()
        return codes


def test_ranks_that_are_done_leave_in_peace(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 100, ["step 1, batch 0"], ["step 2, batch 1", "step 10, batch 0"])
    for rank in (1, 0):
        ranks.tell(rank, "leave\n")
    assert ranks.end() == [0, 0]
    assert read_verdict(tmp_path) is None
    assert [read_place(tmp_path, rank) for rank in range(3)] == ["step 1, batch 0", "step 10, batch 0", "none yet"]


def test_a_rank_that_is_done_and_gone_is_not_taken_for_dead(tmp_path: Path) -> None:
    """The others may be long in tearing down their groups."""
    ranks = Ranks(tmp_path, 100, ["step 1, batch 0"], ["step 1, batch 0"])
    ranks.tell(0, "stay\n")
    ranks.tell(1, "leave\n")
    assert ranks.processes[1].wait(timeout=60) == 0
    ranks.wait_for_beats(3)
    ranks.tell(0, "leave\n")
    assert ranks.end() == [0, 0]
    assert read_verdict(tmp_path) is None


def test_processes_are_told_apart() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    own = ProcessIdentity.of_this()
    identity = dataclasses.replace(own, pid=child.pid, started_ticks=started_ticks_of(child.pid))
    assert identity.is_here() and not identity.has_ended_here()
    assert dataclasses.replace(identity, started_ticks="1").has_ended_here(), "its number was given to another process"
    elsewhere = dataclasses.replace(identity, machine="another kernel, or another container of this host")
    elsewhere.kill_here()
    dataclasses.replace(identity, started_ticks="1").kill_here()
    own.kill_here()
    assert child.poll() is None and not elsewhere.has_ended_here()
    identity.kill_here()
    assert child.wait(timeout=60) == -9 and identity.has_ended_here() and not elsewhere.has_ended_here()


def test_an_error_of_one_ends_the_others_and_is_told_once(tmp_path: Path) -> None:
    for failing in (0, 1):
        folder = tmp_path / str(failing)
        folder.mkdir()
        ranks = Ranks(folder, 100, ["step 1, batch 0"], ["step 2, batch 1"])
        ranks.tell(failing, "fail\n")
        assert ranks.end() == [1, 1]
        verdict = read_verdict(folder)
        assert verdict is not None and verdict.rank == failing
        role, place = (("target", "step 1, batch 0"), ("drafter", "step 2, batch 1"))[failing]
        assert verdict.message == f"rank {failing} ({role}) failed at {place}: a thing of two lines"


def test_a_world_that_stands_still_is_ended(tmp_path: Path) -> None:
    """Both ranks beat, but neither comes to another batch: the one that stopped first is named."""
    ranks = Ranks(tmp_path, 1, ["step 2, batch 1"], ["step 1, batch 0"])
    ranks.wait_for_beats(2)
    ranks.tell(0, "step 2, batch 2\n")
    assert all(ranks.end())
    verdict = read_verdict(tmp_path)
    assert verdict is not None
    start = "rank 1 (drafter) was the first to stand still, and no rank has come to another batch for "
    assert verdict.message.startswith(start) and verdict.message.endswith(" s; its last batch: step 1, batch 0")


def test_a_standstill_is_a_hang_by_the_pace_of_the_run() -> None:
    def beats(places: int, pausing: bool = False) -> list[Beat]:
        return [dataclasses.replace(NO_BEAT, places=places, pausing=pausing), NO_BEAT]

    pace, now_s = Pace(), 1000.0
    for places in range(10):
        assert pace.limit_s() == 1200, "its first batches may be slow"
        assert pace.still_s(beats(places), now_s, awake=True) == 0
        now_s += 2
    assert pace.limit_s() == 120
    assert pace.still_s(beats(9), now_s + 58, awake=True) == 60
    assert pace.still_s(beats(9, pausing=True), now_s + 500, awake=True) == 0
    assert pace.still_s(beats(9), now_s + 510, awake=True) == 10
    assert pace.still_s(beats(9), now_s + 900, awake=False) == 0, "it was we who slept"
    assert pace.still_s(beats(10), now_s + 910, awake=True) == 0
    assert pace.limit_s() == 200, "20 times the longest standstill so far"
    pace.still_s(beats(11), now_s + 1010, awake=True)
    assert pace.limit_s() == 1200
