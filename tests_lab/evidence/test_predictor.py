"""The predictor of collapse: optimum, leakage, calibration and intervals."""

import math

import numpy as np
import pytest

from offdrift.errors import BadValueError
from offdrift_lab.evidence.collapse import Collapse
from offdrift_lab.evidence.predictor import (
    ROLLING_FOUR,
    STACK,
    LoggedRun,
    auroc_interval,
    brier,
    compare_predictors,
    features,
    fit,
    held_out,
    labels,
    reliability,
    smoothed_collapse,
)


def drawn(n=4000, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal([2.0, -1.0], [3.0, 0.1], (n, 2))
    p = 1 / (1 + np.exp(-(-0.5 + (x[:, 0] - 2) / 3 - 2 * (x[:, 1] + 1) / 0.1)))
    return x, rng.random(n) < p, p


def test_the_gradient_is_zero_at_the_fit():
    x, y, _ = drawn(300)
    predictor = fit(x, y, ridge=2.0)
    z = (x - x.mean(0)) / x.std(0)
    error = predictor.probability(x) - y
    assert np.abs(z.T @ error + 2.0 * predictor.weights).max() < 1e-6
    assert abs(error.sum()) < 1e-6


def test_coefficients_and_probabilities_come_back():
    x, y, p = drawn()
    predictor = fit(x, y)
    assert predictor.weights == pytest.approx([1.0, -2.0], abs=0.2)
    assert np.abs(predictor.probability(x) - p).mean() < 0.02
    for said, seen, n in reliability(predictor.probability(x), y):
        assert abs(said - seen) < 4 * math.sqrt(0.25 / n)


def test_separable_classes_and_missing_features_have_a_finite_fit():
    x = np.array([[0.0, math.nan], [1.0, math.nan], [5.0, math.nan], [math.nan, math.nan]])
    predictor = fit(x, np.array([False, False, True, True]))
    assert np.isfinite(predictor.probability(x)).all()
    assert predictor.weights[1] == 0


def test_one_class_is_refused():
    with pytest.raises(BadValueError, match="nothing to tell apart"):
        fit(np.zeros((3, 1)), np.zeros(3, dtype=bool))


def test_held_out_probabilities_never_saw_their_group():
    """A feature that names its group tells everything in sample and nothing out of sample."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(40), 5)
    y = np.repeat(rng.random(40) < 0.5, 5)
    x = np.eye(40)[groups]
    p = held_out(x, y, groups)
    assert brier(fit(x, y, ridge=1e-3).probability(x), y) < 0.01
    assert brier(p, y) > 0.2


def test_too_few_groups_are_refused():
    with pytest.raises(BadValueError, match="groups = 2, folds = 5"):
        held_out(np.zeros((4, 1)), np.array([True, False] * 2), np.array([0, 0, 1, 1]))


def test_features_see_the_past_alone():
    rows = [{"full/chi2_token": 0.1 * i, "full/k3": 0.01 * i, "response/length_mean": 5.0 + i} for i in range(1, 9)]
    whole = features(rows, window=4)
    assert whole.shape == (8, len(ROLLING_FOUR) + len(STACK))
    for n in (1, 5, 8):
        np.testing.assert_array_equal(features(rows[:n], window=4), whole[:n])


def test_undecided_updates_have_no_label():
    assert labels(30, Collapse(None, ""), horizon=10, recovery=5) == [False] * 25
    assert labels(30, Collapse(20, "reward"), horizon=4, recovery=5) == [False] * 16 + [True] * 4


def test_the_interval_is_of_runs_and_not_of_updates():
    """Ten copies of each update tell nothing new."""
    rng = np.random.default_rng(1)
    y = rng.random(60) < 0.5
    s = y + rng.normal(size=60)
    ((_, low, high), *_, gain) = auroc_interval([s, s], y, np.arange(60), draws=400)
    copied = auroc_interval([np.repeat(s, 10)], np.repeat(y, 10), np.repeat(np.arange(60), 10), draws=400)[0]
    assert copied[2] - copied[1] == pytest.approx(high - low, rel=0.15)
    assert high - low > 0.1
    assert gain == (0.0, 0.0, 0.0)


def logged(seed, falls):
    """Sixty updates; in a run that falls, the effective sample size falls twelve updates before the reward."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(60):
        gone, warned = falls and i >= 40, falls and i >= 28
        reward = (0.2 if gone else 0.8) + 0.05 * rng.normal()
        ess = (0.2 if warned else 0.9) + 0.05 * rng.normal()
        rows.append({"reward/mean": reward, "full/ess_seq_frac": ess, "optim/grad_norm": 1.0, "full/k3": rng.random()})
    return LoggedRun(rows, seed)


def test_a_warning_that_is_there_is_learned_and_noise_adds_nothing():
    runs = [logged(seed, falls=seed % 2 == 0) for seed in range(20)]
    result = compare_predictors(runs, horizon=12, recovery=10, window=5, smooth=3)
    assert result["collapsed"] == 10
    auroc = {name: p["auroc"] for name, p in result["predictors"].items()}
    assert auroc["four rolling features"][0] > 0.95
    assert auroc["signals of the stack"][0] < 0.7
    assert abs(result["gain"][0]) < 0.03
    assert result["predictors"]["four rolling features"]["brier"] < 0.5 * result["brier_of_the_base_rate"]
    assert result["logged"]["clip_frac"] == 0


def test_runs_that_all_hold_are_refused():
    with pytest.raises(BadValueError, match="0 of 6 runs collapse"):
        compare_predictors([logged(seed, falls=False) for seed in range(6)], horizon=12, recovery=10)


def test_a_lucky_first_batch_is_no_best_that_later_ones_fall_from():
    rewards = [1.0] + [0.65, 0.7, 0.6] * 10
    rows = [{"reward/mean": x} for x in rewards]
    assert smoothed_collapse(rows, smooth=1, recovery=5).step == 1
    assert smoothed_collapse(rows, smooth=4, recovery=5).step is None


def test_a_reward_that_is_not_a_number_is_lost():
    rows = [{"reward/mean": 0.8}] * 10 + [{"reward/mean": math.nan}] * 10
    assert smoothed_collapse(rows, recovery=5).step == 10
