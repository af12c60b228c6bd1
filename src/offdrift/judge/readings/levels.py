"""Readings of one moment: agreement, variance, what gates and weights do, and parts that never act.

The method of the context says what is configured; without it, only what the metrics show is known.
"""

from __future__ import annotations

import math
import re
from functools import cache

from offdrift.correction.gate import Gate
from offdrift.correction.weight import Weight
from offdrift.errors import MethodError
from offdrift.judge.context import Row
from offdrift.judge.readings.view import Definition, Found, View
from offdrift.judge.window import number
from offdrift.methods import method

FEW = 30
"""Sequences of which a share is worth comparing."""


@cache
def _weights(name: str | None) -> tuple[Weight, ...] | None:
    """The weights of a row of `METHODS`; None if no such row is known."""
    try:
        return None if name is None else tuple(
            w for w in method(name).correction.weights if isinstance(w, Weight)
        )  # fmt: skip
    except MethodError:
        return None


@cache
def _gates(name: str | None) -> tuple[Gate, ...]:
    """The gates of a row of `METHODS` that bound a statistic; none if no such row is known."""
    try:
        gates = () if name is None else method(name).correction.gates
    except MethodError:
        gates = ()
    return tuple(g for g in gates if isinstance(g, Gate))


def _largest(view: View, *metrics: str) -> Found | None:
    found = [f for m in metrics if (f := view.found(m)) is not None]
    return max(found, key=lambda f: f.value) if found else None


def _chi2_token(view: View) -> Found | None:
    return _largest(view, f"{view.on}/chi2_token", "full/chi2_token")


def _chi2_seq(view: View) -> Found | None:
    names = [f"{on}/chi2_seq" for on in (view.on, "full")]
    return _largest(view, *(f"{name}_largest" for name in names)) or _largest(view, *names)


def _ess(view: View) -> Found | None:
    """Of the weights that train, if there are any; else of the raw ratios, which might be used."""
    if (view.level("weight/std") or 0.0) > 0 and (f := view.found("weight/ess_frac")) is not None:
        return f
    found = [f for on in (view.on, "full") if (f := view.found(f"{on}/ess_frac")) is not None]
    return min(found, key=lambda f: f.value) if found else None


def _ess_after_rejection(view: View) -> Found | None:
    rejects = (view.level("gate/drop_frac_seq") or 0.0) > 0
    return view.found("weight/ess_frac") if rejects else None


def _outside_band(view: View) -> Found | None:
    """Share of tokens that a masking band of the method rejects."""
    weights = _weights(view.context.method)
    masks = weights is not None and any(w.outside == "mask" for w in weights)
    return view.found("weight/cap_frac") if masks else None


def _whole_sequence(view: View) -> float | None:
    weights = _weights(view.context.method)
    return None if weights is None else float(any(w.unit == "sequence" for w in weights))


def _weighted(view: View) -> Found | None:
    """1 if importance weights that differ multiply the loss."""
    std = view.found("weight/std")
    return None if std is None else Found(float(std.value > 0), std.metric)


def _idle_gate(view: View) -> Found | None:
    """Steps of the whole run, if some gate that is reported never rejected a token in any."""
    gates = [n for n in view.window.peak if re.fullmatch(r"gate/\d+/drop_frac_token", n)]
    if not gates:
        return None
    idle = [n for n in gates if view.window.peak[n] == 0]
    return Found(float(view.window.seen if idle else 0), idle[0] if idle else gates[0])


def _idle_cap(view: View) -> Found | None:
    """Steps of the whole run, if weights differ from 1 and their limit never acted."""
    name = "weight/cap_frac"
    weights = _weights(view.context.method)
    limited = weights is None or any(w.cap is not None for w in weights)
    if name not in view.window.peak or not limited or not (view.level("weight/std") or 0.0) > 0:
        return None
    return Found(float(view.window.seen if view.window.peak[name] == 0 else 0), name)


