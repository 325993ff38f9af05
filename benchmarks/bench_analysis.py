"""What `dflash-profile analyze` takes for the traces of many ranks, with HolisticTraceAnalysis beside it.

    PYTHONPATH=. python benchmarks/bench_analysis.py [--ranks N] [--megabytes M] [--hta FOLDER]

Each rank's trace has so many megabytes of raw JSON. `--hta`: where `pip install --no-deps --target FOLDER` has put
HolisticTraceAnalysis, 'pandas<3', plotly, networkx, narwhals, python-dateutil, pytz, tzdata and six; it loads the same
files. A line for each: seconds, processor seconds, and the most memory of all its processes together.
"""

from __future__ import annotations

import argparse
import gzip
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.report_world import write_world

SAMPLE_EVENTS = 20_000
HTA = "import sys; from hta.trace_analysis import TraceAnalysis; TraceAnalysis(trace_dir=sys.argv[1])"


def raw_megabytes(path: Path) -> float:
    """The size of a trace's JSON."""
    with gzip.open(path) as file:
        return sum(len(block) for block in iter(lambda: file.read(2**20), b"")) / 1e6


def make_traces(folder: Path, ranks: int, megabytes: float) -> None:
    """Traces of ranks that never ran, of about that size."""
    with tempfile.TemporaryDirectory() as sample:
        write_world(Path(sample), 1, events=SAMPLE_EVENTS)
        events_per_megabyte = SAMPLE_EVENTS / raw_megabytes(next(Path(sample).glob("*.gz")))
    write_world(folder, ranks, steps=10, events=int(megabytes * events_per_megabyte))
    sizes = [raw_megabytes(path) for path in sorted(folder.glob("*.gz"))]
    print(f"{len(sizes)} traces of {min(sizes):.0f} to {max(sizes):.0f} MB, {os.cpu_count()} cores", flush=True)


def measure(name: str, command: list[str], environment: dict[str, str]) -> None:
    """Runs the command and prints its line."""
    began_s, cpu_s, most_bytes = time.perf_counter(), 0.0, 0
    with subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.DEVNULL) as process:
        whole = psutil.Process(process.pid)
        while process.poll() is None:
            try:
                tree = [whole, *whole.children(recursive=True)]
                most_bytes = max(most_bytes, sum(p.memory_info().rss for p in tree))
                times = [p.cpu_times() for p in tree]
                cpu_s = max(cpu_s, sum(t.user + t.system for t in times) + times[0].children_user)
            except psutil.NoSuchProcess:
                pass
            time.sleep(0.5)  # more often it would take the processor from what it measures
    seconds = time.perf_counter() - began_s
    assert process.returncode == 0, f"{name} ended with {process.returncode}"
    print(f"{name:<24} {seconds:6.1f} s {cpu_s:6.1f} s of processor time {most_bytes / 2**30:6.2f} GiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--megabytes", type=float, default=100.0)
    parser.add_argument("--hta", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_traces(Path(folder), options.ranks, options.megabytes)
        measure("analyze", [str(Path(sys.executable).with_name("dflash-profile")), "analyze", folder], {})
        if options.hta:
            measure("HolisticTraceAnalysis", [sys.executable, "-c", HTA, folder], {"PYTHONPATH": str(options.hta)})


if __name__ == "__main__":
    main()
