"""Readings of one moment: agreement, the signatures of each cause, what gates and weights do, and parts that never act.

The method of the context says what is configured; without it, only what the metrics show is known. What the
signatures rest on is in docs/rules.md.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable

from offdrift.correction.compose import Correction
from offdrift.correction.gate import Gate
from offdrift.correction.weight import Weight
from offdrift.judge.findings import number
from offdrift.judge.kl_choice import joined_z
from offdrift.judge.readings.view import ReadNumber, Table, View
from offdrift.methods import METHODS

LEVELS = Table()
CLASS_TOKENS = 256
"""Tokens of a class from which on their mean log-ratio is looked at."""
BASES = (math.log(2), 1 / math.log(2), math.log(10), 1 / math.log(10))
"""Slopes of natural logarithms on those of another base, and the other way round."""


def _correction(name: str | None) -> Correction | None:
    """The correction of a row of `METHODS`, or of code that was loaded already; None if it is unknown.

    The name may be from a log, and runs nothing.
    """
    if name is not None and ":" in name:
        from offdrift.methods.load import loaded

        row = loaded(name)
    else:
        row = METHODS.get(name or "")
    return None if row is None else row.correction


def weights_of(view: View) -> list[Weight] | None:
    """The weights of the context's method; None if it is unknown."""
    correction = _correction(view.context.method)
    return None if correction is None else [w for w in correction.weights if isinstance(w, Weight)]


def _of_both(view: View, name: str) -> ReadNumber | None:
    """The larger level of the engine ratio and of the full one."""
    return view.largest(f"{{on}}/{name}", f"full/{name}")


def _moved_since(view: View) -> bool:
    """Whether weights moved after the tokens were drawn; where no version says so, they may have."""
    lag = view.level("version_lag/mean")
    return lag is None or lag > 0


def _tokens(view: View) -> float | None:
    """Tokens that a level is of; None if unknown."""
    counted = [] if view.overall is None else [number(view.overall, "batch/tokens")]
    known = [n for n in counted or view.window.column("batch/tokens", view.size("window_level")) if n is not None]
    return sum(known) if known else None


def _noise(view: View) -> float:
    """Three standard errors of the mean log-ratio, l having a variance of about 2 k3; 0 where tokens are unknown."""
    tokens, k3 = _tokens(view), view.level("{on}/k3")
    return 3 * math.sqrt(2 * max(k3, 0.0) / max(tokens, 1.0)) if tokens is not None and k3 is not None else 0.0


def _within(ratio: float, noise: float) -> bool:
    """True if the log of a ratio is as small as noise; that of 0 or less, which a log may say, is not."""
    return ratio > 0 and abs(math.log(ratio)) <= noise


def _lacking(view: View) -> ReadNumber | None:
    return view.largest(*(name for name in view.newest if name.startswith("data/lacking_frac/")))


def _advantage_corr_high(view: View) -> ReadNumber | None:
    found, z = view.first("advantage/reward_corr"), view.level("advantage/reward_z")
    if not found or not z or (error := abs(found.value / z)) > 1 / 15:
        return None
    return ReadNumber(found.value + 3 * error, found.metric)


