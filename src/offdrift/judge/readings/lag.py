"""Readings that separate engines from lag: drift at the same weights, and how drift grows with lag.

What the log calls the old policy may itself be newer than the rollout's weights, so "mismatch"
alone is no zero-lag test. A reading at the same weights is, in this order: the whole log, if the
context says that the weights were the same by construction; the last steps whose old log-probs are all
exact, or whose `old/version_lag` (else `version_lag/max`) is 0; the bucket of lag 0 among the context's
facets (first, where the whole run is judged); the first step of the run, if the log begins with step 0
or 1 and goes on to others, because nothing had been updated when its old policy was scored. Of the
current policy that cannot be said: several minibatches may have been trained on by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from offdrift.judge.findings import Context, Row, number
from offdrift.judge.kl_choice import kl_metrics, kl_of
from offdrift.judge.readings.levels import ratio_mean_z
from offdrift.judge.readings.view import Measured, Table, View

LAG = Table()
LAG.rows({"lag": ("version_lag/mean", "Mean version lag of the tokens: `version_lag/mean`")}, "update")


def at_same_weights(row: Row, context: Context) -> bool | None:
    """Whether this step's rollouts came from the weights that scored them; None if unknown."""
    if context.same_weights is not None:
        return context.same_weights
    if number(row, "old/exact_frac") == 1:
        return True
    lags = (number(row, name) for name in ("old/version_lag", "version_lag/max"))
    return next((lag == 0 for lag in lags if lag is not None), None)


def _lag_rows(context: Context) -> list[Row]:
    rows = (r for r in context.facets.get("lag", ()) if number(r, "low") is not None)
    return sorted(rows, key=lambda r: r["low"] or 0)


def _middle(rows: Sequence[Row], metric: str) -> float | None:
    values = [x for row in rows if (x := number(row, metric)) is not None]
    return median(values) if values else None


def _sources_at_same_weights(view: View) -> list[tuple[list[Row], str]]:
    """Sources of rows at the same weights and what to call them, the best first."""
    buckets = [r for r in _lag_rows(view.context) if r["low"] == 0][:1]
    sources = [(list[Row](view.window.same_weights), "at lag 0"), (buckets, "at lag 0")]
    if view.overall is not None:
        sources.reverse()
    first = view.window.first
    # Without a column of steps all of them are step 0, whatever was updated in between.
    if first is not None and view.window.step != first["step"] <= 1 and view.on == "mismatch":
        sources.append(([first], "at the first step"))
    return sources


def _same(view: View, metric: str) -> Measured | None:
    """A metric at the same weights, from the best source there is."""
    name = f"{view.on}/{metric}"
    if view.context.same_weights:
        return view.first(name)
    for rows, label in _sources_at_same_weights(view):
        if (value := _middle(rows, name)) is not None:
            return Measured(value, f"{name} {label}")
    return None


def _kl_on(view: View, on: str) -> Measured | None:
    z = ratio_mean_z(view, on)
    return view.first(*kl_metrics(on, None if z is None else z.value, view.limits["ratio_mean_z"]))


@LAG.reading("nat")
def kl(view: View) -> Measured | None:
    """KL(rollout || second policy) per token of the engine ratio: exact if recorded, else `{on}/k3` while the
    mean ratio is within `ratio_mean_z` standard errors of 1 (or nobody knows), else `{on}/k1`."""
    return _kl_on(view, view.on)


LAG.rows(
    {
        "k1": ("{on}/k1", "`{on}/k1`: mean(-l), which no record of the sampled distribution makes negative"),
        "kl_full": (lambda v: _kl_on(v, "full"), "KL(rollout || current) per token, estimated as `kl` is"),
        "kl_since_old": ("staleness/k3", "k3 of the current policy against the old one: `staleness/k3`"),
    },
    "nat",
)
LAG.rows(
    {
        "same_ckpt": (
            lambda v: v.context.same_weights,
            "1 if this whole log was taken at the same weights (the context says so)",
        ),
        "pearson_same_ckpt": (lambda v: _same(v, "pearson"), "`{on}/pearson` at the same weights"),
    }
)


