"""Messages are paired by label, by number, or by the one order that is possible; what cannot be told stays alone."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from dflash_profiling.analysis import analyze_ranks
from dflash_profiling.clock import align, match_p2p
from dflash_profiling.kineto import Trace, read_folder
from dflash_profiling.merge import merge_folder
from dflash_profiling.table import as_json, as_text
from tests.synthetic_traces import SyntheticRank

MS = 1_000_000


def written(ranks: Sequence[SyntheticRank], folder: Path) -> list[Trace]:
    for rank in ranks:
        rank.write(folder)
    return read_folder(folder)


@pytest.mark.parametrize("numbered", [True, False])
@pytest.mark.parametrize(("first_send", "first_receive"), [(3, 0), (0, 3)])
def test_windows_that_begin_apart(tmp_path: Path, numbered: bool, first_send: int, first_receive: int) -> None:
    """Messages that were sent before the receiver's window, or received after the sender's, stay alone."""
    sender, receiver = SyntheticRank(0, 2), SyntheticRank(1, 2)
    for number in range(20):
        start_ns = 100 * MS * (number + 1)
        if number >= first_send:
            sender.message("send", 1, start_ns, start_ns + MS, sequence=number if numbered else None)
        if number >= first_receive:
            receiver.message("recv", 0, start_ns - MS, start_ns + MS, sequence=number if numbered else None)
    messages = match_p2p(written([sender, receiver], tmp_path))
    assert len(messages) == 17
    assert {message.waiting_ns for message in messages} == {MS}


def test_sequence_numbers_that_count_other_messages_too_are_not_used(tmp_path: Path) -> None:
    """Rank 0 sends to 1 and 2 in turn, all in one group of three: its counts are not those of the receivers."""
    ranks = [SyntheticRank(rank, 3) for rank in range(3)]
    for number in range(20):
        start_ns, peer = 50 * MS * (number + 1), 1 + number % 2
        ranks[0].message("send", peer, start_ns, start_ns + MS, sequence=number, group="0")
        ranks[peer].message("recv", 0, start_ns - MS, start_ns + MS, sequence=number // 2, group="0")
    messages = match_p2p(written(ranks, tmp_path))
    assert len(messages) == 20
    assert {message.waiting_ns for message in messages} == {MS}


def ring_world(
    under_way: int, sizes: Sequence[int], labelled: bool = False, skew_ns: int = 0, lost: int = 0
) -> tuple[list[SyntheticRank], set[tuple[int, int]]]:
    """A target and a drafter on gloo as `dflash_dist` has them, and the start of the send and end of each true pair.

    The first `under_way` messages were sent before the sender's window, and receives are posted four ahead. `lost`:
    sends whose receive lies after the receiver's window.
    """
    draw = random.Random(3)
    sender, receiver = SyntheticRank(0, 2, "target"), SyntheticRank(1, 2, "drafter", skew_ns=skew_ns)
    truth = set()
    taken_ns = [0] * 4
    for number, size in enumerate(sizes):
        send_ns = 20 * MS * (number + 1) + draw.randrange(8 * MS)
        arrived_ns = send_ns + 200_000 + draw.randrange(300_000)
        wait_ns = max(taken_ns[-1] + 12 * MS, send_ns - draw.randrange(4 * MS))
        end_ns = max(arrived_ns, wait_ns + 10_000)
        if number >= under_way:
            sender.gloo("send", 1, send_ns + 30_000, arrived_ns, size)
            if labelled:
                sender.span(f"message of step 1, batch {number} to rank 1", send_ns, send_ns + 60_000)
        if number < len(sizes) - lost:
            if number >= 4:
                receiver.gloo("recv", 0, taken_ns[number] + 50_000, end_ns, size)
            if labelled:
                receiver.span(f"message of step 1, batch {number} from rank 0", wait_ns, end_ns)
            if number >= under_way and (number >= 4 or labelled):
                truth.add((send_ns + (0 if labelled else 29_000), end_ns))
        taken_ns.append(end_ns)
    return [sender, receiver], truth


def found(traces: list[Trace]) -> set[tuple[int, int]]:
    """Start of the send and end of the receive, each by the true clock's zero as the traces say it."""
    base_ns = min(trace.base_ns or 0 for trace in traces)
    alignment = align(traces)
    return {
        (m.send_start_ns - base_ns, m.receive_end_ns - base_ns - alignment.offsets_ns[m.destination])
        for m in match_p2p(traces, alignment)
    }


