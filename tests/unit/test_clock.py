"""Clocks are aligned and messages matched on synthetic traces, of which the truth is known, and on a real world."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dflash_profiling.clock import RENDEZVOUS_BYTES, Message, align, match_p2p
from dflash_profiling.kineto import Trace, read_folder
from dflash_profiling.record import TraceWindow
from tests.synthetic_traces import SyntheticRank, TrueMessage, messages_world

MS = 1_000_000
TWO_RANKS = [(0, 1)]
THREE_TO_ONE = [(0, 3), (1, 3), (2, 3)]
TWO_TO_TWO = [(0, 2), (0, 3), (1, 2), (1, 3)]


def written(ranks: list[SyntheticRank], folder: Path) -> list[Trace]:
    for rank in ranks:
        rank.write(folder)
    return read_folder(folder)


def skews(pairs: list[tuple[int, int]], draw: random.Random) -> dict[int, int]:
    ranks = range(1 + max(max(pair) for pair in pairs))
    return {rank: draw.randrange(-5 * MS, 5 * MS) if rank else 0 for rank in ranks}


def assert_waits(messages: list[Message], truth: list[TrueMessage]) -> None:
    """All matched; the waits of each pair within 1 %, and what is left of each receive the transfer."""
    assert len(messages) == len(truth)
    for pair in {(message.source, message.destination) for message in truth}:
        mine = [message for message in messages if (message.source, message.destination) == pair]
        true = [message for message in truth if (message.source, message.destination) == pair]
        assert len(mine) == len(true)
        waiting = sum(message.waiting_ns for message in mine)
        assert waiting == pytest.approx(sum(message.waiting_ns for message in true), rel=0.01)
        for message in mine:
            assert message.waiting_ns + message.transfer_ns == message.receive_end_ns - message.receive_start_ns


@pytest.mark.parametrize("numbered", [True, False], ids=["by sequence", "by order"])
@pytest.mark.parametrize("pairs", [TWO_RANKS, THREE_TO_ONE, TWO_TO_TWO], ids=["1-1", "3-1", "2-2"])
@pytest.mark.parametrize("seed", range(3))
def test_waits_are_found_behind_skew_and_jitter(
    tmp_path: Path, pairs: list[tuple[int, int]], numbered: bool, seed: int
) -> None:
    true_skews = skews(pairs, random.Random(seed))
    ranks, truth = messages_world(pairs, true_skews, seed=seed, numbered=numbered)
    traces = written(ranks, tmp_path)
    alignment = align(traces)
    assert alignment.unaligned == {} and alignment.violation_ns == 0
    for rank, skew_ns in true_skews.items():
        assert alignment.offsets_ns[rank] == pytest.approx(-skew_ns, abs=20_000)
        assert abs(alignment.offsets_ns[rank] + skew_ns) <= (alignment.uncertainty_ns or 0) < MS
    for bound in alignment.bounds:
        assert bound.low_ns <= true_skews[bound.rank_b] - true_skews[bound.rank_a] <= bound.high_ns
        assert bound.messages == 80
    assert_waits(match_p2p(traces, alignment), truth)


@pytest.mark.parametrize("skew_ns", [-5 * MS, 5 * MS])
def test_messages_of_one_direction_bound_both_sides_if_they_are_large(tmp_path: Path, skew_ns: int) -> None:
    """A send of more than NCCL's buffers hold cannot end before its receive begins."""
    ranks, truth = messages_world(TWO_RANKS, {0: 0, 1: skew_ns}, answers=False, bytes=RENDEZVOUS_BYTES)
    traces = written(ranks, tmp_path)
    assert align(traces).offsets_ns[1] == pytest.approx(-skew_ns, abs=20_000)
    assert_waits(match_p2p(traces), truth)


