"""The HTML page of an audit, from `audit.json` alone.

Sequences come from other people's logs: `offdrift.show.html` says why none of them can run. The page holds aggregates
and at most twenty short windows of tokens, coloured by log-ratio, or by exact KL where the log holds it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from offdrift.audit.charts import along, choices, explorable, histogram_chart, inhabited, labels, over_time
from offdrift.audit.conclude import PAGE
from offdrift.audit.method_table import READ, TITLE, method_columns, trained_words, tried, untried
from offdrift.audit.view import drawn_by, invest_words, missing, unanswered
from offdrift.show.charts import PAIR_COLORS, PAIR_DASHES, PageColumns, chart_data, rounded
from offdrift.show.headline import PAIRS, all_numbers, best_numbers, common_context, headlines, length_unit, meaning_of
from offdrift.show.html import PAGE_BYTES, render_document, write_document
from offdrift.show.json_access import Fields, any_number, at, clipped, items, mapping, number, numbers, rows, text
from offdrift.show.numbers import KL_EDGES, duration, fixed, flatten, kl_labels, kl_level, short
from offdrift.show.stacks import stack_words

RATIO_EDGES = (0.01, 0.05, 0.2, 1.0, 3.0)
"""|log-ratio| at which the color of a token changes, nats."""
MAX_SEQUENCES, MAX_TOKENS = 20, 600
"""Sequences on the page, and tokens of each."""
SHOWN_PATHS, SHOWN_BAD_ROWS, SHOWN_TOKENS = 20, 100, 50
FACETS = {
    "length": "by response length",
    "position": "by position in the response",
    "advantage": "by sign of the advantage",
    "lag": "by policy lag",
    "token_class": "by token class",
    "worker": "by rollout worker",
    "drawn_by": "by what drew",
}
OF_FACETS = ("version_lag/mean", "worst_frac")
"""What the tables by bucket show beside drift, where it is known."""


NO_TOKEN = "not logged"
"""What stands for the token in a log that has no tokens."""


@dataclass(frozen=True)
class Heat:
    """One sequence: where it stands, its texts, and a cell for each of its tokens."""

    facts: tuple[str, ...]
    where: str
    on: str
    prompt: str
    completion: str
    cells: tuple[tuple[str, str], ...]
    """Text and color class of each token; the class is that of the log-ratio, or else of the KL."""
    ids: bool
    """Whether the cells are token ids (or places), not texts."""
    places: bool
    """Whether the log has neither: a cell is then its place in the response."""
    first: int
    turns: Mapping[int, int]
    """Number of the turn that a cell begins, by the cell's place; empty if the response is one turn."""
    hidden: int
    """Tokens of the response that are not shown."""
    numbers: tuple[tuple[float | None, float | None, float | None], ...]
    """Log-ratio, rollout's log-prob and KL of each token, nats."""

    @property
    def as_data(self) -> dict[str, Any]:
        return {
            "first": self.first,
            "ids": self.ids,
            "places": self.places,
            "on": self.on,
            "values": [list(n) for n in self.numbers],
        }


class Fact(NamedTuple):
    """A number about a sequence, and how it is written."""

    name: str
    text: str
    write: Callable[[float], str] | None = None

    def words(self, x: float) -> str:
        return self.text.format(self.write(x) if self.write else x)


FACTS = (
    Fact("step", "step {:.0f}"),
    Fact("max_abs_log_ratio", "worst |log ratio| {} nat", short),
    Fact("k3_mean", "mean k3 {} nat", short),
    Fact("reward", "reward {}", fixed),
    Fact("advantage", "advantage {}", fixed),
    Fact("length", "{:,.0f} tokens"),
)
"""What stands above the tokens of a sequence, where it is known."""


def heats(audit: Fields) -> list[Heat]:
    """The worst sequences that hold any token, in the order stored."""
    stored = rows(at(audit, "worst", "sequences"))[:MAX_SEQUENCES]
    return [heat for row in stored if (heat := _heat(row)).cells]


def ratio_class(log_ratio: float | None) -> str:
    """Color class of a log-ratio: k0 in the middle, n1 to n5 below 0, p1 to p5 above.

    Example:
        >>> ratio_class(0.0), ratio_class(-0.06), ratio_class(7.0), ratio_class(None)
        ('k0', 'n2', 'p5', 'k0')
    """
    if log_ratio is None:
        return "k0"
    level = bisect_right(RATIO_EDGES, abs(log_ratio))
    return f"{'n' if log_ratio < 0 else 'p'}{level}" if level else "k0"


