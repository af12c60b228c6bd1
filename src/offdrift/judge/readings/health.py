"""Readings of what a correction and a critic do, which know how many steps and sequences they rest on.

A number that is beyond its threshold counts only where its mean over the last `window_trend` steps is beyond it by
`trend_sure` errors for autocorrelated steps; else the reading stops at the threshold. Of fewer than `window_level`
steps, or of fewer than 30 sequences where they are counted, there is no reading.
"""

from __future__ import annotations

import math
from itertools import islice
from statistics import fmean, median

from offdrift.judge.readings.levels import weights_of
from offdrift.judge.readings.view import ReadNumber, StepMean, Table, View
from offdrift.judge.scatter import normal_score

HEALTH = Table()


def _sequences(view: View) -> float | None:
    """Sequences of the last steps: as they were counted, else tokens over their mean length; None if unknown."""
    if counted := view.recent("sequences"):
        return sum(counted)
    tokens, lengths = view.recent("batch/tokens"), view.recent("response/length_mean")
    return sum(tokens) / max(fmean(lengths), 1.0) if tokens and lengths else None


def _values(view: View, metric: str) -> list[float]:
    """The metric at the last steps; empty where they are too few, or hold too few sequences."""
    values, sequences = view.recent(metric), _sequences(view)
    few = len(values) < view.size("window_level") or (
        sequences is not None and sequences < view.limits["few_sequences"]
    )
    return [] if few else values


def _is_beyond(mean: StepMean, by: float, least: float, error: float = 0.0) -> bool:
    """Whether a distance beyond a threshold is more than so many errors, the larger one of the steps and of `error`."""
    error = max(mean.error, error)
    nothing = error < 1e-6 * by  # the same number at every step, but for its rounding
    return by > 0 and (nothing or normal_score(by / error, mean.dof) > least)


def _mean_beyond(view: View, metric: str, limit: str, sign: int, *, share: bool = False) -> ReadNumber | None:
    """The mean of a metric, but no further beyond the threshold than is sure.

    Args:
        sign: 1 if what lies above the threshold counts, -1 if what lies below.
        share: of sequences or tokens: its error is at least that of a share of as many independent sequences.
    """
    values = _values(view, metric)
    if not values:
        return None
    mean, bound = StepMean.of(values, view.window.column(metric, view.size("window_long"))), view.limits[limit]
    by, sequences = sign * (mean.value - bound), _sequences(view)
    error = math.sqrt(mean.value * (1 - mean.value) / sequences) if share and sequences and 0 < mean.value < 1 else 0.0
    beyond = by <= 0 or _is_beyond(mean, by, view.limits["trend_sure"], error)
    return ReadNumber(mean.value if beyond else bound, metric)


@HEALTH.reading()
def ppl_below(view: View) -> ReadNumber | None:
    """`{on}/ppl_ratio` where it is surely below 1, else 1 or more: of tokens, by the mean log-ratio of the log and its
    standard error clustered by sequence (`ratio_mean_z` of them); of metrics alone, by `trend_t` errors of the mean
    over the last `window_trend` steps"""
    metric = view.named("{on}/ppl_ratio")
    totals = view.context.shapes.get("whole") or {}
    if "l_z" in totals:
        value = view.level(metric)
        if value is None or totals["sequences"] < view.limits["few_sequences"]:
            return None
        return ReadNumber(value if totals["l_z"] > view.limits["ratio_mean_z"] else max(value, 1.0), metric)
    values = [math.log(x) for x in _values(view, metric) if x > 0]
    if not values:
        return None
    past = [math.log(x) for x in view.window.column(metric, view.size("window_long")) if x > 0]
    mean = StepMean.of(values, past)
    below = _is_beyond(mean, -mean.value, view.limits["trend_t"])
    return ReadNumber(math.exp(mean.value if below else max(mean.value, 0.0)), metric)


@HEALTH.reading()
def truncated(view: View) -> ReadNumber | None:
    """Share of tokens whose weight was cut at its limit: `weight/cap_frac`, but of a method that masks there"""
    weights = weights_of(view)
    if weights is not None and not any(w.outside != "mask" for w in weights):
        return None
    return _mean_beyond(view, "weight/cap_frac", "truncated_many", 1, share=True)


