"""The wire format's kernels against its definition on the CPU, byte for byte."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import DeviceType

from dflash_dist.wire import WireFormat
from tests.ranks.cli import metrics, train
from tests.tiny import make_chats, make_config, make_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: run `make test-gpu` on a GPU machine"),
]
KINDS: list[Any] = ["full", "fp8"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def uneven_states(rows: int, hidden: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Values over many binades within each row; some are zero, of either sign."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.empty(rows, hidden).uniform_(-18, 4, generator=generator)
    state_RH = torch.randn(rows, hidden, generator=generator) * exponents.exp2()
    state_RH[0] = 0
    state_RH[1, ::2] *= -0.0
    return state_RH.to(dtype)


def assert_same_bytes(left: Tensor, right: Tensor) -> None:
    assert torch.equal(left.cpu().contiguous().view(torch.uint8), right.cpu().contiguous().view(torch.uint8))


def both_slots(
    wire: WireFormat, states: list[Tensor], source: Tensor, destination: Tensor, rows: int
) -> tuple[Tensor, Tensor]:
    """What the definition on the CPU and the kernel on the GPU write."""
    slots = [torch.zeros(rows, wire.row_size, dtype=wire.slot_dtype, device=device) for device in ("cpu", "cuda")]
    for slot in slots:
        wire.pack([s.to(slot.device) for s in states], source.to(slot.device), destination.to(slot.device), slot)
    return slots[0], slots[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 33, 576, 5120])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_equal_the_definition(kind: Any, hidden: int, dtype: torch.dtype) -> None:
    wire = WireFormat(kind, 3, hidden, dtype)
    states = [uneven_states(60, hidden, dtype, seed).view(4, 15, hidden) for seed in range(3)]
    source, destination = torch.randperm(60)[:50], torch.randperm(50)
    expected, slot = both_slots(wire, states, source, destination, rows=53)
    assert expected.any()
    assert_same_bytes(slot, expected)
    if kind == "fp8":
        outs = [torch.full((53, wire.features), torch.nan, dtype=dtype, device=s.device) for s in (expected, slot)]
        wire.unpack(expected, outs[0])
        wire.unpack(slot, outs[1])
        assert_same_bytes(outs[1], outs[0])


def test_every_number_of_eight_bits_and_what_lies_between_is_rounded_alike() -> None:
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (numbers[1:] + numbers[:-1]) / 2
    above, below = (torch.nextafter(ties, torch.tensor(limit)) for limit in (1e9, -1e9))
    line = torch.cat([numbers, ties, above, below])
    state_RH = torch.cat([line, -line])[None]  # 448 is among them, so the scale is 1
    rows = torch.zeros(1, dtype=torch.int64)
    expected, slot = both_slots(WireFormat("fp8", 1, state_RH.shape[1], torch.float32), [state_RH], rows, rows, rows=1)
    assert_same_bytes(slot, expected)
    assert len(expected[0, : len(numbers)].unique()) == 127


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_extremes(dtype: torch.dtype) -> None:
    most, least = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    rows = [[0.0, 0.0, -0.0], [most, -most, 1.0], [least, 0.0, -least], [most, least, 0.0]]
    wrong = [[torch.nan, 1.0, 0.0], [torch.inf, 1.0, 0.0], [-torch.inf, 0.0, 1.0]]
    state_RH = torch.tensor(rows + wrong, dtype=dtype)
    wire, places = WireFormat("fp8", 1, 3, dtype), torch.arange(len(state_RH))
    expected, slot = both_slots(wire, [state_RH], places, places, rows=len(state_RH))
    assert_same_bytes(slot[: len(rows)], expected[: len(rows)])
    out_TF = torch.zeros(len(state_RH), 3, dtype=dtype, device="cuda")
    wire.unpack(slot, out_TF)
    assert out_TF[: len(rows)].isfinite().all() and not out_TF[len(rows) :].isfinite().any()


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_another_layout_and_dtype(kind: Any) -> None:
    wide = torch.randn(4, 15, 66)
    half = wide.to(torch.bfloat16)
    states = [wide[..., :33], half[..., 33:], half.flatten()[1 : 1 + 60 * 33].view(60, 33)]
    source, destination = torch.randperm(60)[:50], torch.randperm(50)
    expected, slot = both_slots(WireFormat(kind, 3, 33, torch.bfloat16), states, source, destination, rows=50)
    assert_same_bytes(slot, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_offsets_past_32_bits(kind: Any) -> None:
    wire, rows = WireFormat(kind, 5, 5120, torch.bfloat16), 90_000
    assert rows * wire.row_size > 2**31 and 420_000 * wire.hidden > 2**31
    state_RH = torch.zeros(420_000, wire.hidden, dtype=wire.dtype, device="cuda")
    state_RH[-1], state_RH[7] = 2.0, 3.0
    slot_TW = torch.zeros(rows, wire.row_size, dtype=wire.slot_dtype, device="cuda")
    source, destination = torch.tensor([419_999, 7], device="cuda"), torch.tensor([rows - 1, 3], device="cuda")
    wire.pack([state_RH] * 5, source, destination, slot_TW)
    out_TF = slot_TW
    if kind == "fp8":
        out_TF = torch.zeros(rows, wire.features, dtype=wire.dtype, device="cuda")
        wire.unpack(slot_TW, out_TF)
    assert (out_TF[-1] == 2).all() and (out_TF[3] == 3).all()
    assert out_TF.any(dim=1).sum() == 2


@pytest.mark.parametrize("kind", KINDS)
def test_each_way_is_one_kernel(kind: Any) -> None:
    wire = WireFormat(kind, 5, 576, torch.bfloat16)
    states = [torch.randn(2000, 576, dtype=torch.bfloat16, device="cuda") for _ in range(5)]
    places = torch.arange(2000, device="cuda")
    slot_TW = torch.zeros(2000, wire.row_size, dtype=wire.slot_dtype, device="cuda")
    out_TF = torch.zeros(2000, wire.features, dtype=torch.bfloat16, device="cuda")

    def there_and_back() -> None:
        wire.pack(states, places, places, slot_TW)
        if kind == "fp8":
            wire.unpack(slot_TW, out_TF)

    there_and_back()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        there_and_back()
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events() if event.device_type == DeviceType.CUDA]
    kernels = [name for name in names if "kernel" in name]  # not the copy of the states' addresses
    assert kernels == ["_pack_kernel"] + ["_unpack_kernel"] * (kind == "fp8"), names


def test_other_numbers_of_tokens_compile_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    wire = WireFormat("fp8", 2, 72, torch.bfloat16)  # a size that no other test has
    compiled = []
    for rows in (40, 1, 16, 17, 3000, 4096):
        places = torch.arange(rows)
        states = [uneven_states(max(rows, 2), 72, torch.bfloat16, seed) for seed in range(2)]
        _, slot = both_slots(wire, states, places, places, rows)
        wire.unpack(slot, torch.zeros(rows, wire.features, dtype=torch.bfloat16, device="cuda"))
        compiled.append(len(list(tmp_path.rglob("*.cubin"))))
    assert compiled == [2] * 6


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_batch(kind: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the kernels' rates: bytes read and written, a second."""
    tokens, wire = 65_536, WireFormat(kind, 5, 5120, torch.bfloat16)
    states = [torch.randn(tokens, wire.hidden, dtype=wire.dtype, device="cuda") for _ in range(5)]
    source, destination = torch.randperm(tokens, device="cuda"), torch.randperm(tokens, device="cuda")
    slot_TW = torch.zeros(tokens, wire.row_size, dtype=wire.slot_dtype, device="cuda")
    out_TF = torch.zeros(tokens, wire.features, dtype=wire.dtype, device="cuda")
    works = {"pack": lambda: wire.pack(states, source, destination, slot_TW)}
    if kind == "fp8":
        works["unpack"] = lambda: wire.unpack(slot_TW, out_TF)
    size_bytes = tokens * (wire.features * wire.dtype.itemsize + wire.bytes_per_token)
    for name, work in works.items():
        work()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            work()
        end.record()
        end.synchronize()
        ms = start.elapsed_time(end) / 10
        with capsys.disabled():
            print(
                f"\n{name} {kind}, {tokens} tokens of 5 x 5120 in bf16: {ms:.2f} ms, {size_bytes / ms / 1e6:.0f} GB/s"
            )
    places = torch.arange(256)
    expected, _ = both_slots(wire, [state[source[:256]].cpu() for state in states], places, places, rows=256)
    assert_same_bytes(slot_TW[destination[:256]], expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_fp8_trains_over_nccl(tmp_path: Path) -> None:
    target = make_target("qwen3", tmp_path / "target")
    sections = {"objective": {"max_anchors_per_batch": 32}, "drafter": {"head_dim": 16}}
    config = make_config(tmp_path, target, make_chats(tmp_path / "chats.jsonl"), **sections)
    for kind in KINDS:
        train(config, "1-1", kind, "--device", "cuda", "train.dtype=float32", f"schedule.wire={kind}")
    full, fp8 = ([row["loss"] for row in metrics(config, kind)] for kind in KINDS)
    assert fp8 != full
    assert fp8 == pytest.approx(full, rel=1e-2)
