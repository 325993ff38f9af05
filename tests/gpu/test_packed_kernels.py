"""The kernels around the delta rule, against the same in plain torch; no new number of tokens compiles anything."""

import numpy as np
import pytest
import torch

from dflash_dist.target import mixers, packed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: run `make test-gpu` on a GPU machine"),
]
CUDA = torch.device("cuda")
LENGTHS = ([1], [3, 1, 500, 2, 77], [640], [31, 33, 32])


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype, generator=torch.Generator("cuda").manual_seed(len(shape)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("channels", "taps"), [(256, 4), (72, 3)])
def test_the_convolution_keeps_to_documents(channels: int, taps: int, dtype: torch.dtype) -> None:
    from dflash_dist.target.packed_kernels import convolution

    weight_XW = random(channels, taps, dtype=dtype)
    for lengths in LENGTHS:
        pack = packed.Pack.of(np.array(lengths), CUDA)
        hidden_1TX = random(1, sum(lengths), channels, dtype=dtype)
        out_1TX = convolution(hidden_1TX, weight_XW, pack.positions_1T)
        expected_1TX = mixers._shifted_sum(hidden_1TX, weight_XW, pack.document_1T)
        torch.testing.assert_close(out_1TX, expected_1TX, rtol=1e-2, atol=1e-4)
        start = 0
        for length in lengths:
            alone = convolution(hidden_1TX[:, start : start + length], weight_XW, None)
            assert torch.equal(out_1TX[:, start : start + length], alone)
            start += length
    rows = random(5, 33, channels, dtype=dtype)
    torch.testing.assert_close(
        convolution(rows, weight_XW, None), mixers._shifted_sum(rows, weight_XW, None), rtol=1e-2, atol=1e-4
    )


@pytest.mark.parametrize("size", [128, 48])
def test_heads_are_copied_apart_and_normalised(size: int) -> None:
    from dflash_dist.target.packed_kernels import heads_apart

    for rows, tokens in ((1, 77), (3, 40)):
        channels = random(rows, tokens, 7 * size)
        slices = [
            channels[..., : 3 * size].unflatten(-1, (3, size)),
            channels[..., 2 * size :].unflatten(-1, (5, size)),
        ]
        slices.append(slices[1][:, :, ::2])  # of repeated heads
        slices.append(slices[1][:, 5:])  # rows that do not follow on each other
        for values in slices:
            assert torch.equal(heads_apart(values, normalise=False), values.contiguous())
            exact = values.float()
            exact = exact * torch.rsqrt(exact.square().sum(-1, keepdim=True) + 1e-6)
            out = heads_apart(values, normalise=True)
            assert out.is_contiguous()
            torch.testing.assert_close(out.float(), exact, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("size", [128, 48])
def test_the_gated_norm_is_the_models_own(size: int) -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

    norm = Qwen3_5RMSNormGated(size, eps=1e-5).to("cuda", torch.bfloat16)
    norm.weight.data.copy_(random(size))
    for heads in (1, 100, 1000):
        values_MD, gate_MD = random(2, heads, size)
        expected = norm(values_MD, gate_MD)
        out = mixers.gated_norm(values_MD, gate_MD, norm.weight, norm.variance_epsilon)
        torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-6)


def test_the_ops_tell_the_compiler_the_truth() -> None:
    tests = ("test_schema", "test_faketensor")
    decoder = type("Decoder", (), {"config": None})
    with packed.running(decoder, packed.Pack.of(np.array([5, 70]), CUDA)):
        torch.library.opcheck(mixers.packed_convolution, (random(1, 75, 256), random(256, 4)), test_utils=tests)
    for normalise in (False, True):
        torch.library.opcheck(mixers.heads_apart, (random(1, 75, 6, 64)[:, :, ::2], normalise), test_utils=tests)
    heads_MD = random(75, 64)
    torch.library.opcheck(mixers.gated_norm, (heads_MD, heads_MD, random(64), 1e-6), test_utils=tests)


def test_no_number_of_tokens_compiles() -> None:
    from dflash_dist.target import packed_kernels

    kernels = [packed_kernels._convolution_kernel, packed_kernels._heads_kernel, packed_kernels._gated_norm_kernel]
    weight_XW = random(256, 4)

    def run(tokens: int) -> None:
        pack = packed.Pack.of(np.array([tokens]), CUDA)
        hidden_1TX = random(1, tokens, 256)
        packed_kernels.convolution(hidden_1TX, weight_XW, pack.positions_1T)
        packed_kernels.heads_apart(hidden_1TX.unflatten(-1, (2, 128)), normalise=True)
        packed_kernels.gated_norm(hidden_1TX.view(-1, 128), hidden_1TX.view(-1, 128), random(128), 1e-6)

    run(302)
    compiled = [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels]
    for tokens in (1, 16, 17, 65536):
        run(tokens)
    assert [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels] == compiled
