"""The analysis and the streams of a folder of traces as TensorBoard's own text and scalars.

One run of TensorBoard a rank, so that its colours are ranks, and one for the text.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflash_profiling.analysis import RankAnalysis, analyze_ranks
from dflash_profiling.kineto import read_folder
from dflash_profiling.rank_stream import read_streams
from dflash_profiling.stream_facts import curves_of
from dflash_profiling.table import as_markdown, rank_title, tenths

MAX_POINTS = 1000
"""Of a curve: what TensorBoard keeps of one."""
_DT_STRING = 7


def write_analysis(traces: Path, out: Path) -> None:
    """Writes event files below `out`, which need not exist; TraceError where the traces cannot be read."""
    found = read_folder(traces)
    ranks = analyze_ranks(found)
    streams = read_streams(found, ranks)
    _write(out, [_text("profile", as_markdown(ranks, streams))])
    for rank, stream in zip(ranks, streams, strict=True):
        _write(out / rank_title(rank), [*_shares(rank, len(ranks)), *_curves(stream.rows if stream else [])])


def _shares(rank: RankAnalysis, of: int) -> Iterator[Any]:
    """What the rank's window went to, a point each."""
    window_ns = rank.split.window_ns or 1
    for part, share in tenths(rank.split.parts_ns).items():
        yield _scalar(f"share of window, %/{part.replace('_', ' ')}", share)
    for peer, ns in rank.waits_for_ns.items() if of > 1 else ():
        yield _scalar(f"waits for, % of window/rank {peer}", 100 * ns / window_ns)
    if rank.step_slowdown is not None:
        yield _scalar("a step, of those before the window", rank.step_slowdown)


def _curves(rows: Sequence[dict[str, Any]]) -> Iterator[Any]:
    for curve in curves_of(rows):
        known = np.flatnonzero(~np.isnan(curve.values))
        chosen = known[np.unique(np.linspace(0, len(known) - 1, min(len(known), MAX_POINTS)).astype(np.int64))]
        tag = f"stream/{', '.join(filter(None, (curve.title, curve.entry, curve.unit)))}"
        for place in chosen.tolist():
            second = round(curve.time_s[place] - curve.time_s[0])
            yield _scalar(tag, curve.values[place], second, curve.time_s[place])


def _scalar(tag: str, value: float, step: int = 0, time_s: float | None = None) -> Any:
    from tensorboard.compat.proto import event_pb2, summary_pb2

    summary = summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag=tag, simple_value=float(value))])
    return event_pb2.Event(wall_time=time.time() if time_s is None else time_s, step=step, summary=summary)


def _text(tag: str, markdown: str) -> Any:
    from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2
    from tensorboard.plugins.text.plugin_data_pb2 import TextPluginData

    data = summary_pb2.SummaryMetadata.PluginData(
        plugin_name="text", content=TextPluginData(version=0).SerializeToString()
    )
    shape = tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)])
    tensor = tensor_pb2.TensorProto(dtype=_DT_STRING, string_val=[markdown.encode()], tensor_shape=shape)
    value = summary_pb2.Summary.Value(
        tag=tag, metadata=summary_pb2.SummaryMetadata(plugin_data=data), tensor=tensor
    )  # fmt: skip
    return event_pb2.Event(wall_time=time.time(), step=0, summary=summary_pb2.Summary(value=[value]))


def _write(folder: Path, events: Sequence[Any]) -> None:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    for event in events:
        writer.add_event(event)
    writer.close()
