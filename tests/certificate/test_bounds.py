"""The bounds' numbers: Table 1, hand values, limits, remarks 3.7 and 3.9, monotonicity."""

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offdrift.certificate import Bound, all_bounds, bounds, tightest, unified
from offdrift.errors import BadValueError, MethodError

KL_ONLY = {"horizon": 4096, "delta": 1e-4, "kl_seq": 0.01}
KL_TV = KL_ONLY | {"eps": 5e-3, "tv_seq": 0.05}
SIX = ["pinsker_marginal_kl", "pinsker_marginal_tv", "mixed_kl", "mixed_tv", "coupling", "adaptive"]


def values(**given: object) -> dict[str, float]:
    return {b.name: b.value for b in all_bounds(**given)}  # type: ignore[arg-type]


# -- numbers ----------------------------------------------------------------------------------

# Table 1 as printed: KL-only and KL+TV. For the Pinsker-Marginal rows, and the worst case of the
# adaptive one, the paper prints the closed form of eq. 14.
PRINTED = {
    "classical_tv": ("1,677", "839"),
    "coupling": ("113.8", "79.9"),
    "pinsker_marginal_kl": ("35.0", "35.0"),
    "pinsker_marginal_tv": ("35.0", "24.7"),
    "mixed_kl": ("8.2", "8.2"),
    "mixed_tv": ("8.2", "4.1"),
}


@pytest.mark.parametrize(("column", "known"), [(0, KL_ONLY), (1, KL_TV)])
def test_table_1_to_every_printed_digit(column: int, known: dict[str, float]):
    rows = {b.name: b for b in all_bounds(**known)}  # type: ignore[arg-type]
    for name, printed in PRINTED.items():
        row = rows[name]
        value = row.closed_form if name.startswith("pinsker") else row.value
        assert value is not None
        digits = 1 if "." in printed[column] else 0
        assert f"{value:,.{digits}f}" == printed[column], name
    assert f"{unified(**known).value:.1f}" == PRINTED["mixed_tv"][column]  # type: ignore[arg-type]
    assert len(PRINTED) == 6


def test_table_1_recomputed():
    # Methods table, keys b.*: exact sums, D-bar uniform at eps for the adaptive row.
    kt = values(**KL_TV, mean_tv=5e-3)
    k = values(**KL_ONLY, mean_tv=math.sqrt(1e-4 / 2))
    assert [kt[n] for n in SIX] == pytest.approx([34.946092, 24.710619, 8.192, 4.096, 79.91, 24.710577], abs=1e-6)
    assert [k[n] for n in SIX] == pytest.approx([34.946092, 34.946092, 8.192, 8.192, 113.838209, 34.946092], abs=1e-6)
    assert kt["classical_kl"] == k["classical_kl"] == pytest.approx(1677.312, rel=1e-12)
    assert k["classical_tv"] == pytest.approx(1677.312, rel=1e-12)
    assert kt["classical_tv"] == pytest.approx(838.656, rel=1e-12)
    assert kt["classical_kl"] / unified(**KL_TV).value == pytest.approx(409.5, rel=1e-12)


def test_closed_forms_recomputed():
    # Methods table: b.pmkl.closed, b.pmtv.closed, b.coup.cap, b.cross, b.cross.P.
    eps = math.sqrt(1e-4 / 2)
    assert bounds.pinsker_marginal_kl_upper(horizon=4096, delta=1e-4) == pytest.approx(34.952533, abs=1e-6)
    assert bounds.pinsker_marginal_tv_upper(horizon=4096, delta=1e-4, eps=5e-3) == pytest.approx(24.715173, abs=1e-6)
    assert bounds.coupling_upper(horizon=4096, eps=eps) == pytest.approx(115.852375, abs=1e-6)


SMALL = {
    "horizon": 4,
    "delta": 0.02,
    "eps": 0.05,
    "kl_seq": 0.05,
    "tv_seq": 0.1,
    "mean_tv": np.array([0.01, 0.05, 0.0, 0.02]),
}


