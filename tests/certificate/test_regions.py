"""Position weights, LN-TRM's bound and the error on the sample-ratio region, by hand and at scale."""

import itertools
import math

import numpy as np
import pytest

from offdrift.certificate.regions import TrustRegion, sample_ratio_error
from offdrift.errors import BadValueError, MethodError


def test_weights_and_their_sum_are_those_of_the_golden():
    # gate.ln_trm on FX-A: eps = .05, delta = .01
    four = TrustRegion(horizon=4, eps=0.05, delta=0.01)
    assert four.weights() == pytest.approx([0.122474, 0.1, 0.05, 0.0], abs=1e-6)
    assert four.total_weight == pytest.approx(0.272474, abs=1e-6)
    three = TrustRegion(horizon=3, eps=0.05, delta=0.01)
    assert three.weights() == pytest.approx([0.1, 0.05, 0.0])
    assert TrustRegion(horizon=1, delta=0.01).weights().tolist() == [0.0]


def test_sample_ratio_error_of_the_golden():
    # bound.G2: T = 4, tau = 0.05
    factors = np.expm1(0.05 * np.array([3, 2, 1, 0]))
    assert factors == pytest.approx([0.161834, 0.105171, 0.0512711, 0.0], abs=1e-6)
    assert sample_ratio_error(horizon=4, tau=0.05) == pytest.approx(0.01631837, abs=1e-8)


@pytest.mark.parametrize("tau", [0.0, 1e-12, 1e-5, 0.01, 0.3])
@pytest.mark.parametrize("horizon", [1, 2, 7, 300])
def test_the_closed_form_is_the_sum(tau, horizon):
    from fractions import Fraction

    # the sum with exp replaced by its series, in exact arithmetic: no cancellation
    def expm1(x: Fraction) -> Fraction:
        term, total = Fraction(1), Fraction(0)
        for j in range(1, 12 if x < 1e-2 else 20 if x < 1 else 300):
            term = term * x / j
            total += term
            if term < Fraction(1, 10**60):
                break
        return total

    t = Fraction(tau)
    exact = expm1(t * horizon) - horizon * expm1(t)
    assert sample_ratio_error(horizon=horizon, tau=tau) == pytest.approx(float(exact), rel=1e-12, abs=0)


@pytest.mark.parametrize("constants", ["paper", "sharp"])
def test_long_horizons_overflow_to_vacuous_never_to_nan(constants):
    found = [sample_ratio_error(horizon=10**7, tau=tau, constants=constants) for tau in (1e-9, 1e-3, 1e3)]
    assert not any(math.isnan(x) for x in found)
    assert found[2] == math.inf
    assert found == sorted(found)


def test_sharp_is_linear_in_the_horizon_where_the_paper_is_exponential():
    sharp = sample_ratio_error(horizon=4096, tau=0.01, constants="sharp")
    assert sharp == pytest.approx(4096 * 0.01**2 / 2, rel=1e-4)
    assert sample_ratio_error(horizon=4096, tau=0.01) > 1e17


@pytest.mark.parametrize("tau", [0.01, 0.4, 2.0])
@pytest.mark.parametrize("horizon", [1, 2, 3, 4])
def test_no_log_ratios_within_tau_exceed_it_and_it_is_nearly_attained(tau, horizon):
    grid = np.array(list(itertools.product(np.linspace(-tau, tau, 9), repeat=horizon)))
    d = np.expm1(grid).sum(1) - np.expm1(grid.sum(1))
    sharp = sample_ratio_error(horizon=horizon, tau=tau, constants="sharp")
    paper = sample_ratio_error(horizon=horizon, tau=tau)
    assert len(d) == 9**horizon
    assert d.max() <= sharp * (1 + 1e-12)
    assert np.abs(d).max() <= paper * (1 + 1e-12) + 1e-15
    if horizon > 1:
        assert np.abs(d).max() == pytest.approx(paper, rel=1e-9)  # all ratios up
    if horizon % 2 == 0 and tau < 1:  # half up, half down
        assert d.max() > 0.98 * sharp


@pytest.mark.parametrize("tau", [1e-3, 0.0999, 0.1001, 1.0])
def test_the_small_term_of_the_sharp_error_has_no_jump(tau):
    a = math.sinh(tau) / tau
    h = a - 1
    exact = h * h / 2 - h**3 / 6 + h**4 / 12 if tau < 0.5 else a * math.log(a) - a + 1
    got = sample_ratio_error(horizon=1, tau=tau, constants="sharp") - 2 * math.sinh(tau / 2) ** 2
    assert got == pytest.approx(exact, rel=1e-4, abs=1e-16)


@pytest.mark.parametrize(
    ("field", "value"),
    [("horizon", 0), ("delta", -0.1), ("delta", math.nan), ("eps", 1.5), ("tau", -1.0), ("tau", math.nan), ("tau", math.inf)],
)  # fmt: skip
def test_impossible_limits_are_refused_by_name(field, value):
    with pytest.raises(BadValueError, match=field):
        TrustRegion(**({"horizon": 4, "delta": 0.1} | {field: value}))


def test_other_bad_input_is_refused_by_name():
    with pytest.raises(MethodError, match="constants = 'best'"):
        sample_ratio_error(horizon=4, tau=0.1, constants="best")
