"""Sends, receives and collectives of a trace, from what NCCL's and gloo's events say of themselves."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dflash_profiling.slices import Category, Slices

_ELEMENT_BYTES = {
    **dict.fromkeys(["byte", "char", "bool", "unsigned char", "signed char"], 1),
    **dict.fromkeys(["half", "bfloat16", "short", "short int", "uint16"], 2),
    **dict.fromkeys(["float", "int", "uint32", "complexhalf"], 4),
    **dict.fromkeys(["double", "long", "long int", "uint64", "complexfloat"], 8),
    "complexdouble": 16,
}
_MAX_ELEMENTS = 2**58
_GLOO = {"c10d::send": "gloo:send", "c10d::recv_": "gloo:recv"}
"""Annotation of each of gloo's calls."""
_NAMES = {"c10d::send": "send", "c10d::recv_": "recv"}
_LABELLED = re.compile(r"message of (?P<label>.+) (?P<way>to|from) rank (?P<peer>\d{1,9})")


@dataclass(frozen=True)
class Communication:
    """One communication of a rank. Of NCCL's, a trace of the GPU holds two: the call that queues it, and its kernel."""

    slice: int
    """Index into the trace's slices."""
    start_ns: int
    end_ns: int
    name: str
    """NCCL's own: "send", "recv", "allreduce", "_allgather_base" and the like."""
    group: str
    """The process group's name; empty where the trace does not say."""
    ranks: tuple[int, ...]
    """The group's ranks; empty where the trace does not say."""
    source: int | None
    destination: int | None
    """Ranks of the world, of a send or a receive."""
    sequence: int | None
    """NCCL's count in this group. A rank counts its messages to and from all peers of the group together."""
    bytes: int | None
    """The larger of input and output."""
    kind: Literal["kernel", "call", "gloo", "span"]
    """What the extent is of: of a "call" it is only the queueing of a kernel, of a "span" what the program named so."""
    label: str = ""
    """What the program called the message, of a "span"; alike at both ends."""

    @property
    def direction(self) -> str | None:
        """Which end of a message this is, "send" or "receive"; None for a collective, and for a batch of messages."""
        return {"send": "send", "recv": "receive"}.get(self.name)

    @property
    def is_collective(self) -> bool:
        """Whether it is one of all ranks of its group; a batch of sends and receives ("coalesced") is not."""
        return self.direction is None and "coalesced" not in self.name.lower()


def is_labelled(name: str) -> bool:
    """Whether a span of this name is one end of a message, as "message of step 5, batch 2 to rank 3" is."""
    return _LABELLED.fullmatch(name) is not None


def find_communication(
    slices: Slices, names: list[str], args: list[dict[str, Any]], rank: int | None
) -> list[Communication]:
    """All communication of a rank's trace, ordered by start; `args` are those of the slices."""
    rows = _Rows(slices, names, args)
    gloo = _gloo(rows, rank)
    found = _nccl(rows, rank) + gloo + _labelled(rows, rank, gloo)
    return sorted(found, key=lambda communication: (communication.start_ns, communication.slice))


@dataclass(frozen=True)
class _Rows:
    slices: Slices
    names: list[str]
    args: list[dict[str, Any]]

    def called(self, condition: Callable[[str], bool]) -> list[int]:
        names = [index for index, name in enumerate(self.names) if condition(name)]
        return np.flatnonzero(np.isin(self.slices.name, names)).tolist()

    def name(self, index: int) -> str:
        return self.names[self.slices.name[index]]

    def thread(self, index: int) -> tuple[int, int]:
        return int(self.slices.process[index]), int(self.slices.thread[index])

    def start_ns(self, index: int) -> int:
        return int(self.slices.start_ns[index])

    def end_ns(self, index: int) -> int:
        return int(self.slices.end_ns[index])


def _nccl(rows: _Rows, rank: int | None) -> list[Communication]:
    """Calls and kernels; what a kernel does not say itself, the call that its `External id` names does."""
    kernel, external_id = rows.slices.category == Category.KERNEL, rows.slices.external_id
    candidates = rows.called(lambda name: name == "record_param_comms" or "nccl" in name.lower())
    calls = [index for index in candidates if not kernel[index] and "Collective name" in rows.args[index]]
    call_args = {int(external_id[index]): rows.args[index] for index in calls}
    call_args.pop(-1, None)
    found = [_of_args(rows, index, rows.args[index], rank, "call") for index in calls]
    for index in (index for index in candidates if kernel[index]):
        args = {**call_args.get(int(external_id[index]), {}), **rows.args[index]}
        if "Collective name" in args:
            found.append(_of_args(rows, index, args, rank, "kernel"))
    return found


