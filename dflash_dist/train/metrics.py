"""What a run reports: metrics.jsonl, TensorBoard, the live display and the closing summary."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

from dflash_dist.errors import UserError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

METRICS_FILE = "metrics.jsonl"
REFRESH_S = 0.2


class GpuMeter:
    """Reads utilisation and power of one CUDA device; gives None for both where they cannot be had."""

    def __init__(self, device: int | None = None) -> None:
        self.device = device
        self._works = True

    def read(self) -> dict[str, float | None]:
        """`gpu_util` in percent and `gpu_power_w` in watts. Never raises."""
        nothing: dict[str, float | None] = {"gpu_util": None, "gpu_power_w": None}
        if not self._works:
            return nothing
        import torch

        try:
            if not torch.cuda.is_available():
                raise RuntimeError("no CUDA device")
            # torch asks NVML, and maps CUDA_VISIBLE_DEVICES.
            utilisation, power_mw = torch.cuda.utilization(self.device), torch.cuda.power_draw(self.device)
        except Exception:
            self._works = False
            return nothing
        return {"gpu_util": float(utilisation), "gpu_power_w": power_mw / 1000}


class MetricsWriter:
    """Writes one rank's rows to metrics.jsonl and TensorBoard, and shows them: live on a terminal, else a line a row.

    `total_steps` is the number of the run's last step. Use it as a context manager, so that the terminal is given back
    whatever happens.
    """

    def __init__(self, run_folder: Path, total_steps: int, stream: TextIO | None = None) -> None:
        stream = sys.stderr if stream is None else stream
        self.run_folder = run_folder
        self._purge_step: int | None = None
        self._file: IO[str] | None = None
        self._board: Any = None
        live = stream.isatty() and os.environ.get("TERM") != "dumb"
        shown: type[_Lines | _Panel] = _Panel if live else _Lines
        self._display = shown(run_folder.name, total_steps, stream)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def truncate_after(self, step: int) -> None:
        """Remove the rows past `step`, from which the run resumes, so that the curve has no doubles; before any write.

        A half-written last line goes too. UserError where another line is damaged.
        """
        assert self._file is None, "truncate_after comes before the first write"
        self._purge_step = step + 1
        path = self.run_folder / METRICS_FILE
        if not path.exists():
            return
        kept = [row for row in read_metrics(self.run_folder) if row["step"] <= step]
        part = path.with_suffix(".part")
        part.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        os.replace(part, path)

    def write(self, row: Mapping[str, float | None]) -> None:
        """Append the row, which holds at least `step`; a number that is not finite is written as null.

        UserError where the disk is full.
        """
        plain = {key: _finite(value) for key, value in row.items()}
        with self._full_disk_told():
            if self._file is None:
                self.run_folder.mkdir(parents=True, exist_ok=True)
                self._file = (self.run_folder / METRICS_FILE).open("a", encoding="utf-8")
            self._file.write(json.dumps(plain, allow_nan=False) + "\n")
            self._file.flush()
            self._write_board(plain)
        self._display.show(plain)

    def close(self) -> None:
        """Stop the display and flush both files, UserError where the disk is full; a second call does nothing."""
        self._display.close()
        file, board = self._file, self._board
        self._file = self._board = None
        with self._full_disk_told():
            if file is not None:
                file.close()
            if board is not None:
                board.close()

    @contextlib.contextmanager
    def _full_disk_told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"metrics in {self.run_folder} cannot be written: {error}; free some space and start again to resume"
            ) from None

    def _write_board(self, row: Mapping[str, float | None]) -> None:
        if self._board is None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self.run_folder / "tb"), purge_step=self._purge_step, flush_secs=10)
            self._purge_step = None
        for key, value in row.items():
            if key != "step" and value is not None:
                self._board.add_scalar(key, value, row["step"])


def read_metrics(run_folder: Path) -> list[dict[str, Any]]:
    """The rows of the run's metrics.jsonl, without a last line that was cut; empty where there is no such file.

    UserError where a line before the last is no row.
    """
    path = run_folder / METRICS_FILE
    if not path.exists():
        return []
    lines = path.read_bytes().rstrip(b"\n").split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and "step" in row:
            rows.append(row)
        elif number < len(lines):
            raise UserError(f"{path}: line {number} of {len(lines)} is not a row of metrics; delete that line")
    return rows


def summary(
    rows: Sequence[Mapping[str, Any]],
    evaluation: Mapping[str, Any] | None,
    phases_s: Mapping[str, float],
    run_folder: Path,
    export_folder: Path | None = None,
    checkpoint: Path | None = None,
) -> str:
    """The closing lines of a run: how much, how fast, how good, how long and where everything lies.

    `rows` are those of metrics.jsonl, `evaluation` is what `evaluate` returned, `phases_s` the seconds of each phase.
    """
    lines = [f"run {run_folder.name}: {_amount(rows)}"]
    for key in ("loss", "val_loss"):
        if ends := _ends(rows, key):
            lines.append(f"  {key:<12} {ends[0]:.3f} -> {ends[1]:.3f}")
    lines.append(f"  {'tau':<12} {_quality(evaluation)}")
    if phases_s:
        lines.append(f"  {'seconds':<12} " + ", ".join(f"{name} {value:.1f}" for name, value in phases_s.items()))
    lines.append(f"  {'run folder':<12} {run_folder}")
    if checkpoint is not None:
        lines.append(f"  {'checkpoint':<12} {checkpoint}")
    if export_folder is not None:
        lines.append(f"  {'export':<12} {export_folder}")
    lines.append(f"  {'TensorBoard':<12} {tensorboard_command(run_folder / 'tb')}")
    return "\n".join(lines)


def tensorboard_command(folder: Path) -> str:
    """What starts TensorBoard on `folder`, whether or not this Python's environment is on the PATH."""
    return shlex.join([sys.executable, "-m", "tensorboard.main", "--logdir", str(folder)])


