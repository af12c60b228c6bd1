"""`Result`: what an audit or a check found, for programs and notebooks: the content of its JSON file, read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from offdrift.judge import Evidence, Finding
from offdrift.judge.findings import URGENCY, Confidence, Relation, Scale
from offdrift.notebook import box, brief, chart, paragraph, table
from offdrift.show.findings import WORDS, in_order, verdict_of
from offdrift.show.headline import Headline
from offdrift.show.json_access import Fields, items, mapping, number, rows, text
from offdrift.texts import as_json

FINDINGS_SHOWN = 8
"""Findings that a notebook shows."""
TEXTS = ("rule", "cause", "letter", "symptom", "explanation", "fix", "refuted_by", "decides", "source", "record")
"""Fields of a finding that are free texts."""


@dataclass(frozen=True)
class Verdict:
    """The urgency of a result, and what to do."""

    level: str
    """"ok", "watch", "act" or "stop"; "interrupted"; "" where none was reached."""
    text: str
    steps: tuple[str, ...] = ()
    """What to do next, in order."""

    @staticmethod
    def of(stored: object) -> Verdict:
        """The verdict that a JSON file holds.

        Example:
            >>> str(Verdict.of({"level": "act", "text": "Correct it."}))
            'Act: Correct it.'
        """
        level, words = verdict_of(stored)
        return Verdict(level, words, tuple(map(text, items(mapping(stored).get("steps")))))

    def titled(self, name: str) -> str:
        """The verdict behind the name of what was judged.

        Example:
            >>> Verdict("act", "Correct it.").titled("Audit")
            'Audit (act): Correct it.'
        """
        return f"{name} ({self.level or 'no verdict'}): {self.text}"

    def __str__(self) -> str:
        return f"{WORDS[self.level][1]}: {self.text}"


@dataclass(frozen=True, repr=False)
class Result:
    """The result of a command, in the words of its JSON file."""

    data: Mapping[str, Any]
    """Everything, as the command prints it with --json."""

    @property
    def verdict(self) -> Verdict:
        """Its urgency, one sentence, and what to do."""
        return Verdict.of(self.data.get("verdict"))

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Every rule that fired, in the order of repair."""
        return tuple(map(finding_of, rows(self.data.get("findings"))))

    @property
    def metrics(self) -> dict[str, float]:
        """Every number over the whole, by name; what is not known is left out."""
        return numbers_of(self.data.get("overall"))

    def to_json(self, indent: int | None = None) -> str:
        """Everything as JSON, the same as the command's --json."""
        return as_json(self.data, indent)

    def _brief(self, counts: str) -> str:
        """Three lines: the verdict, how much it is about, and the causes."""
        causes = "; ".join(f.cause for f in in_order(self.data.get("findings")))
        return brief(self.verdict.titled(type(self).__name__), f"  {counts}", f"  found: {causes}" if causes else "")

    def _as_html(self, counts: str, tiles: list[Headline], *more: str) -> str:
        """Verdict, numbers with a small chart each, findings with their fix, and `more`, which is escaped already."""
        verdict = self.verdict
        sign, word, _ = WORDS[verdict.level]
        numbers = [
            (
                h.title,
                f"{h.text} {h.unit}".rstrip(),
                chart(h.series, name=f"{h.title} by step"),
                h.comparison or h.about,
            )
            for h in tiles
        ]
        findings = in_order(self.data.get("findings"))
        symptoms = [
            paragraph(f"{f.symptom} Fix: {f.fix}", strong=f"{WORDS[f.level][0]} {f.cause}.", level=f.level)
            for f in findings[:FINDINGS_SHOWN]
        ]
        if len(findings) > FINDINGS_SHOWN:
            symptoms.append(paragraph(f"{len(findings) - FINDINGS_SHOWN} more findings"))
        return box(
            paragraph(verdict.text, strong=f"{sign} {word}", level=verdict.level),
            paragraph(counts),
            table(numbers) if numbers else "",
            *symptoms,
            *more,
        )


def finding_of(stored: Fields) -> Finding:
    """The finding that a JSON file holds; what it lacks is empty."""
    evidence = tuple(
        Evidence(
            text(row.get("metric")),
            number(row.get("value")),
            _one_of(get_args(Relation), row.get("relation"), "="),
            threshold=number(row.get("threshold")),
            unit=text(row.get("unit")),
            source=text(row.get("source")),
            what=text(row.get("what")),
            scale=_one_of(get_args(Scale), row.get("scale"), "number"),
        )
        for row in rows(stored.get("evidence"))
    )
    step = number(stored.get("step"))
    return Finding(
        **{name: text(stored.get(name)) for name in TEXTS},
        severity=_one_of(URGENCY, stored.get("severity"), "info"),
        confidence=_one_of(get_args(Confidence), stored.get("confidence"), "low"),
        evidence=evidence,
        fact=stored.get("fact") is True,
        snippets={k: text(v) for k, v in mapping(stored.get("snippets")).items()},
        method=text(stored.get("method")) or None,
        step=None if step is None else int(step),
        steps=int(number(stored.get("steps")) or 0),
    )


def _one_of(choices: Sequence[Any], value: object, otherwise: Any) -> Any:
    return value if value in choices else otherwise


def numbers_of(stored: object) -> dict[str, float]:
    """The finite numbers of a mapping."""
    return {name: x for name, value in mapping(stored).items() if (x := number(value)) is not None}