LEVELS.rows({
    "pearson": ("{on}/pearson", "Correlation of the two policies' probabilities: `{on}/pearson`"),
    "ppl_ratio": ("{on}/ppl_ratio", "`{on}/ppl_ratio`"),
    "ppl_off": (
        lambda v: v.mapped("{on}/ppl_ratio", lambda x: 0.0 if _within(x, _noise(v)) else abs(x - 1)),
        "Distance of `{on}/ppl_ratio` from 1; 0 within three standard errors of so many tokens",
    ),
    "chi2_token": (
        lambda v: _of_both(v, "chi2_token"),
        "`{on}/chi2_token` or `full/chi2_token`, the larger",
    ),
    "chi2_seq": (
        lambda v: _of_both(v, "chi2_seq_largest") or _of_both(v, "chi2_seq"),
        "`{on}/chi2_seq_largest` or `full/chi2_seq_largest`, the larger; `chi2_seq` where only that was logged",
    ),
    "rs_masked": ("gate/drop_frac_seq", "Share of sequences rejected whole: `gate/drop_frac_seq`"),
    "acceptance": ("gate/acceptance_seq", "Share of sequences with a kept token: `gate/acceptance_seq`"),
    "ess_after_rs": (
        lambda v: v.first("weight/ess_frac") if (v.level("gate/drop_frac_seq") or 0.0) > 0 else None,
        "`weight/ess_frac` where sequences are rejected",
    ),
    "weighted": (
        lambda v: v.mapped("weight/std", lambda x: x > 0),
        "1 if importance weights are in use: `weight/std` > 0",
    ),
    "unread": ("data/unread_frac", "Share of a log's rows, or bytes, that could not be read: `data/unread_frac`"),
    "cut_off": ("data/cuts", "Files of a log that ended early: `data/cuts`"),
    "unscored": (
        "batch/unscored_frac",
        "Share of the tokens that may train which no two policies score: `batch/unscored_frac`",
    ),
    "lag_below_zero": ("data/ahead_frac", "Share of tokens whose version lag is below 0: `data/ahead_frac`"),
    "partly_scored": (
        "data/partly_frac",
        "Share of the tokens that two policies score, and a third that the log has does not: `data/partly_frac`",
    ),
    "side_field_lacking": (
        _lacking,
        "Share of sequences that lack a field which others of the log have, of the field that most lack: "
        "`data/lacking_frac/FIELD`",
    ),
    "impossible": (
        "data/impossible_tokens",
        "Tokens that were drawn and that a policy of the trainer gives a probability of 0: `data/impossible_tokens`",
    ),
    "probabilities": ("data/probability", "1 if a column of log-probs holds probabilities: `data/probability`"),
    "negated": ("data/negated", "1 if a column of log-probs holds their negatives: `data/negated`"),
    "not_per_token": (
        "data/not_per_token",
        "1 if a column of log-probs holds sums over the response so far, or one number for each response: "
        "`data/not_per_token`",
    ),
    "advantage_corr": (
        "advantage/reward_corr",
        "Correlation, over responses, of rewards and advantages: `advantage/reward_corr`",
    ),
    "advantage_corr_high": (
        _advantage_corr_high,
        "The same with three standard errors, of n^-1/2 each, added: how large it may be; absent of n < 225 responses",
    ),
    "advantage_z": ("advantage/reward_z", "The same in standard errors: `advantage/reward_z`"),
    "advantages_misplaced": (
        "advantage/misplaced_frac",
        "Share of advantages at another response than the one they are of: `advantage/misplaced_frac`",
    ),
    "again": (
        "data/again_frac",
        "Share of responses that stand in the log again, with the same log-probs to the last digit: `data/again_frac`",
    ),
    "again_times": (
        "data/again_times",
        "How often each response of the log is there, where nearly all are there equally often, else 1: "
        "`data/again_times`",
    ),
    "entropy_z": (
        lambda v: v.mapped("record/entropy_z", abs),
        "Size of the sum of logged entropy plus log-prob over the root of its squares: `record/entropy_z`",
    ),
    "old_stale": (
        "old/stale_frac",
        "Share of tokens whose old log-prob was taken at other weights than those that drew them: `old/stale_frac`",
    ),
    "broken": (
        lambda v: ReadNumber(1.0, v.window.broken) if v.window.broken else None,
        "1 if the loss or the gradient norm of the last step is NaN or infinite",
    ),
    "slope_r2": ("{on}/slope_r2", "Share of variance that this regression explains"),
    "slope_off": (
        lambda v: v.mapped("{on}/slope", lambda x: abs(x - 1)),
        "Distance from 1 of the slope of the second policy's log-probs on the rollout's",
    ),
    "base_off": (
        lambda v: v.mapped("{on}/slope", lambda x: min(abs(x / base - 1) for base in BASES)),
        "Distance of that slope from that of logarithms to base 2 or 10 beside natural ones, a share of it",
    ),
    "tail_share": ("{on}/k3_top_share", "Share of k3 that the 1 % of tokens with the largest k3 carry"),
    "temperature_off": (
        lambda v: None if v.context.temperature is None else abs(v.context.temperature - 1),
        "Distance from 1 of the sampling temperature in the context",
    ),
    "filter_unreplayed": (
        lambda v: None if v.context.filter_replayed is None else float(not v.context.filter_replayed),
        "1 if the context says that rollouts were filtered and the trainer scored whole vocabularies, 0 if it scored "
        "what the filters left over",
    ),
    "drawn_whole": (
        lambda v: None if v.context.filtered is None else float(not v.context.filtered and _moved_since(v)),
        "1 if the recorded settings say that tokens were drawn without top-k, top-p and min-p, and weights have moved "
        "since, so that drift is the likelier reason; 0 else: at lag 0 an engine may filter by a setting of its own "
        "(the checkpoint's `generation_config.json`)",
    ),
    "cache_unreplayed": (
        lambda v: None if v.context.cache_replayed is None else float(not v.context.cache_replayed),
        "1 if the context says that the engine's cache was compressed and the trainer's attention saw everything, 0 if "
        "it saw what the cache kept",
    ),
    "raw_stated": (
        lambda v: None if v.context.raw_stated is None else float(v.context.raw_stated),
        "1 if the log's provenance says that log-probs were taken before the temperature or filters that tokens were "
        "drawn with, 0 if it says that they were not",
    ),
    "mixed": (
        "fusion/alpha_mean",
        "Share of a teacher's logits in those that responses were drawn from, mean over responses: `fusion/alpha_mean`",
    ),
    "delta_router": (
        "router/delta_router",
        "Share of a layer's experts whose membership differs between the engines, mean over tokens and layers: "
        "`router/delta_router` (`engines.routing.flip_rate`)",
    ),
})  # fmt: skip


