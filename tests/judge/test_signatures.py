"""The signatures are facts about distributions, shown by enumeration; test_planted.py shows them on samples."""

import math

import pytest
import torch

V, CONTEXTS = 50, 400


def contexts(seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return 2.5 * torch.randn(CONTEXTS, V, dtype=torch.float64, generator=g)


def moments(s: torch.Tensor, m: torch.Tensor, p: torch.Tensor) -> tuple[float, float, float]:
    """E_s[e^l], E_s[-l] and E_s[k3] of l = log p - log m, by enumeration."""
    possible = s > -math.inf
    l = torch.where(possible, p - m, 0.0)  # noqa: E741
    weight = s.exp()
    ratio = (weight * l.exp()).sum(1).mean()
    k1 = -(weight * l).sum(1).mean()
    k3 = (weight * (l.exp() - 1 - l)).sum(1).mean()
    return float(ratio), float(k1), float(k3)


@pytest.mark.parametrize("size", [0.01, 0.3, 2.0])
def test_no_drift_moves_the_mean_ratio(size):
    z = contexts()
    moved = z + size * torch.randn_like(z)
    ratio, k1, k3 = moments(z.log_softmax(1), z.log_softmax(1), moved.log_softmax(1))
    assert ratio == pytest.approx(1, abs=1e-12)
    assert k1 > 0
    assert k1 == pytest.approx(k3, abs=1e-12)


@pytest.mark.parametrize("temperature", [0.5, 0.8, 1.2, 2.0])
def test_raw_record_is_above_one_by_chi2_and_its_kl_is_negative(temperature):
    z = contexts()
    s, m = (z / temperature).log_softmax(1), z.log_softmax(1)
    ratio, k1, _ = moments(s, m, s)
    chi2 = ((2 * s - m).exp().sum(1) - 1).mean()
    assert ratio == pytest.approx(1 + float(chi2))
    assert k1 == pytest.approx(-float((s.exp() * (s - m)).sum(1).mean()))
    assert ratio > 1.01
    assert k1 < 0
    honest, _, _ = moments(s, s, m)
    assert honest == pytest.approx(1)  # an untempered trainer beside an honest record


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.99])
def test_filter_is_first_order_in_k1_and_second_in_k3(top_p):
    p = contexts().log_softmax(1)
    ordered, order = p.exp().sort(1, descending=True)
    kept = torch.zeros_like(p, dtype=torch.bool).scatter(1, order, ordered.cumsum(1) - ordered < top_p)  # fmt: skip
    s = p.where(kept, -math.inf).log_softmax(1)
    ratio, k1, k3 = moments(s, s, p)
    mass = p.exp().where(kept, 0.0).sum(1)
    assert ratio == pytest.approx(float(mass.mean()))
    assert ratio < 0.999
    assert k1 == pytest.approx(-float(mass.log().mean()))
    assert (k1 - k3) / k1 > 0.7
    assert k3 < float((mass.log() ** 2).mean())
