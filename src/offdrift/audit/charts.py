"""The charts of an audit over its steps, and along length, position, sign, lag and token class."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from offdrift.audit.method_table import length_curves, tried
from offdrift.judge.kl_choice import EXACT, kl_metrics
from offdrift.show.charts import DASHES, SERIES_COLORS, Chart, Columns, Series, thinned
from offdrift.show.headline import PAIR_WORDS, PAIRS, length_unit, main_pair, meaning_of
from offdrift.show.json_access import Fields, any_number, at, column, mapping, number, numbers, rows, text
from offdrift.show.numbers import short
from offdrift.stats.metrics import METRICS

Rows = list[dict[str, Any]]
STEP = "step"
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
    lines: tuple[tuple[float, str], ...] = ()


PAIR_CHARTS = (
    PairChart("ess", "Effective sample size", "of the batch, raw ratios", "ess_frac", share=True, lines=((0.5, "0.5"),)),
    PairChart("chi2", "χ² of token weights", "log scale", "chi2_token", log=True, lines=((2.0, "2: toxic tail"),)),
    PairChart("pearson", "Correlation of probabilities", "", "pearson", lines=((0.95, "0.95"),)),
    PairChart("worst", "Worst token, |log ratio|", "nat, log scale", "abs_log_ratio_max", log=True),
    PairChart("gap", "Perplexity gap", "nat, log scale", "log_ppl_gap", log=True),
)  # fmt: skip

SINGLE_CHARTS = (
    ("lag", "Version lag", "updates", "version_lag/mean"),
    ("clip", "Tokens that PPO's clip would touch", "share, clip at 0.2", "staleness/clip_frac"),
    ("entropy", "Entropy", "nat", "current/entropy"),
    ("grad", "Gradient norm", "before clipping", "optim/grad_norm"),
    ("acceptance", "Acceptance", "of sequences", "gate/acceptance_seq"),
)
BAND_CHARTS = (
    ("reward", "Reward", "mean; band 5 % to 95 %", "reward/mean", "reward"),
    ("length", "Response length", "mean; band 5 % to 95 %", "response/length_mean", "response_length"),
)  # fmt: skip


def over_time(audit: Fields, columns: Columns) -> list[Chart]:
    """Everything that is drawn over the steps; charts without numbers are left out."""
    steps = thinned(rows(audit.get("steps")))
    columns.add(STEP, _steps(steps))
    charts = [
        _kl_chart(audit, steps, columns),
        _quantile_chart(audit, steps, columns),
        *(_pair_chart(c, steps, columns) for c in PAIR_CHARTS),
        *(_band_chart(*c, steps, columns, length_unit(audit)) for c in BAND_CHARTS),
        *(_single_chart(*c, steps, columns) for c in SINGLE_CHARTS),
    ]
    return [c for c in charts if c.series]


def explorable(audit: Fields, columns: Columns) -> dict[str, str]:
    """Every metric that was recorded at some step, as name -> column, in the order of METRICS."""
    steps = thinned(rows(audit.get("steps")))
    order = {name: i for i, name in enumerate(METRICS)}
    found = {name for row in steps for name in row} - NOT_METRICS
    names = sorted(found, key=lambda name: (order.get(name, len(order)), name))
    added = ((name, columns.add(f"s:{name}", column(steps, name))) for name in names)
    return {name: column for name, column in added if column}


def along(audit: Fields, columns: Columns) -> list[Chart]:
    """KL by position, length, lag, sign of the advantage and token class; acceptance by length."""
    charts = [
        _facet(audit, columns, "position", "KL by position in the response", "token", "points"),
        _trap(audit, columns),
        _facet(audit, columns, "length", "KL by response length", _lengths(audit), "points"),
        _facet(audit, columns, "lag", "KL by policy lag", "updates", "points"),
        _facet(audit, columns, "advantage", "KL by sign of the advantage", "", "bars"),
        _facet(audit, columns, "token_class", "KL by token class", "", "bars"),
    ]
    return [c for c in charts if c.series]


def inhabited(table: Rows) -> slice:
    """The buckets from the first to the last that holds a token, or does not say.

    Example:
        >>> inhabited([{"tokens": 0}, {"tokens": 3}, {"tokens": 0}])
        slice(1, 2, None)
    """
    held = [i for i, row in enumerate(table) if number(row.get("tokens")) != 0]
    return slice(held[0], held[-1] + 1) if held else slice(0, 0)


def labels(table: Rows) -> list[str]:
    """What each bucket is called: its label, else its ends."""
    return [text(row.get("label")) or _ends(row) for row in table]


def pair_series(
    metric: Callable[[str], str], table: Rows, columns: Columns, *, prefix: str, x: str, log: bool, kind: str = "line"
) -> tuple[Series, ...]:
    """A series for each pair of policies that has the metric.

    Args:
        metric: name of the metric for a pair; "" where the pair has none.
        prefix: of the columns' names.
    """
    add = columns.add_positive if log else columns.add
    found = []
    for pair in PAIRS:
        name = metric(pair)
        y = add(f"{prefix}:{name}", column(table, name)) if name else ""
        if y:
            found.append(Series(pair, x, y, color=SERIES_COLORS[pair], dash=DASHES[pair], group=pair, kind=kind))
    return tuple(found)


def best_kl(table: Rows, pair: str) -> str:
    """The best measure of KL that some row has: exact before sampled; "" for none."""
    return next((name for name in kl_metrics(pair, None) if any_number(column(table, name))), "")


def _kl_chart(audit: Fields, steps: Rows, columns: Columns) -> Chart:
    names = {pair: best_kl(steps, pair) for pair in PAIRS}
    series = pair_series(lambda p: names[p], steps, columns, prefix="s", x=STEP, log=True)
    exact = [pair for pair, name in names.items() if name and name == EXACT.get(pair)]
    grade = f"exact for {', '.join(exact)}; else k3" if exact else "k3 of the sampled tokens"
    meaning = f"KL of a token, mean over the step: {grade}. " + _pairs_in_words(series)
    lines = ((0.05, "0.05"),)
    return Chart("kl", "KL per token", "nat, log scale", meaning, series, log=True, lines=lines, wide=True)


def _quantile_chart(audit: Fields, steps: Rows, columns: Columns) -> Chart:
    pair = main_pair(audit)
    key = f"{pair}/log_ratio"
    add = {q: columns.add(f"q:{key}:{q}", _quantile(steps, key, q)) for q in ("p05", "p50", "p95", "p99")}
    color = SERIES_COLORS.get(pair, "arm-0")
    found = []
    if add["p05"] and add["p95"]:
        found.append(Series("5 % to 95 %", STEP, low=add["p05"], high=add["p95"], color=color, group=pair))
    for q, dash, name in (("p50", "solid", "median"), ("p99", "dot", "99 %")):
        if add[q]:
            found.append(Series(name, STEP, add[q], color=color, dash=dash, group=pair))
    meaning = f"Log-ratio of a token, {PAIR_WORDS.get(pair, '')}: its median, the band from 5 % to 95 %, and the 99 % quantile of each step."
    return Chart("quantiles", f"Log-ratio, {pair}", "nat, quantiles", meaning, tuple(found))


def _pair_chart(c: PairChart, steps: Rows, columns: Columns) -> Chart:
    series = pair_series(lambda p: f"{p}/{c.metric}", steps, columns, prefix="s", x=STEP, log=c.log)
    first = series[0].name if series else PAIRS[0]
    meaning = f"{meaning_of(f'{first}/{c.metric}')} {_pairs_in_words(series)}"
    return Chart(c.id, c.title, c.unit, meaning, series, log=c.log, share=c.share, lines=c.lines)


def _single_chart(id: str, title: str, unit: str, metric: str, steps: Rows, columns: Columns) -> Chart:
    y = columns.add(f"s:{metric}", column(steps, metric))
    series = (Series(title, STEP, y, color="arm-6", group="run"),) if y else ()
    return Chart(id, title, unit, meaning_of(metric), series)


def _band_chart(
    id: str, title: str, unit: str, metric: str, key: str, steps: Rows, columns: Columns, length: str
) -> Chart:
    y = columns.add(f"s:{metric}", column(steps, metric))
    low, high = (columns.add(f"q:{key}:{q}", _quantile(steps, key, q)) for q in ("p05", "p95"))
    band = (Series("5 % to 95 %", STEP, low=low, high=high, color="arm-3", group="run"),) if low and high else ()
    line = (Series("mean", STEP, y, color="arm-3", group="run"),) if y else ()
    said = unit if band else "mean"
    said = f"{length}, {said}" if id == "length" else said
    return Chart(id, title, said, meaning_of(metric, length), band + line)


def _facet(audit: Fields, columns: Columns, name: str, title: str, x_title: str, kind: str) -> Chart:
    table = rows(at(audit, "facets", name))
    table = table[inhabited(table)]
    x = columns.add(f"{name}:label", labels(table))
    log = kind != "bars"
    series = (
        pair_series(lambda p: best_kl(table, p), table, columns, prefix=name, x=x, log=log, kind=kind) if table else ()
    )
    counts = columns.add(f"{name}:words", [_words(row) for row in table]) if series else ""
    series = tuple(_with_texts(s, counts, columns, name) for s in series)
    unit = "nat, log scale" if log else "nat"
    meaning = f"Mean KL of the tokens of each bucket, as over time. {_pairs_in_words(series)}"
    return Chart(f"by-{name}", title, unit, meaning, series, log=log, x_title=x_title, categories=x)


def _trap(audit: Fields, columns: Columns) -> Chart:
    """The length trap: a gate on sums or on the worst token rejects long responses for being long."""
    table = rows(at(audit, "facets", "length"))
    curves = length_curves(tried(audit)) if table else []
    there = inhabited(table)
    curves = [(name, curve[there]) for name, curve in curves if len(curve) == len(table)]
    table = table[there]
    x = columns.add("length:label", labels(table))
    series = tuple(
        Series(name, x, columns.add(f"trap:{i}", curve), color=f"arm-{i}", dash=("solid", "dash", "dot")[i % 3], kind="points", group="", hover=".1%")
        for i, (name, curve) in enumerate(curves)
    )  # fmt: skip
    meaning = "Share of the sequences of each length that a method would have kept. A curve that falls is the length trap: long responses are rejected for their length, not for their drift per token, and training shortens the answers. Shown are the methods that depend on length most."
    return Chart(
        "trap",
        "Acceptance by response length",
        "the length trap",
        meaning,
        series,
        share=True,
        x_title=_lengths(audit),
        categories=x,
        wide=True,
        legend=True,
    )


def _lengths(audit: Fields) -> str:
    return f"response length, {length_unit(audit)}"


def _with_texts(series: Series, counts: str, columns: Columns, facet: str) -> Series:
    values = columns.held.get(series.y, [])
    words = [f"{short(v)} nat" if v is not None else "–" for v in values]
    tokens = columns.held.get(counts, [""] * len(words))
    said = [f"{w}  ({t})" if t else w for w, t in zip(words, tokens)]
    return replace(series, texts=columns.add(f"{facet}:{series.name}:words", said))


def _words(row: Fields) -> str:
    count = number(row.get("tokens"))
    return "" if count is None else f"{count:,.0f} tokens"


def _pairs_in_words(series: Iterable[Series]) -> str:
    return "; ".join(f"{s.name}: {PAIR_WORDS[s.name].split(':')[0]}" for s in series if s.name in PAIR_WORDS) + "."


def _quantile(steps: Rows, key: str, q: str) -> list[float | None]:
    return [number(at(mapping(row.get("quantiles")), key, q)) for row in steps]


def _steps(steps: Rows) -> list[float | None]:
    """The step of each row, or its place where none has a step."""
    found = numbers([row.get("step") for row in steps])
    return found if any_number(found) else [float(i) for i in range(1, len(steps) + 1)]


def _ends(row: Fields) -> str:
    low, high = number(row.get("low")), number(row.get("high"))
    if low is None and high is None:
        return "?"
    if high is None:
        return f"{low:,.0f}+"
    return f"to {high:,.0f}" if low is None else f"{low:,.0f}–{high:,.0f}"
