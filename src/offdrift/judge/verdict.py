"""`verdict`: all findings in one word and one or two sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offdrift.judge.findings import URGENCY, Finding, Row, number
from offdrift.judge.kl_choice import kl_metrics
from offdrift.judge.rules import load_rules


def verdict(
    findings: Sequence[Finding],
    numbers: Row | None = None,
    *,
    missing: Sequence[str] = (),
    limits: Mapping[str, float] | None = None,
) -> dict[str, str]:
    """The level, "ok", "watch", "act" or "stop", and what to tell a person.

    The level is that of the most urgent finding. The text tells it, and the one to repair first: a
    reward that collapsed is urgent, and is mended by its cause.

    Args:
        numbers: metrics of the run; named where nothing is wrong.
        missing: sentences on what these findings have not seen; the first stands before the rest.
        limits: thresholds by name (`Rules.limits`), if not the built-in ones.

    Example:
        >>> verdict([], {"mismatch/pearson": 0.9995, "mismatch/k1": 0.001})["text"]
        'No drift that matters: Pearson correlation 0.9995, KL 0.001 nat per token.'
    """
    shown = [f for f in findings if f.severity != "info"]
    if not shown:
        text = f"No drift that matters{_agreement(numbers or {}, (limits or load_rules().limits)['ratio_mean_z'])}."
        return {"level": "ok", "text": " ".join([*missing[:1], text])}
    first, urgent = shown[0], min(shown, key=lambda f: URGENCY.index(f.severity))
    lead = "" if urgent.severity == first.severity else f"{urgent.symptom} Repair first: "
    others = len(shown) - (2 if lead else 1)
    more = f" {others} more finding{'s' * (others > 1)}." if others else ""
    return {"level": urgent.severity, "text": " ".join([*missing[:1], f"{lead}{first.symptom} {first.fix}{more}"])}


def _agreement(numbers: Row, limit: float) -> str:
    """Correlation, KL and chi2 of the first pair of policies that has any of them."""
    for on in ("mismatch", "full", "staleness"):
        rows = (
            ("Pearson correlation {:.4f}", (f"{on}/pearson",)),
            ("KL {:.4g} nat per token", kl_metrics(on, number(numbers, f"{on}/ratio_mean_z"), limit)),
            ("chi2 {:.3g}", (f"{on}/chi2_token",)),
        )
        best = ((text, next((x for n in names if (x := number(numbers, n)) is not None), None)) for text, names in rows)
        if texts := [text.format(x) for text, x in best if x is not None]:
            return ": " + ", ".join(texts)
    return " shows in this log"