def test_small_check_by_hand():
    # sqrt(delta/2) = .1; S = .1 (1 + sqrt2 + sqrt3); future limits at T-t = 3, 2, 1, 0 are
    # .1 sqrt3, .1 sqrt2, .1, 0 by KL and .15, .1, .05, 0 by TV. Methods table, keys b.s.*.
    root = 0.1 * (1 + math.sqrt(2) + math.sqrt(3))
    want = {
        "classical_kl": 4 * 3 * 0.02,
        "classical_tv": 2 * 4 * 3 * 0.05**2,
        "pinsker_marginal_kl": 4 * 0.1 * root,
        "pinsker_marginal_tv": 4 * 0.05 * root,
        "mixed_kl": 4 * 4 * 0.1 * math.sqrt(0.025),
        "mixed_tv": 4 * 4 * 0.05 * 0.1,
        "coupling": 4 * 0.05 * (0.05 + 0.1 + 0.15),
        "adaptive_kl": 4 * (0.01 * 0.1 * math.sqrt(3) + 0.05 * 0.1 * math.sqrt(2)),
        "adaptive_tv": 4 * (0.01 * 0.15 + 0.05 * 0.1),
        "adaptive": 4 * (0.01 * 0.15 + 0.05 * 0.1),
    }
    got = values(**SMALL)
    assert got == pytest.approx(want, rel=1e-12)
    assert [got[n] for n in SIX] == pytest.approx([0.165851, 0.08292529, 0.252982, 0.08, 0.06, 0.026], abs=1e-6)
    best = unified(**SMALL)  # type: ignore[arg-type]
    assert (best.name, best.value) == ("adaptive", pytest.approx(0.026))


def test_pointwise_by_hand():
    # min(.05, .1) * sum of min((t-1) .05, .1 sqrt(t-1), tv_seq = .1, sqrt(.025)): 0 .05 .1 .1
    got = values(**SMALL, constants="sharp")["pointwise"]
    assert got == pytest.approx(2 * 0.05 * (0.05 + 0.1 + 0.1), rel=1e-12)
    kl_capped = bounds.pointwise(horizon=4, delta=0.02, eps=0.05, kl_seq=0.0032, tv_seq=0.1)
    assert kl_capped == pytest.approx(2 * 0.05 * 3 * 0.04, rel=1e-12)


FURTHER = {"chi2": 0.1, "reward_sd": 0.2, "hellinger_seq": 0.01, "kl_rewarded": 0.002, "kl_unrewarded": 0.03}


def test_bounds_beyond_the_paper_by_hand():
    known = {"horizon": 3, "delta": math.inf, "constants": "sharp"}
    rows = {b.name: b for b in all_bounds(**known, **FURTHER)}
    assert rows["variance"].value == pytest.approx(0.2 * math.sqrt(1.1**3 - 1 - 0.3), rel=1e-12)  # sqrt(.031)
    assert rows["two_sided"].value == 0.03
    assert rows["two_sided"].below == 0.002
    assert rows["sequence_hellinger"].value == pytest.approx(0.37)
    assert [rows[n].below for n in rows if n != "two_sided"] == [None] * (len(rows) - 1)
    assert all(rows[n].unified for n in ("variance", "two_sided", "sequence_hellinger"))
    # Rewards from 0 to 4 with a deviation of .8: four times as much of everything.
    wide = {b.name: b for b in all_bounds(**known, **FURTHER | {"reward_sd": 0.8}, reward_range=4.0)}
    for name in ("variance", "two_sided", "sequence_hellinger"):
        assert wide[name].value == pytest.approx(4 * rows[name].value)
    assert wide["two_sided"].below == pytest.approx(0.008)
    # No deviation is known: half the range, the largest there is. The tilted pair of two tokens attains it.
    half = values(horizon=2, delta=math.inf, chi2=0.01, constants="sharp")["variance"]
    assert half == pytest.approx(0.5 * 0.01, rel=1e-12)
    assert values(**known, chi2=math.inf)["variance"] == math.inf
    assert values(**known, chi2=math.inf, reward_sd=0.0)["variance"] == 0
    assert values(horizon=1, delta=math.inf, chi2=math.inf, constants="sharp")["variance"] == 0


