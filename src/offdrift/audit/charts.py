"""The charts of an audit over its steps, and along length, position, sign, lag and token class."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from offdrift.audit.method_table import length_curves, tried
from offdrift.judge.kl_choice import EXACT, kl_metrics
from offdrift.show.charts import PAIR_COLORS, PAIR_DASHES, Chart, Series, Values, thinned
from offdrift.show.headline import PAIR_WORDS, PAIRS, length_unit, main_pair, meaning_of
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


def over_time(audit: Fields) -> list[Chart]:
    """Everything that is drawn over the steps; charts without numbers are left out."""
    table = thinned(rows(audit.get("steps")))
    steps = _steps(table)
    charts = [
        _kl_chart(steps, table),
        _quantile_chart(audit, steps, table),
        *(_pair_chart(c, steps, table) for c in PAIR_CHARTS),
        *(_band_chart(*c, steps, table, length_unit(audit)) for c in BAND_CHARTS),
        *(_single_chart(*c, steps, table) for c in SINGLE_CHARTS),
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
    charts = [
        _facet(audit, "position", "KL by position in the response", "token", "points"),
        _trap(audit),
        _facet(audit, "length", "KL by response length", _lengths(audit), "points"),
        _facet(audit, "lag", "KL by policy lag", "updates", "points"),
        _facet(audit, "advantage", "KL by sign of the advantage", "", "bars"),
        _facet(audit, "token_class", "KL by token class", "", "bars"),
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
    return next((name for name in kl_metrics(pair, None) if any_number(column(table, name))), "")


def _kl_chart(steps: Steps, table: Rows) -> Chart:
    names = {pair: best_kl(table, pair) for pair in PAIRS}
    series = pair_series(lambda p: names[p], table, steps)
    exact = [pair for pair, name in names.items() if name and name == EXACT.get(pair)]
    grade = f"exact for {', '.join(exact)}; else k3" if exact else "k3 of the sampled tokens"
    meaning = f"KL of a token, mean over the step: {grade}. " + _pairs_in_words(series)
    lines = ((0.05, "0.05"),)
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


def _pair_chart(c: PairChart, steps: Steps, table: Rows) -> Chart:
    series = pair_series(lambda p: f"{p}/{c.metric}", table, steps)
    first = series[0].name if series else PAIRS[0]
    meaning = f"{meaning_of(f'{first}/{c.metric}')} {_pairs_in_words(series)}"
    return Chart(c.title, c.unit, series, c.id, meaning, log=c.log, share=c.share, lines=c.lines)


def _single_chart(id: str, title: str, unit: str, metric: str, steps: Steps, table: Rows) -> Chart:
    series = [Series(title, steps, column(table, metric), color="arm-6", group="run")]
    return Chart(title, unit, series, id, meaning_of(metric))


def _band_chart(id: str, title: str, unit: str, metric: str, key: str, steps: Steps, table: Rows, length: str) -> Chart:
    low, high = (_quantile(table, key, q) for q in ("p05", "p95"))
    look: dict[str, Any] = {"color": "arm-3", "group": "run"}
    series = [
        Series("5 % to 95 %", steps, low=low, high=high, **look),
        Series("mean", steps, column(table, metric), **look),
    ]
    shown = unit if any_number(low) and any_number(high) else "mean"
    return Chart(title, f"{length}, {shown}" if id == "length" else shown, series, id, meaning_of(metric, length))


def _facet(audit: Fields, name: str, title: str, x_title: str, kind: str) -> Chart:
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
    unit = "nat, log scale" if log else "nat"
    meaning = f"Mean KL of the tokens of each bucket, as over time. {_pairs_in_words(series)}"
    return Chart(title, unit, series, f"by-{name}", meaning, log=log, x_title=x_title)


def _trap(audit: Fields) -> Chart:
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


def _ends(row: Fields) -> str:
    low, high = number(row.get("low")), number(row.get("high"))
    if low is None and high is None:
        return "?"
    if high is None:
        return f"{low:,.0f}+"
    return f"to {high:,.0f}" if low is None else f"{low:,.0f}–{high:,.0f}"
