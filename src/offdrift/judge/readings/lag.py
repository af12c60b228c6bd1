"""Readings that tell engines from lag: drift at the same weights, and how drift grows with lag.

What the log calls the old policy may itself be newer than the rollout's weights, so "mismatch"
alone is no zero-lag test. A reading at the same weights is, in this order: the whole log, if the
context says that the weights were the same by construction; the last steps whose old log-probs are all
exact, or whose `old/version_lag` (else `version_lag/max`) is 0; the bucket of lag 0 among the context's facets (first, where the whole
run is judged); the first step of the run, if the log begins with step 0 or 1 and goes on to others,
because nothing had been updated when its old policy was scored. Of the current policy that cannot be
said: several minibatches may have been trained on by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from offdrift.judge.context import Context, Row
from offdrift.judge.kl_choice import kl_metrics, kl_of
from offdrift.judge.readings.signatures import ratio_mean_z
from offdrift.judge.readings.view import Definition, Found, View
from offdrift.judge.window import number

LAGS = ("old/version_lag", "version_lag/max")


def at_same_weights(row: Row, context: Context) -> bool | None:
    """Whether this step's rollouts came from the weights that scored them; None if unknown."""
    if context.same_weights is not None:
        return context.same_weights
    if number(row, "old/exact_frac") == 1:
        return True
    for name in LAGS:
        if (lag := number(row, name)) is not None:
            return lag == 0
    return None


def _lag_rows(context: Context) -> list[Row]:
    rows = context.by_lag or context.facets.get("lag", ())
    return sorted((r for r in rows if number(r, "low") is not None), key=lambda r: r["low"] or 0)


def _middle(rows: Sequence[Row], metric: str) -> float | None:
    values = [x for row in rows if (x := number(row, metric)) is not None]
    return median(values) if values else None


def _at_same_weights(view: View) -> list[tuple[list[Row], str]]:
    """Sources of rows at the same weights and what to call them, the best first."""
    buckets = [r for r in _lag_rows(view.context) if r["low"] == 0][:1]
    lag = [(list[Row](view.window.same_weights), "at lag 0"), (buckets, "at lag 0")]
    found = lag if view.overall is None else lag[::-1]
    first = view.window.first
    # Without a column of steps all of them are step 0, whatever was updated in between.
    goes_on = first is not None and view.window.step != first["step"]
    if first is not None and goes_on and first["step"] <= 1 and view.on == "mismatch":
        found.append(([first], "at the first step"))
    return found


def _same(view: View, metric: str) -> Found | None:
    """A metric at the same weights, from the best source there is."""
    name = f"{view.on}/{metric}"
    if view.context.same_weights:
        return view.found(name)
    for rows, called in _at_same_weights(view):
        if (value := _middle(rows, name)) is not None:
            return Found(value, f"{name} {called}")
    return None


def _kl_on(view: View, on: str) -> Found | None:
    z = ratio_mean_z(view, on)
    return view.found(*kl_metrics(on, None if z is None else z.value, view.limits["ratio_mean_z"]))


def _kl(view: View) -> Found | None:
    return _kl_on(view, view.on)


def _kl_full(view: View) -> Found | None:
    return _kl_on(view, "full")


def _kl_same(view: View) -> Found | None:
    """The KL at the same weights, from the best source there is."""
    if view.context.same_weights:
        return _kl(view)
    for rows, called in _at_same_weights(view):
        if (found := kl_of(rows, view.on, view.limits["ratio_mean_z"])) is not None:
            return Found(found[0], f"{found[1]} {called}")
    return None


def _kl_over_same(view: View) -> Found | None:
    """How many times the drift at the same weights the drift now is."""
    now, same = _kl(view), _kl_same(view)
    if now is None or same is None:
        return None
    return Found(now.value / max(same.value, 1e-6), f"{now.metric}, over that at the same weights")


