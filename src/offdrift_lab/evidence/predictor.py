"""A calibrated predictor of collapse, made from logged runs, and how good it is on runs that it has not seen.

`features` reads a run's rows, `labels` says which updates precede a collapse, `fit` makes a logistic regression of
them, `held_out` judges it over folds of whole groups of runs, and `compare_predictors` does all of it. The question is
the survey's problem 2: whether four rolling features suffice, and what signals of the stack add to them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray

from offdrift.errors import BadValueError
from offdrift.judge import load_rules
from offdrift.judge.findings import Row, number
from offdrift_lab.evidence.collapse import Collapse, FeatureRecorder, ahead, auroc, collapse

Array = NDArray[np.float64]
ROLLING_FOUR = ("chi2_token_p95", "ess_seq_frac", "clip_frac", "response_length")
"""The conjecture's features, names of `Features`."""
STACK = ("kl", "pearson", "prob_diff_max", "log_ppl_gap", "lag", "grad_norm")
"""Signals of the engines, of the synchronization and of the optimizer: what the conjecture says adds nothing."""
METRICS: Mapping[str, tuple[str, ...]] = {
    "kl": ("full/k3", "mismatch/k3"),
    "pearson": ("full/pearson", "mismatch/pearson"),
    "prob_diff_max": ("full/prob_diff_max", "mismatch/prob_diff_max"),
    "log_ppl_gap": ("full/log_ppl_gap", "mismatch/log_ppl_gap"),
    "lag": ("version_lag/mean",),
    "grad_norm": ("optim/grad_norm",),
}
SETS: Mapping[str, tuple[str, ...]] = {
    "four rolling features": ROLLING_FOUR,
    "signals of the stack": STACK,
    "both": (*ROLLING_FOUR, *STACK),
}
"""Features of the predictors that are compared."""
ON_LOG_SCALE = {"chi2_token_p95", "response_length", "kl", "prob_diff_max", "grad_norm"}
"""Features over orders of magnitude."""
FLOOR = 1e-6
"""Smallest value of those: beneath it they are rounding."""


def features(rows: Sequence[Row], *, window: int = 20) -> Float[Array, "n 10"]:
    """The four rolling features and the six signals of every update, in the order of `ROLLING_FOUR` and `STACK`.

    Values over orders of magnitude are natural logarithms, gaps are absolute, the Pearson correlation is
    log(1 - r); NaN where a row has none. Only what an update and those before it logged is in its features.

    Args:
        rows: metrics of each update, oldest first.
        window: updates of the rolling features.

    Example:
        >>> features([{"mismatch/chi2_token": 1.0, "version_lag/mean": 3}])[0, [0, 8]].tolist()
        [0.0, 3.0]
    """
    recorder = FeatureRecorder(window)
    table = []
    for row in rows:
        values: dict[str, float] = dict(zip(ROLLING_FOUR, recorder.update(row)))
        for name, metrics in METRICS.items():
            x = next((x for m in metrics if (x := number(row, m)) is not None), math.nan)
            values[name] = math.log(max(1 - x, FLOOR)) if name == "pearson" else abs(x)
        table.append([math.log(max(x, FLOOR)) if name in ON_LOG_SCALE else x for name, x in values.items()])
    return np.array(table, dtype=np.float64).reshape(-1, len(ROLLING_FOUR) + len(STACK))


def labels(updates: int, collapsed: Collapse, *, horizon: int, recovery: int) -> list[bool]:
    """Per update: whether a collapse begins within `horizon` updates; the list ends where that is not decided.

    That is at the collapse, and in a run without one `recovery` updates before its end.

    Example:
        >>> labels(6, Collapse(None, ""), horizon=3, recovery=2)
        [False, False, False, False]
        >>> labels(6, Collapse(2, "reward"), horizon=1, recovery=2)
        [False, True]
    """
    decided = updates if collapsed.step is not None else max(0, updates - recovery)
    return ahead(decided, collapsed, horizon)


@dataclass(frozen=True)
class Predictor:
    """A logistic regression: the chance that a collapse begins soon."""

    mean: Float[Array, " d"]
    scale: Float[Array, " d"]
    weights: Float[Array, " d"]
    """Of the features less `mean` over `scale`: the change of the log-odds with a standard deviation."""
    intercept: float

    def probability(self, x: Float[Array, "n d"]) -> Float[Array, " n"]:
        """Chance of each row; a missing feature counts as its mean.

        1 / (1 + exp(-(b + w . (x - mean) / scale)))
        """
        return _sigmoid(self._standard(x) @ self.weights + self.intercept)

    def _standard(self, x: Float[Array, "n d"]) -> Float[Array, "n d"]:
        return np.nan_to_num((x - self.mean) / self.scale, nan=0.0)


