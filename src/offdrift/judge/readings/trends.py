"""Readings that need history: what rises, spikes or falls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from offdrift.judge.readings.view import Definition, Found, View
from offdrift.judge.scatter import moved, normal_score, slope_over
from offdrift.judge.window import Mean

CLIP = ("objective/clip_frac_active", "staleness/clip_frac")
PROXY3 = ("variance_proxy/proxy3_pure_noise", "optim/proxy3_pure_noise")
LENGTH = "response/length_mean"
GRAD = "optim/grad_norm"


def _moved(view: View, values: Sequence[float], sign: int) -> bool:
    """Whether the level of these steps rose or fell further than they scatter."""
    limits = {name: view.limits[f"trend_{name}"] for name in ("t", "walk", "drift")}
    return moved(values, view.size("window_level"), sign, **limits)


def _rising(view: View, *metrics: str) -> Found | None:
    """1 if the first of these metrics that there is rises over the long window, else 0."""
    for metric in metrics:
        if values := view.window.column(metric, view.size("window_long")):
            enough = len(values) >= view.size("window_trend")
            rises = enough and slope_over(values) > view.limits["trend_change"]
            return Found(float(rises and _moved(view, values, 1)), metric)
    return None


def _length_ratio(view: View) -> Found | None:
    """Medians of the first and the last steps; 1 while lengths rise no further than they scatter."""
    width = view.size("window_level")
    young = view.size("window_young")
    values = view.window.since(LENGTH, view.size("window_long"), width, young)
    if not values or (before := median(values[:width])) <= 0:
        return None
    now = median(values[-width:])
    rose = now > before and _moved(view, values, 1)
    return Found(now / before if rose or now < before else 1.0, LENGTH)


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
            fell = left < 1 and _moved(view, values, -1)
            return Found(left if fell else max(left, 1.0), metric)
    return None


def reward_drop(view: View) -> Found | None:
    """How far the mean reward fell from its best window, as a share of the best; 0 within noise."""
    values = view.recent("reward/mean")
    best = view.window.best_reward
    if len(values) < view.size("window_trend") or best is None or best.value <= 0:
        return None
    now = Mean.of(values)
    lost = best.value - now.value
    if lost <= 0:
        return Found(0.0, "reward/mean")
    # The best of many windows is also the luckiest: its own scatter counts, and rare rewards leave
    # none in a window that has lost them all. Twenty steps alone tell too little of their own.
    error = math.hypot(best.error, max(now.error, best.error))
    surely = error == 0 or normal_score(lost / error, best.dof) > view.limits["trend_t"]
    fell = surely or _moved(view, view.window.column("reward/mean", view.size("window_long")), -1)
    return Found(lost / best.value if fell else 0.0, "reward/mean")


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
    "clip_rising": Definition("1", "1 if it rises: least-squares line over the last `window_long` steps (of a younger run, all; at least `window_trend`) with relative change > `trend_change`, and its level moved by more than `trend_t`, `trend_walk` or `trend_drift`, errors for autocorrelated steps", lambda v: _rising(v, *CLIP)),
    "proxy3_rising": Definition("1", "1 if gradient variance proxy 3, `variance_proxy/proxy3_pure_noise`, rises in the same sense", lambda v: _rising(v, *PROXY3)),
    "len_ratio": Definition("1", "mean response length now over that `window_long` steps ago, or at the start of a younger run; medians of `window_level` steps; 1 while lengths rise by less than `trend_t`, `trend_walk` and `trend_drift`, errors for autocorrelated steps, absent before `window_young` steps", _length_ratio),
    "grad_spike": Definition("1", "largest gradient norm of the last `window_level` steps over the median of the `window_long` before", _spike),
    "ess_left": Definition("1", "effective sample size lately over its median in the `window_long` steps before: of sequence weights on `full` or `mismatch`, else `weight/ess_frac`; 1 while it falls by less than `trend_t`, `trend_walk` and `trend_drift`, errors for autocorrelated steps", _ess_left),
    "reward_drop": Definition("1", "1 - mean reward of the last `window_trend` steps over the best such mean, for positive rewards; 0 while the fall is within `trend_t` errors of both means, and within `trend_t`, `trend_walk` and `trend_drift` over the last `window_long` steps, for autocorrelated steps", reward_drop),
    "lr_ratio": Definition("1", "learning rate now over its largest in the window: `optim/lr_scale`, else `optim/lr`", _lr_ratio),
    "clip_widened": Definition("1", "upper clip distance now over its smallest in the window: `objective/eps_high`", _widened),
}  # fmt: skip
