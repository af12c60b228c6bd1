"""Metrics on FX-A against the methods table, and what they say about empty and degenerate input."""

import math

import pytest
import torch

from offdrift.correction import Correction, Gate, Weight
from offdrift.divergence.evidence import Divergence
from offdrift.logprobs import LogProbs
from offdrift.methods import METHODS as ROWS
from offdrift.segments import Segments
from offdrift.stats import METRICS, DriftStats, summarize
from tests.oracles.fixtures import FX_V_KL, FX_V_TV, double, fx_a, ragged

FX_A = {
    "mismatch/k1": 0.104286,
    "full/k1": 0.06571429,
    "mismatch/k2": 0.07663571,
    "mismatch/k3": 0.06368775,
    "mismatch/chi2_token": 0.0152432,
    "mismatch/chi2_seq": -0.511111,
    "old/ppl": 2.674114,
    "rollout/ppl": 2.411422,
    "old/log_ppl": 0.982083,
    "rollout/log_ppl": 0.879167,
    "mismatch/log_ppl_diff_mean": 0.102917,
    "mismatch/log_ppl_gap": 0.102917,
    "mismatch/log_ppl_diff_max": 0.1125,
    "mismatch/log_ppl_diff_min": 0.09333333,
    "mismatch/ppl_ratio": 1.10845,
    "full/log_ppl_gap": 0.06625,  # eq. 25
    "mismatch/ess_seq_frac": 0.992861,
    "mismatch/pearson": 0.951618,
    "mismatch/prob_diff_mean": 0.07864716,
    "mismatch/prob_diff_max": 0.298307,
    "mismatch/prob_diff_std": 0.10273,
    "mismatch/abs_log_ratio_mean": 0.252857,
    "mismatch/abs_log_ratio_max": 0.9,
    "mismatch/tv_sampled": 0.10847,
    "staleness/k1": -0.03857143,
}


def metrics(correction: Correction | None = None) -> dict[str, float]:
    lp, advantages, _ = fx_a()
    corrected = None if correction is None else correction(lp, advantages)
    return summarize(DriftStats.of(lp, corrected))


@pytest.mark.parametrize("name", FX_A)
def test_metric_of_the_methods_table(name):
    assert metrics()[name] == pytest.approx(FX_A[name], abs=1e-6)


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (Weight(on="mismatch", cap=2.0), {"mean": 0.959402, "std": 0.307881, "max": 1.491825, "min": 0.40657, "ess_frac": 0.906632, "cap_frac": 0.0}),
        (Weight(on="mismatch", cap=1.3), {"cap_frac": 1 / 7, "max": 1.3}),
        (Weight(on="mismatch", floor=0.5, cap=5.0, outside="mask"), {"cap_frac": 1 / 7, "min": 0.0}),
    ],
)  # fmt: skip
def test_weight_metrics(weight, expected):
    got = metrics(Correction(weights=(weight,)))
    for name, value in expected.items():
        assert got[f"weight/{name}"] == pytest.approx(value, abs=1e-6), name


def test_the_spread_of_weights_near_one_is_not_lost_to_rounding():
    """Of 1000 float32 weights, 1 + 1e-4 and 1 - 1e-4 in turn."""
    drift = 1e-4 * torch.tensor([1.0, -1.0]).repeat(500)
    logp = torch.full((1000,), -1.0)
    lp = LogProbs.pack(
        logp, (logp + drift).requires_grad_(), logp + drift, segments=Segments.from_lengths(torch.tensor([1000]))
    )
    corrected = Correction(weights=(Weight(on="mismatch", cap=2.0),))(lp, torch.ones(1000))
    assert summarize(DriftStats.of(lp, corrected))["weight/std"] == pytest.approx(1e-4, rel=1e-2)


def test_gate_metrics_count_sequences_and_tokens():
    got = metrics(Correction((Gate(statistic="k2", on="mismatch", unit="seq_max", high=0.1),)))
    assert got["gate/drop_frac_seq"] == 0.5
    assert got["gate/acceptance_seq"] == 0.5
    assert got["gate/drop_frac_token"] == pytest.approx(4 / 7)