def test_each_bound_beyond_the_paper_is_listed_where_its_premises_are():
    known = {"horizon": 3, "delta": 0.05}
    assert not {"variance", "two_sided", "sequence_hellinger"} & set(values(**known, constants="sharp", reward_sd=0.1))
    assert set(values(**known, **FURTHER)) == set(values(**known))  # the paper's constants have none of them
    for name, row in (("chi2", "variance"), ("hellinger_seq", "sequence_hellinger"), ("kl_rewarded", "two_sided")):
        alone = {b.name: b for b in all_bounds(**known, constants="sharp", **{name: FURTHER[name]})}
        assert set(alone) - set(values(**known, constants="sharp")) == {row}
    # Of a part that was not measured it is known that it is at most KL_seq = 3 * .05.
    assert alone["two_sided"].value == pytest.approx(0.15)
    assert alone["two_sided"].below == 0.002
    loose = {b.name: b for b in all_bounds(**known, constants="sharp", hellinger_seq=9.0, kl_rewarded=9.0)}
    assert loose["two_sided"].below == pytest.approx(0.15)
    assert loose["sequence_hellinger"].value == pytest.approx(37 * 0.075)  # KL_seq / 2
    assert loose["sequence_hellinger"].note.startswith("hellinger_seq = 9 exceeds kl_seq/2 = 0.075")


@pytest.mark.parametrize("chi2", [1e-300, 1e-12, 1e-4, 0.00024, 0.00025, 1e-3, 0.1, 3.0])
@pytest.mark.parametrize("horizon", [2, 3, 24, 25, 26, 4096])
def test_the_variance_keeps_its_digits(horizon: int, chi2: float):
    with localcontext() as context:
        context.prec = 700  # (1 + 1e-300)^2 - 1 - 2e-300 is 1e-600
        chi = Decimal(chi2)
        square = (1 + chi) ** horizon - 1 - horizon * chi
        want = square.sqrt() / 2
    got = bounds.variance(horizon=horizon, chi2=chi2, reward_sd=0.5)
    assert got == (math.inf if horizon * math.log1p(chi2) > 700 else pytest.approx(float(want), rel=1e-13))


@pytest.mark.parametrize("horizon", [2, 3, 24, 25, 4096])
def test_the_variance_grows_where_its_formula_changes(horizon: int):
    grid = (1 + np.linspace(-1e-3, 1e-3, 41)) / horizon
    got = [bounds.variance(horizon=horizon, chi2=float(chi), reward_sd=0.5) for chi in grid]
    steps = np.diff(got) / got[0]
    assert (steps > 0).all()
    assert steps.max() < 4 * steps.min()  # and does not jump


def test_one_token_is_exact_except_for_the_mixed_rows():
    got = values(horizon=1, delta=0.02, kl_seq=0.02, mean_tv=0.05)
    assert got.pop("mixed_kl") == pytest.approx(0.04)  # 4 * .1 * .1; methods table, b.T1.mixkl
    assert got.pop("mixed_tv") == pytest.approx(0.04)
    assert set(got.values()) == {0.0}
    assert len(got) == 8
    for constants in ("paper", "sharp"):
        assert unified(horizon=1, delta=0.02, constants=constants).value == 0


def test_equal_policies_have_no_error():
    got = values(horizon=100, delta=0.0, mean_tv=np.zeros(100), constants="sharp")
    assert set(got.values()) == {0.0}
    assert len(got) == 12


def test_unknown_kl_leaves_the_tv_rows():
    got = values(horizon=100, delta=math.inf, eps=1e-3, tv_seq=0.02)
    assert got["classical_kl"] == math.inf
    assert got["coupling"] == pytest.approx(4 * 1e-6 * 99 * 100 / 2)
    assert got["mixed_tv"] == pytest.approx(4 * 100 * 1e-3 * 0.02)
    zero = all_bounds(horizon=100, delta=math.inf, eps=0.0, kl_seq=0.0, mean_tv=0.0)
    assert not any(math.isnan(b.value) or math.isnan(b.closed_form or 0) for b in zero)
    assert values(horizon=1, delta=math.inf)["classical_kl"] == 0


