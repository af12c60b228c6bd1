"""Predict the collapse of a run: features, labels and the score of a predictor (AUROC).

The survey conjectures (problem 2) that four rolling features predict collapse within 200 updates. This is what
it takes to test that on logged runs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from offdrift.judge import load_rules
from offdrift.judge.findings import Row, number


class Features(NamedTuple):
    """z_t: one row of features per step; NaN where the log had none."""

    chi2_token_p95: float
    """95th percentile over the window of the per-step chi2_token (linear interpolation)."""
    ess_seq_frac: float
    """Effective share of sequences at this step, untruncated weights."""
    clip_frac: float
    response_length: float
    """Mean over the window, tokens."""


class FeatureRecorder:
    """Records z_t step by step, in memory of the window alone.

    Unverified: the source names the percentile and does not define it; this is the rolling window's.

    Args:
        window: steps that the percentile and the mean length are taken over.

    Example:
        >>> recorder = FeatureRecorder(window=5)
        >>> for x in (0.01, 0.02, 0.03, 0.05, 0.9):
        ...     z = recorder.update({"mismatch/chi2_token": x})
        >>> round(z.chi2_token_p95, 2)
        0.73
    """

    def __init__(self, window: int = 20) -> None:
        self._chi2: deque[float] = deque(maxlen=window)
        self._length: deque[float] = deque(maxlen=window)

    def update(self, row: Row) -> Features:
        """The features after one more step."""
        for values, names in (
            (self._chi2, ("mismatch/chi2_token", "full/chi2_token")),
            (self._length, ("response/length_mean",)),
        ):
            if (x := _first(row, names)) is not None:
                values.append(x)
        ess = _first(row, ("mismatch/ess_seq_frac", "full/ess_seq_frac"))
        clip = _first(row, ("objective/clip_frac_active", "staleness/clip_frac"))
        return Features(
            float(np.percentile(self._chi2, 95)) if self._chi2 else math.nan,
            math.nan if ess is None else ess,
            math.nan if clip is None else clip,
            float(np.mean(self._length)) if self._length else math.nan,
        )


def _first(row: Row, names: Sequence[str]) -> float | None:
    return next((x for n in names if (x := number(row, n)) is not None), None)


class Collapse(NamedTuple):
    """When a run collapsed, and how that shows."""

    step: int | None
    """Index of the row at which it began; None if it never did."""
    how: str


def collapse(
    rewards: Sequence[float],
    grad_norms: Sequence[float] = (),
    *,
    recovery: int | None = None,
    limits: Mapping[str, float] | None = None,
) -> Collapse:
    """Find whether and when a run collapsed.

        reward   falls by `reward_lost` or more of its running best and stays there for `recovery` updates
        spike    gradient norm > `grad_spike` times its rolling median over `window_long` updates, and the reward then
                 falls by `reward_lost` or more of what it was within `recovery` updates

    A fall with fewer than `recovery` updates left is not decided, and does not count. Smooth noisy
    rewards first. Non-finite numbers are passed over.

    Args:
        rewards: mean reward of each update, positive where the run is healthy.
        grad_norms: global gradient norms of the same updates, if logged.
        recovery: updates within which a run may recover; default `collapse_recovery`.
        limits: thresholds by name (`Rules.limits`), if not the built-in ones.

    Example:
        >>> collapse([1.0] * 10 + [0.65] * 100)
        Collapse(step=10, how='reward')
        >>> collapse([1.0] * 10 + [0.65] * 50 + [0.95] * 50).step is None
        True
    """
    t = load_rules().limits if limits is None else limits
    recovery = int(t["collapse_recovery"]) if recovery is None else recovery
    left = 1 - t["reward_lost"]
    drops: list[Collapse] = []
    best, start = -math.inf, None
    for i, r in enumerate(rewards):
        if not math.isfinite(r):
            continue
        if best > 0 and r <= left * best + 1e-12:
            start = i if start is None else start
            if i - start + 1 >= recovery:
                drops.append(Collapse(start, "reward"))
                break
        else:
            start, best = None, max(best, r)
    before: deque[float] = deque(maxlen=int(t["window_long"]))
    for i, (norm, reward) in enumerate(zip(grad_norms, rewards)):
        if before and not norm <= t["grad_spike"] * median(before) and reward > 0:
            after = [r for r in rewards[i + 1 : i + 1 + recovery] if math.isfinite(r)]
            if after and min(after) <= left * reward:
                drops.append(Collapse(i, "gradient spike"))
                break
        if math.isfinite(norm):
            before.append(norm)
    return min(drops, key=lambda c: c.step or 0, default=Collapse(None, ""))


def held_out_collapse(
    points: Sequence[tuple[int, float]], *, recovery: int, limits: Mapping[str, float] | None = None
) -> int | None:
    """Update from which on a held-out reward is lost, by `reward_lost` or more of its best; None if it never is.

    Lost is what stays down for `recovery` updates, or to the last evaluation: a run that ends low has not recovered.

    Args:
        points: updates and held-out rewards, in order; positive where the run is healthy.

    Example:
        >>> held_out_collapse([(0, 0.5), (8, 0.9), (16, 0.6), (24, 0.8), (32, 0.1)], recovery=100)
        32
        >>> held_out_collapse([(0, 0.5), (8, 0.9), (16, 0.6), (24, 0.8)], recovery=100) is None
        True
    """
    left = 1 - (load_rules().limits if limits is None else limits)["reward_lost"]
    best, start = -math.inf, None
    for update, reward in points:
        if best > 0 and reward <= left * best + 1e-12:
            start = update if start is None else start
            if update - start >= recovery:
                break
        else:
            start, best = None, max(best, reward)
    return start


def ahead(steps: int, collapsed: Collapse, horizon: int | None = None) -> list[bool]:
    """Per step: does the collapse begin within the next `horizon` updates (default `collapse_within`)?

    Steps from the collapse on are left out: the list ends there.

    Example:
        >>> ahead(5, Collapse(3, "reward"), horizon=2)
        [False, True, True]
    """
    horizon = int(load_rules().limits["collapse_within"]) if horizon is None else horizon
    if collapsed.step is None:
        return [False] * steps
    return [collapsed.step - i <= horizon for i in range(min(steps, collapsed.step))]


def auroc(scores: Sequence[float], labels: Sequence[bool]) -> float:
    """Chance that a positive scores above a negative; ties count half. NaN if a class is empty.

    Args:
        scores: larger means more likely positive; no NaN.

    Example:
        >>> auroc([0.1, 0.4, 0.35, 0.8], [False, False, True, True])
        0.75
    """
    x, y = np.asarray(scores, dtype=np.float64), np.asarray(labels, dtype=bool)
    positive = int(y.sum())
    negative = len(y) - positive
    if not positive or not negative or np.isnan(x).any():
        return math.nan
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return float((ranks[y].sum() - positive * (positive + 1) / 2) / (positive * negative))