def _quality(evaluation: Mapping[str, Any] | None) -> str:
    """Tau and speed side by side: a drafter can raise the one and still cost more than it saves."""
    if evaluation is None:
        return "not measured"
    if evaluation["tau_pooled"] is None:
        return "not measured: no answer had a second token"
    parts = [f"{evaluation['tau_pooled']:.2f} (1.00 without a drafter)"]
    if evaluation["speedup"] is not None:  # plain decoding that samples may give no second token
        plain, times = evaluation["plain_tokens_per_s"], evaluation["speedup"]
        parts.append(f"{evaluation['tokens_per_s']:.1f} tok/s against {plain:.1f} plain ({times:.2f}x)")
    if evaluation["greedy_equal"] is not None:
        parts.append(f"{evaluation['greedy_equal']} of {evaluation['prompts']} outputs equal plain decoding")
    return ", ".join(parts)


def _amount(rows: Sequence[Mapping[str, Any]]) -> str:
    """Steps, tokens and the mean speed; the time of a resumed run's pauses does not count."""
    if not rows:
        return "no step was logged"
    busy_s, counted_tokens, before = 0.0, 0, 0
    for row in rows:
        tokens, ktok_s = row.get("tokens") or before, row.get("ktok_s")
        if ktok_s:
            busy_s += (tokens - before) / (1000 * ktok_s)
            counted_tokens += tokens - before
        before = tokens
    speed = f" at {counted_tokens / 1000 / busy_s:,.2f} Ktok/s" if busy_s else ""
    return f"{rows[-1]['step']:,} steps, {before:,} tokens{speed}"


