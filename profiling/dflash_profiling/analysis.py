"""What one rank's trace says about its time.

Shape suffixes: S slices, K pieces of GPU work, I intervals.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_profiling.clock import Alignment, Message, align, match_p2p
from dflash_profiling.communication import is_labelled
from dflash_profiling.intervals import Intervals, difference, intersection, union
from dflash_profiling.kineto import GPU_WORK, Category, Trace, launch_delays_ns
from dflash_profiling.timeline import PARTS, Split, by_span, family_of, host_bound, in_order, split

STEP = "ProfilerStep#"
_STEP_NUMBER = re.compile(r"ProfilerStep#(\d{1,15})")
_Collective = tuple[str, str, int]
"""Group, name and number in the group."""
SPAN_PARTS = {
    "receive": "p2p_starved", "wait_slot": "p2p_backpressured", "send": "p2p_transfer", "gloo:send": "p2p_transfer",
    "gloo:recv": "p2p_starved", "all_reduce": "collective", "load": "data", "checkpoint": "checkpoint",
}  # fmt: skip
"""What a span of the loop counts as where there are no GPU rows; any other is compute."""
_COLLECTIVE = re.compile(r"(nccl|gloo|mpi|ucc):(?!send|recv)", re.IGNORECASE)
COMMUNICATION_KERNEL = re.compile(r"^(void )?(nccl|rccl|mscclpp|msccl)", re.IGNORECASE)
_MESSAGE_KERNEL = re.compile(r"SendRecv", re.IGNORECASE)
_ALLOCATOR = re.compile(
    r"(cuda|hip)(Malloc|Free|Host|Mem(Create|Map|Unmap|Release|Address|SetAccess))|cuMem(Alloc|Create|Map|Unmap|Release|Address|SetAccess)"
)
_COMPILE = re.compile(
    r"cuModuleLoad|cuLibraryLoad|cuLink|hipModuleLoad|_compile\.compile_inner|compile_fx|async_compile|triton/compiler|triton/runtime/autotuner"
)


@dataclass(frozen=True)
class Kernel:
    """All runs of one kernel."""

    name: str
    family: str
    count: int
    total_ns: int


@dataclass(frozen=True)
class RankAnalysis:
    """One rank's window."""

    rank: int | None
    role: str | None
    window_start_ns: int
    split: Split
    compute_by_span_ns: dict[str, int]
    """Adds up to the part `compute`; "" is outside of any span."""
    compute_by_family_ns: dict[str, int]
    """The same by family of kernel; empty without GPU rows."""
    kernels: list[Kernel]
    """Of the whole trace, the one of the greatest total first."""
    steps: int
    first_step: int | None
    last_step: int | None
    """Their numbers; a rank need not have recorded every step between."""
    host_by_span_ns: dict[str, int]
    """The whole window by what the loop's thread was in, whatever the GPU did; adds up to the window."""
    has_gpu_rows: bool
    max_launch_skew_ns: int
    unpaired_messages: int
    """To or from a rank whose trace is there, but whose end of them cannot be told from those of other messages."""
    undirected_kernels: int
    """Messages on the GPU of which the trace does not say whether they send or receive, such as those of a batch."""


@dataclass(frozen=True)
class Waits:
    """What a rank's communication is made of, by the clock of its own trace."""

    parts: dict[str, Intervals]
    """Of messages, and of collectives until their last rank has come."""
    messages: frozenset[int]
    """The slices of those messages whose both ends are known."""
    unpaired: int = 0
    """How many messages of the rank are with ranks that were traced, but have no known other end."""


def analyze_ranks(traces: Sequence[Trace]) -> list[RankAnalysis]:
    """The analysis of each rank, with what its communication waited for on the others."""
    alignment = align(traces)
    messages = match_p2p(traces, alignment)
    arrivals = _last_arrivals(traces, alignment)
    return [analyze(trace, _waits(trace, messages, arrivals, alignment)) for trace in traces]


