from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dflash_dist.config import load_config
from dflash_dist.target.packing import row_groups
from dflash_dist.topology import parse_topology
from dflash_dist.train.inputs import resolve_drafter
from dflash_dist.train.memory import drafter_parameters, rank_memory
from dflash_dist.wire import Unpacker, WireFormat
from tests.tiny import HIDDEN, TAPS, make_config, make_target

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def fp8_round_trip(state_TH: Tensor) -> Tensor:
    """One state of every token, packed and unpacked."""
    wire = WireFormat("fp8", 1, state_TH.shape[1], state_TH.dtype)
    slot_TW = torch.zeros(len(state_TH), wire.row_size, dtype=torch.uint8)
    rows_T = torch.arange(len(state_TH))
    wire.pack([state_TH], rows_T, rows_T, slot_TW)
    out_TF = torch.full_like(state_TH, torch.nan)
    wire.unpack(slot_TW, out_TF)
    return out_TF


def uneven_states(tokens: int, hidden: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Values over many binades within each token, and tokens of very different size."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.empty(tokens, hidden).uniform_(-9, 0, generator=generator)
    return (
        torch.randn(tokens, hidden, generator=generator) * exponents.exp2() * torch.logspace(-1, 3, tokens)[:, None]
    ).to(dtype)


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=12),
    st.integers(1, 3),
    st.integers(1, 9),
    st.sampled_from(DTYPES),
    st.sampled_from(["full", "fp8"]),
)
def test_every_token_finds_its_place(
    lengths: list[int], count: int, hidden: int, dtype: torch.dtype, kind: str
) -> None:
    """Against a loop over documents, tokens and states."""
    wire = WireFormat(kind, count, hidden, dtype)  # type: ignore[arg-type]
    lengths_N = np.array(lengths)
    starts_N = np.cumsum(lengths_N) - lengths_N
    slot_TW = torch.zeros(sum(lengths), wire.row_size, dtype=wire.slot_dtype)
    expected_TF = torch.zeros(sum(lengths), wire.features, dtype=dtype)
    for number, group in enumerate(row_groups(lengths_N)):
        states = [
            uneven_states(group.shape[0] * group.shape[1], hidden, dtype, seed=9 * number + state).view(
                *group.shape, -1
            )
            for state in range(count)
        ]
        wire.pack(states, torch.from_numpy(group.source), torch.from_numpy(group.destination), slot_TW)
        rows = dict(zip(group.destination.tolist(), group.source.tolist(), strict=True))
        for document in range(len(lengths)):
            for place in range(starts_N[document], starts_N[document] + lengths[document]):
                if place not in rows:
                    continue
                row, offset = divmod(rows[place], group.shape[1])
                assert offset == place - starts_N[document]
                expected_TF[place] = torch.cat([state[row, offset] for state in states])
    if kind == "fp8":
        expected_TF = fp8_round_trip(expected_TF.view(-1, hidden)).view(-1, wire.features)
        unpacked_MF = Unpacker(wire, sum(lengths) + 1, torch.device("cpu"))(slot_TW)
        assert not unpacked_MF[-1].any()
        slot_TW = unpacked_MF[:-1]
    assert torch.equal(slot_TW, expected_TF)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_takes_the_nearest_number_of_eight_bits(dtype: torch.dtype) -> None:
    state_TH = uneven_states(50, 201, dtype)
    error_TH = (fp8_round_trip(state_TH).double() - state_TH.double()).abs()
    greatest_T1 = state_TH.double().abs().amax(dim=1, keepdim=True)
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    numbers = numbers[numbers.isfinite()]
    nearest_TH = (state_TH.double()[:, :, None] - numbers * greatest_T1[:, :, None] / 448).abs().amin(dim=2)
    rounding_TH = state_TH.double().abs() * max(torch.finfo(dtype).eps, 2.0**-20) + torch.finfo(dtype).smallest_normal
    assert (error_TH <= nearest_TH + rounding_TH).all()
    # Half of the last of three bits: 2^-4 of the value, 16 of the greatest, 448; and steps of 2^-9 for the smallest.
    assert (error_TH <= state_TH.double().abs() / 16 + greatest_T1 * 2.0**-18).all()
    assert (error_TH <= greatest_T1 / 26).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_extremes_in_fp8(dtype: torch.dtype) -> None:
    most, least = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    state_TH = torch.tensor(
        [[0.0, 0.0, -0.0], [most, -most, 1.0], [least, 0.0, -least], [most, least, 0.0]], dtype=dtype
    )
    out_TH = fp8_round_trip(state_TH)
    assert out_TH.isfinite().all()
    assert torch.equal(out_TH[[0, 1, 3], :2], state_TH[[0, 1, 3], :2] * (state_TH[[0, 1, 3], :2].abs() != least))
    assert (out_TH[2].abs() <= least).all()


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_not_hidden_by_fp8(wrong: float) -> None:
    state_TH = torch.ones(3, 5)
    state_TH[1, 2] = wrong
    out_TH = fp8_round_trip(state_TH)
    assert torch.equal(out_TH[[0, 2]], state_TH[[0, 2]])
    assert not out_TH[1].isfinite().any()