SIZES = [4096 * (1 + number % 7) for number in range(30)]


@pytest.mark.parametrize("under_way", [0, 1, 3, 9])
@pytest.mark.parametrize("lost", [0, 3])
@pytest.mark.parametrize("skew_ns", [0, -5 * MS, 5 * MS])
def test_labels_pair_exactly_whatever_is_under_way(tmp_path: Path, under_way: int, lost: int, skew_ns: int) -> None:
    """Of messages that are all alike."""
    ranks, truth = ring_world(under_way, [4096] * 30, labelled=True, skew_ns=skew_ns, lost=lost)
    traces = written(ranks, tmp_path)
    assert found(traces) == {(send, end + skew_ns) for send, end in truth}
    assert len(truth) == 30 - under_way - lost
    alignment = align(traces)
    assert alignment.unpaired == {} and alignment.violation_ns == 0
    high_ns = alignment.bounds[0].high_ns
    assert high_ns is not None and skew_ns <= high_ns <= skew_ns + MS
    assert {message.bytes for message in match_p2p(traces, alignment)} == {4096}  # of the send in the span


@pytest.mark.parametrize("under_way", [0, 1, 3, 9])
@pytest.mark.parametrize("lost", [0, 3])
def test_sizes_tell_the_order(tmp_path: Path, under_way: int, lost: int) -> None:
    draw = random.Random(under_way)
    ranks, truth = ring_world(under_way, [4 * draw.randrange(1, 5000) for _ in range(30)], lost=lost)
    traces = written(ranks, tmp_path)
    assert found(traces) == truth and truth


@pytest.mark.parametrize("under_way", [0, 1, 3, 9])
def test_sizes_that_repeat_are_told_apart_by_time_or_not_at_all(tmp_path: Path, under_way: int) -> None:
    ranks, truth = ring_world(under_way, SIZES)
    pairs = found(written(ranks, tmp_path))
    assert pairs == truth


def steady_world(sizes: Sequence[int], ahead: int = 0) -> list[SyntheticRank]:
    """A receiver that takes a message whenever it has time, `ahead` messages after it was sent."""
    sender, receiver = SyntheticRank(0, 2), SyntheticRank(1, 2)
    for place, size in enumerate(sizes):
        at_ns = 10 * MS * (place + 1)
        sender.gloo("send", 1, at_ns, at_ns + 300_000, size)
        receiver.gloo("recv", 0, at_ns + 2 * MS, at_ns + 2_100_000, sizes[place - ahead])
    return [sender, receiver]


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_where_times_fit_several_orders_sizes_decide(tmp_path: Path, ahead: int) -> None:
    messages = match_p2p(written(steady_world([4096 * place for place in range(1, 21)], ahead), tmp_path))
    assert [message.bytes for message in messages] == [4096 * place for place in range(1, 21 - ahead)]
    assert {m.receive_end_ns - m.send_start_ns for m in messages} == {(10 * ahead + 2) * MS + 101_000}


def test_what_cannot_be_told_is_not_paired_and_said(tmp_path: Path) -> None:
    """Each receive ends at once: whether it took the last send or an earlier one, the traces do not say."""
    traces = written(steady_world([4096] * 20), tmp_path)
    alignment = align(traces)
    assert match_p2p(traces, alignment) == [] and alignment.bounds == []
    assert alignment.unpaired == {(0, 1): 20} and alignment.violation_ns == 0
    merged = merge_folder(tmp_path)
    assert (merged.messages, merged.unpaired) == (0, 20)
    assert any("20 messages could not be paired" in line for line in merged.warnings())
    ranks = analyze_ranks(traces)
    assert "20 messages could not be paired" in as_text(ranks)
    assert [rank["unpaired_messages"] for rank in as_json(ranks)] == [20, 20]


def test_two_messages_show_no_order(tmp_path: Path) -> None:
    sender, receiver = SyntheticRank(0, 2), SyntheticRank(1, 2)
    for at_ns in (10 * MS, 90 * MS):
        sender.gloo("send", 1, at_ns, at_ns + MS)
        receiver.gloo("recv", 0, at_ns - 5 * MS, at_ns + MS)
    traces = written([sender, receiver], tmp_path)
    assert match_p2p(traces) == [] and align(traces).unpaired == {(0, 1): 2}