def analyze(trace: Trace, waits: Waits | None = None) -> RankAnalysis:
    """Divides the time from the first recorded step's begin to the last one's end."""
    waits = waits or Waits({}, frozenset())
    slices = trace.slices
    start_ns, end_ns, steps = _window(trace)
    numbers = _step_numbers(trace)
    window = union(np.array([start_ns]), np.array([end_ns]))
    spans = _spans(trace)
    if trace.has_gpu_rows:
        kernel_names = _kernel_names(trace)
        compute_S = np.isin(slices.category, (Category.KERNEL, Category.MEMSET)) & ~_communicates(trace)
        divided = split(window, _gpu_parts(trace, compute_S, spans, waits))
        compute = intersection(union(slices.start_ns[compute_S], slices.end_ns[compute_S]), window)
        families_S = np.array([family_of(name) for name in trace.names])[slices.name]
        by_family = {family: compute_S & (families_S == family) for family in sorted(set(families_S[compute_S]))}
        shares = in_order(window, [union(slices.start_ns[s], slices.end_ns[s]) for s in by_family.values()])
        families = {family: share.total_ns for family, share in zip(by_family, shares, strict=True)}
    else:
        kernel_names, families = [], {}
        parts = _host_parts(trace, spans, window)
        divided, compute = split(window, parts), parts["compute"]
    return RankAnalysis(
        rank=trace.rank,
        role=trace.role,
        window_start_ns=start_ns,
        split=divided,
        compute_by_span_ns=by_span(compute, spans),
        compute_by_family_ns=families,
        kernels=kernel_names,
        steps=steps,
        first_step=min(numbers, default=None),
        last_step=max(numbers, default=None),
        host_by_span_ns=by_span(window, spans),
        has_gpu_rows=trace.has_gpu_rows,
        max_launch_skew_ns=trace.max_launch_skew_ns,
        unpaired_messages=waits.unpaired,
        undirected_kernels=_undirected(trace),
    )


@dataclass(frozen=True)
class RankTime:
    """When a rank's window was in which part, by the clock of its own trace."""

    window: Intervals
    parts: dict[str, Intervals]
    """Each instant of the window in one of them; as long as the parts of the rank's `Split`."""
    spans: list[tuple[str, int, int]]
    """Of the loop: name, start, end."""


def times_of_ranks(traces: Sequence[Trace], alignment: Alignment, messages: Sequence[Message]) -> list[RankTime]:
    """What `analyze_ranks` adds up, as it lies in time."""
    arrivals = _last_arrivals(traces, alignment)
    times = []
    for trace in traces:
        waits = _waits(trace, messages, arrivals, alignment)
        start_ns, end_ns, _ = _window(trace)
        window, spans = union(np.array([start_ns]), np.array([end_ns])), _spans(trace)
        if trace.has_gpu_rows:
            compute_S = np.isin(trace.slices.category, (Category.KERNEL, Category.MEMSET)) & ~_communicates(trace)
            parts = _gpu_parts(trace, compute_S, spans, waits)
        else:
            parts = _host_parts(trace, spans, window)
        names = [name for name in PARTS if name in parts]
        shares = dict(zip(names, in_order(window, [parts[name] for name in names]), strict=True))
        shares["unexplained"] = difference(window, _joined(list(shares.values())))
        times.append(RankTime(window, shares, spans))
    return times


def part_of_kernels(trace: Trace) -> np.ndarray:
    """uint8 [S]: the place in `PARTS` of each slice on a GPU, were it alone; 255 of any other slice."""
    slices = trace.slices
    part_S = np.full(len(slices), 255, np.uint8)
    part_S[np.isin(slices.category, (Category.KERNEL, Category.MEMSET))] = PARTS.index("compute")
    part_S[slices.category == Category.MEMCPY] = PARTS.index("copy")
    part_S[_communicates(trace)] = PARTS.index("collective")
    part_S[_messages_on_gpu(trace)] = PARTS.index("p2p_transfer")
    return part_S


def gpu_busy_ns(trace: Trace) -> tuple[int, int]:
    """(busy, idle) from the first to the last GPU work of the trace; (0, 0) where there is none."""
    slices = trace.slices
    work_S = np.isin(slices.category, GPU_WORK)
    busy = union(slices.start_ns[work_S], slices.end_ns[work_S])
    if not len(busy.start_I):
        return 0, 0
    return busy.total_ns, int(busy.end_I[-1] - busy.start_I[0]) - busy.total_ns


def _window(trace: Trace) -> tuple[int, int, int]:
    """Begin, end and number of steps; without named steps all that was recorded."""
    slices = trace.slices
    is_step = np.array([name.startswith(STEP) for name in trace.names], bool)[slices.name]
    steps_S = is_step & (slices.category == Category.USER_ANNOTATION)
    if not steps_S.any():
        steps_S = slices.category != Category.OTHER
        if not steps_S.any():
            steps_S[:] = True
    number = len(set(slices.name[steps_S])) if is_step.any() else 0
    return int(slices.start_ns[steps_S].min()), int(slices.end_ns[steps_S].max()), number


