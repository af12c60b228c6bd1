"""An audit in the terminal: verdict, three numbers, what to do, and what the log cannot answer."""

from __future__ import annotations

from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from offdrift.audit.method_table import METHOD_COLUMNS, Tried, familiar, tried
from offdrift.show.findings import WORDS, in_order, safe, shown_view, verdict_view
from offdrift.show.headline import Headline, headlines
from offdrift.show.json_access import Fields, at, items, mapping, number, rows, text
from offdrift.show.page import count_words

FINDINGS_SHOWN = 3
BARS = "▁▂▃▄▅▆▇█"
NAME_WIDTH = 28
WIDE = 100
"""Terminal columns from which there is room for all numbers."""


def audit_view(audit: Fields, width: int = 100) -> RenderableType:
    """What `offdrift audit` prints at its end.

    Args:
        audit: content of `audit.json`.
        width: columns of the terminal.
    """
    framework = text(at(audit, "source", "framework"))
    findings = in_order(audit.get("findings"), framework)
    parts: list[RenderableType] = [
        _source(audit),
        *_missing(audit),
        verdict_view(audit.get("verdict"), width=width),
        _numbers(headlines(audit), width),
        *(_spaced(shown_view(f, width=width, brief=i > 0)) for i, f in enumerate(findings[:FINDINGS_SHOWN])),
    ]
    if len(findings) > FINDINGS_SHOWN:
        rest = findings[FINDINGS_SHOWN:]
        words = "; ".join(f"{WORDS[f.level][0]} {safe(f.symptom or f.cause)}" for f in rest)
        parts.append(Text(f"{len(rest)} more: {words}", style="dim"))
    parts += _methods(audit, width)
    parts += _unanswered(audit)
    parts += _bad_rows(audit)
    return Group(*parts)


def spark(values: tuple[float | None, ...], width: int = 24) -> str:
    """A series as a line of blocks, from its smallest value to its largest.

    Args:
        width: characters at most; longer series are averaged.

    Example:
        >>> spark((0.0, 1.0, None, 2.0)), spark((1.0, 1.0)), spark(())
        ('▁▅ █', '▁▁', '')
    """
    binned = _averaged(values, width)
    known = [v for v in binned if v is not None]
    if len(known) < 2:
        return ""
    low, span = min(known), max(known) - min(known)
    top = len(BARS) - 1
    return "".join(" " if v is None else BARS[round((v - low) / span * top + 1e-9) if span else 0] for v in binned)


@dataclass(frozen=True)
class Unanswered:
    """What a log cannot answer, and each thing to log for it once, with the questions it is for."""

    questions: list[tuple[str, str]]
    """Question, and why it is open."""
    log: list[tuple[str, str]]
    """What to log, and the numbers of the questions that need it; "" where there is one question."""


def unanswered(audit: Fields) -> Unanswered:
    """The open questions of an audit, and what to log.

    Example:
        >>> rows = [{"question": "A?", "log": "x; y"}, {"question": "B?", "log": "y"}]
        >>> unanswered({"questions": rows}).log
        [('x', 'for 1'), ('y', 'for 1, 2')]
    """
    found = [q for q in rows(audit.get("questions")) if not q.get("answered")]
    needed: dict[str, list[str]] = {}
    for i, q in enumerate(found, 1):
        for part in dict.fromkeys(filter(None, text(q.get("log")).split("; "))):
            needed.setdefault(part, []).append(str(i))
    return Unanswered(
        [(text(q.get("question")), text(q.get("because"))) for q in found],
        [(x, f"for {', '.join(n)}" if len(found) > 1 else "") for x, n in needed.items()],
    )


def _source(audit: Fields) -> RenderableType:
    said = text(at(audit, "source", "detected"))
    return Group(*([Text(safe(said))] if said else []), Text(" · ".join(count_words(audit)), style="dim"))


def missing(audit: Fields) -> list[str]:
    """What an audit has not seen of its log, in sentences."""
    return [text(x) for k in ("said", "remarks") for x in items(at(audit, "coverage", k))]


