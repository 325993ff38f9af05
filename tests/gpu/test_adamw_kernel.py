"""The optimizer's kernel equals torch's AdamW."""

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: run `make test-gpu` on a GPU machine"),
]
SIZES = [(1,), (128,), (2048,), (300, 77), (1000, 4099)]


def test_steps_equal_those_of_torch() -> None:
    from dflash_dist.train.adamw_kernel import adamw_

    torch.manual_seed(0)
    theirs = [torch.randn(size, device="cuda").requires_grad_() for size in SIZES]
    ours = [parameter.detach().clone().requires_grad_() for parameter in theirs]
    averages, squares = ([torch.zeros_like(parameter) for parameter in ours] for _ in range(2))
    casts = [None if number % 2 else torch.zeros_like(x, dtype=torch.bfloat16) for number, x in enumerate(ours)]
    adamw = torch.optim.AdamW(theirs, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    count = torch.zeros((), device="cuda")
    for step in range(8):
        skip = step in (0, 3)
        for parameter, theirs_parameter in zip(ours, theirs, strict=True):
            gradient = 10 ** torch.empty(()).uniform_(-6, 1).item() * torch.randn_like(parameter)
            parameter.grad, theirs_parameter.grad = gradient * 37, gradient
            if skip:
                parameter.grad = torch.full_like(gradient, torch.nan)
        count += 1 - skip
        if not skip:
            adamw.step()
        adamw_(
            ours, averages, squares, casts, count, divisor=torch.tensor(37.0, device="cuda"),
            skip=torch.tensor(float(skip), device="cuda"), rate=1e-2, betas=(0.9, 0.95), eps=1e-8, decay=0.1,
        )  # fmt: skip
        for parameter, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-6)
    for parameter, cast in zip(ours, casts, strict=True):
        assert cast is None or torch.equal(cast, parameter.bfloat16())
    assert not any(x.isnan().any() for x in (*ours, *averages, *squares))
