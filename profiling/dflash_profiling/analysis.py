"""What one rank's trace says about its time.

Shape suffixes: S slices, K pieces of GPU work, I intervals.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflash_profiling.clock import OTHER_WINDOW, Alignment, Message, align, match_p2p
from dflash_profiling.communication import is_labelled
from dflash_profiling.intervals import Intervals, difference, intersection, joined, union
from dflash_profiling.kineto import GPU_WORK, Category, Trace, launch_delays_ns
from dflash_profiling.throughput import step_slowdown
from dflash_profiling.timeline import (
    FAMILIES,
    PARTS,
    Split,
    by_span,
    family_of,
    host_bound,
    in_innermost,
    in_order,
    split,
)
from dflash_profiling.waits import Waits, find_waits

STEP = "ProfilerStep#"
_STEP_NUMBER = re.compile(r"ProfilerStep#(\d{1,15})")
BEFORE_TRACE = "launched before the trace"
"""Computing of a GPU whose queue was full as the window began: of which span, the trace does not say."""
SPAN_PARTS = {
    "receive": "p2p_starved", "wait_slot": "p2p_backpressured", "send": "p2p_transfer", "gloo:send": "p2p_transfer",
    "gloo:recv": "p2p_starved", "all_reduce": "collective", "load": "data", "checkpoint": "checkpoint",
}  # fmt: skip
"""What a span of the loop counts as where there are no GPU rows; any other is compute."""
_DATA_LOADER = "enumerate(DataLoader)#"
"""How torch's own loader begins the names of its spans."""
WAITS = ("p2p_starved", "p2p_backpressured", "collective_wait")
"""The parts in which a rank waits for another."""
_COLLECTIVE = re.compile(r"(nccl|gloo|mpi|ucc):(?!send|recv)", re.IGNORECASE)
COMMUNICATION_KERNEL = re.compile(FAMILIES["communication"], re.IGNORECASE)
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
    waits_for_ns: dict[int, int]
    """By rank: how much of the parts in `WAITS` was for it to send, to receive, or to come to a collective.

    Where it was for several at once, it counts as for the one that is waited for most. The rest of these parts is for
    ranks that the traces do not tell.
    """
    compute_by_span_ns: dict[str, int]
    """Adds up to the part `compute`; "" is outside of any span. Work on a GPU is of the span that launched it."""
    compute_by_family_ns: dict[str, int]
    """The same by family of kernel; empty without GPU rows."""
    kernels: list[Kernel]
    """Of the whole trace, the one of the greatest total first."""
    steps: int
    first_step: int | None
    last_step: int | None
    """Their numbers; a rank need not have recorded every step between."""
    gpu_busy_ns: int | None
    """Of the window, with communication and copies; None without GPU rows."""
    idle_by_host_ns: dict[str, int]
    """The rest of a GPU's window by what the host was in: a call of the runtime, else a span of the loop, else ""."""
    host_by_span_ns: dict[str, int]
    """The whole window by what the loop's thread was in, whatever the GPU did; adds up to the window."""
    has_gpu_rows: bool
    max_launch_skew_ns: int
    unpaired_messages: int
    """To or from a rank whose trace is there, but whose end of them cannot be told from those of other messages."""
    undirected_kernels: int
    """Messages on the GPU of which the trace does not say whether they send or receive, such as those of a batch."""
    step_slowdown: float | None
    """A step of the window over one before it, on the host; None where the trace does not say."""
    unaligned: str | None = None
    """Why the trace is not on the clock of the others: what it shows need not be of the same time or window."""
    clock_uncertainty_ns: int | None = None
    """How exact what waits for other ranks is; None where no messages bound the clocks."""

    @property
    def of_another_window(self) -> bool:
        """Whether the rank recorded nothing in the window of the others, such as a target without a batch in it."""
        return self.unaligned is not None and OTHER_WINDOW in self.unaligned


def analyze_ranks(traces: Sequence[Trace]) -> list[RankAnalysis]:
    """The analysis of each rank, with what its communication waited for on the others."""
    alignment = align(traces)
    messages = match_p2p(traces, alignment)
    return [
        replace(
            analyze(trace, waits),
            unaligned=alignment.unaligned.get(trace.path.name) if len(traces) > 1 else None,
            clock_uncertainty_ns=alignment.uncertainty_ns,
        )
        for trace, waits in zip(traces, find_waits(traces, alignment, messages), strict=True)
    ]


