"""Readings of the shape of drift: where it is, in whom, and how it goes over the steps.

They are read from `Context.shapes`, which only a log of tokens has: of metrics alone all of them are absent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from offdrift.judge.readings.view import ReadNumber, Table, View
from offdrift.methods import METHODS

SHAPES = Table()

KINDS = {
    "last_token": "at the last token of each response",
    "end": "in the last places of responses",
    "first_tokens": "in the first four places of responses at most",
    "beginning": "in the first places of responses, more than four",
    "beyond": "from a place of the response on, at once",
    "grows": "from a place of the response on, rising towards it",
    "some": "from a place of the response on, in some of the responses and not in the others",
    "carried": "from a place of the response on, most of it in few responses",
    "turns": "in the turns after the first",
    "first_turn": "in the first turn",
    "seen": "on tokens that occurred before in the response, which the trainer finds likelier than the engine",
    "seen_more": "on tokens that occurred before in the response, which the engine finds likelier than the trainer",
    "unseen": "on tokens that occur for the first time in the response",
    "group": "in the first response to each prompt, or in all but the first",
    "switch": "behind a change of weights inside the response",
    "long": "in long responses, or those that reach the limit",
    "worker": "in what one rollout worker drew",
    "rank": "in what one rank of the trainer scored",
    "environment": "in the prompts of one environment",
    "kinds": "in some of the responses, over their whole length",
}
"""Kinds of shapes, by where the gap is."""
TRENDS = {
    "growing": "the gap grows to the end",
    "jump": "the gap jumps at one step and stays",
    "saturating": "the gap rises and stays",
    "sawtooth": "the gap rises and falls back again and again",
    "spike": "the gap is larger at some steps and falls back",
    "flat": "the gap does not change",
}


def dominant(view: View) -> Mapping[str, Any]:
    """The shape that says most about where the gap is; empty if there is none.

    A fault of labels, inputs, positions or records is there from the first step on. What is not is drift of the weights
    that has a place: the end of the response, for one, if the policy learns when to stop.
    """
    found, times = view.context.shapes.get("found") or (), view.limits["shape_times"]
    return next((row for row in found if row["gap"] < times * row.get("first_high", math.inf)), {})


def _shape(view: View, kind: str) -> ReadNumber | None:
    if not view.context.shapes:
        return None
    row = dominant(view)
    if row.get("kind") != kind:
        return ReadNumber(0.0, "gap")
    words = f"gap {row['where']} (elsewhere {row['elsewhere']:.2g} nat, {row['z']:.0f} standard errors)"
    return ReadNumber(float(row["gap"]), words)


def _trend(view: View, kind: str, where: str) -> ReadNumber | None:
    trend = view.context.shapes.get(where) or {}
    if not trend:
        return None
    if trend["trend"] != kind:
        return ReadNumber(0.0, "gap")
    since = f", since step {trend['since']}" if "since" in trend else ""
    passing = kind in ("sawtooth", "spike")
    when = "largest gap of a step" if passing else "mean gap of the last steps"
    when += " at lag 0" if where.endswith("_same") else ""
    size = trend["largest"] if passing else trend["last"]
    return ReadNumber(float(size), f"{when}, about the KL ({kind}; at first {trend['first']:.2g} nat{since})")


SHAPES.rows(
    {
        f"shape_{kind}": (
            lambda v, kind=kind: _shape(v, kind),
            f"Mean gap {where}, if of all contrasts this one says most about where the gap is, else 0; the gap is "
            "l^2 / 2 up to one nat and |l| - 1/2 beyond",
        )
        for kind, where in KINDS.items()
    },
    "nat",
)
SHAPES.rows(
    {
        f"{prefix}_{kind}": (
            lambda v, kind=kind, source=source: _trend(v, kind, source),
            f"Mean gap lately if {what}{people}, else 0",
        )
        for prefix, source, people in (
            ("steps", "over_steps", ""),
            ("same", "over_steps_same", " among sequences of lag 0"),
        )
        for kind, what in TRENDS.items()
    },
    "nat",
)


@SHAPES.reading("nat")
def shape_gap(view: View) -> ReadNumber | None:
    """Mean gap on the worse side of the contrast that says most about where the gap is; 0 if there is none."""
    if not view.context.shapes:
        return None
    row = dominant(view)
    return _shape(view, row["kind"]) if row else ReadNumber(0.0, "gap")


@SHAPES.reading("nat")
def shape_elsewhere(view: View) -> ReadNumber | None:
    """Mean gap on the better side of that contrast; 0 if there is none."""
    if not view.context.shapes:
        return None
    return ReadNumber(float(dominant(view).get("elsewhere", 0.0)), "gap elsewhere")


@SHAPES.reading("nat")
def gap_first(view: View) -> ReadNumber | None:
    """Mean gap of the first step."""
    trend = view.context.shapes.get("over_steps") or {}
    return ReadNumber(trend["first"], "gap of the first step") if "first" in trend else None


OF_RESPONSES = {
    "whole responses": ("kinds", "worker", "rank", "environment", "group", "long"),
    "what follows a place of a response": ("beyond", "grows", "some", "carried", "switch"),
    "turns": ("turns", "first_turn"),
}
"""Sources of a gap that are larger than a token, with the kinds of shapes that show them."""
AVERAGES = frozenset({"geometric", "seq_mean", "turn", "turn_arithmetic", "entropy_group"})
"""Units in which a single token hardly counts."""


def _corrects(view: View) -> frozenset[str]:
    """Units in which the context's method corrects for the engine; empty if it does not, or is unknown."""
    row = METHODS.get(view.context.method or "")
    return frozenset() if row is None else row.engine_units


