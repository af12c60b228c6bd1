"""The page of an audit: verdict, numbers, fix, and everything that they rest on, from `audit.json` alone.

Sequences come from strangers' logs: see `offdrift.show.html` for why none of it can run. What is
on the page is aggregates and at most twenty short windows of tokens, whatever the size of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offdrift.audit.charts import along, explorable, inhabited, labels, over_time
from offdrift.audit.heatmap import edges, heats, kl_scale, ratio_scale
from offdrift.audit.histogram import choices, histogram_chart
from offdrift.audit.method_table import METHOD_COLUMNS, tried, untried
from offdrift.audit.view import missing, unanswered
from offdrift.show.charts import DASHES, SERIES_COLORS, Chart, Columns
from offdrift.show.headline import (
    PAIRS,
    best_numbers,
    headlines,
    length_unit,
    meaning_of,
)
from offdrift.show.html import render_document, write_document
from offdrift.show.json_access import Fields, at, items, mapping, number, rows, text
from offdrift.show.numbers import flatten, short
from offdrift.show.page import SCRIPTS, STYLES, all_numbers, common_context
from offdrift.show.sanitize import clipped

FILE_NAME = "report.html"

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


def groups(charts: list[Chart]) -> list[tuple[str, str, str]]:
    """Buttons of the legend: pair of policies, color and dash."""
    drawn = {s.group for c in charts for s in c.series}
    return [(pair, SERIES_COLORS[pair], DASHES[pair]) for pair in PAIRS if pair in drawn]


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
