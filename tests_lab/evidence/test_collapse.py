"""Collapse: label, features, score (conj.collapse, metric.chi2_tok_p95, conj.budget), and proxies of the noise."""

import math

import numpy as np
import pytest
import torch
from tests.judge.proxies import variance_proxies
from tests.oracles.fixtures import fx_a

from offdrift.errors import ShapeError
from offdrift.segments import Segments
from offdrift_lab.evidence.collapse import FeatureRecorder, ahead, auroc, collapse


@pytest.mark.parametrize(
    ("rewards", "norms", "step"),
    [
        ([1.0] * 10 + [0.65] * 100, [], 10),
        ([1.0] * 10 + [0.65] * 50 + [0.95] * 60, [], None),
        ([1.0] * 10 + [0.65] * 50 + [0.95] * 60 + [0.65] * 60, [], None),  # two short falls
        ([1.0] * 10 + [0.65] * 99, [], None),  # not decided yet
        ([1.0] * 10 + [0.71] * 200, [], None),  # less than 30 %
        ([1.0] * 10 + [0.7] * 200, [], 10),  # exactly 30 %
        ([1.0] * 20 + [0.6] * 9, [1.0] * 19 + [11.0] + [1.0] * 9, 19),
        ([1.0] * 29, [1.0] * 19 + [11.0] + [1.0] * 9, None),  # a spike alone
        ([1.0] * 20 + [0.6] * 9, [1.0] * 19 + [9.0] + [1.0] * 9, None),  # a small one
        ([1.0] * 20 + [0.6] * 9, [1.0] * 19 + [math.inf] + [1.0] * 9, 19),
        ([math.nan] * 3 + [1.0] * 7 + [0.65] * 100, [], 10),
        ([-1.0] * 10 + [-2.0] * 200, [], None),  # no share of a negative best
        ([], [], None),
    ],
)
def test_label(rewards, norms, step):
    assert collapse(rewards, norms).step == step


def test_the_earlier_sign_is_told():
    rewards = [1.0] * 30 + [0.5] * 200
    assert collapse(rewards, [1.0] * 25 + [50.0] + [1.0] * 204) == (25, "gradient spike")
    assert collapse(rewards, [1.0] * 230) == (30, "reward")


def test_targets_end_where_the_collapse_begins():
    told = ahead(1000, collapse([1.0] * 500 + [0.1] * 500))
    assert len(told) == 500
    assert told == [False] * 300 + [True] * 200
    assert ahead(7, collapse([1.0] * 7)) == [False] * 7


def test_percentile_of_the_rolling_window_is_the_golden():
    recorder = FeatureRecorder(window=5)
    for x in (7.0, 0.01, 0.02, 0.03, 0.05, 0.9):  # the first has left the window
        z = recorder.update({"mismatch/chi2_token": x, "response/length_mean": 100 * x})
    assert z.chi2_token_p95 == pytest.approx(0.73)
    assert z.response_length == pytest.approx(100 * np.mean([0.01, 0.02, 0.03, 0.05, 0.9]))
    assert math.isnan(z.clip_frac)
    assert math.isnan(z.ess_seq_frac)
    z = recorder.update({"full/ess_seq_frac": 0.4, "staleness/clip_frac": 0.1})
    assert (z.ess_seq_frac, z.clip_frac) == (0.4, 0.1)
    assert all(math.isnan(x) for x in FeatureRecorder().update({}))


def test_auroc_is_the_chance_of_a_right_order():
    g = np.random.default_rng(0)
    scores, labels = g.integers(0, 9, 80).astype(float), g.random(80) < 0.3
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[labels] for b in scores[~labels]]
    assert len(pairs) > 500
    assert auroc(scores.tolist(), labels.tolist()) == pytest.approx(np.mean(pairs))
    assert auroc([1.0, 2.0], [False, True]) == 1
    assert auroc([1.0, 2.0], [True, False]) == 0
    assert auroc([3.0, 3.0], [False, True]) == 0.5
    for undefined in (([], []), ([1.0], [True]), ([math.nan, 1.0], [False, True])):
        assert math.isnan(auroc(*undefined))


def test_features_predict_a_planted_collapse():
    """Twenty runs, half of which collapse with growing chi2: the first feature ranks their steps."""
    g = np.random.default_rng(5)
    scores: list[float] = []
    labels: list[bool] = []
    for run in range(20):
        collapses = run % 2 == 0
        rewards = [1.0] * 400 + [0.3 if collapses else 1.0] * 150
        target = ahead(len(rewards), collapse(rewards))
        recorder = FeatureRecorder()
        for i, label in enumerate(target):
            growth = max(0, i - 250) / 100 if collapses else 0.0
            z = recorder.update({"mismatch/chi2_token": 0.1 * g.gamma(4) * (1 + growth)})
            scores.append(z.chi2_token_p95)
            labels.append(label)
    assert sum(labels) == 10 * 200
    assert 0.8 < auroc(scores, labels) < 1


FX_A, ADVANTAGES, _ = fx_a()
SUM_PI_SQUARED = torch.tensor([0.85, 0.35, 0.85, 0.2, 0.5, 0.6, 0.25], dtype=torch.float64)
HALF, TWO = torch.tensor([0.5, 0.5]), Segments.from_lengths([1, 1])


def proxies(segments=FX_A.segments, **options) -> tuple[float, ...]:
    """Signal, power, noise, mean A^2 and mean w."""
    found = variance_proxies(SUM_PI_SQUARED, FX_A.old.detach(), ADVANTAGES, segments, **options)
    assert list(found)[2] == "variance_proxy/proxy3_pure_noise"
    return tuple(found.values())


def test_golden_proxies_with_and_without_token_tis():
    """Entry metric.variance_proxies of the methods, on FX-A."""
    p = proxies(grad_norm=0.6)
    assert p[:3] == pytest.approx((0.36, 1.100931, 0.740931), abs=1e-6)
    assert p[4] == pytest.approx((1.820728 + 1.524532) / 2, abs=1e-6)
    assert proxies(Segments.from_lengths([4, 0, 3]), grad_norm=0.6) == p, "empty sequences do not count"
    weight = (FX_A.old.detach() - FX_A.logp_rollout).exp().clamp(max=2)
    assert FX_A.segments.mean(weight).tolist() == pytest.approx([0.988699, 0.92034], abs=1e-6)
    assert proxies(grad_norm=0.6, weight=weight)[1:3] == pytest.approx((1.051318, 0.691318), abs=1e-6)


def test_one_sequence_has_no_variance_and_noise_is_never_negative():
    _, power, noise, *_ = variance_proxies(HALF, HALF.log(), torch.ones(2), Segments.from_lengths([2]), grad_norm=0.1).values()  # fmt: skip
    assert math.isnan(noise)
    assert power == pytest.approx(1.0)
    loud = variance_proxies(HALF, HALF.log(), torch.ones(2), TWO, grad_norm=9.0)
    assert loud["variance_proxy/proxy3_pure_noise"] == 0


def test_lengths_are_checked():
    short = (x[:6] for x in (SUM_PI_SQUARED, FX_A.old.detach(), ADVANTAGES))
    with pytest.raises(ShapeError, match="sum_pi_squared has 6 tokens, the segments 7"):
        variance_proxies(*short, FX_A.segments, grad_norm=0.6)