def test_divergence_metrics_on_fx_v():
    lp = LogProbs.pack(double([-1.0] * 3), segments=Segments.from_lengths([3]))
    values = {"kl_rollout_current": FX_V_KL, "tv_rollout_current": FX_V_TV}
    stats = DriftStats.of(lp, divergences={k: Divergence.exact(k, double(x)) for k, x in values.items()})
    got = summarize(stats)
    assert got["divergence/kl_rollout_current_mean"] == pytest.approx(0.02931811, abs=1e-7)
    assert got["divergence/kl_rollout_current_max"] == pytest.approx(0.05107412, abs=1e-7)
    assert got["divergence/tv_rollout_current_mean"] == pytest.approx(0.08333333, abs=1e-7)
    assert stats.by_position["tv_rollout_current"].tolist() == pytest.approx(FX_V_TV)
    assert stats.grade == "exact"
    assert stats.merge(DriftStats.of(lp)).grade == "sampled"


def test_pieces_that_know_different_policies_merge_to_what_each_knows():
    lp = ragged(0)
    some = LogProbs.pack(lp.logp_rollout, lp.current, segments=lp.segments)
    merged, whole = summarize(DriftStats.of(lp).merge(DriftStats.of(some))), summarize(DriftStats.of(lp))
    for name in ("full/k3", "mismatch/k3"):
        assert merged[name] == pytest.approx(whole[name])


def test_metrics_do_not_change_with_the_correction_chosen():
    plain = metrics()
    for row in ("token_tis", "trm_max_k2"):
        chosen = metrics(ROWS[row].correction)
        assert {k: chosen[k] for k in plain} == plain


def test_equal_policies_agree_perfectly():
    x = -torch.rand(100) * 3
    got = summarize(DriftStats.of(LogProbs.pack(x, x, x, segments=Segments.from_lengths([60, 40]))))
    assert got["mismatch/pearson"] == pytest.approx(1.0, abs=1e-12)
    for name in ("k1", "k2", "k3", "chi2_token", "chi2_seq", "tv_sampled", "prob_diff_max", "log_ppl_gap"):
        assert got[f"full/{name}"] == 0.0, name
    assert got["full/ess_seq_frac"] == 1.0


def test_what_cannot_be_known_is_nan_and_absent_policies_are_left_out():
    one = LogProbs.pack(torch.tensor([-1.0]), torch.tensor([-1.0]), segments=Segments.from_lengths([1]))
    got = summarize(DriftStats.of(one))
    assert math.isnan(got["full/pearson"])
    assert math.isnan(got["full/prob_diff_std"])
    assert not any(name.startswith(("mismatch/", "weight/", "divergence/")) for name in got)


def test_every_weight_zero_has_no_effective_sample():
    lp, advantages, _ = fx_a()
    none = Weight(on="mismatch", cap=1e-9, outside="mask")
    got = summarize(DriftStats.of(lp, Correction(weights=(none,))(lp, advantages)))
    assert got["weight/ess_frac"] == 0.0


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_has_a_unit_a_formula_and_a_direction(name):
    row = METRICS[name]
    assert row.unit in ("nat", "1", "task", "task^2", "token", "sequence", "step", "update", "s", "byte")
    assert row.formula
    assert row.larger_is in ("worse", "better", "neither")


@pytest.mark.parametrize("size", [3.9, 4.1, 25.0])
def test_sums_of_ratios_are_exact_on_both_sides_of_the_shortcut_for_small_ones(size):
    """Up to `numerics.NEAR` exponentials are spared; beyond it none may be limited or lost."""
    segments, rollout = Segments.from_lengths([2]), torch.tensor([-30.0, -1.0])
    raw = torch.tensor([size, -min(size, 4.0)])
    numbers = DriftStats.of(LogProbs.pack(rollout, rollout + raw, segments=segments)).to_host()
    assert numbers["full/log_w"] == pytest.approx(float(raw.double().logsumexp(0)), abs=1e-6)
    assert numbers["full/log_w2"] == pytest.approx(float((2 * raw.double()).logsumexp(0)), abs=1e-6)
    rise = (rollout + raw).double().exp() - rollout.double().exp()
    assert numbers["full/d_abs"] == pytest.approx(float(rise.abs().sum()), rel=1e-5)
