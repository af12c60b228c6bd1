"""Readings of one moment: agreement, variance, what gates and weights do, and parts that never act.

The method of the context says what is configured; without it, only what the metrics show is known.
"""

from __future__ import annotations

import math
import re
from functools import cache

from offdrift.correction.compose import Correction
from offdrift.correction.gate import Gate
from offdrift.correction.weight import Weight
from offdrift.errors import MethodError
from offdrift.judge.readings.view import Measured, Table, View
from offdrift.judge.window import number
from offdrift.methods import method

FEW = 30
"""Sequences of which a share is worth comparing."""

LEVELS = Table()
LEVELS.levels({
    "pearson": ("{on}/pearson", "Correlation of the two policies' probabilities: `{on}/pearson`"),
    "ppl_ratio": ("{on}/ppl_ratio", "`{on}/ppl_ratio`"),
    "rs_masked": ("gate/drop_frac_seq", "Share of sequences rejected whole: `gate/drop_frac_seq`"),
    "acceptance": ("gate/acceptance_seq", "Share of sequences with a kept token: `gate/acceptance_seq`"),
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
    "probabilities": ("data/probability", "1 if a column of log-probs holds probabilities: `data/probability`"),
    "negated": ("data/negated", "1 if a column of log-probs holds their negatives: `data/negated`"),
    "old_stale": (
        "old/stale_frac",
        "Share of tokens whose old log-prob was taken at other weights than those that drew them: `old/stale_frac`",
    ),
})  # fmt: skip


@cache
def _correction(name: str | None) -> Correction | None:
    """The correction of a row of `METHODS`; None if no such row is known."""
    try:
        return None if name is None else method(name).correction
    except MethodError:
        return None


def _weights(view: View) -> list[Weight] | None:
    """The weights of the context's method; None if it is unknown."""
    correction = _correction(view.context.method)
    return None if correction is None else [w for w in correction.weights if isinstance(w, Weight)]


@LEVELS.reading()
def prob_diff_max(view: View) -> Measured | None:
    """Largest probability difference of the last `window_level` steps: `{on}/prob_diff_max`, never averaged."""
    name = f"{view.on}/prob_diff_max"
    values = view.window.column(name, view.size("window_level"))
    return Measured(max(values), name) if values else view.first(name)


@LEVELS.reading()
def ppl_off(view: View) -> Measured | None:
    """Distance of `{on}/ppl_ratio` from 1."""
    ratio = view.first("{on}/ppl_ratio")
    return None if ratio is None else Measured(abs(ratio.value - 1), ratio.metric)


@LEVELS.reading()
def chi2_token(view: View) -> Measured | None:
    """`{on}/chi2_token` or `full/chi2_token`, the larger."""
    return view.largest("{on}/chi2_token", "full/chi2_token")


@LEVELS.reading()
def chi2_seq(view: View) -> Measured | None:
    """`{on}/chi2_seq_largest` or `full/chi2_seq_largest`, the larger; `chi2_seq` where only that was logged."""
    largest = view.largest("{on}/chi2_seq_largest", "full/chi2_seq_largest")
    return largest or view.largest("{on}/chi2_seq", "full/chi2_seq")


@LEVELS.reading()
def ess(view: View) -> Measured | None:
    """Effective share of tokens: of the weights that train (`weight/ess_frac`) where they differ, else of the
    raw ratios (`{on}/ess_frac`, `full/ess_frac`, the smaller)."""
    if (view.level("weight/std") or 0.0) > 0 and (trained := view.first("weight/ess_frac")) is not None:
        return trained
    return min(view.levels("{on}/ess_frac", "full/ess_frac"), key=lambda m: m.value, default=None)


@LEVELS.reading()
def ess_after_rs(view: View) -> Measured | None:
    """`weight/ess_frac` where sequences are rejected."""
    return view.first("weight/ess_frac") if (view.level("gate/drop_frac_seq") or 0.0) > 0 else None


