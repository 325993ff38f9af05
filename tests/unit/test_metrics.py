"""Metrics are written to real files, read back with TensorBoard's own reader, and shown on a real pseudo-terminal."""

import io
import json
import math
import os
import pty
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_dist.errors import UserError
from dflash_dist.train.metrics import GpuMeter, MetricsWriter, read_metrics, summary, tensorboard_command


def make_row(step: int, **changes: float | None) -> dict[str, float | None]:
    row: dict[str, float | None] = {
        "step": step,
        "loss": 8.0 - step / 100,
        "accuracy": 0.125,
        "tau_estimate": 1.25,
        "tokens": 1000 * step,
        "ktok_s": 2.0,
        "target_wait": 0.25,
        "drafter_wait": 0.5,
        "ring_depth": 1.5,
        "memory_gib": 3.25,
        "learning_rate": 6e-4,
        "grad_norm": 0.75,
        "time_s": 10.0 + 2 * step,
        "target_batches_s": 4.5,
        "drafter_batches_s": 4.25,
    }
    return row | changes


def write_run(folder: Path, steps: range, resume_at: int | None = None, **changes: float) -> str:
    stream = io.StringIO()
    with MetricsWriter(folder, 100, stream) as writer:
        if resume_at is not None:
            writer.truncate_after(resume_at)
        for step in steps:
            writer.write(make_row(step, **changes))
    return stream.getvalue()


def board_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "tb"))
    board.Reload()
    return {tag: [(e.step, e.value) for e in board.Scalars(tag)] for tag in board.Tags()["scalars"]}


def test_rows_are_read_back_as_written(tmp_path: Path) -> None:
    write_run(tmp_path / "run", range(1, 4))
    assert read_metrics(tmp_path / "run") == [make_row(step) for step in (1, 2, 3)]


def test_a_row_is_on_disk_before_the_run_ends(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, 100, io.StringIO()) as writer:
        writer.write(make_row(1))
        assert len(read_metrics(tmp_path)) == 1


def test_numbers_become_json(tmp_path: Path) -> None:
    """No NaN, which is not JSON; scalars of NumPy and torch as numbers."""
    with MetricsWriter(tmp_path, 100, io.StringIO()) as writer:
        writer.write(make_row(1, loss=math.nan, grad_norm=math.inf, tokens=np.int64(7), accuracy=torch.tensor(0.5)))
    (row,) = read_metrics(tmp_path)
    assert (row["loss"], row["grad_norm"], row["tokens"], row["accuracy"]) == (None, None, 7, 0.5)
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_board_holds_the_same_numbers(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, 100, io.StringIO()) as writer:
        writer.write(make_row(1))
        writer.write(make_row(2, val_loss=7.5, loss=None))
    scalars = board_scalars(tmp_path)
    assert set(scalars) == set(make_row(1)) - {"step"} | {"val_loss"}
    assert scalars["loss"] == [(1, pytest.approx(7.99))]
    assert scalars["val_loss"] == [(2, 7.5)]
    assert scalars["tokens"] == [(1, 1000), (2, 2000)]


def test_a_resumed_curve_has_no_doubles(tmp_path: Path) -> None:
    write_run(tmp_path, range(1, 8), memory_gib=1.0)
    write_run(tmp_path, range(6, 9), resume_at=5, memory_gib=2.0)
    expected = [(step, 1.0 if step <= 5 else 2.0) for step in range(1, 9)]
    assert [(row["step"], row["memory_gib"]) for row in read_metrics(tmp_path)] == expected
    assert board_scalars(tmp_path)["memory_gib"] == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "tb"]


@pytest.mark.parametrize("tail", ['{"step": 4, "lo', "\0\0\0\0", '{"step": 4}'], ids=["cut", "zeroed", "no newline"])
def test_a_half_written_last_line_is_tolerated(tmp_path: Path, tail: str) -> None:
    write_run(tmp_path, range(1, 4))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(tail)
    assert [row["step"] for row in read_metrics(tmp_path)][:3] == [1, 2, 3]
    write_run(tmp_path, range(4, 6), resume_at=3)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]


