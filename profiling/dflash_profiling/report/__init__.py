"""A self-contained HTML page of what `analysis` found: no request leaves it, and it opens from disk."""

from dflash_profiling.report.page import render, write_report

__all__ = ["render", "write_report"]
