"""Readings that need history: how drift grows with lag, and what rises, spikes or falls.

`LAG` separates engines from lag. What the log calls the old policy may itself be newer than the rollout's weights, so
"mismatch" alone is no zero-lag test. A reading at the same weights is, in this order: the whole log, if the
context says that the weights were the same by construction; the last steps whose old log-probs are all
exact, or whose `old/version_lag` (else `version_lag/max`) is 0; the bucket of lag 0 among the context's
facets (first, where the whole run is judged). The first step of a log that states no versions is no such
reading: it may be an asynchronous run's, or the middle of another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from offdrift.judge.findings import Context, Row, number
from offdrift.judge.kl_choice import kl_metrics, kl_of
from offdrift.judge.readings.levels import ratio_mean_z
from offdrift.judge.readings.view import ReadNumber, StepMean, Table, View
from offdrift.judge.scatter import Break, break_of, moved, normal_score, slope_over

LAG = Table()
LAG.rows({"lag": ("version_lag/mean", "Mean version lag of the tokens: `version_lag/mean`")}, "update")


def at_same_weights(row: Row, context: Context) -> bool | None:
    """True if this step's rollouts were sampled with the weights that scored them; None if unknown."""
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
    return sources


def _same(view: View, metric: str) -> ReadNumber | None:
    """A metric at the same weights, from the best source there is."""
    name = f"{view.on}/{metric}"
    if view.context.same_weights:
        return view.first(name)
    for rows, label in _sources_at_same_weights(view):
        if (value := _middle(rows, name)) is not None:
            return ReadNumber(value, f"{name} {label}")
    return None


def _kl_on(view: View, on: str) -> ReadNumber | None:
    z = ratio_mean_z(view, on)
    return view.first(*kl_metrics(on, None if z is None else z.value, view.limits["ratio_mean_z"]))


@LAG.reading("nat")
def kl(view: View) -> ReadNumber | None:
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
        "same_logged": (
            lambda v: v.window.same_throughout(v.size("window_level")),
            "1 if every step of the log so far, `window_level` or more, states that its tokens were drawn by the "
            "weights that scored them (lag 0, or an old policy that is exact), else 0; absent where none states it",
        ),
        "pearson_same_ckpt": (lambda v: _same(v, "pearson"), "`{on}/pearson` at the same weights"),
    }
)


@LAG.reading("nat")
def kl_same_ckpt(view: View) -> ReadNumber | None:
    """`kl` at the same weights: the whole log, or lag 0."""
    if view.context.same_weights:
        return kl(view)
    for rows, label in _sources_at_same_weights(view):
        if (estimate := kl_of(rows, view.on, view.limits["ratio_mean_z"])) is not None:
            return ReadNumber(estimate[0], f"{estimate[1]} {label}")
    return None


@LAG.reading("nat")
def mean_gap(view: View) -> ReadNumber | None:
    """Mean |l| where no KL was logged: `mismatch/abs_log_ratio_mean`, else `full/abs_log_ratio_mean`; the KL is at most
    that."""
    if kl(view) is not None or _kl_on(view, "full") is not None:
        return None
    return view.first("mismatch/abs_log_ratio_mean", "full/abs_log_ratio_mean")


def _waits(view: View) -> tuple[list[int], int] | None:
    """Steps between rises of the newest rollout version over the last `window_long` steps, and those since the last
    rise (since the first step, if there was none); None of fewer than `patience` steps, or while nothing trains."""
    rows = [row for row in view.window.rows if "version/rollout" in row][-view.size("window_long") :]
    trains = view.window.column("version/current", len(rows))
    if len(rows) < view.limits["patience"] or (trains and trains[-1] == trains[0]):
        return None
    newest, at = rows[0]["version/rollout"], [0]
    for i, row in enumerate(rows):
        if row["version/rollout"] > newest:
            newest = row["version/rollout"]
            at.append(i)
    return [b - a for a, b in pairwise(at)], len(rows) - 1 - at[-1]


@LAG.reading()
def engine_still(view: View) -> ReadNumber | None:
    """Steps since the newest version that drew a token, `version/rollout`, last rose, over the longest wait for a rise
    before; 0 in the first `window_level` of them. Absent of fewer than two rises, and if `version/current` stands."""
    if (waits := _waits(view)) is None or len(waits[0]) < 2:
        return None
    before, since = waits
    return ReadNumber(since / max(before) if since >= view.size("window_level") else 0.0, "version/rollout")


