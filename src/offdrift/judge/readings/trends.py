"""Readings that need history: what rises, spikes or falls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from offdrift.judge.readings.view import Mean, Measured, Table, View
from offdrift.judge.scatter import moved, normal_score, slope_over

CLIP = ("objective/clip_frac_active", "staleness/clip_frac")
LENGTH, GRAD, REWARD = "response/length_mean", "optim/grad_norm", "reward/mean"

TRENDS = Table()


def _moved(view: View, values: Sequence[float], sign: int) -> bool:
    """Whether the level of these steps rose or fell further than they scatter."""
    limits = {name: view.limits[f"trend_{name}"] for name in ("t", "walk", "drift")}
    return moved(values, view.size("window_level"), sign, **limits)


def _rising(view: View, *metrics: str) -> Measured | None:
    """1 if the first of these metrics that there is rises over the long window, else 0."""
    for metric in metrics:
        if values := view.window.column(metric, view.size("window_long")):
            enough = len(values) >= view.size("window_trend")
            rises = enough and slope_over(values) > view.limits["trend_change"]
            return Measured(float(rises and _moved(view, values, 1)), metric)
    return None


TRENDS.rows(
    {
        "clip_frac": (
            lambda v: v.first(*CLIP),
            "Share of tokens whose loss the clip changed: `objective/clip_frac_active`, else `staleness/clip_frac`",
        ),
        "clip_rising": (
            lambda v: _rising(v, *CLIP),
            "1 if it rises: least-squares line over the last `window_long` steps (of a younger run, all; at least "
            "`window_trend`) with relative change > `trend_change`, and its level moved by more than `trend_t`, "
            "`trend_walk` or `trend_drift`, errors for autocorrelated steps",
        ),
        "proxy3_rising": (
            lambda v: _rising(v, "variance_proxy/proxy3_pure_noise", "optim/proxy3_pure_noise"),
            "1 if gradient variance proxy 3, `variance_proxy/proxy3_pure_noise`, rises in the same sense",
        ),
    }
)


@TRENDS.reading()
def len_ratio(view: View) -> Measured | None:
    """Mean response length now over that `window_long` steps ago, or at the start of a younger run; medians of
    `window_level` steps; 1 while lengths rise by less than `trend_t`, `trend_walk` and `trend_drift`, errors
    for autocorrelated steps, absent before `window_young` steps."""
    width = view.size("window_level")
    values = view.window.since(LENGTH, view.size("window_long"), width, view.size("window_young"))
    if not values or (before := median(values[:width])) <= 0:
        return None
    now = median(values[-width:])
    rose = now > before and _moved(view, values, 1)
    return Measured(now / before if rose or now < before else 1.0, LENGTH)


@TRENDS.reading()
def grad_spike(view: View) -> Measured | None:
    """Largest gradient norm of the last `window_level` steps over the median of the `window_long` before."""
    values = view.window.column(GRAD, view.size("window_long"))
    width = view.size("window_level")
    if len(values) < 2 * width or (usual := median(values[:-width])) <= 0:
        return None
    return Measured(max(values[-width:]) / usual, GRAD)


@TRENDS.reading()
def ess_left(view: View) -> Measured | None:
    """Effective sample size lately over its median in the `window_long` steps before: of sequence weights on
    `full` or `mismatch`, else `weight/ess_frac`; 1 while it falls by less than `trend_t`, `trend_walk` and
    `trend_drift`, errors for autocorrelated steps."""
    width = view.size("window_level")
    for metric in ("full/ess_seq_frac", "mismatch/ess_seq_frac", "weight/ess_frac"):
        values = view.window.column(metric, view.size("window_long"))
        if len(values) >= 2 * width and (usual := median(values[:-width])) > 0:
            left = median(values[-width:]) / usual
            fell = left < 1 and _moved(view, values, -1)
            return Measured(left if fell else max(left, 1.0), metric)
    return None


@TRENDS.reading()
def reward_drop(view: View) -> Measured | None:
    """1 - mean reward of the last `window_trend` steps over the best such mean, for positive rewards; 0 while the
    fall is within `trend_t` errors of both means, and within `trend_t`, `trend_walk` and `trend_drift` over
    the last `window_long` steps, for autocorrelated steps."""
    values = view.recent(REWARD)
    best = view.window.best_reward
    if len(values) < view.size("window_trend") or best is None or best.value <= 0:
        return None
    now = Mean.of(values)
    lost = best.value - now.value
    if lost <= 0:
        return Measured(0.0, REWARD)
    # The best of many windows is also the luckiest: its own scatter counts, and rare rewards leave
    # none in a window that has lost them all. Twenty steps alone tell too little of their own.
    error = math.hypot(best.error, max(now.error, best.error))
    surely = error == 0 or normal_score(lost / error, best.dof) > view.limits["trend_t"]
    fell = surely or _moved(view, view.window.column(REWARD, view.size("window_long")), -1)
    return Measured(lost / best.value if fell else 0.0, REWARD)


@TRENDS.reading()
def lr_ratio(view: View) -> Measured | None:
    """Learning rate now over its largest in the window: `optim/lr_scale`, else `optim/lr`."""
    for metric in ("optim/lr_scale", "optim/lr"):
        values = view.window.column(metric)
        if values and max(values) > 0:
            return Measured(values[-1] / max(values), metric)
    return None


@TRENDS.reading()
def clip_widened(view: View) -> Measured | None:
    """Upper clip distance now over its smallest in the window: `objective/eps_high`."""
    values = view.window.column("objective/eps_high")
    return Measured(values[-1] / min(values), "objective/eps_high") if values and min(values) > 0 else None