def _inert(view: View) -> Found | None:
    """1 if the method has importance weights, the policies differ, and every weight is the same."""
    weights = _weights(view.context.method)
    std = view.found("weight/std")
    if not weights or std is None:
        return None
    on = next((w.on for w in weights), view.on)
    differ = (view.level(f"{on}/abs_log_ratio_mean") or 0.0) > 1e-6
    return Found(float(differ and std.value == 0), "weight/std")


def _averaged_max(view: View) -> Found | None:
    """Root mean square of the probability difference over its maximum: above 1 is impossible."""
    mean, std, most = (view.level(f"{view.on}/prob_diff_{x}") for x in ("mean", "std", "max"))
    if mean is None or std is None or not most:
        return None
    return Found(math.hypot(mean, std) / most, f"{view.on}/prob_diff_max")


def _acceptance_of_long(view: View) -> Found | None:
    """Acceptance in the longest bucket of responses over that in the shortest.

    Every product over a sequence falls with its length, so what a gate on it would accept is only
    held against a run whose method is of that kind.
    """
    names = ["gate/acceptance_seq"]
    if _on_products(view):
        names += [f"{on}/acceptance_sum" for on in ("mismatch", "full")]
    buckets = [r for r in view.context.facets.get("length", ()) if _is_many(r)]
    for name in names:
        rows: list[Row] = [r for r in buckets if number(r, name) is not None]
        if len(rows) < 2:
            continue
        rows.sort(key=lambda r: number(r, "low") or 0.0)
        short, long = number(rows[0], name), number(rows[-1], name)
        return Found((long or 0.0) / short, f"{name} by length") if short else None
    return None


def _on_products(view: View) -> bool:
    """Whether the method gates or weights by the product of ratios over a whole sequence."""
    return bool(_whole_sequence(view)) or any(g.unit == "seq_sum" for g in _gates(view.context.method))  # fmt: skip


def _is_many(bucket: Row) -> bool:
    """Whether a share of the bucket's sequences means something."""
    sequences = number(bucket, "sequences")
    return sequences is None or sequences >= FEW


def _broken(view: View) -> Found | None:
    broken = view.window.broken
    return Found(1.0, broken) if broken else None


def _max_diff(view: View) -> Found | None:
    """The largest of the last steps: a maximum is never averaged."""
    name = f"{view.on}/prob_diff_max"
    values = view.window.column(name, view.size("window_level"))
    return Found(max(values), name) if values else view.found(name)


def _ppl_off(view: View) -> Found | None:
    f = view.found(f"{view.on}/ppl_ratio")
    return None if f is None else Found(abs(f.value - 1), f.metric)


def _ever_unscored(view: View) -> Found | None:
    """The share of tokens without log-probs so far: three of a run are three, at whichever step."""
    name = "batch/unscored_frac"
    if view.overall is not None and (f := view.found(name)) is not None:
        lost, tokens = (view.level(f"batch/{x}_tokens") for x in ("unscored", "trainable"))
        return _counted(name, f.value, lost or 0.0, tokens or 0.0)
    lost, tokens = view.window.unscored, view.window.tokens
    if tokens:
        return _counted(name, lost / tokens, lost, tokens)
    share = view.window.peak.get(name)
    return None if share is None else Found(share, name)


def _counted(name: str, share: float, part: float, whole: float) -> Found:
    return Found(share, f"{name} ({part:,.0f} of {whole:,.0f} tokens)" if whole else name)


def _lacking(view: View) -> Found | None:
    """The largest share of sequences that lack a field which others have."""
    row: Row = view.overall or (view.window.rows[-1] if view.window.rows else {})
    names = [name for name in row if name.startswith("data/lacking_frac/")]
    return _largest(view, *names) if names else None


