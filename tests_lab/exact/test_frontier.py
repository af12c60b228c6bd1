"""Estimators of testbeds: recursions against enumeration, samples against both, and the verdicts."""

import math
from dataclasses import replace

import pytest
import torch

from offdrift.errors import BadValueError, MethodError
from offdrift.methods import METHODS
from offdrift_lab.exact import frontier as module
from offdrift_lab.exact.frontier import (
    BETWEEN,
    TESTBEDS,
    Estimate,
    all_sequences,
    coefficients,
    conjecture,
    draw,
    family,
    frontier,
    gradients,
    known_moments,
    make_testbed,
    verdict,
)
from offdrift_lab.exact.markov import return_gradient

every_testbed = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "walk" else pytest.mark.slow) for name in TESTBEDS]
)


@every_testbed
@pytest.mark.parametrize("kl", [0.0, 1e-3, 0.05])
def test_drift_per_token_is_what_was_asked_for_at_every_horizon(name, kl):
    for horizon in (2, 16, 128):
        bed = make_testbed(name, horizon=horizon, kl_token=kl)
        assert bed.kl_token == pytest.approx(kl, rel=1e-6, abs=1e-15)
        assert float(bed.rewards.min()) >= 0
        assert float(bed.rewards.max()) <= 1


def test_the_chain_slips_about_once():
    """Probability 1/T per token: a reward of (1 - 1/T)^T, near 1/e at every horizon."""
    for horizon in (16, 256):
        bed = make_testbed("chain", horizon=horizon)
        alive = float((bed.rollout.laws()[0, -1] * bed.rewards).sum())
        assert alive == pytest.approx((1 - 1 / horizon) ** horizon, rel=1e-9)


def test_all_drift_of_flip_is_in_one_state():
    bed = make_testbed("flip", horizon=8)
    moved = (bed.rollout.tokens - bed.current.tokens).abs().sum(-1)[0, 0] > 1e-12
    assert moved.tolist() == [False, True, False, False]


@every_testbed
@pytest.mark.parametrize("kl", [1e-3, 0.02])
def test_recursions_equal_enumeration(name, kl):
    """Mean and variance of the rows that have a recursion, thresholds of gates acting included."""
    bed = make_testbed(name, horizon=5, kl_token=kl)
    every, law = all_sequences(bed)
    assert float(law.sum()) == pytest.approx(1.0)
    known = known_moments(bed)
    assert len(known) == 5
    for row, moments in known.items():
        g = gradients(bed, every, coefficients(METHODS[row], bed, every), batch=1)
        mean = law @ g
        variance = float(law @ (g - mean).square().sum(1))
        torch.testing.assert_close(moments.mean, mean, rtol=1e-10, atol=1e-12)
        assert moments.variance == pytest.approx(variance, rel=1e-9), row


def test_gates_act_in_the_recursions():
    """Some states are over the limits and others are not, else the test above tests nothing."""
    flip = known_moments(make_testbed("flip", horizon=5, kl_token=0.02))
    assert 0.01 < float((flip["trm_max"].mean - flip["token_is"].mean).norm()) < 0.1
    walk = known_moments(make_testbed("walk", horizon=5, kl_token=0.02))
    assert float((walk["trm_ratio"].mean - walk["trm_max"].mean).norm()) > 0.01
    assert float(walk["trm_ratio"].mean.norm()) > 1e-3


@every_testbed
def test_sequence_importance_sampling_is_unbiased_at_any_horizon(name):
    for horizon in (2, 64, 256):
        bed = make_testbed(name, horizon=horizon)
        true = return_gradient(bed.current, bed.rewards[None])[0].sum(0).flatten()
        torch.testing.assert_close(known_moments(bed)["full_is"].mean, true, rtol=1e-9, atol=1e-11)


