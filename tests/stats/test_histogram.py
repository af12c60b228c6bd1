"""Histograms: the right bin, quantiles from within the exact one's bin, merging, the top of k3."""

import math

import numpy as np
import pytest
import torch

from offdrift.stats.histogram import LENGTH, LOG_RATIO, QUANTILES, REWARD, Grid, Histogram


def heavy(seed: int, n: int = 5000, scale: float = 0.01) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(n, generator=g) * (1 + 100 * (torch.rand(n, generator=g) < 0.01))
    x[:: n // 50] = 0.0
    return x


@pytest.mark.parametrize("grid", [LOG_RATIO, REWARD, LENGTH, Grid(-1, 1)], ids=str)
def test_a_value_is_in_the_bin_that_a_search_finds(grid):
    g = torch.Generator().manual_seed(0)
    size = torch.exp(torch.empty(4000).uniform_(-20, 20, generator=g))
    x = size * torch.where(torch.rand(4000, generator=g) < 0.5, -1.0, 1.0)
    x = torch.cat([x, torch.tensor(grid.edges, dtype=torch.float32), torch.zeros(2)])
    edges = grid.edges
    # Edges belong to the bin farther from 0: on the right side search from the right.
    right = np.searchsorted(edges, x.double().numpy(), side="right") - 1
    left = np.searchsorted(edges, x.double().numpy(), side="left") - 1
    expected = np.where(x.numpy() > 0, right, left).clip(0, grid.bins - 1)
    expected[x.numpy() == 0] = grid.side
    assert grid.index(x).tolist() == expected.tolist()
    assert len(edges) == grid.bins + 1
    assert (np.diff(edges) > 0).all()


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("q", [0.0, 0.01, 0.05, 0.5, 0.95, 0.99, 0.999, 1.0])
def test_a_quantile_is_in_the_bin_of_the_exact_one(seed, q):
    x = heavy(seed)
    got = Histogram.of(x, LOG_RATIO).quantile(q)
    exact = torch.quantile(x.double(), q, interpolation="lower")
    assert LOG_RATIO.index(torch.tensor([got])).item() == LOG_RATIO.index(exact[None]).item()
    if abs(exact) > 1e-5:
        assert got == pytest.approx(float(exact), rel=0.25)


def test_quantiles_of_a_smooth_distribution_are_much_better_than_a_bin():
    x = torch.linspace(0.001, 1.0, 100_001, dtype=torch.float64)
    h = Histogram.of(x, LOG_RATIO)
    for q in QUANTILES.values():
        assert h.quantile(q) == pytest.approx(float(torch.quantile(x, q)), rel=1e-3)


def test_values_that_repeat_come_back_exactly():
    h = Histogram.of(torch.tensor([-1.0] * 30 + [0.0] * 30 + [0.3] * 30 + [1.0] * 10), REWARD)
    assert [h.quantile(q) for q in (0.1, 0.5, 0.95)] == [-1.0, 0.0, 1.0]
    assert h.quantile(0.8) == pytest.approx(0.3, rel=1e-6)
    assert h.quantiles().keys() == QUANTILES.keys()


def test_extremes_are_exact_and_beyond_the_grid_nothing_is_lost():
    h = Histogram.of(torch.tensor([-1e4, 0.5, 3e4]), LOG_RATIO)
    assert (h.low, h.high, h.n) == (-1e4, 3e4, 3)
    assert h.quantile(0.0) == -1e4
    assert h.quantile(1.0) == 3e4


def test_merge_is_counting_together():
    x = heavy(3)
    parts = [Histogram.of(part, LOG_RATIO) for part in x.split([1, 0, 1999, 3000])]
    merged = parts[0]
    for part in parts[1:]:
        merged = merged.merge(part)
    whole = Histogram.of(x, LOG_RATIO)
    assert merged.counts.tolist() == whole.counts.tolist()
    assert (merged.low, merged.high) == (whole.low, whole.high)
    np.testing.assert_allclose(merged.moments, whole.moments, rtol=1e-12)
    assert whole.n == 5000


def test_many_blocks_are_one():
    x = heavy(4, n=200_001)
    h = Histogram.of(x, LOG_RATIO)
    assert h.n == 200_001
    assert h.moments[0].sum() == pytest.approx(float(x.double().sum()), abs=1e-9)
    assert h.moments[1].sum() == pytest.approx(float(x.double().square().sum()), rel=1e-9)


def test_nothing_has_no_quantile():
    h = Histogram.of(torch.zeros(0), LOG_RATIO)
    assert math.isnan(h.quantile(0.5))
    assert h.n == 0


@pytest.mark.parametrize("scale", [1e-4, 0.01, 0.03, 1.0])
def test_the_top_of_k3(scale):
    l = heavy(7, n=20_000, scale=scale).double().clamp(-20, 20)  # noqa: E741
    k3 = (torch.expm1(l) - l).sort(descending=True).values
    exact = k3[:200].sum(), k3.sum()  # 1% of 20,000
    top, total = Histogram.of(l, LOG_RATIO).k3_top()
    assert total == pytest.approx(float(exact[1]), rel=0.01)
    assert top / total == pytest.approx(float(exact[0] / exact[1]), rel=0.02)


def test_the_top_is_one_token_at_least():
    l = torch.tensor([2.0] + [0.1] * 9, dtype=torch.float64)  # noqa: E741
    top, total = Histogram.of(l, LOG_RATIO).k3_top()
    assert top == pytest.approx(math.exp(2) - 3)
    assert total == pytest.approx(math.exp(2) - 3 + 9 * (math.exp(0.1) - 1.1))