def ratio_scale() -> list[tuple[str, str]]:
    """Color classes of the log-ratio with their edges as text, from the most negative to the most positive."""
    below = [(f"n{i}", f"−{edge:g}") for i, edge in reversed([*enumerate(RATIO_EDGES, 1)])]
    above = [(f"p{i}", f"+{edge:g}") for i, edge in enumerate(RATIO_EDGES, 1)]
    return [*below, ("k0", "0"), *above]


def _heat(row: Fields) -> Heat:
    ratios, logps, kls = (numbers(row.get(k))[:MAX_TOKENS] for k in ("log_ratio", "logp_rollout", "kl"))
    tokens = items(row.get("tokens"))[:MAX_TOKENS]
    count = max(len(ratios), len(kls), len(tokens))
    padded = ([None if v is None else rounded(v) for v in x] + [None] * (count - len(x)) for x in (ratios, logps, kls))
    triples = tuple(zip(*padded))
    if any_number(ratios):
        classes = [ratio_class(log_ratio) for log_ratio, _, _ in triples]
    else:
        classes = [f"k{kl_level(kl)}" for *_, kl in triples]
    first, length = int(number(row.get("first")) or 0), number(row.get("length"))
    names = [text(tokens[i]) if i < len(tokens) else f"{first + i}" for i in range(count)]
    file, line = text(row.get("file")), text(row.get("row"))
    turns = numbers(row.get("turns"))
    facts = [f.words(x) for f in FACTS if (x := number(row.get(f.name))) is not None]
    return Heat(
        facts=(*facts, *([f"{len(turns)} turns"] if len(turns) > 1 else [])),
        where=":".join(filter(None, (file, line))) if file else f"row {line}" if line else "",
        on=text(row.get("on")),
        prompt=clipped(text(row.get("prompt"))),
        completion=clipped(text(row.get("completion"))),
        cells=tuple(zip(names, classes)),
        ids=not any(isinstance(t, str) for t in tokens),
        places=not tokens,
        first=first,
        turns={int(start) - first: i for i, start in enumerate(turns, 1) if start is not None and len(turns) > 1},
        hidden=max(0, int(length or 0) - count),
        numbers=triples,
    )


def write_audit_page(audit: Mapping[str, Any], folder: Path, *, limit: float | int = PAGE_BYTES) -> Path:
    """Write `report.html` of an audit, whole or not at all, and return where it is; what the audit lacks is left out.

    Args:
        limit: bytes of the page, to which long series are thinned; math.inf keeps every point that the audit stored.

    Raises: `RecordError` if it cannot be written.
    """
    return write_document(render_audit(audit, limit=limit), folder / PAGE)


def render_audit(audit: Mapping[str, Any], *, limit: float | int = PAGE_BYTES) -> str:
    """The page of an audit as text, the same for the same audit, `limit` bytes at most."""
    time, parts = over_time(audit), along(audit)
    ratios = histogram_chart(audit.get("histograms"))
    charts, explore, sequences = [*time, ratios, *parts], explorable(audit), heats(audit)
    limits = choices(audit) if ratios.series else {}
    # Buttons of the legend of charts: pair of policies, color and dash.
    drawn = {s.group for c in charts for s in c.series}
    groups = [(pair, PAIR_COLORS[pair], PAIR_DASHES[pair]) for pair in PAIRS if pair in drawn]
    bad_rows = [
        (f"{text(b.get('file'))}:{text(b.get('row'))}", clipped(text(b.get("reason")), 600))
        for b in rows(audit.get("bad_rows"))[:SHOWN_BAD_ROWS]
    ]
    context = {
        **common_context(audit),
        "steps": [text(x) for x in items(at(audit, "verdict", "steps"))],
        "headlines": headlines(audit),
        "time": time,
        "parts": parts,
        "ratios": ratios,
        "limits": list(limits),
        "explore": list(explore),
        "groups": groups,
        **_corrections(audit),
        "sequences": sequences,
        "in_turns": any(s.turns for s in sequences),
        "has_kl": any(kl is not None for s in sequences for *_, kl in s.numbers),
        "ratio_scale": ratio_scale(),
        "kl_scale": [("k0", "less"), *((f"k{i}", label) for i, label in enumerate(kl_labels(), start=1))],
        "worst_tokens": _worst_tokens(audit),
        "facets": facet_tables(audit),
        "numbers": all_numbers(mapping(audit.get("overall")), length_unit(audit)),
        "unanswered": unanswered(audit),
        "answered": [q for q in rows(audit.get("questions")) if q.get("answered")],
        "missing": missing(audit),
        "bad_rows": bad_rows,
        "bad_count": number(at(audit, "counts", "bad_rows")) or 0,
        "provenance": provenance(audit),
        **{"certificate": (proof := mapping(audit.get("certificate"))), "certificate_fields": list(flatten(proof))},
        "alphas": alpha_rows(audit),
        "invest": invest_words(audit),
    }

    def data(columns: PageColumns) -> dict[str, Any]:
        chosen = {name: columns.series({"x": x, "y": y}) for name, (x, y) in explore.items()}
        return {
            **chart_data(charts, columns),
            "explore": chosen,
            "meanings": {name: meaning_of(name, length_unit(audit)) for name in explore},
            "limits": limits,
            "heat": [s.as_data for s in sequences],
            "heat_edges": {"ratio": list(RATIO_EDGES), "kl": list(KL_EDGES)},
        }

    return render_document("audit.html.j2", context, data=data, limit=limit)