LEVELS = {
    "pearson": Definition("1", "correlation of the two policies' probabilities: `{on}/pearson`", lambda v: v.found(f"{v.on}/pearson")),
    "prob_diff_max": Definition("1", "largest probability difference of the last `window_level` steps: `{on}/prob_diff_max`, never averaged", _max_diff),
    "ppl_ratio": Definition("1", "`{on}/ppl_ratio`", lambda v: v.found(f"{v.on}/ppl_ratio")),
    "ppl_off": Definition("1", "distance of `{on}/ppl_ratio` from 1", _ppl_off),
    "chi2_token": Definition("1", "`{on}/chi2_token` or `full/chi2_token`, the larger", _chi2_token),
    "chi2_seq": Definition("1", "`{on}/chi2_seq_largest` or `full/chi2_seq_largest`, the larger; `chi2_seq` where only that was logged", _chi2_seq),
    "ess": Definition("1", "effective share of tokens: of the weights that train (`weight/ess_frac`) where they differ, else of the raw ratios (`{on}/ess_frac`, `full/ess_frac`, the smaller)", _ess),
    "rs_masked": Definition("1", "share of sequences rejected whole: `gate/drop_frac_seq`", lambda v: v.found("gate/drop_frac_seq")),
    "ess_after_rs": Definition("1", "`weight/ess_frac` where sequences are rejected", _ess_after_rejection),
    "acceptance": Definition("1", "share of sequences with a kept token: `gate/acceptance_seq`", lambda v: v.found("gate/acceptance_seq")),
    "acceptance_of_long": Definition("1", "`gate/acceptance_seq` in the longest bucket of responses over that in the shortest, of buckets with 30 sequences or more; where it is not logged and the method works on products over sequences, `{on}/acceptance_sum`", _acceptance_of_long),
    "icepop_oob": Definition("1", "`weight/cap_frac` if the method's weight masks what lies outside its band", _outside_band),
    "sequence_weights": Definition("1", "1 if the method weights by the product over whole sequences, 0 if not", _whole_sequence),
    "weighted": Definition("1", "1 if importance weights are in use: `weight/std` > 0", _weighted),
    "idle_gate": Definition("step", "steps of the run, if a reported gate rejected no token in any of them, else 0", _idle_gate),
    "idle_cap": Definition("step", "steps of the run, if weights vary and their limit acted in none of them, else 0", _idle_cap),
    "inert_weights": Definition("1", "1 if the method has weights, its policies differ, and all weights are equal", _inert),
    "averaged_max": Definition("1", "sqrt(mean^2 + std^2) / max of the probability difference: above 1, the maximum is not one", _averaged_max),
    "unread": Definition("1", "share of a log's rows, or bytes, that could not be read: `data/unread_frac`", lambda v: v.found("data/unread_frac")),
    "cut_off": Definition("1", "files of a log that ended early: `data/cuts`", lambda v: v.found("data/cuts")),
    "unscored": Definition("1", "share of the tokens that may train which no two policies score: `batch/unscored_frac`", lambda v: v.found("batch/unscored_frac")),
    "ever_unscored": Definition("1", "share of the tokens so far, or of the whole log, that no two policies score: `batch/unscored_tokens` over `batch/tokens`, else the largest `batch/unscored_frac`", _ever_unscored),
    "side_field_lacking": Definition("1", "share of sequences that lack a field which others of the log have, of the field that most lack: `data/lacking_frac/FIELD`", _lacking),
    "lag_below_zero": Definition("1", "share of tokens whose version lag is below 0: `data/ahead_frac`", lambda v: v.found("data/ahead_frac")),
    "partly_scored": Definition("1", "share of the tokens that two policies score, and a third that the log has does not: `data/partly_frac`", lambda v: v.found("data/partly_frac")),
    "probabilities": Definition("1", "1 if a column of log-probs holds probabilities: `data/probability`", lambda v: v.found("data/probability")),
    "negated": Definition("1", "1 if a column of log-probs holds their negatives: `data/negated`", lambda v: v.found("data/negated")),
    "old_stale": Definition("1", "share of tokens whose old log-prob was taken at other weights than those that drew them: `old/stale_frac`", lambda v: v.found("old/stale_frac")),
    "broken": Definition("1", "1 if the loss or the gradient norm of the last step is NaN or infinite", _broken),
}  # fmt: skip