@LEVELS.reading()
def acceptance_of_long(view: View) -> Measured | None:
    """`gate/acceptance_seq` in the longest bucket of responses over that in the shortest, of buckets with 30
    sequences or more; where it is not logged and the method works on products over sequences,
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
        rows = [r for r, count in counted if number(r, name) is not None and (count is None or count >= FEW)]
        if len(rows) >= 2:
            rows.sort(key=lambda r: number(r, "low") or 0.0)
            short, long = number(rows[0], name), number(rows[-1], name)
            return Measured((long or 0.0) / short, f"{name} by length") if short else None
    return None


@LEVELS.reading()
def icepop_oob(view: View) -> Measured | None:
    """`weight/cap_frac` if the method's weight masks what lies outside its band."""
    masks = any(w.outside == "mask" for w in _weights(view) or ())
    return view.first("weight/cap_frac") if masks else None


@LEVELS.reading()
def sequence_weights(view: View) -> float | None:
    """1 if the method weights by the product over whole sequences, 0 if not."""
    weights = _weights(view)
    return None if weights is None else float(any(w.unit == "sequence" for w in weights))


@LEVELS.reading()
def weighted(view: View) -> Measured | None:
    """1 if importance weights are in use: `weight/std` > 0."""
    std = view.first("weight/std")
    return None if std is None else Measured(float(std.value > 0), std.metric)


@LEVELS.reading("step")
def idle_gate(view: View) -> Measured | None:
    """Steps of the run, if a reported gate rejected no token in any of them, else 0."""
    peaks = {n: x for n, x in view.window.peak.items() if re.fullmatch(r"gate/\d+/drop_frac_token", n)}
    if not peaks:
        return None
    idle = [n for n, x in peaks.items() if x == 0]
    return Measured(float(view.window.steps if idle else 0), [*idle, *peaks][0])


@LEVELS.reading("step")
def idle_cap(view: View) -> Measured | None:
    """Steps of the run, if weights vary and their limit acted in none of them, else 0."""
    peak, weights = view.window.peak.get("weight/cap_frac"), _weights(view)
    limited = weights is None or any(w.cap is not None for w in weights)
    if peak is None or not limited or not (view.level("weight/std") or 0.0) > 0:
        return None
    return Measured(float(view.window.steps if peak == 0 else 0), "weight/cap_frac")


@LEVELS.reading()
def inert_weights(view: View) -> Measured | None:
    """1 if the method has weights, its policies differ, and all weights are equal."""
    weights, std = _weights(view), view.first("weight/std")
    if not weights or std is None:
        return None
    differ = (view.level(f"{weights[0].on}/abs_log_ratio_mean") or 0.0) > 1e-6
    return Measured(float(differ and std.value == 0), "weight/std")


@LEVELS.reading()
def averaged_max(view: View) -> Measured | None:
    """Sqrt(mean^2 + std^2) / max of the probability difference: above 1, the maximum is not one."""
    mean, std, most = (view.level(f"{view.on}/prob_diff_{x}") for x in ("mean", "std", "max"))
    if mean is None or std is None or not most:
        return None
    return Measured(math.hypot(mean, std) / most, f"{view.on}/prob_diff_max")


@LEVELS.reading()
def ever_unscored(view: View) -> Measured | None:
    """Share of the tokens so far, or of the whole log, that no two policies score: `batch/unscored_tokens` over
    `batch/tokens`, else the largest `batch/unscored_frac`."""
    name = "batch/unscored_frac"
    lost, tokens = view.window.unscored, view.window.tokens
    if view.overall is not None and (share := view.level(name)) is not None:
        lost, tokens = (view.level(f"batch/{x}_tokens") or 0.0 for x in ("unscored", "trainable"))
    else:
        share = lost / tokens if tokens else view.window.peak.get(name)
    if share is None:
        return None
    return Measured(share, f"{name} ({lost:,.0f} of {tokens:,.0f} tokens)" if tokens else name)


@LEVELS.reading()
def side_field_lacking(view: View) -> Measured | None:
    """Share of sequences that lack a field which others of the log have, of the field that most lack:
    `data/lacking_frac/FIELD`."""
    return view.largest(*(name for name in view.newest if name.startswith("data/lacking_frac/")))


@LEVELS.reading()
def broken(view: View) -> Measured | None:
    """1 if the loss or the gradient norm of the last step is NaN or infinite."""
    return Measured(1.0, view.window.broken) if view.window.broken else None
