"""Readings that need history: what rises, spikes or falls."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import median

from offdrift.diagnosis.view import Definition, Found, View
from offdrift.diagnosis.window import Mean, slope_over

CLIP = ("objective/clip_frac_active", "staleness/clip_frac")
PROXY3 = ("variance_proxy/proxy3_pure_noise", "optim/proxy3_pure_noise")
LENGTH = "response/length_mean"
GRAD = "optim/grad_norm"


def _rising(view: View, *metrics: str) -> Found | None:
    """1 if the first of these metrics that there is rises over the window of trends, else 0."""
    for metric in metrics:
        if values := view.recent(metric):
            change, t = slope_over(values)
            rises = change > view.limits["trend_change"] and t > view.limits["trend_t"]
            return Found(float(rises), metric)
    return None


def _length_ratio(view: View) -> Found | None:
    """Medians of the first and the last steps; 1 while they differ by no more than steps do.

    The scatter is that of neighbours, median |x[t + 1] - x[t]| = 0.954 sd for normal x, so that a
    trend does not hide itself; a median of n normal values has a standard error of 1.2533 sd / sqrt(n).
    """
    width = view.size("window_level")
    young = view.size("window_young")
    values = view.window.since(LENGTH, view.size("window_long"), width, young)
    if not values or (before := median(values[:width])) <= 0:
        return None
    now = median(values[-width:])
    steps = [b - a for a, b in pairwise(values)]
    scatter = median(abs(x - median(steps)) for x in steps) / 0.954
    error = 1.2533 * scatter * math.sqrt(2 / width)
    return Found(now / before if abs(now - before) > 4 * error else 1.0, LENGTH)


def _spike(view: View) -> Found | None:
    """The largest of the last steps over the median of those before."""
    values = view.window.column(GRAD, view.size("window_long"))
    width = view.size("window_level")
    if len(values) < 2 * width:
        return None
    usual = median(values[:-width])
    return Found(max(values[-width:]) / usual, GRAD) if usual > 0 else None


def _ess_left(view: View) -> Found | None:
    """The effective sample size lately over its usual value; 1 while it was as small before."""
    width = view.size("window_level")
    for metric in ("full/ess_seq_frac", "mismatch/ess_seq_frac", "weight/ess_frac"):
        values = view.window.column(metric, view.size("window_long"))
        before, now = values[:-width], values[-width:]
        if len(values) >= 2 * width and (usual := median(before)) > 0:
            left = median(now) / usual
            return Found(left if median(now) < min(before) else max(left, 1.0), metric)
    return None


def reward_drop(view: View) -> Found | None:
    """How far the mean reward fell from its best window, as a share of the best; 0 within noise."""
    values = view.recent("reward/mean")
    best = view.window.best_reward
    if len(values) < view.size("window_trend") or best is None or best.value <= 0:
        return None
    now = Mean.of(values)
    lost = best.value - now.value
    # The best of many windows is also the luckiest: its own scatter counts, and rare rewards leave
    # none in a window that has lost them all.
    noise = 4 * math.hypot(best.error, now.error)
    return Found(lost / best.value if lost > noise else 0.0, "reward/mean")


def _over_peak(view: View, metric: str) -> Found | None:
    """The last value over the largest of the window."""
    values = view.window.column(metric)
    return Found(values[-1] / max(values), metric) if values and max(values) > 0 else None


def _lr_ratio(view: View) -> Found | None:
    return _over_peak(view, "optim/lr_scale") or _over_peak(view, "optim/lr")


def _widened(view: View) -> Found | None:
    """The clip range now over its smallest value in the window."""
    values = view.window.column("objective/eps_high")
    return Found(values[-1] / min(values), "objective/eps_high") if values and min(values) > 0 else None  # fmt: skip


TRENDS = {
    "clip_frac": Definition("1", "share of tokens whose loss the clip changed: `objective/clip_frac_active`, else `staleness/clip_frac`", lambda v: v.found(*CLIP)),
    "clip_rising": Definition("1", "1 if it rises: least-squares line over the last `window_trend` steps with relative change > `trend_change` and slope > `trend_t` standard errors", lambda v: _rising(v, *CLIP)),
    "proxy3_rising": Definition("1", "1 if gradient variance proxy 3, `variance_proxy/proxy3_pure_noise`, rises in the same sense", lambda v: _rising(v, *PROXY3)),
    "len_ratio": Definition("1", "mean response length now over that `window_long` steps ago, or at the start of a younger run; medians of `window_level` steps; 1 while they differ by less than 4 standard errors, absent before `window_young` steps", _length_ratio),
    "grad_spike": Definition("1", "largest gradient norm of the last `window_level` steps over the median of the `window_long` before", _spike),
    "ess_left": Definition("1", "effective sample size lately over its median in the `window_long` steps before: of sequence weights on `full` or `mismatch`, else `weight/ess_frac`; 1 while single steps before were as small", _ess_left),
    "reward_drop": Definition("1", "1 - mean reward of the last `window_trend` steps over the best such mean, for positive rewards; 0 while the fall is within 4 standard errors of both means", reward_drop),
    "lr_ratio": Definition("1", "learning rate now over its largest in the window: `optim/lr_scale`, else `optim/lr`", _lr_ratio),
    "clip_widened": Definition("1", "upper clip distance now over its smallest in the window: `objective/eps_high`", _widened),
}  # fmt: skip
