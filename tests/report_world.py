"""Traces of a run that never ran, such as a report is drawn of: targets that send, drafters that train."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tests.synthetic_traces import BASE_NS, SyntheticRank

STEP_NS = 24_000_000
KERNELS = (
    "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, 64, 4>>(Flash_fwd_params)",
    "nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_NNT", "triton_red_fused_add_mul_rms_norm_3", "triton_poi_fused_silu_7",
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)",
)  # fmt: skip


def write_world(folder: Path, ranks: int, steps: int = 4, events: int = 2_000, seed: int = 0) -> None:
    """About `events` of each rank; the last quarter of the ranks, but one at least, are drafters."""
    draw = random.Random(seed)
    drafters = max(1, ranks // 4)
    targets = max(1, ranks - drafters)
    world = [
        SyntheticRank(
            rank, ranks, role="target" if rank < targets and ranks > 1 else "drafter", host="node",
            metadata={
                "topology": f"{targets}-{drafters}",
                "step_ms": [24.0 + rank] * steps,
                "step_ms_before": [23.0, 20.0, 24.0],
            },
        )
        for rank in range(ranks)
    ]  # fmt: skip
    busy = max(1, events // (steps * 2))
    for step in range(steps):
        begin = step * STEP_NS
        for rank in world:
            _step(rank, begin + draw.randrange(200_000), step, busy, draw)
        for target in range(targets if ranks > 1 else 0):
            drafter = targets + target % drafters
            send = begin + 11_000_000 + draw.randrange(3_000_000)
            receive = begin + 9_000_000 + target // drafters * 3_000_000 + draw.randrange(1_000_000)
            end = max(send, receive) + 700_000 + draw.randrange(200_000)
            numbers = {"bytes": 2**25, "sequence": step, "group": str(target)}
            world[target].message("send", drafter, send, end - 500, stream=20, **numbers)
            world[drafter].message("recv", target, receive, end, stream=20 + target // drafters, **numbers)
    for rank in world:
        _memory(rank, steps, draw)
        rank.write(folder)


def _step(rank: SyntheticRank, begin: int, step: int, busy: int, draw: random.Random) -> None:
    rank.span(f"ProfilerStep#{step + 5}", begin, begin + STEP_NS - 300_000)
    names = (
        ("load", "forward", "send") if rank.role == "target" else ("receive", "draft_forward", "backward", "optimizer")
    )
    edges = [*[0, 1_000_000, 10_000_000, 14_000_000, 19_000_000][: len(names)], STEP_NS - 500_000]
    for name, start, end in zip(names, edges, edges[1:], strict=False):
        rank.span(name, begin + start + 20_000, begin + end - 20_000)
    now, room = begin + 1_200_000, 17_000_000 // busy
    for _ in range(busy):
        length = draw.randrange(room // 3, max(room // 3 + 2, room - 2))
        late = draw.random() < 0.15
        rank.kernel(draw.choice(KERNELS), now, now + length, launch_ns=now - (4_000 if late else 90_000))
        now += room
    rank.kernel("Memcpy HtoD (Pinned -> Device)", begin + 400_000, begin + 900_000, stream=14, category="gpu_memcpy")


def _memory(rank: SyntheticRank, steps: int, draw: random.Random) -> None:
    allocated, reserved = 20 * 2**30, 40 * 2**30
    for moment in range(400):
        change = draw.randrange(-(2**30), 2**30)
        allocated = min(max(allocated + change, 2**30), 70 * 2**30)
        reserved = max(reserved, allocated)
        args = {"Bytes": change, "Total Allocated": allocated, "Total Reserved": reserved, "Device Id": rank.rank}
        when = moment * steps * STEP_NS // 400
        event = {"ph": "i", "name": "[memory]", "cat": "cpu_instant_event", "ts": when / 1000, "pid": 1, "tid": 1}
        rank.events.append({**event, "args": {**args, "Device Type": 1}})


COMPILES = {
    3: [{"kind": "compile", "kernel": "forward", "key": "0/0", "ms": 812.5}],
    4: [{"kind": "autotune", "kernel": "chunk_fwd_kernel", "key": "T=4096, H=16, BT=64", "ms": 1430.2, "configs": 12}],
    260: [{"kind": "autotune", "kernel": "chunk_fwd_kernel", "key": "T=8192, H=16, BT=64", "ms": 640.0, "configs": 12}],
}
"""By the second in which the last rank's stream tells of them; that of 260 is new to a run in steady state."""


def write_streams(folder: Path, ranks: int, seconds: int = 300) -> None:
    """What each rank notes once a second; the last rank waits for all others, and they for it."""
    draw = random.Random(1)
    (folder / "stream").mkdir()
    for rank in range(ranks):
        rows = []
        for second in range(seconds):
            util = min(100, max(0, 82 + draw.randrange(-25, 25) - 60 * (100 < second < 130)))
            row = {"time_s": BASE_NS / 1e9 - 200 + second, "gpu_util": util, "power_w": 250 + 4 * util}
            row |= {"step": second - 5} if second > 5 else {}
            row |= {"wakeup_ms": 0.1, "wakeup_max_ms": 1 + 40 * (second == 7), "gc": 2, "gc_ms": 3.5, "gc_max_ms": 3.0}
            row |= {"alloc_retries": rank * (second > 50), "graph_breaks": 0, "throttle_reasons": 4 * (second % 4 == 0)}
            peers = range(ranks - 1) if rank == ranks - 1 else [ranks - 1]
            waits = {str(peer): draw.randrange(40 + 90 * peer) + 300 * (100 < second < 130) for peer in peers}
            row |= {"wait_ms": sum(waits.values()), "wait_ms_of_rank": waits}
            if second % 60 == 11:
                row["gil_share"] = {"MainThread": 0.3 + 0.1 * rank, "prefetch": 0.05, "dflash-stream": 0.005}
            if rank == ranks - 1 and second in COMPILES:
                row["compiles"] = COMPILES[second]
            rows.append(json.dumps(row))
        (folder / "stream" / f"rank{rank}.jsonl").write_text("\n".join([*rows, '{"time_s": 1', "[]", ""]))
