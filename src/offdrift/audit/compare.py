"""Two audits, number by number: which run drifts less, and what that changes about the methods.

A difference is judged by the direction that the metric table gives the number; nothing here says whether it is more
than noise between runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from offdrift.audit.charts import PAIR_CHARTS, bars_of, best_kl, ratio_chart, steps_of
from offdrift.audit.method_table import TITLE, MethodColumn, asked_about, method_columns, tried
from offdrift.audit.page import provenance
from offdrift.judge.kl_choice import kl_metrics
from offdrift.show.charts import Chart, Series, chart_data
from offdrift.show.findings import WORDS, footnote, in_order, safe, verdict_of
from offdrift.show.headline import (
    PAIRS,
    common_context,
    count_words,
    headlines,
    kl_metric,
    main_pair,
    meaning_of,
    thresholds,
    writer_of,
)
from offdrift.show.html import render_document, write_document
from offdrift.show.json_access import Fields, at, column, mapping, number, rows, text
from offdrift.show.numbers import never_negative, percent, short
from offdrift.stats.metrics import METRICS

SHARES = ("kept_tokens", "ess_frac", "kept_length_ratio")
"""What is compared of each method."""
SAME = 1e-9
"""Relative difference below which two numbers are the same."""
COLORS = ("arm-0", "arm-1")
DASH: tuple[Literal["solid"], Literal["dash"]] = ("solid", "dash")
METRICS_SHOWN, METHODS_SHOWN = 12, 8
"""Rows of the terminal view; the page has all."""
TELLING = ("ess_frac", "pearson", "chi2_token")
"""What stands first of the main pair of policies, after its KL."""

RUN_METRICS = (
    ("reward/mean", "Reward", ""),
    ("response/length_mean", "Response length", "tokens"),
    ("version_lag/mean", "Version lag", "updates"),
    ("optim/grad_norm", "Gradient norm", ""),
)


@dataclass(frozen=True)
class ComparedNumber:
    """One number of two runs."""

    name: str
    a: float | None
    b: float | None
    larger_is: str
    meaning: str
    write: Callable[[float | None], str]

    @property
    def difference(self) -> float | None:
        """The second run's number less the first's."""
        return None if self.a is None or self.b is None else self.b - self.a

    @property
    def winner(self) -> str:
        """ "a", "b", or "" where they are equal, or neither direction is better."""
        d = self.difference
        if d is None or self.a is None or self.b is None or self.larger_is == "neither":
            return ""
        if abs(d) <= SAME * abs(self.a) or (self.write is never_negative and max(self.a, self.b) <= 0):
            return ""
        return "b" if (d > 0) == (self.larger_is == "better") else "a"

    @property
    def change(self) -> str:
        """The difference with its sign."""
        d = self.difference
        if d is None:
            return "–"
        write = short if self.write is never_negative else self.write
        return "−" + write(-d).lstrip("−") if d < 0 else ("+" if d > 0 else "") + write(d)


def overall(a: Fields, b: Fields) -> list[ComparedNumber]:
    """Every metric that both runs have over their whole logs, the telling ones first."""
    first, second = (
        {name: x for name, value in mapping(run.get("overall")).items() if (x := number(value)) is not None}
        for run in (a, b)
    )
    pair = main_pair(a) or main_pair(b)
    telling = [
        kl_metric(first, pair, thresholds(a)),
        *(f"{pair}/{name}" for name in TELLING),
        "reward/mean",
        "response/length_mean",
    ]
    order = {name: i for i, name in enumerate(dict.fromkeys([*telling, *METRICS]))}
    names = sorted(first.keys() & second.keys(), key=lambda n: (order.get(n, len(order)), n))
    larger_is = {name: metric.larger_is for name, metric in METRICS.items()}
    return [
        ComparedNumber(
            n, first[n], second[n], larger_is=larger_is.get(n, "neither"), meaning=meaning_of(n), write=writer_of(n)
        )
        for n in names
    ]


def shares(audit: Fields) -> list[MethodColumn]:
    """The columns of the method table that are compared, in its order."""
    return [c for c in method_columns(audit) if c.key in SHARES]


def methods(a: Fields, b: Fields) -> list[tuple[str, list[ComparedNumber]]]:
    """Compare what each method would have kept of either log, and the effective sample size that remains."""
    first, second = ({m.name: m.values for m in tried(x)} for x in (a, b))
    columns = shares(a)

    def cells(name: str) -> list[ComparedNumber]:
        return [
            ComparedNumber(
                c.key, first[name][c.key], second[name][c.key], larger_is=c.better, meaning=c.meaning, write=percent
            )
            for c in columns
        ]

    return [(name, cells(name)) for name in first if name in second]


def differences(a: Fields, b: Fields) -> dict[str, Any]:
    """The comparison as plain data: metrics over the whole logs, and KL over the steps in common."""
    metric = common_kl(a, b)
    first, second = in_common(a, b, metric)
    return {
        "verdicts": {
            name: {"level": text(at(run, "verdict", "level")), "judged_by": text(run.get("judged_by"))}
            for name, run in (("a", a), ("b", b))
        },
        "kl": {"metric": metric or None, "a": first, "b": second},
        "metrics": {
            c.name: {"a": c.a, "b": c.b, "difference": c.difference, "better": c.winner or None} for c in overall(a, b)
        },
        "methods": {name: {c.name: {"a": c.a, "b": c.b} for c in cells} for name, cells in methods(a, b)},
    }


def common_kl(*audits: Fields) -> str:
    """The best measure of KL that all logs have, of the first pair of policies with one; "" for none."""
    tables = [mapping(x.get("overall")) for x in audits]
    measures = (metric for pair in PAIRS for metric in kl_metrics(pair, None, math.inf))
    return next((m for m in measures if all(number(t.get(m)) is not None for t in tables)), "")


def in_common(a: Fields, b: Fields, metric: str) -> tuple[float | None, float | None]:
    """Mean of a metric over the tokens of the steps that both runs have; over all where none is common.

    A run that went on longer has had more time to drift.
    """
    tables = [rows(x.get("steps")) for x in (a, b)]
    steps = [[s for s in column(t, "step") if s is not None] for t in tables]
    if all(steps):
        low, high = max(map(min, steps)), min(map(max, steps))
        means = []
        for table in tables:
            inside = [r for r in table if (s := number(r.get("step"))) is not None and low <= s <= high]
            pairs = [(v, number(r.get("tokens")) or 1.0) for r in inside if (v := number(r.get(metric))) is not None]
            if pairs:
                means.append(sum(v * n for v, n in pairs) / sum(n for _, n in pairs))
        if len(means) == 2:
            return means[0], means[1]
    first, second = (number(mapping(x.get("overall")).get(metric)) for x in (a, b))
    return first, second


def sentence(a: Fields, b: Fields, names: tuple[str, str]) -> str:
    """Sum up the comparison in one sentence, by the best KL measure that both runs have."""
    metric = common_kl(a, b)
    x, y = in_common(a, b, metric)
    if x is None or y is None:
        return "The two logs have no measure of drift in common."
    if abs(x - y) <= SAME * max(x, y):
        return f"Both runs have the same KL per token ({metric}): {short(x)} nat."
    (low, name), (high, _) = sorted([(x, names[0]), (y, names[1])])
    times = high / low if low > 0 else 0.0  # three digits, and no exponent up to a million
    times_text = f"{float(f'{times:.3g}'):,.0f}" if 100 <= times < 1e6 else f"{times:.3g}"
    factor = f", a factor of {times_text}" if times else ""
    return (
        f"{name} drifts less: over the steps in common its KL per token ({metric}) is {short(low)} nat against "
        f"{short(high)} nat{factor}."
    )


def write_comparison(a: Mapping[str, Any], b: Mapping[str, Any], names: tuple[str, str], path: Path) -> Path:
    """Write two audits side by side as one page at `path`, whole or not at all, and return where it is.

    Raises: `RecordError` if it cannot be written.
    """
    return write_document(render_comparison(a, b, names), path)


def render_comparison(a: Mapping[str, Any], b: Mapping[str, Any], names: tuple[str, str]) -> str:
    """The page as text, the same for the same audits."""
    charts = [c for c in _charts((a, b), names) if c.series]
    context = {
        **common_context(a),
        "title": f"{names[0]} and {names[1]}",
        "sentence": sentence(a, b, names),
        "names": names,
        "runs": [
            {
                **dict(zip(("level", "verdict"), verdict_of(x.get("verdict")))),
                "findings": found,
                "footnote": footnote(found),
                "headlines": headlines(x),
                "provenance": provenance(x),
                "counts": count_words(x),
                "judged_by": text(x.get("judged_by")),
            }
            for side, x in (("first", a), ("second", b))
            for found in [in_order(x.get("findings"), text(at(x, "source", "framework")), f"{side}-finding")]
        ],
        "compared": overall(a, b),
        "methods": methods(a, b),
        "methods_title": TITLE,
        "shares": shares(a),
        "charts": charts,
        "colors": list(zip(names, COLORS, DASH, ("a", "b"))),
    }
    return render_document("compare.html.j2", context, data=lambda columns: chart_data(charts, columns))


def _charts(audits: tuple[Fields, Fields], names: tuple[str, str]) -> list[Chart]:
    """KL of every pair, more of the first pair, the run's own numbers, and the ratios of every pair."""
    tables = [rows(x.get("steps")) for x in audits]

    def over_time(id: str, title: str, unit: str, *metrics: str) -> Chart:
        series = [
            Series(names[i], column(table, "step"), column(table, metric), color=COLORS[i], dash=DASH[i], group="ab"[i])
            for i, (metric, table) in enumerate(zip(metrics, tables, strict=True))
        ]
        share, log = unit == "share", "log scale" in unit
        return Chart(title, unit, series, id, meaning_of(metrics[0]), log=log, share=share)

    pairs = [p for p in PAIRS if all(best_kl(table, p) for table in tables)]
    return [
        *(
            over_time(f"kl-{p}", f"KL per token, {p}", "nat, log scale", *(best_kl(t, p) for t in tables))
            for p in pairs
        ),
        *(
            over_time(f"{c.metric}-{p}", f"{c.title}, {p}", "share" if c.share else c.unit, *[f"{p}/{c.metric}"] * 2)
            for p in pairs[:1]
            for c in PAIR_CHARTS[:4]
        ),
        *(over_time(m.replace("/", "-"), t, u, m, m) for m, t, u in RUN_METRICS),
        *(_ratios(pair, audits, names) for pair in PAIRS),
    ]


