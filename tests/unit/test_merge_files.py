"""Which files a merge reads and writes, and what it refuses."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_profiling.merge import merge_folder
from dflash_profiling.trace_file import TraceError
from tests.synthetic_traces import SyntheticRank, messages_world
from tests.unit.test_merge import MS, PAIRS, merged_document


def other_files(folder: Path) -> None:
    (folder / "report.html").write_text("<html>")
    (folder / "rank0.7.part.gz").write_bytes(b"\x1f\x8b")
    (folder / "notes.json").write_text("{}")
    (folder / "sub").mkdir()


def test_a_folder_with_other_files_in_it(tmp_path: Path) -> None:
    other_files(tmp_path)
    with pytest.raises(TraceError, match="holds no trace"):
        merge_folder(tmp_path)
    ranks, truth = messages_world(PAIRS["1-1"], {0: 0, 1: MS}, count=3)
    for rank in ranks:
        rank.write(tmp_path, stamp=5)
    old = SyntheticRank(0)
    old.op("old", 0, 1000)
    old.write(tmp_path, stamp=4)
    merged = merge_folder(tmp_path)
    assert merged.messages == len(truth)
    assert "old" not in {event["name"] for event in merged_document(merged)["traceEvents"]}
    assert merge_folder(tmp_path, overwrite=True).messages == len(truth)  # what was merged is not read as a trace


@pytest.mark.parametrize("content", [b"", b'{"traceEvents": [', b"\x1f\x8b\x08", b"{}"])
def test_a_broken_trace_is_named_and_nothing_is_written(tmp_path: Path, content: bytes) -> None:
    ranks, _ = messages_world(PAIRS["1-1"], {0: 0, 1: 0}, count=3)
    for rank in ranks:
        rank.write(tmp_path)
    (tmp_path / "rank2.1.pt.trace.json").write_bytes(content)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(TraceError, match=r"rank2\.1\.pt\.trace\.json"):
        merge_folder(tmp_path)
    assert sorted(tmp_path.iterdir()) == before


def test_the_file_is_whole_or_absent_and_never_overwritten_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces, out = tmp_path / "traces", tmp_path / "out.json.gz"
    traces.mkdir()
    rank = SyntheticRank(0)
    rank.op("aten::add", 0, 1000)
    rank.write(traces)
    out.write_text("mine")
    with pytest.raises(TraceError, match="exists already: give --overwrite"):
        merge_folder(traces, out)
    assert out.read_text() == "mine"
    for name in ("out.json", "rank7.1.pt.trace.json.gz"):
        with pytest.raises(TraceError, match="cannot be the merged trace's name"):
            merge_folder(traces, tmp_path / name)
    with pytest.raises(TraceError, match="cannot be written"):
        merge_folder(traces, tmp_path / "absent" / "out.json.gz")
    with pytest.raises(TraceError, match="exists already"):
        (tmp_path / "folder.gz").mkdir()
        merge_folder(traces, tmp_path / "folder.gz", overwrite=True)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("dflash_profiling.merge.match_p2p", full)
        with pytest.raises(TraceError, match="No space left on device"):
            merge_folder(traces, out, overwrite=True)
    assert out.read_text() == "mine" and sorted(path.name for path in tmp_path.iterdir())[1] == "out.json.gz"
    merged_document(merge_folder(traces, out, overwrite=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.gz", "out.json.gz", "traces"]


def test_a_file_that_came_to_be_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = SyntheticRank(0)
    rank.op("aten::add", 0, 1000)
    rank.write(tmp_path)
    out = tmp_path / "merged.json.gz"
    monkeypatch.setattr("dflash_profiling.merge.match_p2p", lambda *_: out.write_text("theirs") and [])
    with pytest.raises(TraceError, match="exists already"):
        merge_folder(tmp_path)
    assert out.read_text() == "theirs" and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("arguments", [["merge"], ["merge", "--out", "x.json.gz"]])
def test_both_commands_refuse_alike(tmp_path: Path, arguments: list[str]) -> None:
    ours, theirs = (
        subprocess.run(
            [sys.executable, "-m", *command, *arguments, str(tmp_path)], capture_output=True, text=True, check=False
        )
        for command in (["dflash_profiling.cli"], ["dflash_dist", "profile"])
    )
    assert ours.returncode == theirs.returncode == 2
    assert ours.stderr == theirs.stderr and ours.stderr.count("\n") == 1 and "holds no trace" in ours.stderr
