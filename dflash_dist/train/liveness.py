"""Whether every rank of the world is alive: who is not is named, and the others end instead of waiting for it.

Each rank writes a beat into the world's store once a second, on a thread of its own. Rank 0, where the store lives,
reads all beats; the others read that of rank 0 and whether anybody has failed. A second thread notices when the store
itself falls silent, and when the process that started the rank is gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import DistError, Store

from dflash_dist.errors import UserError
from dflash_dist.topology import Topology
from dflash_dist.train.processes import OWN, ProcessIdentity

WORLD_FOLDER = "DFLASH_DIST_WORLD_FOLDER"
"""Names, in the environment of ranks that our launcher started, the folder where it looks for places and a verdict."""
VERDICT = "verdict.json"
BEAT_S = 1.0
DEAD_AFTER_S = 20.0
"""A rank without a beat for so long is taken for dead: longer than any pause of a sound process, below the 30 s within
which the others are to end."""
JOIN_WITHIN_S = 600.0
"""Ranks may start so far apart: machines read Python and its packages at very different speeds."""
LEAVE_WITHIN_S = 60.0
NO_PLACE = "none yet"
CLOSE_WITHIN_S = 10.0
"""What a rank that failed may take to close its files."""
TOLD = "told to all ranks"
"""A note on an error that needs no further telling by its rank."""


@dataclass(frozen=True)
class Verdict:
    """Which rank failed, and why."""

    rank: int
    message: str
    """One line: the rank, its role, its last batch and the reason."""
    user_error: bool = False
    """The reason is bad input, not a failure of the run."""
    is_gone: bool = False
    """The rank's process has ended: who started it knows of what."""