def test_a_damaged_line_inside_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(UserError, match="line 2 of 3"):
        read_metrics(tmp_path)


def test_reading_and_truncating_a_run_without_metrics(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text("")
    assert read_metrics(tmp_path) == []
    assert write_run(tmp_path / "new", range(1, 2), resume_at=0).startswith("step 1/100")


def test_plain_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    first, second = write_run(tmp_path, range(1, 4, 2)).splitlines()
    assert first == (
        "step 1/100  loss 7.990  accuracy 12.5 %  tau ~1.25  2.00 Ktok/s  wait target 25 %  drafter 50 %  "
        "ring 1.5  3.25 GiB  left -"
    )
    assert second.endswith("left 0:03:14")  # 97 steps at 2 s


def test_time_left_counts_only_this_process(tmp_path: Path) -> None:
    write_run(tmp_path, range(1, 51))
    stream = io.StringIO()
    with MetricsWriter(tmp_path, 100, stream) as writer:
        writer.truncate_after(50)
        writer.write(make_row(60, time_s=5.0))
        writer.write(make_row(70, time_s=105.0))
    assert stream.getvalue().endswith("left 0:05:00\n")


def show_on_terminal(folder: Path, rows: list[dict]) -> str:
    """What a terminal receives while the rows are written."""
    main, child = pty.openpty()
    with open(child, "w", encoding="utf-8") as stream, MetricsWriter(folder, 100, stream) as writer:
        for row in rows:
            writer.write(row)
    received = b""
    try:
        while chunk := os.read(main, 65536):
            received += chunk
    except OSError:  # Linux reports a closed terminal so
        pass
    finally:
        os.close(main)
    return received.decode()


def plain(text: str) -> str:
    text = text.replace("\x1b[2K", "\n")  # a line that is wiped and drawn over
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of an ordinary terminal."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    return monkeypatch


def test_panel_shows_every_number_and_updates_in_place(tmp_path: Path, terminal: pytest.MonkeyPatch) -> None:
    rows = [make_row(1, val_loss=7.75), make_row(50, gpu_util=93.0, gpu_power_w=512.4)]
    received = show_on_terminal(tmp_path / "[run]", rows)
    text = plain(received)
    last = text[text.rindex("╭") :]
    numbers = (
        "dflash_dist · [run]; step 50/100; left 0:01:40; loss 7.500; val_loss 7.750; block accuracy 12.5 %; "
        "estimated tau 1.25; Ktok/s 2.00; target batches/s 4.50; drafter batches/s 4.25; target waits 25 %; "
        "drafter waits 50 %; ring depth 1.5; memory 3.25 GiB; GPU 93 %, 512 W"
    )
    for expected in numbers.split("; "):
        assert expected in re.sub(" +", " ", last)
    assert "step 1/100" in text
    assert re.search(r"\x1b\[1A\x1b\[2K", received), "the panel is drawn over, not below, the one before"
    assert received.rindex("\x1b[?25h") > received.rindex("\x1b[?25l"), "the cursor is shown again"
    assert "GPU" not in plain(show_on_terminal(tmp_path / "cpu", rows[:1]))


@pytest.mark.parametrize("columns", [40, 200])
def test_panel_fits_the_terminal(tmp_path: Path, terminal: pytest.MonkeyPatch, columns: int) -> None:
    terminal.setenv("COLUMNS", str(columns))
    text = plain(show_on_terminal(tmp_path, [make_row(50)]))
    assert "50/100" in text
    assert max(map(len, text.splitlines())) <= min(columns, 88)


def test_no_color_is_honoured(tmp_path: Path, terminal: pytest.MonkeyPatch) -> None:
    colour = r"\x1b\[(?:[0-9]+;)*[349][0-9](?:;[0-9]+)*m"
    assert re.search(colour, show_on_terminal(tmp_path / "a", [make_row(50)]))
    terminal.setenv("NO_COLOR", "1")
    assert not re.search(colour, show_on_terminal(tmp_path / "b", [make_row(50)]))


def test_dumb_terminal_gets_plain_lines(tmp_path: Path, terminal: pytest.MonkeyPatch) -> None:
    terminal.setenv("TERM", "dumb")
    received = show_on_terminal(tmp_path, [make_row(1)])
    assert received.startswith("step 1/100  loss") and "\x1b" not in received


def test_terminal_is_given_back_after_an_error(tmp_path: Path, terminal: pytest.MonkeyPatch) -> None:
    class Watched(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Watched()
    with pytest.raises(ZeroDivisionError), MetricsWriter(tmp_path, 100, stream) as writer:
        writer.write(make_row(1))
        raise ZeroDivisionError
    received = stream.getvalue()
    assert received.rindex("\x1b[?25h") > received.rindex("\x1b[?25l")


EVALUATION = {
    "tau_pooled": 1.834,
    "prompts": 8,
    "greedy_equal": 8,
    "tokens_per_s": 4.2,
    "plain_tokens_per_s": 26.1,
    "speedup": 0.161,
}


def test_summary_says_how_much_how_good_and_where() -> None:
    rows = [make_row(step, loss=float(step)) for step in range(1, 41)]
    rows[9]["val_loss"], rows[39]["val_loss"] = 6.5, 5.5
    rows[0]["loss"] = None
    phases = {"prepare": 1.25, "train": 80.0}
    text = summary(rows, EVALUATION, phases, Path("runs/a"), Path("runs/a/export"), Path("c"))
    assert text.splitlines() == [
        "run a: 40 steps, 40,000 tokens at 2.00 Ktok/s",
        "  loss         3.000 -> 39.000",  # means of 2, 3, 4 and of 38, 39, 40: a tenth of the 39 measured
        "  val_loss     6.500 -> 5.500",
        "  tau          1.83 (1.00 without a drafter), 4.2 tok/s against 26.1 plain (0.16x), "
        "8 of 8 outputs equal plain decoding",
        "  seconds      prepare 1.2, train 80.0",
        "  run folder   runs/a",
        "  checkpoint   c",
        "  export       runs/a/export",
        f"  TensorBoard  {sys.executable} -m tensorboard.main --logdir runs/a/tb",
    ]


def test_the_tensorboard_command_bears_folders_with_blanks() -> None:
    assert tensorboard_command(Path("a b/tb")).endswith("--logdir 'a b/tb'")


def test_summary_of_sampled_answers() -> None:
    sampled = EVALUATION | {"greedy_equal": None}
    text = summary([make_row(1)], sampled, {}, Path("a"))
    assert "tau          1.83 (1.00 without a drafter), 4.2 tok/s against 26.1 plain (0.16x)\n" in text
    text = summary([make_row(1)], sampled | {"speedup": None, "plain_tokens_per_s": None}, {}, Path("a"))
    assert "tau          1.83 (1.00 without a drafter)\n" in text


def test_summary_where_no_answer_had_a_second_token() -> None:
    text = summary([make_row(1)], {"tau_pooled": None, "prompts": 2}, {}, Path("a"))
    assert "tau          not measured: no answer had a second token" in text


def test_summary_speed_is_weighted_by_tokens() -> None:
    rows = [make_row(1, tokens=1000, ktok_s=1.0), make_row(2, tokens=4000, ktok_s=1.5)]  # 1 s and 2 s
    assert "4,000 tokens at 1.33 Ktok/s" in summary(rows, None, {}, Path("a"))


def test_summary_of_a_run_without_rows() -> None:
    text = summary([], None, {}, Path("runs/a"))
    assert "no step was logged" in text and "not measured" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_gpu_meter_without_a_gpu_reads_nothing() -> None:
    assert GpuMeter().read() == {"gpu_util": None, "gpu_power_w": None}