@LAG.reading("nat")
def kl_same_ckpt(view: View) -> Measured | None:
    """`kl` at the same weights: the whole log, lag 0, or the first step of the run."""
    if view.context.same_weights:
        return kl(view)
    for rows, label in _sources_at_same_weights(view):
        if (estimate := kl_of(rows, view.on, view.limits["ratio_mean_z"])) is not None:
            return Measured(estimate[0], f"{estimate[1]} {label}")
    return None


@LAG.reading()
def kl_over_same(view: View) -> Measured | None:
    """`kl` over `kl_same_ckpt`."""
    now, same = kl(view), kl_same_ckpt(view)
    if now is None or same is None:
        return None
    return Measured(now.value / max(same.value, 1e-6), f"{now.metric}, over that at the same weights")


@LAG.reading("update")
def lag_at_arrival(view: View) -> Measured | None:
    """Updates from the weights of the old policy to those that a batch's first update found: mean version lag,
    less that of the old policy and the updates on the batch itself."""
    since, inside = _updates_since_old(view), view.level("batch/updates_before")
    return None if since is None else Measured(since - (inside or 0.0), "version_lag/mean")


@LAG.reading()
def kl_same_growth(view: View) -> Measured | None:
    """`{on}/k3` at lag 0 lately, over that of the first steps at lag 0: medians of five, of fewer in a short
    run."""
    # As many first steps as last ones, and never the same. Of fewer than four, one lucky batch would be the baseline.
    return _growth(view, max(1, view.window.steps_same // 2), 4, 1e-6, "at lag 0, over that of the first steps")


@LAG.reading()
def kl_same_jump(view: View) -> Measured | None:
    """`{on}/k3` at lag 0 lately (the median of five), over that of the very first step at lag 0."""
    # The very first step at lag 0 was before anything was updated.
    return _growth(view, 1, 2, 1e-9, "at lag 0, over that of the first step")


def _growth(view: View, early: int, least: int, floor: float, label: str) -> Measured | None:
    """k3 at lag 0 lately over that of the `early` first steps at lag 0, from `least` such steps on."""
    name, window = f"{view.on}/k3", view.window
    now, before = _middle(list(window.same_weights), name), _middle(window.first_same[:early], name)
    if now is None or before is None or window.steps_same < least:
        return None
    return Measured(now / max(before, floor), f"{name} {label}")


@LAG.reading()
def lag_growth(view: View) -> Measured | None:
    """`{on}/k3` in the upper half of the version lags over k3 in the lower half: by the context's facets, else
    over the last `window_trend` steps."""
    name, key = f"{view.on}/k3", "low"
    rows = [r for r in _lag_rows(view.context) if number(r, name) is not None]
    if len(rows) < 2:
        key = "version_lag/mean"
        rows = [r for r in view.window.rows if key in r and name in r]
        rows = sorted(rows[-view.size("window_trend") :], key=lambda r: r[key] or 0)
    if len(rows) < 2 or (rows[-1][key] or 0) - (rows[0][key] or 0) < 0.5:
        return None
    middle = ((rows[0][key] or 0) + (rows[-1][key] or 0)) / 2
    low = _middle([r for r in rows if (r[key] or 0) <= middle], name)
    high = _middle([r for r in rows if (r[key] or 0) > middle], name)
    if low is None or high is None:
        return None
    return Measured(high / max(low, 1e-6), f"{name} at long lags, over that at short ones")


def _updates_since_old(view: View) -> float | None:
    """Updates between the weights that the old policy has and the current ones; None if unknown."""
    lag = view.level("version_lag/mean")
    behind = 0.0 if view.level("old/exact_frac") == 1 else view.level("old/version_lag")
    return None if lag is None or behind is None else lag - behind


@LAG.reading("nat")
def kl_per_update(view: View) -> Measured | None:
    """K3 that one update adds: (`full/k3` - k3 at the same weights) / version lag, or `staleness/k3` / updates
    since the old policy; the larger."""
    estimates = []
    total, lag, same = view.level("full/k3"), view.level("version_lag/mean"), _same(view, "k3")
    if total is not None and lag is not None and lag >= 0.5:
        estimates.append(Measured((total - (same.value if same else 0.0)) / max(lag, 1.0), "full/k3"))
    if (inside := view.level("staleness/k3")) is not None:
        estimates.append(Measured(inside / max(_updates_since_old(view) or 1.0, 1.0), "staleness/k3"))
    return max(estimates, key=lambda m: m.value, default=None)