@LEVELS.reading("nat")
def entropy_gap(view: View) -> ReadNumber | None:
    """Size of the mean of logged entropy plus log-prob, `record/entropy_gap`, less what drift explains at most: its
    deviation times the root of the largest chi2 per token of two policies, since it may be the entropy of any"""
    gap, z, tokens = view.first("record/entropy_gap"), view.level("record/entropy_z"), _tokens(view)
    chi2 = view.largest("{on}/chi2_token", "full/chi2_token", "staleness/chi2_token")
    if gap is None or z is None or not tokens or chi2 is None:
        return None
    deviation = math.sqrt(tokens) * abs(gap.value / z) if z else 0.0
    return ReadNumber(max(abs(gap.value) - deviation * math.sqrt(max(chi2.value, 0.0)), 0.0), gap.metric)


@LEVELS.reading()
def old_over_full(view: View) -> ReadNumber | None:
    """KL of the rollout's log-probs and the old ones, `mismatch/k3`, over that of the rollout's and the current ones,
    `full/k3`: of an old policy, from which the current one has moved on, about 1 at most"""
    old, current = view.level("mismatch/k3"), view.level("full/k3")
    return None if old is None or current is None else ReadNumber(old / max(current, 1e-6), "mismatch/k3")


@LEVELS.reading()
def shifted_frac(view: View) -> ReadNumber | None:
    """Share of sequences whose second log-probs are a neighboring token's, `{on}/shifted_frac`; 0 of fewer than
    `patience` such sequences"""
    count, part = view.level("{on}/shifted_seqs"), view.level("{on}/shifted_frac")
    if count is None or part is None:
        return None
    return ReadNumber(part if count >= view.limits["patience"] else 0.0, view.named("{on}/shifted_frac"))


@LEVELS.reading()
def old_is_current(view: View) -> ReadNumber | None:
    """1 where the old log-probs are the current ones to the bit at every token: `staleness/abs_log_ratio_max` is 0"""
    return view.mapped("staleness/abs_log_ratio_max", lambda x: x == 0)


