"""What a run's traces say of its messages."""

import time
from pathlib import Path

from dflash_profiling.clock import align, match_p2p
from dflash_profiling.kineto import Trace, read_folder
from dflash_profiling.stream_facts import read_stream, stream_path
from tests.ranks.cli import train
from tests.tiny import make_chats, make_config, make_target


def name_of(trace: Trace, place: int) -> str:
    return trace.names[trace.slices.name[place]]


def test_each_batch_is_paired_with_itself(tmp_path: Path) -> None:
    """However many were under way as the windows began: all batches that both ranks named, and no other pair."""
    config = make_config(tmp_path, make_target("qwen3", tmp_path / "target"), make_chats(tmp_path / "chats.jsonl"))
    train(config, "1-1", "run", "train.max_steps=9", "profile.steps=4", "profile.start_step=4")
    traces = read_folder(tmp_path / "runs" / "run" / "profile")
    alignment = align(traces)
    messages = match_p2p(traces, alignment)
    pairs = {
        (name_of(traces[m.source], m.send_slice), name_of(traces[m.destination], m.receive_slice)) for m in messages
    }
    sent, received = ({name for name in trace.names if name.startswith("message of ")} for trace in traces)
    common = {(name, name.replace("to rank 1", "from rank 0")) for name in sent}
    assert pairs == {pair for pair in common if pair[1] in received}
    assert len(pairs) == len(messages) >= 4 * 4  # batches of a step, all of its four
    assert alignment.unpaired == {} and alignment.violation_ns == 0
    for message in messages:
        assert message.receive_end_ns >= message.send_start_ns
    now_s = time.time()
    for rank in range(2):
        rows = read_stream(stream_path(tmp_path / "runs" / "run" / "profile", rank))
        assert rows and all(now_s - 600 < row["time_s"] <= now_s for row in rows)
