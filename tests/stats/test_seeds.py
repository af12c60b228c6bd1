"""Student's distribution is exact, pairing cancels what seeds share, and Holm's procedure keeps its promise."""

import math

import numpy as np
import pytest

from offdrift.errors import BadValueError
from offdrift.stats.seeds import compare_all, over_seeds, paired, student_p, student_t


@pytest.mark.parametrize("dof", [1, 2, 3, 4, 5, 8, 29])
@pytest.mark.parametrize("t", [0.1, 1.0, 2.5, 7.0])
def test_student_is_the_integral_of_its_density(t, dof):
    x = np.linspace(0.0, t, 20_001)
    constant = math.gamma((dof + 1) / 2) / (math.gamma(dof / 2) * math.sqrt(dof * math.pi))
    inside = 2 * np.trapezoid(constant * (1 + x * x / dof) ** (-(dof + 1) / 2), x)
    assert student_p(t, dof) == pytest.approx(1 - inside, abs=1e-8)
    assert student_p(student_t(0.03, dof), dof) == pytest.approx(0.03, abs=1e-12)


@pytest.mark.parametrize("n", [2, 4, 9])
def test_an_interval_covers_the_mean_as_often_as_it_says(n):
    draws = np.random.default_rng(n).normal(0.3, 2.0, size=(4000, n))
    covered = sum(m.low <= 0.3 <= m.high for m in (over_seeds(x, confidence=0.8) for x in draws.tolist()))
    assert abs(covered / 4000 - 0.8) < 4 * math.sqrt(0.8 * 0.2 / 4000)


def test_what_a_seed_shares_cancels():
    of_seed = {0: 0.1, 1: 0.9, 2: 0.4, 3: 0.7}
    better = {seed: x + 0.05 + 0.001 * seed for seed, x in of_seed.items()}
    difference = paired(better, of_seed)
    assert (difference.n, difference.mean) == (4, pytest.approx(0.0515))
    assert difference.low > 0.04
    assert over_seeds(list(better.values())).low < over_seeds(list(of_seed.values())).mean


def test_only_seeds_that_both_have_are_compared():
    assert paired({0: 1.0, 1: 5.0}, {1: 2.0, 2: 9.0}).n == 1
    alone = paired({0: 1.0}, {1: 2.0})
    assert (alone.n, alone.p) == (0, 1.0)
    assert math.isnan(alone.mean)


@pytest.mark.parametrize(("n", "tells"), [(1, False), (2, False), (5, False), (6, True)])
def test_equal_differences_are_judged_by_their_signs(n, tells):
    seeds = range(n)
    (comparison,) = compare_all([(dict.fromkeys(seeds, 0.6), dict.fromkeys(seeds, 0.5))], larger="better")
    assert comparison.verdict == ("better" if tells else "undecided")
    assert math.isfinite(comparison.difference.low) == tells


@pytest.mark.parametrize("seed", range(40))
def test_holm_agrees_with_its_definition_and_with_its_own_intervals(seed):
    draws = np.random.default_rng(seed)
    n, alpha = int(draws.integers(2, 7)), 0.1
    shifts = draws.choice([0.0, 0.5, -2.0, 4.0], size=5)
    pairs = [
        (dict(enumerate(draws.normal(shift, 1.0, n).tolist())), dict(enumerate(draws.normal(0.0, 1.0, n).tolist())))
        for shift in shifts
    ]
    compared = compare_all(pairs, larger="worse", alpha=alpha)
    p = [paired(*pair).p for pair in pairs]
    for i, comparison in enumerate(compared):
        # Adjusted p: the largest of (m - rank) p over all tests up to this one's rank.
        ranks = sorted(range(5), key=p.__getitem__)
        upto = ranks[: ranks.index(i) + 1]
        adjusted = min(1.0, max((5 - k) * p[j] for k, j in enumerate(upto)))
        assert comparison.p_adjusted == pytest.approx(adjusted)
        decided = comparison.verdict != "undecided"
        assert decided == (adjusted <= alpha)
        d = comparison.difference
        assert (d.low > 0 or d.high < 0) == decided
        assert d.confidence >= 1 - alpha
        if decided:
            assert comparison.verdict == ("worse" if d.mean > 0 else "better")


def test_any_false_verdict_among_many_is_rare():
    draws, n, m, alpha = np.random.default_rng(7), 4, 6, 0.2
    wrong = 0
    for _ in range(600):
        base = draws.normal(size=n)
        pairs = [(dict(enumerate(draws.normal(size=n).tolist())), dict(enumerate(base.tolist()))) for _ in range(m)]
        wrong += any(c.verdict != "undecided" for c in compare_all(pairs, larger="better", alpha=alpha))
    share = wrong / 600
    assert 0.02 < share < alpha + 4 * math.sqrt(alpha * (1 - alpha) / 600)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: over_seeds([1.0, math.nan]), "leave out runs without a number"),
        (lambda: student_p(1.0, 0), "two seeds or more"),
        (lambda: student_t(1.0, 3), "alpha = 1.0"),
        (lambda: compare_all([], larger="neither"), '"better" or "worse"'),
    ],
)
def test_what_cannot_be_compared_is_refused(call, words):
    with pytest.raises(BadValueError, match=words):
        call()
