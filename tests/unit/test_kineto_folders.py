"""Of a folder each rank's newest trace is read, by other processes where they are large."""

from pathlib import Path

import pytest

from dflash_profiling import kineto
from dflash_profiling.kineto import TraceError, read_folder
from tests.synthetic_traces import SyntheticRank, messages_world
from tests.unit.test_kineto import write


def test_newest_window_of_each_rank_is_read(tmp_path: Path) -> None:
    for stamp in (9, 100, 20):
        for rank in (10, 2):
            trace = SyntheticRank(rank, world_size=12)
            trace.span(f"window {stamp}", 0, 10)
            trace.write(tmp_path, stamp)
    (tmp_path / "rank2.200.part.gz").write_bytes(b"being written")
    (tmp_path / "notes.txt").write_text("")
    traces = read_folder(tmp_path)
    assert [(trace.rank, trace.names) for trace in traces] == [(2, ["window 100"]), (10, ["window 100"])]


def test_of_two_runs_in_a_folder_the_newer_is_read(tmp_path: Path) -> None:
    """torch names files by host and process unless told."""
    for stamp, worker in ((100, "host_77"), (200, "host_33")):
        trace = SyntheticRank(0)
        trace.span(worker, 0, 10)
        trace.write(tmp_path, stamp).rename(tmp_path / f"{worker}.{stamp}.pt.trace.json.gz")
    (trace,) = read_folder(tmp_path)
    assert trace.names == ["host_33"]


def test_folders_without_traces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"holds no trace .*: record some first"):
        read_folder(tmp_path)
    with pytest.raises(TraceError, match="does not exist: give the folder"):
        read_folder(tmp_path / "absent")
    write(tmp_path / "file", b"")
    with pytest.raises(TraceError, match="is no folder: give the folder"):
        read_folder(tmp_path / "file")
    (tmp_path / "traces").mkdir()
    SyntheticRank(0).write(tmp_path / "traces")
    with pytest.raises(TraceError, match=r": give .*/traces$"):
        read_folder(tmp_path)


def test_a_runs_folder_stands_for_its_profile(tmp_path: Path) -> None:
    (tmp_path / "profile").mkdir()
    rank = SyntheticRank(0)
    rank.span("forward", 0, 10)
    rank.write(tmp_path / "profile")
    write(tmp_path / "summary.json", b"{}")
    (trace,) = read_folder(tmp_path)
    assert trace.path.parent == tmp_path / "profile"


def test_files_that_export_chrome_trace_was_told_to_name_otherwise(tmp_path: Path) -> None:
    for number, name in enumerate(("trace_rank0.json.gz", "sampled_rank-1.json.gz")):
        rank = SyntheticRank(number)
        rank.span("forward", 0, 10)
        rank.write(tmp_path).rename(tmp_path / name)
    write(tmp_path / "config.json", b"{}")
    write(tmp_path / "merged.json.gz", b"")
    assert [trace.rank for trace in read_folder(tmp_path)] == [0, 1]


def test_other_processes_read_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in messages_world([(0, 2), (1, 2)], {0: 0, 1: 0, 2: 0})[0]:
        rank.write(tmp_path)
    here = read_folder(tmp_path)
    monkeypatch.setattr(kineto, "_ALONE_BYTES", 0)
    for mine, theirs in zip(here, read_folder(tmp_path), strict=True):
        assert mine.communication == theirs.communication and mine.names == theirs.names
        assert (mine.slices.start_ns == theirs.slices.start_ns).all()
    write(tmp_path / "rank3.1.pt.trace.json", b"")
    with pytest.raises(TraceError, match=r"rank3.* is empty.*, or take it out of the folder to read the other 3$"):
        read_folder(tmp_path)
