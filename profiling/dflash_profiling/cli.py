"""The commands that read traces; `dflash-dist profile` has the same."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Where the time of a torch.distributed run goes.")


@app.callback()
def _options() -> None:
    """Where the time of a torch.distributed run goes."""


@app.command()
def analyze(
    folder: Annotated[Path, typer.Argument(help="Folder of a run's traces, or one trace.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what each rank's time goes to.

    The shares add up to 100 %. Of several traces of a rank the newest is read.
    """
    from dflash_profiling import table
    from dflash_profiling.analysis import analyze_ranks
    from dflash_profiling.kineto import read_folder, read_trace

    traces = [read_trace(folder)] if folder.is_file() else read_folder(folder)
    ranks = analyze_ranks(traces)
    print(json.dumps(table.as_json(ranks), indent=2) if as_json else table.as_text(ranks))


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

    By the plugin torch-tb-profiler. Prints the address.
    """
    from dflash_profiling.board import serve

    serve(folder, port)


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