@LEVELS.reading()
def columns_equal(view: View) -> ReadNumber | None:
    """1 where the trainer's log-probs are the rollout's to the bit at every token, `mismatch/abs_log_ratio_max` and
    `full/abs_log_ratio_max` being 0, of those that were logged; absent of fewer than `few_tokens` tokens."""
    largest = view.largest("mismatch/abs_log_ratio_max", "full/abs_log_ratio_max")
    if largest is None or (view.level("batch/tokens") or 0.0) < view.limits["few_tokens"]:
        return None
    return ReadNumber(float(largest.value == 0), largest.metric)


@LEVELS.reading()
def old_copied(view: View) -> ReadNumber | None:
    """1 where the old log-probs are the rollout's to the bit, `mismatch/abs_log_ratio_max` being 0, and the current
    ones are others, else 0"""
    old, current = view.level("mismatch/abs_log_ratio_max"), view.level("full/abs_log_ratio_max")
    same = None if old is None or current is None else float(old == 0 < current)
    return None if same is None else ReadNumber(same, "mismatch/abs_log_ratio_max")


@LEVELS.reading("nat")
def kl_mismatch(view: View) -> ReadNumber | None:
    """k3 of the old policy against the rollout policy: `mismatch/k3`"""
    return view.first("mismatch/k3")


@LEVELS.reading("nat")
def kl_current(view: View) -> ReadNumber | None:
    """k3 of the current policy against the rollout policy: `full/k3`"""
    return view.first("full/k3")


@LEVELS.reading()
def offset_uneven(view: View) -> ReadNumber | None:
    """Largest distance of the mean log-ratio of sure, likely, unsure or rare tokens from that of all, `{on}/k1`, as a
    share of it: of drift, filters and temperatures it is large, of a constant 0"""
    name, overall = view.named("{on}/k1"), view.level("{on}/k1")
    rows = view.context.facets.get("token_class", ()) if view.context.facets else ()
    means = {row["label"]: number(row, name) for row in rows if row.get("tokens", 0) >= CLASS_TOKENS}
    of_classes = [x for label in ("sure", "likely", "unsure", "rare") if (x := means.get(label)) is not None]
    if not overall or "sure" not in means or len(of_classes) < 3:
        return None
    return ReadNumber(max(abs(x / overall - 1) for x in of_classes), name)


@LEVELS.reading("nat")
def mean_offset(view: View) -> ReadNumber | None:
    """Size of the mean log-ratio: `{on}/k1`"""
    return view.mapped("{on}/k1", abs)


@LEVELS.reading()
def spread_off(view: View) -> ReadNumber | None:
    """Distance from 1 of the spread of the second policy's log-probs over that of the rollout's, `{on}/slope` over the
    root of `{on}/slope_r2`: of policies that only scatter about each other it is 1"""
    slope, r2 = view.level("{on}/slope"), view.level("{on}/slope_r2")
    return None if slope is None or not r2 or r2 < 0 else ReadNumber(abs(slope / math.sqrt(r2) - 1), f"{view.on}/slope")


@LEVELS.reading()
def prob_diff_max(view: View) -> ReadNumber | None:
    """Largest probability difference of the last `window_level` steps: `{on}/prob_diff_max`, never averaged."""
    name = f"{view.on}/prob_diff_max"
    values = view.window.column(name, view.size("window_level"))
    return ReadNumber(max(values), name) if values else view.first(name)


@LEVELS.reading()
def ess(view: View) -> ReadNumber | None:
    """Effective share of tokens: of the weights that train (`weight/ess_frac`) where they differ, else of the
    raw ratios (`{on}/ess_frac`, `full/ess_frac`, the smaller)."""
    if (view.level("weight/std") or 0.0) > 0 and (trained := view.first("weight/ess_frac")) is not None:
        return trained
    return min(view.levels("{on}/ess_frac", "full/ess_frac"), key=lambda m: m.value, default=None)