def test_on_policy_a_row_takes_the_score_function_gradient():
    """Coefficients are the advantages when all policies agree, whatever the aggregate."""
    bed = make_testbed("walk", horizon=11, kl_token=0.0)  # which eight turns do not divide
    drawn = draw(bed, 32, generator=torch.Generator().manual_seed(0))
    mean = float((bed.rollout.laws()[0, -1] * bed.rewards).sum())
    expected = (drawn.rewards - mean)[:, None].expand(-1, 11)
    for name in ("token_is", "full_is", "grpo", "dapo", "gspo", "dr_grpo", "minpro"):
        c = coefficients(METHODS[name], bed, drawn)
        torch.testing.assert_close(c, expected, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("name", [n for n, row in module.ROWS.items() if not row.needs_whole_step])
def test_rows_that_are_enumerated_are_sums_over_sequences(name):
    """A sequence's coefficients do not depend on who else is in the batch."""
    bed = make_testbed("chain", horizon=8, kl_token=0.05)
    drawn = draw(bed, 24, generator=torch.Generator().manual_seed(1))
    whole = coefficients(METHODS[name], bed, drawn)
    half = coefficients(METHODS[name], bed, drawn.rows(slice(12, 24)))
    torch.testing.assert_close(whole[12:], half, rtol=1e-12, atol=1e-12)


def test_a_row_whose_gradient_is_no_sum_over_drawn_tokens_is_refused():
    bed = make_testbed("chain", horizon=8, kl_token=0.05)
    with pytest.raises(BadValueError, match="through whole distributions"):
        list(frontier(bed, rows={"troll": METHODS["troll"]}))
    assert METHODS.keys() - module.ROWS.keys() == {"troll"}


def test_samples_agree_with_what_is_exact(monkeypatch):
    """Rows that could be enumerated, sampled instead: within four standard errors, and useful."""
    bed = make_testbed("chain", horizon=7, kl_token=0.02)
    names = ("token_tis", "seq_tis", "minpro", "vespo", "ser", "ppo_clip", "geo_is")
    rows = {n: METHODS[n] for n in names}
    exact = {e.method: e for e in frontier(bed, rows=rows)}
    monkeypatch.setattr(module, "ENUMERATED", 0)
    sampled = {e.method: e for e in frontier(bed, rows=rows)}
    assert {e.how for e in exact.values()} == {"enumeration"}
    assert {e.how for e in sampled.values()} == {"sampled"}
    for n in names:
        a, b = exact[n], sampled[n]
        assert abs(a.progress - b.progress) < 4 * b.progress_se + 1e-3 * a.progress, n
        assert abs(a.bias - b.bias) < 4 * b.bias_se + 1e-3, n
        assert b.spread == pytest.approx(a.spread, rel=0.05), n
        assert b.progress_se < (0.2 if n == "ser" else 0.05) * a.progress, n  # ser keeps few


def test_a_limit_that_no_sample_met_is_not_known_to_the_last_digit(monkeypatch):
    """IcePop's band, far beyond these ratios: in every sample the row is token_is, whose mean is known."""
    monkeypatch.setattr(module, "ENUMERATED", 0)
    bed = make_testbed("chain", horizon=8, kl_token=1e-4)
    (found,) = frontier(bed, rows={"icepop": METHODS["icepop"]}, tokens=2**14)
    (plain,) = frontier(bed, rows={"token_is": METHODS["token_is"]})
    assert (found.how, plain.how) == ("sampled", "recursion")
    assert found.progress == pytest.approx(plain.progress, rel=1e-6)
    assert 1e-3 * found.progress < found.progress_se < found.progress
    assert found.bias_se > 1e-4


def test_families_are_those_of_the_weights_not_of_the_gates():
    expected = {
        "none": "uncorrected", "token_is": "token", "trm_max": "token", "ppo_clip": "token",
        "minpro": "prefix", "prefix_is": "prefix", "turn_ppo": "turn", "gspo": "geometric",
        "geo_mask": "token", "vespo": "variational", "full_is": "sequence", "seq_tis": "sequence",
        "espo": "other",
    }  # fmt: skip
    assert {n: family(METHODS[n]) for n in expected} == expected
    assert {family(row) for row in METHODS.values()} >= set(BETWEEN)


def estimate(**change) -> Estimate:
    base = Estimate("token_is", "token", False, 256, 0.1, 0.0, 1.0, 1.0, 0.0, "recursion")
    return replace(base, **change)


def test_verdicts_name_the_winner_and_who_ties_with_it():
    token = estimate()
    prefix = estimate(method="minpro", family="prefix", progress=1.3, progress_se=0.1, how="sampled")
    lucky = estimate(method="lucky", family="turn", progress=9.0, progress_se=4.5, how="sampled")
    sequence = estimate(method="full_is", family="sequence", progress=0.1)
    found = verdict([token, prefix, lucky, sequence])
    assert found.winner.method == "minpro"  # 1.3 - 0.2 > 1; the lucky one surely makes 0
    assert found.tied == ("turn",)
    assert conjecture([found]).startswith("holds: best minpro (prefix, tied with turn) at 256")
    assert verdict([token, replace(prefix, progress=1.15)]).tied == ("prefix",)
    tie = verdict([token, replace(prefix, progress=1.001, progress_se=0.0)])
    assert tie.winner.family == "prefix"
    assert conjecture([tie]).startswith("undecided: best minpro (prefix, tied with token)")
    alone = verdict([replace(token, horizon=512), replace(sequence, horizon=512)])
    assert conjecture([alone]).startswith("fails: best token_is (token) at 512")
    assert conjecture([found, alone]).startswith("undecided")
    none = verdict([estimate(method="none", family="uncorrected")])
    assert conjecture([none]).startswith("undecided")
    assert conjecture([verdict([estimate(horizon=64)])]).startswith("untested")
    with pytest.raises(BadValueError, match="one horizon"):
        verdict([estimate(), estimate(horizon=8)])


def test_a_sampled_likeness_of_an_exact_row_does_not_win_by_rounding():
    """A cap that no sample met gives the exact row's numbers and an error of nothing."""
    exact = estimate(progress=0.12531241733269916)
    likeness = estimate(method="icepop", progress=0.12531241733269985, progress_se=9e-17, how="sampled")
    for rows in ([exact, likeness], [likeness, exact]):
        assert verdict(rows).winner.method == "token_is"


def test_the_plainest_methods_are_compared_beside_the_best():
    rows = [estimate(method=m, family=f, progress=1.0 + i) for i, (f, m) in enumerate(module.PLAIN.items())]
    many = [estimate(method=f"token_{i}", progress=50.0 + i) for i in range(9)]
    found = verdict([*rows, *many])
    assert found.winner.method == "token_8"
    assert found.plain is not None
    assert found.plain.method == "full_is"
    assert verdict(rows[1:]).plain is None
    assert {family(METHODS[m]): m for m in module.PLAIN.values()} == module.PLAIN


def test_progress_of_exact_moments_by_hand():
    """grad J = (1, 0), E g = (0.8, 0.1), tr Var = 0.5: bias 0.223607, P 1.163636 (conj.frontier)."""
    true = torch.tensor([1.0, 0.0], dtype=torch.float64)
    mean = torch.tensor([0.8, 0.1], dtype=torch.float64)
    bias, _, spread, progress, _ = module._exact(mean, 0.5, true)
    assert bias == pytest.approx(0.223607, abs=1e-6)
    assert spread == pytest.approx(math.sqrt(0.5))
    assert progress == pytest.approx(1.163636, abs=1e-6)


def test_scatter_of_the_mean_is_not_taken_for_bias():
    """An unbiased estimator: |mean - grad J|^2 is d / K on average, the estimate of |bias|^2 is 0."""
    g = torch.randn(4000, 16, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    true, variance = torch.zeros(5, dtype=torch.float64), torch.ones(16, dtype=torch.float64)
    found = torch.stack([module._statistics(rows, variance, true)[0] for rows in g])
    assert abs(float(found.mean())) < 4 * float(found.std()) / math.sqrt(len(found))
    assert float(g.mean(1).square().sum(1).mean()) == pytest.approx(5 / 16, rel=0.05)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: make_testbed("tree", horizon=8), MethodError, "tree"),
        (lambda: make_testbed("walk", horizon=1), BadValueError, "horizon = 1"),
        (lambda: make_testbed("walk", horizon=8, kl_token=-1.0), BadValueError, "kl_token = -1"),
        (lambda: make_testbed("walk", horizon=8, kl_token=math.nan), BadValueError, "kl_token = nan"),
        (lambda: next(frontier(make_testbed("walk", horizon=4), batch=0)), BadValueError, "batch = 0"),
    ],
)
def test_bad_requests_are_refused_by_name(make, error, words):
    with pytest.raises(error, match=words):
        make()