def _of_args(
    rows: _Rows, index: int, args: dict[str, Any], rank: int | None, kind: Literal["kernel", "call"]
) -> Communication:
    name = str(args["Collective name"])
    group_ranks = args.get("Process Group Ranks")
    ranks: tuple[int, ...] = ()
    if isinstance(group_ranks, str) and "..." not in group_ranks:  # torch shortens long lists
        ranks = tuple(int(number) for number in re.findall(r"\b\d{1,9}\b", group_ranks))
    peer = _whole(args.get("Dst Rank" if name == "send" else "Src Rank"))
    if peer is None:  # before torch wrote those, `Rank` of a message was the peer's place in the group
        place = _whole(args.get("Rank"))
        peer = ranks[place] if place is not None and place < len(ranks) else None
    elements = [_whole(args.get(key)) or 0 for key in ("In msg nelems", "Out msg nelems")]
    return Communication(
        slice=index,
        start_ns=rows.start_ns(index),
        end_ns=rows.end_ns(index),
        name=name,
        group=str(args.get("Process Group Name", "")),
        ranks=ranks,
        source={"send": rank, "recv": peer}.get(name),
        destination={"send": peer, "recv": rank}.get(name),
        sequence=_whole(args.get("Seq")),
        bytes=_bytes(max(elements), args.get("dtype")),
        kind=kind,
    )


def _gloo(rows: _Rows, rank: int | None) -> list[Communication]:
    """A message is the call, which knows the peer, and the annotation that begins in it, which lasts until the wait.

    The call writes what it sends, so a send is the slice of the call; a receive is that of its annotation. The peer is
    its place in the group, and the group is not named: it is taken for the whole world.
    """
    annotations: dict[tuple[str, tuple[int, int]], list[int]] = {}
    for index in rows.called(lambda name: name in _GLOO.values()):
        annotations.setdefault((rows.name(index), rows.thread(index)), []).append(index)
    found = []
    for call in rows.called(lambda name: name in _GLOO):
        inputs = rows.args[call].get("Concrete Inputs")
        peer = _whole(inputs[2]) if isinstance(inputs, list) and len(inputs) > 2 else None
        candidates = annotations.get((_GLOO[rows.name(call)], rows.thread(call)), [])
        first = bisect_left(candidates, call)  # rows are in order of start
        inside = first < len(candidates) and rows.start_ns(candidates[first]) <= rows.end_ns(call)
        annotation = candidates[first] if inside else call
        name = _NAMES[rows.name(call)]
        if peer == rank:  # no rank sends to itself: this is a place in a smaller group
            peer = None
        found.append(
            Communication(
                slice=call if name == "send" else annotation,
                start_ns=rows.start_ns(call),
                end_ns=max(rows.end_ns(call), rows.end_ns(annotation)),
                name=name,
                group="",
                ranks=(),
                source=rank if name == "send" else peer,
                destination=peer if name == "send" else rank,
                sequence=None,
                bytes=_tensor_bytes(rows.args[annotation]),
                kind="gloo",
            )
        )
    return found


def _labelled(rows: _Rows, rank: int | None, gloo: list[Communication]) -> list[Communication]:
    """The spans in which the program says which message it sends or waits for; of a send with the size of gloo's."""
    found = []
    for index in rows.called(is_labelled):
        match = _LABELLED.fullmatch(rows.name(index))
        if match is None or rows.slices.category[index] != Category.USER_ANNOTATION:
            continue
        sends, peer = match["way"] == "to", int(match["peer"])
        start_ns, end_ns = rows.start_ns(index), rows.end_ns(index)
        # gloo's peer is a place in a group that is not named, so the time alone tells which send it is
        inside = [end.bytes for end in gloo if sends and end.name == "send" and start_ns <= end.start_ns <= end_ns]
        found.append(
            Communication(
                slice=index,
                start_ns=start_ns,
                end_ns=end_ns,
                name="send" if sends else "recv",
                group="",
                ranks=(),
                source=rank if sends else peer,
                destination=peer if sends else rank,
                sequence=None,
                bytes=inside[0] if len(inside) == 1 else None,
                kind="span",
                label=match["label"],
            )
        )
    return found


def _whole(value: Any) -> int | None:
    """A count or rank, written as a number or as its digits."""
    if type(value) is str and re.fullmatch(r"[0-9]{1,18}", value):
        value = int(value)
    return value if type(value) is int and 0 <= value < 2**62 else None


def _bytes(elements: int, dtype: Any) -> int | None:
    name = str(dtype).removeprefix("c10::").lower()
    size = 1 if name.startswith("float8") else _ELEMENT_BYTES.get(name)
    return elements * size if size and 0 < elements < _MAX_ELEMENTS else None


def _tensor_bytes(args: dict[str, Any]) -> int | None:
    """Of the first input, as `record_shapes` has it."""
    shapes, dtypes = args.get("Input Dims"), args.get("Input type")
    if not (isinstance(shapes, list) and isinstance(dtypes, list) and shapes and dtypes):
        return None
    shape = [_whole(size) for size in shapes[0]] if isinstance(shapes[0], list) else []
    if not shape or len(shape) > 16 or None in shape:
        return None
    return _bytes(math.prod(size for size in shape if size is not None), dtypes[0])