@SHAPES.reading("nat")
def unit_too_fine(view: View) -> ReadNumber | None:
    """Mean gap where it is, if that is whole responses, turns or what follows a place, and the method corrects single
    tokens alone; else 0. Absent where no method is known that corrects for the engine."""
    units = _corrects(view)
    if not view.context.shapes or not units:
        return None
    row = dominant(view)
    source = next((name for name, kinds in OF_RESPONSES.items() if row.get("kind") in kinds), None)
    if source is None or units != {"token"}:
        return ReadNumber(0.0, "gap")
    words = f"gap in {source} ({row['where']}), corrected token by token"
    return ReadNumber(float(row["gap"]), words)


@SHAPES.reading()
def unit_too_coarse(view: View) -> ReadNumber | None:
    """Share of the divergence in the worst 1 % of tokens, if the method corrects by averages over turns or responses
    alone; else 0. Absent where no method is known that corrects for the engine."""
    units, share = _corrects(view), view.first("{on}/k3_top_share")
    if share is None or not units:
        return None
    words = f"{share.metric}, corrected by means ({', '.join(sorted(units))})"
    return ReadNumber(share.value if units <= AVERAGES else 0.0, words)


BY_PLACE = ("first_tokens", "beginning", "beyond", "grows", "some", "carried", "long", "turns", "first_turn")
"""Kinds that inputs or positions make: those leave the mean ratio at 1."""


@SHAPES.reading()
def shape_lacking(view: View) -> ReadNumber | None:
    """Mass that the second policy lacks where the gap is, 1 - mean ratio, if that place is one of inputs or positions,
    by `mean_ratio_z_below` standard errors and a quarter of the gap at least; else 0: a heavy tail lacks less of it."""
    if not view.context.shapes:
        return None
    row = dominant(view)
    lacking = 1 - row.get("ratio_mean", 1.0)
    surely = row.get("ratio_z", 0.0) < -view.limits["mean_ratio_z_below"] and lacking > 0.25 * row["gap"]
    return ReadNumber(lacking if surely and row["kind"] in BY_PLACE else 0.0, f"1 - mean ratio {row.get('where', '')}")


