import numpy as np
import pytest
import torch

from dflash_dist.config import NoiseConfig
from dflash_dist.drafter.anchors import document_hashes
from dflash_dist.drafter.noise import add_noise_, noise_scale
from tests.random_models import documents, reordered

TAPS, HIDDEN = 3, 40


def test_the_scale_goes_from_the_first_step_to_the_last() -> None:
    linear = NoiseConfig(kind="gaussian", scale=0.4, end_scale=0.1)
    assert [noise_scale(linear, step, 4) for step in (1, 2, 3, 4)] == pytest.approx([0.4, 0.3, 0.2, 0.1])
    cosine = NoiseConfig(kind="uniform", scale=0.4, schedule="cosine")
    assert [noise_scale(cosine, step, 5) for step in (1, 2, 3, 5)] == pytest.approx([0.4, 0.3414213562, 0.2, 0.0])
    assert noise_scale(cosine, 1, 1) == 0.4
    assert noise_scale(NoiseConfig(scale=1.0), 1, 9) == 0.0, "off unless a kind is named"


@pytest.mark.parametrize(("kind", "deviation"), [("gaussian", 1.0), ("uniform", 3**-0.5)])
def test_noise_has_the_size_of_each_taps_state(kind: str, deviation: float) -> None:
    sizes = torch.tensor([1.0, 10.0, 1000.0]).repeat_interleave(HIDDEN)
    features = torch.randn(500, TAPS * HIDDEN, generator=torch.Generator().manual_seed(0)) * sizes
    noisy = features.clone()
    add_noise_(noisy, NoiseConfig(kind=kind), 0.1, [300, 150], [5, 6], TAPS)
    assert torch.equal(noisy[450:], features[450:]), "padding is left alone"
    for tap in range(TAPS):
        part = slice(tap * HIDDEN, (tap + 1) * HIDDEN)
        added = (noisy - features)[:450, part]
        assert added.std() / features[:450, part].std() == pytest.approx(0.1 * deviation, rel=0.03)
        assert abs(added.mean()) < 0.02 * added.std() * 3
    if kind == "uniform":
        size = features.unflatten(1, (TAPS, HIDDEN)).square().mean(-1, keepdim=True).sqrt()
        assert ((noisy - features).unflatten(1, (TAPS, HIDDEN)).abs() <= 0.1001 * size).all()


def test_a_documents_noise_depends_on_document_and_epoch_alone() -> None:
    pack = documents([9, 4, 7])
    features = torch.randn(20, TAPS * HIDDEN, generator=torch.Generator().manual_seed(1))
    settings = NoiseConfig(kind="gaussian")

    def noise(order: list[int], epoch: int) -> dict[int, torch.Tensor]:
        part = reordered(pack, order)
        ends = np.cumsum(pack.lengths_N)
        rows = torch.cat([features[ends[n] - pack.lengths_N[n] : ends[n]] for n in order])
        lengths, seeds = part.lengths_N.tolist(), document_hashes(part, 3, epoch).view(np.int64).tolist()
        add_noise_(rows, settings, 0.5, lengths, seeds, TAPS)
        return dict(zip(order, rows.split(lengths), strict=True))

    first, second = noise([0, 1, 2], 1), noise([2, 0], 1)
    assert torch.equal(first[0], second[0]) and torch.equal(first[2], second[2])
    assert not torch.equal(first[0], noise([0, 1, 2], 2)[0])
    assert not torch.equal(first[0][:4], first[1])
