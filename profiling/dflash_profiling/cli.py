"""The commands that read traces; `dflash-dist profile` has the same."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dflash_profiling.analysis import RankAnalysis
    from dflash_profiling.kineto import Trace
    from dflash_profiling.rank_stream import RankStream
    from dflash_profiling.throughput import Throughput

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Where the time of a torch.distributed run goes.")


@app.callback()
def _options() -> None:
    """Where the time of a torch.distributed run goes."""


@app.command()
def analyze(
    folder: Annotated[Path, typer.Argument(help="Folder of a run's traces, or one trace.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    report: Annotated[Path | None, typer.Option("--report", help="Where to write the page.")] = None,
    no_report: Annotated[bool, typer.Option("--no-report", help="Write no page.")] = False,
) -> None:
    """Say what each rank's time goes to, and draw it.

    The shares add up to 100 %. Of several traces of a rank the newest is read. The page is FOLDER/report.html; of one
    trace there is one only with --report.
    """
    from dflash_profiling import table
    from dflash_profiling.analysis import analyze_ranks
    from dflash_profiling.kineto import read_folder, read_trace
    from dflash_profiling.rank_stream import read_streams

    traces = [read_trace(folder)] if folder.is_file() else read_folder(folder)
    ranks = analyze_ranks(traces)
    streams = read_streams(traces, ranks)
    print(json.dumps(table.as_json(ranks, streams), indent=2) if as_json else table.as_text(ranks, streams))
    if not no_report and (report or folder.is_dir()):
        _write_report(traces, ranks, streams, report or folder / "report.html", asked=report is not None)


def _write_report(
    traces: Sequence[Trace],
    ranks: Sequence[RankAnalysis],
    streams: Sequence[RankStream | None],
    path: Path,
    asked: bool,
) -> None:
    """The page at `path`; where it cannot be written, that is an error only if it was asked for."""
    from dflash_profiling.report import write_report
    from dflash_profiling.trace_file import TraceError

    try:
        write_report(traces, ranks, path, streams)
    except OSError as error:
        reason = f"the report {path} cannot be written: {error.strerror or error}"
        if asked:
            raise TraceError(f"{reason}; give another place to --report") from None
        print(f"warning: {reason}; --report PATH puts it elsewhere", file=sys.stderr)
    else:
        print(f"report: {path}", file=sys.stderr)


@app.command()
def merge(
    folder: Annotated[Path, typer.Argument(help="Folder of a run's traces.")],
    out: Annotated[Path | None, typer.Option("--out", help="File to write; FOLDER/merged.json.gz by default.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
) -> None:
    """Write all ranks' traces as one, for ui.perfetto.dev.

    On one clock, with an arrow from each send to its receive. Of several traces of a rank the newest is taken.
    """
    from dflash_profiling.merge import merge_folder

    merged = merge_folder(folder, out, overwrite)
    for line in merged.warnings():
        print(f"warning: {line}", file=sys.stderr)
    print(f"{merged.ranks} ranks, {merged.messages} messages; open it at https://ui.perfetto.dev", file=sys.stderr)
    print(merged.path)


@app.command()
def tensorboard(
    folder: Annotated[Path, typer.Argument(help="Folder with traces in it or in folders below it.")],
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65535, help="0: any free one; the first from 6006 on by default.")
    ] = None,
) -> None:
    """Show traces in TensorBoard until Ctrl-C.

    By the plugin torch-tb-profiler, with our analysis as text and scalars. Prints the address.
    """
    from dflash_profiling.board import serve

    serve(folder, port)


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(metavar="A", help="Folder of traces, or of a run with its profile/.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="The same of another window or run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what takes longer in B than in A.

    And what each thing did to the speed.

    Times are those of a step. The speed is that of metrics.jsonl, where the folder lies in a run's.
    """
    from dflash_profiling import compare_table
    from dflash_profiling.compare import compare as compare_ranks

    (ranks_before, speed_before), (ranks_after, speed_after) = _window_of(before), _window_of(after)
    found = compare_ranks(ranks_before, ranks_after, speed_before, speed_after)
    print(json.dumps(compare_table.as_json(found), indent=2) if as_json else compare_table.as_text(found))


def _window_of(place: Path) -> tuple[list[RankAnalysis], Throughput | None]:
    """The ranks of a window, and how fast their run was beside it."""
    from dflash_profiling.analysis import analyze_ranks
    from dflash_profiling.kineto import read_folder, read_trace
    from dflash_profiling.throughput import find_throughput

    if not any(place.glob("*.pt.trace.json*")) and (place / "profile").is_dir():
        place = place / "profile"
    ranks = []
    for rank in analyze_ranks([read_trace(place)] if place.is_file() else read_folder(place)):
        if rank.of_another_window:
            print(
                f"warning: rank {rank.rank} of {place} is left out: its newest trace, {rank.unaligned}", file=sys.stderr
            )
        else:
            ranks.append(rank)
    first = min((rank.first_step for rank in ranks if rank.first_step is not None), default=None)
    last = max((rank.last_step for rank in ranks if rank.last_step is not None), default=None)
    return ranks, find_throughput(place if place.is_dir() else place.parent, first, last)


def main() -> None:
    """Entry point: a trace that cannot be read is one line and exit code 2."""
    from dflash_profiling.trace_file import TraceError

    try:
        app()
    except TraceError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:
        with contextlib.suppress(OSError):
            sys.stdout.close()
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
