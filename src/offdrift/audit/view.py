"""An audit in the terminal: verdict, three numbers, what to do, and what the log cannot answer."""

from __future__ import annotations

from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from offdrift.audit.method_table import READ, TITLE, familiar, method_columns, trained_words, tried
from offdrift.judge.regime import CALM
from offdrift.show.findings import (
    OWN,
    PYTHON,
    SHELL,
    WORDS,
    footnote,
    in_order,
    safe,
    shown_view,
    verdict_of,
    verdict_view,
)
from offdrift.show.headline import Headline, count_words, headlines
from offdrift.show.json_access import Fields, at, items, mapping, number, rows, text
from offdrift.show.stacks import stack_words

FINDINGS_SHOWN = 3
BARS = "▁▂▃▄▅▆▇█"
NAME_WIDTH = 28
WIDE = 100
"""Terminal columns from which there is room for all numbers."""
ROOM = {"weight_mean": WIDE, "limited_frac": WIDE, "clipped_frac": 110}
"""Terminal columns from which a number of the method table has room; the others always have."""


OTHER_FRAMEWORK = "Settings are shown for any framework, or for offdrift's own recipes; for yours add --framework ({})."
"""Below the findings of a log whose framework is not known."""
MERGED = "Each point of the timeline covers {} steps."


def audit_view(audit: Fields, width: int = 100, *, folder: str = "") -> RenderableType:
    """Build the terminal report of `offdrift audit`, whose page is in `folder`."""
    framework = text(at(audit, "source", "framework"))
    findings = in_order(audit.get("findings"), framework)
    detected, judged_by = text(at(audit, "source", "detected")), text(audit.get("judged_by"))
    per_point, engines = number(audit.get("steps_per_point")) or 0, drawn_by(audit)
    notes = [
        (safe(judged_by), "dim"),
        (MERGED.format(f"{per_point:,.0f}") if per_point > 1 else "", "dim"),
        (f"rollout engine: {'; '.join(map(safe, engines))}" if engines else "", "dim"),
        ("\n".join(safe(x) for x in missing(audit)), "yellow"),
    ]
    parts: list[RenderableType] = [Text(safe(detected))] if detected else []
    parts.append(Text(" · ".join(count_words(audit)), style="dim"))
    parts += [Text(words, style=style) for words, style in notes if words]
    parts += [verdict_view(audit.get("verdict"), width=width), _numbers(headlines(audit), width)]
    for i, finding in enumerate(findings[:FINDINGS_SHOWN]):
        parts.append(Group(shown_view(finding, width=width, brief=i > 0, folder=folder), ""))
    served = {name for finding in findings for name, _ in finding.snippets} - {SHELL, PYTHON, OWN, "vllm"}
    if framework == "plain" and served:
        parts.append(Text(safe(OTHER_FRAMEWORK.format(", ".join(sorted(served)))), style="dim"))
    if rest := findings[FINDINGS_SHOWN:]:
        words = "; ".join(f"{WORDS[f.level][0]} {safe(f.symptom or f.cause)}" for f in rest)
        parts.append(Text(f"{len(rest)} more: {words}", style="dim"))
    if cited := footnote(findings[:FINDINGS_SHOWN]):
        parts.append(Text(cited, style="dim"))
    parts += _methods(audit, width)
    if where := invest_words(audit):
        parts.append(Text(safe(where)))
    parts += _unanswered(audit)
    if count := number(at(audit, "counts", "bad_rows")):
        first = next(iter(rows(audit.get("bad_rows"))), {})
        where = f"{text(first.get('file'))}:{text(first.get('row'))}: {text(first.get('reason'))}"
        many = "row could not be read and was" if count == 1 else "rows could not be read and were"
        words = f"{count:,.0f} {many} left out" + (f"; first {safe(where)}" if first else "")
        parts += [Text(), Text(words, style="yellow")]
    return Group(*parts)


