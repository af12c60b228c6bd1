"""Exact binomial intervals against the tails written out, and the unseen by simulation."""

import math

import numpy as np
import pytest

from offdrift.certificate.confidence import clopper_pearson, missing_mass, rule_of_three
from offdrift.errors import BadValueError


def tail(n: int, p: float, ks: range) -> float:
    return math.fsum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in ks)


@pytest.mark.parametrize(("k", "n"), [(1, 5), (2, 10), (7, 8), (30, 100)])
def test_each_end_makes_its_tail_alpha(k, n):
    found = clopper_pearson(k, n, alpha=0.1)
    assert tail(n, found.high, range(k + 1)) == pytest.approx(0.05, rel=1e-9)
    assert tail(n, found.low, range(k, n + 1)) == pytest.approx(0.05, rel=1e-9)
    assert clopper_pearson(k, n, alpha=0.05, sides="high").high == pytest.approx(found.high)


def test_ends():
    assert clopper_pearson(0, 0).high == 1
    assert math.isnan(clopper_pearson(0, 0).mean)
    none, all_of = clopper_pearson(0, 20, alpha=0.1), clopper_pearson(20, 20, alpha=0.1)
    assert (none.low, all_of.high) == (0, 1)
    assert none.high == pytest.approx(1 - 0.05 ** (1 / 20))
    assert all_of.low == pytest.approx(0.05 ** (1 / 20))


def test_large_counts_are_close_to_the_normal_interval_and_stay_exact():
    found = clopper_pearson(50_000, 100_000)
    assert found.high - found.low == pytest.approx(2 * 1.96 * 0.5 / math.sqrt(100_000), rel=0.01)


def test_coverage_is_at_least_one_minus_alpha_at_every_p():
    n, alpha = 12, 0.1
    ends = [clopper_pearson(k, n, alpha=alpha) for k in range(n + 1)]
    checked = 0
    for p in np.linspace(0.01, 0.99, 99):
        covered = sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k, e in enumerate(ends) if e.low <= p <= e.high)
        assert covered >= 1 - alpha - 1e-9
        checked += 1
    assert checked == 99


def test_rule_of_three():
    assert rule_of_three(0) == 1
    assert rule_of_three(1) == pytest.approx(0.95)
    assert rule_of_three(1000) == pytest.approx(3 / 1000, rel=0.01)
    q = rule_of_three(57, alpha=0.02)
    assert (1 - q) ** 57 == pytest.approx(0.02)


@pytest.mark.parametrize("weights", ["uniform", "zipf", "geometric"])
def test_missing_mass_is_covered(weights):
    rng, n, alpha, runs = np.random.default_rng(0), 60, 0.2, 300
    p = {"uniform": np.ones(80), "zipf": 1 / np.arange(1, 301), "geometric": 0.8 ** np.arange(60)}
    law = p[weights] / p[weights].sum()
    missed = 0
    for _ in range(runs):
        counts = np.bincount(rng.choice(len(law), n, p=law), minlength=len(law))
        found = missing_mass(int((counts == 1).sum()), n, alpha=alpha)
        missed += law[counts == 0].sum() > found.high
    assert missed <= runs * alpha + 3 * math.sqrt(runs * alpha * (1 - alpha))


def test_missing_mass_knows_when_everything_is_new_and_shrinks_when_nothing_is():
    assert missing_mass(50, 50).high == 1
    assert missing_mass(0, 0).high == 1
    assert missing_mass(0, 10_000).high == pytest.approx(2.4142 * math.sqrt(math.log(40) / 1e4), rel=1e-3)  # fmt: skip


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(BadValueError, match="events = 3 of draws = 2"):
        clopper_pearson(3, 2)
    with pytest.raises(BadValueError, match="singletons = -1"):
        missing_mass(-1, 2)
    with pytest.raises(BadValueError, match="draws = -1"):
        rule_of_three(-1)
    with pytest.raises(BadValueError, match="alpha = 1"):
        clopper_pearson(1, 2, alpha=1.0)