# -- what a row says --------------------------------------------------------------------------


def test_reward_range_scales_every_row():
    one = all_bounds(**SMALL)  # type: ignore[arg-type]
    three = all_bounds(**SMALL, reward_range=3.0)  # type: ignore[arg-type]
    assert [b.value for b in three] == pytest.approx([3 * b.value for b in one])
    assert [b.closed_form for b in three if b.closed_form] == pytest.approx(
        [3 * b.closed_form for b in one if b.closed_form]
    )
    assert unified(**SMALL, reward_range=3.0).value == pytest.approx(3 * 0.026)  # type: ignore[arg-type]


@pytest.mark.parametrize("reward_range", [0.0, -1.0, math.inf, math.nan])
def test_impossible_reward_ranges_are_refused(reward_range: float):
    with pytest.raises(BadValueError, match=f"reward_range = {reward_range}"):
        all_bounds(horizon=4, delta=0.1, reward_range=reward_range)


def test_other_constants_are_refused():
    with pytest.raises(MethodError, match="constants = 'half'"):
        all_bounds(horizon=4, delta=0.1, constants="half")


def test_sharp_halves_every_row_and_adds_its_own():
    paper, sharp = values(**SMALL), values(**SMALL, constants="sharp")
    assert set(sharp) - set(paper) == bounds.BEYOND - {"two_sided", "variance", "sequence_hellinger"}
    assert sharp["sequence_kl"] == SMALL["kl_seq"]
    assert {n: 2 * sharp[n] for n in paper} == pytest.approx(paper)
    assert len(paper) == 10


def test_without_mean_tv_there_are_no_adaptive_rows():
    names = set(values(**KL_TV))
    assert len(names) == 7
    assert not any(n.startswith("adaptive") for n in names)


def test_the_unified_bound_is_the_minimum_of_the_papers_six():
    rows = all_bounds(**SMALL)  # type: ignore[arg-type]
    assert sorted(b.name for b in rows if b.unified) == sorted(SIX)
    sharp = all_bounds(**SMALL, constants="sharp")  # type: ignore[arg-type]
    assert sorted(b.name for b in sharp if b.unified) == sorted([*SIX, "pointwise", "sequence_kl"])
    for six in range(6):
        marked = [_bound(n, 0.5 if i == six else 1.0) for i, n in enumerate(SIX)]
        assert tightest([_bound("classical_tv", 0.1, unified=False), *marked]).name == SIX[six]


def _bound(name: str, value: float, *, unified: bool = True) -> Bound:
    return Bound(name, value, route="", scaling="", equation="", unified=unified)


def test_a_row_says_which_of_its_premises_were_tightened():
    rows = {b.name: b for b in all_bounds(horizon=8, delta=0.02, eps=0.5)}
    assert {n for n, b in rows.items() if b.note} == {
        "classical_tv", "coupling", "pinsker_marginal_tv", "mixed_tv",
    }  # fmt: skip
    assert rows["coupling"].note.startswith("eps = 0.5 exceeds sqrt(delta/2) = 0.1")


# -- relations, on random premises ------------------------------------------------------------


@st.composite
def known(draw: st.DrawFn) -> dict:
    """Consistent premises, from certain agreement to certain disagreement."""
    horizon = draw(st.integers(1, 300))
    delta = 10 ** draw(st.floats(-8, 1))
    share = st.floats(0.01, 1)
    eps = draw(share) * min(1.0, math.sqrt(delta / 2))
    kl_seq = draw(share) * horizon * delta
    tv_seq = draw(share) * min(1.0, math.sqrt(kl_seq / 2))
    seed = draw(st.integers(0, 2**16))
    mean_tv = eps * np.random.default_rng(seed).random(horizon)
    return {
        "horizon": horizon, "delta": delta, "eps": eps, "kl_seq": kl_seq, "tv_seq": tv_seq, "mean_tv": mean_tv,
        "chi2": 4 * eps * eps / draw(share), "reward_sd": 0.5 * draw(share), "hellinger_seq": draw(share) * kl_seq,
        "kl_rewarded": draw(share) * kl_seq, "kl_unrewarded": draw(share) * kl_seq,
    }  # fmt: skip


