"""Which kernels the drafter's attention takes."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dflash_dist.drafter import attention
from dflash_dist.drafter.attention import _has_own_backward

HOPPER_BYTES, AMPERE_BYTES = 232_448, 166_912


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_block_bytes", lambda device: HOPPER_BYTES)


@pytest.mark.parametrize(
    ("queries", "dtype", "own"),
    [
        (2**19 - 1, torch.bfloat16, True),
        (2**19, torch.bfloat16, False),  # 2^31 values, whose places the kernel could not number
        (64, torch.float16, True),
        (64, torch.float32, False),
    ],
)
def test_our_kernel_takes_what_it_can_number(queries: int, dtype: torch.dtype, own: bool) -> None:
    with FakeTensorMode():
        query = torch.empty(queries, 32, 128, dtype=dtype, device="cuda")
        keys = torch.empty(64, 8, 128, dtype=dtype, device="cuda")
        assert _has_own_backward(query, keys) is own


def test_many_keys_are_left_to_torch() -> None:
    with FakeTensorMode():
        query = torch.empty(64, 32, 128, dtype=torch.bfloat16, device="cuda")
        assert _has_own_backward(query, torch.empty(2**21 - 1, 8, 128, dtype=torch.bfloat16, device="cuda"))
        assert not _has_own_backward(query, torch.empty(2**21, 8, 128, dtype=torch.bfloat16, device="cuda"))


def test_who_asks_torch_for_a_fixed_order_gets_one() -> None:
    with FakeTensorMode():
        query, keys = (torch.empty(64, heads, 128, dtype=torch.bfloat16, device="cuda") for heads in (32, 8))
        assert _has_own_backward(query, keys)
        torch.use_deterministic_algorithms(True)
        try:
            assert not _has_own_backward(query, keys)
        finally:
            torch.use_deterministic_algorithms(False)


def test_a_card_whose_blocks_have_too_little_memory_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        query, keys = (torch.empty(64, heads, 128, dtype=torch.bfloat16, device="cuda") for heads in (32, 8))
        assert _has_own_backward(query, keys)
        monkeypatch.setattr(attention, "_block_bytes", lambda device: AMPERE_BYTES)
        assert not _has_own_backward(query, keys)


@pytest.mark.parametrize(
    ("cuda", "capability", "is_one"), [("13.0", (9, 0), True), ("13.0", (10, 0), False), (None, (9, 4), False)]
)
def test_a_hopper_is_told_from_an_amd_card_of_capability_9(
    cuda: str | None, capability: tuple[int, int], is_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(attention, "version_of", lambda name: "4.0.0")
    assert attention.on_hopper() is is_one
    assert attention.flash_version() == ("4.0.0" if is_one else None)
