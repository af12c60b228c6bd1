"""The page of an audit: verdict, numbers, fix, and everything that they rest on, from `audit.json` alone.

Sequences come from strangers' logs: see `offdrift.report.document` for why none of it can run. What is
on the page is aggregates and at most twenty short windows of tokens, whatever the size of the run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from offdrift.report.audit_charts import along, explorable, inhabited, labels, over_time
from offdrift.report.audit_methods import METHOD_COLUMNS, tried, untried
from offdrift.report.audit_terminal import count_words, missing, unanswered
from offdrift.report.document import render_document, write_document
from offdrift.report.fields import Fields, at, items, mapping, rows, text
from offdrift.report.findings import WORDS, in_order, verdict_of
from offdrift.report.headline import (
    PAIR_WORDS,
    PAIRS,
    best_numbers,
    headlines,
    length_unit,
    meaning_of,
    unit_of,
)
from offdrift.report.heatmap import clipped, edges, heats, kl_scale, ratio_scale
from offdrift.report.histogram import histogram_chart
from offdrift.report.limits import choices
from offdrift.report.page import flatten
from offdrift.report.plots import DASHES, SERIES_COLORS, Chart, Columns
from offdrift.report.stored import number
from offdrift.report.table import short
from offdrift.stats.summary import METRICS

FILE_NAME = "report.html"
STYLES = ("page.css", "views.css")
SCRIPTS = ("common.js", "views.js")

FACETS = {
    "length": "by response length",
    "position": "by position in the response",
    "advantage": "by sign of the advantage",
    "lag": "by policy lag",
    "token_class": "by token class",
}
SHOWN_PATHS, SHOWN_BAD_ROWS, SHOWN_TOKENS = 20, 100, 50


def write_audit_page(audit: Mapping[str, Any], folder: Path) -> Path:
    """Write `report.html` of an audit, whole or not at all, and say where it is.

    Args:
        audit: content of `audit.json`; what it lacks is left out.
        folder: where the page goes.

    Raises: `RecordError` if it cannot be written.
    """
    return write_document(render_audit(audit), folder / FILE_NAME)


def render_audit(audit: Mapping[str, Any]) -> str:
    """The page of an audit as text, the same for the same audit."""
    columns = Columns()
    time, parts = over_time(audit, columns), along(audit, columns)
    ratios = histogram_chart(audit.get("histograms"), columns)
    explore = explorable(audit, columns)
    charts = [*time, *([ratios] if ratios.series else []), *parts]
    sequences = heats(audit)
    limits = choices(audit) if ratios.series else {}
    context = {
        **common_context(audit),
        "headlines": headlines(audit),
        "time": time,
        "parts": parts,
        "ratios": ratios,
        "limits": list(limits),
        "explore": list(explore),
        "groups": groups(charts),
        "methods": tried(audit),
        "method_columns": METHOD_COLUMNS,
        "untried": untried(audit),
        "suggestion": mapping(audit.get("suggestion")),
        "settings": list(flatten(mapping(at(audit, "suggestion", "settings")))),
        "sequences": sequences,
        "has_kl": any(kl is not None for s in sequences for *_, kl in s.numbers),
        "ratio_scale": ratio_scale(),
        "kl_scale": kl_scale(),
        "worst_tokens": _worst_tokens(audit),
        "facets": facet_tables(audit),
        "numbers": all_numbers(mapping(audit.get("overall")), length_unit(audit)),
        "unanswered": unanswered(audit),
        "answered": [q for q in rows(audit.get("questions")) if q.get("answered")],
        "missing": missing(audit),
        "bad_rows": _bad_rows(audit),
        "bad_count": number(at(audit, "counts", "bad_rows")) or 0,
        "provenance": provenance(audit),
        "certificate": mapping(audit.get("certificate")),
        "certificate_fields": list(flatten(mapping(audit.get("certificate")))),
    }
    data = {
        "charts": [c.as_dict() for c in charts],
        "columns": {**columns.used(charts), **{c: columns.held[c] for c in explore.values()}},
        "explore": explore,
        "meanings": {name: meaning_of(name, length_unit(audit)) for name in explore},
        "limits": limits,
        "heat": [s.as_data for s in sequences],
        "heat_edges": edges(),
    }
    return render_document("audit.html.j2", context, data=data, scripts=SCRIPTS, styles=STYLES)


def common_context(fields: Fields) -> dict[str, Any]:
    """What the pages of an audit and of a check show alike."""
    framework = text(at(fields, "source", "framework"))
    level, words = verdict_of(fields.get("verdict"))
    return {
        "verdict": words,
        "level": level,
        "words": WORDS,
        "findings": in_order(fields.get("findings"), framework),
        "counts": count_words(fields),
        "created": text(fields.get("created")),
        "version": text(fields.get("offdrift")),
        "framework": framework,
        "title": title_of(fields),
        "pair_words": PAIR_WORDS,
    }


def title_of(audit: Fields) -> str:
    """What the log is called: its file, or the folder that all of its files are in.

    Example:
        >>> title_of({"source": {"paths": ["runs/a/log/0.parquet", "runs/a/log/1.parquet"]}})
        'a/log'
    """
    paths = [PurePath(text(p)) for p in items(at(audit, "source", "paths"))]
    if not paths:
        return "a log"
    alone = len(paths) == 1 or len({p.anchor for p in paths}) > 1
    name = paths[0] if alone else PurePath(os.path.commonpath([p.parent for p in paths]))
    return clipped("/".join(name.parts[-2:]) or str(paths[0]), 200)


def groups(charts: list[Chart]) -> list[tuple[str, str, str]]:
    """Buttons of the legend: pair of policies, color and dash."""
    drawn = {s.group for c in charts for s in c.series}
    return [(pair, SERIES_COLORS[pair], DASHES[pair]) for pair in PAIRS if pair in drawn]


def all_numbers(overall: Fields, length: str = "token") -> list[dict[str, str]]:
    """Every metric of the whole log with unit, formula and better direction, in the table's order.

    Args:
        length: what lengths of responses are counted in.
    """
    order = {name: i for i, name in enumerate(METRICS)}
    better = {"worse": "lower", "better": "higher", "neither": ""}
    found = []
    for name in sorted(overall, key=lambda n: (order.get(n, len(order)), n)):
        value, row = number(overall[name]), METRICS.get(name)
        found.append({
            "name": name, "value": short(value), "sort": "" if value is None else repr(value),
            "unit": unit_of(name, length), "formula": row.formula if row else "",
            "better": better[row.larger_is] if row else "",
        })  # fmt: skip
    return found


def facet_tables(audit: Fields) -> list[dict[str, Any]]:
    """The numbers behind the charts by bucket: for reading them aloud, and for copying."""
    found = []
    for name, title in FACETS.items():
        table = rows(at(audit, "facets", name))
        table = table[inhabited(table)]
        if not table:
            continue
        metrics = best_numbers(table)
        cells = [
            [f"{number(row.get(k)) or 0:,.0f}" for k in ("sequences", "tokens")]
            + [short(number(row.get(m))) for m in metrics]
            for row in table
        ]
        found.append({"title": title, "head": ["sequences", "tokens", *metrics], "rows": list(zip(labels(table), cells))})  # fmt: skip
    return found


def provenance(audit: Fields) -> list[tuple[str, str]]:
    """Where the numbers come from: what was read, with what, when."""
    source = mapping(audit.get("source"))
    paths = [text(p) for p in items(source.pop("paths", None))]
    found = [*flatten(source), *((f"path {i}", p) for i, p in enumerate(paths[:SHOWN_PATHS], 1))]
    if len(paths) > SHOWN_PATHS:
        found.append(("more paths", f"{len(paths) - SHOWN_PATHS:,}"))
    counts = [(f"counts.{k}", v) for k, v in flatten(mapping(audit.get("counts")))]
    has = ", ".join(text(x) for x in items(audit.get("has")))
    per_point = number(audit.get("steps_per_point"))
    told = [
        *((k, clipped(v, 500)) for k, v in found),
        *counts,
        *([("fields of the log", has)] if has else []),
        *([("steps per point", f"{per_point:,.0f}")] if per_point and per_point > 1 else []),
        ("audited with", f"offdrift {text(audit.get('offdrift'))}".strip()),
        ("created", text(audit.get("created"))),
    ]
    return [(key, value) for key, value in told if value]


def _bad_rows(audit: Fields) -> list[tuple[str, str]]:
    """Where each stands, and why it could not be read."""
    found = rows(audit.get("bad_rows"))[:SHOWN_BAD_ROWS]
    return [(f"{text(b.get('file'))}:{text(b.get('row'))}", clipped(text(b.get("reason")), 600)) for b in found]  # fmt: skip


def _worst_tokens(audit: Fields) -> list[dict[str, Any]]:
    found = []
    for row in rows(at(audit, "worst", "tokens"))[:SHOWN_TOKENS]:
        numbers = {k: number(row.get(k)) for k in ("step", "position", "log_ratio", "logp_rollout")}
        found.append({
            **numbers,
            "token": text(row.get("token")),
            "where": f"{text(row.get('file'))}:{text(row.get('row'))}",
            "context": clipped(text(row.get("context")), 600),
        })  # fmt: skip
    return found