def test_a_label_that_comes_twice_names_no_message(tmp_path: Path) -> None:
    sender, receiver = SyntheticRank(0, 2), SyntheticRank(1, 2)
    for place, label in enumerate(["a", "b", "b", "c"]):
        sender.span(f"message of {label} to rank 1", 10 * MS * place, 10 * MS * place + MS)
        receiver.span(f"message of {label} from rank 0", 10 * MS * place, 10 * MS * place + 2 * MS)
    messages = match_p2p(written([sender, receiver], tmp_path))
    assert [message.waiting_ns + message.transfer_ns for message in messages] == [2 * MS, 2 * MS]


def test_a_label_knows_its_size_in_a_group_of_some_ranks_too(tmp_path: Path) -> None:
    """Where gloo calls rank 2 by its place, 1."""
    sender, receiver = SyntheticRank(0, 3), SyntheticRank(2, 3)
    sender.gloo("send", 1, 2 * MS, 3 * MS, bytes=400)
    sender.span("message of a to rank 2", MS, 4 * MS)
    receiver.span("message of a from rank 0", 0, 5 * MS)
    (message,) = match_p2p(written([sender, receiver], tmp_path))
    assert (message.bytes, message.waiting_ns, message.transfer_ns) == (400, MS, 4 * MS)


def test_labels_are_no_spans_of_the_loop(tmp_path: Path) -> None:
    rank = SyntheticRank(0, 2, "target")
    rank.span("ProfilerStep#1", 0, 10 * MS)
    rank.span("send", MS, 9 * MS)
    rank.span("message of step 1, batch 0 to rank 1", 2 * MS, 8 * MS)
    (analysis,) = analyze_ranks(written([rank], tmp_path))
    assert analysis.host_by_span_ns == {"send": 8 * MS, "": 2 * MS}


def test_on_gpus_the_kernels_count_and_not_the_labels(tmp_path: Path) -> None:
    """On the host both ends of a message are over before anything is sent."""
    sender, receiver = SyntheticRank(0, 2), SyntheticRank(1, 2)
    for number in range(5):
        at_ns = 50 * MS * (number + 1)
        sender.message("send", 1, at_ns, at_ns + MS, sequence=number)
        receiver.message("recv", 0, at_ns - 3 * MS, at_ns + MS, sequence=number)
        sender.span(f"message of {number} to rank 1", at_ns - 20 * MS, at_ns - 19 * MS)
        receiver.span(f"message of {number} from rank 0", at_ns - 20 * MS, at_ns - 19 * MS)
    messages = match_p2p(written([sender, receiver], tmp_path))
    assert [message.waiting_ns for message in messages] == [3 * MS] * 5


@pytest.mark.parametrize("name", [None, "coalesced"])
def test_batched_messages_without_a_direction_are_said_and_not_guessed(tmp_path: Path, name: str | None) -> None:
    """As `batch_isend_irecv` queues them: one kernel for sends and receives, launched after their calls."""
    ranks = [SyntheticRank(rank, 2) for rank in range(2)]
    for rank in ranks:
        for number in range(4):
            at_ns = 50 * MS * (number + 1)
            peer = 1 - rank.rank
            for way, key in (("send", "Dst Rank"), ("recv", "Src Rank")):
                call = {"Collective name": way, key: peer, "Process Group Name": "1", "In msg nelems": 4}
                rank.op("record_param_comms", at_ns - 900_000, at_ns - 800_000, **call)
            args = {} if name is None else {"Collective name": name, "Seq": number, "Process Group Name": "1"}
            rank.kernel("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", at_ns, at_ns + MS, 20, **args)
    traces = written(ranks, tmp_path)
    alignment = align(traces)
    assert match_p2p(traces, alignment) == [] and alignment.unpaired == {}
    for rank in analyze_ranks(traces):
        assert rank.undirected_kernels == 4 and rank.split.parts_ns["p2p"] == 4 * MS
        assert rank.split.parts_ns["collective"] == rank.split.parts_ns["collective_wait"] == 0
    assert "of 4 message kernels of NCCL the trace does not say whether" in as_text(analyze_ranks(traces))