@HEALTH.reading()
def band_masked(view: View) -> ReadNumber | None:
    """Share of tokens outside the band of a method whose weight masks there: `weight/cap_frac`"""
    masks = any(w.outside == "mask" for w in weights_of(view) or ())
    return _mean_beyond(view, "weight/cap_frac", "icepop_soft", 1, share=True) if masks else None


@HEALTH.reading()
def weight_mean(view: View) -> ReadNumber | None:
    """Mean of the importance weights after limits, where weights are in use: `weight/mean`"""
    values = view.recent("weight/mean")
    if not values or not (view.level("weight/std") or 0.0) > 0:
        return None
    limit, sign = ("weight_mean_low", -1) if fmean(values) < 1 else ("weight_mean_high", 1)
    return _mean_beyond(view, "weight/mean", limit, sign)


@HEALTH.reading()
def weight_spread(view: View) -> ReadNumber | None:
    """Standard deviation of the importance weights after limits: `weight/std`"""
    return _mean_beyond(view, "weight/std", "weight_spread", 1)


@HEALTH.reading()
def stepped_without_gradient(view: View) -> ReadNumber | None:
    """Share of the last `window_trend` steps whose gradient norm `optim/grad_norm` was exactly 0 and that were taken:
    neither `optim/step_skipped` nor at a learning rate scaled to 0; steps that a younger run lacks count as others"""
    latest = islice(reversed(view.window.rows), view.size("window_trend"))
    rows = [row for row in latest if "optim/grad_norm" in row]
    if len(rows) < view.size("window_level"):
        return None
    taken = (
        row["optim/grad_norm"] == 0 and not row.get("optim/step_skipped") and row.get("optim/lr_scale", 1.0) > 0
        for row in rows
    )
    return ReadNumber(sum(taken) / view.size("window_trend"), "optim/grad_norm")


def _flat_steps(view: View, metric: str) -> ReadNumber | None:
    """The share of steps, of those that are kept, at which a metric is 0.

    None of fewer than `patience` steps, and of fewer than `few_sequences` sequences where they are counted.
    """
    values, counted = view.window.column(metric), view.window.column("sequences")
    few = counted and sum(counted) < view.limits["few_sequences"]
    if few or len(values) < view.limits["patience"]:
        return None
    return ReadNumber(sum(x == 0 for x in values) / len(values), metric)


@HEALTH.reading()
def flat_groups(view: View) -> ReadNumber | None:
    """Share of groups in which all responses earn the same, the mean of `groups/flat_frac` over the last `window_trend`
    steps; else 1 if half of `window_long` steps, or more, all have the same `reward/mean`. Absent of fewer steps."""
    flat, rewards = view.recent("groups/flat_frac"), view.window.column("reward/mean", view.size("window_long"))
    if len(flat) >= view.size("window_trend"):
        return ReadNumber(fmean(flat), "groups/flat_frac")
    if len(rewards) >= max(view.size("window_trend"), view.size("window_long") // 2):
        return ReadNumber(float(min(rewards) == max(rewards)), "reward/mean")
    return None


HEALTH.rows(
    {
        "flat_rewards": (
            lambda v: _flat_steps(v, "reward/span"),
            "Share of steps at which all responses earn the same: `reward/span` is 0",
        ),
        "flat_advantages": (
            lambda v: _flat_steps(v, "advantage/span"),
            "Share of steps at which all advantages are the same: `advantage/span` is 0",
        ),
    }
)


@HEALTH.reading()
def critic_explains(view: View) -> ReadNumber | None:
    """Share of the variance of returns that the critic explains, `critic/vf_explained_var`; absent in the first
    `trends_young` times `window_trend` steps, in which a critic is new"""
    if view.window.steps < view.limits["trends_young"] * view.size("window_trend"):
        return None
    return _mean_beyond(view, "critic/vf_explained_var", "critic_explains", -1)


@HEALTH.reading()
def chi2_seq_usual(view: View) -> ReadNumber | None:
    """Median over the last `window_trend` steps of the chi2 of products over sequences: `full/chi2_seq_largest`, else
    that of `{on}`, else `chi2_seq`"""
    names = (f"{on}/{name}" for name in ("chi2_seq_largest", "chi2_seq") for on in ("full", view.on))
    for name in names:
        if values := _values(view, name):
            return ReadNumber(median(values), name)
    return None