@LEVELS.reading()
def acceptance_of_long(view: View) -> ReadNumber | None:
    """`gate/acceptance_seq` in the longest bucket of responses over that in the shortest, of buckets with
    `few_sequences` or more; where it is not logged and the method works on products over sequences,
    `{on}/acceptance_sum`."""
    # Every product over a sequence falls with its length, so what a gate on it would accept is only
    # compared for a run whose method is of that kind.
    names = ["gate/acceptance_seq"]
    correction = _correction(view.context.method)
    gates = () if correction is None else correction.gates
    if sequence_weights(view) or any(isinstance(g, Gate) and g.unit == "seq_sum" for g in gates):
        names += ["mismatch/acceptance_sum", "full/acceptance_sum"]
    counted = [(r, number(r, "sequences")) for r in view.context.facets.get("length", ())]
    for name in names:
        rows = [
            r
            for r, count in counted
            if number(r, name) is not None and (count is None or count >= view.limits["few_sequences"])
        ]
        if len(rows) >= 2:
            rows.sort(key=lambda r: number(r, "low") or 0.0)
            short, long = number(rows[0], name), number(rows[-1], name)
            return ReadNumber((long or 0.0) / short, f"{name} by length") if short else None
    return None


def _of_workers(view: View, by: str, name: str, compare: Callable[[float, float], float | None]) -> ReadNumber | None:
    """A metric of the rollout worker with the largest `{on}/by`, compared with that of the median one of the others.

    Of an even number of others, the smaller of the two in the middle. Workers with fewer than `few_sequences` do not
    count; None where that leaves fewer than two.
    """
    by, name = f"{view.on}/{by}", view.named(name)
    rows = [
        row
        for row in view.context.facets.get("worker", ())
        if number(row, by) is not None and (number(row, "sequences") or 0) >= view.limits["few_sequences"]
    ]
    if len(rows) < 2:
        return None
    rows.sort(key=lambda row: abs(number(row, by) or 0.0))
    largest, usual = (number(row, name) for row in (rows[-1], rows[(len(rows) - 2) // 2]))
    if largest is None or usual is None or (value := compare(largest, usual)) is None:
        return None
    return ReadNumber(value, f"{name} of {rows[-1].get('label')}")


def _growth(largest: float, usual: float) -> float:
    """Ratio of the largest to the usual value; both are raised to at least 1e-6."""
    return max(largest, 1e-6) / max(usual, 1e-6)


LEVELS.rows({
    "worker_growth": (
        lambda v: _of_workers(v, "k3", "{on}/k3", _growth),
        "`{on}/k3` of the rollout worker that drifts most, over that of the median one of the others; of workers with "
        "30 sequences or more",
    ),
    "worker_ratio_z": (
        lambda v: _of_workers(v, "ratio_mean_z", "{on}/ratio_mean_z", lambda z, _: abs(z)),
        "Distance from 1 of a worker's mean ratio in standard errors, of the worker with the largest: "
        "`{on}/ratio_mean_z`",
    ),
    "worker_ratio_off": (
        lambda v: _of_workers(v, "ratio_mean_z", "{on}/ratio_mean", lambda x, _: abs(x - 1)),
        "Distance from 1 of that worker's mean ratio",
    ),
    "worker_ratio_growth": (
        lambda v: _of_workers(v, "ratio_mean_z", "{on}/ratio_mean", lambda x, y: _growth(abs(x - 1), abs(y - 1))),
        "That distance over the one of the median worker",
    ),
})  # fmt: skip
LEVELS.rows({
    "worker_kl": (lambda v: _of_workers(v, "k3", "{on}/k3", lambda k3, _: k3), "`{on}/k3` of that worker"),
}, "nat")  # fmt: skip
LEVELS.rows({
    "worker_lag": (
        lambda v: _of_workers(v, "k3", "version_lag/mean", operator.sub),
        "Mean version lag of that worker's tokens, less that of the median one's",
    ),
}, "update")  # fmt: skip


@LEVELS.reading()
def worker_z(view: View) -> ReadNumber | None:
    """Difference of `{on}/k3` between that worker and the median one, in standard errors clustered by sequence."""
    apart = _of_workers(view, "k3", "{on}/k3", operator.sub)
    error = _of_workers(view, "k3", "{on}/k3_se", math.hypot)
    return None if apart is None or error is None else ReadNumber(apart.value / max(error.value, 1e-9), apart.metric)


@LEVELS.reading()
def icepop_oob(view: View) -> ReadNumber | None:
    """`weight/cap_frac` if the method's weight masks what lies outside its band."""
    masks = any(w.outside == "mask" for w in weights_of(view) or ())
    return view.first("weight/cap_frac") if masks else None


@LEVELS.reading()
def sequence_weights(view: View) -> float | None:
    """1 if the method weights by the product over whole sequences, 0 if not."""
    weights = weights_of(view)
    return None if weights is None else float(any(w.unit == "sequence" for w in weights))


@LEVELS.reading("step")
def idle_gate(view: View) -> ReadNumber | None:
    """Steps of the run, if a reported gate rejected no token in any of them, else 0."""
    peaks = {n: x for n, x in view.window.peak.items() if re.fullmatch(r"gate/\d+/drop_frac_token", n)}
    if not peaks:
        return None
    idle = [n for n, x in peaks.items() if x == 0]
    return ReadNumber(float(view.window.steps if idle else 0), [*idle, *peaks][0])


@LEVELS.reading("step")
def idle_cap(view: View) -> ReadNumber | None:
    """Steps of the run, if weights vary and their limit acted in none of them, else 0."""
    peak, weights = view.window.peak.get("weight/cap_frac"), weights_of(view)
    limited = weights is None or any(w.cap is not None for w in weights)
    if peak is None or not limited or not (view.level("weight/std") or 0.0) > 0:
        return None
    return ReadNumber(float(view.window.steps if peak == 0 else 0), "weight/cap_frac")


@LEVELS.reading()
def workers_lost(view: View) -> ReadNumber | None:
    """Rollout workers that were lost in the last `window_trend` steps: sum of `pipeline/lost_workers`."""
    lost = view.recent("pipeline/lost_workers")
    return ReadNumber(sum(lost), "pipeline/lost_workers") if lost else None


@LEVELS.reading()
def worker_idle(view: View) -> ReadNumber | None:
    """Share of time for which rollout workers do nothing: `pipeline/worker_idle`."""
    return view.first("pipeline/worker_idle")


@LEVELS.reading()
def inert_weights(view: View) -> ReadNumber | None:
    """1 if the method has weights, its policies differ, and all weights are equal."""
    weights = weights_of(view)
    if not weights:
        return None
    differ = (view.level(f"{weights[0].on}/abs_log_ratio_mean") or 0.0) > 1e-6
    return view.mapped("weight/std", lambda std: differ and std == 0)


@LEVELS.reading()
def averaged_max(view: View) -> ReadNumber | None:
    """Sqrt(mean^2 + std^2) / max of the probability difference: above 1, the maximum is not one."""
    mean, std = (view.level(f"{view.on}/prob_diff_{x}") for x in ("mean", "std"))
    if mean is None or std is None or not view.level("{on}/prob_diff_max"):
        return None
    return view.mapped("{on}/prob_diff_max", lambda most: math.hypot(mean, std) / most)


@LEVELS.reading()
def ever_unscored(view: View) -> ReadNumber | None:
    """Share of the tokens so far, or of the whole log, that no two policies score: `batch/unscored_tokens` over
    `batch/tokens`, else the largest `batch/unscored_frac`."""
    name = "batch/unscored_frac"
    lost, tokens = view.window.unscored, view.window.tokens
    whole = view.overall or view.context.overall  # of a log that has ended, at each of its steps
    if whole and (share := number(whole, name)) is not None:
        lost, tokens = (number(whole, f"batch/{x}_tokens") or 0.0 for x in ("unscored", "trainable"))
    else:
        share = lost / tokens if tokens else view.window.peak.get(name)
    if share is None:
        return None
    return ReadNumber(share, f"{name} ({lost:,.0f} of {tokens:,.0f} tokens)" if tokens else name)


@LEVELS.reading()
def ratio_mean(view: View) -> ReadNumber | float | None:
    """Mean of e^l over tokens: `{on}/ratio_mean`, else 1 + k3 - k1; 1 in expectation whatever the drift."""
    if (logged := view.first("{on}/ratio_mean")) is not None:
        return logged
    k1, k3 = view.level("{on}/k1"), view.level("{on}/k3")
    return None if k1 is None or k3 is None else 1 + k3 - k1


@LEVELS.reading()
def ratio_mean_z(view: View, on: str | None = None) -> ReadNumber | None:
    """Its distance from 1 in standard errors clustered by sequence; of the last `window_trend` steps together,
    sum z / sqrt(n)."""
    metric = f"{on or view.on}/ratio_mean_z"
    if view.overall is not None:
        return view.first(metric)
    z = joined_z(view.recent(metric))
    return None if z is None else ReadNumber(z, metric)


@LEVELS.reading()
def ratio_tokens_z(view: View) -> float | None:
    """Distance of the mean ratio from 1 over sqrt(sum (e^l - 1)^2) / n: what tokens show that were drawn as they were
    logged, one sequence of them too, and at most sqrt(n)"""
    mean, chi2, tokens = view.level("{on}/ratio_mean"), view.level("{on}/chi2_token"), _tokens(view)
    if mean is None or chi2 is None or tokens is None:
        return None
    excess = mean - 1
    spread = math.sqrt(max(chi2 - 2 * excess, 0.0))  # the root of the mean of (e^l - 1)^2
    return excess / max(spread, abs(excess), 1e-150) * math.sqrt(max(tokens, 0.0))


@LEVELS.reading()
def same_token_corr(view: View) -> ReadNumber | None:
    """Correlation of the rollout's log-probs with the second policy's, of the same token: `{on}/shift_corr`."""
    return view.first("{on}/shift_corr")


@LEVELS.reading()
def shift_gain(view: View) -> ReadNumber | None:
    """Best correlation of the rollout's log-probs with the second policy's one token before or after, minus that
    at the same token."""
    own = view.level("{on}/shift_corr")
    best = view.largest("{on}/shift_corr_before", "{on}/shift_corr_after")
    return None if own is None or best is None else ReadNumber(best.value - own, best.metric)


@LEVELS.reading()
def asymmetry(view: View) -> float | None:
    """(positive - negative) / (positive + negative) shares of tokens with |l| > 1e-3."""
    up, down = view.level("{on}/positive_frac"), view.level("{on}/negative_frac")
    return None if up is None or down is None or up + down == 0 else (up - down) / (up + down)


@LEVELS.reading()
def filter_share(view: View) -> float | None:
    """(k1 - k3) / k1: 0 for drift, near 1 for a filter on the rollout's side; absent if k1 <= 0."""
    k1, k3 = view.level("{on}/k1"), view.level("{on}/k3")
    return None if k1 is None or k3 is None or k1 <= 0 else (k1 - k3) / k1


@LEVELS.reading()
def tail_ratio(view: View) -> float | None:
    """Largest |l| over mean |l|."""
    most, mean = view.level("{on}/abs_log_ratio_max"), view.level("{on}/abs_log_ratio_mean")
    return None if most is None or not mean else most / mean


@LEVELS.reading()
def experts(view: View) -> float | None:
    """1 if the model is a mixture of experts (the context says so, or routed flips are logged), 0 if the context
    says not."""
    if view.context.mixture_of_experts is not None:
        return float(view.context.mixture_of_experts)
    return 1.0 if view.levels("router/delta_router", "router/flip_frac") else None