def _ends(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[float, float] | None:
    """Means of the first and the last tenth (at least one) of the rows that hold `key`."""
    values = [row[key] for row in rows if row.get(key) is not None]
    if not values:
        return None
    count = max(1, len(values) // 10)
    return sum(values[:count]) / count, sum(values[-count:]) / count


def _finite(value: Any) -> float | None:
    """A Python number, from a scalar of NumPy or torch too; JSON has no NaN."""
    if hasattr(value, "item"):
        value = value.item()
    return None if value is None or not math.isfinite(value) else value


def _shown(value: float | None, form: str, unit: str = "", scale: float = 1.0) -> str:
    """The number and its unit, or a dash where it is missing."""
    return "-" if value is None else f"{value * scale:{form}}{unit}"


class _TimeLeft:
    """Time left at the mean rate of the steps that this process has logged; the first row starts the clock."""

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self._first: tuple[float, float] | None = None

    def text(self, row: Mapping[str, float | None]) -> str:
        step, time_s = row["step"], row.get("time_s")
        if step is None or time_s is None:
            return "-"
        if self._first is None:
            self._first = (step, time_s)
        steps, seconds = step - self._first[0], time_s - self._first[1]
        if steps <= 0:
            return "-"
        left_s = round(max(0, self.total_steps - step) * seconds / steps)
        return f"{left_s // 3600}:{left_s // 60 % 60:02}:{left_s % 60:02}"


class _Lines:
    """One plain line a row."""

    def __init__(self, run: str, total_steps: int, stream: TextIO) -> None:
        self.total_steps = total_steps
        self.stream = stream
        self._left = _TimeLeft(total_steps)

    def show(self, row: Mapping[str, float | None]) -> None:
        get = row.get
        parts = [
            f"step {get('step')}/{self.total_steps}",
            f"loss {_shown(get('loss'), '.3f')}",
            f"accuracy {_shown(get('accuracy'), '.1f', ' %', 100)}",
            f"tau ~{_shown(get('tau_estimate'), '.2f')}",
            f"{_shown(get('ktok_s'), '.2f')} Ktok/s",
            f"wait target {_shown(get('target_wait'), '.0f', ' %', 100)}",
            f"drafter {_shown(get('drafter_wait'), '.0f', ' %', 100)}",
            f"ring {_shown(get('ring_depth'), '.1f')}",
            _shown(get("memory_gib"), ".2f", " GiB"),
            f"left {self._left.text(row)}",
        ]
        if get("val_loss") is not None:
            parts.insert(2, f"val_loss {_shown(get('val_loss'), '.3f')}")
        print("  ".join(parts), file=self.stream, flush=True)

    def close(self) -> None:
        """Nothing is held."""


class _Panel:
    """A panel that is drawn over in place; it appears with the first row and stays when closed."""

    def __init__(self, run: str, total_steps: int, stream: TextIO) -> None:
        from rich.console import Console

        self.run = run
        self.total_steps = total_steps
        self._console = Console(file=stream, force_terminal=True)
        self._left = _TimeLeft(total_steps)
        self._live: Live | None = None
        self._drawn_s = 0.0
        self._val_loss: float | None = None

    def show(self, row: Mapping[str, float | None]) -> None:
        from rich.live import Live

        panel = self._panel(row)
        if self._live is None:
            # Refreshing here instead of in a thread keeps the display out of the loops' way; stdout is for data.
            self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False)
            self._live.start()
        now_s = time.monotonic()
        due = now_s - self._drawn_s >= REFRESH_S
        self._live.update(panel, refresh=due)
        if due:
            self._drawn_s = now_s

    def close(self) -> None:
        if self._live is not None:
            self._live.refresh()
            self._live.stop()
            self._live = None

    def _panel(self, row: Mapping[str, float | None]) -> RenderableType:
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        get = row.get
        step = get("step") or 0
        if get("val_loss") is not None:
            self._val_loss = get("val_loss")
        bar = Table.grid(padding=(0, 2), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_row(
            f"step {step}/{self.total_steps}",
            ProgressBar(total=self.total_steps, completed=step),
            f"left {self._left.text(row)}",
        )
        numbers = Table.grid(padding=(0, 3))
        gpu = f"{_shown(get('gpu_util'), '.0f', ' %')}, {_shown(get('gpu_power_w'), '.0f', ' W')}"
        cells = [
            ("loss", _shown(get("loss"), ".3f")),
            ("val_loss", _shown(self._val_loss, ".3f")),
            ("block accuracy", _shown(get("accuracy"), ".1f", " %", 100)),
            ("estimated tau", _shown(get("tau_estimate"), ".2f")),
            ("Ktok/s", _shown(get("ktok_s"), ".2f")),
            ("ring depth", _shown(get("ring_depth"), ".1f")),
            ("target batches/s", _shown(get("target_batches_s"), ".2f")),
            ("target waits", _shown(get("target_wait"), ".0f", " %", 100)),
            ("drafter batches/s", _shown(get("drafter_batches_s"), ".2f")),
            ("drafter waits", _shown(get("drafter_wait"), ".0f", " %", 100)),
            ("memory", _shown(get("memory_gib"), ".2f", " GiB")),
            *([("GPU", gpu)] if get("gpu_util") is not None else []),
        ]
        for (left, left_text), (right, right_text) in zip(cells[::2], [*cells[1::2], ("", "")], strict=False):
            numbers.add_row(left, f"[bold]{left_text}[/]", right, f"[bold]{right_text}[/]")
        whole = Table.grid(expand=True)
        whole.add_row(bar)
        whole.add_row(numbers)
        title = Text(f"dflash_dist · {self.run}")  # as it is, where a run's name would pass for markup
        return Panel(whole, title=title, title_align="left", width=min(88, self._console.width))
