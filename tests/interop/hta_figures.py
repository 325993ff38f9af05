"""What HolisticTraceAnalysis says of traces: a line of JSON each, run by `test_hta.py` with the package on its path."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from typing import Any


def figures(path: str) -> dict[str, Any]:
    """Busy and idle time of the GPU, and the time of its work by category and name, all in us."""
    from hta.analyzers.breakdown_analysis import BreakdownAnalysis
    from hta.common.trace import Trace

    trace = Trace({0: path}, "/")
    trace.load_traces(include_last_profiler_step=True, use_multiprocessing=False)
    times = BreakdownAnalysis.get_temporal_breakdown(trace, visualize=False).iloc[0]
    table, names = trace.traces[0], trace.symbol_table.get_sym_table()
    totals = table[table["stream"].ne(-1)].groupby(["cat", "name"])["dur"].sum()
    idle_us = float(times["idle_time(us)"])
    return {
        "busy_us": float(times["kernel_time(us)"]) - idle_us,
        "idle_us": idle_us,
        "totals_us": [[names[category], names[name], float(us)] for (category, name), us in totals.items()],
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    for path in sys.argv[1:]:
        try:
            print(json.dumps([path, figures(path)]))
        except Exception as error:
            print(json.dumps([path, f"{type(error).__name__}: {error}"]))
