"""Intervals cover what they claim, by simulation, and are not absurdly wide beside the normal one."""

import math

import numpy as np
import pytest

from offdrift.certificate.confidence import asymptotic, betting, clopper_pearson, cluster_means, power, rule_of_three
from offdrift.errors import BadValueError, MethodError

ALPHA = 0.1
RUNS = 250


def draws(name: str, shape: tuple[int, int], rng: np.random.Generator) -> tuple[np.ndarray, float]:
    """Samples in [0, 1] and their true mean."""
    if name == "coin":
        return (rng.random(shape) < 0.5).astype(float), 0.5
    if name == "rare":
        return (rng.random(shape) < 0.03).astype(float), 0.03
    if name == "often":
        return (rng.random(shape) < 0.97).astype(float), 0.97
    if name == "narrow":
        return 0.5 + 0.02 * rng.uniform(-1, 1, shape), 0.5
    assert name == "skewed"
    return rng.beta(0.2, 2.0, shape), 0.2 / 2.2


NAMES = ["coin", "rare", "often", "narrow", "skewed"]
SLACK = 3 * math.sqrt(ALPHA * (1 - ALPHA) / RUNS)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [8, 100])
def test_they_miss_at_most_as_often_as_they_say(name, n):
    samples, mean = draws(name, (RUNS, n), np.random.default_rng(n))
    found = [betting(x, alpha=ALPHA) for x in samples]
    missed = sum(not e.low <= mean <= e.high for e in found)
    assert len(found) == RUNS
    assert missed <= RUNS * (ALPHA + SLACK)


@pytest.mark.parametrize("sides", ["low", "high"])
@pytest.mark.parametrize("name", NAMES)
def test_one_side_spends_all_of_alpha_and_covers(sides, name):
    samples, mean = draws(name, (RUNS, 60), np.random.default_rng(1))
    found = [betting(x, alpha=ALPHA, sides=sides) for x in samples]
    missed = sum(e.low > mean if sides == "low" else e.high < mean for e in found)
    assert missed <= RUNS * (ALPHA + SLACK)
    two = [betting(x, alpha=ALPHA) for x in samples]
    tighter = [e.low >= t.low if sides == "low" else e.high <= t.high for e, t in zip(found, two)]
    assert np.mean(tighter) > 0.9
    assert all((e.high == 1) if sides == "low" else (e.low == 0) for e in found)


@pytest.mark.parametrize("name", ["coin", "skewed"])
def test_betting_is_within_half_again_of_the_normal_interval(name):
    samples, _ = draws(name, (20, 1000), np.random.default_rng(2))
    bet, normal = (np.mean([(e := f(x)).high - e.low for x in samples]) for f in (betting, asymptotic))
    assert normal < bet < 1.5 * normal


def test_where_nothing_varies_the_width_falls_like_one_over_n():
    width = {n: (e := betting(np.full(n, 0.5))).high - e.low for n in (100, 1000)}
    assert width[100] < 0.05
    assert width[1000] < 0.15 * width[100]


def test_a_range_is_a_unit():
    x = np.random.default_rng(3).random(50)
    unit = betting(x)
    scaled = betting(6 * x - 2, low=-2.0, high=4.0)
    assert scaled.low == pytest.approx(6 * unit.low - 2, abs=1e-9)
    assert scaled.high == pytest.approx(6 * unit.high - 2, abs=1e-9)
    again = unit.scaled(3.0)
    assert (again.mean, again.low, again.high) == (3 * unit.mean, 3 * unit.low, 3 * unit.high)


def test_a_variable_bounded_on_one_side_has_that_side_s_opposite_end():
    # log-normal, mean exp(1/2): bounded below by 0, unbounded above
    samples = np.random.default_rng(4).lognormal(size=(RUNS, 200)) - 1
    found = [betting(x, low=-1.0, high=math.inf, alpha=ALPHA, sides="low") for x in samples]
    mean = math.exp(0.5) - 1
    assert sum(e.low > mean for e in found) <= RUNS * (ALPHA + SLACK)
    assert np.mean([e.low for e in found]) > 0.3
    assert {e.high for e in found} == {math.inf}


def test_no_and_one_observation_say_almost_nothing():
    none = betting(np.empty(0))
    assert math.isnan(none.mean)
    assert (none.low, none.high, none.n) == (0, 1, 0)
    one = betting(np.array([1.0]))
    assert one.low < 0.2
    assert one.high == 1