def _step_numbers(trace: Trace) -> list[int]:
    annotated = np.unique(trace.slices.name[trace.slices.category == Category.USER_ANNOTATION]).tolist()
    matches = [_STEP_NUMBER.fullmatch(trace.names[name]) for name in annotated]
    return [int(match[1]) for match in matches if match]


def _spans(trace: Trace) -> list[tuple[str, int, int]]:
    """The annotations of the loop's thread but the steps and what names single messages: name, start, end."""
    slices = trace.slices
    named_S = slices.category == Category.USER_ANNOTATION
    is_step = np.array([name.startswith(STEP) for name in trace.names], bool)[slices.name]
    loop_S = named_S & is_step if (named_S & is_step).any() else named_S
    if not loop_S.any():
        return []
    threads, count = np.unique(slices.thread[loop_S], return_counts=True)
    is_message = np.array([is_labelled(name) for name in trace.names], bool)[slices.name]
    chosen = np.flatnonzero(named_S & ~is_step & ~is_message & (slices.thread == threads[count.argmax()]))
    return [(trace.names[slices.name[i]], int(slices.start_ns[i]), int(slices.end_ns[i])) for i in chosen]


def _communicates(trace: Trace) -> np.ndarray:
    """bool [S]: kernels of NCCL and its like."""
    by_name = np.array([bool(COMMUNICATION_KERNEL.search(name)) for name in trace.names], bool)
    return by_name[trace.slices.name] & (trace.slices.category == Category.KERNEL)


def _messages_on_gpu(trace: Trace) -> np.ndarray:
    """bool [S]: kernels that send or receive; an all-to-all has the same name, but says what it is."""
    is_message_N = np.array([bool(_MESSAGE_KERNEL.search(name)) for name in trace.names], bool)
    message_S = _communicates(trace) & is_message_N[trace.slices.name]
    message_S[[c.slice for c in trace.communication if c.kind == "kernel" and c.is_collective]] = False
    return message_S


def _undirected(trace: Trace) -> int:
    directed = {c.slice for c in trace.communication if c.kind == "kernel" and c.direction}
    return sum(place not in directed for place in np.flatnonzero(_messages_on_gpu(trace)).tolist())


def _gpu_parts(
    trace: Trace, compute_S: np.ndarray, spans: Sequence[tuple[str, int, int]], waits: Waits
) -> dict[str, Intervals]:
    slices, names = trace.slices, np.array(trace.names)

    def where(mask_S: np.ndarray) -> Intervals:
        return union(slices.start_ns[mask_S], slices.end_ns[mask_S])

    def named(pattern: re.Pattern[str], category: Category) -> np.ndarray:
        found = np.array([bool(pattern.search(name)) for name in names], bool)
        return found[slices.name] & (slices.category == category)

    communicates_S = _communicates(trace)
    message_S = _messages_on_gpu(trace)
    matched_S = np.zeros(len(slices), bool)
    matched_S[list(waits.messages)] = True
    collective = where(communicates_S & ~message_S)
    nothing = union(np.empty(0, np.int64), np.empty(0, np.int64))
    waiting = waits.parts.get("collective_wait", nothing)
    copy_S = slices.category == Category.MEMCPY
    busy = where(np.isin(slices.category, GPU_WORK))
    whole = union(slices.start_ns.min(keepdims=True), slices.end_ns.max(keepdims=True))
    delays = launch_delays_ns(trace)
    return {
        "compute": where(compute_S),
        **waits.parts,
        "p2p_backpressured": _joined(
            [waits.parts.get("p2p_backpressured", nothing), _of_spans(spans, "p2p_backpressured")]
        ),
        "collective": difference(collective, waiting),
        "p2p": where(message_S & ~matched_S),
        "copy": where(copy_S),
        "profiler": where(slices.category == Category.OVERHEAD),
        "compile": where(named(_COMPILE, Category.RUNTIME) | named(_COMPILE, Category.PYTHON)),
        "allocator": where(named(_ALLOCATOR, Category.RUNTIME)),
        "data": _of_spans(spans, "data"),
        "checkpoint": _of_spans(spans, "checkpoint"),
        "host_bound": host_bound(difference(whole, busy), slices.start_ns[delays.gpu], slices.end_ns[delays.launch]),
    }


