"""Traces of ranks that never ran, as kineto would write them, with what is true of them.

Times are ns of the true clock since `BASE_NS`; a rank writes them by its own clock, which shows `skew_ns` more.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BASE_NS = 1_790_857_026_000_000_000
"""As in traces of torch 2.13: unix time of a multiple of three months."""


@dataclass
class SyntheticRank:
    """The trace of one rank, in the making."""

    rank: int
    world_size: int = 1
    role: str | None = None
    skew_ns: int = 0
    host: str | None = None
    base_ns: int | None = BASE_NS
    metadata: dict[str, Any] = field(default_factory=dict)
    events: list[Any] = field(default_factory=list)
    _last_id: int = 0

    @property
    def process(self) -> int:
        return 1000 + self.rank

    def slice(
        self, category: str, name: str, start_ns: int, end_ns: int, process: Any, thread: Any, **args: Any
    ) -> dict[str, Any]:
        """Any complete event."""
        event = {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": process,
            "tid": thread,
            "ts": (start_ns + self.skew_ns) / 1000,
            "dur": (end_ns - start_ns) / 1000,
            "args": args,
        }
        self.events.append(event)
        return event

    def span(self, name: str, start_ns: int, end_ns: int, thread: int | None = None) -> None:
        self.slice("user_annotation", name, start_ns, end_ns, self.process, thread or self.process)

    def op(self, name: str, start_ns: int, end_ns: int, thread: int | None = None, **args: Any) -> int:
        """An operation on the host; its external id comes back."""
        self._last_id += 1
        args = {"External id": self._last_id, **args}
        self.slice("cpu_op", name, start_ns, end_ns, self.process, thread or self.process, **args)
        return self._last_id

    def runtime(self, name: str, start_ns: int, end_ns: int, thread: int | None = None, **args: Any) -> int:
        """A call of the CUDA runtime; its correlation comes back."""
        self._last_id += 1
        args = {"correlation": self._last_id, **args}
        self.slice("cuda_runtime", name, start_ns, end_ns, self.process, thread or self.process, **args)
        return self._last_id

    def kernel(
        self,
        name: str,
        start_ns: int,
        end_ns: int,
        stream: int = 7,
        launch_ns: int | None = None,
        category: str = "kernel",
        **args: Any,
    ) -> int:
        """Work on the GPU and the call that launched it, 5 us before it unless told; its correlation comes back."""
        launch_ns = start_ns - 5_000 if launch_ns is None else launch_ns
        call = "cudaLaunchKernel" if category == "kernel" else "cudaMemcpyAsync"
        correlation = self.runtime(call, launch_ns, launch_ns + 3_000)
        place = {"device": self.rank, "context": 1, "stream": stream, "correlation": correlation}
        self.slice(category, name, start_ns, end_ns, self.rank, stream, **place, **args)
        for phase, when_ns, process, thread in (
            ("s", launch_ns, self.process, self.process),
            ("f", start_ns, self.rank, stream),
        ):
            flow = {"ph": phase, "id": correlation, "cat": "ac2g", "name": "ac2g", "pid": process, "tid": thread}
            self.events.append({**flow, "ts": (when_ns + self.skew_ns) / 1000, **({"bp": "e"} if phase == "f" else {})})
        return correlation

    def message(
        self,
        direction: str,
        peer: int,
        start_ns: int,
        end_ns: int,
        bytes: int = 2**20,
        sequence: int | None = None,
        group: str = "1",
        stream: int = 20,
        launch_ns: int | None = None,
    ) -> None:
        """One end of a message by NCCL, "send" or "recv": the call and its kernel."""
        peer_key = "Dst Rank" if direction == "send" else "Src Rank"
        args: dict[str, Any] = {
            "Collective name": direction,
            "dtype": "BFloat16",
            "In msg nelems": bytes // 2,
            "Out msg nelems": bytes // 2,
            "Group size": 2,
            "Process Group Name": group,
            "Process Group Ranks": str(sorted((self.rank, peer))),
            peer_key: peer,
        }
        if sequence is not None:
            args["Seq"] = sequence
        launch_ns = start_ns - 5_000 if launch_ns is None else launch_ns
        external_id = self.op("record_param_comms", launch_ns - 10_000, launch_ns + 10_000, **args)
        name = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
        self.kernel(name, start_ns, end_ns, stream, launch_ns, **{"External id": external_id}, **args)

    def gloo(self, direction: str, peer: int, start_ns: int, end_ns: int, bytes: int = 2**20, thread: int = 77) -> None:
        """One end of a message by gloo, "send" or "recv": the call, and the annotation that lasts until the wait."""
        call, annotation = {"send": ("c10d::send", "gloo:send"), "recv": ("c10d::recv_", "gloo:recv")}[direction]
        self.op(call, start_ns - 1_000, start_ns + 2_000, thread, **{"Concrete Inputs": ["", "", str(peer), "0"]})
        shape = {"Input Dims": [[bytes // 4]], "Input type": ["float"]}
        self.slice("user_annotation", annotation, start_ns, end_ns, self.process, thread, **shape)

    def document(self) -> dict[str, Any]:
        """What the file holds."""
        return {
            "schemaVersion": 1,
            "deviceProperties": [{"id": self.rank, "name": "NVIDIA H200"}],
            "distributedInfo": {"backend": "nccl", "rank": self.rank, "world_size": self.world_size},
            **({} if self.role is None else {"role": self.role}),
            **({} if self.host is None else {"host_name": self.host}),
            **self.metadata,
            "displayTimeUnit": "ms",
            **({} if self.base_ns is None else {"baseTimeNanoseconds": self.base_ns}),
            "traceEvents": self.events,
        }

    def write(self, folder: Path, stamp: int = 1) -> Path:
        """The file, named as `TraceWindow` names it."""
        path = folder / f"rank{self.rank}.{stamp}.pt.trace.json.gz"
        with gzip.open(path, "wt", compresslevel=1) as file:
            json.dump(self.document(), file)
        return path


@dataclass(frozen=True)
class TrueMessage:
    source: int
    destination: int
    waiting_ns: int
    """The receive had begun, the send had not."""
    transfer_ns: int
    """Both had begun, or the receive was the later."""


def messages_world(
    pairs: Iterable[tuple[int, int]],
    skews_ns: dict[int, int],
    seed: int = 0,
    count: int = 40,
    answers: bool = True,
    numbered: bool = True,
    bytes: int = 2**24,
) -> tuple[list[SyntheticRank], list[TrueMessage]]:
    """Ranks that send each other `count` messages for each pair, now the one late and now the other.

    Both kernels end with the transfer, as NCCL's do, up to jitter. With `answers` a small message goes back after each.
    """
    draw = random.Random(seed)
    ranks = {rank: SyntheticRank(rank, len(skews_ns), skew_ns=skew) for rank, skew in skews_ns.items()}
    truth = []
    for place, (source, destination) in enumerate(pairs):
        now_ns = 10_000_000 + draw.randrange(5_000_000)
        for number in range(1, count + 1):
            ways = [(source, destination, bytes)] + ([(destination, source, 4096)] if answers else [])
            for way, (sender, receiver, size) in enumerate(ways):
                send_ns = now_ns + draw.randrange(8_000_000)
                receive_ns = now_ns + draw.randrange(8_000_000)
                transfer_ns = 20_000 + size // 100 + draw.randrange(20_000)
                end_ns = max(send_ns, receive_ns) + transfer_ns
                options = {"bytes": size, "sequence": 2 * number + way if numbered else None, "group": f"{place}"}
                stream = 20 + 2 * place + way
                ranks[sender].message(
                    "send", receiver, send_ns, end_ns - draw.randrange(3_000), stream=stream, **options
                )
                ranks[receiver].message("recv", sender, receive_ns, end_ns, stream=stream, **options)
                waiting_ns = max(0, send_ns - receive_ns)
                truth.append(TrueMessage(sender, receiver, waiting_ns, end_ns - receive_ns - waiting_ns))
                now_ns = end_ns + draw.randrange(1_000_000)
    for rank in ranks.values():
        draw.shuffle(rank.events)  # kineto sorts nothing
    return list(ranks.values()), truth