def _ratios(pair: str, audits: tuple[Fields, Fields], names: tuple[str, str]) -> Chart:
    outlines = []
    for i, audit in enumerate(audits):
        if bars := bars_of(mapping(at(audit, "histograms", pair))):
            outlines.append((steps_of(names[i], bars, color=COLORS[i], group="ab"[i], dash=DASH[i]), bars))
    meaning = "Distribution of each run's tokens over probability ratios; both axes are logarithmic."
    return ratio_chart(f"ratios-{pair}", f"Ratios of the sampled tokens, {pair}", meaning, outlines)


def comparison_view(
    a: Mapping[str, Any], b: Mapping[str, Any], names: tuple[str, str], width: int = 100
) -> RenderableType:
    """Two audits side by side in the terminal: verdicts, the telling numbers, the familiar methods."""
    parts: list[RenderableType] = [Text(safe(sentence(a, b, names)), style="bold"), Text()]
    for name, audit in zip(names, (a, b)):
        level, words = verdict_of(audit.get("verdict"))
        sign, word, style = WORDS[level]
        parts.append(Text.assemble((f"{safe(name)}  ", "bold"), (f"{sign} {word}  ", style), safe(words)))
        facts = [*count_words(audit), safe(text(audit.get("judged_by")))]
        parts.append(Text(" · ".join(filter(None, facts)), style="dim"))
    if numbers := overall(a, b)[:METRICS_SHOWN]:
        table, most = Table(box=box.SIMPLE_HEAD, pad_edge=False), max(12, (width - 50) // 2)
        table.add_column("over the whole log", overflow="fold")
        for name in map(safe, names):
            short_name = name if len(name) <= most else f"…{name[1 - most :]}"
            table.add_column(Text(short_name), justify="right", no_wrap=True)
        table.add_column("difference", justify="right", no_wrap=True)
        for c in numbers:
            cells = [Text(c.write(v), style="green" if c.winner == w else "") for v, w in ((c.a, "a"), (c.b, "b"))]
            table.add_row(Text(safe(c.name)), *cells, c.change)
        parts.append(table)
    compared = methods(a, b)
    familiar = asked_about(name for name, _ in compared)
    if shown := ([row for row in compared if row[0] in familiar] or compared)[:METHODS_SHOWN]:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("method", min_width=24, overflow="fold")
        for c in shares(a):
            table.add_column(c.short_title, justify="right", overflow="fold")
        for name, cells in shown:
            table.add_row(Text(safe(name)), *(f"{c.write(c.a)} → {c.write(c.b)}" for c in cells))
        table.caption = Text(f"{safe(names[0])} → {safe(names[1])}", style="dim")
        table.caption_justify = "left"
        parts.append(table)
    return Group(*parts)
