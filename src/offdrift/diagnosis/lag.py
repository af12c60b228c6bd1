"""Readings that tell engines from lag: drift at the same weights, and how drift grows with lag.

What the log calls the old policy may itself be newer than the rollout's weights, so "mismatch"
alone is no zero-lag test. A reading at the same weights is, in this order: the whole log, if the
context says that the weights were the same by construction; the last steps whose `old/version_lag`
(else `version_lag/max`) is 0; the bucket of lag 0 among the context's facets (first, where the whole
run is judged); the first step of the run, if the log begins with step 0 or 1, because nothing had
been updated yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from offdrift.diagnosis.context import Context, Row
from offdrift.diagnosis.view import Definition, Found, View
from offdrift.diagnosis.window import number

LAGS = ("old/version_lag", "version_lag/max")


def at_same_weights(row: Row, context: Context) -> bool | None:
    """Whether this step's rollouts came from the weights that scored them; None if unknown."""
    if context.same_weights is not None:
        return context.same_weights
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


def _same(view: View, metric: str) -> Found | None:
    """A metric at the same weights, from the best source there is."""
    name = f"{view.on}/{metric}"
    if view.context.same_weights:
        return view.found(name)
    buckets = [r for r in _lag_rows(view.context) if r["low"] == 0][:1]
    sources = [list(view.window.same_weights), buckets]
    for rows in sources if view.overall is None else reversed(sources):
        if (value := _middle(rows, name)) is not None:
            return Found(value, f"{name} at lag 0")
    first = view.window.first
    if first is not None and first["step"] <= 1 and (value := number(first, name)) is not None:
        return Found(value, f"{name} at the first step")
    return None


def _kl(view: View) -> Found | None:
    """Exact where it was recorded, else k1."""
    second = "old" if view.on == "mismatch" else "current"
    return view.found(f"divergence/kl_rollout_{second}_mean", f"{view.on}/k1")


def _kl_full(view: View) -> Found | None:
    return view.found("divergence/kl_rollout_current_mean", "full/k1")


def _kl_over_same(view: View) -> Found | None:
    """How many times the drift at the same weights the drift now is."""
    now, same = _kl(view), _same(view, "k1")
    return None if now is None or same is None else Found(now.value / max(same.value, 1e-6), now.metric)  # fmt: skip


def _growth_at_same_weights(view: View) -> Found | None:
    """k3 at lag 0 now, over that of the first step at lag 0."""
    name, first = f"{view.on}/k3", view.window.first_same
    now = _middle(list(view.window.same_weights), name)
    before = None if first is None else number(first, name)
    if now is None or before is None or view.window.seen < 2:
        return None
    return Found(now / max(before, 1e-6), f"{name} at lag 0")


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
    return None if low is None or high is None else Found(high / max(low, 1e-6), f"{on}/k3 by lag")


def _kl_per_update(view: View) -> Found | None:
    """What one update adds: from the lag, or from the updates since the old policy was scored."""
    found = []
    total, lag, same = view.level("full/k3"), view.level("version_lag/mean"), _same(view, "k3")
    if total is not None and lag is not None and lag >= 0.5:
        found.append(Found((total - (same.value if same else 0.0)) / max(lag, 1.0), "full/k3"))
    if (inside := view.level("staleness/k3")) is not None:
        found.append(Found(inside, "staleness/k3"))
    return max(found, key=lambda f: f.value) if found else None


LAG = {
    "kl": Definition("nat", "KL(rollout || second policy) per token of the engine ratio: exact if recorded, else `{on}/k1`", _kl),
    "k1": Definition("nat", "`{on}/k1`: mean(-l), which no record of the sampled distribution makes negative", lambda v: v.found(f"{v.on}/k1")),
    "kl_full": Definition("nat", "KL(rollout || current) per token: exact if recorded, else `full/k1`", _kl_full),
    "same_ckpt": Definition("1", "1 if this whole log was taken at the same weights (the context says so)", lambda v: None if v.context.same_weights is None else float(v.context.same_weights)),
    "kl_same_ckpt": Definition("nat", "`{on}/k1` at the same weights: the whole log, lag 0, or the first step of the run", lambda v: _same(v, "k1")),
    "kl_over_same": Definition("1", "`kl` over `kl_same_ckpt`", _kl_over_same),
    "kl_since_old": Definition("nat", "k3 of the current policy against the old one: `staleness/k3`", lambda v: v.found("staleness/k3")),
    "kl_same_growth": Definition("1", "`{on}/k3` at lag 0 lately, over that of the first step at lag 0", _growth_at_same_weights),
    "lag": Definition("update", "mean version lag of the tokens: `version_lag/mean`", _lag),
    "lag_growth": Definition("1", "`{on}/k3` in the upper half of the version lags over k3 in the lower half: by the context's facets, else over the last `window_trend` steps", _lag_growth),
    "kl_per_update": Definition("nat", "k3 that one update adds: (`full/k3` - k3 at the same weights) / version lag, or `staleness/k3`; the larger", _kl_per_update),
}  # fmt: skip
