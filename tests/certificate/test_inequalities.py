"""Inequalities hold on random distributions, are attained where theory says, and sum exactly."""

import math

import numpy as np
import pytest

from offdrift.certificate import inequalities as ineq

INF = math.inf


def _random_rows(pairs: int, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.full(vocab, 0.5), pairs)
    drift = rng.choice([0.01, 0.3, 3.0], (pairs, 1)) * rng.standard_normal((pairs, vocab))
    q = p * np.exp(drift)
    return p, q / q.sum(1, keepdims=True)


def test_each_inequality_holds_on_random_distributions():
    p, q = _random_rows(2000, 5)
    tv = np.abs(p - q).sum(1) / 2
    kl = np.where(p > 0, p * np.log(p / q), 0).sum(1)
    chi2 = (q * q / p).sum(1) - 1  # E_p[(q/p)^2] - 1
    checked = 0
    for i in range(len(tv)):
        assert tv[i] <= ineq.pinsker(kl[i]) + 1e-12
        assert tv[i] <= ineq.tv_from_chi2(chi2[i]) + 1e-12
        checked += 1
    assert checked == 2000
    assert tv.max() > 0.5
    assert tv.min() < 0.01


def test_two_point_distributions_attain_them():
    # Fair coin against TV e: KL = -log(1 - 4 e^2)/2 = 2 e^2 (1 + 2 e^2 + ...), chi2 = 4 e^2.
    e = 1e-3
    assert ineq.pinsker(-0.5 * math.log1p(-4 * e * e)) == pytest.approx(e, rel=2 * e * e)
    assert ineq.tv_from_chi2(4 * e * e) == pytest.approx(e, rel=1e-12)


def test_limits():
    assert ineq.pinsker(0.0) == 0
    assert ineq.pinsker(2.0) == 1
    assert ineq.pinsker(INF) == 1
    assert ineq.tv_from_chi2(1e9) == 1
    assert ineq.marginal_kl(0, INF) == 0
    assert ineq.marginal_kl(3, 0.5) == 1.5


def _shift(k: int, delta: float, eps: float, cap: float) -> float:
    """Lemma 3.2 term by term, from the paper."""
    return 0.0 if k == 0 else min(cap, 1.0, k * eps, math.sqrt(k * delta / 2))


GRID = [
    (delta, eps, cap)
    for delta in (0.0, 1e-7, 3e-4, 0.2, 5.0, INF)
    for eps in (0.0, 1e-5, 7e-3, 0.6, 1.0)
    for cap in (0.03, 1.0)
]


@pytest.mark.parametrize("horizon", [1, 2, 3, 50, 3000])
def test_total_shift_is_the_sum(horizon: int):
    for delta, eps, cap in GRID:
        want = math.fsum(_shift(k, delta, eps, cap) for k in range(horizon))
        got = ineq.total_shift(horizon, delta=delta, eps=eps, cap=cap)
        assert got == pytest.approx(want, rel=1e-13, abs=0), (delta, eps, cap)
    assert len(GRID) == 60


@pytest.mark.parametrize("horizon", [1, 2, 3, 50, 3000])
def test_weighted_shift_is_the_weighted_sum(horizon: int):
    mean_tv = np.random.default_rng(1).random(horizon)
    for delta, eps, cap in GRID:
        if cap == 1.0:
            want = math.fsum(mean_tv[t - 1] * _shift(horizon - t, delta, eps, 1.0) for t in range(1, horizon + 1))
            got = ineq.weighted_shift(mean_tv, horizon=horizon, delta=delta, eps=eps)
            assert got == pytest.approx(want, rel=1e-13, abs=0), (delta, eps)
            uniform = ineq.weighted_shift(0.3, horizon=horizon, delta=delta, eps=eps)
            full = ineq.weighted_shift(np.full(horizon, 0.3), horizon=horizon, delta=delta, eps=eps)
            assert uniform == pytest.approx(full, rel=1e-13, abs=0)


def test_blocks_join_without_gap_or_overlap(monkeypatch: pytest.MonkeyPatch):
    mean_tv = np.random.default_rng(2).random(1000)
    whole = (
        ineq.total_shift(1000, delta=1e-3, eps=0.01),
        ineq.weighted_shift(mean_tv, horizon=1000, delta=1e-3, eps=0.01),
    )
    for block in (1, 7, 100, 999, 1000):
        monkeypatch.setattr(ineq, "_CHUNK", block)
        assert ineq.total_shift(1000, delta=1e-3, eps=0.01) == pytest.approx(whole[0], rel=1e-13)
        assert ineq.weighted_shift(mean_tv, horizon=1000, delta=1e-3, eps=0.01) == pytest.approx(whole[1], rel=1e-13)


def test_ten_million_tokens():
    horizon = 10**7
    # No cap: sum_{k<=n} sqrt(k) = 2/3 n^1.5 + n^.5/2 + zeta(-1/2) + n^-.5/24 (Euler-Maclaurin).
    n, zeta = horizon - 1, -0.2078862249773545
    root_sum = 2 / 3 * n**1.5 + n**0.5 / 2 + zeta + n**-0.5 / 24
    delta = 1e-8
    got = ineq.total_shift(horizon, delta=delta)
    assert got == pytest.approx(math.sqrt(delta / 2) * root_sum, rel=1e-13)
    # Cap at k = 1/eps: eps m (m+1)/2 for the first m = 10^5 steps, then ones.
    got = ineq.total_shift(horizon, delta=INF, eps=1e-5)
    assert got == pytest.approx(1e-5 * 1e5 * (1e5 + 1) / 2 + (n - 1e5), rel=1e-13)
