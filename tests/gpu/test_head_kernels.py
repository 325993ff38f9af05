"""The loss over the vocabulary on CUDA equals its definition in plain torch."""

import pytest
import torch

from dflash_dist.drafter import head_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: run `make test-gpu` on a GPU machine"),
]


@pytest.mark.parametrize("vocabulary", [1000, 4096, 151_936])
@pytest.mark.parametrize("cap", [0.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_predictions_and_gradients(vocabulary: int, cap: float, dtype: torch.dtype) -> None:
    from dflash_dist.drafter import head_kernels

    torch.manual_seed(0)
    logits_RV, teacher_RV = (8 * torch.randn(50, vocabulary, device="cuda").to(dtype) for _ in range(2))
    labels_R, weight_R = torch.randint(0, vocabulary, (50,), device="cuda"), torch.rand(50, device="cuda")
    weight_R[::7] = 0
    rtol, atol = (1e-2, 1e-7) if dtype == torch.bfloat16 else (1e-4, 1e-7)

    statistics = head_kernels.row_statistics(logits_RV, labels_R, cap)
    expected = head_reference.row_statistics(logits_RV, labels_R, cap)
    for ours, theirs in zip(statistics[::2], expected[::2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
    taken = logits_RV.gather(1, torch.stack([statistics[1], expected[1]], 1))
    assert torch.equal(taken[:, 0], taken[:, 1])  # of equal ones either may be named

    sum_R, teacher_sum_R = expected[0], head_reference.row_statistics(teacher_RV, labels_R, cap)[0]
    ours, theirs = logits_RV.clone(), logits_RV.clone()
    head_kernels.cross_entropy_gradient_(ours, sum_R, labels_R, weight_R, cap)
    head_reference.cross_entropy_gradient_(theirs, sum_R, labels_R, weight_R, cap)
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)
    assert not ours[::7].any()

    for weights in (None, weight_R):
        ours, theirs = logits_RV.clone(), logits_RV.clone()
        loss_R = head_kernels.divergence_(ours, sum_R, teacher_RV, teacher_sum_R, weights, cap)
        expected_R = head_reference.divergence_(theirs, sum_R, teacher_RV, teacher_sum_R, weights, cap)
        torch.testing.assert_close(loss_R, expected_R, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)
        assert torch.equal(ours, logits_RV) == (weights is None)
