"""The bounds read backwards: each answer is checked against the bound itself, on both sides."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offdrift.certificate import Bound, all_bounds, inequalities, inverse, tightest, unified
from offdrift.certificate.inequalities import context_shift, total_shift, weighted_shift
from offdrift.certificate.inverse import LONGEST, largest, route_crossovers, vacuous_horizon
from offdrift.errors import BadValueError, MethodError

INF, NAN = math.inf, math.nan


def best(**given) -> Bound:
    return tightest(all_bounds(**given))


many = settings(max_examples=60, deadline=None)


# -- the largest divergence -------------------------------------------------------------------


def test_closed_answers():
    # Mixed TV, 4 T eps tv_seq = target, whatever the KL: eps = 0.1 / (4 * 1000 * 0.01).
    paper = largest("eps", target=0.1, horizon=1000, delta=INF, tv_seq=0.01, constants="paper")
    assert paper == pytest.approx(0.0025, rel=1e-11)
    # Pointwise, 2 eps (0 + eps + 998 tv_seq) while eps < tv_seq < 2 eps: a quadratic in eps.
    got = largest("eps", target=0.1, horizon=1000, delta=INF, tv_seq=0.01)
    assert got == pytest.approx((math.sqrt(9.98**2 + 0.2) - 9.98) / 2, rel=1e-11)
    # At T = 2 the sum has one term, 2 sqrt(delta/2)^2 = delta; with the paper's constants 2 delta.
    assert largest("delta", target=0.3, horizon=2) == pytest.approx(0.3, rel=1e-11)
    half = largest("delta", target=0.3, horizon=2, constants="paper")
    assert half == pytest.approx(0.15, rel=1e-11)
    # Mixed KL, 4 T sqrt(delta/2) sqrt(kl_seq/2) = target at delta = 2e-4: sqrt(kl_seq/2) = 2.5e-3.
    known = {"target": 0.1, "horizon": 1000, "delta": 2e-4}
    got = largest("kl_seq", **known, constants="paper")
    assert got == pytest.approx(2 * 0.0025**2, rel=1e-11)
    # The sharp rows include KL_seq itself, here the smallest by far.
    assert largest("kl_seq", **known) == pytest.approx(0.1, rel=1e-11)
    assert largest("delta", target=0.1, horizon=1000) == pytest.approx(1e-4, rel=1e-11)
    far = largest("kl_seq", target=30.0, horizon=1000, delta=0.05, reward_range=10)
    assert far == pytest.approx(3.0, rel=1e-11), "more than the 2 nats at which Pinsker ends"


def test_closed_answers_of_bounds_beyond_the_paper():
    # Two tokens: sd chi = target. (Coupling is chi/2 there, and larger.)
    known = {"target": 0.1, "horizon": 2, "delta": INF}
    assert largest("chi2", **known, reward_sd=0.2) == pytest.approx(0.5, rel=1e-11)
    assert largest("reward_sd", **known, chi2=0.5) == pytest.approx(0.2, rel=1e-11)
    assert largest("chi2", **known, reward_sd=1e-6) == pytest.approx(1e5, rel=1e-11)  # far above what TV can feel
    # Three: sd^2 (chi^3 + 3 chi^2) = target^2 at chi = .1, sd = .2.
    goal = 0.2 * math.sqrt(0.031)
    assert largest("chi2", target=goal, horizon=3, delta=INF, reward_sd=0.2) == pytest.approx(0.1, rel=1e-11)
    # In a range of 5, deviations are five times as large, and so is the target.
    wide = largest("reward_sd", target=5 * goal, horizon=3, delta=INF, chi2=0.1, reward_range=5)
    assert wide == pytest.approx(1.0, rel=1e-11)
    assert largest("reward_sd", target=2.0, horizon=2, delta=INF, chi2=0.1) == 0.5  # any
    # 37 H = target, and the larger of two parts = target.
    assert largest("hellinger_seq", target=0.37, horizon=1000, delta=INF) == pytest.approx(0.01, rel=1e-11)
    far = {"target": 0.1, "horizon": 1000, "delta": INF}
    assert largest("kl_rewarded", **far, kl_unrewarded=0.05) == pytest.approx(0.1, rel=1e-11)
    assert largest("kl_unrewarded", **far, kl_rewarded=0.05) == pytest.approx(0.1, rel=1e-11)
    assert largest("kl_unrewarded", **far, kl_rewarded=0.2) == 0  # that part alone is too much
    # sd sqrt(2^T - 1 - T) is sd times 1, 2 and sqrt(11) at two, three and four tokens.
    assert vacuous_horizon(delta=INF, chi2=1.0, reward_sd=0.05, target=0.0499) == 2
    assert vacuous_horizon(delta=INF, chi2=1.0, reward_sd=0.05, target=0.0999) == 3
    assert vacuous_horizon(delta=INF, chi2=1.0, reward_sd=0.05, target=0.101) == 4  # .05 * sqrt(11)


@st.composite
def questions(draw: st.DrawFn) -> tuple[str, dict]:
    parameter = draw(st.sampled_from(inverse.PARAMETERS))
    horizon = draw(st.integers(2, 2000))
    known: dict = {
        "delta": 10 ** draw(st.floats(-8, 1)),
        "eps": draw(st.none() | st.floats(1e-6, 1)),
        "kl_seq": draw(st.none() | st.floats(1e-6, 3)),
        "tv_seq": draw(st.none() | st.floats(1e-5, 1)),
        "constants": draw(st.sampled_from(["paper", "sharp"])),
        "chi2": draw(st.none() | st.floats(1e-8, 3)),
        "reward_sd": draw(st.none() | st.floats(1e-3, 0.5)),
        "hellinger_seq": draw(st.none() | st.floats(1e-6, 3)),
        "kl_rewarded": draw(st.none() | st.floats(1e-6, 3)),
        "kl_unrewarded": draw(st.none() | st.floats(1e-6, 3)),
    }
    needed = inverse.NEEDS.get(parameter)
    if needed is not None and known[needed] is None:
        known[needed] = 1e-3
    known[parameter] = None
    if draw(st.booleans()):  # a mean is never above the maximum that is known
        limit = known["eps"] or 1.0
        known["mean_tv"] = limit * np.random.default_rng(horizon).random(horizon) ** 3
    return parameter, known | {"horizon": horizon}


@given(questions(), st.floats(1e-6, 3))
@many
def test_the_answer_is_the_last_value_that_keeps_the_target(question: tuple, target: float):
    parameter, known = question
    got = largest(parameter, target=target, **known)

    def bound(value: float) -> float:
        tried = known | {parameter: value}
        if tried.get("mean_tv") is not None and tried["eps"] is not None:
            tried["mean_tv"] = np.minimum(tried["mean_tv"], tried["eps"])
        return best(**tried).value

    most = {"eps": 1.0, "reward_sd": 0.5}.get(parameter, INF)
    if got == 0:  # only where another premise is too much by itself
        assert parameter in ("kl_rewarded", "kl_unrewarded", "hellinger_seq", "chi2", "reward_sd")
        assert bound(1e-150) > target
        return
    assert bound(got) <= target
    if got < most:
        assert bound(min(got * (1 + 1e-9), most)) > target


def test_any_value_works_and_none_does():
    # One token: the surrogate is exact whatever the drift.
    assert largest("delta", target=0.0, horizon=1) == INF
    assert largest("eps", target=0.0, horizon=1, delta=INF) == 1.0
    # eps and tv_seq alone keep 2 * 10 * 1e-3 * 1e-2 below the target.
    known = {"target": 1e-3, "horizon": 10, "eps": 1e-3, "tv_seq": 1e-2}
    assert largest("delta", **known) == INF
    assert largest("kl_seq", delta=1e-9, target=0.1, horizon=10) == INF
    # No divergence above 0 has error 0 at two tokens.
    assert largest("delta", target=0.0, horizon=2) == 0.0
    assert largest("eps", target=0.0, horizon=2, delta=INF) == 0.0
    assert largest("kl_seq", target=0.0, horizon=2, delta=0.1) == 0.0
    # A bound never exceeds 2 T, so a target that large is never missed.
    assert largest("delta", target=2 * 50, horizon=50) == INF


def test_reward_range_is_a_unit():
    known = {"horizon": 300, "delta": 1e-3}
    one = largest("eps", target=0.1, **known)
    assert largest("eps", target=1.0, **known, reward_range=10) == pytest.approx(one, rel=1e-11)


def test_whole_numbers_are_numbers():
    assert largest("eps", target=1, horizon=64, delta=1, mean_tv=0) == 1.0
    assert vacuous_horizon(delta=2, eps=1, kl_seq=1, tv_seq=1, mean_tv=1, target=1) == 2


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        ({"parameter": "tv_seq"}, MethodError, "parameter='tv_seq' is not one of"),
        ({"parameter": "delta", "delta": 0.1}, BadValueError, "delta is given and solved for"),
        ({"parameter": "eps"}, BadValueError, "solving for eps needs delta"),
        ({"parameter": "reward_sd", "delta": 1.0}, BadValueError, "solving for reward_sd needs chi2"),
        ({"parameter": "kl_rewarded", "delta": 1.0}, BadValueError, "needs kl_unrewarded: no bound depends on"),
        ({"chi2": -1.0}, BadValueError, "chi2 = -1.0; a chi-squared divergence is never negative"),
        ({"target": -1.0}, BadValueError, "target = -1.0; an error is not negative"),
        ({"target": NAN}, BadValueError, "target = nan"),
        ({"target": INF}, BadValueError, "target = inf"),
        ({"horizon": 0}, BadValueError, "horizon = 0"),
        ({"eps": 1.5}, BadValueError, "eps = 1.5"),
        ({"kl_seq": NAN}, BadValueError, "kl_seq = nan"),
        ({"reward_range": 0.0}, BadValueError, "reward_range = 0"),
        ({"constants": "half"}, MethodError, "constants = 'half'"),
    ],
)
def test_questions_that_make_no_sense_are_refused(words: dict, error: type, said: str):
    question = {"parameter": "delta", "target": 0.1, "horizon": 8} | words
    with pytest.raises(error, match=said):
        largest(question.pop("parameter"), **question)


# -- the shortest vacuous horizon -------------------------------------------------------------


@st.composite
def drifts(draw: st.DrawFn) -> dict:
    delta = 10 ** draw(st.floats(-10, 1))
    known: dict = {
        "delta": delta,
        "eps": draw(st.none() | st.floats(0.05, 1).map(lambda s: s * min(1, math.sqrt(delta / 2)))),
        "constants": draw(st.sampled_from(["paper", "sharp"])),
    }
    sequence = draw(st.sampled_from(["", "kl_seq", "kl_rate", "tv_seq"]))
    if sequence:
        known[sequence] = draw(st.floats(1e-4, 1)) * (delta if sequence == "kl_rate" else 1)
    return known


@given(drifts(), st.floats(0.01, 5))
@many
def test_the_horizon_before_is_not_vacuous(drift: dict, target: float):
    horizon = vacuous_horizon(**drift, target=target)
    rate = drift.pop("kl_rate", None)

    def bound(tokens: int) -> float:
        grown = {} if rate is None else {"kl_seq": tokens * rate}
        return best(horizon=tokens, **drift, **grown).value

    if horizon is None:  # a KL of sequences below the target is never vacuous
        assert bound(LONGEST) < target
        assert drift.get("kl_seq", LONGEST * (rate or 0.0)) < target
        return
    assert bound(horizon) >= target
    assert horizon > 1
    assert bound(horizon - 1) < target


def test_horizons_by_hand():
    # delta >= 2: every shift but the first is 1, so B* = 2 (T-1) or 4 (T-1).
    assert vacuous_horizon(delta=5.0) == 2
    assert vacuous_horizon(delta=5.0, target=20.0) == 11
    assert vacuous_horizon(delta=5.0, target=20.0, constants="paper") == 6  # 4 (T-1) >= 20
    # Mixed TV is 2 T eps tv_seq, pointwise 2 eps (T-1) tv_seq where eps >= tv_seq: 0.02 (T-1) >= 1.
    assert vacuous_horizon(delta=INF, eps=0.1, tv_seq=0.1) == 51
    assert vacuous_horizon(delta=INF, eps=0.1, tv_seq=0.1, reward_range=10) == 51
    assert vacuous_horizon(delta=INF, eps=0.1, tv_seq=0.1, constants="paper") == 25  # 0.04 T >= 1


def test_horizons_of_a_trillion_tokens(monkeypatch):
    tried = []
    monkeypatch.setattr(inverse, "all_bounds", lambda **k: tried.append(1) or all_bounds(**k))
    assert vacuous_horizon(delta=0.0) is None
    assert vacuous_horizon(delta=1e-30) is None
    # B* ~ (4/3) T^1.5 delta >= 1 at T = (0.75 / delta)^(2/3).
    far = vacuous_horizon(delta=1e-17, constants="paper")
    assert far is not None
    assert far == pytest.approx(0.75e17 ** (2 / 3), rel=1e-6)
    assert far > LONGEST / 10
    assert vacuous_horizon(delta=2.0**-36) == 2**36  # T delta >= 1, in whole powers of two
    # Doubling up to 10^12 and halving back: 40 bounds each, four times.
    assert 100 < len(tried) < 4 * 2 * 45


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"target": 0.0}, "target = 0.0"),
        ({"target": NAN}, "target = nan"),
        ({"kl_seq": 0.1, "kl_rate": 0.1}, "kl_seq and kl_rate are both given"),
        ({"kl_rate": -0.1}, "kl_rate = -0.1"),
        ({"kl_rate": NAN}, "kl_rate = nan"),
        ({"mean_tv": np.zeros(5)}, "mean_tv has 5 positions and no continuation"),
        ({"delta": NAN}, "delta = nan"),
        ({"eps": 2.0}, "eps = 2.0"),
    ],
)
def test_impossible_horizon_questions_are_refused(words: dict, said: str):
    with pytest.raises(BadValueError, match=said):
        vacuous_horizon(**({"delta": 0.1} | words))


# -- which route is the smallest --------------------------------------------------------------


def test_crossover_is_where_the_paper_puts_it():
    # Methods table b.cross: delta / (2 eps^2) = 2 tokens to come for Table 1's numbers.
    known = {"horizon": 4096, "delta": 1e-4, "eps": 5e-3}
    tv, kl = route_crossovers(**known, kl_seq=0.01, tv_seq=0.05, of="future")[::-1][:2]
    assert (tv.name, tv.first, tv.last) == ("tv", 4094, 4096)  # T - t = 2, 1, 0
    assert (kl.name, kl.last) == ("kl", 4093)
    routes = route_crossovers(**known, kl_seq=0.01, tv_seq=0.05)
    # sqrt(k delta/2) reaches tv_seq = .05 at k = 50; sqrt(kl_seq/2) = .0707 is looser.
    assert [(r.name, r.first, r.last) for r in routes] == [
        ("tv", 1, 3), ("kl", 4, 51), ("tv_seq", 52, 4096),
    ]  # fmt: skip
    # Pinsker tight: one token by TV, then KL to the cap of 1 at k = 2/delta.
    (first, then) = route_crossovers(horizon=4096, delta=1e-4)
    assert (first.name, first.last, then.name, then.last) == ("tv", 2, "kl", 4096)
    assert route_crossovers(horizon=30001, delta=1e-4)[-1].name == "one"


@given(
    st.integers(1, 400),
    st.floats(-6, 1),
    st.floats(0.05, 1),
    st.none() | st.floats(1e-3, 1),
    st.none() | st.floats(1e-4, 2),
    st.sampled_from(["context", "future"]),
)
@many
def test_the_named_route_attains_the_minimum(horizon, exponent, share, tv_seq, kl_seq, of):
    delta = 10.0**exponent
    eps = share * min(1.0, math.sqrt(delta / 2))
    known = {"horizon": horizon, "delta": delta, "eps": eps, "tv_seq": tv_seq, "kl_seq": kl_seq}
    routes = route_crossovers(**known, of=of)
    positions = [t for r in routes for t in range(r.first, r.last + 1)]
    assert positions == list(range(1, horizon + 1))
    names = [r.name for r in routes for _ in range(r.first, r.last + 1)]
    limit = horizon * delta if kl_seq is None else min(kl_seq, horizon * delta)
    caps = {"one": 1.0}
    if of == "context":
        caps["kl_seq"] = math.sqrt(limit / 2)
        caps["tv_seq"] = min(1.0, caps["kl_seq"], INF if tv_seq is None else tv_seq)
    for t, name in zip(positions, names):
        k = t - 1 if of == "context" else horizon - t
        terms = caps | {"tv": k * eps, "kl": math.sqrt(k * delta / 2)}
        assert terms[name] <= min(terms.values()) * (1 + 1e-12), (t, name, terms)


def test_equal_policies_and_exact_sequences():
    assert [(r.name, r.last) for r in route_crossovers(horizon=9, delta=0.0)] == [("tv", 9)]
    routes = route_crossovers(horizon=9, delta=0.1, tv_seq=0.0)
    assert [(r.name, r.first, r.last) for r in routes] == [("tv", 1, 1), ("tv_seq", 2, 9)]
    assert [(r.name, r.last) for r in route_crossovers(horizon=1, delta=INF)] == [("tv", 1)]
    with pytest.raises(MethodError, match="of='past'"):
        route_crossovers(horizon=9, delta=0.1, of="past")
    with pytest.raises(BadValueError, match="horizon = 0"):
        route_crossovers(horizon=0, delta=0.1)


# -- the sums behind them ---------------------------------------------------------------------


@pytest.mark.parametrize(("delta", "eps"), [(1e-9, 2e-6), (1e-12, 1.0), (1e-4, 5e-3), (3e-7, 3e-4), (INF, 1e-7)])
def test_a_million_tokens_to_the_last_digits(delta: float, eps: float, monkeypatch):
    horizon = 10**6
    k = np.arange(horizon, dtype=np.float64)
    terms = context_shift(k, delta=delta, eps=eps).astype(np.longdouble)  # 64-bit mantissa
    want = terms.sum()
    got = total_shift(horizon, delta=delta, eps=eps)
    assert abs(got / want - 1) < 1e-15
    mean_tv = np.linspace(0, 1e-3, horizon)
    sizes = []
    shift = inequalities.context_shift
    monkeypatch.setattr(inequalities, "context_shift", lambda k, **at: sizes.append(len(k)) or shift(k, **at))
    weighted = weighted_shift(mean_tv, horizon=horizon, delta=delta, eps=eps)
    assert sum(sizes) == horizon
    assert len(sizes) < horizon / 10**4  # whole arrays, not token by token
    assert abs(weighted / (mean_tv[::-1].astype(np.longdouble) * terms).sum() - 1) < 1e-14


def test_closed_sums_join_the_direct_ones():
    # Around n = 256, where the sum of square roots changes its formula.
    for horizon in range(250, 263):
        want = math.fsum(math.sqrt(k * 1e-6) for k in range(horizon))
        assert total_shift(horizon, delta=2e-6) == pytest.approx(want, rel=1e-15)


def test_a_trillion_tokens():
    # No cap, no crossover: sqrt(delta/2) (2/3 n^1.5 + n^.5/2 + zeta(-1/2) + ...) in 80 bits.
    n = np.longdouble(10**12 - 1)
    roots = 2 / np.longdouble(3) * n * np.sqrt(n) + np.sqrt(n) / 2 - np.longdouble(0.2078862249773546)
    want = np.sqrt(np.longdouble(1e-13) / 2) * roots
    assert abs(total_shift(10**12, delta=1e-13) / want - 1) < 1e-15


def test_toy_of_the_methods_table():
    # bound.toy: token KL and TV, and TV of the sequences, of two independent binary tokens.
    known = {
        "horizon": 2, "delta": 0.02160085, "eps": 0.1, "kl_seq": 0.02013551 + 0.02160085,
        "tv_seq": 0.12, "mean_tv": np.array([0.1, 0.1]),
    }  # fmt: skip
    assert unified(**known).value == pytest.approx(0.04, abs=1e-9)
    error = 0.00166667
    assert unified(**known, constants="sharp").value == pytest.approx(0.02, abs=1e-9)
    assert error < 0.02