def spark(values: tuple[float | None, ...], width: int = 24) -> str:
    """A series as a line of at most `width` blocks, from its smallest value to its largest; longer ones are averaged.

    Example:
        >>> spark((0.0, 1.0, None, 2.0)), spark((1.0, 1.0)), spark(())
        ('▁▅ █', '▁▁', '')
    """
    cut = -(-len(values) // width) or 1
    bins = [[v for v in values[i : i + cut] if v is not None] for i in range(0, len(values), cut)]
    binned = [sum(b) / len(b) if b else None for b in bins]
    levels = [v for v in binned if v is not None]
    if len(levels) < 2:
        return ""
    low, span, top = min(levels), max(levels) - min(levels), len(BARS) - 1
    return "".join(" " if v is None else BARS[round((v - low) / span * top + 1e-9) if span else 0] for v in binned)


@dataclass(frozen=True)
class Unanswered:
    """Questions that a log cannot answer, and what to log for them; each thing to log is listed once."""

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
    questions = [q for q in rows(audit.get("questions")) if not q.get("answered")]
    needed: dict[str, list[str]] = {}
    for i, q in enumerate(questions, 1):
        for part in dict.fromkeys(filter(None, text(q.get("log")).split("; "))):
            needed.setdefault(part, []).append(str(i))
    return Unanswered(
        [(text(q.get("question")), text(q.get("because"))) for q in questions],
        [(x, f"for {', '.join(n)}" if len(questions) > 1 else "") for x, n in needed.items()],
    )


def drawn_by(audit: Fields) -> list[str]:
    """Engines that sampled the responses, most used first; with its share where there are several."""
    table = rows(at(audit, "facets", "drawn_by"))
    ordered = sorted(table, key=lambda row: -(number(row.get("sequences")) or 0))
    total = sum(number(row.get("sequences")) or 0 for row in table)
    if len(table) == 1:
        return [text(ordered[0].get("label"))]
    largest = [f"{text(row.get('label'))} ({(number(row.get('sequences')) or 0) / total:.0%})" for row in ordered[:3]]
    return [*largest, f"{len(table) - 3} more"] if len(table) > 3 else largest


def missing(audit: Fields) -> list[str]:
    """Sentences on the part of the log that the audit has not read or not compared."""
    return [text(x) for k in ("sentences", "remarks") for x in items(at(audit, "coverage", k))]


def regime_words(audit: Fields) -> str:
    """The regime, and what fits it; "" where it would speak against an urgent verdict.

    Averages over a log are low while a part of it, or its end, is not.

    Example:
        >>> regime_words({"regime": {"name": "TV low, chi2 low", "meaning": "no correction is needed"},
        ...               "verdict": {"level": "act"}})
        ''
    """
    name, meaning = (text(at(audit, "regime", key)) for key in ("name", "meaning"))
    urgent = verdict_of(audit.get("verdict"))[0] in ("act", "stop")
    return "" if not name or (urgent and name == CALM) else f"Regime: {name}" + (f" ({meaning})" if meaning else "")


def invest_words(audit: Fields) -> str:
    """The larger of mismatch and staleness, in words; "" where nothing is wrong, and nothing to invest in."""
    return "" if verdict_of(audit.get("verdict"))[0] == "ok" else text(at(audit, "alphas", "sentence"))


def _numbers(tiles: list[Headline], width: int) -> RenderableType:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for justify in ("left", "right", "left", "left"):
        table.add_column(justify=justify, overflow="fold")
    for h in tiles:
        style = WORDS[h.level][2] if h.level in ("watch", "act") else "bold"
        about = Text(h.comparison or h.about, style="" if h.comparison else "dim")
        value = Text(f"{h.text} {h.unit}".rstrip(), style=style)
        table.add_row(Text(h.title), value, Text(spark(h.series, 24 if width >= WIDE else 10), style="cyan"), about)
    return Padding(table, (1, 0, 1, 0)) if tiles else Text()


def _methods(audit: Fields, width: int) -> list[RenderableType]:
    methods, suggestion = tried(audit), mapping(audit.get("suggestion"))
    parts: list[RenderableType] = []
    if methods:
        shown = familiar(methods)
        columns = [c for c in method_columns(audit) if width >= ROOM.get(c.key, 0)]
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("method", max_width=NAME_WIDTH, overflow="fold")
        for c in columns:
            table.add_column(c.short_title, justify="right", no_wrap=True)
        for m in shown:
            name = Text(safe(m.name) + (" ◂" if m.suggested else ""), style="bold green" if m.suggested else "")
            cells = [Text(m.cell(c), style="yellow" if m.flagged(c.key) else "") for c in columns]
            table.add_row(name, *cells)
        parts += [Text(f"\n{TITLE}", style="bold"), Text(READ, style="dim"), table]
        if more := len(methods) - len(shown):
            parts.append(Text(f"{more} more methods on the page", style="dim"))
    if words := trained_words(audit):
        parts.append(Text(safe(words)))
    name, why = text(suggestion.get("method")), text(suggestion.get("why"))
    if name:
        reason = f": {safe(why)}" if why else ""
        parts.append(Text.assemble(("Suggested: ", "bold green"), (safe(name), "bold"), reason))
    elif why:
        parts.append(Text.assemble(("No correction suggested: ", "bold"), safe(why)))
    if words := regime_words(audit):
        parts.append(Text(words, style="dim"))
    parts += [Text(safe(words), style="dim") for words in stack_words(audit)]
    return parts


def _unanswered(audit: Fields) -> list[RenderableType]:
    open_questions = unanswered(audit)
    count = len(open_questions.questions)
    if not count:
        return []
    parts: list[RenderableType] = [Text("\nWhat this log cannot answer", style="bold")]
    for i, (question, because) in enumerate(open_questions.questions, 1):
        mark = f"{i}." if count > 1 else "○"
        parts.append(Text.assemble(f"{mark} {safe(question)}", (f" {safe(because)}." if because else "", "dim")))
    for log, which in open_questions.log:
        words = Text.assemble((f"log {which}: " if which else "log: ", "green"), safe(log))
        parts.append(Padding(words, (0, 0, 0, 2)))
    return parts