def _corrections(audit: Fields) -> dict[str, Any]:
    """The table of corrections, how to read it, and the one that is suggested."""
    return {
        "methods": tried(audit),
        "methods_title": TITLE,
        "trained": trained_words(audit),
        "how_to_read": READ,
        "method_columns": method_columns(audit),
        "untried": untried(audit),
        "suggestion": mapping(audit.get("suggestion")),
        "settings": list(flatten(mapping(at(audit, "suggestion", "settings")))),
        "stacks": stack_words(audit),
    }


def facet_tables(audit: Fields) -> list[dict[str, Any]]:
    """The numbers behind the charts by bucket: for reading them aloud, and for copying."""
    tables = []
    for name, title in FACETS.items():
        table = rows(at(audit, "facets", name))
        table = table[inhabited(table)]
        if not table:
            continue
        metrics = [*best_numbers(table), *(name for name in OF_FACETS if any(name in row for row in table))]
        cells = [
            [f"{number(row.get(k)) or 0:,.0f}" for k in ("sequences", "tokens")]
            + [short(number(row.get(m))) for m in metrics]
            for row in table
        ]
        head = ["sequences", "tokens", *metrics]
        tables.append({"title": title, "head": head, "rows": list(zip(labels(table), cells))})
    return tables


def provenance(audit: Fields) -> list[tuple[str, str]]:
    """Rows on the origin of the numbers: files, counts, engines, fields, versions and date."""
    source = mapping(audit.get("source"))
    paths, seconds = [text(p) for p in items(source.pop("paths", None))], number(source.pop("seconds", None))
    sources = [*flatten(source), *((f"path {i}", p) for i, p in enumerate(paths[:SHOWN_PATHS], 1))]
    if len(paths) > SHOWN_PATHS:
        sources.append(("more paths", f"{len(paths) - SHOWN_PATHS:,}"))
    per_point = number(audit.get("steps_per_point")) or 0
    pairs = [
        *((k, clipped(v, 500)) for k, v in sources),
        ("read and compared in", "" if seconds is None else duration(seconds)),
        *((f"counts.{k}", v) for k, v in flatten(mapping(audit.get("counts")))),
        *((f"drawn by {i}" if i > 1 else "drawn by", engine) for i, engine in enumerate(drawn_by(audit), 1)),
        ("fields of the log", ", ".join(text(x) for x in items(audit.get("has")))),
        ("steps per point", f"{per_point:,.0f}" if per_point > 1 else ""),
        ("audited with", f"offdrift {text(audit.get('offdrift'))}".strip()),
        ("created", text(audit.get("created"))),
    ]
    return [(key, value) for key, value in pairs if value]


def alpha_rows(audit: Fields) -> list[tuple[str, list[str]]]:
    """Mismatch and staleness as the three-policy bound takes them: name, then mean, 95 %, largest and evidence."""
    table = []
    for which, name in (("mismatch", "mismatch α1 = TV(μ, π_old)"), ("staleness", "staleness α0 = TV(π_old, π)")):
        own = mapping(at(audit, "alphas", which))
        if not own:
            continue
        low, high = number(own.get("low")), number(own.get("high"))
        largest = (
            f"at least {short(low)}"
            if high is None
            else short(low)
            if low == high
            else f"{short(low)} to {short(high)}"
        )
        cells = [short(number(own.get("mean"))), short(number(own.get("p95"))), largest, text(own.get("grade"))]
        table.append((name, cells))
    return table


def _worst_tokens(audit: Fields) -> list[dict[str, Any]]:
    return [
        {
            **{k: number(row.get(k)) for k in ("step", "position", "log_ratio", "logp_rollout")},
            "token": text(row.get("token")) if row.get("token") is not None else NO_TOKEN,
            "where": f"{text(row.get('file'))}:{text(row.get('row'))}",
            "context": clipped(text(row.get("context")), 600),
        }
        for row in rows(at(audit, "worst", "tokens"))[:SHOWN_TOKENS]
    ]
