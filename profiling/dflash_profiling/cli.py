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

    traces = [read_trace(folder)] if folder.is_file() else read_folder(folder)
    ranks = analyze_ranks(traces)
    print(json.dumps(table.as_json(ranks), indent=2) if as_json else table.as_text(ranks))
    if not no_report and (report or folder.is_dir()):
        _write_report(traces, ranks, report or folder / "report.html", asked=report is not None)


def _write_report(traces: Sequence[Trace], ranks: Sequence[RankAnalysis], path: Path, asked: bool) -> None:
    """The page at `path`; where it cannot be written, that is an error only if it was asked for."""
    from dflash_profiling.report import write_report
    from dflash_profiling.trace_file import TraceError

    try:
        write_report(traces, ranks, path)
    except OSError as error:
        reason = f"the report {path} cannot be written: {error.strerror or error}"
        if asked:
            raise TraceError(f"{reason}; give another place to --report") from None
        print(f"warning: {reason}; --report PATH puts it elsewhere", file=sys.stderr)
    else:
        print(f"report: {path}", file=sys.stderr)


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