@pytest.mark.parametrize("skew_ns", [-5 * MS, 0, 5 * MS])
@pytest.mark.parametrize("late", ["send", "recv"])
def test_an_end_that_always_comes_late_is_not_taken_for_skew(tmp_path: Path, late: str, skew_ns: int) -> None:
    """As with a bottleneck: of the wait of 4 ms, what the buffers hold may be told as skew, but not half of it."""
    ranks = [SyntheticRank(0, 2), SyntheticRank(1, 2, skew_ns=skew_ns)]
    for number in range(8):
        met_ns, end_ns = (10 + 10 * number) * MS, (10 + 10 * number) * MS + MS // 2
        for rank, way in enumerate(("send", "recv")):
            start_ns = met_ns if way == late else met_ns - 4 * MS
            ranks[rank].message(way, 1 - rank, start_ns, end_ns, sequence=number, bytes=4 * RENDEZVOUS_BYTES)
    alignment = align(written(ranks, tmp_path))
    assert alignment.offsets_ns[1] == pytest.approx(-skew_ns, abs=MS // 10)


def test_small_messages_of_one_direction_leave_a_side_open(tmp_path: Path) -> None:
    """Then as little skew is assumed as the messages allow."""
    ranks, _ = messages_world(TWO_RANKS, {0: 0, 1: 3 * MS}, answers=False, bytes=4096)
    alignment = align(written(ranks, tmp_path))
    assert alignment.bounds[0].low_ns is None and alignment.bounds[0].high_ns is not None
    assert alignment.offsets_ns == {0: 0, 1: 0} and alignment.uncertainty_ns is None


@pytest.mark.parametrize(("nodes", "known"), [((0, 0), True), ((0, 1), False)])
def test_ranks_of_one_node_share_its_clock(tmp_path: Path, nodes: tuple[int, int], known: bool) -> None:
    """Before 2.13 torch does not say which host a trace is of; the trainer tells its node."""
    ranks, _ = messages_world(TWO_RANKS, {0: 0, 1: 0}, answers=False, bytes=4096)
    traces = [
        replace(trace, metadata=trace.metadata | {"node": node})
        for trace, node in zip(written(ranks, tmp_path), nodes, strict=True)
    ]
    assert (align(traces).uncertainty_ns is not None) == known


def test_ranks_of_one_host_share_its_clock(tmp_path: Path) -> None:
    ranks, truth = messages_world(TWO_RANKS, {0: 0, 1: 0}, answers=False, bytes=4096)
    traces = written([replace(rank, host="box") for rank in ranks], tmp_path)
    assert abs(align(traces).offsets_ns[1]) <= 20_000
    assert_waits(match_p2p(traces), truth)


def test_bounds_that_contradict_each_other_are_said_so(tmp_path: Path) -> None:
    """The answer arrives, by these clocks, before it is sent, whatever their skew."""
    one, two = SyntheticRank(0, 2), SyntheticRank(1, 2)
    one.message("send", 1, 10 * MS, 11 * MS, sequence=1)
    two.message("recv", 0, 1 * MS, 2 * MS, sequence=1)
    two.message("send", 0, 30 * MS, 31 * MS, sequence=2)
    one.message("recv", 1, 20 * MS, 21 * MS, sequence=2)
    alignment = align(written([one, two], tmp_path))
    assert alignment.bounds[0].low_ns > alignment.bounds[0].high_ns
    assert alignment.violation_ns >= 9 * MS


def test_traces_of_unknown_clocks_are_left_out_with_the_reason(tmp_path: Path) -> None:
    ranks, truth = messages_world(THREE_TO_ONE, {0: 0, 1: 0, 2: 0, 3: 0})
    ranks[1].base_ns = None
    ranks[2].base_ns -= 3_600 * 10**9
    traces = written(ranks, tmp_path)
    alignment = align(traces)
    assert sorted(alignment.offsets_ns) == [0, 3]
    assert "baseTimeNanoseconds" in alignment.unaligned["rank1.1.pt.trace.json.gz"]
    assert "another window" in alignment.unaligned["rank2.1.pt.trace.json.gz"]
    assert_waits(match_p2p(traces), [message for message in truth if {message.source, message.destination} == {0, 3}])


@pytest.mark.parametrize(("windows", "ahead_ms"), [([[16, 19], [16, 19]], 9_000), ([[12, 15], [16, 19]], 0)])
def test_a_window_is_one_of_steps_however_far_ahead_a_rank_is(
    tmp_path: Path, windows: list[list[int]], ahead_ms: int
) -> None:
    """A target that is ahead by full rings has done the steps before the drafter begins them."""
    ranks, _ = messages_world(TWO_RANKS, {0: 0, 1: 0}, answers=False)
    ranks = [
        replace(rank, metadata=rank.metadata | {"window": window}) for rank, window in zip(ranks, windows, strict=True)
    ]
    ranks[0].base_ns = (ranks[0].base_ns or 0) - ahead_ms * MS
    alignment = align(written(ranks, tmp_path))
    if windows[0] == windows[1]:
        assert alignment.unaligned == {}
    else:
        (reason,) = alignment.unaligned.values()
        assert reason == "it is of steps 12 to 15, another of 16 to 19: it is of another window"


def test_the_same_steps_of_two_runs_are_two_windows(tmp_path: Path) -> None:
    ranks, _ = messages_world(TWO_RANKS, {0: 0, 1: 0}, answers=False)
    ranks = [replace(rank, metadata=rank.metadata | {"window": [6, 9]}) for rank in ranks]
    ranks[0].base_ns = (ranks[0].base_ns or 0) - 360_000 * MS
    alignment = align(written(ranks, tmp_path))
    (reason,) = alignment.unaligned.values()
    assert "s before another began: it is of another window" in reason and list(alignment.offsets_ns) == [1]


def test_a_single_trace_needs_no_base(tmp_path: Path) -> None:
    rank = SyntheticRank(0, base_ns=None)
    rank.kernel("k", 1000, 2000)
    alignment = align(written([rank], tmp_path))
    assert alignment.offsets_ns == {0: 0} and alignment.unaligned == {}


def exchange(rank: int, folder: str) -> None:
    """Rank 0 is late with each message, rank 1 answers."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    window = TraceWindow(Path(folder) / "profile", rank, ["target", "drafter"][rank], 2, 3, {})
    for step in range(1, 6):
        window.advance(step)
        tensor = torch.zeros(step << 16)  # of sizes that tell the messages apart
        if rank == 0:
            torch.ones(1200, 1200) @ torch.ones(1200, 1200)
            dist.send(tensor, 1)
            dist.recv(tensor, 1)
        else:
            work = dist.irecv(tensor, 0)
            assert work is not None
            work.wait()
            dist.send(tensor, 0)
    window.close()
    dist.destroy_process_group()


def test_real_ranks_on_gloo(tmp_path: Path) -> None:
    mp.spawn(exchange, (str(tmp_path),), nprocs=2)
    traces = read_folder(tmp_path / "profile")
    assert [(trace.rank, trace.world_size, trace.role) for trace in traces] == [(0, 2, "target"), (1, 2, "drafter")]
    assert not any(trace.has_gpu_rows for trace in traces)
    alignment = align(traces)
    assert abs(alignment.offsets_ns[1]) <= 20_000
    assert alignment.violation_ns == 0 and alignment.bounds[0].messages == 6
    messages = match_p2p(traces, alignment)
    assert [(message.source, message.destination) for message in messages] == [(0, 1), (1, 0)] * 3
    assert [message.bytes for message in messages] == [step << 18 for step in (2, 2, 3, 3, 4, 4)]
    for message in messages:
        assert message.receive_end_ns >= message.send_start_ns
        assert message.waiting_ns + message.transfer_ns == message.receive_end_ns - message.receive_start_ns
    assert min(message.waiting_ns for message in messages if message.destination == 1) > 0
