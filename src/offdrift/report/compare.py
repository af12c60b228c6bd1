"""Two audits side by side: as a page, with series and histograms overlaid, and in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from offdrift.report.audit_charts import best_kl
from offdrift.report.audit_page import SCRIPTS, STYLES, common_context, provenance
from offdrift.report.audit_terminal import count_words
from offdrift.report.comparison import SHARES, Compared, familiar, methods, overall, sentence
from offdrift.report.comparison import differences as differences
from offdrift.report.document import render_document, write_document
from offdrift.report.fields import Fields, at, column, mapping, rows, text
from offdrift.report.findings import WORDS, in_order, safe, verdict_of
from offdrift.report.headline import PAIRS, headlines, meaning_of
from offdrift.report.histogram import axis, bars_of, steps_of
from offdrift.report.plots import Chart, Columns, Series

COLORS, DASH = ("arm-0", "arm-1"), ("solid", "dash")
METRICS_SHOWN, METHODS_SHOWN = 12, 8
"""Rows of the terminal view; the page has all."""

OVER_TIME = (
    ("ess_frac", "Effective sample size", "share", False),
    ("chi2_token", "χ² of token weights", "log scale", True),
    ("pearson", "Correlation of probabilities", "", False),
    ("abs_log_ratio_max", "Worst token, |log ratio|", "nat, log scale", True),
)
ALWAYS = (
    ("reward/mean", "Reward", ""),
    ("response/length_mean", "Response length", "tokens"),
    ("version_lag/mean", "Version lag", "updates"),
    ("optim/grad_norm", "Gradient norm", ""),
)


def write_comparison(
    a: Mapping[str, Any], b: Mapping[str, Any], names: tuple[str, str], path: Path
) -> Path:
    """Write two audits side by side as one page, whole or not at all, and say where it is.

    Args:
        a, b: contents of two `audit.json`.
        names: what the runs are called.
        path: the page, `compare.html` or what you like.

    Raises: `RecordError` if it cannot be written.
    """
    return write_document(render_comparison(a, b, names), path)


def render_comparison(a: Mapping[str, Any], b: Mapping[str, Any], names: tuple[str, str]) -> str:
    """The page as text, the same for the same audits."""
    columns = Columns()
    charts = [c for c in _charts((a, b), names, columns) if c.series]
    context = {
        **common_context(a),
        "title": f"{names[0]} and {names[1]}",
        "sentence": sentence(a, b, names),
        "names": names,
        "runs": [_run(x) for x in (a, b)],
        "compared": overall(a, b),
        "methods": methods(a, b),
        "shares": SHARES,
        "charts": charts,
        "colors": list(zip(names, COLORS, DASH, ("a", "b"))),
    }
    data = {"charts": [c.as_dict() for c in charts], "columns": columns.used(charts)}
    return render_document("compare.html.j2", context, data=data, scripts=SCRIPTS, styles=STYLES)


def _run(audit: Fields) -> dict[str, Any]:
    framework = text(at(audit, "source", "framework"))
    level, words = verdict_of(audit.get("verdict"))
    return {
        "level": level,
        "verdict": words,
        "findings": in_order(audit.get("findings"), framework),
        "headlines": headlines(audit),
        "provenance": provenance(audit),
        "counts": count_words(audit),
    }


def _charts(audits: tuple[Fields, Fields], names: tuple[str, str], columns: Columns) -> list[Chart]:
    steps = [rows(x.get("steps")) for x in audits]
    for i, table in enumerate(steps):
        columns.add(f"step:{i}", column(table, "step"))
    pairs = [p for p in PAIRS if all(best_kl(s, p) for s in steps)]
    charts = [
        _over_time(f"kl-{p}", f"KL per token, {p}", "nat, log scale", [best_kl(s, p) for s in steps], steps, names, columns, log=True)
        for p in pairs
    ]  # fmt: skip
    for pair in pairs[:1]:
        charts += [
            _over_time(f"{metric}-{pair}", f"{title}, {pair}", unit, [f"{pair}/{metric}"] * 2, steps, names, columns, log=log, share=metric == "ess_frac")
            for metric, title, unit, log in OVER_TIME
        ]  # fmt: skip
    charts += [
        _over_time(metric.replace("/", "-"), title, unit, [metric] * 2, steps, names, columns)
        for metric, title, unit in ALWAYS
    ]
    return [*charts, *(_ratios(pair, audits, names, columns) for pair in PAIRS)]


def _over_time(
    id: str,
    title: str,
    unit: str,
    metrics: list[str],
    steps: list[list[dict[str, Any]]],
    names: tuple[str, str],
    columns: Columns,
    *,
    log: bool = False,
    share: bool = False,
) -> Chart:
    add = columns.add_positive if log else columns.add
    found = []
    for i, (metric, table) in enumerate(zip(metrics, steps)):
        y = add(f"{i}:{metric}", column(table, metric))
        if y:
            found.append(Series(names[i], f"step:{i}", y, color=COLORS[i], dash=DASH[i], group="ab"[i]))  # fmt: skip
    return Chart(id, title, unit, meaning_of(metrics[0]), tuple(found), log=log, share=share)


def _ratios(
    pair: str, audits: tuple[Fields, Fields], names: tuple[str, str], columns: Columns
) -> Chart:
    found, reach = [], 0.0
    for i, audit in enumerate(audits):
        bars = bars_of(mapping(at(audit, "histograms", pair)))
        if bars:
            series = steps_of(names[i], bars, columns, color=COLORS[i], key=f"{pair}:{i}")
            found.append(replace(series, group="ab"[i], dash=DASH[i]))
            reach = max(reach, abs(bars[0][0]), abs(bars[-1][1]))
    meaning = "How large a share of each run's tokens has which ratio of probabilities; both axes are logarithmic."  # fmt: skip
    return Chart(f"ratios-{pair}", f"Ratios of the sampled tokens, {pair}", "log scale", meaning, tuple(found), log=True, x_title="ratio", wide=True, layout=axis(reach))  # fmt: skip


# -- in the terminal --------------------------------------------------------------------------


def comparison_view(
    a: Mapping[str, Any], b: Mapping[str, Any], names: tuple[str, str], width: int = 100
) -> RenderableType:
    """Two audits side by side in the terminal: verdicts, the telling numbers, the familiar methods.

    Args:
        a, b: contents of two `audit.json`.
        names: what the runs are called.
        width: columns of the terminal.
    """
    parts: list[RenderableType] = [Text(safe(sentence(a, b, names)), style="bold"), Text()]
    for name, audit in zip(names, (a, b)):
        level, words = verdict_of(audit.get("verdict"))
        sign, word, style = WORDS[level]
        parts.append(Text.assemble((f"{safe(name)}  ", "bold"), (f"{sign} {word}  ", style), safe(words)))  # fmt: skip
        parts.append(Text(" · ".join(count_words(audit)), style="dim"))
    numbers, tried_on = overall(a, b)[:METRICS_SHOWN], familiar(methods(a, b))[:METHODS_SHOWN]
    if numbers:
        parts.append(_numbers_table(numbers, names, width))
    if tried_on:
        parts.append(_methods_table(tried_on, names))
    return Group(*parts)


def _numbers_table(found: list[Compared], names: tuple[str, str], width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    most = max(12, (width - 50) // 2)
    table.add_column("over the whole log", overflow="fold")
    for name in names:
        table.add_column(Text(_short_name(name, most)), justify="right", no_wrap=True)
    table.add_column("difference", justify="right", no_wrap=True)
    for c in found:
        cells = [Text(c.write(v), style="green" if c.winner == w else "") for v, w in ((c.a, "a"), (c.b, "b"))]  # fmt: skip
        table.add_row(Text(safe(c.name)), *cells, c.change)
    return table


def _methods_table(found: list[tuple[str, list[Compared]]], names: tuple[str, str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("method", min_width=24, overflow="fold")
    for shown in SHARES:
        table.add_column(shown.short_title, justify="right", overflow="fold")
    for name, cells in found:
        table.add_row(Text(safe(name)), *(f"{c.write(c.a)} → {c.write(c.b)}" for c in cells))
    table.caption = Text(f"{safe(names[0])} → {safe(names[1])}", style="dim")
    table.caption_justify = "left"
    return table


def _short_name(name: str, most: int) -> str:
    words = safe(name)
    return words if len(words) <= most else f"…{words[1 - most :]}"
