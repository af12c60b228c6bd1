"""Collapse: label, features, score (conj.collapse, metric.chi2_tok_p95, conj.budget), proxies and the guard."""

import math

import numpy as np
import pytest
import torch

from offdrift.errors import ShapeError
from offdrift.judge import FeatureRecorder, ahead, auroc, collapse, lr_guard, variance_proxies
from offdrift.methods.schedules import LengthSurge
from offdrift.segments import Segments
from tests.oracles.fixtures import fx_a


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
SEGMENTS = FX_A.segments
LOGP_OLD, LOGP_ROLLOUT = FX_A.old.detach(), FX_A.logp_rollout

SUM_PI_SQUARED = torch.tensor([0.85, 0.35, 0.85, 0.2, 0.5, 0.6, 0.25], dtype=torch.float64)


def proxies(**options):
    return variance_proxies(SUM_PI_SQUARED, LOGP_OLD, ADVANTAGES, SEGMENTS, **options)


def test_golden_proxies_with_and_without_token_tis():
    """Entry metric.variance_proxies of the methods, on FX-A."""
    p = proxies(grad_norm=0.6)
    assert (p.signal_strength, p.total_power, p.pure_noise) == pytest.approx((0.36, 1.100931, 0.740931), abs=1e-6)
    assert p.expected_w == pytest.approx((1.820728 + 1.524532) / 2, abs=1e-6)
    weight = (LOGP_OLD - LOGP_ROLLOUT).exp().clamp(max=2)
    assert SEGMENTS.mean(weight).tolist() == pytest.approx([0.988699, 0.92034], abs=1e-6)
    p = proxies(grad_norm=0.6, weight=weight)
    assert (p.total_power, p.pure_noise) == pytest.approx((1.051318, 0.691318), abs=1e-6)


def test_one_sequence_has_no_variance_and_noise_is_never_negative():
    one = Segments.from_lengths([2])
    half = torch.tensor([0.5, 0.5])
    p = variance_proxies(half, half.log(), torch.ones(2), one, grad_norm=0.1)
    assert math.isnan(p.pure_noise)
    assert p.total_power == pytest.approx(1.0)
    two = Segments.from_lengths([1, 1])
    assert variance_proxies(half, half.log(), torch.ones(2), two, grad_norm=9.0).pure_noise == 0


def test_empty_sequences_do_not_count():
    plain = proxies(grad_norm=0.6)
    with_empty = Segments.from_lengths([4, 0, 3])
    assert variance_proxies(SUM_PI_SQUARED, LOGP_OLD, ADVANTAGES, with_empty, grad_norm=0.6) == plain  # fmt: skip


def test_lengths_are_checked_and_metrics_named():
    short = (x[:6] for x in (SUM_PI_SQUARED, LOGP_OLD, ADVANTAGES))
    with pytest.raises(ShapeError, match="sum_pi_squared has 6 tokens, the segments 7"):
        variance_proxies(*short, SEGMENTS, grad_norm=0.6)
    p = proxies(grad_norm=0.6)
    assert len(p.metrics()) == 5
    assert p.metrics()["variance_proxy/proxy3_pure_noise"] == p.pure_noise


def test_over_logits_alone_the_third_proxy_is_the_second():
    """Sequences have logits of their own, so |mean g|^2 = mean |g|^2 / N, and the variance of the mean, too."""
    p = proxies(grad_norm=0.0)
    of_mean = math.sqrt(p.total_power / 2)
    q = proxies(grad_norm=of_mean)
    assert q.pure_noise == pytest.approx(p.total_power / 2)


def history(*pieces):
    return [{"response/length_mean": float(x)} for n, x in pieces for _ in range(n)]


@pytest.mark.parametrize(
    ("rows", "factor"),
    [
        (history(), 1.0),
        (history((99, 100), (1, 900)), 1.0),  # not a hundred steps yet
        (history((100, 100), (1, 120)), 1.0),  # exactly 20 %
        (history((100, 100), (1, 121)), 0.5),
        (history((100, 100), (100, 121)), 0.5),  # one surge, not a hundred
        (history((100, 100), (101, 130), (100, 130)), 0.5),
        (history((100, 100), (101, 130), (5, 200)), 0.25),
    ],
)
def test_factor_of_the_learning_rate(rows, factor):
    assert lr_guard(rows) == factor


def test_the_guard_never_ends_at_zero():
    rows = history(*((101, 100 * 1.3**k) for k in range(9)))
    assert lr_guard(rows) == 0.1


def test_calling_the_guard_at_every_step_changes_nothing():
    rows = history((100, 100), (50, 130))
    factors = [lr_guard(rows[:i]) for i in range(len(rows) + 1)]
    assert factors == [1.0] * 101 + [0.5] * 50


def test_the_guard_passes_over_steps_without_a_length():
    rows = [r for row in history((100, 100), (1, 121)) for r in (row, {"reward/mean": 1.0})]
    assert lr_guard(rows) == 0.5


def test_the_papers_periods():
    rows = history((50, 100), (60, 400), (200, 400))
    assert lr_guard(rows, LengthSurge()) == LengthSurge().periodic(310, 51)
