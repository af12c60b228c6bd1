"""The charts of an audit over its steps, and along length, position, sign, lag and token class."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from offdrift.audit.method_table import length_curves, tried
from offdrift.judge.kl_choice import EXACT, kl_metrics
from offdrift.show.charts import PAIR_COLORS, PAIR_DASHES, Chart, Series, Values, thinned
from offdrift.show.headline import PAIR_WORDS, PAIRS, length_unit, main_pair, meaning_of, thresholds
from offdrift.show.json_access import Fields, any_number, at, column, mapping, number, rows, text
from offdrift.show.numbers import short
from offdrift.stats.metrics import METRICS

Rows = list[dict[str, Any]]
Steps = list[float | None]
NOT_METRICS = frozenset({"step", "sequences", "tokens", "quantiles", "label", "low", "high"})


@dataclass(frozen=True)
class PairChart:
    """A chart with a line for each pair of policies."""

    id: str
    title: str
    unit: str
    metric: str
    log: bool = False
    share: bool = False
    threshold: str = ""
    """Name of the threshold that is drawn as a line."""
    label: str = ""
    """What stands at that line behind its value."""


PAIR_CHARTS = (
    PairChart("ess", "Effective sample size", "of the batch, raw ratios", "ess_frac", share=True, threshold="ess_half"),
    PairChart(
        "chi2", "χ² of token weights", "log scale", "chi2_token", log=True, threshold="chi2_toxic", label=": toxic tail"
    ),
    PairChart("pearson", "Correlation of probabilities", "", "pearson", threshold="pearson_broken"),
    PairChart("worst", "Worst token, |log ratio|", "nat, log scale", "abs_log_ratio_max", log=True),
    PairChart("gap", "Perplexity gap", "nat, log scale", "log_ppl_gap", log=True),
)
RUN_CHARTS = (
    ("reward", "Reward", "mean", "reward/mean", "reward"),
    ("length", "Response length", "mean", "response/length_mean", "response_length"),
    ("lag", "Version lag", "updates", "version_lag/mean", ""),
    ("clip", "Tokens that PPO's clip would touch", "share, clip at 0.2", "staleness/clip_frac", ""),
    ("entropy", "Entropy", "nat", "current/entropy", ""),
    ("grad", "Gradient norm", "before clipping", "optim/grad_norm", ""),
    ("acceptance", "Acceptance", "of sequences", "gate/acceptance_seq", ""),
)
"""Charts of one number of the run: id, title, unit, metric, and the quantiles of its band, if there are any."""
FACET_CHARTS = (
    ("position", "KL by position in the response", "token", "points"),
    ("length", "KL by response length", "", "points"),
    ("lag", "KL by policy lag", "updates", "points"),
    ("advantage", "KL by sign of the advantage", "", "bars"),
    ("token_class", "KL by token class", "", "bars"),
)
"""Charts of the KL by bucket: axis, title, what stands below it, and how it is drawn."""


def over_time(audit: Fields) -> list[Chart]:
    """Everything that is drawn over the steps; charts without numbers are left out."""
    table = thinned(rows(audit.get("steps")))
    steps, limits = _steps(table), thresholds(audit)
    charts = [
        _kl_chart(steps, table, limits),
        _quantile_chart(audit, steps, table),
        *(_pair_chart(c, steps, table, limits) for c in PAIR_CHARTS),
        *(_run_chart(*c, steps, table, length_unit(audit)) for c in RUN_CHARTS),
    ]
    return [c for c in charts if c.series]


def explorable(audit: Fields) -> dict[str, tuple[list[float | None], list[float | None]]]:
    """Steps and values of every metric that was recorded at some step, in the order of METRICS."""
    table = thinned(rows(audit.get("steps")))
    steps, order = _steps(table), {name: i for i, name in enumerate(METRICS)}
    names = sorted({name for row in table for name in row} - NOT_METRICS, key=lambda n: (order.get(n, len(order)), n))
    values = {name: column(table, name) for name in names}
    return {name: (steps, y) for name, y in values.items() if any_number(y)}


def along(audit: Fields) -> list[Chart]:
    """KL by position, length, lag, sign of the advantage and token class; acceptance by length."""
    charts = [_facet_chart(audit, *c) for c in FACET_CHARTS]
    charts.insert(1, _length_trap(audit))
    return [c for c in charts if c.series]


def inhabited(table: Rows) -> slice:
    """The buckets from the first to the last that holds a token, or does not say.

    Example:
        >>> inhabited([{"tokens": 0}, {"tokens": 3}, {"tokens": 0}])
        slice(1, 2, None)
    """
    filled = [i for i, row in enumerate(table) if number(row.get("tokens")) != 0]
    return slice(filled[0], filled[-1] + 1) if filled else slice(0, 0)


def labels(table: Rows) -> list[str]:
    """What each bucket is called: its label, else its ends."""
    names = []
    for row in table:
        low, high = number(row.get("low")), number(row.get("high"))
        ends = f"to {high:,.0f}" if high is not None else "?"
        if low is not None:
            ends = f"{low:,.0f}+" if high is None else f"{low:,.0f}–{high:,.0f}"
        names.append(text(row.get("label")) or ends)
    return names


def pair_series(metric: Callable[[str], str], table: Rows, x: Values, *, kind: Any = "line") -> list[Series]:
    """A series for each pair of policies that has the metric.

    Args:
        metric: name of the metric for a pair; "" where the pair has none.
    """
    return [
        Series(pair, x, column(table, name), color=PAIR_COLORS[pair], dash=PAIR_DASHES[pair], group=pair, kind=kind)
        for pair in PAIRS
        if (name := metric(pair)) and any_number(column(table, name))
    ]


def best_kl(table: Rows, pair: str) -> str:
    """The best measure of KL that some row has: exact before sampled; "" for none."""
    return next((name for name in kl_metrics(pair, None, math.inf) if any_number(column(table, name))), "")


def _kl_chart(steps: Steps, table: Rows, limits: Mapping[str, float]) -> Chart:
    names = {pair: best_kl(table, pair) for pair in PAIRS}
    series = pair_series(lambda p: names[p], table, steps)
    exact = [pair for pair, name in names.items() if name and name == EXACT.get(pair)]
    grade = f"exact for {', '.join(exact)}; else k3" if exact else "k3 of the sampled tokens"
    meaning = f"KL of a token, mean over the step: {grade}. " + _pairs_in_words(series)
    lines = _reference(limits, "kl_large")
    return Chart("KL per token", "nat, log scale", series, "kl", meaning, log=True, lines=lines, wide=True)


def _quantile_chart(audit: Fields, steps: Steps, table: Rows) -> Chart:
    pair = main_pair(audit)
    q = {name: _quantile(table, f"{pair}/log_ratio", name) for name in ("p05", "p50", "p95", "p99")}
    look: dict[str, Any] = {"color": PAIR_COLORS.get(pair, "arm-0"), "group": pair}
    series = [
        Series("5 % to 95 %", steps, low=q["p05"], high=q["p95"], **look),
        Series("median", steps, q["p50"], **look),
        Series("99 %", steps, q["p99"], dash="dot", **look),
    ]
    meaning = (
        f"Log-ratio of a token, {PAIR_WORDS.get(pair, '')}: its median, the band from 5 % to 95 %, and the 99 % "
        "quantile of each step."
    )
    return Chart(f"Log-ratio, {pair}", "nat, quantiles", series, "quantiles", meaning)


def _pair_chart(c: PairChart, steps: Steps, table: Rows, limits: Mapping[str, float]) -> Chart:
    series = pair_series(lambda p: f"{p}/{c.metric}", table, steps)
    first = series[0].name if series else PAIRS[0]
    meaning = f"{meaning_of(f'{first}/{c.metric}')} {_pairs_in_words(series)}"
    lines = _reference(limits, c.threshold, c.label)
    return Chart(c.title, c.unit, series, c.id, meaning, log=c.log, share=c.share, lines=lines)


def _run_chart(id: str, title: str, unit: str, metric: str, key: str, steps: Steps, table: Rows, length: str) -> Chart:
    """One number of the run, in the band of its quantiles `key`."""
    values = column(table, metric)
    if not key:
        return Chart(title, unit, [Series(title, steps, values, color="arm-6", group="run")], id, meaning_of(metric))
    low, high = (_quantile(table, key, q) for q in ("p05", "p95"))
    look: dict[str, Any] = {"color": "arm-3", "group": "run"}
    series = [Series("5 % to 95 %", steps, low=low, high=high, **look), Series("mean", steps, values, **look)]
    unit = f"{unit}; band 5 % to 95 %" if any_number(low) and any_number(high) else unit
    return Chart(title, f"{length}, {unit}" if id == "length" else unit, series, id, meaning_of(metric, length))


def _facet_chart(audit: Fields, name: str, title: str, x_title: str, kind: str) -> Chart:
    table = rows(at(audit, "facets", name))
    table = table[inhabited(table)]
    series = pair_series(lambda p: best_kl(table, p), table, labels(table), kind=kind)
    tokens = [number(row.get("tokens")) for row in table]
    counts = ["" if n is None else f"  ({n:,.0f} tokens)" for n in tokens]
    series = [
        replace(s, texts=[f"{'–' if v is None else f'{short(v)} nat'}{count}" for v, count in zip(s.y, counts)])
        for s in series
    ]
    log = kind != "bars"
    unit, x_title = "nat, log scale" if log else "nat", _lengths(audit) if name == "length" else x_title
    meaning = f"Mean KL of the tokens of each bucket, as over time. {_pairs_in_words(series)}"
    return Chart(title, unit, series, f"by-{name}", meaning, log=log, x_title=x_title)


def _length_trap(audit: Fields) -> Chart:
    """The length trap: a gate on sums or on the worst token rejects long responses for being long."""
    table = rows(at(audit, "facets", "length"))
    curves = length_curves(tried(audit)) if table else []
    there = inhabited(table)
    curves = [(name, curve[there]) for name, curve in curves if len(curve) == len(table)]
    dashes = ("solid", "dash", "dot")
    series = [
        Series(name, labels(table[there]), curve, color=f"arm-{i}", dash=dashes[i % 3], kind="points", hover=".1%")
        for i, (name, curve) in enumerate(curves)
    ]
    meaning = (
        "Share of the sequences of each length that a method would have kept. A curve that falls is the length "
        "trap: long responses are rejected for their length, not for their drift per token, and training shortens "
        "the answers. Shown are the methods that depend on length most."
    )
    return Chart(
        "Acceptance by response length",
        "the length trap",
        series,
        "trap",
        meaning,
        share=True,
        x_title=_lengths(audit),
        wide=True,
        legend=True,
    )


def _lengths(audit: Fields) -> str:
    return f"response length, {length_unit(audit)}"


def _pairs_in_words(series: Iterable[Series]) -> str:
    return "; ".join(f"{s.name}: {PAIR_WORDS[s.name].split(':')[0]}" for s in series if s.name in PAIR_WORDS) + "."


def _quantile(steps: Rows, key: str, q: str) -> list[float | None]:
    return [number(at(mapping(row.get("quantiles")), key, q)) for row in steps]


def _steps(table: Rows) -> Steps:
    """The step of each row, or its place where none has a step."""
    steps = column(table, "step")
    return steps if any_number(steps) else [float(i) for i in range(1, len(table) + 1)]


def _reference(limits: Mapping[str, float], name: str, label: str = "") -> tuple[tuple[float, str], ...]:
    """A threshold as a line across a chart; none where it has no place on a logarithmic axis."""
    value = limits.get(name, 0.0)
    return ((value, f"{value:g}{label}"),) if 0 < value < math.inf else ()