def fit(x: Float[Array, "n d"], y: Bool[np.ndarray, " n"], *, ridge: float = 1.0) -> Predictor:
    """Logistic regression with a ridge on standardized features, by Newton's method.

        minimize sum_i log(1 + exp(-s_i (b + w . z_i))) + ridge / 2 |w|^2        s_i = 1 if y_i else -1

    Args:
        x: one row per update, NaN where a feature is missing.
        y: whether a collapse follows.
        ridge: weight of the penalty; the intercept has none.

    Raises: `BadValueError` if one of the two classes is empty.

    Example:
        >>> p = fit(np.array([[0.0], [1.0], [2.0], [3.0]]), np.array([False, False, True, True]))
        >>> p.probability(np.array([[0.0], [3.0]])).round(2).tolist()
        [0.22, 0.78]
    """
    y = np.asarray(y, dtype=bool)
    if y.all() or not y.any():
        raise BadValueError(
            f"all {len(y)} updates have the label {bool(y.size and y[0])}: nothing to tell apart; add runs that "
            "collapse and runs that do not"
        )
    filled = np.isfinite(x).any(0)
    mean, scale = np.zeros(x.shape[1]), np.ones(x.shape[1])
    mean[filled], spread = np.nanmean(x[:, filled], 0), np.nanstd(x[:, filled], 0)
    scale[filled] = np.where(spread > 0, spread, 1.0)
    start = Predictor(mean, scale, np.zeros(x.shape[1]), 0.0)
    z = np.hstack([start._standard(x), np.ones((len(x), 1))])
    penalty = np.append(np.full(x.shape[1], ridge), 0.0)
    w = np.zeros(z.shape[1])
    for _ in range(50):
        p = _sigmoid(z @ w)
        gradient = z.T @ (p - y) + penalty * w
        hessian = (z * (p * (1 - p))[:, None]).T @ z + np.diag(penalty + 1e-9)
        step = np.linalg.solve(hessian, gradient)
        step *= min(1.0, 5.0 / max(float(np.abs(step).max()), 1e-12))  # far from the minimum, Newton's step overshoots
        w -= step
        if np.abs(step).max() < 1e-8:
            break
    return Predictor(mean, scale, w[:-1], float(w[-1]))


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-np.clip(x, -500, 500)))


def held_out(
    x: Float[Array, "n d"], y: Bool[np.ndarray, " n"], groups: Int[np.ndarray, " n"], *, folds: int = 5
) -> Float[Array, " n"]:
    """Every row's probability by a predictor that saw no row of its group.

    Args:
        groups: what may not be split, such as the seed of a run: groups are dealt to the folds in turn.

    Raises: `BadValueError` if there are fewer groups than folds, or a fold leaves one class alone to learn from.
    """
    distinct = np.unique(groups)
    if len(distinct) < folds:
        raise BadValueError(f"groups = {len(distinct)}, folds = {folds}: take fewer folds, or more groups of runs")
    p = np.full(len(x), math.nan)
    for fold in range(folds):
        out = np.isin(groups, distinct[fold::folds])
        p[out] = fit(x[~out], y[~out]).probability(x[out])
    return p


def brier(p: Sequence[float] | Array, y: Sequence[bool] | np.ndarray) -> float:
    """Mean squared error of the probabilities; always saying the base rate q has q (1 - q).

    Example:
        >>> brier([0.5, 1.0], [False, True])
        0.125
    """
    return float(np.mean((np.asarray(p, dtype=np.float64) - np.asarray(y, dtype=np.float64)) ** 2))


def reliability(
    p: Sequence[float] | Array, y: Sequence[bool] | np.ndarray, edges: Sequence[float] = (0, 0.1, 0.3, 0.5, 0.7, 0.9, 1)
) -> list[tuple[float, float, int]]:
    """Predicted and observed share and the number of updates, for each interval of predictions that has any.

    Example:
        >>> reliability([0.05, 0.2, 0.2], [False, False, True])
        [(0.05, 0.0, 1), (0.2, 0.5, 2)]
    """
    p, y = np.asarray(p, dtype=np.float64), np.asarray(y, dtype=bool)
    place = np.clip(np.searchsorted(edges, p, side="right") - 1, 0, len(edges) - 2)
    return [
        (float(p[place == i].mean()), float(y[place == i].mean()), int((place == i).sum()))
        for i in range(len(edges) - 1)
        if (place == i).any()
    ]


