"""What no pair of policies can have is refused by name; what is missing or loose is filled in."""

import math

import numpy as np
import pytest

from offdrift.certificate import premises
from offdrift.errors import BadValueError, ShapeError

NAN, INF = math.nan, math.inf


def test_missing_divergences_follow_from_delta():
    p = premises(horizon=4096, delta=1e-4, kl_seq=0.01)
    assert p.eps == pytest.approx(0.00707107, abs=1e-8)  # methods table, b.eP
    assert p.tv_seq == pytest.approx(0.07071068, abs=1e-8)  # methods table, b.DP
    assert p.mean_tv is None
    assert p.notes == {}
    assert premises(horizon=50, delta=1e-3).kl_seq == pytest.approx(0.05)
    assert premises(horizon=50, delta=8.0).eps == 1
    assert premises(horizon=50, delta=8.0).tv_seq == 1


def test_unknown_kl_leaves_the_tv_alone():
    p = premises(horizon=8, delta=INF, eps=0.1, tv_seq=0.3)
    assert (p.eps, p.tv_seq, p.kl_seq, p.notes) == (0.1, 0.3, INF, {})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("horizon", 0),
        ("horizon", -3),
        ("delta", -1e-9),
        ("delta", NAN),
        ("eps", 1.01),
        ("eps", -0.1),
        ("eps", NAN),
        ("kl_seq", -0.5),
        ("kl_seq", NAN),
        ("tv_seq", 1.5),
        ("tv_seq", NAN),
        ("chi2", -0.1),
        ("chi2", NAN),
        ("reward_sd", -0.1),
        ("reward_sd", 0.51),
        ("reward_sd", NAN),
        ("hellinger_seq", -0.1),
        ("hellinger_seq", NAN),
        ("kl_rewarded", -0.1),
        ("kl_unrewarded", NAN),
    ],
)
def test_impossible_numbers_are_refused_by_name(field: str, value: float):
    with pytest.raises(BadValueError, match=f"^{field} = {value}"):
        premises(**({"horizon": 8, "delta": 0.1} | {field: value}))


@pytest.mark.parametrize("bad", [-0.01, NAN, 0.2])
def test_mean_tv_above_its_maximum_is_refused_at_its_position(bad: float):
    mean_tv = np.array([0.1, 0.0, bad, bad])
    with pytest.raises(BadValueError, match=rf"^mean_tv\[2\] = {bad}"):
        premises(horizon=4, delta=INF, eps=0.1, mean_tv=mean_tv)
    with pytest.raises(BadValueError, match=r"^mean_tv\[0\]"):
        premises(horizon=4, delta=INF, eps=0.1, mean_tv=float(bad))


@pytest.mark.parametrize("length", [0, 1, 3, 5])
def test_mean_tv_needs_one_entry_per_position(length: int):
    with pytest.raises(ShapeError, match=rf"mean_tv has shape \({length},\) for horizon = 4"):
        premises(horizon=4, delta=0.1, mean_tv=np.zeros(length))


def test_loose_limits_are_tightened_and_it_says_so():
    p = premises(horizon=10, delta=0.02, eps=0.5, kl_seq=1.0, tv_seq=0.9, mean_tv=np.full(10, 0.4))
    # sqrt(.02/2) = .1; 10 * .02 = .2; sqrt(.2/2) = .3162
    assert (p.eps, p.kl_seq) == pytest.approx((0.1, 0.2))
    assert p.tv_seq == pytest.approx(math.sqrt(0.1))
    assert isinstance(p.mean_tv, np.ndarray)
    assert p.mean_tv == pytest.approx(np.full(10, 0.1))
    assert set(p.notes) == {"eps", "kl_seq", "tv_seq", "mean_tv"}
    assert p.notes["kl_seq"].startswith("kl_seq = 1 exceeds horizon * delta = 0.2")


def test_rounding_is_neither_refused_nor_noted():
    eps = 0.1
    p = premises(horizon=2, delta=0.02, eps=eps * (1 + 1e-7), mean_tv=np.full(2, eps * (1 + 1e-7)))
    assert p.notes == {}
    assert p.eps <= 0.1
    assert isinstance(p.mean_tv, np.ndarray)
    assert p.mean_tv.max() <= 0.1


def test_a_kl_rounded_to_zero_does_not_stop_a_run():
    p = premises(horizon=3, delta=0.0, eps=1e-7, mean_tv=np.full(3, 1e-8, dtype=np.float32))
    assert p.eps == 0
    assert set(p.notes) == {"eps", "mean_tv"}
    assert premises(horizon=3, delta=0.0, mean_tv=0.25).mean_tv == 0


def test_premises_beyond_table_1():
    p = premises(horizon=8, delta=0.1)
    assert (p.chi2, p.reward_sd, p.hellinger_seq, p.kl_rewarded, p.kl_unrewarded) == (None, 0.5, None, None, None)
    assert premises(horizon=8, delta=0.1, reward_range=6).reward_sd == 3
    assert premises(horizon=8, delta=0.1, reward_sd=2.5, reward_range=6).reward_sd == 2.5
    with pytest.raises(BadValueError, match=r"reward_sd = 3.1; rewards in a range of 6 have .* of at most 3"):
        premises(horizon=8, delta=0.1, reward_sd=3.1, reward_range=6)
    # TV <= sqrt(chi2)/2, the nearer of the two limits; chi-squared follows from no other divergence.
    p = premises(horizon=8, delta=0.02, chi2=0.01, eps=0.3)
    assert p.eps == pytest.approx(0.05)
    assert p.notes["eps"] == "eps = 0.3 exceeds sqrt(chi2)/2 = 0.05, which holds too and was used"
    assert premises(horizon=8, delta=0.02, chi2=1.0).eps == pytest.approx(0.1)
    assert premises(horizon=8, delta=INF, chi2=INF).eps == 1
    # Either part of KL_seq is at most all of it.
    p = premises(horizon=8, delta=0.02, kl_unrewarded=0.05)
    assert (p.kl_rewarded, p.kl_unrewarded, p.notes) == (pytest.approx(0.16), 0.05, {})
    # H^2 <= TV and H^2 <= KL/2.
    assert premises(horizon=8, delta=INF, eps=0.1, hellinger_seq=7.0).hellinger_seq == pytest.approx(0.8)
    assert premises(horizon=8, delta=0.02, eps=0.1, hellinger_seq=7.0).hellinger_seq == pytest.approx(0.08)


def test_hellinger_s_distance_is_below_tv_and_half_of_kl():
    """The two inequalities by which `hellinger_seq` is tightened, on pairs near, far, and without common support."""
    g = np.random.default_rng(0)
    mu, pi = (g.dirichlet(np.full(4, 0.3), size=2000) for _ in "ab")
    pi[:500] = 0.999 * mu[:500] + 0.001 * pi[:500]
    pi[500:1000, 0] = 0.0
    pi[500:1000] /= pi[500:1000].sum(1, keepdims=True)
    distance = ((np.sqrt(mu) - np.sqrt(pi)) ** 2).sum(1) / 2
    with np.errstate(divide="ignore"):
        kl = (mu * np.log(mu / pi)).sum(1)
    assert (distance <= np.abs(mu - pi).sum(1) / 2 + 1e-15).all()
    assert (distance <= kl / 2 + 1e-15).all()
    assert np.isinf(kl).sum() == 500