@LAG.reading("step")
def engine_never(view: View) -> ReadNumber | None:
    """Steps at all of which `version/rollout` is the same, 0 if it ever rose; absent while `version/current` stands."""
    if (waits := _waits(view)) is None:
        return None
    return ReadNumber(0.0 if waits[0] else waits[1] + 1.0, "version/rollout")


@LAG.reading()
def kl_over_same(view: View) -> ReadNumber | None:
    """`kl` over `kl_same_ckpt`."""
    now, same = kl(view), kl_same_ckpt(view)
    if now is None or same is None:
        return None
    return ReadNumber(now.value / max(same.value, 1e-6), f"{now.metric}, over that at the same weights")


@LAG.reading("update")
def lag_before_batch(view: View) -> ReadNumber | None:
    """Updates from the weights that drew the tokens to those that a batch's first update found: mean version lag less
    `batch/updates_before`, the updates on the batch itself."""
    lag, inside = view.level("version_lag/mean"), view.level("batch/updates_before")
    return None if lag is None or inside is None else ReadNumber(max(lag - inside, 0.0), "version_lag/mean")


@LAG.reading("update")
def lag_at_arrival(view: View) -> ReadNumber | None:
    """Updates from the weights of the old policy to those that a batch's first update found: mean version lag,
    less that of the old policy and the updates on the batch itself."""
    since, inside = _updates_since_old(view), view.level("batch/updates_before")
    return None if since is None else ReadNumber(since - (inside or 0.0), "version_lag/mean")


@LAG.reading("nat")
def kl_reuse(view: View) -> ReadNumber | None:
    """k3 that further epochs on a batch add: `reuse/k3`, else `staleness/k3` (`full/k3` without an old policy) at the
    last of several `batch/epoch` less that at the first, medians over the last `window_trend` steps."""
    if (logged := view.first("reuse/k3")) is not None:
        return logged
    rows = [row for row in list(view.window.rows)[-view.size("window_trend") :] if "batch/epoch" in row]
    last = max((row["batch/epoch"] for row in rows), default=0.0)
    for name in ("staleness/k3", "full/k3") if last else ():
        first, later = (_middle([row for row in rows if row["batch/epoch"] == e], name) for e in (0.0, last))
        if first is not None and later is not None:
            return ReadNumber(max(later - first, 0.0), f"{name}, last epoch less the first")
    return None