@SHAPES.reading("nat")
def shape_unrelated(view: View) -> ReadNumber | None:
    """Mean gap where it is, if that is most of the log from a place on and log-probs there have nothing in common
    (their correlation is below `unrelated` by three standard errors), else 0."""
    if not view.context.shapes:
        return None
    row = dominant(view)
    from_a_place = row.get("kind") in ("beyond", "grows") and row.get("tokens", 0.0) > 0.5
    unrelated = from_a_place and row.get("corr_high", 1.0) < view.limits["unrelated"]
    return ReadNumber(float(row["gap"]) if unrelated else 0.0, f"gap of unrelated log-probs {row.get('where', '')}")


@SHAPES.reading()
def steps_growth(view: View) -> ReadNumber | None:
    """Mean gap lately over that of the first step."""
    trend = view.context.shapes.get("over_steps") or {}
    if not trend:
        return None
    return ReadNumber(trend["last"] / max(trend["first"], 1e-6), "gap lately, over that of the first step")


@SHAPES.reading()
def shape_corr(view: View) -> ReadNumber | None:
    """Correlation of both policies' log-probs on the worse side of that contrast, three standard errors added."""
    row = dominant(view)
    return (
        ReadNumber(row["corr_high"], f"correlation of log-probs {row['where']}, at most")
        if "corr_high" in row
        else None
    )


@SHAPES.reading()
def corr_high(view: View) -> ReadNumber | None:
    """Correlation of both policies' log-probs, three standard errors added: how large it may be, given the tokens."""
    if whole := view.context.shapes.get("whole"):
        return ReadNumber(whole["corr_high"], "correlation of log-probs, at most")
    own, tokens = view.level("{on}/shift_corr"), view.level("tokens")
    if own is None:
        return None
    return ReadNumber(own + (6 / math.sqrt(tokens) if tokens else 0.0), view.named("{on}/shift_corr"))


@SHAPES.reading()
def shift_z(view: View) -> ReadNumber | None:
    """Evidence that log-probs are shifted by one token: correlation with a neighbor minus that with the same token, in
    standard errors of a quarter of the tokens.
    """
    own = view.level("{on}/shift_corr")
    best = view.largest("{on}/shift_corr_before", "{on}/shift_corr_after")
    tokens = (view.context.shapes.get("whole") or {}).get("tokens")
    if own is None or best is None or not tokens:
        return None
    return ReadNumber((best.value - own) * math.sqrt(tokens / 8), best.metric)


def _proof(view: View, sign: int) -> ReadNumber | None:
    """Distance of the mean ratio from 1 in standard errors; 0 where that error cannot be trusted."""
    whole = view.context.shapes.get("whole")
    ess = view.level("{on}/ess_frac")
    if not whole or ess is None:
        return None
    z = sign * whole["ratio_z"]
    trusted = sign > 0 or ess >= view.limits["ess_half"]
    return ReadNumber(z if trusted else 0.0, f"mean ratio {whole['ratio_mean']:.3g}, standard errors from 1")


SHAPES.rows({
    "mean_ratio_above": (
        lambda v: _proof(v, 1),
        "Standard errors, clustered by sequence and centered, by which the mean ratio is above 1",
    ),
    "mean_ratio_below": (
        lambda v: _proof(v, -1),
        "The same below 1; 0 while the effective sample size is below `ess_half`, for an unseen tail can hold the rest",
    ),
    "tempered_slope": ("{on}/slope", "Slope of the second policy's log-probs on the rollout's: `{on}/slope`"),
})  # fmt: skip


@SHAPES.reading("update")
def lag_spread(view: View) -> ReadNumber | None:
    """Largest version lag of the last steps less the smallest mean of a step: 0 where the lag is constant."""
    most, least = (view.window.column(f"version_lag/{name}") for name in ("max", "mean"))
    return ReadNumber(max(most) - min(least), "version_lag/max, over the smallest mean") if most and least else None


@SHAPES.reading("update")
def updates_inside(view: View) -> ReadNumber | None:
    """Mean number of optimizer steps on a batch before the current one: `batch/updates_before`."""
    return view.first("batch/updates_before")