def _growth_at_same_weights(view: View) -> Found | None:
    """k3 at lag 0 lately, over that of the first steps at lag 0: as many, and never the same ones."""
    name, window = f"{view.on}/k3", view.window
    early = window.first_same[: max(1, window.seen_same // 2)]
    now, before = _middle(list(window.same_weights), name), _middle(early, name)
    # Of fewer steps one lucky batch would be the baseline.
    if now is None or before is None or window.seen_same < 4:
        return None
    return Found(now / max(before, 1e-6), f"{name} at lag 0, over that of the first steps")


def _jump_at_same_weights(view: View) -> Found | None:
    """k3 at lag 0 lately, over that of the very first step at lag 0, before anything was updated."""
    name, window = f"{view.on}/k3", view.window
    now, first = _middle(list(window.same_weights), name), _middle(window.first_same[:1], name)
    if now is None or first is None or window.seen_same < 2:
        return None
    return Found(now / max(first, 1e-9), f"{name} at lag 0, over that of the first step")


def _lag(view: View) -> Found | None:
    return view.found("version_lag/mean")


def _lag_growth(view: View) -> Found | None:
    """k3 in the upper half of lags over the lower: of the facets, else of the last steps."""
    on = view.on
    rows = [r for r in _lag_rows(view.context) if number(r, f"{on}/k3") is not None]
    key = "low"
    if len(rows) < 2:
        key = "version_lag/mean"
        rows = [r for r in view.window.rows if key in r and f"{on}/k3" in r]
        rows = sorted(rows[-view.size("window_trend") :], key=lambda r: r[key] or 0)
    if len(rows) < 2 or (rows[-1][key] or 0) - (rows[0][key] or 0) < 0.5:
        return None
    middle = ((rows[0][key] or 0) + (rows[-1][key] or 0)) / 2
    low = _middle([r for r in rows if (r[key] or 0) <= middle], f"{on}/k3")
    high = _middle([r for r in rows if (r[key] or 0) > middle], f"{on}/k3")
    return None if low is None or high is None else Found(high / max(low, 1e-6), f"{on}/k3 at long lags, over that at short ones")  # fmt: skip


def _updates_since_old(view: View) -> float | None:
    """Updates between the weights that the old policy has and the current ones; None if unknown."""
    lag = view.level("version_lag/mean")
    behind = 0.0 if view.level("old/exact_frac") == 1 else view.level("old/version_lag")
    return None if lag is None or behind is None else lag - behind


def _lag_at_arrival(view: View) -> Found | None:
    """The lag that a batch had before its first update, as far as the old policy shows it."""
    since, inside = _updates_since_old(view), view.level("batch/updates_before")
    return None if since is None else Found(since - (inside or 0.0), "version_lag/mean")


def _kl_per_update(view: View) -> Found | None:
    """What one update adds: from the lag, or from the updates since the old policy was scored."""
    found = []
    total, lag, same = view.level("full/k3"), view.level("version_lag/mean"), _same(view, "k3")
    if total is not None and lag is not None and lag >= 0.5:
        found.append(Found((total - (same.value if same else 0.0)) / max(lag, 1.0), "full/k3"))
    if (inside := view.level("staleness/k3")) is not None:
        found.append(Found(inside / max(_updates_since_old(view) or 1.0, 1.0), "staleness/k3"))
    return max(found, key=lambda f: f.value) if found else None


LAG = {
    "kl": Definition("nat", "KL(rollout || second policy) per token of the engine ratio: exact if recorded, else `{on}/k3` while the mean ratio is within `ratio_mean_z` standard errors of 1 (or nobody knows), else `{on}/k1`", _kl),
    "k1": Definition("nat", "`{on}/k1`: mean(-l), which no record of the sampled distribution makes negative", lambda v: v.found(f"{v.on}/k1")),
    "kl_full": Definition("nat", "KL(rollout || current) per token, estimated as `kl` is", _kl_full),
    "same_ckpt": Definition("1", "1 if this whole log was taken at the same weights (the context says so)", lambda v: None if v.context.same_weights is None else float(v.context.same_weights)),
    "kl_same_ckpt": Definition("nat", "`kl` at the same weights: the whole log, lag 0, or the first step of the run", _kl_same),
    "pearson_same_ckpt": Definition("1", "`{on}/pearson` at the same weights", lambda v: _same(v, "pearson")),
    "kl_over_same": Definition("1", "`kl` over `kl_same_ckpt`", _kl_over_same),
    "kl_since_old": Definition("nat", "k3 of the current policy against the old one: `staleness/k3`", lambda v: v.found("staleness/k3")),
    "lag_at_arrival": Definition("update", "updates from the weights of the old policy to those that a batch's first update found: mean version lag, less that of the old policy and the updates on the batch itself", _lag_at_arrival),
    "kl_same_growth": Definition("1", "`{on}/k3` at lag 0 lately, over that of the first steps at lag 0: medians of five, of fewer in a short run", _growth_at_same_weights),
    "kl_same_jump": Definition("1", "`{on}/k3` at lag 0 lately (the median of five), over that of the very first step at lag 0", _jump_at_same_weights),
    "lag": Definition("update", "mean version lag of the tokens: `version_lag/mean`", _lag),
    "lag_growth": Definition("1", "`{on}/k3` in the upper half of the version lags over k3 in the lower half: by the context's facets, else over the last `window_trend` steps", _lag_growth),
    "kl_per_update": Definition("nat", "k3 that one update adds: (`full/k3` - k3 at the same weights) / version lag, or `staleness/k3` / updates since the old policy; the larger", _kl_per_update),
}  # fmt: skip
