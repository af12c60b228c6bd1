"""`verdict`: all findings in one word and one or two sentences."""

from __future__ import annotations

from collections.abc import Sequence

from offdrift.judge.context import Row
from offdrift.judge.findings import Finding
from offdrift.judge.kl_choice import kl_metrics
from offdrift.judge.window import number

URGENCY = ("stop", "act", "watch", "info")


def verdict(findings: Sequence[Finding], numbers: Row | None = None, *, missing: Sequence[str] = ()) -> dict[str, str]:
    """The level, "ok", "watch", "act" or "stop", and what to tell a person.

    The level is that of the most urgent finding. The text tells it, and the one to repair first: a
    reward that collapsed is urgent, and is mended by its cause.

    Args:
        numbers: metrics of the run; named where nothing is wrong.
        missing: sentences on what these findings have not seen; the first stands before the rest.

    Example:
        >>> verdict([], {"mismatch/pearson": 0.9995, "mismatch/k1": 0.001})["text"]
        'No drift that matters: Pearson correlation 0.9995, KL 0.001 nat per token.'
    """
    told = [f for f in findings if f.severity != "info"]
    if not told:
        said = f"No drift that matters{_agreement(numbers or {})}."
        return {"level": "ok", "text": " ".join([*missing[:1], said])}
    first, urgent = told[0], min(told, key=lambda f: URGENCY.index(f.severity))
    level = urgent.severity
    lead = "" if urgent.severity == first.severity else f"{urgent.symptom} Repair first: "
    others = len(told) - (2 if lead else 1)
    more = f" {others} more finding{'s' * (others > 1)}." if others else ""
    return {"level": level, "text": " ".join([*missing[:1], f"{lead}{first.symptom} {first.fix}{more}"])}  # fmt: skip


def _agreement(numbers: Row) -> str:
    for on in ("mismatch", "full", "staleness"):
        shown = (
            ("Pearson correlation {:.4f}", (f"{on}/pearson",)),
            ("KL {:.4g} nat per token", kl_metrics(on, number(numbers, f"{on}/ratio_mean_z"))),
            ("chi2 {:.3g}", (f"{on}/chi2_token",)),
        )
        known = ((text, [number(numbers, name) for name in names]) for text, names in shown)
        found = [
            text.format(next(x for x in values if x is not None))
            for text, values in known
            if any(x is not None for x in values)
        ]
        if found:
            return ": " + ", ".join(found)
    return " shows in this log"
