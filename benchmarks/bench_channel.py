"""The channel between two GPUs: its rate, and what a waiting receive costs the drafter's own kernels.

    torchrun --standalone --nproc-per-node 2 benchmarks/bench_channel.py

One line for each bound on the thread blocks of a message: GiB/s of messages of 1 GiB; then the time of the same matrix
products on the drafter's GPU alone, beside a receive that waits, and beside one that transfers, over that alone.
Then one line for each wire format, from captured states on one GPU to features on the other: GiB/s of what they are in
bf16, whatever the wire makes of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from dflash_dist.channel import ReceiveChannel, SendChannel, WaitClock, open_pair_groups, ring
from dflash_dist.topology import parse_topology
from dflash_dist.wire import Unpacker, WireFormat

ROWS, STATES, FEATURES = 20_972, 5, 25_600  # 1 GiB of bf16
GIB = ROWS * FEATURES * 2 / 2**30
SLOTS, MESSAGES = 2, 11
PRODUCTS = 200


def queue_products(x_NN: Tensor, count: int) -> None:
    """Queues matrix products on the current stream."""
    for _ in range(count):
        torch.mm(x_NN, x_NN)


def elapsed_ms(work: Callable[[], None]) -> float:
    """Milliseconds of what `work` queues on the current stream; other streams may go on waiting."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()  # sync: the measurement's end
    return start.elapsed_time(end)


def sender(group: dist.ProcessGroup, host: dist.ProcessGroup, device: torch.device) -> None:
    """The target's side: messages at full speed, then one that comes late, then more at full speed."""
    channel = SendChannel(1, group, ring(SLOTS, ROWS, FEATURES, torch.bfloat16, device), WaitClock(device))
    for message in range(2 * MESSAGES):
        if message == MESSAGES:
            dist.barrier(host)
            time.sleep(0.8)  # the receives wait for this long, and the products run beside them
        channel.acquire()
        channel.send(ROWS)
    channel.finish()
    torch.cuda.synchronize()


def receiver(group: dist.ProcessGroup, host: dist.ProcessGroup, device: torch.device) -> list[float]:
    """GiB/s, and the products' times beside a waiting and a transferring receive over their time alone."""
    x_NN = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    for _ in range(2):
        alone_ms = elapsed_ms(lambda: queue_products(x_NN, PRODUCTS))
    slots = ring(SLOTS, ROWS, FEATURES, torch.bfloat16, device)
    channel = ReceiveChannel(0, group, slots, WaitClock(device), iter([ROWS] * 2 * MESSAGES))

    def take(products: int) -> None:
        for _ in range(MESSAGES):
            channel.receive()
            queue_products(x_NN, products)
            channel.release()

    transfer_ms = elapsed_ms(lambda: take(0))
    dist.barrier(host)
    waiting_ms = elapsed_ms(lambda: queue_products(x_NN, PRODUCTS))
    channel.receive()  # the late message is there
    channel.release()
    moving_ms = elapsed_ms(lambda: take_rest(channel, x_NN))
    return [MESSAGES * GIB / (transfer_ms / 1000), waiting_ms / alone_ms, moving_ms / alone_ms]


def take_rest(channel: ReceiveChannel, x_NN: Tensor) -> None:
    """All but the first of the later messages, with the products between them."""
    for _ in range(MESSAGES - 1):
        queue_products(x_NN, PRODUCTS // (MESSAGES - 1))
        channel.receive()
        channel.release()


def wire_sender(wire: WireFormat, group: dist.ProcessGroup, device: torch.device) -> None:
    """Packs the same captured states into every message, in the order of the rows turned round."""
    states = [torch.randn(ROWS, wire.hidden, device=device, dtype=wire.dtype) for _ in range(wire.states)]
    source = torch.arange(ROWS, device=device)
    destination = source.flip(0)
    slots = ring(SLOTS, ROWS, wire.row_size, wire.slot_dtype, device)
    channel = SendChannel(1, group, slots, WaitClock(device))
    for _ in range(1 + MESSAGES):
        wire.pack(states, source, destination, channel.acquire())
        channel.send(ROWS)
    channel.finish()
    torch.cuda.synchronize()


def wire_receiver(wire: WireFormat, group: dist.ProcessGroup, device: torch.device) -> float:
    """GiB/s of features ready to be trained on; the first message does not count, as the sender compiles before it."""
    unpacker = Unpacker(wire, ROWS, device) if wire.kind == "fp8" else None
    slots = ring(SLOTS, ROWS, wire.row_size, wire.slot_dtype, device)
    channel = ReceiveChannel(0, group, slots, WaitClock(device), iter([ROWS] * (1 + MESSAGES)))

    def take(messages: int) -> None:
        for _ in range(messages):
            rows_MW = channel.receive()
            if unpacker:
                unpacker(rows_MW)
            channel.release()

    take(1)
    return MESSAGES * GIB / (elapsed_ms(lambda: take(MESSAGES)) / 1000)


def bench_wire(kind: Literal["full", "fp8"], rank: int, group: dist.ProcessGroup, device: torch.device) -> None:
    """Prints one wire format's rate, on rank 1."""
    wire = WireFormat(kind, STATES, FEATURES // STATES, torch.bfloat16)
    if rank == 0:
        wire_sender(wire, group, device)
    else:
        rate = wire_receiver(wire, group, device)
        print(f"wire {kind}: {rate:6.1f} GiB/s of bf16 states, {wire.bytes_per_token:,} bytes a token", flush=True)


def main() -> None:
    """Prints a line for each bound and for each wire format, on rank 1."""
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    host = dist.new_group(backend="gloo")
    for max_ctas in (1, 2, 4, 8, 32):
        group = open_pair_groups(parse_topology("1-1"), rank, device, max_ctas=max_ctas)[0, 1]
        if rank == 0:
            sender(group, host, device)
        else:
            rate, waiting, moving = receiver(group, host, device)
            print(
                f"at most {max_ctas:2d} CTAs: {rate:6.1f} GiB/s; products beside a receive that waits {waiting:.3f}, "
                f"that transfers {moving:.3f} of their time alone",
                flush=True,
            )
        dist.barrier(host)
    group = open_pair_groups(parse_topology("1-1"), rank, device)[0, 1]
    for kind in ("full", "fp8"):
        bench_wire(kind, rank, group, device)
        dist.barrier(host)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