@pytest.mark.parametrize("end", [0.0, 1.0])
def test_all_at_one_end_is_nearly_the_rule_of_three(end):
    n, found = 200, betting(np.full(200, end), alpha=0.05, sides="high" if end == 0 else "low")
    away = found.high if end == 0 else 1 - found.low
    exact = 1 - 0.05 ** (1 / n)
    assert exact <= away < 1.2 * exact
    assert (found.low if end == 0 else found.high) == end


@pytest.mark.parametrize("bad", [-1e-9, 1.0001, math.nan, math.inf])
def test_values_outside_the_range_are_refused_by_name(bad):
    with pytest.raises(BadValueError, match=r"x\[1\] = .* lies outside \[0.0, 1.0\]"):
        betting(np.array([0.5, bad]))


def test_what_cannot_be_is_refused():
    x = np.array([0.5])
    for alpha in (0.0, 1.0, math.nan):
        with pytest.raises(BadValueError, match="alpha"):
            betting(x, alpha=alpha)
    with pytest.raises(MethodError, match="sides"):
        betting(x, sides="left")
    with pytest.raises(BadValueError, match=r"low = 1\.0 and high = 0\.0"):
        betting(x, low=1.0, high=0.0)


def test_power_is_how_often_the_interval_ends_above():
    """Against intervals of samples drawn here, one at a time."""
    x = np.array([-1.0, -0.2, 0.0, 0.5, 3.0])
    rng = np.random.default_rng(3)
    for size, alpha in ((20, 0.05), (60, 0.05), (60, 0.2)):
        expected = np.mean(
            [
                betting(rng.choice(x, size), low=-1.0, high=math.inf, alpha=alpha, sides="low").low > 0
                for _ in range(400)
            ]
        )
        estimate = power(x, size, low=-1.0, high=math.inf, alpha=alpha)
        assert 0.05 < expected < 0.98
        assert abs(estimate - expected) < 4 * math.sqrt(2 * 0.25 / 400)


def test_power_of_a_constant_is_none_or_all():
    sizes = range(1, 60)
    whole = [betting(np.full(n, 0.2), low=-1.0, high=math.inf, sides="low").low > 0 for n in sizes]
    assert [power(np.array([0.2]), n, low=-1.0, high=math.inf, samples=2) for n in sizes] == whole
    assert 0 < sum(whole) < len(whole)


def test_an_interval_over_sequences_of_shared_prompts_would_not_cover():
    # 40 prompts, each solved always or never: 16 answers to a prompt are one observation.
    rng, missed = np.random.default_rng(5), {"prompts": 0, "answers": 0}
    ids = np.repeat(np.arange(40), 16)
    for _ in range(100):
        answers = np.repeat((rng.random(40) < 0.5).astype(float), 16)
        by_prompt = betting(cluster_means(answers, ids), alpha=ALPHA)
        by_answer = betting(answers, alpha=ALPHA)
        missed["prompts"] += not by_prompt.low <= 0.5 <= by_prompt.high
        missed["answers"] += not by_answer.low <= 0.5 <= by_answer.high
    assert missed["prompts"] <= 10 + 3 * 3
    assert missed["answers"] > 40


def test_cluster_means_are_ordered_by_id_and_may_be_ragged():
    x = np.array([1.0, 2.0, 3.0, 10.0])
    assert cluster_means(x, np.array([9, -4, 9, 5])).tolist() == [2.0, 10.0, 2.0]
    assert cluster_means(x, None) is x


def test_the_normal_interval_needs_two_observations_and_is_mean_plus_minus_z_s_over_root_n():
    assert asymptotic(np.array([1.0])).high == math.inf
    x = np.array([1.0, 2.0, 4.0])
    found = asymptotic(x, alpha=0.05)
    half = 1.959963985 * x.std(ddof=1) / math.sqrt(3)
    assert (found.low, found.high) == pytest.approx((x.mean() - half, x.mean() + half))
    assert found.method == "asymptotic"


# Exact binomial intervals against the tails written out, and the unseen by simulation.


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


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(BadValueError, match="events = 3 of draws = 2"):
        clopper_pearson(3, 2)
    with pytest.raises(BadValueError, match="draws = -1"):
        rule_of_three(-1)
    with pytest.raises(BadValueError, match="alpha = 1"):
        clopper_pearson(1, 2, alpha=1.0)