@LAG.reading()
def kl_same_growth(view: View) -> ReadNumber | None:
    """`{on}/k3` at lag 0 lately, over that of the first steps at lag 0: medians of five, of fewer in a short
    run."""
    # As many first steps as last ones, and never the same. Of fewer than four, one lucky batch would be the baseline.
    return _growth(view, max(1, view.window.steps_same // 2), 4, 1e-6, "at lag 0, over that of the first steps")


@LAG.reading()
def kl_same_jump(view: View) -> ReadNumber | None:
    """`{on}/k3` at lag 0 lately (the median of five), over that of the very first step at lag 0."""
    # The very first step at lag 0 was before anything was updated.
    return _growth(view, 1, 2, 1e-9, "at lag 0, over that of the first step")


def _growth(view: View, early: int, least: int, floor: float, label: str) -> ReadNumber | None:
    """k3 at lag 0 lately over that of the `early` first steps at lag 0, from `least` such steps on."""
    name, window = f"{view.on}/k3", view.window
    now, before = _middle(list(window.same_weights), name), _middle(window.first_same[:early], name)
    if now is None or before is None or window.steps_same < least:
        return None
    return ReadNumber(now / max(before, floor), f"{name} {label}")


@LAG.reading()
def lag_growth(view: View) -> ReadNumber | None:
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
    return ReadNumber(high / max(low, 1e-6), f"{name} at long lags, over that at short ones")


def _updates_since_old(view: View) -> float | None:
    """Updates between the weights that the old policy has and the current ones; None if unknown."""
    lag = view.level("version_lag/mean")
    behind = 0.0 if view.level("old/exact_frac") == 1 else view.level("old/version_lag")
    return None if lag is None or behind is None else lag - behind


@LAG.reading("nat")
def kl_per_update(view: View) -> ReadNumber | None:
    """K3 that one update adds: (`full/k3` - k3 at the same weights) / version lag, or `staleness/k3` / updates
    since the old policy; the larger."""
    estimates = []
    total, lag, same = view.level("full/k3"), view.level("version_lag/mean"), _same(view, "k3")
    if total is not None and lag is not None and lag >= 0.5:
        estimates.append(ReadNumber((total - (same.value if same else 0.0)) / max(lag, 1.0), "full/k3"))
    if (inside := view.level("staleness/k3")) is not None:
        estimates.append(ReadNumber(inside / max(_updates_since_old(view) or 1.0, 1.0), "staleness/k3"))
    return max(estimates, key=lambda m: m.value, default=None)


CLIP = ("objective/clip_frac_active", "staleness/clip_frac")
LENGTH, GRAD, REWARD = "response/length_mean", "optim/grad_norm", "reward/mean"
HELD_OUT = "eval/reward"

TRENDS = Table()


def _moved(view: View, values: Sequence[float], sign: int) -> bool:
    """Whether the level of these steps rose or fell further than they scatter."""
    limits = {name: view.limits[f"trend_{name}"] for name in ("t", "walk", "drift")}
    return moved(values, view.size("window_level"), sign, **limits)


BROKEN = 5.0
"""Normal score of a change of level whose place was chosen."""
SUDDEN = 0.7
"""Share of a change that happens between neighboring windows of `window_level` steps, from which on it is sudden."""


def _step_of(view: View, values: Sequence[float]) -> float:
    """Level after a sudden rise over that before it, if these steps rose so and a third of it is left; else 1."""
    width = view.size("window_level")
    if len(values) < max(2 * width, view.size("window_trend")) or not _moved(view, values, 1):
        return 1.0
    medians = [median(values[i : i + width]) for i in range(len(values) - width + 1)]
    changes = [medians[i + width] - medians[i] for i in range(len(medians) - width)]
    at = max(range(len(changes)), key=changes.__getitem__)
    before, after = medians[at], medians[at + width]
    left = medians[-1] - before
    sudden = changes[at] >= SUDDEN * (max(medians) - min(medians)) and left >= changes[at] / 3
    return after / before if sudden and before > 0 else 1.0


def _rising(view: View, *metrics: str) -> ReadNumber | None:
    """1 if the first of these metrics that there is rises over the long window, else 0."""
    for metric in metrics:
        if values := view.window.column(metric, view.size("window_long")):
            enough = len(values) >= view.size("window_trend")
            rises = enough and slope_over(values) > view.limits["trend_change"]
            return ReadNumber(float(rises and _moved(view, values, 1)), metric)
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
def drift_rising(view: View) -> ReadNumber | None:
    """1 if drift rises in the same sense, and not at one step alone: `staleness/k3`, `staleness/k1`, `full/k3`,
    `{on}/k3` or `{on}/k1`, whichever does."""
    metrics = ("staleness/k3", "staleness/k1", "full/k3", view.on + "/k3", view.on + "/k1")
    logged = [(name, values) for name in metrics if (values := view.window.column(name, view.size("window_long")))]
    for name, values in logged:
        if (rises := _rising(view, name)) and rises.value and _step_of(view, values) == 1.0:
            return rises
    return ReadNumber(0.0, logged[0][0]) if logged else None


@TRENDS.reading()
def gap_jump(view: View) -> ReadNumber | None:
    """Gap of the engines after a step at which it jumped and stayed, over that before, of the last `window_long` steps:
    medians of `{on}/k3`, else `{on}/k1`, else of `{on}/prob_diff_mean`; 1 without such a step."""
    for name in ("k3", "k1", "prob_diff_mean"):
        if values := view.window.column(f"{view.on}/{name}", view.size("window_long")):
            return ReadNumber(_step_of(view, values), f"{view.on}/{name}")
    return None


def _reward_fell(view: View) -> tuple[float, Break] | None:
    """The step after which the mean reward fell at once and stayed, of the last `window_long`, and its levels."""
    rows = [row for row in view.window.rows if REWARD in row][-view.size("window_long") :]
    width, values = view.size("window_level"), [row[REWARD] for row in rows]
    found = break_of(values, width) if len(values) >= view.size("window_trend") else None
    if found is None or found.score > -BROKEN or found.before <= 0:
        return None
    near = median(values[found.at - width : found.at]) - median(values[found.at : found.at + width])
    return (rows[found.at]["step"], found) if near >= SUDDEN * (found.before - found.after) else None


@TRENDS.reading()
def reward_step(view: View) -> ReadNumber | None:
    """Mean reward after a step at which it fell and stayed, over that before, of the last `window_long` steps; 1
    without such a step, and where held-out reward is measured."""
    if not view.window.column(REWARD, view.size("window_long")):
        return None
    fell = None if view.window.column(HELD_OUT) else _reward_fell(view)
    return ReadNumber(1.0 if fell is None else fell[1].after / fell[1].before, REWARD)


@TRENDS.reading("step")
def reward_step_at(view: View) -> ReadNumber | None:
    """The step from which on the mean reward is lower, where it fell at one step"""
    fell = _reward_fell(view)
    return None if fell is None else ReadNumber(fell[0], REWARD)


@TRENDS.reading()
def entropy_left(view: View) -> ReadNumber | None:
    """Entropy of the policy now over that at the start of the last `window_long` steps, `current/entropy`: medians of
    `window_level` steps; 1 while it falls by less than `trend_t`, `trend_walk` and `trend_drift`."""
    return _over_first(view, "current/entropy", -1)


@TRENDS.reading()
def truncated_now(view: View) -> ReadNumber | None:
    """Share of responses that reach the length limit, `response/truncated_frac`, the median of `window_level` steps, if
    it rose over the last `window_long` by more than `trend_t`, `trend_walk` and `trend_drift`; else 0."""
    name = "response/truncated_frac"
    values = view.window.column(name, view.size("window_long"))
    width = view.size("window_level")
    if len(values) < 2 * width:
        return None
    now = median(values[-width:])
    rose = now > 2 * median(values[:width]) and _moved(view, values, 1)
    return ReadNumber(now if rose else 0.0, name)


@TRENDS.reading()
def critic_level(view: View) -> ReadNumber | None:
    """Share of the variance of returns that the critic explains lately, `critic/vf_explained_var`; absent in the first
    `trends_young` times `window_trend` steps, in which a critic is new"""
    young = view.window.steps < view.limits["trends_young"] * view.size("window_trend")
    return None if young else view.first("critic/vf_explained_var")


@TRENDS.reading()
def critic_loss_times(view: View) -> ReadNumber | None:
    """The critic's loss now over that at the start of the last `window_long` steps, `critic/vf_loss`: medians of
    `window_level` steps; 1 while it rises by less than `trend_t`, `trend_walk` and `trend_drift`."""
    return _over_first(view, "critic/vf_loss", 1)


def _over_first(view: View, name: str, sign: int) -> ReadNumber | None:
    """A metric now over that of the first steps, if it moved in this direction, else 1."""
    values, width = view.window.column(name, view.size("window_long")), view.size("window_level")
    if len(values) < max(2 * width, view.size("window_trend")) or (before := median(values[:width])) <= 0:
        return None
    return ReadNumber(median(values[-width:]) / before if _moved(view, values, sign) else 1.0, name)


@TRENDS.reading()
def len_ratio(view: View) -> ReadNumber | None:
    """Mean response length now over that `window_long` steps ago, or at the start of a younger run; medians of
    `window_level` steps; 1 while lengths rise by less than `trend_t`, `trend_walk` and `trend_drift`, errors
    for autocorrelated steps, absent before `window_young` steps."""
    width = view.size("window_level")
    values = view.window.since(LENGTH, view.size("window_long"), width, view.size("window_young"))
    if not values or (before := median(values[:width])) <= 0:
        return None
    now = median(values[-width:])
    rose = now > before and _moved(view, values, 1)
    return ReadNumber(now / before if rose or now < before else 1.0, LENGTH)


@TRENDS.reading()
def len_times(view: View) -> ReadNumber | None:
    """Mean response length now over that of the first steps, of the last `window_long` ones: medians of `window_level`
    steps; 1 while lengths move by less than `trend_t`, `trend_walk` and `trend_drift`, errors for autocorrelated
    steps; absent before half of `window_trend` steps, or twice `window_level`"""
    width = view.size("window_level")
    values = view.window.column(LENGTH, view.size("window_long"))
    if len(values) < max(2 * width, view.size("window_trend") // 2) or (before := median(values[:width])) <= 0:
        return None
    times = median(values[-width:]) / before
    return ReadNumber(times if _moved(view, values, 1 if times > 1 else -1) else 1.0, LENGTH)


@TRENDS.reading()
def grad_spike(view: View) -> ReadNumber | None:
    """Largest gradient norm of the last `window_level` steps over the median of the `window_long` before; 1 while that
    is within `trend_t` of the run's own scatter: 1.48 times the median distance of log norms from their median."""
    values = view.window.column(GRAD, view.size("window_long"))
    width = view.size("window_level")
    if len(values) < 2 * width or (usual := median(values[:-width])) <= 0:
        return None
    times = max(values[-width:]) / usual
    sizes = [abs(math.log(x / usual)) for x in values[:-width] if x > 0]
    usually = math.exp(min(view.limits["trend_t"] * 1.48 * median(sizes), 100.0))
    return ReadNumber(times if times > usually else min(times, 1.0), GRAD)


@TRENDS.reading()
def ess_left(view: View) -> ReadNumber | None:
    """Effective sample size lately over its median in the `window_long` steps before: of sequence weights on
    `full` or `mismatch`, else `weight/ess_frac`; 1 while it falls by less than `trend_t`, `trend_walk` and
    `trend_drift`, errors for autocorrelated steps."""
    width = view.size("window_level")
    for metric in ("full/ess_seq_frac", "mismatch/ess_seq_frac", "weight/ess_frac"):
        values = view.window.column(metric, view.size("window_long"))
        if len(values) >= 2 * width and (usual := median(values[:-width])) > 0:
            left = median(values[-width:]) / usual
            fell = left < 1 and _moved(view, values, -1)
            return ReadNumber(left if fell else max(left, 1.0), metric)
    return None


@TRENDS.reading()
def reward_drop(view: View) -> ReadNumber | None:
    """1 - mean reward of the last `window_trend` steps over the best such mean, for positive rewards; 0 while the
    fall is within `trend_t` errors of both means, and within `trend_t`, `trend_walk` and `trend_drift` over
    the last `window_long` steps, for autocorrelated steps. Where held-out reward is measured, it decides: 1 - mean of
    the last two over the best, of three or more."""
    held_out, best_held_out = view.window.column(HELD_OUT), view.window.best_held_out
    if held_out:
        if len(held_out) < 3 or not best_held_out or best_held_out < 0:
            return None
        return ReadNumber(max(0.0, 1 - sum(held_out[-2:]) / 2 / best_held_out), HELD_OUT)
    values = view.recent(REWARD)
    best = view.window.best_reward
    if len(values) < view.size("window_trend") or best is None or best.value <= 0:
        return None
    now = StepMean.of(values)
    lost = best.value - now.value
    if lost <= 0:
        return ReadNumber(0.0, REWARD)
    # The best of many windows is also the luckiest: its own scatter counts, and rare rewards leave
    # none in a window that has lost them all. Twenty steps alone tell too little of their own.
    error = math.hypot(best.error, max(now.error, best.error))
    surely = error == 0 or normal_score(lost / error, best.dof) > view.limits["trend_t"]
    fell = surely or _moved(view, view.window.column(REWARD, view.size("window_long")), -1)
    return ReadNumber(lost / best.value if fell else 0.0, REWARD)


@TRENDS.reading()
def lr_ratio(view: View) -> ReadNumber | None:
    """Learning rate now over its largest in the window: `optim/lr_scale`, else `optim/lr`."""
    for metric in ("optim/lr_scale", "optim/lr"):
        values = view.window.column(metric)
        if values and max(values) > 0:
            return ReadNumber(values[-1] / max(values), metric)
    return None


@TRENDS.reading()
def clip_widened(view: View) -> ReadNumber | None:
    """Upper clip distance now over its smallest in the window: `objective/eps_high`."""
    values = view.window.column("objective/eps_high")
    return ReadNumber(values[-1] / min(values), "objective/eps_high") if values and min(values) > 0 else None
