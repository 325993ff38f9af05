"""A trace window asked of a run that goes on."""

import gzip
import json
import signal
from pathlib import Path

import pytest

from tests.ranks.cli import Running, dflash, metrics
from tests.tiny import make_chats, make_config, make_target


def steps_in(trace: Path) -> list[int]:
    """The steps that a trace has a range of."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = [e["name"] for e in events if e.get("cat") == "user_annotation"]
    return sorted({int(name.removeprefix("ProfilerStep#")) for name in names if name.startswith("ProfilerStep#")})


def check_stream(path: Path, peers: set[str], is_drafter: bool) -> None:
    """Each line tells what was waited for since the one before, by peer; a drafter's also what waits in its rings.

    And the loop's step, once it has begun.
    """
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    last = lines[-1]
    steps = [line["step"] for line in lines if "step" in line]
    assert steps == sorted(steps) and steps[-1] > steps[0] > 0
    assert last["wait_ms_of_rank"].keys() == peers, last
    waited_ms = sum(line["wait_ms"] for line in lines)
    assert 0 < waited_ms < 1000 * (last["time_s"] - lines[0]["time_s"] + 1)
    assert all(line["wait_ms"] == pytest.approx(sum(line["wait_ms_of_rank"].values()), abs=0.01) for line in lines)
    assert ("ring_depth" in last) == is_drafter
    if is_drafter:
        assert last["ring_depth_of_rank"].keys() == peers and last["ring_depth"] >= 0


def test_a_running_run_records_windows_when_asked(tmp_path: Path) -> None:
    """Every rank the same steps, however far ahead targets are; the losses are those of an undisturbed run."""
    config = make_config(tmp_path, make_target("qwen3", tmp_path / "target"), make_chats(tmp_path / "chats.jsonl"))
    folder = tmp_path / "runs/run"
    asked = ("profile", "run", "--run", str(folder))
    steps = 2000  # far more than are waited for
    overrides = ["train.epochs=1000", f"train.max_steps={steps}", "train.validate_every=3"]
    running = Running(config, "2-1", "run", *overrides)
    running.wait_for_step(5)
    seen: set[Path] = set()
    for count, stacks in ((2, ()), (3, ("--stacks",))):
        before = len(metrics(config, "run"))
        done = dflash(*asked, "--steps", str(count), *stacks)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == str(folder / "profile") and "of 3 ranks are recorded" in done.stderr
        assert " of those before " in done.stderr
        traces = set((folder / "profile").glob("*.gz")) - seen
        seen |= traces
        of_rank = {path.name.split(".")[0]: steps_in(path) for path in traces}
        first = of_rank["rank2"][0]
        assert of_rank["rank2"] == list(range(first, first + count)) and first > before
        targets = sorted({step for name in ("rank0", "rank1") for step in of_rank[name]})
        assert targets == of_rank["rank2"]  # between them they run every batch of every step
    stacked = {path.name.split(".")[0]: steps_in(path) for path in (folder / "profile/stacks").glob("*.gz")}
    assert stacked["rank2"] == [first + count + 1]
    assert all(steps == stacked["rank2"] for steps in stacked.values())  # a target may have no batch in that step
    analyzed = dflash("profile", "analyze", str(folder / "profile"), "--json")
    assert analyzed.returncode == 0, analyzed.stderr
    for number, rank in enumerate(json.loads(analyzed.stdout)):
        assert (rank["rank"], rank["role"]) == (number, "drafter" if number == 2 else "target")
        assert sum(rank["parts_ns"].values()) == rank["window_ns"] and rank["has_gpu_rows"] is False
        assert sum(rank["parts_percent"].values()) == pytest.approx(100, abs=1e-6)
        assert rank["parts_percent"]["compute"] > 10 and rank["parts_percent"]["unexplained"] < 60, rank
        assert sum(rank["compute_by_span_ns"].values()) == rank["parts_ns"]["compute"]
        assert {"backward", "optimizer"} <= rank["compute_by_span_ns"].keys() or number < 2
        assert rank["step_slowdown"] > 0 and rank["stream"]["facts"]["waits for other ranks, mean"][0] > 0
    refused = dflash(*asked, "--steps", str(steps))
    assert refused.returncode == 2 and "lower --steps" in refused.stderr
    running.send(signal.SIGINT)
    code, stderr = running.end()
    assert code == 130 and "warning" not in stderr, stderr
    assert not (folder / "profile/request.json").exists()
    for rank, peers in enumerate(({"2"}, {"2"}, {"0", "1"})):
        check_stream(folder / f"profile/stream/rank{rank}.jsonl", peers, is_drafter=rank == 2)
    late = dflash(*asked)
    assert late.returncode == 2 and "nobody trains run now" in late.stderr and late.stderr.count("\n") == 1