def test_fp8_takes_half_the_bytes() -> None:
    full, fp8 = (WireFormat(kind, 5, 5120, torch.bfloat16) for kind in ("full", "fp8"))  # type: ignore[arg-type]
    assert full.bytes_per_token == 51200
    assert fp8.bytes_per_token == 25632  # 25,600 codes and 5 scales, up to the next multiple of 16


def test_memory_counts_rings_and_the_unpacked_features(tmp_path: Path) -> None:
    config_path = make_config(tmp_path, make_target("llama", tmp_path / "target"), tmp_path / "chats.jsonl")
    sizes = {}
    for kind in ("full", "fp8"):
        config = load_config(config_path, [f"schedule.wire={kind}"])
        target_config, drafter = resolve_drafter(config, tmp_path / "target")
        for topo in ("3-2", "x2"):
            sizes[kind, topo] = rank_memory(config, parse_topology(topo), target_config, drafter, "cpu")
    assert sizes["fp8", "x2"] == sizes["full", "x2"]
    features = 320 * len(TAPS) * HIDDEN * 4
    row = 112  # 96 codes and 3 scales, up to the next multiple of 16
    assert sizes["full", "3-2"]["target"]["ring to each drafter"] == 2 * 2 * features
    assert sizes["fp8", "3-2"]["target"]["ring to each drafter"] == 2 * 2 * 320 * row
    assert sizes["fp8", "3-2"]["drafter"]["ring from each target"] == 3 * 2 * 320 * row
    assert sizes["fp8", "3-2"]["drafter"]["unpacked features"] == features
    assert "unpacked features" not in sizes["full", "3-2"]["drafter"]


@pytest.mark.parametrize("kind", ["full", "fp8"])
def test_states_of_another_layout_and_dtype(kind: str) -> None:
    wire = WireFormat(kind, 2, 6, torch.bfloat16)  # type: ignore[arg-type]
    whole = torch.randn(2, 5, 12)
    source, destination = torch.tensor([7, 0, 2]), torch.tensor([1, 2, 0])
    slots = torch.zeros(2, 3, wire.row_size, dtype=wire.slot_dtype)
    wire.pack([whole[..., :6], whole[..., 6:]], source, destination, slots[0])
    wire.pack([half.to(torch.bfloat16).contiguous() for half in whole.split(6, dim=-1)], source, destination, slots[1])
    assert slots[0].any() and torch.equal(slots[0], slots[1])


def test_memory_counts_the_weights_that_a_gpu_keeps_in_the_compute_type(tmp_path: Path) -> None:
    config_path = make_config(tmp_path, make_target("llama", tmp_path / "target"), tmp_path / "chats.jsonl")
    kept = {}
    for topo, shard, device in (("1-2", "none", "cuda"), ("1-2", "fsdp", "cuda"), ("1-2", "none", "cpu")):
        config = load_config(config_path, [f"train.shard={shard}", "train.dtype=bfloat16"])
        target_config, drafter = resolve_drafter(config, tmp_path / "target")
        parts = rank_memory(config, parse_topology(topo), target_config, drafter, device)["drafter"]
        kept[shard, device] = parts.get("drafter weights in train.dtype")
    assert kept == {("none", "cuda"): 2 * drafter_parameters(drafter), ("fsdp", "cuda"): None, ("none", "cpu"): None}