def analyze(trace: Trace, waits: Waits | None = None) -> RankAnalysis:
    """Divides the time from the first recorded step's begin to the last one's end."""
    waits = waits or Waits()
    slices = trace.slices
    start_ns, end_ns, steps = _window(trace)
    numbers = _step_numbers(trace)
    window = union(np.array([start_ns]), np.array([end_ns]))
    spans = _spans(trace)
    busy_ns, idle_by_host = None, {}
    if trace.has_gpu_rows:
        busy = intersection(window, gpu_busy(trace))
        busy_ns, idle_by_host = busy.total_ns, _by_host(trace, difference(window, busy), spans)
        kernel_names = _kernel_names(trace)
        compute_S = np.isin(slices.category, (Category.KERNEL, Category.MEMSET)) & ~_communicates(trace)
        parts = _gpu_parts(trace, compute_S, spans, waits)
        family_of_name = [family_of(name) for name in trace.names]
        known = sorted(set(family_of_name))
        family_S = np.array([known.index(family) for family in family_of_name])[slices.name]
        by_family = {known[i]: compute_S & (family_S == i) for i in np.unique(family_S[compute_S]).tolist()}
        shares = in_order(window, [union(slices.start_ns[s], slices.end_ns[s]) for s in by_family.values()])
        families = {family: share.total_ns for family, share in zip(by_family, shares, strict=True)}
        computing = _launched_by(trace, compute_S, window, spans)
    else:
        kernel_names, families = [], {}
        parts = _host_parts(trace, spans, window)
        computing = by_span(parts["compute"], spans)
    return RankAnalysis(
        rank=trace.rank,
        role=trace.role,
        window_start_ns=start_ns,
        split=split(window, parts),
        waits_for_ns=_waits_for(window, parts, spans, waits),
        compute_by_span_ns=computing,
        compute_by_family_ns=families,
        kernels=kernel_names,
        steps=steps,
        first_step=min(numbers, default=None),
        last_step=max(numbers, default=None),
        gpu_busy_ns=busy_ns,
        idle_by_host_ns=idle_by_host,
        host_by_span_ns=by_span(window, spans),
        has_gpu_rows=trace.has_gpu_rows,
        max_launch_skew_ns=trace.max_launch_skew_ns,
        unpaired_messages=waits.unpaired,
        undirected_kernels=_undirected(trace),
        step_slowdown=step_slowdown(trace.metadata),
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
    times = []
    for trace, waits in zip(traces, find_waits(traces, alignment, messages), strict=True):
        start_ns, end_ns, _ = _window(trace)
        window, spans = union(np.array([start_ns]), np.array([end_ns])), _spans(trace)
        if trace.has_gpu_rows:
            compute_S = np.isin(trace.slices.category, (Category.KERNEL, Category.MEMSET)) & ~_communicates(trace)
            parts = _gpu_parts(trace, compute_S, spans, waits)
        else:
            parts = _host_parts(trace, spans, window)
        names = [name for name in PARTS if name in parts]
        shares = dict(zip(names, in_order(window, [parts[name] for name in names]), strict=True))
        shares["unexplained"] = difference(window, joined(list(shares.values())))
        times.append(RankTime(window, shares, spans))
    return times


def _waits_for(
    window: Intervals, parts: dict[str, Intervals], spans: Sequence[tuple[str, int, int]], waits: Waits
) -> dict[int, int]:
    names = [name for name in PARTS if name in parts]
    shares = dict(zip(names, in_order(window, [parts[name] for name in names]), strict=True))
    waiting = joined([shares[name] for name in WAITS if name in shares])
    sets = dict(waits.of_ranks)
    for name, start_ns, end_ns in spans:
        if part_of_span(name) == "p2p_backpressured" and (peer := waits.next_peer(end_ns)) is not None:
            slot = union(np.array([start_ns]), np.array([end_ns]))
            sets[peer] = joined([sets[peer], slot]) if peer in sets else slot
    shared = {peer: intersection(waiting, intervals) for peer, intervals in sets.items()}
    order = sorted(shared, key=lambda peer: (-shared[peer].total_ns, peer))
    found = in_order(waiting, [shared[peer] for peer in order])
    return {peer: share.total_ns for peer, share in zip(order, found, strict=True) if share.total_ns}


def part_of_span(name: str) -> str | None:
    """What a span of the loop counts as where it is not compute."""
    if _COLLECTIVE.match(name):
        return "collective"
    return "data" if name.startswith(_DATA_LOADER) else SPAN_PARTS.get(name)


def part_of_kernels(trace: Trace) -> np.ndarray:
    """uint8 [S]: the place in `PARTS` of each slice on a GPU, were it alone; 255 of any other slice."""
    slices = trace.slices
    part_S = np.full(len(slices), 255, np.uint8)
    part_S[np.isin(slices.category, (Category.KERNEL, Category.MEMSET))] = PARTS.index("compute")
    part_S[slices.category == Category.MEMCPY] = PARTS.index("copy")
    part_S[_communicates(trace)] = PARTS.index("collective")
    part_S[_messages_on_gpu(trace)] = PARTS.index("p2p_transfer")
    return part_S


def gpu_busy(trace: Trace) -> Intervals:
    """When anything goes on on the GPU, in the whole trace."""
    work_S = np.isin(trace.slices.category, GPU_WORK)
    return union(trace.slices.start_ns[work_S], trace.slices.end_ns[work_S])


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
    slices, thread = trace.slices, _loop_thread(trace)
    if thread is None:
        return []
    left_out = np.array([name.startswith(STEP) or is_labelled(name) for name in trace.names], bool)[slices.name]
    named_S = (slices.category == Category.USER_ANNOTATION) & (slices.thread == thread)
    chosen = np.flatnonzero(named_S & ~left_out)
    return [(trace.names[slices.name[i]], int(slices.start_ns[i]), int(slices.end_ns[i])) for i in chosen]


def _loop_thread(trace: Trace) -> int | None:
    """The thread of most steps, or of most annotations where no step is named; None where nothing is annotated."""
    slices = trace.slices
    named_S = slices.category == Category.USER_ANNOTATION
    is_step = np.array([name.startswith(STEP) for name in trace.names], bool)[slices.name]
    loop_S = named_S & is_step if (named_S & is_step).any() else named_S
    threads, count = np.unique(slices.thread[loop_S], return_counts=True)
    return int(threads[count.argmax()]) if len(threads) else None


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
    whole = union(slices.start_ns.min(keepdims=True), slices.end_ns.max(keepdims=True))
    delays = launch_delays_ns(trace)
    return {
        "compute": where(compute_S),
        **waits.parts,
        "p2p_backpressured": joined(
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
        "host_bound": host_bound(
            difference(whole, gpu_busy(trace)), slices.start_ns[delays.gpu], slices.end_ns[delays.launch]
        ),
    }


def _host_parts(trace: Trace, spans: Sequence[tuple[str, int, int]], window: Intervals) -> dict[str, Intervals]:
    """Of a rank without GPU rows: its loop's spans, each moment the innermost's; without spans its operations."""
    slices = trace.slices
    overhead_S = slices.category == Category.OVERHEAD
    profiler = union(slices.start_ns[overhead_S], slices.end_ns[overhead_S])
    waits: dict[str, list[Intervals]] = {part: [] for part in SPAN_PARTS.values()}
    working: list[Intervals] = []
    for name, share in in_innermost(window, spans).items():
        part = part_of_span(name)
        if name:
            (waits[part] if part else working).append(share)
    if not spans:
        work_S = slices.category == Category.CPU_OP
        working = [intersection(union(slices.start_ns[work_S], slices.end_ns[work_S]), window)]
    of_parts = {part: joined(shares) for part, shares in waits.items()}
    compute = joined(working)
    # Where the loop's thread runs no operation while another thread is in a collective, it waits for that one.
    exposed = intersection(compute, _beside_operations(trace))
    of_parts["collective"] = joined([of_parts["collective"], exposed])
    return {"compute": difference(difference(compute, exposed), profiler), "profiler": profiler, **of_parts}


def _beside_operations(trace: Trace) -> Intervals:
    """When other threads than the loop's are in a collective, and that one in no operation; never if it shows none."""
    slices = trace.slices
    thread = _loop_thread(trace)
    collective_N = np.array([bool(_COLLECTIVE.match(name)) for name in trace.names], bool)
    others_S = collective_N[slices.name] & (slices.thread != thread)
    operations_S = (slices.category == Category.CPU_OP) & (slices.thread == thread) & ~collective_N[slices.name]
    if thread is None or not operations_S.any():
        others_S[:] = False
    return difference(
        union(slices.start_ns[others_S], slices.end_ns[others_S]),
        union(slices.start_ns[operations_S], slices.end_ns[operations_S]),
    )


def _launched_by(
    trace: Trace, compute_S: np.ndarray, window: Intervals, spans: Sequence[tuple[str, int, int]]
) -> dict[str, int]:
    """Of a GPU's computing in the window: by the innermost span in which it was launched, as the host runs ahead.

    "" is what was launched in none, `BEFORE_TRACE` what has no launch in the trace. Of what runs at once, the span that
    came first has it, and what was launched before the trace before all.
    """
    slices, delays = trace.slices, launch_delays_ns(trace)
    whole = union(slices.start_ns.min(keepdims=True), slices.end_ns.max(keepdims=True) + 1)  # holds each launch
    shares = in_innermost(whole, spans)
    in_order_of_time = sorted(shares, key=lambda name: int(shares[name].start_I.min(initial=whole.end_I[-1])))
    names = [BEFORE_TRACE, *in_order_of_time]
    start_I = np.concatenate([shares[name].start_I for name in in_order_of_time])
    name_I = np.repeat(np.arange(1, len(names)), [len(shares[name].start_I) for name in in_order_of_time])
    order = np.argsort(start_I)
    name_S = np.zeros(len(slices), np.int64)
    place_K = np.searchsorted(start_I[order], slices.start_ns[delays.launch], side="right") - 1
    name_S[delays.gpu] = name_I[order][place_K]
    chosen = [compute_S & (name_S == place) for place in range(len(names))]
    found = in_order(window, [union(slices.start_ns[some_S], slices.end_ns[some_S]) for some_S in chosen])
    times_ns = {name: share.total_ns for name, share in zip(names, found, strict=True)}
    return {name: ns for name, ns in times_ns.items() if ns or name != BEFORE_TRACE}


def _of_spans(spans: Sequence[tuple[str, int, int]], part: str) -> Intervals:
    chosen = [(start, end) for name, start, end in spans if part_of_span(name) == part]
    return union(*np.array(chosen, np.int64).reshape(-1, 2).T)


def _by_host(trace: Trace, idle: Intervals, spans: Sequence[tuple[str, int, int]]) -> dict[str, int]:
    """Of what goes on at once the call that has most of `idle` comes first."""
    slices = trace.slices
    calls_S = slices.category == Category.RUNTIME
    of_call = {}
    for name in np.unique(slices.name[calls_S]).tolist():
        some_S = calls_S & (slices.name == name)
        of_call[trace.names[name]] = intersection(idle, union(slices.start_ns[some_S], slices.end_ns[some_S]))
    names = sorted(of_call, key=lambda name: -of_call[name].total_ns)
    shares = in_order(idle, [of_call[name] for name in names])
    found = {name: share.total_ns for name, share in zip(names, shares, strict=True) if share.total_ns}
    for name, ns in by_span(difference(idle, joined(shares)), spans).items():
        if ns:
            found[name] = found.get(name, 0) + ns
    return found


def _kernel_names(trace: Trace) -> list[Kernel]:
    slices = trace.slices
    kernel_S = slices.category == Category.KERNEL
    totals = np.bincount(
        slices.name[kernel_S], (slices.end_ns - slices.start_ns)[kernel_S].astype(float), len(trace.names)
    )
    counts = np.bincount(slices.name[kernel_S], minlength=len(trace.names))
    order = [place for place in np.argsort(-totals, kind="stable").tolist() if counts[place]]
    return [Kernel(n := trace.names[p], family_of(n), int(counts[p]), round(totals[p])) for p in order]
