"""A finding of the check's own: by its contract "act", as none of them is repaired by a correction."""

from __future__ import annotations

from collections.abc import Mapping

from offdrift.judge import Evidence, Finding


def act_finding(
    rule: str,
    cause: str,
    symptom: str,
    *evidence: Evidence,
    explanation: str,
    fix: str,
    refuted_by: str,
    snippets: Mapping[str, str] | None = None,
) -> Finding:
    """Return a finding to act upon: the two sides differ in weights, configuration or inputs.

    Args:
        rule: its identifier, as `check.json` has it.
        cause: what the difference is in.
        symptom: the sentence that says what was seen.
        evidence: each number with the threshold that it crossed.
        explanation, fix, refuted_by: why it matters, what to do, and what would show that it is wrong.
        snippets: settings or commands, by where they belong.
    """
    return Finding(
        rule=rule,
        cause=cause,
        letter="A",
        severity="act",
        confidence="high",
        symptom=symptom,
        evidence=evidence,
        explanation=explanation,
        fix=fix,
        refuted_by=refuted_by,
        snippets={} if snippets is None else dict(snippets),
        source="check",
    )