def auroc_interval(
    scores: Sequence[Array],
    y: Sequence[bool] | np.ndarray,
    runs: Int[np.ndarray, " n"],
    *,
    draws: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> list[tuple[float, float, float]]:
    """AUROC of each score with its interval, and of the last less the first, by a bootstrap of whole runs.

    Updates of one run are alike, so runs are drawn and not updates. Percentiles of the draws that have both classes.

    Args:
        scores: one array per predictor, of the same updates.
        runs: the run of each update.

    Returns: (estimate, low, high) per score, then of the difference.

    Example:
        >>> auroc_interval([np.array([0.0, 1.0])], [False, True], np.array([0, 1]), draws=10)[0]
        (1.0, 1.0, 1.0)
    """
    y = np.asarray(y, dtype=bool)
    rng = np.random.default_rng(seed)
    rows = [np.flatnonzero(runs == r) for r in np.unique(runs)]
    replicates: list[list[float]] = []
    for _ in range(draws):
        index = np.concatenate([rows[i] for i in rng.integers(0, len(rows), len(rows))])
        values = [auroc(s[index].tolist(), y[index].tolist()) for s in scores]
        if all(math.isfinite(v) for v in values):
            replicates.append([*values, values[-1] - values[0]])
    full_sample = [auroc(s.tolist(), y.tolist()) for s in scores]
    estimates = [*full_sample, full_sample[-1] - full_sample[0]]
    if not replicates:
        return [(e, math.nan, math.nan) for e in estimates]
    low, high = np.percentile(replicates, [50 - 50 * confidence, 50 + 50 * confidence], axis=0)
    return [(e, float(a), float(b)) for e, a, b in zip(estimates, low, high)]


class LoggedRun(NamedTuple):
    """Log of a run, as far as a predictor may learn from it."""

    rows: Sequence[Row]
    """Metrics of each update, oldest first."""
    group: int
    """Runs of one group, such as a seed, are all learned from or all judged."""


def smoothed_collapse(
    rows: Sequence[Row], *, smooth: int = 1, recovery: int | None = None, limits: Mapping[str, float] | None = None
) -> Collapse:
    """Find where a run's mean reward, smoothed over the last `smooth` updates, fell for good: see `collapse`.

    Example:
        >>> smoothed_collapse([{"reward/mean": x} for x in [1.0] * 9 + [0.1] * 9], smooth=3, recovery=5).step
        9
    """
    rewards = [x if (x := number(r, "reward/mean")) is not None else 0.0 for r in rows]
    # The first means are of too few updates to be a best that later ones are held against.
    means = [
        float(np.mean(rewards[i + 1 - smooth : i + 1])) if i + 1 >= smooth else math.nan for i in range(len(rewards))
    ]
    norms = [x if (x := number(r, "optim/grad_norm")) is not None else math.inf for r in rows]
    return collapse(means, norms if any(map(math.isfinite, norms)) else (), recovery=recovery, limits=limits)


def compare_predictors(
    runs: Sequence[LoggedRun],
    *,
    horizon: int | None = None,
    recovery: int | None = None,
    window: int = 20,
    smooth: int = 1,
    folds: int = 5,
    seed: int = 0,
    limits: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Compare predictions of a collapse on unseen groups: by rolling features, by the stack's signals, and by both.

    Args:
        horizon: updates within which a collapse is to be predicted; default `collapse_within`.
        recovery: updates that a fall must last; default `collapse_recovery`.
        window: updates of the rolling features.
        smooth: updates over which rewards are averaged.
        folds: parts of the groups, each judged by what the others teach.
        seed: of the bootstrap.
        limits: thresholds by name (`Rules.limits`), if not the built-in ones.

    Returns: numbers of runs and updates, and by predictor "auroc" and its interval (bootstrap of whole runs), "brier",
        "reliability" and the coefficients of a fit to all runs; "gain" is the AUROC of both less that of the four.

    Raises: `BadValueError` if no run, or every one, collapses, or there are fewer groups than folds.
    """
    limits = load_rules().limits if limits is None else limits
    horizon = int(limits["collapse_within"]) if horizon is None else horizon
    recovery = int(limits["collapse_recovery"]) if recovery is None else recovery
    falls = [smoothed_collapse(run.rows, smooth=smooth, recovery=recovery, limits=limits) for run in runs]
    marked = [labels(len(run.rows), fell, horizon=horizon, recovery=recovery) for run, fell in zip(runs, falls)]
    counts = [len(part) for part in marked]
    y = np.array([label for part in marked for label in part], dtype=bool)
    collapsed = sum(fell.step is not None for fell in falls)
    if not y.any():
        raise BadValueError(
            f"{collapsed} of {len(runs)} runs collapse and none has an update before it that counts: nothing to "
            f"predict; give runs that collapse, or shorter scales than recovery = {recovery} (now), with them horizon"
        )
    x = np.concatenate([features(run.rows, window=window)[:n] for run, n in zip(runs, counts)])
    which, group = np.repeat(np.arange(len(runs)), counts), np.repeat([run.group for run in runs], counts)
    names = [*ROLLING_FOUR, *STACK]
    parts = {name: x[:, [names.index(n) for n in part]] for name, part in SETS.items()}
    p = {name: held_out(part, y, group, folds=folds) for name, part in parts.items()}
    scores = auroc_interval([p[name] for name in SETS], y, which, seed=seed)
    rate = float(y.mean())
    return {
        "runs": len(runs),
        "collapsed": collapsed,
        "groups": len(np.unique(group)),
        "updates": len(y),
        "before_a_collapse": int(y.sum()),
        "logged": dict(zip(names, np.isfinite(x).mean(0).round(3).tolist())),
        "brier_of_the_base_rate": rate * (1 - rate),
        "predictors": {
            name: {
                "auroc": scores[i],
                "brier": brier(p[name], y),
                "reliability": reliability(p[name], y),
                "log_odds_per_standard_deviation": dict(zip(part, fit(parts[name], y).weights.round(3).tolist())),
            }
            for i, (name, part) in enumerate(SETS.items())
        },
        "gain": auroc_interval([p["four rolling features"], p["both"]], y, which, seed=seed)[-1],
    }