def read_verdict(folder: Path) -> Verdict | None:
    """The verdict that a rank left in the launcher's folder, if any."""
    try:
        return Verdict(**json.loads((folder / VERDICT).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def read_place(folder: Path, rank: int) -> str:
    """The last batch of a rank that our launcher started, in words."""
    try:
        return (folder / f"place_{rank}").read_text(encoding="utf-8").strip() or NO_PLACE
    except OSError:
        return NO_PLACE


@dataclass(frozen=True)
class Beat:
    """A rank's sign of life."""

    count: int
    place: str
    places: int
    """How many batches the rank has come to."""
    moved_s: float
    """When it came to the last of them, by its clock."""
    pausing: bool
    process: ProcessIdentity

    @classmethod
    def parse(cls, text: Any) -> Beat:
        """The beat that a store holds as JSON."""
        facts = json.loads(text)
        return cls(**facts | {"process": ProcessIdentity(**facts["process"])})


NO_BEAT = Beat(0, NO_PLACE, 0, 0.0, False, ProcessIdentity("", "", 0, ""))


class Pace:
    """How long the world has stood still, and from how long that is a hang."""

    def __init__(
        self, at_least_s: float = 120.0, at_most_s: float = 1200.0, gaps: float = 20.0, moves_to_know: int = 10
    ) -> None:
        """A hang is a standstill of `gaps` times the longest that the run has got over, within the two bounds.

        The least is more than a network drive may take to answer. Until the run has moved in `moves_to_know` looks at
        it, the most is waited for: its first batches may be slow.
        """
        self._at_least_s, self._at_most_s, self._gaps, self._moves_to_know = at_least_s, at_most_s, gaps, moves_to_know
        self._places, self._moved_s = -1, 0.0
        self._moves, self._longest_gap_s = 0, 0.0

    def still_s(self, beats: Sequence[Beat], now_s: float, awake: bool) -> float:
        """Seconds since any rank came to another batch, as far as none had reason to pause."""
        places = sum(beat.places for beat in beats)
        if places != self._places:
            self._longest_gap_s = max(self._longest_gap_s, now_s - self._moved_s) if self._moves else 0.0
            self._moves += 1
        if places != self._places or not awake or any(beat.pausing for beat in beats):
            self._places, self._moved_s = places, now_s
        return now_s - self._moved_s

    def limit_s(self) -> float:
        """Seconds of standstill that are taken for a hang."""
        if self._moves < self._moves_to_know:
            return self._at_most_s
        return min(self._at_most_s, max(self._at_least_s, self._gaps * self._longest_gap_s))


class Watch:
    """One rank's part in the watch, from `start` to `stop`."""

    def __init__(self, store: Store, rank: int, topology: Topology, parent: int, pace: Pace | None = None) -> None:
        """`store` must be a client of its own: a call that waits would hold up the other users of a shared one.

        `parent`: the process that started this one.
        """
        self._store, self._rank, self._topology = store, rank, topology
        self._pace = pace or Pace()
        self._folder = Path(os.environ[WORLD_FOLDER]) if WORLD_FOLDER in os.environ else None
        self._place, self._places, self._moved_s = NO_PLACE, 0, 0.0
        self._pausing = False
        self._place_file = -1
        if self._folder is not None:
            self._place_file = os.open(self._folder / f"place_{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
        self._parent = parent
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self._answered_s = time.monotonic()
        self._lead = NO_BEAT

    def start(self, orphaned: Callable[[], None]) -> None:
        """Begins the watch. `orphaned` is called, on a thread, once the process that started this one is gone."""
        self._beat(0)
        for target, arguments in ((self._beat_loop, ()), (self._guard_loop, (orphaned,))):
            self._threads.append(threading.Thread(target=target, args=arguments, name="watch", daemon=True))
            self._threads[-1].start()

    def stop(self) -> None:
        """Ends the watch by this rank once every rank is done; no store of the world is used after this.

        Rank 0 leaves last, since the store lives there.
        """
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        if self._rank:
            self._store.set(f"left/{self._rank}", "")
            return
        with contextlib.suppress(RuntimeError):  # who has not left by then never will
            others = [f"left/{rank}" for rank in range(1, self._topology.world_size)]
            self._store.wait(others, datetime.timedelta(seconds=LEAVE_WITHIN_S))

    def at(self, place: str) -> None:
        """Notes the batch that this rank has come to."""
        self._place, self._places, self._moved_s = place, self._places + 1, time.time()
        if self._place_file >= 0:
            with contextlib.suppress(OSError):  # a full disk is told of by what needs it
                os.pwrite(self._place_file, place.ljust(60).encode(), 0)

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """A block that may take minutes, such as waiting for a disk; no standstill during it is taken for a hang."""
        self._pausing = True
        try:
            yield
        finally:
            self._pausing = False

    def failed(self, error: Exception) -> None:
        """Tells the others of this rank's error; where another rank is the cause, waits for the verdict and ends.

        What the rank does after it, closing files for one, may take `CLOSE_WITHIN_S`.
        """
        if TOLD in getattr(error, "__notes__", ()):
            return
        if _is_of_a_lost_peer(error):
            self._stopped.wait(DEAD_AFTER_S + 3 * BEAT_S)  # the watch ends the process before
        reason = " ".join(str(error).splitlines()) or type(error).__name__
        verdict = Verdict(self._rank, reason, user_error=True)
        if not isinstance(error, UserError):
            verdict = Verdict(self._rank, f"{self._named(self._rank)} failed at {self._place}: {reason}")
        self._claim(verdict)
        self._stopped.set()
        error.add_note(TOLD)
        if self._rank == 0:
            time.sleep(2 * BEAT_S)  # the store lives in this process: the others are to read it first
        end = threading.Timer(CLOSE_WITHIN_S, os._exit, [2 if verdict.user_error else 1])
        end.daemon = True  # an error at any line may leave a lock behind that what closes then waits for
        end.start()

    def _beat_loop(self) -> None:
        heard: dict[int, _Heard] = {}
        began_s = time.monotonic()
        beats = 0
        while not self._stopped.wait(BEAT_S):
            beats += 1
            try:
                self._beat(beats)
                if self._store.check(["failed"]):
                    self._end(Verdict(**json.loads(self._store.get("failed"))))
                if self._rank == 0:
                    self._judge(heard, began_s)
                elif self._store.check(["beat/0"]):
                    self._lead = Beat.parse(self._store.get("beat/0"))
            except RuntimeError:  # DistError, and what the store's sockets raise
                if self._stopped.is_set():
                    return
                self._end_without_store("is gone: its store does not answer any more", is_gone=True)
            self._answered_s = time.monotonic()

    def _beat(self, count: int) -> None:
        beat = Beat(count, self._place, self._places, self._moved_s, self._pausing, OWN)
        self._store.set(f"beat/{self._rank}", json.dumps(dataclasses.asdict(beat)))

    def _judge(self, heard: dict[int, _Heard], began_s: float) -> None:
        """Rank 0: looks at every beat, and ends the world where one rank is dead or all stand still."""
        now_s = time.monotonic()
        keys = [f"beat/{rank}" for rank in range(self._topology.world_size)]
        if not heard and not self._store.check(keys):
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            if now_s - began_s > JOIN_WITHIN_S and missing:
                self._sentence(missing[0], f"has not joined within {JOIN_WITHIN_S:.0f} s of rank 0", [NO_BEAT])
            return
        awake = now_s - self._answered_s < DEAD_AFTER_S / 4  # else it was this process that slept
        silent = []
        for rank, text in enumerate(self._store.multi_get(keys)):
            beat = Beat.parse(text)
            last = heard.setdefault(rank, _Heard(beat, now_s))
            last.update(beat, now_s, awake)
            is_gone = beat.process.has_ended_here()
            if (is_gone or now_s - last.beat_s > DEAD_AFTER_S) and not self._store.check([f"left/{rank}"]):
                if is_gone:
                    self._sentence(rank, f"is gone: its process {beat.process} has ended", [beat], is_gone=True)
                silent.append((rank, beat))
        if silent:
            rank, beat = silent[0]
            why = f"gives no sign of life since {DEAD_AFTER_S:.0f} s: process {beat.process} hangs"
            self._sentence(rank, why, [beat for _, beat in silent])
        beats = [last.beat for last in heard.values()]
        still_s = self._pace.still_s(beats, now_s, awake)
        if still_s > self._pace.limit_s() and all(beat.places for beat in beats):
            rank = min(heard, key=lambda rank: heard[rank].beat.moved_s)
            why = f"was the first to stand still, and no rank has come to another batch for {still_s:.0f} s"
            self._sentence(rank, why, [heard[rank].beat])

    def _guard_loop(self, orphaned: Callable[[], None]) -> None:
        is_orphan = False
        checked_s = time.monotonic()
        while not self._stopped.wait(BEAT_S):
            now_s = time.monotonic()
            if now_s - checked_s > DEAD_AFTER_S / 4:
                self._answered_s = now_s  # this process slept, whatever the store did
            checked_s = now_s
            if self._rank and now_s - self._answered_s > DEAD_AFTER_S:
                self._end_without_store(f"gives no sign of life since {DEAD_AFTER_S:.0f} s: its store does not answer")
            if not is_orphan and os.getppid() != self._parent:
                is_orphan = True
                orphaned()
                if not self._places:
                    os._exit(1)  # nothing to save, and minutes until a loop would hear of it

    def _sentence(self, rank: int, why: str, beats: list[Beat], is_gone: bool = False) -> NoReturn:
        """Ends the world for a rank that cannot speak for itself; `beats`: the last ones of it and of its like."""
        message = f"{self._named(rank)} {why}; its last batch: {self._last_place(rank, beats[0])}"
        self._end(Verdict(rank, message, is_gone=is_gone), beats)

    def _last_place(self, rank: int, beat: Beat) -> str:
        """The last batch of a rank: up to date where it runs on this machine, else up to a beat old."""
        return beat.place if self._folder is None else read_place(self._folder, rank)

    def _end_without_store(self, why: str, is_gone: bool = False) -> NoReturn:
        """Rank 0, which holds the store, is lost: every rank finds that for itself."""
        message = f"{self._named(0)} {why}; its last batch: {self._last_place(0, self._lead)}"
        verdict = Verdict(0, message, is_gone=is_gone)
        speaks = int(os.environ.get("LOCAL_RANK", "0")) == (1 if self._rank < self._topology.ranks_per_node else 0)
        self._announce(verdict, speaks)
        self._lead.process.kill_here()
        os._exit(1)

    def _end(self, verdict: Verdict, beats: Sequence[Beat] = ()) -> NoReturn:
        """Ends this process without its main thread, which may wait for ever for the rank that failed."""
        self._claim(verdict)
        for beat in beats:
            beat.process.kill_here()  # an agent would send it SIGTERM, which a stopped process does not hear, and wait
        if self._rank == 0:
            time.sleep(2 * BEAT_S)  # the store lives in this process: the others are to read it first
        os._exit(2 if verdict.user_error else 1)

    def _claim(self, verdict: Verdict) -> None:
        """Makes the verdict known, unless another was first."""
        try:
            if self._store.add("claims", 1) == 1:
                self._store.set("failed", json.dumps(dataclasses.asdict(verdict)))
                self._announce(verdict, speaks=True)
        except RuntimeError:
            self._announce(verdict, speaks=True)

    def _announce(self, verdict: Verdict, speaks: bool) -> None:
        """Tells the launcher, or where that is not ours, the user."""
        if self._folder is not None:
            with contextlib.suppress(OSError):  # a full disk; what the ranks end with still tells the launcher much
                aside = self._folder / f".{VERDICT}.{self._rank}"
                aside.write_text(json.dumps(dataclasses.asdict(verdict)), encoding="utf-8")
                try:
                    os.link(aside, self._folder / VERDICT)  # fails where there is one: the others follow from the first
                except FileExistsError:
                    pass
                except OSError:  # a file system without links; of two that come at once either may be the one
                    if not (self._folder / VERDICT).exists():
                        aside.replace(self._folder / VERDICT)
        elif speaks:
            print(f"error: {verdict.message}", file=sys.stderr, flush=True)

    def _named(self, rank: int) -> str:
        return f"rank {rank} ({self._topology.role(rank)})"


class _Heard:
    """A rank's last beat, and when it came."""

    def __init__(self, beat: Beat, beat_s: float) -> None:
        self.beat, self.beat_s = beat, beat_s

    def update(self, beat: Beat, now_s: float, awake: bool) -> None:
        if beat.count != self.beat.count or not awake:
            self.beat_s = now_s
        self.beat = beat


def _is_of_a_lost_peer(error: Exception) -> bool:
    """Whether the error is what a rank sees when another one is gone."""
    if isinstance(error, DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in ("gloo", "connection", "peer", "nccl"))
