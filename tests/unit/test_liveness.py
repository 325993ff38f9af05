"""The watch over two real processes that have nothing else to do; whole worlds are struck in tests/ranks."""

import os
import subprocess
import sys
from pathlib import Path

from dflash_dist.train.liveness import WORLD_FOLDER, read_place, read_verdict

RANK = """
import sys, threading
import torch.distributed as dist
from dflash_dist.topology import parse_topology
from dflash_dist.train.liveness import Watch

rank, port, stalled_after_s, places = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]
store = dist.TCPStore("localhost", port, is_master=rank == 0, wait_for_workers=False)
if rank == 0:
    print(store.port, flush=True)
watch = Watch(store, rank, parse_topology("1-1"), stalled_after_s)
watch.start(orphaned=lambda: None)
for place in places:
    watch.at(place)
if sys.stdin.readline() == "fail\\n":
    watch.failed(ValueError("a thing\\nof two lines"))
    sys.exit(1)
watch.stop()
"""


class Ranks:
    """Two processes that watch each other; a line on stdin lets one go on."""

    def __init__(self, folder: Path, stalled_after_s: float, *places: list[str]) -> None:
        self._environment = os.environ | {WORLD_FOLDER: str(folder)}
        self.processes: list[subprocess.Popen[str]] = []
        port = "0"
        for rank, some in enumerate(places):
            self._start(rank, port, stalled_after_s, some)
            if rank == 0:
                assert self.processes[0].stdout is not None
                port = self.processes[0].stdout.readline().strip()

    def _start(self, rank: int, port: str, stalled_after_s: float, places: list[str]) -> None:
        command = [sys.executable, "-c", RANK, str(rank), port, str(stalled_after_s), *places]
        pipe = subprocess.PIPE
        self.processes.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=self._environment))

    def tell(self, rank: int, line: str) -> None:
        stdin = self.processes[rank].stdin
        assert stdin is not None
        stdin.write(line)
        stdin.flush()

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
    """Every rank beats, but none comes to another batch: the one that stopped first is named."""
    ranks = Ranks(tmp_path, 3, ["step 1, batch 0"], ["step 2, batch 1"])
    assert ranks.end() == [1, 1]
    verdict = read_verdict(tmp_path)
    assert verdict is not None
    assert "was the first to stand still, and no rank has moved for 3 s; its last batch: step " in verdict.message