def _missing(audit: Fields) -> list[RenderableType]:
    said = missing(audit)
    return [Text("\n".join(safe(x) for x in said), style="yellow")] if said else []


def _numbers(found: list[Headline], width: int) -> RenderableType:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for justify in ("left", "right", "left", "left"):
        table.add_column(justify=justify, overflow="fold")
    for h in found:
        style = WORDS[h.level][2] if h.level in ("watch", "act") else "bold"
        about = Text(h.comparison or h.about, style="" if h.comparison else "dim")
        value = Text(f"{h.text} {h.unit}".rstrip(), style=style)
        table.add_row(Text(h.title), value, Text(spark(h.series, 24 if width >= WIDE else 10), style="cyan"), about)
    return Padding(table, (1, 0, 1, 0)) if found else Text()


def _methods(audit: Fields, width: int) -> list[RenderableType]:
    methods = tried(audit)
    suggestion = mapping(audit.get("suggestion"))
    parts: list[RenderableType] = []
    if methods:
        parts += [_heading("What methods would have done"), _method_table(familiar(methods), width)]
        more = len(methods) - len(familiar(methods))
        parts += [Text(f"{more} more in the page", style="dim")] if more else []
    name, why = text(suggestion.get("method")), text(suggestion.get("why"))
    if name:
        parts.append(
            Text.assemble(("Suggested: ", "bold green"), (safe(name), "bold"), f": {safe(why)}" if why else "")
        )
    return parts


def _method_table(methods: list[Tried], width: int) -> Table:
    wide = width >= WIDE
    columns = [c for c in METHOD_COLUMNS if wide or c.key not in ("weight_mean", "limited_frac")]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("method", max_width=NAME_WIDTH, overflow="fold")
    for c in columns:
        table.add_column(c.short_title, justify="right", no_wrap=True)
    for m in methods:
        name = Text(safe(m.name) + (" ◂" if m.suggested else ""), style="bold green" if m.suggested else "")
        cells = [Text(c.write(m.values[c.key]), style="yellow" if m.flagged(c.key) else "") for c in columns]
        table.add_row(name, *cells)
    return table


def _unanswered(audit: Fields) -> list[RenderableType]:
    found = unanswered(audit)
    if not found.questions:
        return []
    parts: list[RenderableType] = [_heading("What this log cannot answer")]
    for i, (question, because) in enumerate(found.questions, 1):
        mark = f"{i}." if len(found.questions) > 1 else "○"
        why = (f" {safe(because)}.", "dim") if because else ""
        parts.append(Text.assemble(f"{mark} {safe(question)}", why))
    for log, which in found.log:
        words = Text.assemble(("log: ", "green"), safe(log), (f" ({which})" if which else "", "dim"))
        parts.append(Padding(words, (0, 0, 0, 2)))
    return parts


def _bad_rows(audit: Fields) -> list[RenderableType]:
    count = number(at(audit, "counts", "bad_rows"))
    if not count:
        return []
    first = next(iter(rows(audit.get("bad_rows"))), {})
    where = f"{text(first.get('file'))}:{text(first.get('row'))}: {text(first.get('reason'))}"
    words = (
        f"{count:,.0f} row{'' if count == 1 else 's'} could not be read and {'was' if count == 1 else 'were'} left out"
    )
    return [Text(), Text(words + (f"; first {safe(where)}" if first else ""), style="yellow")]


def _heading(words: str) -> Text:
    return Text(f"\n{words}", style="bold")


def _spaced(what: RenderableType) -> RenderableType:
    return Padding(what, (0, 0, 1, 0))


def _averaged(values: tuple[float | None, ...], width: int) -> list[float | None]:
    cut = -(-len(values) // width) or 1
    bins = [[v for v in values[i : i + cut] if v is not None] for i in range(0, len(values), cut)]
    return [sum(b) / len(b) if b else None for b in bins]
