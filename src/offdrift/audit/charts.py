"""The charts of an audit: over its steps, along position, length, lag and other properties, and of its ratios."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from offdrift.audit.method_table import length_curves, tried
from offdrift.correction import Gate, Weight
from offdrift.errors import OffdriftError
from offdrift.judge.kl_choice import EXACT, kl_metrics
from offdrift.methods import METHODS, override
from offdrift.objectives import Clipped
from offdrift.show.charts import PAIR_COLORS, PAIR_DASHES, Chart, Series, Values
from offdrift.show.headline import PAIR_WORDS, PAIRS, length_unit, main_pair, meaning_of, thresholds
from offdrift.show.json_access import Fields, any_number, at, column, mapping, number, numbers, rows, text
from offdrift.show.numbers import percent, short
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
    PairChart(
        "ess",
        "Effective sample size",
        "of the batch, raw ratios",
        "ess_frac",
        share=True,
        threshold="ess_half",
        label=" of the batch: weights too noisy below",
    ),
    PairChart(
        "chi2", "χ² of token weights", "log scale", "chi2_token", log=True, threshold="chi2_toxic", label=": toxic tail"
    ),
    PairChart(
        "pearson",
        "Correlation of probabilities",
        "",
        "pearson",
        threshold="pearson_broken",
        label=": not the same policy below",
    ),
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
    ("alpha", "Share of a teacher", "of the logits, mean", "fusion/alpha_mean", ""),
)
"""Charts of one number of the run: id, title, unit, metric, and the quantiles of its band, if there are any."""
FACET_CHARTS = (
    ("position", "KL by position in the response", "token", "points"),
    ("length", "KL by response length", "", "points"),
    ("lag", "KL by policy lag", "updates", "points"),
    ("advantage", "KL by sign of the advantage", "", "bars"),
    ("token_class", "KL by token class", "", "bars"),
    ("worker", "KL by rollout worker", "", "bars"),
)
"""Charts of the KL by bucket: axis, title, what stands below it, and how it is drawn."""


def over_time(audit: Fields) -> list[Chart]:
    """Everything that is drawn over the steps; charts without numbers are left out."""
    table = rows(audit.get("steps"))
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
    table = rows(audit.get("steps"))
    steps, order = _steps(table), {name: i for i, name in enumerate(METRICS)}
    names = sorted({name for row in table for name in row} - NOT_METRICS, key=lambda n: (order.get(n, len(order)), n))
    values = {name: column(table, name) for name in names}
    return {name: (steps, y) for name, y in values.items() if any_number(y)}


def along(audit: Fields) -> list[Chart]:
    """KL by every axis of the facets and by worker; acceptance by length, and tokens by lag."""
    charts = [_facet_chart(audit, *c) for c in FACET_CHARTS]
    charts.insert(1, _length_trap(audit))
    charts.append(_lag_histogram(audit))
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
    """Label of each bucket; where the row has none, its range."""
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
    lines = _reference(limits, "kl_large", ": find the cause above")
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
    """One number of the run, in the band of its quantiles `key`; quantiles of rewards of 0 and 1 say nothing."""
    values = column(table, metric)
    if not key:
        return Chart(title, unit, [Series(title, steps, values, color="arm-6", group="run")], id, meaning_of(metric))
    low, high = (_quantile(table, key, q) for q in ("p05", "p95"))
    if key == "reward" and all(v in (0.0, 1.0, None) for v in (*low, *high)):
        low = high = []
    look: dict[str, Any] = {"color": "arm-3", "group": "run"}
    band = [Series("5 % to 95 %", steps, low=low, high=high, **look)] if any_number(low) else []
    series = [*band, Series("mean", steps, values, **look)]
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


def _lag_histogram(audit: Fields) -> Chart:
    """Draw the share of tokens at each version lag; empty where all tokens have the same lag."""
    table = rows(at(audit, "facets", "lag"))
    tokens = column(table, "tokens")
    total = sum(n or 0.0 for n in tokens)
    shares = [None if n is None else n / total for n in tokens] if len(table) > 1 and total else []
    mixed = number(at(audit, "overall", "version_lag/mixed_frac"))
    meaning = "Share of tokens by version lag: updates between sampling and training."
    if mixed is not None:
        meaning += f" {percent(mixed)} of the responses have tokens of several versions."
    texts = [f"{percent(share)}  ({n or 0:,.0f} tokens)" for share, n in zip(shares, tokens)]
    series = [Series("tokens", labels(table), shares, color="arm-6", kind="bars", texts=texts)] if shares else []
    return Chart("Tokens by policy lag", "share", series, "lags", meaning, share=True, x_title="updates")


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


SMALLEST = 1e-4
"""|l| below which the axis is linear."""
NARROWEST = 0.06
"""Width of a bar on the axis; narrower ones are joined, as nobody could see them."""

CLOSEST = 0.5
"""Distance of two ticks on the axis; closer ones would overlap."""

Bar = tuple[float, float, float]
"""Low end, high end (of the log-ratio) and count."""


def place(log_ratio: float) -> float:
    """Position of a log-ratio l on the chart's axis: sign(l) log10(1 + |l| / 1e-4), symmetric about ratio 1.

    Ratios 0.999, 0.99, 0.9 and 0.5 are as far apart as their distances from 1 are in magnitude.

    Example:
        >>> [round(place(x), 3) for x in (0.0, 1e-4, -0.1)]
        [0.0, 0.301, -3.0]
    """
    return math.copysign(math.log10(1 + abs(log_ratio) / SMALLEST), log_ratio)


def histogram_chart(histograms: object) -> Chart:
    """The ratios of every pair of policies that the audit holds."""
    outlines = []
    for pair in PAIRS:
        if bars := bars_of(mapping(mapping(histograms).get(pair))):
            outlines.append((steps_of(pair, bars, color=PAIR_COLORS[pair], group=pair), bars))
    pairs = "; ".join(f"{s.name}: {PAIR_WORDS[s.name].split(':')[0]}" for s, _ in outlines)
    meaning = (
        f"Distribution of the tokens' probability ratios; {pairs}. Both axes are logarithmic, the lower one "
        "towards 1 from both sides: equal ratios are in the middle, and the two humps stand at the usual size of a "
        "difference. Dashed lines are the limits of the chosen method."
    )
    return ratio_chart("ratios", "Ratios of the sampled tokens", meaning, outlines)


def ratio_chart(id: str, title: str, meaning: str, outlines: list[tuple[Series, list[Bar]]]) -> Chart:
    """Outlines of `steps_of` in one chart, on an axis that reaches as far as their bars."""
    reach = max((abs(end) for _, bars in outlines for end in (bars[0][0], bars[-1][1])), default=0.0)
    axis: dict[str, Any] = {"log": True, "x_title": "ratio", "wide": True, "x_ticks": ratio_ticks(reach)}
    return Chart(title, "log scale", [s for s, _ in outlines], id, meaning, **axis)


def steps_of(name: str, bars: list[Bar], **look: Any) -> Series:
    """The bars of a histogram as one outline in steps, with their counts as texts."""
    total = sum(count for *_, count in bars)
    x = [place(low) for low, *_ in bars] + [place(bars[-1][1])]
    density = [c / total / (b - a) if c else None for (a, b), (*_, c) in zip(pairwise(x), bars)]
    words = [f"{_ratio(a)} to {_ratio(b)}: {c:,.0f} tokens ({percent(c / total)})" for a, b, c in bars]
    outline, texts = [*density, density[-1]], [*words, words[-1]]
    return Series(name, x, outline, kind="steps", texts=texts, **look)


def bars_of(histogram: Fields) -> list[Bar]:
    """Bars as low, high and count, from the first to the last that holds a token.

    Open ends (None) stop one bar's width beyond their neighbor.

    Example:
        >>> bars_of({"edges": [-1.0, 0.0, 1.0, 2.0], "counts": [3, 1, 0]})
        [(-1.0, 0.0, 3.0), (0.0, 1.0, 1.0)]
    """
    edges, counts = numbers(histogram.get("edges")), numbers(histogram.get("counts"))
    if len(counts) == len(edges) + 1 and edges:  # counts below the first edge and above the last
        edges = [None, *edges, None]
    if len(counts) != len(edges) - 1 or any(e is None for e in edges[1:-1]):
        return []
    inner = [e for e in edges[1:-1] if e is not None]
    for end, side in ((0, -1), (-1, 1)):
        if edges[end] is None:
            last = inner[end] if inner else 0.0
            edges[end] = last + side * max(1.0, abs(last))
    bars = [(a or 0.0, b or 0.0, c or 0.0) for (a, b), c in zip(pairwise(edges), counts)]
    if any(low >= high for low, high, _ in bars):
        return []
    filled = [i for i, bar in enumerate(bars) if bar[2] > 0]
    return visible(bars[filled[0] : filled[-1] + 1] if filled else [])


def visible(bars: Iterable[Bar]) -> list[Bar]:
    """Join neighbors until each bar is wide enough to be seen.

    Example:
        >>> visible([(0.0, 1e-6, 2.0), (1e-6, 1.0, 1.0)])
        [(0.0, 1.0, 3.0)]
    """
    joined: list[Bar] = []
    for low, high, count in bars:
        if joined and place(joined[-1][1]) - place(joined[-1][0]) < NARROWEST:
            first, _, before = joined[-1]
            joined[-1] = (first, high, before + count)
        else:
            joined.append((low, high, count))
    return joined


def ratio_ticks(reach: float) -> list[tuple[float, str]]:
    """Ticks at round ratios (0.9, 1.11, ...) for an axis that ends at |l| = `reach`: position and text of each."""
    below: list[float] = []  # from the middle outwards, so far apart that their texts do not touch
    for r in (0.999, 0.99, 0.9, 0.5, 0.1, 1e-2, 1e-3, 1e-4):
        last = place(math.log(below[0])) if below else 0.0
        if -math.log(r) <= reach and last - place(math.log(r)) >= CLOSEST:
            below.insert(0, r)
    ratios = [*below, 1.0, *(1 / r for r in reversed(below))]
    names = {0.999: "0.999", 1 / 0.999: "1.001", 0.99: "0.99", 1 / 0.99: "1.01", 0.9: "0.9", 1 / 0.9: "1.11"}
    return [(place(math.log(r)), names.get(r, f"{r:g}")) for r in ratios]


def _ratio(log_ratio: float) -> str:
    if 0 < abs(log_ratio) < 0.01:
        return f"1 {'+' if log_ratio > 0 else '−'} {short(abs(math.expm1(log_ratio)))}"
    return short(math.exp(log_ratio)) if log_ratio < 700 else "∞"


ON_TOKENS = ("token", "seq_max")
# Room for every row of the table and as many of one's own; an audit that somebody else wrote may name any number.
SELECTABLE = 2 * len(METHODS)


def choices(audit: Fields) -> dict[str, list[dict[str, Any]]]:
    """Methods with limits that can be drawn, and those limits; the suggested method first.

    Each limit says on which pair of policies it is (`on`), where it stands on the histogram's axis (`x`), and what
    happens there (`label`). Limits on a sequence's geometric mean say that they bind means; limits on products have no
    place on this axis.
    """
    suggested = text(at(audit, "suggestion", "method"))
    settings = {text(r.get("name")): mapping(r.get("settings")) for r in rows(audit.get("methods"))}
    names = dict.fromkeys([suggested, *settings])
    if suggested:
        settings[suggested] = mapping(at(audit, "suggestion", "settings")) or settings.get(suggested, {})
    limits = {name: limits_of(name, settings.get(name, {})) for name in names if name}
    return dict([(name, own) for name, own in limits.items() if own][:SELECTABLE])


def limits_of(name: str, settings: Fields | None = None) -> list[dict[str, Any]]:
    """The limits of one row of `METHODS` under changed settings, by the paths of `override`; none if it is unknown.

    What stands in parentheses after the name is ignored, and so are settings that are refused.

    Example:
        >>> [(l["on"], l["ratio"], l["label"]) for l in limits_of("decoupled_token_icepop")[:2]]
        [('mismatch', 0.5, 'masked below 0.5'), ('mismatch', 5.0, 'masked above 5')]
    """
    row = METHODS.get(name.split("(")[0])
    if row is None:
        return []
    with contextlib.suppress(OffdriftError, TypeError):
        row = override(row, settings or {})
    limits: list[tuple[str, float | None, float | None, str]] = []  # ratio, low and high end, and what happens
    for weight in row.correction.weights:
        if isinstance(weight, Weight) and weight.unit == "token":
            verb = "masked" if weight.outside == "mask" else "weight held"
            limits.append((weight.on, weight.floor, weight.cap, verb))
    limits += [limit for gate in row.correction.gates if isinstance(gate, Gate) for limit in _of_gate(gate)]
    objective = row.objective
    if isinstance(objective, Clipped) and objective.unit == "token":
        limits.append((objective.on, 1 - objective.eps_low, 1 + objective.eps_high, "clipped"))
    lines = []
    for on, low, high, verb in limits:
        ends = ((low if low is not None and low > 0 else None, "below"), (high, "above"))
        lines += [
            {"on": on, "ratio": end, "label": f"{verb} {side} {end:.4g}", "x": place(math.log(end))}
            for end, side in ends
            if end is not None
        ]
    return lines


def _of_gate(gate: Gate) -> list[tuple[str, float | None, float | None, str]]:
    """A gate's limits as ratios; |l| <= h and l^2 / 2 <= h are two-sided."""
    low, high = gate.low, gate.high
    if gate.statistic in ("abs_log_ratio", "k2") and high is not None:
        reach = high if gate.statistic == "abs_log_ratio" else math.sqrt(2 * high)
        low, high = math.exp(-reach), math.exp(reach)
    elif gate.statistic != "ratio":
        return []
    if gate.unit in ON_TOKENS:
        return [(gate.on, low, high, "rejected" if gate.unit == "token" else "sequence rejected")]
    if gate.unit == "seq_mean" and gate.statistic == "ratio":
        return [(gate.on, low, high, "sequence's mean rejected")]
    return []