many = settings(max_examples=100, deadline=None)


@given(known())
@many
def test_remark_3_9_adaptive_subsumes(k: dict):
    got = values(**k)
    fallback = min(got[n] for n in ("pinsker_marginal_kl", "pinsker_marginal_tv", "coupling"))
    assert got["adaptive"] <= fallback * (1 + 1e-12)
    assert got["adaptive"] <= min(got["adaptive_kl"], got["adaptive_tv"]) * (1 + 1e-12)
    assert unified(**k).name in ("mixed_kl", "mixed_tv", "adaptive") or fallback == 0


@given(known())
@many
def test_pointwise_is_never_worse(k: dict):
    got = values(**k, constants="sharp")
    others = ["pinsker_marginal_kl", "pinsker_marginal_tv", "coupling", "mixed_kl", "mixed_tv"]
    assert got["pointwise"] <= min(got[n] for n in others) * (1 + 1e-12)


@given(known())
@many
def test_remark_3_7_worst_case_substitutions(k: dict):
    horizon, delta, eps = k["horizon"], k["delta"], k["eps"]
    worst = np.full(horizon, min(1.0, math.sqrt(delta / 2)))
    assert bounds.adaptive_kl(horizon=horizon, delta=delta, mean_tv=worst) == pytest.approx(
        bounds.pinsker_marginal_kl(horizon=horizon, delta=delta), rel=1e-12
    )
    assert bounds.adaptive_tv(horizon=horizon, eps=eps, mean_tv=np.full(horizon, eps)) == pytest.approx(
        bounds.coupling(horizon=horizon, eps=eps), rel=1e-12
    )


@given(known())
@many
def test_order_of_the_rows(k: dict):
    got = values(**k)
    assert got["coupling"] <= got["classical_tv"] * (1 + 1e-12)
    assert got["classical_tv"] <= got["classical_kl"] * (1 + 1e-12)
    assert got["pinsker_marginal_tv"] <= got["pinsker_marginal_kl"] * (1 + 1e-12)
    assert got["mixed_tv"] <= got["mixed_kl"] * (1 + 1e-12)
    closed = [b for b in all_bounds(**k) if b.closed_form is not None]
    assert len(closed) == 3
    for b in closed:
        assert b.value <= b.closed_form * (1 + 1e-12)  # type: ignore[operator]


@given(known(), st.floats(1.0, 3.0))
@many
def test_more_drift_never_lowers_a_bound(k: dict, factor: float):
    wider = {n: factor * k[n] for n in ("eps", "tv_seq", "mean_tv")}
    squares = ("delta", "kl_seq", "chi2", "hellinger_seq", "kl_rewarded", "kl_unrewarded")
    more = {n: factor**2 * k[n] for n in squares} | {"reward_sd": min(0.5, factor * k["reward_sd"])}
    capped = {n: np.minimum(v, 1.0) if n == "mean_tv" else min(v, 1.0) for n, v in wider.items()}
    before, after = values(**k, constants="sharp"), values(**k | more | capped, constants="sharp")
    longer = k | {"horizon": k["horizon"] + 1, "mean_tv": np.concatenate([k["mean_tv"], [0.0]])}
    extended = values(**longer, constants="sharp")
    assert len(before) == 15
    for name, value in before.items():
        assert after[name] >= value * (1 - 1e-12), name
        assert extended[name] >= value * (1 - 1e-12), name


@given(known(), st.sampled_from(["delta", "eps", "kl_seq", *FURTHER]), st.floats(1.0, 1.0 + 1e-9) | st.floats(1.0, 9.0))
@many
def test_one_larger_premise_never_lowers_a_bound(k: dict, name: str, factor: float):
    """What `inverse.largest` bisects on: each premise by itself, by a rounding or by much."""
    most = {"eps": 1.0, "reward_sd": 0.5}.get(name, math.inf)
    before = values(**k, constants="sharp")
    after = values(**k | {name: min(most, factor * k[name])}, constants="sharp")
    assert len(after) == 15
    for row, value in before.items():
        assert after[row] >= value * (1 - 4e-15), row