def _host_parts(trace: Trace, spans: Sequence[tuple[str, int, int]], window: Intervals) -> dict[str, Intervals]:
    """Of a rank without GPU rows: its loop's spans, each moment the innermost's; without spans its operations."""
    slices = trace.slices
    overhead_S = slices.category == Category.OVERHEAD
    profiler = union(slices.start_ns[overhead_S], slices.end_ns[overhead_S])
    waits = {part: _of_spans(spans, part) for part in dict.fromkeys(SPAN_PARTS.values())}
    waits["collective"] = _joined([waits["collective"], *(
        union(np.array([start]), np.array([end])) for name, start, end in spans if _COLLECTIVE.match(name)
    )])  # fmt: skip
    anything = _joined([union(np.array([start]), np.array([end])) for _, start, end in spans])
    if not spans:
        work_S = slices.category == Category.CPU_OP
        anything = union(slices.start_ns[work_S], slices.end_ns[work_S])
    working = difference(intersection(anything, window), _joined([profiler, *waits.values()]))
    return {"compute": working, "profiler": profiler, **waits}


def _waits(trace: Trace, messages: Sequence[Message], arrivals: dict[_Collective, int], alignment: Alignment) -> Waits:
    offset_ns = alignment.offset_ns(trace)
    parts: dict[str, list[tuple[int, int]]] = {"p2p_transfer": [], "p2p_starved": [], "p2p_backpressured": []}
    slices = set()
    for message in messages:
        met_ns = max(message.send_start_ns, message.receive_start_ns)
        if message.source == trace.rank:
            slices.add(message.send_slice)
            parts["p2p_backpressured"].append((message.send_start_ns, min(met_ns, message.send_end_ns)))
            parts["p2p_transfer"].append((met_ns, message.send_end_ns))
        if message.destination == trace.rank:
            slices.add(message.receive_slice)
            parts["p2p_starved"].append((message.receive_start_ns, min(met_ns, message.receive_end_ns)))
            parts["p2p_transfer"].append((met_ns, message.receive_end_ns))
    parts["collective_wait"] = [
        (start_ns, min(arrivals[key], end_ns))
        for key, start_ns, end_ns in _collectives(trace, offset_ns)
        if key in arrivals
    ]
    sets = {name: union(*(np.array(pairs, np.int64).reshape(-1, 2).T - offset_ns)) for name, pairs in parts.items()}
    unpaired = sum(count for ranks, count in alignment.unpaired.items() if trace.rank in ranks)
    return Waits(sets, frozenset(slices), unpaired)


def _last_arrivals(traces: Sequence[Trace], alignment: Alignment) -> dict[_Collective, int]:
    """When the last rank began each collective, by the common clock; of those with several ranks in the traces."""
    starts: dict[_Collective, list[int]] = defaultdict(list)
    for trace in traces:
        for key, start_ns, _ in _collectives(trace, alignment.offset_ns(trace)):
            starts[key].append(start_ns)
    return {key: max(times) for key, times in starts.items() if len(times) > 1}


def _collectives(trace: Trace, offset_ns: int) -> Iterator[tuple[_Collective, int, int]]:
    """Each collective on the GPU: what it is called alike on all its ranks, start and end by the common clock."""
    for c in trace.communication:
        if c.kind == "kernel" and c.is_collective and c.sequence is not None:
            yield (c.group, c.name, c.sequence), c.start_ns + offset_ns, c.end_ns + offset_ns


def _of_spans(spans: Sequence[tuple[str, int, int]], part: str) -> Intervals:
    chosen = [(start, end) for name, start, end in spans if SPAN_PARTS.get(name) == part]
    return union(*np.array(chosen, np.int64).reshape(-1, 2).T)


def _joined(sets: Sequence[Intervals]) -> Intervals:
    starts, ends = ([getattr(s, name) for s in sets] for name in ("start_I", "end_I"))
    return union(np.concatenate([*starts, np.empty(0, np.int64)]), np.concatenate([*ends, np.empty(0, np.int64)]))


def _kernel_names(trace: Trace) -> list[Kernel]:
    slices = trace.slices
    kernel_S = slices.category == Category.KERNEL
    totals = np.bincount(
        slices.name[kernel_S], (slices.end_ns - slices.start_ns)[kernel_S].astype(float), len(trace.names)
    )
    counts = np.bincount(slices.name[kernel_S], minlength=len(trace.names))
    order = [place for place in np.argsort(-totals, kind="stable").tolist() if counts[place]]
    return [Kernel(n := trace.names[p], family_of(n), int(counts[p]), round(totals[p])) for p in order]
